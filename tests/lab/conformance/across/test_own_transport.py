"""A user's own transport: the example runs unchanged, and what breaks the contract is
found."""

import sys
import threading
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.base.errors import UserError
from ekiden.lab.conformance import check_transport
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, MetaFed
from ekiden.transports import Start, Transport
from tests.warm import WarmProcess

EXAMPLE = Path(__file__).parents[4] / "examples" / "own_transport" / "run.py"
FAST: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The class of the example."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "pipes.py").write_text(EXAMPLE.read_text(encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield import_module("pipes").Pipes
    sys.modules.pop("pipes")


def test_the_example_keeps_the_contract(pipes: Any) -> None:
    before = threading.active_count()
    findings = check_transport(pipes)
    assert [finding.broken for finding in findings] == ["", "", ""]
    assert threading.active_count() <= before + 4, (
        "clients end with their run, those of the last one may be about to"
    )


def test_a_run_on_the_example_is_that_of_one_process(pipes: Any, blobs: FederatedData) -> None:
    crossed: list[int] = []

    class Counting(pipes):  # type: ignore[misc]
        def value(self, ref: Any) -> Any:
            crossed.append(1)
            return super().value(ref)

    method = MetaFed(epochs=1, warmup=1)
    here, there = (
        run(method, blobs, Tiny, **FAST),
        run(method, blobs, Tiny, transport=Counting, **FAST),
    )
    assert crossed, "it is this transport that ran"
    assert (here.metrics, here.ledger) == (there.metrics, there.ledger)
    assert len(there.personal) == len(blobs.clients)
    for a, b in zip(here.personal, there.personal, strict=True):
        assert torch.equal(a.params, b.params)
        assert torch.equal(a.buffers, b.buffers)


def changed(name: str, behaviour: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda kind: type("Broken", (kind,), {name: behaviour})


def rounding(self: Any, ref: Any) -> Any:
    value = super(type(self), self).value(ref)
    return (
        value.with_params(value.params.half().float()) if hasattr(value, "with_params") else value
    )


def settling_early(self: Any, step: int, live: frozenset[Any]) -> Any:
    work = super(type(self), self).commit(step, live)
    self.settle()
    return work


@pytest.mark.slow
def test_its_clients_can_be_processes(
    pipes: Any, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipes.Thread", WarmProcess)
    there = run(FedSeq(epochs=1), blobs, Tiny, transport=pipes, **FAST)
    here = run(FedSeq(epochs=1), blobs, Tiny, **FAST)
    assert (here.metrics, here.ledger) == (there.metrics, there.ledger)


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # a client has lost a value
@pytest.mark.parametrize(
    ("broken", "lines"),
    [
        pytest.param(changed("value", rounding), [True, True, True], marks=pytest.mark.slow),
        pytest.param(
            changed("written", lambda self: {}), [False, True, True], marks=pytest.mark.slow
        ),
        (changed("commit", settling_early), [False, False, True]),
    ],
    ids=["values lose bits", "private state is forgotten", "the state before is dropped too early"],
)
def test_what_breaks_the_contract_is_found(
    pipes: Any, broken: Callable[[Any], Any], lines: list[bool]
) -> None:
    findings = check_transport(broken(pipes))
    assert [bool(finding.broken) for finding in findings] == lines


def test_a_transport_decides_where_clients_run(blobs: FederatedData, pipes: Any) -> None:
    wrong: list[dict[str, Any]] = [
        {"workers": 2},
        {"processes": True},
        {"absent": lambda step, client: True},
        {"watch": lambda client, epoch, epochs: None},
    ]
    for options in wrong:
        with pytest.raises(UserError, match="leave out workers, processes, absent and watch"):
            run(FedSeq(epochs=1), blobs, Tiny, transport=pipes, **FAST, **options)


def test_its_own_failure_keeps_the_last_good_state(
    blobs: FederatedData, pipes: Any, tmp_path: Path
) -> None:
    class Breaking(pipes):  # type: ignore[misc]
        def submit(self, request: Any) -> None:
            if request.step == 2:
                raise UserError("the line is dead")
            super().submit(request)

    folder = tmp_path / "run"
    with pytest.raises(UserError, match="the line is dead"):
        run(FedSeq(epochs=1), blobs, Tiny, folder=folder, transport=Breaking, **FAST)
    assert (folder / "model.safetensors").exists()
    later = run(FedSeq(epochs=1), blobs, Tiny, folder=folder, transport=pipes, **FAST)
    assert later.metrics == run(FedSeq(epochs=1), blobs, Tiny, **FAST).metrics


def test_what_it_must_have(blobs: FederatedData) -> None:
    class Lacking(Transport):
        def __init__(self, start: Start) -> None: ...

    with pytest.raises(TypeError, match="abstract method"):
        run(FedSeq(epochs=1), blobs, Tiny, transport=Lacking, **FAST)
