"""Every part of a sum passes `Client.added` once, where transports between machines mask it;
nothing reads a part."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ekiden import run
from ekiden.core.base.settings import Training
from ekiden.core.engine.client import Client
from ekiden.core.training.gram import Sums
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.result import Result
from tests.core.base.test_sums import gram
from tests.methods.gram_runs import silos
from tests.methods.test_fedgram import METHOD, bits, go

Part = Any
CLIENTS = 5


def data() -> Any:
    return silos(torch.split(torch.arange(60, 300), 60))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who added a part, each time."""
    seen: list[str] = []
    added = Client.added

    def noted(self: Client, before: Part | None, own: Part, *more: Any) -> Part:
        seen.append(self.name)
        return added(self, before, own, *more)

    monkeypatch.setattr(Client, "added", noted)
    return seen


CASES: dict[str, Callable[[], Result]] = {
    "chain": lambda: go(data()),
    "star": lambda: go(data(), replace(METHOD, topology="star")),
    "closing lap": lambda: run(
        with_lap(FedSeq(epochs=1)), data(), Tiny, training=Training(batch_size=16)
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_part_passes_the_seam_once(case: str, parts: list[str]) -> None:
    assert CASES[case]().weights is not None
    assert sorted(parts) == [f"client-{i}" for i in range(CLIENTS)]


def test_masks_that_cancel_change_what_is_handed_on_and_not_the_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each client but the last adds a mask, and each but the first removes the mask of the client
    before it."""
    handed: dict[str, list[Sums]] = {"plain": [], "masked": []}
    added = Client.added

    def masks(name: str, like: Sums) -> Sums:
        number = int(name.removeprefix("client-"))
        if number == CLIENTS - 1:
            return Sums(
                torch.zeros_like(gram(like)),
                torch.zeros_like(like.classes),
                torch.zeros_like(like.counts),
            )
        draw = torch.Generator().manual_seed(number)
        triangle, classes, counts = (
            torch.randint(1, 10**6, t.shape, generator=draw, dtype=t.dtype)
            for t in (gram(like), like.classes, like.counts)
        )
        return Sums(triangle, classes, counts)

    def masked(self: Client, before: Sums | None, own: Sums, *more: Any) -> Sums:
        total = added(self, before, own, *more).plus(masks(self.name, own))
        if self.name != "client-0":
            before = masks(f"client-{int(self.name.removeprefix('client-')) - 1}", own)
            total = Sums(
                gram(total) - gram(before),
                total.classes - before.classes,
                total.counts - before.counts,
            )
        handed["masked"].append(total)
        return total

    def plain(self: Client, before: Sums | None, own: Sums, *more: Any) -> Sums:
        handed["plain"].append(added(self, before, own, *more))
        return handed["plain"][-1]

    results = []
    for function in (plain, masked):
        monkeypatch.setattr(Client, "added", function)
        results.append(bits(go(data())))
    assert results[0] == results[1]
    *way, last = zip(handed["plain"], handed["masked"], strict=True)
    assert len(way) == CLIENTS - 1
    for one, other in way:
        assert not bool((gram(one) == gram(other)).any())
        assert not bool((one.counts == other.counts).any())
    assert torch.equal(gram(last[0]), gram(last[1]))
