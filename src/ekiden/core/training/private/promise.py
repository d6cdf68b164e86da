"""The promise that a run makes, what a client tells under it, and what no promise can be made
for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from typing import Annotated, Any, Protocol

from ekiden.core.base.checks import Checked, Count, Positive, Range, made
from ekiden.core.base.errors import UserError, at
from ekiden.core.base.settings import Training
from ekiden.core.training.private.accountant import Spent, noise_for


@dataclass(frozen=True)
class DP(Checked):
    """The promise of a run: who sees all that leaves a silo learns little about one training
    sample.

    For neighbouring data sets D, D' and every event, P[D] ≤ exp(ε)·P[D'] + δ.
    """

    epsilon: Positive
    """ε, for each silo and all its steps together"""
    delta: Annotated[float, Range(above=0, below=0.1)] = 1e-5
    """δ, below 1/n of every silo"""
    clip: Positive = 1.0
    """C, the norm to which the gradient of each sample is clipped. For sums, the norm of its
    features, in 127/4·√D"""
    honest: Count = 1
    """h, for sums: the silos whose noise together keeps the promise. The noise of one silo is 1/h
    of it, so the promise holds if h silos of the sum add theirs and keep it secret. With 1, each
    silo adds all of it"""

    @classmethod
    def parse(cls, text: str) -> "DP | None":
        """Return what "epsilon=8,delta=1e-5,clip=1" says; None for an empty text."""
        if not text:
            return None
        try:
            pairs = [part.split("=") for part in text.split(",")]
            given = {name.strip(): _number(value.strip()) for name, value in pairs}
        except ValueError:
            raise UserError(
                f"--dp {text!r} is not a list of settings: write epsilon=8,delta=1e-5,clip=1"
            ) from None
        with at(f"--dp {text!r}"):
            return made(cls, given, what="setting")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return ",".join(
            # exact: never a larger ε than was asked for
            f"{name}={repr(value).removesuffix('.0')}"
            for name, value in vars(self).items()
            if (name, value) != ("honest", 1)
        )


def _number(text: str) -> float:
    if text.isdigit():
        return int(text)
    return float(text)


def spent_epsilon(epsilon: float) -> str:
    """Return an ε that was spent with three digits, rounded up: never less than was spent."""
    found = Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(epsilon))
    return f"{found.normalize():f}"


def condition(told: Mapping[str, Any]) -> str:
    """Return on what the ε that a run folder tells depends, for sentences; empty if on nobody."""
    honest = told.get("honest", 1)
    if honest > 1:
        return f", if {honest} silos add their noise and keep it secret"
    return ""


class Keeper(Protocol):
    """Has the randomness of a task at its client, and counts what is told."""

    def key(self, fit: int, spent: "Spent", *, note: bool = True) -> bytes:
        """Return the key of the noise of a task's fit; the same after a crash.

        Args:
            fit: its number.
            spent: what it tells.
            note: whether it is noted first that this is spent.

        Raises:
            UserError: the promise, or the client's own limit, would be broken.
        """


def planned(
    dp: DP, fits: tuple[int, ...], training: Training, samples: int, where: str = "a client"
) -> Spent:
    """Return what one client with so many samples tells in a run, with the least noise that keeps
    the promise.

    Silos hold different samples. So the run as a whole keeps the ε of its worst silo (parallel
    composition): a sample is in the training of its own silo only, and all that others do with the
    model that they receive does not depend on it further. This holds in a chain, too. It does not
    hold for a person with samples in two silos.
    """
    check_delta(dp, samples, where)
    steps = sum(training.steps(samples, epochs) for epochs in fits)
    rate = min(1.0, training.batch_size / samples)
    return Spent(noise_for(dp.epsilon, dp.delta, rate, steps), rate, steps)


def check_delta(dp: DP, samples: int, where: str) -> None:
    """Refuse a δ that allows one of a client's samples to be published."""
    if dp.delta * samples >= 1:
        raise UserError(
            f"--dp delta={dp.delta:g} lets whole samples of {where} ({samples}) go out: give a "
            f"delta far below {1 / samples:.2g}"
        )


def check_honest(dp: DP | None, clients: Sequence[object]) -> None:
    """Refuse noise that more clients share than there are."""
    if dp is not None and 0 < len(clients) < dp.honest:
        raise UserError(
            f"--dp honest={dp.honest} needs so many silos, and there are {len(clients)}: give fewer"
        )


def check_training(training: Training) -> None:
    """Refuse optimisers for which --dp promises nothing."""
    if training.class_weights != "none":
        raise UserError(
            "--class-weights tells counts of labels, for which --dp promises nothing: leave it out"
        )
    if training.optimizer == "sam":
        raise UserError(
            "--dp counts one gradient a step, and sam takes two: choose --optimizer sgd or adam"
        )
