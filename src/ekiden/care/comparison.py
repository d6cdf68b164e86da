"""Name silos that differ from the others, by what all of them tell, or hold, of each column."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import floor, inf, nan

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ekiden.care.spelling import nothing_in_common, shortened
from ekiden.core.base.checks import all_but
from ekiden.core.base.errors import listed
from ekiden.readers.kinds.tables import Numbers
from ekiden.readers.moments import ColumnMoments, ColumnSums, target

_LEAST_FLAT = 20
"""values from which nearly one value means something: a silo hides up to 9 others"""


def differing(
    what: str, silos: Sequence[str], distances: Numbers, least: float, shown: Sequence[str]
) -> Iterator[str]:
    """Yield a line for each silo that lies apart from most.

    Silos are joined in the order of their distances, until all that is left is at least so far
    away, and twice as far as silos are that were joined. So silos that differ step by step, small
    and large ones, rich and poor, are one group. What is not in the largest group lies apart.

    Args:
        what: is compared.
        silos: names of the K silos.
        distances: between them, (K, K).
        least: a distance that silos seldom have by nature.
        shown: what each silo has, in words.
    """
    # silos of which nobody has a value have no distances
    if len(silos) < 2:
        return
    odd = _apart(distances, least)
    if odd.all():
        # of two equal groups it is open which one is wrong
        each = listed(map("{} ({})".format, silos, shown))
        yield f"{what} differs between silos: {each}"
        return
    usual = int(odd.argmin())
    for k in np.flatnonzero(odd).tolist():
        yield (
            f"{what} of {silos[k]} differs from other silos ({shown[k]}; {shown[usual]} at "
            f"{silos[usual]})"
        )


def _apart(distances: Numbers, least: float) -> NDArray[np.bool]:
    """Return which silos are not in the largest group; all of them if two groups are the
    largest.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    # farther makes no difference, and neither infinity nor NaN can be linked
    finite = np.nan_to_num(distances).clip(max=1e9)
    links = linkage(squareform(finite, checks=False), "single")
    for inner, outer in pairwise([0.0, *links[:, 2]]):
        if outer < max(least, 2 * inner):
            continue
        groups = fcluster(links, inner, "distance")
        sizes = np.bincount(groups)
        # without a majority, silos differ by nature
        if 2 * sizes.max() >= len(groups):
            odd: NDArray[np.bool] = groups != sizes.argmax()
            if (sizes == sizes.max()).sum() > 1:
                odd[:] = True
            return odd
    return np.zeros(len(distances), dtype=bool)


def compare_sums(told: Sequence[ColumnSums]) -> Iterator[str]:
    """Name silos in which a column or target lies elsewhere than at the others, does not vary, or
    is empty.
    """
    if len(told) < 2:
        return
    check = "is it another unit, device or code? Bring all to one"
    yield from with_check(_other_units(told), check)
    flat = (*_flat_numbers(told), *_flat_categories(told))
    yield from with_check(flat, "check how it was filled in there")
    check = "check whether it was filled in there, or leave it out with --drop-columns"
    yield from with_check(_empty(told), check)
    strange = list[str]()
    for column in told[0].categories:
        each = {one.silo: all_but(one.categories[column], "") for one in told}
        what = f"category of column {column!r}"
        strange += [nothing_in_common(each, what), shortened(each)]
    yield from with_check(strange, "check that categories mean the same everywhere")


def sums_of_array(silo: str, samples: Tensor) -> ColumnSums:
    """Return the moments of each channel of samples (n, C, ...), or of all values (n, d)."""
    # some hundred samples, from all over, tell enough
    x = samples[:: max(1, len(samples) // 200)].double().cpu().numpy()
    columns = {"the input": x}
    # a signal of more channels is an embedding of many places
    if x.ndim > 2 and 1 < x.shape[1] <= 32:
        columns = {f"channel {k} of the input": x[:, k] for k in range(x.shape[1])}
    moments = dict[str, ColumnMoments]()
    for what, values in columns.items():
        moments[what] = ColumnMoments.of(values[~np.isnan(values)], what)
    return ColumnSums(moments, {}, {}, silo=silo)


def with_check(lines: Iterable[str], check: str) -> Iterator[str]:
    """Yield lines that are not empty as one, with what to check; nothing if there are none."""
    if found := list(filter(None, lines)):
        yield f"{listed(found, sign='; ')}: {check}"


def _shown(name: str, told: ColumnSums) -> str:
    """Return a column or target as messages name it."""
    if name in told.missing:
        return f"column {name!r}"
    plain = name.removeprefix(target(""))
    if plain == name:
        return name
    return f"target {plain!r}"


def _other_units(told: Sequence[ColumnSums]) -> Iterator[str]:
    """Yield a line for each column of a silo that has another mean and spread, or other codes."""
    for column in told[0].moments:
        # moments of fewer values are off by chance, and one value has no spread
        each = dict[str, ColumnMoments]()
        for one in told:
            own = one.moments[column]
            if own.count >= 10 and own.deviation:
                each[one.silo] = own
        moments = list(each.values())
        codes = np.array([*map(_code, moments)])
        shown = [f"mean {one.mean:.4g} ± {one.deviation:.3g}" for one in moments]
        distances = _distances(moments)
        if not np.isnan(codes).any():
            # how many have which of two values, silos decide; not which values these are
            distances = np.where(codes[:, None] == codes, 0.0, inf)
            shown = [f"{one} or {one + 1}" for one in map(int, codes)]
        # one is reached by four deviations between means, or by one 15 times the other
        yield from differing(_shown(column, told[0]), list(each), distances, 1.0, shown)


def _distances(told: Sequence[ColumnMoments]) -> Numbers:
    """Return how far apart normal distributions with such moments are, (K, K).

    It is Bhattacharyya's distance, in which means count half: silos differ by them first.
    """
    mean, deviation = np.array([(one.mean, one.deviation) for one in told]).reshape(-1, 2).T
    variances = deviation[:, None] ** 2 + deviation**2
    # squares of what a silo tells may be 0 or infinite
    with np.errstate(all="ignore"):
        far = (mean[:, None] - mean) ** 2 / (8 * variances)
        wide = np.log(variances / (2 * deviation[:, None] * deviation)) / 2
    return np.asarray(far + wide)


def _code(told: ColumnMoments) -> float:
    """Return the lower of the two values if all are two whole numbers that are next to each other,
    otherwise NaN.

    The variance of values between two such numbers is largest if they are these numbers.
    """
    low = floor(told.mean)
    share = told.mean - low
    if share and abs(told.squares / told.count - share * (1 - share)) < 1e-9:
        return low
    return nan


def _flat_numbers(told: Sequence[ColumnSums]) -> Iterator[str]:
    """Yield a line for each column that has one value at some silos, and several at others."""
    for column in told[0].moments:
        varied = [one.moments[column] for one in told if one.moments[column].deviation]
        usual = ColumnMoments.together(varied)
        flat = dict[str, str]()
        for one in told:
            moments = one.moments[column]
            one_value = moments.count >= _LEAST_FLAT and not moments.deviation
            if one_value and not _rarely_else(moments, usual):
                flat[one.silo] = f"{moments.mean:.4g}"
        yield from _flat(_shown(column, told[0]), flat, len(varied))


def _flat_categories(told: Sequence[ColumnSums]) -> Iterator[str]:
    """Yield a line for each column that has one category at some silos, and several at others."""
    for column in told[0].categories:
        flat = dict[str, str]()
        varied = 0
        for one in told:
            names = all_but(one.categories[column], "")
            varied += len(names) > 1
            # categories of few rows are not reported
            if len(names) == 1 and sum(names.values()) >= max(_LEAST_FLAT, one.least_rows):
                flat[one.silo] = repr(next(iter(names)))
        yield from _flat(f"column {column!r}", flat, varied)


def _flat(column: str, flat: Mapping[str, str], varied: int) -> Iterator[str]:
    """Yield a line if a column has nearly one value at fewer silos (`flat`, with the value) than it
    varies at.

    Several silos with several values are such by nature, as schools for boys and for girls.
    """
    by_nature = len(flat) > 2 and len({*flat.values()}) > 1
    if not by_nature and 0 < len(flat) <= varied:
        shown = listed(map("{} ({})".format, flat, flat.values()))
        yield f"{column} hardly varies at {shown}, but does at other silos"


def _rarely_else(flat: ColumnMoments, others: ColumnMoments) -> bool:
    """Return whether a silo may have one value because the column nearly always has it, such as a
    rare count.

    By the inequality of Cauchy and Schwarz, at least this share of the others' values is not the
    silo's. If they differ on one side only, few of that share would be expected at the silo, and a
    silo tells no few.
    """
    apart = others.count * (others.mean - flat.mean) ** 2
    if not apart:
        return False
    share = apart / (apart + others.squares)
    # a mean is off by two standard errors by chance
    one_sided = 4 / others.count <= share < 0.5
    return one_sided and share * flat.count < 20


def _empty(told: Sequence[ColumnSums]) -> Iterator[str]:
    """Yield a line for each column that has values at some silos, but not at all of them."""
    silos = defaultdict[str, list[str]](list)
    for one in told:
        for name, gaps in one.missing.items():
            if gaps and not one.moments[name].count:
                silos[name].append(one.silo)
        for name, categories in one.categories.items():
            if {*categories} == {""}:
                silos[name].append(one.silo)
    for name, empty in silos.items():
        if len(empty) < len(told):
            yield f"column {name!r} has no values, or too few, at {listed(empty)}"
