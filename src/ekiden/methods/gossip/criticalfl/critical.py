"""Critical learning periods: while gradient norms grow, what is missed cannot be made up later."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class CriticalPeriods:
    """The test of CriticalFL (KDD 2023, https://doi.org/10.1145/3580305.3599293).

    Attributes:
        delta: δ, relative growth of the windowed mean above which a period is critical.
        window: checks over which norms are averaged.
        forced: first checks that are critical in any case.
    """

    delta: float
    window: int
    forced: int

    def now(self, norms: Sequence[float]) -> bool:
        """Return whether the windowed mean of the norms has grown by more than δ since the previous check."""
        if len(norms) <= self.forced:
            return True
        now, before = (part[-self.window :] for part in (norms, norms[:-1]))
        if not before:
            return False
        last = sum(before) / len(before)
        return sum(now) / len(now) - last > self.delta * last


@dataclass(frozen=True)
class Squares:
    """Adds up squared gradient norms, and changes no gradient."""

    progress: dict[str, Tensor] = field(default_factory=lambda: {"sum": torch.zeros((), dtype=torch.float64)})

    @property
    def sum(self) -> float:
        """Return the sum over all batches so far."""
        return float(self.progress["sum"])

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add one batch."""
        self.progress["sum"].add_(grad.dot(grad).double().cpu())


def due(round: int, every: int) -> bool:
    """Return whether there is a check before `round`, which counts from 0.

    As in the authors' code: before every second round, or every `every`-th, but not before the first of all, when
    there are no norms yet.
    """
    return round > 0 and (round + 1) % every == 0


def resize(number: int, critical: bool, capped: bool, least: int, most: int) -> int:
    """Double the number in a critical period, unless the cap was reached before; halve it otherwise."""
    if critical:
        return number if capped else min(most, 2 * number)
    return max(least, number - max(number // 2, 1))
