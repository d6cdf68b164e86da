"""FedGram: what clients hand on, and where a run stands."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ekiden.authoring import Ref, State, Weights
from ekiden.base.sums import AnySums
from ekiden.methods.exact.blocks.fixed_features import Settled
from ekiden.models.patches import PatchSums


class Handoff(NamedTuple):
    """What a client hands to the next one.

    Attributes:
        settled: what the first client decided about the features.
        sums: over the samples of all clients so far.
    """

    settled: Settled
    sums: AnySums


class Common(NamedTuple):
    """What a client needs for a personal head: the head of all, for standardised features; float32.

    Attributes:
        settled: what the first client decided about the features.
        mean: (D,) μ of the features of all clients.
        scale: (D,) 1/σ, or 0.
        weight: (K, D).
        bias: (K,).
    """

    settled: Settled
    mean: Tensor
    scale: Tensor
    weight: Tensor
    bias: Tensor


class PatchMoments(NamedTuple):
    """Second moments of all clients' patches of each size."""

    parts: tuple[PatchSums, ...]

    def plus(self, other: "PatchMoments") -> "PatchMoments":
        """Return the moments of the patches of both."""
        return PatchMoments(tuple(a.plus(b) for a, b in zip(self.parts, other.parts, strict=True)))


@dataclass(frozen=True)
class Summing(State):
    """The state with what has been added up; there is no model before the last step."""

    model: Ref[Weights] | Weights | None = None
    moments: Ref[PatchMoments] | PatchMoments | None = None
    totals: Ref[Handoff] | Handoff | None = None
    settled: Ref[Settled] | None = None
