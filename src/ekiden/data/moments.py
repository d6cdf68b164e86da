"""Count, mean and spread of a column, added up over silos without loss of digits."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import sqrt

import numpy as np

from ekiden.base.errors import UserError
from ekiden.data.tables import Numbers

LARGEST = 1e140
"""a number whose square can still be added up in float64"""


@dataclass(frozen=True)
class ColumnMoments:
    """Count, mean, and sum of squared deviations from the mean, of the values of a column."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(values: Numbers, what: str) -> "ColumnMoments":
        """Return the moments of (n,) float64 values."""
        low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
        if max(-low, high) > LARGEST:
            raise UserError(f"{what} holds {low if -low > high else high:g}: no number may be above {LARGEST:g}")
        if low == high:
            return ColumnMoments(len(values), low)
        mean = float(values.mean())
        mean += float((values - mean).mean())
        apart = values - mean
        return ColumnMoments(len(values), mean, float(np.square(apart).sum() - apart.sum() ** 2 / len(values)))

    @staticmethod
    def together(parts: Sequence["ColumnMoments"]) -> "ColumnMoments":
        """Return the moments of all values, by the formula of Chan, Golub and LeVeque (1979) for any number of parts.

        It is computed in rational numbers and rounded once: the same bits in any order of the parts, on any machine.
        """
        told = [part for part in parts if part.count]
        count = sum(part.count for part in told)
        if not count:
            return ColumnMoments()
        mean = sum((part.count * Fraction(part.mean) for part in told), Fraction()) / count
        squares = (Fraction(part.squares) + part.count * (Fraction(part.mean) - mean) ** 2 for part in told)
        return ColumnMoments(count, float(mean), float(sum(squares, Fraction())))

    @property
    def deviation(self) -> float:
        """Return the standard deviation; 0 if the values differ by rounding errors only, or there are none."""
        std = sqrt(self.squares / self.count) if self.count else 0.0
        return std if std > 2 * float(np.finfo(np.float64).eps) * abs(self.mean) else 0.0
