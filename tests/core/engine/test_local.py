"""What worker processes return."""

import os
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from multiprocessing.resource_sharer import DupFd
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ekiden import FederatedData, federate, run
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.local import Answer, Processes, SharedValue, _Workers
from ekiden.core.engine.method import Method, State, on_client
from ekiden.core.engine.worker import Job, Outcome, Setup
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, Local


@dataclass(frozen=True)
class Share(Method):
    """Its task promises a float."""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        yield s.next()

    @on_client
    def share(self, client: Client) -> float:
        return 0.5

    def steps(self, clients: int) -> int:
        return 1

    def cost(self, clients: int, model: int) -> int:
        return 0


def given(sent: DupFd | bytes, setup: Setup) -> Future[Outcome]:
    """What is passed on if a process returned this."""
    pool, done = Processes(setup, {}, 1), Future[Outcome]()
    running: Future[Answer] = Future()
    running.add_done_callback(
        lambda finished: pool._read(Job(0, 0, "a", "share", ()), finished, done)
    )
    running.set_result((sent, Work()))
    pool.close()
    return done


@pytest.mark.parametrize(("value", "private"), [(1, None), (0.5, 1)], ids=["value", "private"])
def test_a_value_of_another_type_than_announced_ends_the_run(
    value: object, private: object
) -> None:
    """It did not arrive at all, and the run waited forever."""
    setup = Setup(Share(), Tiny, None)  # type: ignore[arg-type]
    assert given(wire.encode((0.5, None, None)), setup).result(timeout=0).value == 0.5
    with pytest.raises(
        UserError,
        match=r"step 1, a, share of share: payload does not hold .* types that the method",
    ):
        given(wire.encode((value, private, None)), setup).result(timeout=0)


SHARED = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="this system has no such memory"
)


def hold(end: Connection) -> None:
    """Hold an answer until the other side is gone."""
    shared = SharedValue((0.5, None, None))
    end.send((DupFd(shared.handle), os.readlink(shared.path)))
    end.recv()


@SHARED
def test_the_answer_of_a_killed_process_ends_the_run_and_leaves_nothing_behind() -> None:
    """A killed process cannot tidy up, so its memory has no name that would stay."""
    setup = Setup(Share(), Tiny, None)  # type: ignore[arg-type]
    here, there = Pipe()
    process = get_context("spawn").Process(target=hold, args=(there,))
    process.start()
    sent, name = here.recv()
    assert name.startswith("/memfd:")
    open_files = len(os.listdir("/proc/self/fd"))
    process.kill()
    process.join()
    with pytest.raises(UserError, match="a worker process died"):
        given(sent, setup).result(timeout=0)
    assert len(os.listdir("/proc/self/fd")) <= open_files


@SHARED
def test_answers_are_given_back() -> None:
    setup = Setup(Share(), Tiny, None)  # type: ignore[arg-type]
    counts = []
    for _ in range(12):
        shared = SharedValue((0.5, None, None))
        assert given(DupFd(shared.handle), setup).result(timeout=0).value == 0.5
        del shared
        counts.append(len(os.listdir("/proc/self/fd")))
    # what hands them on is started by the first one, and closes its end in its own time
    assert counts[-1] - counts[0] < 6


@SHARED
def test_arguments_that_clients_of_a_step_share_are_written_once() -> None:
    pool = Processes(Setup(Share(), Tiny, None), {}, 1)  # type: ignore[arg-type]
    model = Weights(torch.ones(3), torch.ones(0), torch.ones(0, dtype=torch.int64))
    other = Weights(model.params, model.buffers, model.counters)

    def sent(step: int, client: str, *args: Any) -> SharedValue | bytes:
        return pool._given(Job(step, 0, client, "share", args))

    alone, *shared = (sent(0, client, model, 3) for client in "abc")
    assert isinstance(alone, bytes)  # nobody knows yet that it is shared
    assert isinstance(shared[0], SharedValue)
    assert shared[0] is shared[1]
    assert shared[0].path.read_bytes() == alone
    assert sent(0, "d", other, 3) == alone  # it may hold other values by now
    assert isinstance(sent(0, "d", other, 3), SharedValue)
    assert sent(1, "a", other, 3) == alone
    path = shared[0].path
    assert path.exists()
    shared.clear()
    assert not path.exists()
    pool.close()


def network(value: str) -> nn.Module:
    """Refuses an environment that has another value."""
    assert os.environ["EKIDEN_TRIED"] == value
    return Tiny()


def test_processes_have_the_environment_of_their_run(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that they are forks of began in an earlier one."""
    for value in "ab":
        monkeypatch.setenv("EKIDEN_TRIED", value)
        run(FedAvg(rounds=1, epochs=1), blobs, partial(network, value), workers=2)


@pytest.mark.parametrize("inside", ["a lambda", "a class", "a module with a lambda"])
def test_a_network_that_processes_cannot_read_is_one_line(
    inside: str, blobs: FederatedData
) -> None:
    """Before any process is started."""

    class Own(Tiny):
        pass

    module: Any = Tiny()
    module.own = lambda: None
    made: dict[str, Any] = {
        "a lambda": lambda: nn.Linear(4, 3),
        "a class": Own,
        "a module with a lambda": module,
    }
    with pytest.raises(
        UserError, match=r"at the top of a file, not as a lambda, .* or use workers=1"
    ) as caught:
        run(FedAvg(rounds=1, epochs=1), blobs, made[inside], workers=2)
    assert "\n" not in str(caught.value)


def test_a_process_that_cannot_find_a_class_is_told_from_one_that_was_killed() -> None:
    """Python ends with 1 after an error, and with -9 if memory ran out."""
    for code, line in ((1, "cannot read the network"), (-9, "out of memory")):
        workers = _Workers()
        process = SimpleNamespace(
            sentinel=os.open(os.devnull, os.O_RDONLY), exitcode=code, join=lambda seconds: None
        )
        workers.made = [process]  # type: ignore[list-item]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ekiden.core.engine.local.wait", lambda sentinels, timeout: sentinels)
            assert line in str(workers.death())
        os.close(process.sentinel)


def test_tasks_begin_in_the_order_of_their_calls() -> None:
    samples = torch.arange(4.0).repeat(4, 1).T
    data = federate([(samples, torch.tensor([0, 1, 0, 1]))] * 8, val_fraction=0.0)
    seen: list[str] = []

    def watch(client: str, epoch: int, epochs: int) -> None:
        seen.append(client)

    run(Local(rounds=1, epochs=1), data, "linear", watch=watch, quiet=True)
    assert seen == list(data.sizes)
