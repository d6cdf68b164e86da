"""How a model's figures differ between silos: their random-effects mean, and what a new silo may see."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from math import sqrt
from typing import Any, NamedTuple

from ekiden.clinic.figures import Figures
from ekiden.clinic.ranked import Interval, Z
from ekiden.core.base.checks import plain
from ekiden.core.tasks import Task

# silos: sums of fewer show about what each of them has
FEWEST = 4


class Weighed(NamedTuple):
    """Sums over silos of a figure θ with the weight w, one over the square of its standard error."""

    silos: float = 0.0
    w: float = 0.0
    wx: float = 0.0  # Σ wθ
    wxx: float = 0.0  # Σ wθ²
    ww: float = 0.0  # Σ w²

    @classmethod
    def of(cls, value: float, error: float) -> "Weighed":
        """Return the part of one silo."""
        w = 1 / error**2
        return cls(1, w, w * value, w * value**2, w**2)

    @property
    def variance(self) -> float:
        """The variance between silos, by the method of moments.

        Rebecca DerSimonian, Nan Laird: Meta-analysis in clinical trials. Controlled Clinical Trials
        7, 1986.
        """
        spread = self.wxx - self.wx**2 / self.w - (self.silos - 1)
        return max(spread / (self.w - self.ww / self.w), 0.0)


@dataclass(frozen=True)
class Between:
    """A figure over silos."""

    silos: int
    mean: float  # random-effects mean
    interval: Interval  # of the mean, 95 %
    deviation: float  # standard deviation between silos
    prediction: Interval  # of the figure at a new silo, 95 %


def between(sums: Weighed, each: Sequence[tuple[float, float]] = ()) -> Between:
    """Return what follows for a figure.

    Args:
        sums: over all silos.
        each: value and standard error of each, if they are known. Then silos have the weights
            1 / (error² + τ²) of DerSimonian and Laird; otherwise those of the sums, with an error
            that knows τ (Masayuki Henmi, John Copas: Confidence intervals for random effects
            meta-analysis and robustness to publication bias. Statistics in Medicine 29, 2010).

    The prediction is that of Julian Higgins et al.: A re-evaluation of random-effects
    meta-analysis. JRSS A 172, 2009.
    """
    # few need it
    from scipy.special import stdtrit

    variance = sums.variance
    mean = sums.wx / sums.w
    squared = 1 / sums.w + variance * sums.ww / sums.w**2
    if each:
        weights = 0.0
        weighted = 0.0
        for value, error in each:
            weight = 1 / (error**2 + variance)
            weights += weight
            weighted += weight * value
        squared = 1 / weights
        mean = squared * weighted
    reach = Z * sqrt(squared)
    far = float(stdtrit(sums.silos - 2, 0.975)) * sqrt(variance + squared)
    interval = (mean - reach, mean + reach)
    prediction = (mean - far, mean + far)
    return Between(int(sums.silos), mean, interval, sqrt(variance), prediction)


def errors_of(found: Figures, task: Task) -> dict[str, tuple[float, float]]:
    """Return value and standard error of each metric that has an interval."""
    errors = {}
    for metric in task.metrics:
        low, high = found.intervals.get(metric.name, (0.0, 0.0))
        if high != low:
            errors[metric.name] = found.values[metric.name], (high - low) / (2 * Z)
    return errors


def total(parts: Sequence[Weighed]) -> Weighed:
    """Return the sums of all parts."""
    return Weighed(*map(sum, zip(*parts, strict=True)))


def heterogeneity(each: Sequence[Figures], task: Task) -> dict[str, Any]:
    """Return each metric over silos, as plain values; nothing for fewer than four."""
    silos = [errors_of(one, task) for one in each if one.samples]
    found = {}
    for metric in task.metrics:
        values = [one[metric.name] for one in silos if metric.name in one]
        if len(values) >= FEWEST:
            sums = total(list(starmap(Weighed.of, values)))
            found[metric.name] = plain(between(sums, values))
    return found
