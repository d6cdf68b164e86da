"""Doubts about natural owners: what they lack, or hold the other way round.

All samples are here, so nothing has to be told. Between machines silos tell no sums from which most
of this could be seen.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ekiden.care.comparison import compare_sums, differing, sums_of_arrays, with_check
from ekiden.care.seen import LOOKED_AT, ROWS, SeenData, are_pictures
from ekiden.care.spelling import numbered_from_two
from ekiden.core.base.errors import listed
from ekiden.core.data.samples import ClientData, Subset
from ekiden.core.models.images import SHORTEST
from ekiden.core.tasks import Classification, MultiLabel, Segmentation, Survival
from ekiden.readers.kinds import Table
from ekiden.readers.kinds.arrays import LEADS
from ekiden.readers.kinds.tables import Numbers
from ekiden.readers.moments import ColumnSums, told_by

_MOST_CLASSES = 20
_MOST_VALUES = 512
"""of a sample from which labels are foretold"""
_SIDE = 8
"""pixels of a mean picture"""

_Change: TypeAlias = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""what is compared of a summary, and what would undo a change of it"""


def are_signals(x: Tensor) -> bool:
    """Return whether samples (n, C, T) are signals of a few channels."""
    return x.ndim == 3 and x.is_floating_point() and x.shape[1] <= LEADS and x.shape[2] >= SHORTEST


def _as_it_is(summary: Tensor) -> Tensor:
    return summary


def _colours(picture: Tensor) -> Tensor:
    return picture[:1] - picture[-1:]


def _shape(picture: Tensor) -> Tensor:
    return picture - picture.mean((1, 2), keepdim=True)


_CHANGES_OF_PICTURES: Mapping[str, _Change] = {
    "are negatives": (_as_it_is, lambda m: 255 - m),
    "have red and blue changed places": (_colours, lambda m: m.flip(0)),
    "are upside down": (_shape, lambda m: m.flip(1)),
    "are mirrored": (_shape, lambda m: m.flip(2)),
    "are turned by 90 degrees": (_shape, lambda m: m.rot90(1, (1, 2))),
    "are turned by -90 degrees": (_shape, lambda m: m.rot90(-1, (1, 2))),
}
"""of mean pictures (C, H, W)"""


def _compared(silos: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield the place of each silo, and its name; of two it is open which one is wrong."""
    names = [*silos]
    if len(names) == 2:
        yield 0, " or ".join(names)
    if len(names) > 2:
        yield from enumerate(names)


def changed(seen: SeenData) -> Iterator[str]:
    """Name silos that hold something the other way round: a summary is far from that of the others,
    and near it if a change is undone.
    """
    for what, silos, changes, least in (
        *_mean_pictures(seen),
        *_skewness(seen),
        *_shares(seen),
    ):
        for place, shown in _compared(silos):
            others = [*silos.values()]
            own = others.pop(place)
            usual = torch.stack(others).mean(0)
            for words, (view, undo) in changes.items():
                alike = (*others, undo(own))
                near = max(_distance(view(one), view(usual)) for one in alike)
                # three times as far as the others are, and as it would be if it was undone
                if _distance(view(own), view(usual)) >= max(least, 3 * near):
                    yield (
                        f"{what} of {shown} seem as if they {words}, compared with other silos: "
                        "check how they were made"
                    )
                    break


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().mean())


_Summaries: TypeAlias = Iterator[tuple[str, dict[str, Tensor], Mapping[str, _Change], float]]
"""what is summarised, the summary of each silo, what may have changed it, and a distance that means
something
"""


def _mean_pictures(seen: SeenData) -> _Summaries:
    x = seen.data.train.x
    if are_pictures(x):
        means = dict[str, Tensor]()
        for name, at in seen.compared.items():
            means[name] = F.adaptive_avg_pool2d(x[at].double(), _SIDE).mean(0).cpu()
        # six grey levels are seen
        yield "images", means, _CHANGES_OF_PICTURES, 6.0


def _skewness(seen: SeenData) -> _Summaries:
    """Yield the mean skewness of each channel of signals."""
    x = seen.data.train.x
    if not are_signals(x):
        return
    from scipy.stats import skew

    skewed = {name: skew(x[at].double().cpu(), axis=2) for name, at in seen.compared.items()}
    for channel in range(x.shape[1]):
        each = {name: torch.tensor([np.nanmean(s[:, channel])]) for name, s in skewed.items()}
        words = f"are upside down in channel {channel}"
        # signals with an upper and a lower side have a skewness of 0.5 or more
        yield "signals", each, {words: (_as_it_is, torch.neg)}, 1.0


def _shares(seen: SeenData) -> _Summaries:
    """Yield the shares of all values of columns and labels that have few, which may be reversed."""
    data, rows = seen.data, seen.compared
    if not rows:
        return
    y = {name: data.train.y[at].cpu() for name, at in rows.items()}
    held = dict[str, dict[str, Tensor]]()
    if isinstance(data.task, Segmentation):
        for a, b in combinations(range(len(data.classes)), 2):
            what = f"masks of {data.classes[a]!r} and {data.classes[b]!r}"
            held[what] = {n: each[(each == a) | (each == b)] for n, each in y.items()}
    if isinstance(data.task, Survival):
        held["events"] = {name: each[:, 1] for name, each in y.items()}
    # of columns of two silos it is open which one is reversed
    if len(rows) > 2:
        if isinstance(data.task, MultiLabel):
            for k, label in enumerate(data.classes):
                held[f"labels {label!r}"] = {name: each[:, k] for name, each in y.items()}
        for column, numbers in _columns(seen):
            own = map(torch.from_numpy, numbers.values())
            held[f"values of column {column!r}"] = dict(zip(numbers, own, strict=True))
    for what, each in held.items():
        values = torch.from_numpy(np.unique(torch.cat([*each.values()])))
        if not 2 <= len(values) <= _MOST_CLASSES:
            continue
        shares = dict[str, Tensor]()
        for name, one in each.items():
            equal = torch.eq(one.flatten()[:, None], values)
            shares[name] = equal.double().sum(0) / max(one.numel(), 1)
        words = f"are reversed, {values[0]:g} for {values[-1]:g}"
        # nearly half of all values would have to change
        yield what, shares, {words: (_as_it_is, lambda m: m.flip(0))}, 0.9 / len(values)


def swapped_labels(seen: SeenData) -> Iterator[str]:
    """Name two classes that a linear model of other silos tells apart, but at a silo not, or the
    other way round.
    """
    data = seen.data
    if not isinstance(data.task, Classification) or not 2 <= len(data.classes) <= _MOST_CLASSES:
        return
    parts = _labelled_parts(seen)
    if not parts:
        return
    values, labels = zip(*parts.values(), strict=True)
    x, y = _standardised(torch.cat(values)), torch.cat(labels)
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([*map(len, labels)]))
    hot = F.one_hot(y, len(data.classes)).double()
    # a little of the identity, so that columns that depend on each other have a solution
    whole = x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    products = x.T @ hot
    for place, shown in _compared(parts):
        here = owner == place
        own = x[here].T
        scores = x @ torch.linalg.solve(whole - own @ x[here], products - own @ hot[here])
        swapped, lost = list[str](), list[str]()
        for a, b in combinations(range(len(data.classes)), 2):
            pair = f"{data.classes[a]!r} and {data.classes[b]!r}"
            usual, _ = _deviations_apart(scores[~here], y[~here], a, b)
            apart, error = _deviations_apart(scores[here], y[here], a, b)
            # five standard errors are not chance
            sure = 5 * error
            # half as far apart as elsewhere, with the other sign
            if apart < -usual / 2 < 0 and apart < -sure:
                swapped.append(pair)
            elif data.inputs.agreed and len(parts) > 2 and abs(apart) <= 0.2 * usual:
                rows = [owner == k for k in range(len(parts)) if k != place]
                least = min(_deviations_apart(scores[at], y[at], a, b)[0] for at in rows)
                # a deviation at each other silo tells them apart for certain
                if 0 < sure <= least and least >= 1:
                    lost.append(pair)
        if swapped:
            yield (
                f"what tells {listed(swapped)} apart elsewhere tells them the other way round at "
                f"{shown}: check that labels were not swapped"
            )
        if lost:
            yield (
                f"what tells {listed(lost)} apart at all other silos tells nothing at {shown}: "
                "check that labels are in the rows that they belong to, as after a join"
            )


def _labelled_parts(seen: SeenData) -> dict[str, tuple[Tensor, Tensor]]:
    """Return vectors (n, d) and labels (n,) of the silos to compare, or of training and a given test
    part; none of samples that are not vectors.
    """
    data = seen.data
    parts = {name: (data.train, at) for name, at in seen.compared.items()}
    if not parts and seen.given and min(len(data.train), len(data.test)) >= ROWS:
        for name, part in seen.both.items():
            parts[name] = part, torch.arange(len(part))[: LOOKED_AT // 2]
    found = dict[str, tuple[Tensor, Tensor]]()
    for name, (part, at) in parts.items():
        values = _values(part.x[at])
        if values is not None:
            found[name] = values, part.y[at].cpu()
    return found


def _standardised(values: Tensor) -> Tensor:
    """Return vectors (n, d) with mean 0 and deviation 1, and a 1 behind them."""
    std, mean = torch.std_mean(values, 0)
    std[std == 0] = 1.0
    return F.pad((values - mean) / std, (0, 1), value=1.0)


def _deviations_apart(scores: Tensor, y: Tensor, a: int, b: int) -> tuple[float, float]:
    """Return how many deviations scores (n, K) put samples of two classes apart, and the standard
    error of that.
    """
    margin = scores[:, a] - scores[:, b]
    one, other = margin[y == a], margin[y == b]
    if min(len(one), len(other)) < ROWS / 2:
        return 0.0, 0.0
    spread = float(((one.var() + other.var()) / 2).sqrt()) or 1e-12
    return float(one.mean() - other.mean()) / spread, (1 / len(one) + 1 / len(other)) ** 0.5


def _values(x: Tensor) -> Tensor | None:
    """Return samples as vectors (n, d) float64 from which labels may be foretold; None for other
    kinds.
    """
    x = x.cpu()
    if are_pictures(x):
        return F.adaptive_avg_pool2d(x.double(), _SIDE).flatten(1)
    if x.dtype == torch.int64 and x.ndim == 2:
        words = torch.zeros(len(x), _MOST_VALUES, dtype=torch.float64)
        return words.scatter_(1, x % _MOST_VALUES, 1.0)
    if x.ndim != 2 or x.shape[1] > _MOST_VALUES:
        return None
    x = x.double()
    return torch.where(x.isnan(), x.nanmean(0), x).nan_to_num()


def other_units(seen: SeenData) -> Iterator[str]:
    """Name silos, or a given test part, whose values are in another unit.

    Of tables silos tell sums later.
    """
    data = seen.data
    x = data.train.x
    if seen.given and data.inputs.agreed and seen.unscaled:
        told = list[ColumnSums]()
        for name, part in seen.both.items():
            rows = Subset(part, torch.arange(len(part)))
            told.append(told_by(ClientData(name, rows, rows, rows), replace(data, least=1)))
        yield from compare_sums(told)
    if data.inputs.agreed or not (x.is_floating_point() or x.dtype == torch.uint8):
        return
    if seen.given:
        yield from compare_sums(sums_of_arrays({n: part.x for n, part in seen.both.items()}))
    yield from compare_sums(sums_of_arrays({name: x[at] for name, at in seen.rows.items()}))


def _columns(seen: SeenData) -> Iterator[tuple[str, dict[str, Numbers]]]:
    """Yield the unscaled columns of numbers, each with the values (n,) that silos with enough rows
    have.
    """
    table = Table.of(seen.data.inputs)
    if table.scale or not seen.compared:
        return
    for k, column in enumerate(table.numeric):
        each = {name: seen.data.train.x[at, k].cpu().numpy() for name, at in seen.compared.items()}
        yield column, {name: v[~np.isnan(v)] for name, v in each.items()}


def shifted_codes(seen: SeenData) -> Iterator[str]:
    """Name columns of a few whole numbers that silos count from 0 and from 1."""
    found = list[str]()
    for column, each in _columns(seen):
        codes = {name: [*map("{:.15g}".format, np.unique(v))] for name, v in each.items()}
        # what has more values is counted or measured
        if max(map(len, codes.values())) <= _MOST_CLASSES:
            found.append(numbered_from_two(codes, f"column {column!r} is"))
    yield from with_check(filter(None, found), "use the same codes at all silos")


def other_rates(seen: SeenData) -> Iterator[str]:
    """Name silos whose signals change more slowly or faster than others', in each class that others
    have.
    """
    data = seen.data
    if not are_signals(data.train.x):
        return
    y = data.train.y
    if not isinstance(data.task, Classification):
        y = torch.zeros(len(y))
    kinds = np.unique(y.cpu()).tolist()
    rates = np.full((len(seen.compared), len(kinds)), np.nan)
    for k, at in enumerate(seen.compared.values()):
        for place, kind in enumerate(kinds):
            own = at[y[at] == kind]
            if len(own) >= ROWS / 2:
                rates[k, place] = _frequency(data.train.x[own])
    steps = np.abs(rates[:, None] - rates)
    distances = np.where(np.isnan(steps), np.inf, steps).min(axis=2)
    # silos without a class in common are not compared
    distances[np.isinf(distances)] = 0.0
    cycles = np.exp(np.where(np.isnan(rates), 0.0, rates).max(axis=1))
    shown = [f"up to {one:.2g} cycles" for one in cycles]
    # a factor of 1.4
    lines = differing("the rate of signals", [*seen.compared], distances, 0.33, shown)
    yield from with_check(lines, "bring all to one sampling rate, if theirs differ")


def _frequency(x: Tensor) -> float:
    """Return the logarithm of the median, over signals (n, C, T), of their mean frequency."""
    x = x.double().cpu()
    power = torch.fft.rfft(x - x.mean(2, keepdim=True)).abs().square().sum(1)
    cycles = (power @ torch.arange(power.shape[1]).double()) / power.sum(1).clamp(min=1e-300)
    return float(cycles.clamp(min=0.1).log().median())


def foreign_embeddings(seen: SeenData) -> Iterator[str]:
    """Name silos whose embeddings point elsewhere than those of all others, as those of another
    model do.
    """
    rows, x = seen.compared, seen.data.train.x
    vectors = x.ndim == 2 and x.is_floating_point() and not Table.of(seen.data.inputs).numeric
    if len(rows) < 3 or not vectors or x.shape[1] < SHORTEST:
        return
    means = torch.stack([F.normalize(x[at].double().mean(0), dim=0) for at in rows.values()])
    cosines = (means @ means.T).cpu().numpy().clip(-1, 1)
    shown = [f"{one:.2f} of the direction of all" for one in cosines.mean(axis=1)]
    # means of one model's embeddings have a cosine of 0.7 or more
    lines = differing("the direction of the input", [*rows], 1 - cosines, 0.65, shown)
    yield from with_check(lines, "check that one model made all of them")


RULES = (
    other_units,
    swapped_labels,
    changed,
    shifted_codes,
    other_rates,
    foreign_embeddings,
)
"""each yields a line for what it finds"""
