"""Doubts about signals, and about natural owners: what they share or lack, or hold the other way
round.

All samples are here, so nothing has to be told. Between machines silos tell no sums from which most
of this could be seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ekiden.care.seen import LOOKED_AT, MOST_SILOS, ROWS, SeenData, chance, rows_of_several
from ekiden.care.spelling import numbered_from_two
from ekiden.core.base.errors import listed
from ekiden.core.data.samples import Dataset, Samples
from ekiden.core.models.images import SHORTEST
from ekiden.core.tasks import Classification, MultiLabel, Segmentation, Survival
from ekiden.readers.kinds import Arrays, Inputs, Table
from ekiden.readers.kinds.arrays import LEADS

# share of signals with a fault
_SEVERAL = 0.01
# signals, or different values, that mean something
_MANY = 30
# that are looked at
_PEEK, _VALUES = 512, 1 << 24
_MOST_CLASSES = 20
# of a sample from which labels are foretold
_MOST_VALUES = 512
# standard errors of a difference that is not chance
_SURE = 5.0
# pixels of a mean picture
_SIDE = 8
_TURNED: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "are negatives": (lambda m: m, lambda m: 255 - m),
    "have red and blue changed places": (lambda m: m[:1] - m[-1:], lambda m: m.flip(0)),
    "are upside down": (lambda m: m - m.mean((1, 2), keepdim=True), lambda m: m.flip(1)),
    "are mirrored": (lambda m: m - m.mean((1, 2), keepdim=True), lambda m: m.flip(2)),
    "are turned by 90 degrees": (
        lambda m: m - m.mean((1, 2), keepdim=True),
        lambda m: m.rot90(1, (1, 2)),
    ),
    "are turned by -90 degrees": (
        lambda m: m - m.mean((1, 2), keepdim=True),
        lambda m: m.rot90(-1, (1, 2)),
    ),
}
"""what may be wrong with pictures: what is compared of a mean picture (C, H, W), and what undoes
it"""


def _swapped_labels(seen: SeenData) -> Iterator[str]:
    """Name two classes that a linear model of other silos tells apart, but at a silo not, or the
    other way round.
    """
    data = seen.data
    parts = _labelled_parts(seen)
    several = 2 <= len(data.classes) <= _MOST_CLASSES
    if not isinstance(data.task, Classification) or not several or not parts:
        return
    values = {name: _values(part.x[at], data.inputs) for name, (part, at) in parts.items()}
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
            # half as far apart as elsewhere, with the other sign, and not by chance
            if apart < -usual / 2 < 0 and apart < -_SURE * error:
                swapped.append(pair)
            elif data.inputs.agreed and len(others) > 1 and abs(apart) <= 0.2 * usual:
                least = min(_deviations_apart(*scores[n], a, b)[0] for n in others)
                # a deviation at each other silo tells them apart for certain
                if 0 < error * _SURE <= least and least >= 1:
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


def _compared(silos: Sequence[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each silo, the others, and the silo in words; of two it is open which one is wrong."""
    if len(silos) == 2:
        yield silos[0], [silos[1]], " or ".join(silos)
    if len(silos) > 2:
        for name in silos:
            yield name, [n for n in silos if n != name], name


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


def _values(x: Tensor, inputs: Inputs) -> Tensor | None:
    """Return samples as vectors (n, d) float64 from which labels may be foretold; None for other
    kinds.
    """
    x = x.cpu()
    if x.ndim == 4 and x.dtype == torch.uint8:
        return F.adaptive_avg_pool2d(x.double(), _SIDE).flatten(1)
    if x.dtype == torch.int64 and x.ndim == 2:
        return torch.zeros(len(x), _MOST_VALUES, dtype=torch.float64).scatter_(
            1, x % _MOST_VALUES, 1.0
        )
    if x.ndim != 2 or x.shape[1] > _MOST_VALUES:
        return None
    numbers, table = x.double(), Table.of(inputs)
    parts = [
        torch.where(numbers.isnan(), numbers.nanmean(0), numbers)[:, : len(table.numeric) or None]
    ]
    for k, known in enumerate(table.vocabularies, len(table.numeric)):
        if len(known) < _MOST_CLASSES:
            parts.append(F.one_hot(x[:, k].long(), len(known) + 1).double())
    return torch.cat(parts, 1).nan_to_num()


def _turned_pictures(seen: SeenData) -> Iterator[str]:
    """Name silos whose mean picture is much nearer to that of the others if colours or sides change
    places.
    """
    x, rows = seen.data.train.x, seen.compared
    if x.ndim != 4 or x.dtype != torch.uint8:
        return
    small = {name: F.adaptive_avg_pool2d(x[at].double(), _SIDE).cpu() for name, at in rows.items()}
    mean = {name: each.mean(0) for name, each in small.items()}
    for name, others, shown in _compared([*rows]):
        own, usual = mean[name], torch.stack([mean[n] for n in others]).mean(0)
        chance = _SURE * float((small[name].var(0).mean() / len(small[name])).sqrt())
        for what, (view, turn) in _TURNED.items():
            as_is = _distance(view(own), view(usual))
            # six grey levels are seen, and the turned picture must be far nearer
            if as_is >= max(6, chance) and 3 * _distance(view(turn(own)), view(usual)) <= as_is:
                yield (
                    f"images of {shown} seem as if they {what}, compared with other silos: check "
                    "how they were made"
                )
                break


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).square().mean().sqrt())


def _are_signals(x: Tensor) -> bool:
    """Return whether samples (n, C, T) are signals of a few channels."""
    return x.ndim == 3 and x.is_floating_point() and x.shape[1] <= LEADS and x.shape[2] >= SHORTEST


def _flat_channels(seen: SeenData) -> Iterator[str]:
    """Say how many signals have channels with one value only, as if a lead was off."""
    x, bare = (torch.cat(each) for each in ((seen.data.train.x, seen.data.test.x), seen.bare))
    if not _are_signals(x) or x.shape[1] == 1:
        return
    flat = (x.amin(2) == x.amax(2)).cpu() & ~bare[:, None]
    rows = int(flat.any(1).sum())
    if rows and rows >= _SEVERAL * len(x):
        yield (
            f"{rows:,} of {len(x):,} signals of {seen.source} have one value only in channel "
            f"{listed(flat.any(0).nonzero()[:, 0].tolist())}: check that no lead was off"
        )


def _ends_of_signals(seen: SeenData) -> Iterator[str]:
    """Name channels of which many values lie at the end of their range, or a few far outside the
    others.
    """
    x = seen.data.train.x
    if not _are_signals(x):
        return
    for owner, rows in (seen.rows or {seen.source: torch.arange(len(x))}).items():
        cut, marked = list[str](), list[str]()
        part = x[rows]
        some = part[:: part.numel() // _VALUES + 1].cpu()
        for channel, sign in product(range(x.shape[1]), (1, -1)):
            values = some[:, channel]
            at = sign * values == (sign * values).max()
            rest, end = sign * values[~at], float(values[at][0])
            # of fewer different values, many are at the end by nature
            if len(np.unique(rest[:_PEEK])) < _MANY:
                continue
            shown = f"{end:.4g} in channel {channel}"
            if at.sum() > 2 and sign * end - rest.max() > rest.max() - rest.min():
                marked.append(shown)
            # one after another: a single peak does not count
            elif end and (at[:, 1:] & at[:, :-1]).double().mean() >= _SEVERAL / 2:
                cut.append(shown)
        if cut:
            yield (
                f"many values of signals of {owner} are at the end of their range ({listed(cut)}): "
                "check for clipping"
            )
        if marked:
            yield (
                f"signals of {owner} have values far from all others ({listed(marked)}): if these "
                "mark missing ones, leave such signals out, or fill them"
            )


def _windows(seen: SeenData) -> Iterator[str]:
    """Say that signals are overlapping windows of longer ones, so that some of the test are in
    training.
    """
    for raw in seen.raws:
        signals = raw.kind is Arrays and np.ndim(raw.images) == 3 and len(raw) >= _MANY
        if raw.subject is not None or not signals:
            continue
        rows = range(0, len(raw) - 1, -(-len(raw) // _MANY))
        overlap = sum(_overlap(*map(np.asarray, raw.images[row : row + 2])) for row in rows)
        if 2 * overlap >= len(rows):
            yield (
                f"signals of {raw.source} overlap with those that follow them, so parts of the "
                "test are in training: cut windows that do not overlap, or say whom each is about "
                "(subject=, --subject-column)"
            )
            return


def _overlap(one: NDArray[Any], following: NDArray[Any]) -> bool:
    """Return whether a signal (C, T) begins as the one before it ends."""
    starts = np.flatnonzero(one[0] == following[0, 0])
    ends = ((one[:, start:], following[:, : one.shape[1] - start]) for start in starts)
    return any(
        end.shape[1] >= SHORTEST // 2 and np.ptp(end) > 0 and (end == begin).all()
        for end, begin in ends
    )


def _odd_signals(seen: SeenData) -> Iterator[str]:
    """Name silos whose signals change more slowly or faster than others', in each class that others
    have.
    """
    data, rows = seen.data, seen.compared
    if not _are_signals(data.train.x):
        return
    told = {name: _frequencies(data, at) for name, at in rows.items()}
    for name, others, shown in _compared([*rows]):
        steps = list[NDArray[np.float64]]()
        for kind, own in told[name].items():
            each = [told[n][kind] for n in others if kind in told[n]]
            if each:
                steps.append(own - np.array(each))
        # a factor of 1.4, twice as much as the others differ by
        apart = [abs(s.mean()) >= max(0.33, 2 * np.ptp(s)) for s in steps]
        if not steps or not all(apart):
            continue
        factor = float(np.exp(np.concatenate(steps).mean()))
        if all((s.mean() > 0) == (factor > 1) for s in steps):
            yield (
                f"signals of {shown} change {max(factor, 1 / factor):.2g} times as fast or as "
                "slowly as at other silos: bring all to one sampling rate, if theirs differ"
            )


def _frequencies(data: Dataset, rows: Tensor) -> dict[int, float]:
    """Return the logarithm of the median frequency of a silo's signals of each class."""
    y = data.train.y[rows] if isinstance(data.task, Classification) else torch.zeros(len(rows))
    return {
        kind: _frequency(data.train.x[rows[y == kind]])
        for kind in np.unique(y).tolist()
        if (y == kind).sum() >= ROWS / 2
    }


def _upside_down(seen: SeenData) -> Iterator[str]:
    """Name silos with signals that are skewed in the other direction than those of all others."""
    x, rows = seen.data.train.x, seen.compared
    if not _are_signals(x):
        return
    skewed = {name: _skewness(x[at]) for name, at in rows.items()}
    for name, others, shown in _compared([*skewed]):
        there = torch.stack([skewed[n] for n in others])
        agree = (there.sign() == there[0].sign()).all(0)
        usual = there.abs().amin(0) * there[0].sign() * agree
        # signals with an upper and a lower side have a skewness of 0.5 or more
        if bool((skewed[name] * usual < -(0.5**2)).any()):
            yield (
                f"signals of {shown} seem as if they are upside down, compared with other silos: "
                "check their polarity"
            )


def _skewness(x: Tensor) -> Tensor:
    """Return the mean skewness (C,) of signals (n, C, T)."""
    x = x.double().cpu()
    x = x - x.mean(2, keepdim=True)
    return (x.pow(3).mean(2) / x.square().mean(2).sqrt().clamp(min=1e-12) ** 3).mean(0)


def _frequency(x: Tensor) -> float:
    """Return the logarithm of the median frequency of signals (n, C, T)."""
    x = x.double().cpu()
    power = torch.fft.rfft(x - x.mean(2, keepdim=True)).abs().square().sum(1)
    below = power.cumsum(1) / power.sum(1, keepdim=True).clamp(min=1e-300)
    at = (below < 0.5).sum(1).clamp(1, power.shape[1] - 1)[:, None]
    before, here = below.gather(1, at - 1), below.gather(1, at)
    return float(
        (at - (here - 0.5) / (here - before).clamp(min=1e-12)).clamp(min=0.1).log().median()
    )


_Shares: TypeAlias = dict[str, NDArray[np.float64]]
"""for each silo the shares (k,) of some values"""


def _turned_shares(seen: SeenData) -> Iterator[str]:
    """Name silos that have as much of one value as others have of another: masks, events, columns
    of a few values.
    """
    for what, silos in chain(_shares_of_labels(seen), _shares_of_columns(seen)):
        for name, others, shown in _compared([*silos]):
            here, there = silos[name], [silos[n] for n in others]
            usual = np.mean(there, axis=0)
            apart = np.abs(here - usual).sum() / 2
            alike = max(np.abs(one - usual).sum() / 2 for one in (here[::-1], *there))
            # nearly half of the values, and far more than silos differ by
            if apart >= 0.45 and apart >= 3 * alike:
                yield f"{what % shown}, compared with other silos: check them"


def _shares_of_labels(seen: SeenData) -> Iterator[tuple[str, _Shares]]:
    """Yield the shares of values of labels that may have changed places, each with what that would
    be.
    """
    data, rows = seen.data, seen.compared
    y = {name: data.train.y[at].cpu().numpy() for name, at in rows.items()}
    if isinstance(data.task, Segmentation):
        for a, b in combinations(range(len(data.classes)), 2):
            what = f"{data.classes[a]!r} and {data.classes[b]!r} changed places"
            yield f"masks of %s seem to have {what}", {n: _shares(v, [a, b]) for n, v in y.items()}
    if isinstance(data.task, Survival):
        shares = {n: _shares(v[:, 1], [0, 1]) for n, v in y.items()}
        yield "events of %s seem to mean that there was none", shares
    # of two silos it is open which one is inverted
    if isinstance(data.task, MultiLabel) and len(rows) > 2:
        for k, label in enumerate(data.classes):
            shares = {n: _shares(v[:, k], [0, 1]) for n, v in y.items()}
            yield f"the label {label!r} of %s seems to be inverted", shares


def _shares_of_columns(seen: SeenData) -> Iterator[tuple[str, _Shares]]:
    """Yield the shares of values of columns of a few values."""
    if len(seen.compared) < 3:
        return
    for column, each in _columns(seen):
        values = np.unique(np.concatenate([*each.values()])).tolist()
        if not 2 <= len(values) <= _MOST_CLASSES:
            continue
        low, high = f"{values[0]:g}", f"{values[-1]:g}"
        how = f"count the other way round, {low} to {high}"
        if len(values) == 2:
            how = f"have {low} and {high} changed places"
        shares = {n: _shares(v, values) for n, v in each.items()}
        yield f"column {column!r} of %s seems to {how}", shares


def _shares(values: NDArray[Any], wanted: Sequence[float]) -> NDArray[np.float64]:
    """Return the shares (k,) of some values among all that are one of these."""
    counts = np.array([(values == one).sum() for one in wanted], dtype=np.float64)
    return np.asarray(counts / max(counts.sum(), 1))


def _columns(seen: SeenData) -> Iterator[tuple[str, dict[str, NDArray[np.float64]]]]:
    """Yield the unscaled columns of numbers, each with the values (n,) that silos with enough rows
    have.
    """
    table = Table.of(seen.data.inputs)
    if table.scale or not seen.compared:
        return
    for k, column in enumerate(table.numeric):
        each = {name: seen.data.train.x[at, k].cpu().numpy() for name, at in seen.compared.items()}
        yield column, {name: v[~np.isnan(v)] for name, v in each.items()}


def _rounded_columns(seen: SeenData) -> Iterator[str]:
    """Name columns of which one silo has fewer decimals than all others."""
    found = list[str]()
    for column, each in _columns(seen):
        # three different numbers may all be whole by chance
        if len(each) > 2 and min(len(np.unique(values)) for values in each.values()) >= 3:
            found += [f"column {column!r} at {name}" for name in each if _rounded(name, each)]
    if found:
        yield (
            f"{listed(found, sign='; ')} has fewer decimals than at other silos: check that it was "
            "not rounded"
        )


def _cut_columns(seen: SeenData) -> Iterator[str]:
    """Name columns of which one silo has many equal values at the end of their range."""
    found = list[str]()
    for column, each in _columns(seen):
        counts = {name: np.unique(v, return_counts=True) for name, v in each.items()}
        # of fewer different values, each has a large share
        if min(len(values) for values, _ in counts.values()) < ROWS:
            continue
        for end in (0, -1):
            shares = {name: rows[end] / rows.sum() for name, (_, rows) in counts.items()}
            second, name = sorted(shares, key=lambda one: shares[one])[-2:]
            values, rows = counts[name]
            # a tenth at one silo, and hardly any at others, is a limit that only one has
            if shares[name] >= 0.1 and rows[end] >= ROWS / 2 and shares[second] <= 0.02:
                shown = f"{shares[name]:.0%} of column {column!r} at {name}"
                found.append(f"{shown} ({values[end]:g})")
    if found:
        yield (
            f"{listed(found, sign='; ')} is one value, at the end, and hardly any at other silos: "
            "check for a limit of detection, or clipping"
        )


def _shifted_codes(seen: SeenData) -> Iterator[str]:
    """Name columns of a few whole numbers that silos count from 0 and from 1."""
    found = list[str]()
    for column, each in _columns(seen):
        values = {name: np.unique(v) for name, v in each.items()}
        if all(0 < len(v) <= _MOST_CLASSES and (v == v.round()).all() for v in values.values()):
            whole = {name: {str(int(one)) for one in v} for name, v in values.items()}
            if line := numbered_from_two(whole, f"column {column!r} is"):
                found.append(line)
    if found:
        yield f"{listed(found, sign='; ')}: use the same codes at all silos"


def _columns_that_name_silos(seen: SeenData) -> Iterator[str]:
    """Name columns with one value at each silo, and at each another."""
    table, found = Table.of(seen.data.inputs), list[str]()
    if len(seen.rows) < 3 or table.scale or not seen.compared:
        return
    for k, column in enumerate((*table.numeric, *table.categorical)):
        values = [np.unique(seen.data.train.x[at, k].cpu()) for at in seen.compared.values()]
        if all(len(v) == 1 for v in values) and len(np.unique(values)) == len(values):
            found.append(f"column {column!r}")
    if found:
        yield (
            f"{listed(found, sign='; ')} has one value at each silo, and at each another: it names "
            "the silo, so leave it out"
        )


def _rounded(silo: str, values: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether a silo's numbers have fewer decimals than most numbers of each other silo
    have.

    A few numbers with more decimals are by nature: measured to three digits, 0.0987 has one more
    than 0.123.
    """
    # who has more decimals has not rounded
    for decimals in range(4):
        if not _share_finer(values[silo], decimals):
            others = (v for name, v in values.items() if name != silo)
            return all(_share_finer(v, decimals) >= 0.7 for v in others)
    return False


def _share_finer(values: NDArray[np.float64], decimals: int) -> float:
    """Return the share of numbers with more decimals."""
    return 1 - float(np.isclose(values.round(decimals), values, rtol=1e-9, atol=1e-12).mean())


def _absent_labels(seen: SeenData) -> Iterator[str]:
    """Name labels, and classes of pixels, that no sample of a silo has, as if nobody had looked for
    them there.
    """
    data = seen.data
    if not seen.rows or not isinstance(data.task, MultiLabel | Segmentation):
        return
    y, found = data.train.y, list[str]()
    for k, name in enumerate(data.classes):
        has = y[:, k] > 0.5 if y.ndim == 2 else (y == k).flatten(1).any(1)
        rare = has.double().mean()
        # a silo that should have five has none by chance in one of 150 cases
        silos = [s for s, at in seen.rows.items() if not has[at].any() and len(at) * rare >= 5]
        if silos:
            found.append(f"{name!r} (at {listed(silos)})")
    if found:
        yield (
            f"no training sample has the label {listed(found, sign='; ')}, and many at other silos "
            "have: check that it was looked for there"
        )


def _subjects_of_several(seen: SeenData) -> Iterator[str]:
    """Say that most subjects of a silo are at another one as well, as if each silo numbered its
    own.
    """
    held: dict[str, set[int]] = {name: set() for name in seen.data.groups[:MOST_SILOS]}
    for part in (seen.data.train, seen.data.test):
        if part.subject is None or part.group is None:
            return
        for k, name in enumerate(held):
            held[name] |= {*part.subject[part.group == k].tolist()}
    for (one, here), (other, there) in combinations(held.items(), 2):
        shared, least = len(here & there), min(len(here), len(there))
        # fewer may have been treated in both
        if shared >= 10 and shared >= least / 2:
            yield (
                f"{shared:,} of {least:,} subjects of {one} are also at {other}, and count as the "
                "same: if each silo numbers its own, put its name before the number"
            )
            return


def _shared_rows(seen: SeenData) -> Iterator[str]:
    """Say how many rows several natural owners have."""
    if seen.data.groups:
        yield from rows_of_several(seen.owned, chance(seen.data.train.x))


def _foreign_embeddings(seen: SeenData) -> Iterator[str]:
    """Name silos whose embeddings point elsewhere than those of all others, as those of another
    model do.
    """
    rows, x = seen.compared, seen.data.train.x
    vectors = x.ndim == 2 and x.is_floating_point() and x.shape[1] >= SHORTEST
    if len(rows) < 3 or not vectors or Table.of(seen.data.inputs).numeric:
        return
    mean = {name: F.normalize(x[at].double().mean(0), dim=0).cpu() for name, at in rows.items()}
    for name in rows:
        others = torch.stack([m for n, m in mean.items() if n != name])
        # means of one model's embeddings have a cosine of 0.7 or more
        agree = float((others @ others.T).min()) >= 0.7
        if agree and float((others @ mean[name]).max()) <= 0.35:
            yield (
                f"values of {name} lie elsewhere than those of all other silos: check that one "
                "model made all of them"
            )


RULES = (
    _flat_channels,
    _ends_of_signals,
    _windows,
    _shared_rows,
    _absent_labels,
    _subjects_of_several,
    _swapped_labels,
    _turned_pictures,
    _turned_shares,
    _odd_signals,
    _rounded_columns,
    _cut_columns,
    _shifted_codes,
    _columns_that_name_silos,
    _foreign_embeddings,
    _upside_down,
)
"""each yields a line for what it finds"""
