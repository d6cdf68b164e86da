"""Compare the moments of columns that silos report: who measures in another unit?"""

import warnings
from collections.abc import Mapping
from math import log10
from statistics import median

from ekiden.base.errors import DataWarning
from ekiden.data.moments import ColumnMoments

_FACTOR = 5.0  # times as large, in mean and in deviation: another unit
_ALIKE = 0.3  # difference of the two factors' decimal logarithms
_FAR = 8.0  # deviations between means
_ROWS = 10  # values from which a silo's moments are compared
_SHOWN = 5


def check_units(silos: Mapping[str, Mapping[str, ColumnMoments]]) -> None:
    """Name silos whose columns are in another unit than the others'.

    Args:
        silos: for each silo, the moments of each column.

    Warns:
        DataWarning: a column of a silo is a factor of at least 5, or 8 standard deviations, away from the others'.
    """
    lines = []
    for column in next(iter(silos.values())):
        each = {silo: told[column] for silo, told in silos.items() if told[column].count >= _ROWS}
        lines += _units(column, each)
    if lines:
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        warnings.warn("; ".join(lines[:_SHOWN]) + more + ": check units", DataWarning, stacklevel=3)


def _units(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line for each silo that is far from the others."""
    if len(silos) < 2:
        return []
    mean, spread = median(m.mean for m in silos.values()), median(m.deviation for m in silos.values())
    if len(silos) == 2:
        (one, here), (other, there) = silos.items()
        apart = _apart(here, there.mean, there.deviation)
        means = f"means {here.mean:.4g} and {there.mean:.4g}"
        return [f"{column} of {one} and {other} differs by {apart} ({means})"] if apart else []
    found = {silo: _apart(here, mean, spread) for silo, here in silos.items()}
    return [
        f"{column} of {silo} differs from other silos by {apart} (mean {silos[silo].mean:.4g}, others' {mean:.4g})"
        for silo, apart in found.items()
        if apart
    ]


def _apart(here: ColumnMoments, mean: float, spread: float) -> str:
    """Return in words how far a silo is from this mean and standard deviation; empty if it is not."""
    if here.deviation and spread:
        factor = here.deviation / spread
        centred = max(abs(here.mean) / here.deviation, abs(mean) / spread) < 1
        same = here.mean * mean > 0 and abs(log10(here.mean / mean / factor)) < _ALIKE
        if max(factor, 1 / factor) >= _FACTOR and (centred or same):
            times = factor if centred else here.mean / mean
            return f"a factor of about {_round(max(times, 1 / times)):,}"
    far, widest = abs(here.mean - mean), max(here.deviation, spread)
    return f"{far / widest:,.0f} standard deviations" if widest and far > _FAR * widest else ""


def _round(times: float) -> int:
    """Return a factor with one digit, or a power of ten if that is near."""
    power = 10 ** round(log10(times))
    if abs(log10(times / power)) < 0.1:
        return int(power)
    digit = 10 ** int(log10(times))
    return int(round(times / digit) * digit)
