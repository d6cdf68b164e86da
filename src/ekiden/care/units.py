"""Find columns in another unit: by what silos tell, or hold, they have another mean and spread."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, pairwise
from math import floor, inf, log10, sqrt
from statistics import median
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ekiden.care.spelling import nothing_in_common, shortened
from ekiden.core.base.errors import listed, tell
from ekiden.readers.kinds import Inputs, Table
from ekiden.readers.kinds.tables import Numbers
from ekiden.readers.moments import ColumnMoments, ColumnSums, target

# times as large, in mean and in deviation: another unit
_FACTOR = 5.0
_NARROW = (
    3.0  # deviations between the mean and zero from which less tells another unit, such as pounds
)
# deviations between means of columns that may have changed places
_AWAY = 2.0
# values from which a silo's moments are compared
_ROWS = 10
# values from which nearly one value means something: a silo hides up to 9 others
_FLAT_ROWS = 20
# times the range of the other silos' means: silos that differ by themselves leave no such gap
_GAP = 1.5
# squared standard errors that a mean is off by chance
_CHANCE = 4.0
# all values of images and arrays
_ALL = "the input"
# of a signal that are compared one by one
_CHANNELS = 32
# samples of images and arrays that are compared
_LOOKED_AT = 200


def check_units(told: Sequence[ColumnSums]) -> None:
    """Name silos whose columns or targets are in another unit than the others', or do not vary."""
    if len(told) < 2:
        return
    compare_units({one.silo: {_shown(name): m for name, m in one.moments.items()} for one in told})
    compare_categories(told)
    empty = {
        name: [one.silo for one in told if not one.moments[name].count and one.missing[name]]
        for name in told[0].missing
    }
    empty |= {
        name: [one.silo for one in told if {*one.categories[name]} == {""}]
        for name in told[0].categories
    }
    _say_empty(empty, len(told))


def check_values(parts: Mapping[str, Tensor], inputs: Inputs) -> None:
    """Name parts of a data set (silos, or training and test) whose values are in another unit than
    those of the others.

    Of unscaled tables each column is compared, of signals each channel of some samples, of others
    all values of some.
    """
    if len(parts) < 2 or any(
        not x.is_floating_point() and x.dtype != torch.uint8 for x in parts.values()
    ):
        # nothing to compare, or tokens
        return
    table = Table.of(inputs)
    names = table.numeric
    whole = {
        name: {_ALL: (part if names else some(part)).double().cpu().numpy()}
        for name, part in parts.items()
    }
    values = {
        n: {f"column {c!r}": x[_ALL][:, k] for k, c in enumerate(names)} or x
        for n, x in whole.items()
    }
    signals = all(part.ndim == 3 and 1 < part.shape[1] <= _CHANNELS for part in parts.values())
    if not compare_units({name: _moments(each) for name, each in values.items()}) and signals:
        channels = range(next(iter(parts.values())).shape[1])
        each = {
            n: {f"channel {k} of {_ALL}": x[_ALL][:, k] for k in channels} for n, x in whole.items()
        }
        compare_units({name: _moments(parts_) for name, parts_ in each.items()})
    lost = [[part for part, x in parts.items() if x[:, k].isnan().all()] for k in range(len(names))]
    for k, known in enumerate(table.vocabularies, len(names)):
        code = known.index("") + 1 if "" in known else -1
        lost.append([part for part, x in parts.items() if (x[:, k] == code).all()])
    _say_empty(dict(zip((*names, *table.categorical), lost, strict=True)), len(parts))


def _moments(values: Mapping[str, Numbers]) -> dict[str, ColumnMoments]:
    """Return the moments of the values that are there, by what they are."""
    return {what: ColumnMoments.of(one[~np.isnan(one)], what) for what, one in values.items()}


def some(part: Tensor) -> Tensor:
    """Return at most some hundred rows, from all over a part."""
    return part[:: max(1, len(part) // _LOOKED_AT)]


def _shown(name: str) -> str:
    """Return a column or target as messages name it."""
    plain = name.removeprefix(target(""))
    return f"column {name!r}" if plain == name else f"target {plain!r}"


def compare_units(silos: Mapping[str, Mapping[str, ColumnMoments]]) -> bool:
    """Name silos whose columns are in another unit than the others', or do not vary so; return
    whether any were named.

    `silos` has the moments of each column of each silo.
    """
    said = False
    for rule, check in _RULES:
        lines = list[str]()
        for column in next(iter(silos.values()), ()):
            # moments of fewer values are off by chance
            each = {s: told[column] for s, told in silos.items() if told[column].count >= _ROWS}
            lines += rule(column, each)
        _say(lines, check)
        said |= bool(lines)
    _say(_swapped(silos), "check the names of columns there")
    return said


def _hardly_varying(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line if a column has one value at some silos, and several at others."""
    varied = {silo: told for silo, told in silos.items() if told.deviation}
    usual = ColumnMoments.together(list(varied.values()))
    flat = {
        silo: f"{told.mean:.4g}"
        for silo, told in silos.items()
        if not told.deviation and told.count >= _FLAT_ROWS and not _rarely_else(told, usual)
    }
    return _constant(column, flat, list(varied))


def compare_categories(told: Sequence["ColumnSums"]) -> None:
    """Name silos in which a column has one category, while it has several at others; or none that
    others have.
    """
    lines, strange = list[str](), list[str]()
    for column in told[0].categories:
        each = {one.silo: {c: n for c, n in one.categories[column].items() if c} for one in told}
        strange += filter(
            None, [nothing_in_common(each, f"category of column {column!r}"), shortened(each)]
        )
        # categories of few rows are not reported
        least = {one.silo: max(_FLAT_ROWS, one.least_rows) for one in told}
        flat = {
            silo: repr(next(iter(names)))
            for silo, names in each.items()
            if len(names) == 1 and sum(names.values()) >= least[silo]
        }
        lines += _constant(
            f"column {column!r}", flat, [silo for silo, names in each.items() if len(names) > 1]
        )
    _say(lines, "check how it was filled in there")
    _say(strange, "check that categories mean the same everywhere")


def _say_empty(empty: Mapping[str, Sequence[str]], parts: int) -> None:
    """Name columns that have values at some silos, or in some parts, but not at all of them
    (`empty`).
    """
    some = {name: at for name, at in empty.items() if 0 < len(at) < parts}
    lines = [
        f"column {name!r} has no values, or too few, at {listed(at)}" for name, at in some.items()
    ]
    _say(lines, "check whether it was filled in there, or leave it out with --drop-columns")


def _constant(column: str, flat: Mapping[str, str], varied: Sequence[str]) -> list[str]:
    """Return a line if a column has nearly one value at fewer silos (`flat`, with the value) than
    it varies at.

    Several silos with several values are such by nature, as schools for boys and for girls.
    """
    if not flat or len(flat) > len(varied) or (len(flat) > 2 and len({*flat.values()}) > 1):
        return []
    return [
        f"{column} hardly varies at {listed(f'{s} ({v})' for s, v in flat.items())}, but does at "
        "other silos"
    ]


def _say(lines: Sequence[str], check: str) -> None:
    if lines:
        tell(f"{listed(lines, sign='; ')}: {check}")


def _rarely_else(flat: ColumnMoments, others: ColumnMoments) -> bool:
    """Return whether a silo may have one value because the column nearly always has it, such as a
    rare count.

    By the inequality of Cauchy and Schwarz, at least this share of the others' values is not the
    silo's. If they differ on one side only, few of that share would be expected at the silo, and a
    silo tells no few.
    """
    apart = others.count * (others.mean - flat.mean) ** 2
    share = apart / (apart + others.squares) if apart else 0.0
    one_sided = share * others.count >= _CHANCE
    return one_sided and share < 0.5 and share * flat.count < 2 * _ROWS


def _units(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line for each silo that is far from the others."""
    coded = all(_low(one) is not None for one in silos.values())
    if len(silos) < 2 or coded:
        return []
    if len(silos) == 2:
        (one, here), (other, there) = silos.items()
        apart = _difference(here, there.mean, there.deviation)
        means = f"means {here.mean:.4g} and {there.mean:.4g}"
        return [f"{column} of {one} and {other} differs by {apart} ({means})"] if apart else []
    # silos of one value would halve the deviation
    varied = [m for m in silos.values() if m.deviation] or list(silos.values())
    mean, spread = median(m.mean for m in varied), median(m.deviation for m in varied)
    found = {
        silo: apart for silo, here in silos.items() if (apart := _difference(here, mean, spread))
    }
    usual = [here for silo, here in silos.items() if silo not in found]
    return [
        f"{column} of {silo} differs from other silos by {apart} (mean {silos[silo].mean:.4g}, "
        f"others' {mean:.4g})"
        for silo, apart in found.items()
        if _leaves_gap(silos[silo], usual, [*silos.values()], apart)
    ]


def _swapped(silos: Mapping[str, Mapping[str, ColumnMoments]]) -> list[str]:
    """Return a line for two columns of a silo that lie where the other one lies at other silos."""
    found = list[str]()
    # of two silos it is open which one is wrong
    for silo in list(silos)[: len(silos) if len(silos) > 2 else 1]:
        own = {c: m for c, m in silos[silo].items() if m.count >= _ROWS}
        others = [each for name, each in silos.items() if name != silo]
        usual = {
            c: (
                median(each[c].mean for each in others),
                median(each[c].deviation for each in others),
            )
            for c in own
            if all(each[c].count for each in others)
        }
        moved = [c for c, place in usual.items() if _has_moved(own[c], *place)]
        shown = silo if len(silos) > 2 else " or ".join(silos)
        for one, other in combinations(moved, 2):
            if _lies_at(own[one], *usual[other]) and _lies_at(own[other], *usual[one]):
                found.append(f"{one} and {other} of {shown} seem to have changed places")
    return found


def _has_moved(told: ColumnMoments, mean: float, spread: float) -> bool:
    """Return whether a column has another mean, or twice or half the deviation."""
    far = abs(told.mean - mean) > _AWAY * spread > 0
    return far or bool(told.deviation and spread and abs(log10(told.deviation / spread)) > 0.3)


def _lies_at(told: ColumnMoments, mean: float, spread: float) -> bool:
    """Return whether a column has nearly this mean and this deviation."""
    near = abs(told.mean - mean) < spread / 2
    return bool(near and abs(log10(told.deviation / spread)) < 0.15)


def _leaves_gap(
    here: ColumnMoments, usual: Sequence[ColumnMoments], every: Sequence[ColumnMoments], apart: str
) -> bool:
    """Return whether there is a gap between a silo that is far from the usual ones (`apart` says
    how) and these.

    Large and small silos, or rich and poor ones, differ step by step; another unit leaves a gap.
    """

    def level(told: ColumnMoments) -> float:
        if "factor" not in apart:
            return told.mean
        return log10(abs(told.mean)) if positive else log10(told.deviation or 1.0)

    positive = all(
        abs(told.mean) >= told.deviation and here.mean * told.mean > 0 for told in (here, *usual)
    )
    own, levels = level(here), sorted(map(level, usual))
    if not levels:
        return True
    nearest = min(levels, key=lambda one: abs(one - own))
    low, high = sorted((own, nearest))
    steps = sorted(map(level, every)) if positive or "factor" not in apart else []
    way = [low, *(one for one in steps if low < one < high), high]
    return max(b - a for a, b in pairwise(way)) >= _GAP * (levels[-1] - levels[0])


def _codes(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line if all values are 0 and 1 at some silos, and 1 and 2, or others next to each
    other, elsewhere.
    """
    coded: dict[int, list[str]] = {}
    for silo, told in silos.items():
        low = _low(told)
        if low is not None:
            coded.setdefault(low, []).append(silo)
    if column.endswith(_ALL) or len(coded) < 2:
        return []
    ways = [f"{low} or {low + 1} at {listed(at)}" for low, at in sorted(coded.items())]
    return [f"{column} is {', but '.join(ways)}"]


def _standardised(column: str, silos: Mapping[str, ColumnMoments]) -> list[str]:
    """Return a line if a column has the mean 0 and the deviation 1 at some silos, and others
    elsewhere.
    """
    held = [silo for silo, told in silos.items() if _is_standard(told)]
    others = [told for silo, told in silos.items() if silo not in held]
    # what has nearly such moments by nature is not called another
    away = [abs(m.mean) > max(1.0, m.deviation) and abs(m.deviation - 1) > 0.2 for m in others]
    if column.endswith(_ALL) or not held or not others or not all(away):
        return []
    return [
        f"{column} has the mean 0 and the standard deviation 1 at {listed(held)}, and others "
        "elsewhere"
    ]


def _is_standard(told: ColumnMoments) -> bool:
    off = max(abs(told.mean), abs(told.deviation - 1))
    # two standard errors of the mean, if the test rows were scaled with the training rows
    return off < max(0.02, 2 / sqrt(told.count))


def _low(told: ColumnMoments) -> int | None:
    """Return the lower of the two values if all are two whole numbers that are next to each other,
    otherwise None.

    The variance of values between two such numbers is largest if they are these numbers.
    """
    low = floor(told.mean)
    share = told.mean - low
    if share and abs(told.squares / told.count - share * (1 - share)) < 1e-9:
        return low
    return None


def _difference(here: ColumnMoments, mean: float, spread: float) -> str:
    """Return in words how far a silo is from this mean and standard deviation; empty if it is
    not.
    """
    if here.deviation and spread:
        factor = here.deviation / spread
        times = max(factor, 1 / factor)
        ends = abs(here.mean) / here.deviation, abs(mean) / spread
        negative = here.mean * mean < 0
        mirrored = negative and abs(log10(-here.mean / mean)) < 0.2 > abs(log10(factor))
        # a sign is told from chance two deviations away from zero
        if mirrored and min(ends) >= _AWAY:
            return "its sign"
        # another unit changes mean and deviation by the same factor
        unlike = abs(log10(here.mean / mean / factor)) if here.mean * mean > 0 else inf
        centred = max(ends) < 1
        # far from zero less tells another unit, such as pounds
        narrow = min(ends) >= _NARROW and unlike < 0.1
        least = 2 if narrow else _FACTOR
        if times >= least and (centred or unlike < 0.4):
            ratio = factor if centred else here.mean / mean
            return f"a factor of about {_round(max(ratio, 1 / ratio)):,g}"
        # as of a logarithm
        if times >= 20:
            return f"a factor of about {_round(times):,g} between standard deviations"
    far = abs(here.mean - mean)
    least, widest = sorted((here.deviation, spread))
    # a logarithm, or what is standardised, has another spread, too
    limit = _NARROW if 0 < _FACTOR * least <= widest else 8
    return f"{far / widest:,.0f} standard deviations" if widest and far > limit * widest else ""


def _round(times: float) -> float:
    """Return a factor with two digits, or a power of ten if that is near."""
    power = 10.0 ** round(log10(times))
    near = abs(log10(times / power)) < (0.1 if power > 10 else 0.02)
    return power if near else float(f"{times:.2g}")


_Rule: TypeAlias = Callable[[str, Mapping[str, ColumnMoments]], list[str]]
_RULES: tuple[tuple[_Rule, str], ...] = (
    (_units, "check units"),
    (_hardly_varying, "check how it was filled in there"),
    (_codes, "use the same codes at all silos"),
    (_standardised, "scale it at all silos, or leave it as it was measured"),
)
"""what is looked for in each column, and what to check if it is found"""
