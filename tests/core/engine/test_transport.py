"""References to values, and values in place of them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ekiden.core.engine.method import INITIAL
from ekiden.core.engine.transport import Transfer, refs, resolve
from ekiden.core.engine.wire import SERVER, Ref
from ekiden.core.training.weights import Weights
from tests.core.engine.fakes import CLIENTS, federation, task, weights


class Pair(NamedTuple):
    model: Ref[Weights] | Weights
    steps: int


@dataclass(frozen=True)
class Parcel:
    model: Ref[Weights] | Weights
    share: float = 0.5


def test_refs_are_found_in_lists_tuples_dicts_and_records() -> None:
    owned: dict[Ref[Any], Any] = {Ref(name, "k"): weights(i) for i, name in enumerate(CLIENTS)}
    a, b, c, d = owned
    value = [(a, {"x": b}), Parcel(c), Pair(d, 3), INITIAL, 7, "text", weights(1)]
    assert list(refs(value)) == [a, b, c, d, INITIAL]
    fed, _, ledger = federation(dict(owned))
    fed.call(task, "b", value[:4])
    assert [(t.source, t.bytes) for t in ledger[:3]] == [("a", 12), ("c", 20), ("d", 24)]
    assert ledger[3:] == [
        Transfer(0, SERVER, "b", "task", 1 + 8 + 8)
    ]  # the key "x", the share, the steps


def test_resolve_puts_values_in_place_of_refs_and_leaves_the_rest() -> None:
    known = weights(1)
    value = [
        (Ref("a", "k"), {"x": Ref("a", "k")}),
        Parcel(Ref("a", "k")),
        Pair(Ref("a", "k"), 3),
        7,
        known,
    ]
    got = resolve(value, lambda ref: f"{ref.owner}/{ref.key}")
    assert got == [("a/k", {"x": "a/k"}), Parcel("a/k"), Pair("a/k", 3), 7, known]  # type: ignore[arg-type]
    assert type(got[2]) is Pair
    assert got[4] is known
