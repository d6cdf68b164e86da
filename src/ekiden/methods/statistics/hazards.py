"""The baseline hazard of survival, from events and exposure between times."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]


def hazard_counts(y: Numbers, risk: Numbers, times: Sequence[float]) -> tuple[Numbers, Numbers]:
    """Return between each time and the one before the events, and the exposure by which they are
    divided, (T,) each.

    Their ratio is what Breslow's estimate of the cumulative baseline hazard, Σ d / Σ exp(risk) over
    times of events, grows by. So the ratio of sums over silos is that of all rows together if no
    row ends between two of the times, and near it otherwise. `y` (n, 2) holds times and events,
    `risk` (n,) logarithms of the relative hazard.

    Norman Breslow, in the discussion of David Cox: Regression models and life-tables. JRSS B, 1972.
    """
    ends, place = np.unique(y[:, 0], return_inverse=True)
    share = np.exp(risk)
    # the sum over all who end then or later
    later = np.bincount(place, share)[::-1].cumsum()[::-1]
    at_risk = np.append(later, 0.0)
    deaths = np.bincount(place, y[:, 1])
    inside = np.searchsorted(times, ends)
    size = len(times)
    counts = np.bincount(inside, deaths, size + 1)[:size]
    events = np.asarray(counts, dtype=np.float64)
    grown = np.bincount(inside, deaths / at_risk[:-1], size + 1)[:size]
    here = at_risk[np.searchsorted(ends, times)]
    after = at_risk[np.searchsorted(ends, times, side="right")]
    before = np.append(at_risk[0], after)[:size]
    with np.errstate(divide="ignore", invalid="ignore"):
        return events, np.where(events > 0, events / grown, (before + here) / 2)


def baseline(events: Numbers, exposure: Numbers, least: int) -> Numbers:
    """Return the cumulative hazard (T,) of counts by `hazard_counts`; 0 at times after fewer events
    than `least`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.where(events > 0, events / exposure, 0).cumsum()
        since = 0.0
    for k, count in enumerate(events):
        since += count
        if since < least:
            total[k] = 0.0
        else:
            since = 0.0
    return total
