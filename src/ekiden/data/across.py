"""Compare what silos report about themselves: spellings of names, units of columns."""

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from math import log10
from statistics import median
from typing import Protocol

from ekiden.base.errors import DataWarning, UserError
from ekiden.data.raw import natural

_FACTOR = 5.0  # times as large, in mean and in deviation: another unit
_ALIKE = 0.3  # difference of the two factors' decimal logarithms
_FAR = 8.0  # deviations between means
_ROWS = 10  # values from which a silo's moments are compared
_SHOWN = 5


class Moments(Protocol):
    """What a silo tells about the values of a column."""

    @property
    def count(self) -> int:
        """Number of values."""
        ...

    @property
    def mean(self) -> float:
        """Their mean."""
        ...

    @property
    def deviation(self) -> float:
        """Their standard deviation."""
        ...


def fold(name: str) -> str:
    """Return a name without case and blanks."""
    return "".join(name.split()).casefold()


def spellings(names: Mapping[str, Mapping[str, int]]) -> list[list[tuple[str, list[str]]]]:
    """Return the names that are equal up to case and blanks.

    Args:
        names: for each silo, its names and how many rows have each.

    Returns:
        For each name that is written in several ways, the spellings, the commonest first, each with its silos.
    """
    rows: Counter[str] = Counter()
    silos: dict[str, list[str]] = {}
    for silo, found in names.items():
        rows.update(found)
        for name in found:
            silos.setdefault(name, []).append(silo)
    alike: dict[str, list[str]] = {}
    for name in silos:
        alike.setdefault(fold(name), []).append(name)
    return [
        [(name, silos[name]) for name in sorted(each, key=lambda n: (-rows[n], natural(n)))]
        for each in alike.values()
        if len(each) > 1
    ]


def refuse_spellings(names: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """Refuse names that are equal up to case and blanks.

    Args:
        names: for each column, and each silo, its names and how many rows have each.
    """
    found = [(column, ways) for column, each in names.items() for ways in spellings(each)]
    if not found:
        return
    shown = []
    for column, ways in found[:_SHOWN]:
        written = " and ".join(f"{name!r} ({_silos(silos)})" for name, silos in ways)
        shown.append(f"{column} has {written}")
    more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise UserError(
        f"{'; '.join(shown)}{more}: names that differ in case or blanks only. Take them as one by --spelling merge, or "
        "as different by --spelling keep"
    )


def merging(names: Mapping[str, Mapping[str, int]], known: Sequence[str] = ()) -> dict[str, str]:
    """Return the spelling to use for each name that is written in another way: a known one, or else the commonest."""
    wanted = {fold(name): name for name in reversed(known)}
    rows: Counter[str] = Counter()
    for found in names.values():
        rows.update(found)
    for name in sorted(rows, key=lambda n: (-rows[n], natural(n))):
        wanted.setdefault(fold(name), name)
    return {name: wanted[fold(name)] for name in rows if wanted[fold(name)] != name and name not in known}


def check_units(silos: Mapping[str, Mapping[str, Moments]]) -> None:
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


def _units(column: str, silos: Mapping[str, Moments]) -> list[str]:
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


def _apart(here: Moments, mean: float, spread: float) -> str:
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


def _silos(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
