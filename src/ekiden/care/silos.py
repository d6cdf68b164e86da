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

from ekiden.care.comparison import compare_sums, differing, sums_of_array, with_check
from ekiden.care.seen import LOOKED_AT, ROWS, SeenData, are_pictures, thumbnails
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
    if not seen.compared:
        return
    for what, held, changes, least in (
        *_mean_pictures(seen),
        *_skewness(seen),
        *_shares(seen),
    ):
        for place, shown in _compared(seen.compared):
            own = held[place]
            others = torch.cat([held[:place], held[place + 1 :]])
            usual = others.mean(0)
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


_Summaries: TypeAlias = Iterator[tuple[str, Tensor, Mapping[str, _Change], float]]
"""what is summarised, the summaries of the silos (K, ...), what may have changed one, and a distance
that means something
"""


def _means(seen: SeenData, view: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean of a view of the samples of each silo to compare, (K, ...)."""
    x = seen.data.train.x
    return torch.stack([view(x[at].double().cpu()).nanmean(0) for at in seen.compared.values()])


def _mean_pictures(seen: SeenData) -> _Summaries:
    if are_pictures(seen.data.train.x):
        # six grey levels are seen
        yield "images", _means(seen, thumbnails), _CHANGES_OF_PICTURES, 6.0


def _skewness(seen: SeenData) -> _Summaries:
    """Yield the mean skewness of each channel of signals."""
    x = seen.data.train.x
    if not are_signals(x):
        return
    from scipy.stats import skew

    skewed = _means(seen, lambda signals: torch.from_numpy(skew(signals.numpy(), axis=2)))
    for channel, summaries in enumerate(skewed.T):
        words = f"are upside down in channel {channel}"
        # signals with an upper and a lower side have a skewness of 0.5 or more
        yield "signals", summaries, {words: (_as_it_is, torch.neg)}, 1.0


def _shares(seen: SeenData) -> _Summaries:
    """Yield the shares of all values of columns and labels that have few, which may be reversed."""
    data = seen.data
    y = seen.data.train.y
    if isinstance(data.task, Segmentation):
        masks = _held(seen, y)
        for a, b in combinations(range(len(data.classes)), 2):
            what = f"masks of {data.classes[a]!r} and {data.classes[b]!r}"
            yield from _shares_of(what, masks, np.array([a, b]))
    if isinstance(data.task, Survival):
        yield from _shares_of("events", _held(seen, y[:, 1]))
    # of columns of two silos it is open which one is reversed
    if len(seen.compared) < 3:
        return
    if isinstance(data.task, MultiLabel):
        for label, own in zip(data.classes, y.T, strict=True):
            yield from _shares_of(f"labels {label!r}", _held(seen, own))
    for column, held in _columns(seen):
        yield from _shares_of(f"values of column {column!r}", held)


def _shares_of(what: str, held: Mapping[str, Numbers], values: Numbers | None = None) -> _Summaries:
    """Yield the shares that values, by default all of them, have at each silo, if they are few."""
    if values is None:
        values = np.unique(np.concatenate([*held.values()]))
    if not 2 <= len(values) <= _MOST_CLASSES:
        return
    shares = list[Numbers]()
    for own in held.values():
        counts = (own[:, None] == values).sum(axis=0)
        shares.append(counts / max(counts.sum(), 1))
    words = f"are reversed, {values[0]:g} for {values[-1]:g}"
    change = _as_it_is, lambda m: m.flip(0)
    # nearly half of all values would have to change
    yield what, torch.from_numpy(np.stack(shares)), {words: change}, 0.9 / len(values)


def _held(seen: SeenData, values: Tensor) -> dict[str, Numbers]:
    """Return those of all values (n, ...) that each silo to compare has, without missing ones."""
    held = dict[str, Numbers]()
    for name, at in seen.compared.items():
        own = values[at].cpu().numpy()
        held[name] = own[~np.isnan(own)]
    return held


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
    x = _standardised(torch.cat(values))
    y = torch.cat(labels)
    owner = torch.arange(len(parts)).repeat_interleave(torch.tensor([*map(len, labels)]))
    hot = F.one_hot(y, len(data.classes)).double()
    # a little of the identity, so that columns that depend on each other have a solution
    whole = x.T @ x + 1e-3 * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    products = x.T @ hot
    for place, shown in _compared(parts):
        here = owner == place
        own = x[here].T
        scores = x @ torch.linalg.solve(whole - own @ x[here], products - own @ hot[here])
        swapped = list[str]()
        lost = list[str]()
        for a, b in combinations(range(len(data.classes)), 2):
            pair = f"{data.classes[a]!r} and {data.classes[b]!r}"
            usual, _ = _deviations_apart(scores, y, ~here, a, b)
            apart, error = _deviations_apart(scores, y, here, a, b)
            # five standard errors are not chance
            sure = 5 * error
            # half as far apart as elsewhere, with the other sign
            if apart < -usual / 2 < 0 and apart < -sure:
                swapped.append(pair)
            elif data.inputs.agreed and len(parts) > 2 and abs(apart) <= 0.2 * usual:
                others = {*range(len(parts))} - {place}
                least = min(_deviations_apart(scores, y, owner == k, a, b)[0] for k in others)
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
    train = seen.data.train
    test = seen.data.test
    parts = dict[str, tuple[Tensor, Tensor]]()
    for name, at in seen.compared.items():
        parts[name] = train.x[at], train.y[at]
    if not parts and seen.given and min(len(train), len(test)) >= ROWS:
        most = LOOKED_AT // 2
        for name, part in seen.both.items():
            parts[name] = part.x[:most], part.y[:most]
    found = dict[str, tuple[Tensor, Tensor]]()
    for name, (x, y) in parts.items():
        values = _values(x)
        if values is not None:
            found[name] = values, y.cpu()
    return found


def _standardised(values: Tensor) -> Tensor:
    """Return vectors (n, d) with mean 0 and deviation 1, and a 1 behind them."""
    std, mean = torch.std_mean(values, 0)
    std[std == 0] = 1.0
    return F.pad((values - mean) / std, (0, 1), value=1.0)


def _deviations_apart(
    scores: Tensor, y: Tensor, rows: Tensor, a: int, b: int
) -> tuple[float, float]:
    """Return how many deviations scores (n, K) put some rows of two classes apart, and the standard
    error of that.
    """
    margin = scores[:, a] - scores[:, b]
    one = margin[rows & (y == a)]
    other = margin[rows & (y == b)]
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
        return thumbnails(x).flatten(1)
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
        yield from compare_sums([*map(sums_of_array, seen.both, (x, data.test.x))])
    yield from compare_sums([sums_of_array(name, x[at]) for name, at in seen.rows.items()])


def _columns(seen: SeenData) -> Iterator[tuple[str, dict[str, Numbers]]]:
    """Yield the unscaled columns of numbers, each with the values (n,) that silos with enough rows
    have.
    """
    table = Table.of(seen.data.inputs)
    if table.scale or not seen.compared:
        return
    for k, column in enumerate(table.numeric):
        yield column, _held(seen, seen.data.train.x[:, k])


def shifted_codes(seen: SeenData) -> Iterator[str]:
    """Name columns of a few whole numbers that silos count from 0 and from 1."""
    found = list[str]()
    for column, held in _columns(seen):
        codes = dict[str, list[str]]()
        for name, own in held.items():
            codes[name] = [*map("{:.15g}".format, np.unique(own))]
        # what has more values is counted or measured
        if max(map(len, codes.values())) <= _MOST_CLASSES:
            found.append(numbered_from_two(codes, f"column {column!r} is"))
    yield from with_check(found, "use the same codes at all silos")


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
    # NaN between silos without a class in common, which are not compared
    distances = np.fmin.reduce(np.abs(rates[:, None] - rates), axis=2)
    cycles = np.exp(np.nan_to_num(rates).max(axis=1))
    shown = [*map("up to {:.2g} cycles".format, cycles)]
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
    rows = seen.compared
    x = seen.data.train.x
    vectors = x.ndim == 2 and x.is_floating_point() and not Table.of(seen.data.inputs).numeric
    if len(rows) < 3 or not vectors or x.shape[1] < SHORTEST:
        return
    means = F.normalize(_means(seen, _as_it_is))
    cosines = (means @ means.T).numpy().clip(-1, 1)
    shown = [*map("{:.2f} of the direction of all".format, cosines.mean(axis=1))]
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
