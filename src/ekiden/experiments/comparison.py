"""Compare the mean of our runs with a printed mean: Welch's test, and a coarser test by single runs."""

from dataclasses import dataclass
from math import hypot, sqrt

LEVEL = 0.95  # two-sided
CONSISTENT = "consistent"
FORMER = "within 2 std"


@dataclass(frozen=True)
class Published:
    """A printed value, in per cent.

    Attributes:
        mean: the value.
        std: standard deviation over the runs, None if it is not printed.
        runs: number of runs behind the mean, None if that is not known.
    """

    mean: float
    std: float | None = None
    runs: int | None = None


@dataclass(frozen=True)
class Comparison:
    """Our mean and the printed one, in per cent.

    Attributes:
        mean: mean of our runs.
        std: sample standard deviation of our runs, None for a single run.
        runs: number of our runs.
        printed: the printed value. If its spread or number of runs is not known, ours is used.
    """

    mean: float
    std: float | None
    runs: int
    printed: Published

    @property
    def difference(self) -> float:
        """Ours minus theirs."""
        return self.mean - self.printed.mean

    @property
    def error(self) -> float | None:
        """Standard error of the difference of the means, √(s₁²/n₁ + s₂²/n₂); None if no spread is known."""
        return hypot(*parts) or None if (parts := self._errors) else None

    @property
    def t(self) -> float | None:
        """The difference in standard errors; None if no spread is known."""
        return None if self.error is None else self.difference / self.error

    @property
    def limit(self) -> float | None:
        """The limit of |t| in 95 % of cases if both have the same mean: the quantile of Student's distribution.

        Its degrees of freedom are those of Welch and Satterthwaite. If no spread is printed, ours is used for both.
        Then there are n₁ - 1 degrees, and t has exactly Student's distribution.
        """
        from scipy.special import stdtrit  # noqa: PLC0415  takes a while, and few need it

        if (errors := self._errors) is None or not self.error:
            return None
        counts = (self.runs, self.printed.runs or self.runs)
        if self.printed.std is None or counts[1] == 1:
            freedom = float(counts[0] - 1)
        else:
            freedom = self.error**4 / sum(e**4 / (n - 1) for e, n in zip(errors, counts, strict=True))
        return float(stdtrit(freedom, (1 + LEVEL) / 2))

    @property
    def verdict(self) -> str:
        """The verdict: `consistent` if spreads explain the difference, else `above` or `below`."""
        t, limit = self.t, self.limit
        if t is None or limit is None:
            return f"no spread known: {self._why}"
        return CONSISTENT if abs(t) <= limit else self._side

    @property
    def former(self) -> str:
        """The verdict by single runs: is |difference| at most 2√(s₁² + s₂²)? Unknown spreads count as 0."""
        spread = hypot(self.std or 0.0, self.printed.std or 0.0)
        if not spread:
            return "no spread known"
        return FORMER if abs(self.difference) <= 2 * spread else self._side

    @property
    def _errors(self) -> tuple[float, float] | None:
        """Standard errors of the two means."""
        if self.std is None:
            return None
        theirs = self.std if self.printed.std is None else self.printed.std
        return self.std / sqrt(self.runs), theirs / sqrt(self.printed.runs or self.runs)

    @property
    def _side(self) -> str:
        return "above" if self.difference > 0 else "below"

    @property
    def _why(self) -> str:
        return "one seed" if self.std is None else "its seeds agree"
