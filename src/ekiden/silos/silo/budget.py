"""What a silo has told about its samples under differential privacy, over all runs; checked before
it tells more.

The silo computes ε itself, from what it is asked to train and from its own number of samples.
"""

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

from ekiden.core.base.checks import Checked, CountOrZero, Fraction, NonNegative, Positive
from ekiden.core.base.errors import UserError
from ekiden.core.training.private.accountant import Spent, composed, noise_for
from ekiden.core.training.private.noise import Noise
from ekiden.core.training.private.promise import DP
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.silo.told import append, hold_ledger, lines_of
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.sealing import kept_secret

FILE = "privacy.jsonl"
"""file in the silo's folder: a line for each training with noise, written before it begins, and for
each release of noisy sums, written before it leaves; never changed"""
EVALUATIONS = "evaluations.jsonl"
"""file in the silo's folder: a line for each run that measures models with noise, written before its
first counts leave; never changed"""
# rounding, if the parts of a run are composed in another way than the whole
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class LedgerLine(Checked):
    """A line of the ledger."""

    # when
    at: str
    # the run's id
    run: str
    # ε that the run promises
    epsilon: Positive
    # its δ
    delta: Fraction
    # names the noise, without telling it
    mark: str
    # σ
    noise: NonNegative
    # q
    rate: Fraction
    # number of steps
    steps: CountOrZero

    @property
    def spent(self) -> Spent:
        """Return what was told."""
        return Spent(self.noise, self.rate, self.steps)


def check(file: SiloFile, terms: Agreement) -> None:
    """Refuse a run that the silo's limits on ε over all runs, and on who adds noise, do not admit.

    Noisy sums leave nothing out (`min_active`), and the average of many runs has little noise, as
    one with a large ε.
    """
    dp = DP.parse(terms.recipe.dp)
    _check_honest(file, dp)
    if terms.measures or file.limits.epsilon is None:
        return
    if dp is None:
        raise UserError(
            f"the run trains without noise, {file.name} allows epsilon {file.limits.epsilon:g} "
            "over all runs: give --dp (limits.epsilon in its silo.toml)"
        )
    _check_runs(file, terms.run, dp, lines_of(file.folder / FILE, LedgerLine))


@dataclass(frozen=True)
class MeasuredLine(Checked):
    """A line of the ledger of measurements."""

    # when
    at: str
    # the run's id
    run: str
    # name of the data set
    data: str
    # σ of one Gaussian release that tells as much as all counts of the run
    noise: Positive


def check_measured(file: SiloFile, terms: Agreement) -> MeasuredLine | None:
    """Refuse a run whose counts of test samples, with those of all earlier runs, would tell more than
    the silo allows; return the line that the ledger lacks.
    """
    dp = terms.measured_dp
    limits = file.limits
    if not terms.measured_steps:
        return None
    if dp is None:
        if not limits.exact_evaluation:
            raise UserError(
                f"the run measures models without noise, {file.name} adds noise: leave out "
                "--evaluate-dp=exact (limits.exact_evaluation in its silo.toml)"
            )
        return None
    _check_honest(file, dp)
    before = _measured(file, terms.data)
    if any(one.run == terms.run for one in before):
        return None
    line = MeasuredLine(_now(), terms.run, terms.data, noise_for(dp.epsilon, dp.delta, 1.0, 1))
    found = _told(file, (*before, line))
    if found > limits.evaluation_epsilon * _SLACK:
        raise UserError(
            f"{file.name} has told epsilon {_told(file, before):.3g} about its test "
            f"samples in {len(before)} earlier runs and allows {limits.evaluation_epsilon:g}, with "
            f"this one it would be {found:.3g}: lower epsilon in --evaluate-dp "
            "(limits.evaluation_epsilon in its silo.toml)"
        )
    return line


def _check_honest(file: SiloFile, dp: DP | None) -> None:
    """Refuse noise that more silos share than this one trusts."""
    if dp is not None and dp.honest > file.limits.honest:
        raise UserError(
            f"the run shares noise among {dp.honest} silos, {file.name} allows "
            f"{file.limits.honest} (limits.honest in its silo.toml)"
        )


def told(file: SiloFile, data: str) -> float:
    """Return the epsilon, over all runs so far, of what was told about the test samples of a data set."""
    return _told(file, _measured(file, data))


def _measured(file: SiloFile, data: str) -> list[MeasuredLine]:
    lines = lines_of(file.folder / EVALUATIONS, MeasuredLine)
    return [line for line in lines if line.data == data]


def _told(file: SiloFile, lines: Sequence[MeasuredLine]) -> float:
    return composed([Spent(line.noise, 1.0, 1) for line in lines], file.limits.delta)


def measured_noise(file: SiloFile, terms: Agreement, folder: Path, models: str) -> Noise:
    """Return the noise of counts of models with this digest, the same after a crash, once it is
    written down that the run tells something.
    """
    ledger = file.folder / EVALUATIONS
    with hold_ledger(ledger):
        if (line := check_measured(file, terms)) is not None:
            append(ledger, line)
    return Noise(kept_secret(folder, f"noise of measured {models}"))


@dataclass(frozen=True)
class LedgerKeeper:
    """Has the secret randomness of one task at a silo, and writes down what it tells.

    The noise depends on a secret of the silo, so that a coordinator who knows the seed does not
    know the noise. It also depends on all that the task got. So the same task has the same noise
    again after a crash, and another one, which could cancel the first, has its own noise and is
    counted.
    """

    # the silo's own file
    file: SiloFile
    # of the run
    terms: Agreement
    # of the run
    folder: Path
    # its place in the run, and a digest of everything that it got
    task: str

    def key(self, fit: int, spent: Spent, *, note: bool = True) -> bytes:
        """Return the key of the noise of a fit, with `note` once it is written down that it is
        spent.
        """
        key = kept_secret(self.folder, f"noise of {self.task} {fit}")
        mark = hashlib.blake2b(key, digest_size=16).hexdigest()
        dp = DP.parse(self.terms.recipe.dp)
        assert dp is not None, "noise is asked for where there is a promise"
        ledger = self.file.folder / FILE
        with hold_ledger(ledger):
            lines = lines_of(ledger, LedgerLine)
            mine = [line for line in lines if line.run == self.terms.run]
            if any(line.mark == mark for line in mine):
                return key
            found = composed([*(line.spent for line in mine), spent], dp.delta)
            if found > dp.epsilon * _SLACK:
                raise UserError(
                    f"run {self.terms.run} has trained at {self.file.name} as often as epsilon "
                    f"{dp.epsilon:g} allows, and asks for more ({found:.3g}): start a new run "
                    f"({ledger} says what was spent)"
                )
            _check_runs(self.file, self.terms.run, dp, lines)
            if note:
                about = (_now(), self.terms.run, dp.epsilon, dp.delta, mark)
                append(ledger, LedgerLine(*about, **asdict(spent)))
        return key


def promised(file: SiloFile) -> float:
    """Return the sum of epsilon over all runs so far."""
    return sum(line.epsilon for line in _by_run(lines_of(file.folder / FILE, LedgerLine)))


def _by_run(lines: Iterable[LedgerLine]) -> Collection[LedgerLine]:
    """Return the line with the largest epsilon of each run."""
    return {line.run: line for line in sorted(lines, key=lambda line: line.epsilon)}.values()


def _now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def _check_runs(file: SiloFile, run: str, dp: DP, lines: Sequence[LedgerLine]) -> None:
    """Refuse a run with which all runs together would promise less than the silo's file allows."""
    if file.limits.epsilon is None:
        return
    others = _by_run(line for line in lines if line.run != run)
    for name, promised, own, most in (
        ("epsilon", [line.epsilon for line in others], dp.epsilon, file.limits.epsilon),
        ("delta", [line.delta for line in others], dp.delta, file.limits.delta),
    ):
        before = sum(map(_exactly, promised))
        if before + _exactly(own) > _exactly(most):
            raise UserError(
                f"{file.name} has promised {name} {float(before):g} in {len(others)} earlier runs and "
                f"allows {most:g} over "
                f"all runs, this one wants {own:g}: lower it (limits.{name} in its silo.toml)"
            )


def _exactly(number: float) -> Decimal:
    """Return the number as it is written: 0.1 and 0.2 are 0.3, and no more."""
    return Decimal(repr(number))
