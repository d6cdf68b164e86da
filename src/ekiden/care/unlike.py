"""Doubts about signals, and about natural owners: what they share or lack, or hold the other way
round.

All samples are here, so nothing has to be told. Between machines silos tell no sums from which most
of this could be seen.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ekiden.care.seen import LOOKED_AT, MOST_SILOS, ROWS, SeenData, chance, rows_of_several
from ekiden.care.spelling import numbered_from_two
from ekiden.core.base.errors import listed
from ekiden.core.models.images import SHORTEST
from ekiden.core.tasks import Classification, MultiLabel, Segmentation, Survival
from ekiden.readers.kinds import Arrays, Inputs, Table
from ekiden.readers.kinds.arrays import LEADS

_SEVERAL = 0.01  # share of signals with a fault
_MANY, _PEEK, _VALUES = (
    30,
    512,
    1 << 24,
)  # signals, or different values, that mean something; and those looked at
_MOST_CLASSES = 20
_EXPECTED = 5.0  # samples with a label that a silo without any should have
_SUBJECTS = 10  # that two silos share
_MOST_VALUES = 512  # of a sample from which labels are foretold
_SURE = 5.0  # standard errors of a difference that is not chance
_AS_LARGE = 0.5  # times as large as elsewhere is a difference with the other sign
_TOLD, _LOST = 1.0, 0.2  # deviations that tell classes apart, and share of them that hardly does
_TURNED_SHARE = 0.45  # of values that a silo has otherwise
_SIDE = 8  # pixels of a mean picture
_LEVELS, _NEARER = (
    6.0,
    3.0,
)  # grey levels between mean pictures, and how many times nearer the turned one is
_FASTER = 0.33  # logarithm of a factor between frequencies, 1.4
_CUT = 0.1  # share of values at the end of their range from which it is not chance
_SKEWED = 0.5  # skewness of signals that have an upper and a lower side
_ALIKE = 0.7  # cosine between means of embeddings of one model
_DECIMALS, _DIFFERENT = 4, 3  # that are looked for, in at least so many different numbers
_MOSTLY = 0.7  # share of numbers with more decimals than a silo that rounded them has

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
    data, rows = seen.data, seen.compared
    parts = {name: (data.train, at) for name, at in rows.items()}
    if not rows and seen.given and min(len(data.train), len(data.test)) >= ROWS:
        both = {"the training part": data.train, "the test part": data.test}
        parts = {
            name: (part, torch.arange(len(part))[: LOOKED_AT // 2]) for name, part in both.items()
        }
    if (
        not isinstance(data.task, Classification)
        or not 2 <= len(data.classes) <= _MOST_CLASSES
        or not parts
    ):
        return
    values = {name: _values(part.x[at], data.inputs) for name, (part, at) in parts.items()}
    if any(x is None for x in values.values()):
        return
    x = {name: F.pad(v, (0, 1), value=1.0) for name, v in values.items() if v is not None}
    whole = torch.cat([*x.values()])
    mean, std = whole.mean(0), whole.std(0)
    mean[-1], std[std == 0] = 0.0, 1.0
    x = {name: (v - mean) / std for name, v in x.items()}
    y = {name: part.y[at].cpu() for name, (part, at) in parts.items()}
    sums = {
        name: (v.T @ v, v.T @ F.one_hot(y[name], len(data.classes)).double())
        for name, v in x.items()
    }
    squares, products = (torch.stack(each).sum(0) for each in zip(*sums.values(), strict=True))
    for name, others, shown in _compared([*parts]):
        own, told = sums[name]
        ridge = squares - own + len(whole) * 1e-3 * torch.eye(len(own), dtype=torch.float64)
        weights = torch.linalg.solve(ridge, products - told)
        here = x[name] @ weights, y[name]
        there = torch.cat([x[n] @ weights for n in others]), torch.cat([y[n] for n in others])
        swapped, lost = list[str](), list[str]()
        for a, b in combinations(range(len(data.classes)), 2):
            usual, _ = _apart(*there, a, b)
            apart, error = _apart(*here, a, b)
            if apart < -_AS_LARGE * usual < 0 and apart < -_SURE * error:
                swapped.append(f"{data.classes[a]!r} and {data.classes[b]!r}")
            elif data.inputs.agreed and len(others) > 1 and abs(apart) <= _LOST * usual:
                least = min(_apart(x[n] @ weights, y[n], a, b)[0] for n in others)
                if 0 < error * _SURE <= least and least >= _TOLD:
                    lost.append(f"{data.classes[a]!r} and {data.classes[b]!r}")
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


def _compared(silos: list[str]) -> Iterator[tuple[str, list[str], str]]:
    """Yield each silo, the others, and the silo in words; of two it is open which one is wrong."""
    for name in silos if len(silos) > 2 else silos[:1]:
        yield name, [n for n in silos if n != name], name if len(silos) > 2 else " or ".join(silos)


def _apart(scores: Tensor, y: Tensor, a: int, b: int) -> tuple[float, float]:
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
            as_is, turned = (
                float((view(m) - view(usual)).square().mean().sqrt()) for m in (own, turn(own))
            )
            if as_is >= max(_LEVELS, chance) and turned * _NEARER <= as_is:
                yield f"images of {shown} seem as if they {what}, compared with other silos: check how they were made"
                break


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
        part, cut, marked = x[rows], list[str](), list[str]()
        channels = enumerate(part[:: part.numel() // _VALUES + 1].movedim(1, 0).cpu())
        for (channel, values), sign in product(channels, (1, -1)):
            signed = values * sign
            at = signed == signed.max()
            rest, end = signed[~at], float(values[at][0])
            if len(rest[:_PEEK].unique()) < _MANY:
                continue
            shown = f"{end:.4g} in channel {channel}"
            if at.sum() > 2 and signed.max() - rest.max() > rest.max() - rest.min():
                marked.append(shown)
            elif end and (at[:, 1:] & at[:, :-1]).double().mean() >= _SEVERAL / 2:
                cut.append(shown)
        if cut:
            yield f"many values of signals of {owner} are at the end of their range ({listed(cut)}): check for clipping"
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
        if (
            raw.subject is None
            and raw.kind is Arrays
            and np.ndim(raw.images) == 3
            and len(raw) >= _MANY
        ):
            rows = range(0, len(raw) - 1, -(-len(raw) // _MANY))
            pairs = [(np.asarray(raw.images[row]), np.asarray(raw.images[row + 1])) for row in rows]
            if 2 * sum(_overlap(*pair) for pair in pairs) >= len(pairs):
                yield (
                    f"signals of {raw.source} overlap with those that follow them, so parts of the "
                    "test are in training: cut windows that do not overlap, or say whom each is "
                    "about (subject=, --subject-column)"
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
    x = data.train.x
    if not _are_signals(x):
        return
    told = {
        name: {
            k: _frequency(x[at[y == k]])
            for k in np.unique(y).tolist()
            if (y == k).sum() >= ROWS / 2
        }
        for name, at in rows.items()
        for y in [
            data.train.y[at] if isinstance(data.task, Classification) else torch.zeros(len(at))
        ]
    }
    for name, others, shown in _compared([*rows]):
        pairs = [
            (own, [told[n][k] for n in others if k in told[n]]) for k, own in told[name].items()
        ]
        steps = [own - np.array(each) for own, each in pairs if each]
        if steps and all(abs(s.mean()) >= max(_FASTER, 2 * np.ptp(s)) for s in steps):
            factor = float(np.exp(np.concatenate(steps).mean()))
            if all((s.mean() > 0) == (factor > 1) for s in steps):
                yield (
                    f"signals of {shown} change {max(factor, 1 / factor):.2g} times as fast or as "
                    "slowly as at other silos: bring all to one sampling rate, if theirs differ"
                )


def _upside_down(seen: SeenData) -> Iterator[str]:
    """Name silos with signals that are skewed in the other direction than those of all others."""
    x, rows = seen.data.train.x, seen.compared
    skewed = {name: _skewness(x[at]) for name, at in rows.items()} if _are_signals(x) else {}
    for name, others, shown in _compared([*skewed]):
        there = torch.stack([skewed[n] for n in others])
        usual = there.abs().amin(0) * there[0].sign() * (there.sign() == there[0].sign()).all(0)
        if bool((skewed[name] * usual < -(_SKEWED**2)).any()):
            yield f"signals of {shown} seem as if they are upside down, compared with other silos: check their polarity"


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


def _turned_shares(seen: SeenData) -> Iterator[str]:
    """Name silos that have as much of one value as others have of another: masks, events, columns
    of a few values.
    """
    data, rows = seen.data, seen.compared
    y = {name: data.train.y[at].cpu().numpy() for name, at in rows.items()}
    held = dict[str, dict[str, NDArray[np.float64]]]()
    if isinstance(data.task, Segmentation):
        for a, b in combinations(range(len(data.classes)), 2):
            what = f"masks of %s seem to have {data.classes[a]!r} and {data.classes[b]!r} changed places"
            held[what] = {n: _shares(v, [a, b]) for n, v in y.items()}
    if isinstance(data.task, Survival):
        held["events of %s seem to mean that there was none"] = {
            n: _shares(v[:, 1], [0, 1]) for n, v in y.items()
        }
    if isinstance(data.task, MultiLabel) and len(rows) > 2:
        for k, name in enumerate(data.classes):
            held[f"the label {name!r} of %s seems to be inverted"] = {
                n: _shares(v[:, k], [0, 1]) for n, v in y.items()
            }
    for column, each in _columns(seen) if len(rows) > 2 else ():
        values = np.unique(np.concatenate([*each.values()])).tolist()
        if 2 <= len(values) <= _MOST_CLASSES:
            how = (
                "have {:g} and {:g} changed places"
                if len(values) == 2
                else "count the other way round, {:g} to {:g}"
            )
            what = f"column {column!r} of %s seems to {how.format(values[0], values[-1])}"
            held[what] = {n: _shares(v, values) for n, v in each.items()}
    for what, silos in held.items():
        for name, others, shown in _compared([*silos]):
            here, there = silos[name], [silos[n] for n in others]
            usual = np.mean(there, axis=0)
            apart, *alike = (np.abs(one - usual).sum() / 2 for one in (here, here[::-1], *there))
            if apart >= _TURNED_SHARE and apart >= _NEARER * max(alike):
                yield f"{what % shown}, compared with other silos: check them"


def _shares(values: NDArray[Any], wanted: Sequence[float]) -> NDArray[np.float64]:
    """Return the shares (k,) of some values among all that are one of these."""
    counts = np.array([(values == one).sum() for one in wanted], dtype=np.float64)
    return np.asarray(counts / max(counts.sum(), 1))


def _columns(seen: SeenData) -> Iterator[tuple[str, dict[str, NDArray[np.float64]]]]:
    """Yield the unscaled columns of numbers, each with the values (n,) that silos with enough rows
    have.
    """
    table, rows = Table.of(seen.data.inputs), seen.compared
    for k, column in enumerate(() if table.scale or not rows else table.numeric):
        each = {name: seen.data.train.x[at, k].cpu().numpy() for name, at in rows.items()}
        yield column, {name: v[~np.isnan(v)] for name, v in each.items()}


def _otherwise_written(seen: SeenData) -> Iterator[str]:
    """Name columns that one silo rounds, cuts off at a limit, or counts from 0; and those that name
    the silo.
    """
    rounded, cut, counted, named = list[str](), list[str](), list[str](), list[str]()
    for column, each in _columns(seen):
        found = {n: np.unique(v, return_counts=True) for n, v in each.items()}
        if len(each) > 2 and min(len(d) for d, _ in found.values()) >= _DIFFERENT:
            rounded += [f"column {column!r} at {n}" for n in each if _rounded(n, each)]
        for end in (0, -1) if min(len(d) for d, _ in found.values()) >= ROWS else ():
            ends = {
                n: (counts[end] / counts.sum(), counts[end]) for n, (_, counts) in found.items()
            }
            (second, _), (most, rows) = sorted(ends.values())[-2:]
            if most >= _CUT and rows >= ROWS / 2 and second <= _CUT / 5:
                name = next(n for n, one in ends.items() if one == (most, rows))
                cut.append(f"{most:.0%} of column {column!r} at {name} ({found[name][0][end]:g})")
        if all(0 < len(d) <= _MOST_CLASSES and (d == d.round()).all() for d, _ in found.values()):
            whole = {n: {str(int(v)) for v in d} for n, (d, _) in found.items()}
            counted += filter(None, [numbered_from_two(whole, f"column {column!r} is")])
    table = Table.of(seen.data.inputs)
    rows_of = seen.compared if len(seen.rows) > 2 and not table.scale else {}
    for k, column in enumerate((*table.numeric, *table.categorical) if rows_of else ()):
        values = [np.unique(seen.data.train.x[at, k].cpu()) for at in rows_of.values()]
        if all(len(v) == 1 for v in values) and len(np.unique(values)) == len(values):
            named.append(f"column {column!r}")
    for lines, what in (
        (rounded, "has fewer decimals than at other silos: check that it was not rounded"),
        (
            cut,
            "is one value, at the end, and hardly any at other silos: check for a limit of "
            "detection, or clipping",
        ),
        (counted, "use the same codes at all silos"),
        (
            named,
            "has one value at each silo, and at each another: it names the silo, so leave it out",
        ),
    ):
        if lines:
            yield f"{listed(lines, sign='; ')}{': ' if lines is counted else ' '}{what}"


def _rounded(silo: str, values: Mapping[str, NDArray[np.float64]]) -> bool:
    """Return whether a silo's numbers have fewer decimals than most numbers of each other silo
    have.

    A few numbers with more decimals are by nature: measured to three digits, 0.0987 has one more
    than 0.123.
    """

    def finer(name: str, decimals: int) -> float:
        return 1 - float(
            np.isclose(np.round(values[name], decimals), values[name], rtol=1e-9, atol=1e-12).mean()
        )

    own = next((d for d in range(_DECIMALS) if not finer(silo, d)), None)
    return own is not None and all(finer(name, own) >= _MOSTLY for name in values if name != silo)


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
        without = [
            silo
            for silo, at in seen.rows.items()
            if not has[at].any() and len(at) * rare >= _EXPECTED
        ]
        found += [f"{name!r} (at {listed(without)})"] * bool(without)
    if found:
        yield (
            f"no training sample has the label {listed(found, sign='; ')}, and many at other silos "
            "have: check that it was looked for there"
        )


def _subjects_of_several(seen: SeenData) -> Iterator[str]:
    """Say that most subjects of a silo are at another one as well, as if each silo numbered its
    own.
    """
    both = (seen.data.train, seen.data.test)
    if any(part.subject is None or part.group is None for part in both):
        return
    who, at = (
        torch.cat([getattr(part, name) for part in both]).cpu().numpy()
        for name in ("subject", "group")
    )
    held = {name: {*who[at == k].tolist()} for k, name in enumerate(seen.data.groups[:MOST_SILOS])}
    for (one, here), (other, there) in combinations(held.items(), 2):
        shared, least = len(here & there), min(len(here), len(there))
        if shared >= _SUBJECTS and shared >= least / 2:
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
    if (
        x.ndim != 2
        or not x.is_floating_point()
        or Table.of(seen.data.inputs).numeric
        or x.shape[1] < SHORTEST
    ):
        return
    mean = {name: F.normalize(x[at].double().mean(0), dim=0).cpu() for name, at in rows.items()}
    for name in rows if len(rows) > 2 else ():
        others = torch.stack([m for n, m in mean.items() if n != name])
        if (
            float((others @ others.T).min()) >= _ALIKE
            and float((others @ mean[name]).max()) <= _ALIKE / 2
        ):
            yield f"values of {name} lie elsewhere than those of all other silos: check that one model made all of them"


MORE_DOUBTS = (
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
    _otherwise_written,
    _foreign_embeddings,
    _upside_down,
)
"""what is looked for; each yields a line for what it finds"""
