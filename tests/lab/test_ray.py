"""Clients on Ray: the bits of one process, also after an actor or a node has died.

The fast tests have a stand-in for Ray, which does each call at once in this process. The slow ones
start Ray."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ekiden
from ekiden import FederatedData, Hardware, Training, run
from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.local import Start
from ekiden.core.engine.method import Method
from ekiden.lab import ray as module
from ekiden.lab.conformance import check_transport
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SCAFFOLD, FedAvg, FedELMY, FedGram, FedSeq
from ekiden.transports import Interrupted, OnRay

FAST: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}
METHODS: tuple[Method, ...] = (
    FedELMY(models=2, epochs=1, warmup=1),
    FedAvg(rounds=2, epochs=1),
    FedGram(),
    SCAFFOLD(rounds=2, epochs=1),
)


class RayError(Exception):
    """What Ray raises if an actor died."""


class RayTaskError(RayError):
    """What Ray raises if a task failed."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause


class Actor:
    """Does calls at once; dead after `dies` calls of tasks, if that is a number."""

    dies: int | None = None

    def __init__(self, home: Any) -> None:
        self._home, self._dead = home, False

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            if name == "task" and Actor.dies is not None:
                Actor.dies -= 1
                self._dead |= Actor.dies < 0
                Actor.dies = None if self._dead else Actor.dies
            if self._dead:
                return lambda: (_ for _ in ()).throw(RayError())
            try:
                value = getattr(self._home, name)(
                    *(arg() if callable(arg) and name == "task" else arg for arg in args)
                )
            except Exception as error:
                failed = RayTaskError(error)
                return lambda: (_ for _ in ()).throw(failed)
            return lambda: value

        return SimpleNamespace(remote=remote)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for Ray."""

    def made(kind: Any) -> Any:
        return SimpleNamespace(
            options=lambda **options: SimpleNamespace(remote=lambda: Actor(kind()))
        )

    fake = SimpleNamespace(
        is_initialized=lambda: True,
        cluster_resources=lambda: {"CPU": 2.0},
        get_runtime_context=lambda: SimpleNamespace(gcs_address="here:1"),
        put=lambda value: value,
        get=lambda asked: asked(),
        remote=made,
        exceptions=SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError),
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(module, "require_extra", lambda *needed: None)
    monkeypatch.setattr(Actor, "dies", None)


def same(here: Any, there: Any) -> bool:
    return bool(
        torch.equal(here.weights.params, there.weights.params)
        and here.metrics == there.metrics
        and here.ledger == there.ledger
    )


@pytest.mark.parametrize("method", METHODS[1:3], ids=lambda method: method.title())
def test_clients_in_homes_give_the_bits_of_one_process(
    method: Method, at_once: None, blobs: FederatedData
) -> None:
    assert same(
        run(method, blobs, Tiny, **FAST), run(method, blobs, Tiny, transport=OnRay(), **FAST)
    )


def test_a_step_whose_home_dies_is_done_again(
    at_once: None, blobs: FederatedData, tmp_path: Path
) -> None:
    method = SCAFFOLD(rounds=2, epochs=1)
    Actor.dies = 6  # in the second round
    found = run(method, blobs, Tiny, folder=tmp_path / "run", transport=OnRay(), **FAST)
    assert Actor.dies is None, "it died"
    assert same(run(method, blobs, Tiny, **FAST), found)


def test_a_run_in_memory_says_that_it_needs_a_folder(at_once: None, blobs: FederatedData) -> None:
    Actor.dies = 2
    with pytest.raises(
        Interrupted, match=r"died .*: give the run a folder, so that it can continue"
    ):
        run(FedSeq(epochs=1), blobs, Tiny, transport=OnRay(), **FAST)


def test_homes_that_die_again_and_again_stop_the_run(
    at_once: None, blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: Any) -> Any:
        raise RayError

    monkeypatch.setattr(module.Home, "task", dies)
    with pytest.raises(Interrupted, match="twice in one step"):
        run(FedSeq(epochs=1), blobs, Tiny, folder=tmp_path / "run", transport=OnRay(), **FAST)


def test_an_error_of_a_task_is_that_error(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise UserError("the disk is full")

    monkeypatch.setattr(module.Home, "task", fails)
    with pytest.raises(UserError, match="the disk is full"):
        run(FedSeq(epochs=1), blobs, Tiny, transport=OnRay(), **FAST)


def test_a_node_that_does_not_see_the_run_folder_is_refused(
    at_once: None, blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = module.Home.begin
    monkeypatch.setattr(
        module.Home,
        "begin",
        lambda self, start, mark: begin(self, start, mark.with_name("elsewhere")),
    )
    with pytest.raises(
        UserError,
        match=r"does not see .*: put the run folder on a file system that all nodes share",
    ):
        run(FedSeq(epochs=1), blobs, Tiny, folder=tmp_path / "run", transport=OnRay(), **FAST)
    assert not list(tmp_path.rglob("*.tmp"))


def test_what_goes_through_ray_is_bytes_of_the_wire(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Any]()
    task = module.Home.task

    def watched(self: Any, *args: Any) -> Any:
        seen.extend([*args[4:5], *args[6:]])
        return task(self, *args)

    monkeypatch.setattr(module.Home, "task", watched)
    run(FedSeq(epochs=1), blobs, Tiny, transport=OnRay(), **FAST)
    assert len(seen) > len(blobs.clients), "values came with tasks"
    assert {type(one) for one in seen} == {bytes}


def test_a_model_for_many_clients_is_encoded_once_in_a_step(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = list[Any]()

    def kept(value: Any) -> Any:
        put.append(value)
        return value

    monkeypatch.setattr(sys.modules["ray"], "put", kept)
    method = FedAvg(rounds=2, epochs=1)
    there = run(method, blobs, Tiny, transport=OnRay(), **FAST)
    assert same(run(method, blobs, Tiny, **FAST), there)
    assert [type(one) for one in put] == [Start, bytes, bytes], (
        "once in each of two steps, for all clients"
    )
    assert all(
        wire.size(there.weights) < len(sent) < wire.size(there.weights) + 2000 for sent in put[1:]
    )


def test_a_wrong_number_of_homes_is_refused(at_once: None) -> None:
    with pytest.raises(UserError, match="homes is -1"):
        OnRay(homes=-1)


def test_homes_fit_the_gpus(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    make = OnRay(num_gpus=0.5)
    run(FedGram(), blobs, Tiny, transport=make, **FAST)
    assert len(make._homes) == 2
    for homes, gpus, fit in ((3, 0.5, 2), (2, 1, 1), (0, 2, 0)):
        with pytest.raises(UserError, match=rf"num_gpus={gpus} fits {fit} homes here, not"):
            run(FedGram(), blobs, Tiny, transport=OnRay(homes=homes, num_gpus=gpus), **FAST)


@pytest.mark.parametrize(
    ("address", "error"), [("", "Ray does not start here"), ("a:1", "no Ray cluster at")]
)
def test_a_cluster_that_does_not_answer_is_a_line(
    address: str, error: str, at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray raises a bare Exception if a node starts too slowly."""

    def fails(**settings: Any) -> None:
        raise Exception("The current node\ntimed out")

    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: False)
    monkeypatch.setattr(sys.modules["ray"], "init", fails, raising=False)
    with pytest.raises(UserError, match=rf"{error}.*The current node timed out"):
        run(FedSeq(epochs=1), blobs, Tiny, transport=OnRay(address), **FAST)


def test_another_cluster_than_the_connected_one_is_refused(
    at_once: None, blobs: FederatedData
) -> None:
    with pytest.raises(
        UserError, match="connected to the Ray cluster at here:1: leave out there:2"
    ):
        run(FedSeq(epochs=1), blobs, Tiny, transport=OnRay("there:2"), **FAST)


def test_ray_may_call_the_address_by_another_name(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(sys.modules["ray"], "is_initialized", lambda: bool(joined))
    monkeypatch.setattr(
        sys.modules["ray"], "init", lambda *, address, **more: joined.append(address), raising=False
    )
    make = OnRay("localhost:1")
    for _ in range(2):
        run(FedGram(), blobs, Tiny, transport=make, **FAST)
    assert joined == ["localhost:1"]


def test_why_homes_die_at_once_is_in_the_line(
    at_once: None, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*args: Any) -> Any:
        raise RayError(
            "The actor died:\n  File a.py\nModuleNotFoundError: No module named 'ekiden'\n"
        )

    monkeypatch.setattr(module.Home, "begin", dies)
    with pytest.raises(
        UserError, match=r"as they begin \(ModuleNotFoundError: No module named 'ekiden'\): install"
    ):
        run(FedGram(), blobs, Tiny, transport=OnRay(), **FAST)


@pytest.mark.parametrize(
    "words", [["run", "fedavg", "--on", "rya"], ["resume", "runs/gone", "--on", "flowers"]]
)
def test_an_unknown_place_is_refused(words: list[str]) -> None:
    with pytest.raises(UserError, match="unknown `--on`"):
        call(words)


@pytest.mark.slow
def test_the_command_line_runs_and_resumes_on_ray(
    at_once: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Actor.dies = 1000
    run_it = [
        "run",
        "fedavg",
        "--data",
        "digits",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--model",
        "mlp",
    ]
    call([*run_it, "--on", "ray"])
    assert Actor.dies == 1000 - 2, "its tasks ran there"
    call(["resume", "runs/fedavg-digits-seed0", "--on", "ray"])
    with pytest.raises(UserError, match="leave out workers"):
        call([*run_it, "--on", "ray", "--workers", "2"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine."""
    os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112  (its name)
    ray: Any = pytest.importorskip("ray", reason='needs ray: pip install "ekiden[ray]"')
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    found.add_node(num_cpus=1)
    ray.init(address=found.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.shutdown()


@pytest.mark.slow
def test_ray_keeps_the_contract_and_gives_the_bits_of_one_process(
    cluster: Any, blobs: FederatedData
) -> None:
    make = OnRay(homes=2)
    assert [finding.broken for finding in check_transport(make)] == ["", "", ""]
    for method in METHODS:
        assert same(
            run(method, blobs, Tiny, **FAST), run(method, blobs, Tiny, transport=make, **FAST)
        ), method.title()


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["actor", "node"])
def test_a_run_survives_the_death_of(
    dies: str, cluster: Any, blobs: FederatedData, tmp_path: Path
) -> None:
    import ray

    make, method = OnRay(homes=2), SCAFFOLD(rounds=3, epochs=1)
    node = cluster.add_node(num_cpus=1, resources={"victim": 1}) if dies == "node" else None
    if node:
        make._options |= {"resources": {"victim": 0.5}}
    lost = list[int]()

    def on_step(row: Any) -> None:
        if row["step"] == 1 and not lost:
            lost.append(1)
            if node:
                make._options.pop("resources")  # the next homes are on the nodes that are left
                cluster.remove_node(node, allow_graceful=False)
            else:
                ray.kill(make._homes[0])

    found = run(
        method, blobs, Tiny, folder=tmp_path / "run", transport=make, on_step=on_step, **FAST
    )
    assert lost
    assert len(ekiden.open_run(tmp_path / "run").metrics) == 3
    assert len((tmp_path / "run" / "attempts.jsonl").read_text().splitlines()) == 2, (
        "it began again once"
    )
    assert same(run(method, blobs, Tiny, **FAST), found)
