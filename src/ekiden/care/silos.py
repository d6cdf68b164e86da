"""Doubts about natural owners: what they lack, or hold the other way round.

All samples are here, so nothing has to be told. Between machines silos tell no sums from which most
of this could be seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ekiden.care.comparison import compare_sums, differing, sums_of_arrays, with_check
from ekiden.care.seen import LOOKED_AT, ROWS, SeenData
from ekiden.care.spelling import numbered_from_two
from ekiden.core.base.errors import listed
from ekiden.core.data.samples import ClientData, Samples, Subset
from ekiden.core.models.images import SHORTEST
from ekiden.core.tasks import Classification, MultiLabel, Segmentation, Survival
from ekiden.readers.kinds import Table
from ekiden.readers.kinds.arrays import LEADS
from ekiden.readers.kinds.tables import Numbers
from ekiden.readers.moments import told_by

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


def _compared(silos: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each silo, the others, and the silo in words; of two it is open which one is wrong."""
    if len(silos) == 2:
        yield silos[0], [silos[1]], " or ".join(silos)
    if len(silos) > 2:
        for name in silos:
            yield name, [n for n in silos if n != name], name


def changed(seen: SeenData) -> Iterator[str]:
    """Name silos that hold something the other way round: a summary is far from that of the others,
    and near it if a change is undone.
    """
    for what, silos, changes, least in (
        *_mean_pictures(seen),
        *_skewness(seen),
        *_shares(seen),
    ):
        for name, others, shown in _compared([*silos]):
            usual = torch.stack([silos[n] for n in others]).mean(0)
            for words, (view, undo) in changes.items():
                alike = [view(silos[n]) for n in others]
                alike.append(view(undo(silos[name])))
                apart = _distance(view(silos[name]), view(usual))
                # three times as far as the others are, and as it would be if it was undone
                if apart >= max(least, 3 * max(_distance(one, view(usual)) for one in alike)):
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
    if x.ndim == 4 and x.dtype == torch.uint8:
        means = {
            name: F.adaptive_avg_pool2d(x[at].double(), _SIDE).mean(0).cpu()
            for name, at in seen.compared.items()
        }
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
            each = {name: torch.from_numpy(own) for name, own in numbers.items()}
            held[f"values of column {column!r}"] = each
    for what, each in held.items():
        values = torch.from_numpy(np.unique(torch.cat([*each.values()])))
        if not 2 <= len(values) <= _MOST_CLASSES:
            continue
        shares = {
            name: (own.flatten()[:, None] == values).double().sum(0) / max(own.numel(), 1)
            for name, own in each.items()
        }
        words = f"are reversed, {values[0]:g} for {values[-1]:g}"
        # nearly half of all values would have to change
        yield what, shares, {words: (_as_it_is, lambda m: m.flip(0))}, 0.9 / len(values)


def swapped_labels(seen: SeenData) -> Iterator[str]:
    """Name two classes that a linear model of other silos tells apart, but at a silo not, or the
    other way round.
    """
    data = seen.data
    parts = _labelled_parts(seen)
    several = 2 <= len(data.classes) <= _MOST_CLASSES
    if not isinstance(data.task, Classification) or not several or not parts:
        return
    values = {name: _values(part.x[at]) for name, (part, at) in parts.items()}
    known = {name: v for name, v in values.items() if v is not None}
    if len(known) < len(parts):
        return
    x = _standardised(known)
    y = {name: part.y[at].cpu() for name, (part, at) in parts.items()}
    squares = {name: v.T @ v for name, v in x.items()}
    products = {name: v.T @ F.one_hot(y[name], len(data.classes)).double() for name, v in x.items()}
    rows = sum(map(len, x.values()))
    for name, others, shown in _compared([*parts]):
        # a little of the identity, so that columns that depend on each other have a solution
        ridge = 1e-3 * rows * torch.eye(x[name].shape[1], dtype=torch.float64)
        whole = torch.stack([squares[n] for n in others]).sum(0) + ridge
        weights = torch.linalg.solve(whole, torch.stack([products[n] for n in others]).sum(0))
        scores = {n: (x[n] @ weights, y[n]) for n in parts}
        there = torch.cat([x[n] for n in others]) @ weights, torch.cat([y[n] for n in others])
        swapped, lost = list[str](), list[str]()
        for a, b in combinations(range(len(data.classes)), 2):
            pair = f"{data.classes[a]!r} and {data.classes[b]!r}"
            usual, _ = _deviations_apart(*there, a, b)
            apart, error = _deviations_apart(*scores[name], a, b)
            # five standard errors are not chance
            sure = 5 * error
            # half as far apart as elsewhere, with the other sign
            if apart < -usual / 2 < 0 and apart < -sure:
                swapped.append(pair)
            elif data.inputs.agreed and len(others) > 1 and abs(apart) <= 0.2 * usual:
                least = min(_deviations_apart(*scores[n], a, b)[0] for n in others)
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


def _labelled_parts(seen: SeenData) -> dict[str, tuple[Samples, Tensor]]:
    """Return the silos to compare, or a given test part and training, with the rows to look at."""
    data = seen.data
    if seen.compared:
        return {name: (data.train, at) for name, at in seen.compared.items()}
    if not seen.given or min(len(data.train), len(data.test)) < ROWS:
        return {}
    both = {"the training part": data.train, "the test part": data.test}
    return {n: (part, torch.arange(len(part))[: LOOKED_AT // 2]) for n, part in both.items()}


def _standardised(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return vectors (n, d) with mean 0 and deviation 1 over all parts, and a 1 behind them."""
    x = {name: F.pad(v, (0, 1), value=1.0) for name, v in values.items()}
    whole = torch.cat([*x.values()])
    mean, std = whole.mean(0), whole.std(0)
    mean[-1], std[std == 0] = 0.0, 1.0
    return {name: (v - mean) / std for name, v in x.items()}


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
    if x.ndim == 4 and x.dtype == torch.uint8:
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
    parts = {"the training part": data.train, "the test part": data.test}
    if seen.given and data.inputs.agreed and seen.unscaled:
        held = {name: Subset(part, torch.arange(len(part))) for name, part in parts.items()}
        clients = [ClientData(name, part, part, part) for name, part in held.items()]
        yield from compare_sums([told_by(one, replace(data, least=1)) for one in clients])
    if data.inputs.agreed or not (x.is_floating_point() or x.dtype == torch.uint8):
        return
    if seen.given:
        yield from compare_sums(sums_of_arrays({name: part.x for name, part in parts.items()}))
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


def _steps(values: Numbers) -> Numbers:
    return np.asarray(np.abs(values[:, None] - values))


def shifted_codes(seen: SeenData) -> Iterator[str]:
    """Name columns of a few whole numbers that silos count from 0 and from 1."""
    found = list[str]()
    for column, each in _columns(seen):
        values = {name: np.unique(v) for name, v in each.items()}
        if all(0 < len(v) <= _MOST_CLASSES and (v == v.round()).all() for v in values.values()):
            whole = {name: {str(int(one)) for one in v} for name, v in values.items()}
            found.append(numbered_from_two(whole, f"column {column!r} is"))
    yield from with_check(filter(None, found), "use the same codes at all silos")


def other_rates(seen: SeenData) -> Iterator[str]:
    """Name silos whose signals change more slowly or faster than others', in each class that others
    have.
    """
    data = seen.data
    if not are_signals(data.train.x):
        return
    kinds = range(len(data.classes) if isinstance(data.task, Classification) else 1)
    rates = np.full((len(seen.compared), len(kinds)), np.nan)
    for k, at in enumerate(seen.compared.values()):
        y = data.train.y[at] if len(kinds) > 1 else torch.zeros(len(at))
        for kind in kinds:
            own = at[y == kind]
            if len(own) >= ROWS / 2:
                rates[k, kind] = _frequency(data.train.x[own])
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
    vectors = x.ndim == 2 and x.is_floating_point() and x.shape[1] >= SHORTEST
    if len(rows) < 3 or not vectors or Table.of(seen.data.inputs).numeric:
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
