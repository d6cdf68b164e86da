"""What a method declares about itself, and names that tasks and fields cannot have."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ekiden import FederatedData, Hardware, UserError, run
from ekiden.authoring import Client, Method, Traits, Weights, on_client
from ekiden.cli.app import call
from ekiden.core.engine.method import INITIAL, State
from ekiden.core.engine.wire import Ref
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import METHODS, FedSeq

RESERVED = sorted(name for name in dir(Method) if not name.startswith("_"))


def task_called(name: str) -> Any:
    def task(self: Any, client: Client, model: Weights) -> Weights:
        return client.fit(model, epochs=1)

    task.__name__ = name
    return on_client(task)


@pytest.mark.parametrize("name", RESERVED)
def test_a_task_cannot_have_a_name_of_the_contract(name: str) -> None:
    with pytest.raises(
        UserError, match=f"Mine has a task called {name}, which has a meaning in Method: rename it"
    ):
        type("Mine", (FedSeq,), {name: on_client(lambda self, client: 0)})


@pytest.mark.parametrize("name", RESERVED)
def test_a_field_cannot_have_a_name_of_the_contract(name: str) -> None:
    with pytest.raises(
        UserError, match=f"Mine has a field called {name}, which has a meaning in Method: rename it"
    ):
        make_dataclass("Mine", [(name, int, 1)], bases=(FedSeq,), frozen=True)


def test_a_task_cannot_have_the_name_of_a_field() -> None:
    with pytest.raises(
        UserError, match="Mine has a task and a field that are both called epochs: rename one"
    ):
        type("Mine", (FedSeq,), {"epochs": on_client(lambda self, client: 0)})
    with pytest.raises(UserError, match="both called mine"):
        type(
            "Mine",
            (FedSeq,),
            {"mine": on_client(lambda self, client: 0), "__annotations__": {"mine": int}},
        )


@pytest.mark.parametrize("name", ["later", "renamed", "settings", *Traits.__dataclass_fields__])
def test_any_other_name_does_nothing_in_silence(name: str, blobs: FederatedData) -> None:
    """Also that of a trait, which is declared in `traits` alone."""
    if name in RESERVED:
        return

    class Mine(FedSeq):
        def run(self, fed: Any, s: Any) -> Any:
            while s.step < len(fed.clients):
                model: Ref[Weights] = fed.call(getattr(self, name), fed.clients[s.step], s.model)
                s = s.next(model=model)
                yield s

    setattr(Mine, name, task_called(name))
    mine, hardware = dataclass(frozen=True)(Mine), Hardware(threads=1)
    found = run(mine(epochs=1), blobs, Tiny, hardware=hardware)
    assert found.metrics == run(FedSeq(epochs=1), blobs, Tiny, hardware=hardware).metrics


def test_a_class_says_its_traits_and_inherits_them() -> None:
    class Mine(FedSeq):
        traits: ClassVar[Traits] = Traits(pools_data=True)

    assert FedSeq.traits == Traits(skips=True, averages=False)
    assert (Mine.traits.pools_data, Mine.traits.skips) == (True, False)
    assert Method.traits == Traits()
    assert all(isinstance(kind.traits, Traits) for kind in METHODS)


FILE = """
from dataclasses import dataclass

from ekiden.authoring import Client, Weights, on_client
from ekiden.methods import FedSeq


@dataclass(frozen=True)
class Mine(FedSeq):
    @on_client
    def steps(self, client: Client, model: Weights) -> Weights:
        return model
"""


def test_a_user_s_own_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    with pytest.raises(
        UserError, match="Mine has a task called steps, which has a meaning in Method"
    ) as told:
        call(["run", "mine.py:Mine", "--data", "digits"])
    assert "\n" not in str(told.value)
    assert not Path("runs").exists()


@dataclass(frozen=True)
class Counting(State):
    """A state of its own."""

    number: int = 0


@pytest.mark.parametrize(("annotation", "wanted"), [(Counting, Counting), (Any, State)])
def test_the_first_state_is_what_run_takes(annotation: Any, wanted: type[State]) -> None:
    def run(self: Any, fed: Any, s: Any) -> Any:
        yield s

    run.__annotations__["s"] = annotation
    mine: Any = type("Mine", (FedSeq,), {"run": run})
    other: Any = type("Other", (mine,), {"result_network": lambda self, network, clients: network})
    assert mine().start() == wanted(model=INITIAL)
    # a model that does not fit the result's network is not a result
    assert other().start() == wanted(model=None)
