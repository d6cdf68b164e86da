"""Rules about signals: channels that are off, values at the end of their range, windows that overlap."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.care.seen import SeenData
from ekiden.core.base.errors import listed
from ekiden.core.models.images import SHORTEST
from ekiden.readers.kinds import Arrays
from ekiden.readers.kinds.arrays import LEADS

_MANY = 30
"""signals, or different values, that mean something"""


def are_signals(x: Tensor) -> bool:
    """Return whether samples (n, C, T) are signals of a few channels."""
    return x.ndim == 3 and x.is_floating_point() and x.shape[1] <= LEADS and x.shape[2] >= SHORTEST


def flat_channels(seen: SeenData) -> Iterator[str]:
    """Say how many signals have channels with one value only, as if a lead was off."""
    x, bare = (torch.cat(each) for each in ((seen.data.train.x, seen.data.test.x), seen.bare))
    if not are_signals(x) or x.shape[1] == 1:
        return
    flat = (x.amin(2) == x.amax(2)).cpu() & ~bare[:, None]
    rows = int(flat.any(1).sum())
    # fewer make no difference
    if rows and rows >= 0.01 * len(x):
        yield (
            f"{rows:,} of {len(x):,} signals of {seen.source} have one value only in channel "
            f"{listed(flat.any(0).nonzero()[:, 0].tolist())}: check that no lead was off"
        )


def ends_of_signals(seen: SeenData) -> Iterator[str]:
    """Name channels of which many values lie at the end of their range, or a few far outside the
    others.
    """
    x = seen.data.train.x
    if not are_signals(x):
        return
    for owner, rows in (seen.rows or {seen.source: torch.arange(len(x))}).items():
        cut, marked = list[str](), list[str]()
        part = x[rows]
        # so many values are looked at in a second
        some = part[:: part.numel() // (1 << 24) + 1].cpu()
        for channel, sign in product(range(x.shape[1]), (1, -1)):
            values = some[:, channel]
            at = sign * values == (sign * values).max()
            rest, end = sign * values[~at], float(values[at][0])
            # of fewer different values, many are at the end by nature
            if len(np.unique(rest[:512])) < _MANY:
                continue
            shown = f"{end:.4g} in channel {channel}"
            if at.sum() > 2 and sign * end - rest.max() > rest.max() - rest.min():
                marked.append(shown)
            # one after another: a single peak does not count
            elif end and (at[:, 1:] & at[:, :-1]).double().mean() >= 0.005:
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


def windows(seen: SeenData) -> Iterator[str]:
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
    for start in np.flatnonzero(one[0] == following[0, 0]):
        end = one[:, start:]
        long = end.shape[1] >= SHORTEST // 2 and np.ptp(end) > 0
        if long and (end == following[:, : end.shape[1]]).all():
            return True
    return False


RULES = (flat_channels, ends_of_signals, windows)
"""each yields a line for what it finds"""
