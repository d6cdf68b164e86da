"""Where the run loop finds the models of a state."""

from typing import Any, NamedTuple, cast

from ekiden.core.engine.drive import models
from ekiden.core.engine.method import State
from ekiden.core.engine.transport import Transport
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights
from tests.methods.toys import weights


class Parcel(NamedTuple):
    note: str
    model: Weights


class Held:
    """Stands for a transport that holds these values."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def value(self, ref: Ref[Any]) -> Any:
        return self.values[ref.key]


A, B = weights(1.0), weights(2.0)
TRANSPORT = cast(Transport, Held(a=A, parcel=Parcel("three", B)))


def test_a_model_by_value_by_reference_and_inside_a_payload() -> None:
    a, parcel = Ref[Weights]("c", "a"), Ref[Parcel]("c", "parcel")
    assert models(State(model=A), TRANSPORT) == (A, [])
    assert models(State(model=a), TRANSPORT) == (A, [])
    assert models(State(model=parcel, personal=(parcel, A)), TRANSPORT) == (B, [B, A])


def test_no_model() -> None:
    assert models(State(model=None), TRANSPORT) == (None, [])
