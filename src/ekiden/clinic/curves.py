"""Survival curves of silos, and the log-rank test between them, from counts of events between
agreed times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        n = told.exposed
        d = np.array(told.events, dtype=float)
        survival = _product_limit(n, d)
        # of the rows last seen between two times half are exposed; at most all or none of them are
        half = told.at_risk - n
        least = _product_limit(n - half, d)
        most = _product_limit(n + half, d)
        error = np.maximum(survival - least, most - survival)
        with np.errstate(divide="ignore", invalid="ignore"):
            greenwood = np.where(d > 0, d / (n * (n - d)), 0).cumsum()
            spread = Z * np.sqrt(greenwood) / np.log(survival)
            inside = (survival > 0) & (survival < 1)
            low = np.where(inside, survival ** np.exp(-spread), survival)
            high = np.where(inside, survival ** np.exp(spread), survival)
        estimates = np.stack([survival, low, high])
        quartiles = {}
        for name, left in _SHARES.items():
            found, first, last = (_first(told.times, one <= left) for one in estimates)
            quartiles[name] = found, first, last
        at_risk = tuple(map(int, told.at_risk))
        survived, lower, upper, off = map(tuple, [*estimates.tolist(), error.tolist()])
        return Curve(told.times, at_risk, told.events, survived, lower, upper, off, quartiles)


def _product_limit(exposed: Numbers, events: Numbers) -> Numbers:
    """Return the share that has not had the event after each time."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(events > 0, 1 - events / exposed, 1).cumprod()


def _first(times: Sequence[float], reached: Numbers) -> float | None:
    if not reached.any():
        return None
    return times[int(reached.argmax())]


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


def compared(name: str, silos: Mapping[str, Followed]) -> Compared:
    """Return the curves that follow from what silos reported about a column of times, and the
    log-rank test.
    """
    common = sorted(set.intersection(*(set(one.times) for one in silos.values())))
    if not common:
        raise UserError(f"no time of {name} has enough rows at all silos: choose fewer times")
    each = [one.only(common) for one in silos.values()]
    # events and rows last seen before and at the times, (silos, 3, times)
    counts = np.array([(one.events, one.before, one.at) for one in each])
    events, before, at = map(tuple, counts.sum(0).tolist())
    whole = Followed(tuple(common), events, before, at, sum(one.later for one in each))
    curves = {ALL: Curve.of(whole)}
    for silo, told in silos.items():
        curves[silo] = Curve.of(told)
    happened = counts[:, 0].astype(float)
    exposed = np.stack([one.exposed for one in each])
    statistic = _log_rank(exposed, happened)
    if statistic is None:
        return Compared(name, curves, None, None, None)
    p = _p(statistic, len(each))
    return Compared(name, curves, statistic, p, _p_range(each, happened))


def _p_range(silos: Sequence[Followed], events: Numbers) -> tuple[float, float]:
    """Return the least and the greatest p, over all shares of the rows last seen between two times
    that left their silo just after the first of them; the others left just before the second.

    Half of them, as in a life table, is right where silos lose rows alike. Where they do not, a
    coarse grid shows a difference that is not there.
    """
    # takes a second, and few need it
    from scipy.optimize import minimize

    late = np.stack([one.at_risk for one in silos])
    gone = np.minimum([one.before for one in silos], late - events)
    # a search from where one silo loses its rows at other times than the others finds the extremes
    alone = np.eye(len(silos))
    starts = [np.full(len(silos), 0.5), *alone, *(1 - alone)]

    def extreme(sign: float) -> float:
        def signed(share: Numbers) -> float:
            return sign * (_log_rank(late - share[:, None] * gone, events) or 0.0)

        best = min(starts, key=signed)
        return sign * float(minimize(signed, best, bounds=[(0.0, 1.0)] * len(silos)).fun)

    return _p(extreme(-1.0), len(silos)), _p(extreme(1.0), len(silos))


def _p(statistic: float, silos: int) -> float:
    """Return the p-value of a log-rank test, from the chi-squared distribution."""
    # few need it
    from scipy.special import chdtrc

    return float(chdtrc(silos - 1, statistic))


def _log_rank(n: Numbers, d: Numbers) -> float | None:
    """Return the statistic from rows at risk and events (silos, times); None if there are no
    events, or one silo.

    Nathan Mantel: Evaluation of survival data and two new rank order statistics. Cancer
    Chemotherapy Reports, 1966.
    """
    used = n.sum(0) > 1
    n = n[:, used]
    d = d[:, used]
    total = n.sum(0)
    deaths = d.sum(0)
    share = n / total
    # the last silo follows from the others
    apart = (d - deaths * share).sum(1)[:-1]
    weighted = deaths * (total - deaths) / (total - 1) * share
    spread = (np.diag(weighted.sum(1)) - weighted @ share.T)[:-1, :-1]
    if not len(spread) or np.linalg.matrix_rank(spread) < len(spread):
        return None
    return float(apart @ np.linalg.solve(spread, apart))
