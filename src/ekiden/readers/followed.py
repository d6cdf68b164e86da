"""How many rows of a silo had an event between some times: what it reports about times and
events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.checks import Checked, CountOrZero, Positive
from ekiden.core.base.errors import UserError

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Followed(Checked):
    """How many rows of a silo had the event between some times, or were last seen without it."""

    # ascending
    times: tuple[Positive, ...]
    # rows that had the event after the time before, and not later than this one
    events: tuple[CountOrZero, ...]
    # rows that were last seen without it after the time before, and before this one
    before: tuple[CountOrZero, ...]
    # rows that were last seen without it at this time
    at: tuple[CountOrZero, ...]
    # rows whose time is after the last of these times
    later: CountOrZero

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise(self.times))
        rows = (self.events, self.before, self.at)
        if not ascending or {*map(len, rows)} != {len(self.times)}:
            raise UserError(
                "times must be in ascending order, each with its numbers of rows: such as 90 180 "
                "365"
            )

    @staticmethod
    def of(y: Numbers, times: Sequence[float], least: int) -> "Followed":
        """Count rows (n, 2) of time and event; each number is 0, or `least` or more.

        Times between which there are fewer rows are left out, so that their rows count at a later
        time. Fewer rows that were last seen at a time count as last seen before it.
        """
        none = (0,) * len(times)
        grid = np.array(Followed(tuple(times), none, none, none, 0).times, dtype=np.float64)
        place = np.searchsorted(grid, y[:, 0])
        event = y[:, 1] > 0
        exact = np.isin(y[:, 0], grid)
        each = [
            np.bincount(place[rows], minlength=len(grid) + 1).tolist()
            for rows in (event, ~event & ~exact, ~event & exact)
        ]
        kept = list[tuple[float, int, int, int]]()
        left = len(y)
        events = 0
        before = 0
        for time, with_event, inside, at in zip(grid.tolist(), *each, strict=False):
            events = events + with_event
            before = before + inside
            told = at
            if at < least:
                before = before + at
                told = 0
            after = left - events - before - told
            if not any(0 < n < least for n in (events, before, told, after)):
                kept.append((time, events, before, told))
                left = after
                events = 0
                before = 0
            else:
                before += told
        if left < least:
            left = 0
        columns = [*zip(*kept, strict=True)] or [()] * 4
        return Followed(columns[0], columns[1], columns[2], columns[3], left)

    def only(self, times: Sequence[float]) -> "Followed":
        """Return the same rows, counted at some of the times."""
        place = np.searchsorted(np.array(times), self.times)
        events, gone = np.zeros((2, len(times) + 1), dtype=np.int64)
        np.add.at(events, place, self.events)
        np.add.at(gone, place, np.array(self.before) + self.at)
        at = [self.at[self.times.index(time)] for time in times]
        later = self.later + int(events[-1] + gone[-1])
        before = gone[:-1] - np.array(at, dtype=np.int64)
        return Followed(
            tuple(times), tuple(events[:-1].tolist()), tuple(before.tolist()), tuple(at), later
        )

    @property
    def at_risk(self) -> Numbers:
        """Rows that are still followed after the time before."""
        gone = np.array(self.events) + np.array(self.before) + np.array(self.at)
        return np.asarray(self.later + gone[::-1].cumsum()[::-1], dtype=np.float64)

    @property
    def exposed(self) -> Numbers:
        """The same, without half of those last seen before each time."""
        return np.asarray(self.at_risk - np.array(self.before) / 2)
