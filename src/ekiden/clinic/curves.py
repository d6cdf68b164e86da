"""Survival curves of silos, and the log-rank test between them, from counts of events between
agreed times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ekiden.clinic.ranked import Z
from ekiden.core.base.errors import UserError
from ekiden.readers.followed import Followed, Numbers

# who has not had the event
_SHARES = {"quarter": 0.75, "median": 0.5, "three quarters": 0.25}
ALL = "all"


@dataclass(frozen=True)
class Curve:
    """The Kaplan-Meier estimate at some times.

    Edward Kaplan, Paul Meier: Nonparametric estimation from incomplete observations. JASA, 1958.
    The variance is Greenwood's, on the scale of ln(-ln S). Of rows that were last seen between two
    times, half count as followed up to the later one, as in a life table.
    """

    times: tuple[float, ...]  # as counted
    at_risk: tuple[int, ...]  # rows that are followed up to each time
    events: tuple[int, ...]  # rows that had the event
    survival: tuple[float, ...]  # share that has not had the event at this time
    low: tuple[float, ...]  # lower end of its 95 % interval
    high: tuple[float, ...]  # upper end
    error: tuple[float, ...]  # how far off the estimate from the rows themselves can be
    # for "quarter", "median" and "three quarters" the first of the times at which so many have had
    # the event, and the
    # ends of its 95 % interval; None if there is none
    quartiles: Mapping[str, tuple[float | None, float | None, float | None]]

    @staticmethod
    def of(told: Followed) -> "Curve":
        """Return the curve that follows from counts."""
        n, d = told.exposed, np.array(told.events, dtype=float)
        half = told.at_risk - n
        with np.errstate(divide="ignore", invalid="ignore"):
            least, survival, most = (
                np.where(d > 0, 1 - d / (n + by), 1).cumprod() for by in (-half, 0, half)
            )
            spread = Z * np.sqrt(np.where(d > 0, d / (n * (n - d)), 0).cumsum()) / np.log(survival)
            low, high = (
                np.where((survival > 0) & (survival < 1), survival ** np.exp(s * spread), survival)
                for s in (-1, 1)
            )
        quartiles = {}
        for name, left in _SHARES.items():
            found, first, last = (_first(told.times, one, left) for one in (survival, low, high))
            quartiles[name] = found, first, last
        error = np.maximum(survival - least, most - survival)
        at_risk, events = (tuple(map(int, one)) for one in (told.at_risk, d))
        middle, lower, upper, off = (tuple(map(float, one)) for one in (survival, low, high, error))
        return Curve(told.times, at_risk, events, middle, lower, upper, off, quartiles)


def _first(times: Sequence[float], survival: Numbers, left: float) -> float | None:
    reached = survival <= left
    return times[int(reached.argmax())] if reached.any() else None


@dataclass(frozen=True)
class Compared:
    """The curves of all silos, and whether they differ."""

    name: str  # of the column of times
    # of all rows together, at the times that all silos tell, and of each silo
    curves: Mapping[str, Curve]
    statistic: float | None  # of the log-rank test at these times; None if it is not defined
    p: float | None  # from the chi-squared distribution
    # least and greatest p, by when between two times rows were last seen at each silo
    p_range: tuple[float, float] | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def compared(name: str, silos: Mapping[str, Followed]) -> Compared:
    """Return the curves that follow from what silos reported about a column of times, and the
    log-rank test.
    """
    common = sorted(set.intersection(*(set(one.times) for one in silos.values())))
    if not common:
        raise UserError(f"no time of {name} has enough rows at all silos: choose fewer times")
    each = [one.only(common) for one in silos.values()]
    events, before, at = (
        tuple(np.sum([getattr(one, what) for one in each], 0).tolist())
        for what in ("events", "before", "at")
    )
    whole = Followed(tuple(common), events, before, at, sum(one.later for one in each))
    curves = {key: Curve.of(one) for key, one in ({ALL: whole} | dict(silos)).items()}
    happened = np.array([one.events for one in each], dtype=float)
    exposed = np.stack([one.exposed for one in each])
    statistic, p = _log_rank(exposed, happened)
    return Compared(name, curves, statistic, p, _p_range(each, happened))


def _p_range(silos: Sequence[Followed], events: Numbers) -> tuple[float, float] | None:
    """Return the least and the greatest p if all that left one silo between two times did so just
    after the first of them, and at the other silos just before the second; or the other way round.

    Half of them, as in a life table, is right where silos lose rows alike. Where they do not, a
    coarse grid shows a difference that is not there.
    """
    late = np.stack([one.at_risk for one in silos])
    early = np.maximum(late - np.array([one.before for one in silos]), events)
    found = []
    # of each silo, whether it can have more or fewer events than expected
    either = []
    for k in range(len(silos)):
        more, fewer = late.copy(), early.copy()
        more[k], fewer[k] = early[k], late[k]
        found += [_log_rank(exposed, events)[1] for exposed in (more, fewer)]
        either.append(_excess(more, events)[k] > 0 > _excess(fewer, events)[k])
    known = [p for p in found if p is not None]
    if not known:
        return None
    return min(known), 1.0 if all(either) else max(known)


def _excess(n: Numbers, d: Numbers) -> Numbers:
    """Return how many events more than expected each silo had."""
    share = n / np.maximum(n.sum(0), 1)
    return np.asarray((d - d.sum(0) * share).sum(1))


def _log_rank(n: Numbers, d: Numbers) -> tuple[float | None, float | None]:
    """Return statistic and p-value from rows at risk and events (silos, times); None if there are no
    events, or one silo.

    Nathan Mantel: Evaluation of survival data and two new rank order statistics. Cancer
    Chemotherapy Reports, 1966.
    """
    # few need it
    from scipy.special import chdtrc

    used = n.sum(0) > 1
    n, d = n[:, used], d[:, used]
    share, total, deaths = n / n.sum(0), n.sum(0), d.sum(0)
    apart = _excess(n, d)[:-1]
    weights = deaths * (total - deaths) / (total - 1)
    spread = (np.diag((weights * share).sum(1)) - (weights * share) @ share.T)[:-1, :-1]
    if not len(spread) or np.linalg.matrix_rank(spread) < len(spread):
        return None, None
    statistic = float(apart @ np.linalg.solve(spread, apart))
    return statistic, float(chdtrc(len(spread), statistic))
