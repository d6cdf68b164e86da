"""Hold out whole subjects (patients, writers, devices), or the most recent samples.

One rule serves the test part and the validation part. With subjects, whole subjects are held out,
so that the share comes as near as they allow. With times, the most recent samples of each silo are
held out; samples of equal time stay together. With both, a subject counts as recent as its latest
sample, and all its samples are held out with it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import chain, pairwise
from math import ceil, floor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base.errors import UserError, counted
from ekiden.core.data.samples import Samples

# of each stratum
FRACTION = 0.2


def divided(strata: Tensor, domain: Tensor | None, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split rows 80/20 within every (domain, group, stratum of labels).

    If that would hold out less than a tenth, because most of these have one row, rows are split
    within every group.

    Args:
        strata: (n,) int64, such as classes.
        domain: (n,) int64, or None.
        group: (n,) int64, or None.

    Returns:
        Training rows and test rows, int64, each in ascending order.
    """
    train, test = by_strata(domain, group, strata)
    if group is not None and len(test) < FRACTION / 2 * len(strata):
        return by_strata(group)
    return train, test


def by_strata(*keys: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split rows 80/20 so that every stratum is split 80/20.

    A stratum is the set of rows that agree in all keys, such as (domain, class). The next stratum
    makes up for the rounding of the one before, so all rows together are also split 80/20. Each
    keeps at least one training row.

    Args:
        keys: (n,) int64 each; a key that is None is ignored.
        seed: seed of the shuffle within the strata.

    Returns:
        Training rows and test rows, int64, each in ascending order.
    """
    stratum = numbered(*(together([key]) for key in keys))
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(stratum))
    rows = rows[np.argsort(stratum[rows], kind="stable")]
    held = np.zeros(len(stratum), dtype=bool)
    seen = taken = 0
    for part in cut(rows, np.bincount(stratum)):
        seen += len(part)
        exact = FRACTION * len(part)
        share = min(max(round(FRACTION * seen) - taken, floor(exact)), ceil(exact), len(part) - 1)
        held[part[:share]] = True
        taken += share
    return _divided(held)


Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]


class DealtUnits:
    """What a partition deals to clients: whole subjects, or single rows if samples have no
    subjects.
    """

    def __init__(self, train: Samples, rows: Rows | None = None) -> None:
        """Make units of some rows; of all by default."""
        if rows is None:
            rows = np.arange(len(train))
        self.whole = train.subject is not None
        unit = np.arange(len(rows))
        if train.subject is not None:
            unit = numbered(train.subject.cpu().numpy()[rows])
        # (count,) rows of each
        self.sizes = np.bincount(unit)
        # number of units
        self.count = len(self.sizes)
        self._unit = unit
        self._rows = rows[np.argsort(unit, kind="stable")]
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])

    def rows(self, units: Rows) -> Rows:
        """Return the rows of these units."""
        sizes = self.sizes[units]
        # of the first row of each unit, counted from where its rows begin in the result
        first = self._starts[units] - (sizes.cumsum() - sizes)
        return self._rows[np.repeat(first, sizes) + np.arange(sizes.sum())]

    def commonest(self, labels: Rows) -> Rows:
        """Return the commonest label of each unit's rows, the smallest of several."""
        kinds, codes = np.unique(labels, return_inverse=True)
        pairs, times = np.unique(self._unit * len(kinds) + codes, return_counts=True)
        unit, kind = np.divmod(pairs, len(kinds))
        best = np.lexsort((kind, -times, unit))
        _, first = np.unique(unit[best], return_index=True)
        found: Rows = kinds[kind[best[first]]]
        return found

    def split(self, units: Rows, cuts: Rows) -> list[Rows]:
        """Cut units in their order where the number of rows comes nearest to `cuts`."""
        ends = np.concatenate([[0], np.cumsum(self.sizes[units])])
        after = np.searchsorted(ends, cuts)
        before = np.maximum(after - 1, 0)
        return np.split(units, np.where(cuts - ends[before] < ends[after] - cuts, before, after))

    def dealt(self, parts: int, rng: np.random.Generator) -> list[Rows]:
        """Return the rows of equal parts of shuffled units."""
        return [*map(self.rows, self.even(rng.permutation(self.count), parts))]

    def even(self, units: Rows, parts: int) -> list[Rows]:
        """Deal units in their order to equal parts: cut single rows, and give subjects to the
        smallest part so far.
        """
        if not self.whole:
            size, more = divmod(len(units), parts)
            return cut(units, [size + 1] * more + [size] * (parts - more))
        dealt: list[list[int]] = [[] for _ in range(parts)]
        heap = [(0, k) for k in range(parts)]
        for u in units.tolist():
            size, k = heappop(heap)
            dealt[k].append(u)
            heappush(heap, (size + int(self.sizes[u]), k))
        return [np.array(part, dtype=np.int64) for part in dealt]


def cut(rows: NDArray[Any], sizes: Sequence[int] | Rows) -> list[NDArray[Any]]:
    """Return views of consecutive parts of these sizes; much faster than `np.split` if there are
    many.
    """
    ends = np.cumsum(sizes).tolist()
    return [rows[start:end] for start, end in pairwise([0, *ends])]


def numbered(*keys: Rows | None) -> Rows:
    """Return one number (n,) from 0 for each combination of keys (n,); one that is None is ignored."""
    known = [key for key in keys if key is not None]
    _, codes = np.unique(np.stack(known, axis=1), axis=0, return_inverse=True)
    return codes.reshape(-1).astype(np.int64)


def _divided(held: Mask) -> tuple[Tensor, Tensor]:
    """Return the rows (n,) that are not held out, and those that are."""
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))


def held_out(
    share: float,
    silo: Rows,
    *,
    subject: Rows | None = None,
    time: NDArray[Any] | None = None,
    strata: Rows | None = None,
    some: bool = False,
) -> Mask:
    """Choose what to hold out.

    Args:
        share: how much of each silo, in rows.
        silo: (n,) number of the silo that holds each row. Rows are considered in the given order.
        subject: (n,) number of each row's subject, or None.
        time: (n,) time of each row, or None.
        strata: (n,) number of each row's stratum, such as its class. Subjects are drawn evenly from
            all strata, and each stratum keeps a row that is not held out. Not used with times.
        some: hold out one subject, or one time, even if none at all is nearer to the share.

    Returns:
        (n,) whether a row is held out.
    """
    unit = np.arange(len(silo))
    if subject is not None:
        unit = numbered(subject)
    if time is not None:
        return _recent(share, silo, unit, time, some)[unit]
    if strata is None:
        strata = np.zeros_like(silo)
    return _whole(share, silo, unit, strata, some)[unit]


def _recent(share: float, silo: Rows, unit: Rows, time: NDArray[Any], some: bool) -> Mask:
    """Return for each unit whether it is among the most recent of a silo."""
    latest = _latest(unit, time)
    held = np.zeros(len(latest), dtype=bool)
    smallest: tuple[int, Rows] | None = None
    for number in np.unique(silo):
        units, sizes = np.unique(unit[silo == number], return_counts=True)
        moments, block = np.unique(latest[units], return_inverse=True)
        # from the most recent on; never all of them
        rows = np.bincount(block, weights=sizes)[::-1].cumsum()[:-1]
        if not len(rows):
            continue
        nearest = int(np.abs(np.concatenate([[0], rows]) - share * sizes.sum()).argmin())
        held[units[block >= len(moments) - nearest]] = True
        if smallest is None or rows[0] < smallest[0]:
            smallest = int(rows[0]), units[block == len(moments) - 1]
    if some and not held.any() and smallest is not None:
        held[smallest[1]] = True
    return held


def _latest(unit: Rows, time: NDArray[Any]) -> NDArray[Any]:
    """Return the latest time of each unit."""
    latest = np.full(unit.max() + 1, time.min(), dtype=time.dtype)
    np.maximum.at(latest, unit, time)
    return latest


def _whole(share: float, silo: Rows, unit: Rows, strata: Rows, some: bool) -> Mask:
    """Return for each unit whether it is held out: in each silo, evenly from all strata."""
    count = int(unit.max()) + 1
    # of each unit, by silo
    rows = defaultdict[int, Counter[int]](Counter)
    kinds = defaultdict[int, set[int]](set)
    needed = defaultdict[int, set[tuple[str, int]]](set)
    for s, u, kind in zip(silo.tolist(), unit.tolist(), strata.tolist(), strict=True):
        rows[u][s] += 1
        kinds[u].add(kind)
        needed[u] |= {("silo", s), ("stratum", kind)}
    home = [max(rows[u], key=lambda s: (rows[u][s], -s)) for u in range(count)]
    frequent = np.bincount(strata)
    rarest = [min(kinds[u], key=lambda k: (frequent[k], k)) for u in range(count)]
    _, first = np.unique(unit, return_index=True)
    order = sorted(range(count), key=lambda u: (home[u], rarest[u], first[u]))
    left = Counter(chain(*needed.values()))
    taken: Counter[int] = Counter()
    held = np.zeros(count, dtype=bool)

    def free(u: int) -> bool:
        return not held[u] and all(left[key] > 1 for key in needed[u])

    def take(u: int) -> None:
        held[u] = True
        taken.update(rows[u])
        left.subtract(needed[u])

    def take_if_nearer(u: int, total: int) -> None:
        if taken[home[u]] + rows[u][home[u]] / 2 < share * total and free(u):
            take(u)

    seen: Counter[int] = Counter()
    for u in order:
        seen[home[u]] += rows[u][home[u]]
        take_if_nearer(u, seen[home[u]])
    whole = Counter(silo.tolist())
    # what one stratum could not give, another gives
    for u in order:
        take_if_nearer(u, whole[home[u]])
    if some and not held.any() and (possible := [*filter(free, order)]):
        take(min(possible, key=lambda u: rows[u].total()))
    return held


def hold_out(
    parts: Sequence[Samples], strata: Sequence[Tensor], what: str
) -> list[tuple[Tensor, Tensor]]:
    """Hold out a fifth of samples for the test.

    Args:
        parts: samples of each silo.
        strata: (n,) int64 for each part, such as classes.
        what: name of the data in messages.

    Returns:
        Training rows and test rows of each part, in ascending order. No subject is divided, also if
        several parts have it.
    """
    if all(part.subject is None and part.time is None for part in parts):
        return [
            divided(kinds, part.domain, part.group)
            for part, kinds in zip(parts, strata, strict=True)
        ]

    def whole(name: str) -> NDArray[Any] | None:
        return together([getattr(part, name) for part in parts])

    sizes = [*map(len, parts)]
    silo = numbered(np.repeat(np.arange(len(parts)), sizes), whole("group"))
    kinds = numbered(together(strata), whole("domain"))
    order = np.random.default_rng(0).permutation(len(silo))
    given = {"subject": whole("subject"), "time": whole("time")}
    known = {name: values[order] for name, values in given.items() if values is not None}
    held = np.zeros(len(silo), dtype=bool)
    held[order] = held_out(FRACTION, silo[order], strata=kinds[order], some=True, **known)
    if not held.any() or held.all():
        if "time" in known:
            latest = known["time"]
            few = ""
            needed = "a silo needs two or more"
            if "subject" in known:
                latest = _latest(numbered(known["subject"]), latest)
                few = " at which subjects were last seen"
            few = counted(len(np.unique(latest)), "time") + few
        else:
            few = counted(len(np.unique(known["subject"])), "subject")
            needed = "a silo, and a class, needs two subjects or more"
        raise UserError(
            f"{what} has {few}, too few to hold out a test part: {needed}; give a test part"
        )
    return [*map(_divided, cut(held, sizes))]


def together(parts: Sequence[Tensor | None]) -> NDArray[Any] | None:
    """Return the values of all parts in one array; None if a part has none."""
    given = [part.cpu().numpy() for part in parts if part is not None]
    if len(given) < len(parts):
        return None
    return np.concatenate(given)
