"""Samples without and with a label in the order of their scores, from which areas and precisions
follow.
"""

from dataclasses import dataclass
from math import nan
from typing import Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_POINTS = (
    8  # within a bin, at which the precision is taken: more change it by less than the bin does
)


@dataclass(frozen=True)
class Ranked:
    """Samples by their score, ascending: those with one score each, or those in one bin of
    scores.
    """

    low: Floats  # (m,) samples without the label
    high: Floats  # (m,) samples with it
    scores: Floats  # (m,) their score, or a probability within the bin
    bounds: Floats  # (m + 1,) probabilities between which they lie
    exact: bool = False  # whether these are scores and not bins

    @classmethod
    def of(cls, p: Floats, there: NDArray[np.bool_]) -> Self:
        """Return samples with scores p (n,), `there` (n,) if they have the label; a score that is
        NaN counts as 0.
        """
        scores, place = np.unique(np.nan_to_num(p), return_inverse=True)
        low = np.bincount(place, ~there, len(scores)).astype(float)
        high = np.bincount(place, there, len(scores)).astype(float)
        between = (scores[1:] + scores[:-1]) / 2
        # of neighbours among floats there is none
        between = np.where(between > scores[:-1], between, scores[1:])
        return cls(low, high, scores, np.concatenate([[0.0], between, [1.0]]), exact=True)

    def mirrored(self) -> Self:
        """Return the samples without and with the other one of two classes."""
        low = self.high[::-1]
        high = self.low[::-1]
        return type(self)(low, high, 1 - self.scores[::-1], 1 - self.bounds[::-1], self.exact)

    @property
    def both(self) -> bool:
        """Whether there are samples of both kinds."""
        return bool(self.low.sum()) and bool(self.high.sum())

    def auroc(self) -> tuple[float, float]:
        """Return the area under the ROC curve, and how far it can be off.

        The area counts pairs of samples; pairs of equal scores count half. Only pairs within a bin
        can be in another order than the bins say.
        """
        if not self.both:
            return nan, nan
        pairs = self.low.sum() * self.high.sum()
        within = float(self.low @ self.high) / 2
        area = float(self.high @ below(self.low) + within) / pairs
        return area, 0.0 if self.exact else within / pairs

    def average_precision(self) -> tuple[float, float]:
        """Return the average precision, and how far it can be off.

        It is Σ over samples with the label, from the highest score on, of the precision down to
        this score. Within a bin these samples are taken to lie evenly among the others.
        """
        if not self.high.sum():
            return nan, nan
        low = self.low[::-1]
        high = self.high[::-1]
        hits = high.cumsum() - high
        wrong = low.cumsum() - low
        total = float(high.sum())
        with np.errstate(invalid="ignore", divide="ignore"):
            tied = np.nan_to_num(high * (hits + high) / (hits + high + wrong + low))
            if self.exact:
                return float(tied.sum()) / total, 0.0
            points = np.minimum(high, _POINTS)
            at = np.arange(_POINTS)[:, None]
            # all samples of a bin that has up to 8, otherwise 8 among them
            place = (at + 0.5) / points * high + 0.5
            precision = (hits + place) / (hits + place + wrong + place * low / (high + 1))
            found = high * np.where(at < points, precision, 0).sum(0) / points
            best = high * (hits + high) / (hits + high + wrong)
            worst = np.minimum(tied, high * (hits + 1) / (hits + 1 + wrong + low))
        value = float(np.nan_to_num(found).sum()) / total
        most = float(np.nan_to_num(best).sum()) / total
        least = float(np.nan_to_num(worst).sum()) / total
        return value, max(most - value, value - least)

    def brier(self) -> tuple[float, float]:
        """Return Σ (p - y)², and how far it can be off."""

        def error(p: Floats) -> Floats:
            return np.asarray(self.low * p**2 + self.high * (1 - p) ** 2)

        found = error(self.scores)
        if self.exact:
            return float(found.sum()), 0.0
        ends = np.abs(np.stack([error(self.bounds[:-1]), error(self.bounds[1:])]) - found)
        return float(found.sum()), float(ends.max(0).sum())


def below(counts: Floats) -> Floats:
    """Return how many have a lower score."""
    return np.asarray(counts.cumsum() - counts)
