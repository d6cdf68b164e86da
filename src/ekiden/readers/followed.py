"""How many rows of a silo had an event between some times: what it reports about times and
events.
"""

from collections.abc import Sequence
from dataclasses import dataclass

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
        ascending = all(a < b for a, b in zip(self.times, self.times[1:], strict=False))
        if not ascending or not len(self.times) == len(self.events) == len(self.before) == len(
            self.at
        ):
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
        place, event = np.searchsorted(grid, y[:, 0]), y[:, 1] > 0
        exact = np.isin(y[:, 0], grid)
        each = [
            np.bincount(place[rows], minlength=len(grid) + 1).tolist()
            for rows in (event, ~event & ~exact, ~event & exact)
        ]
        kept, left, events, before, at = list[tuple[float, int, int, int]](), len(y), 0, 0, 0
        for time, with_event, inside, here in zip(grid.tolist(), *each, strict=False):
            events, before, at = events + with_event, before + at + inside, here
            found = (events, before, at) if at >= least else (events, before + at, 0)
            if all(n == 0 or n >= least for n in (*found, left - sum(found))):
                kept.append((time, *found))
                left, events, before, at = left - sum(found), 0, 0, 0
        return Followed(
            tuple(row[0] for row in kept),
            tuple(row[1] for row in kept),
            tuple(row[2] for row in kept),
            tuple(row[3] for row in kept),
            left if left >= least else 0,
        )

    def only(self, times: Sequence[float]) -> "Followed":
        """Return the same rows, counted at some of the times."""
        place = np.searchsorted(np.array(times), self.times)
        events, gone = (
            np.bincount(place, counts, len(times) + 1).astype(int)[: len(times)]
            for counts in (np.array(self.events), np.array(self.before) + np.array(self.at))
        )
        at = np.array([self.at[self.times.index(time)] for time in times], dtype=int)
        rows = sum(self.events) + sum(self.before) + sum(self.at) + self.later
        later = rows - int(events.sum() + gone.sum())
        return Followed(
            tuple(times),
            tuple(events.tolist()),
            tuple((gone - at).tolist()),
            tuple(at.tolist()),
            later,
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
