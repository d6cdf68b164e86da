"""Budgets of an experiment file: fewer epochs, rounds and seeds, and a note of what was reduced."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ekiden.base.errors import UserError, at, unknown
from ekiden.engine.method import Method
from ekiden.experiments import settings
from ekiden.experiments.entries import table
from ekiden.experiments.plan import Plan

PAPER = "paper"
"""Name of the budget that reduces nothing; every file has it."""


@dataclass(frozen=True)
class Scaled:
    """A hyperparameter that a budget changed, with the file's value and the value that is run."""

    name: str
    full: int
    used: int

    def __str__(self) -> str:
        return f"{self.name} {self.used} of {self.full}"


@dataclass(frozen=True)
class Budget:
    """How much of an experiment is run.

    Attributes:
        name: name on the command line.
        factors: factors of whole-numbered hyperparameters, by name.
        seeds: number of the file's seeds that are run; None for all.
    """

    name: str = PAPER
    factors: Mapping[str, float] = field(default_factory=dict)
    seeds: int | None = None

    def scale(self, plan: Plan[Method]) -> tuple[Plan[Method], tuple[Scaled, ...]]:
        """Return the plan with fewer epochs, rounds and so on, and what was changed. No value falls below 1."""
        scaled = []
        for name, factor in self.factors.items():
            full = getattr(plan.method, name, 0)
            used = max(1, round(full * factor))
            if full > used:
                scaled.append(Scaled(name, full, used))
        changes: dict[str, Any] = {s.name: s.used for s in scaled}
        return replace(plan, method=replace(plan.method, **changes)), tuple(scaled)


def budgets(values: object, kinds: Iterable[type[Method]]) -> dict[str, Budget]:
    """Return the budgets of a file with these methods, by name."""
    scalable = {name for kind in kinds for name, hint in settings.hyperparameters(kind).items() if hint is int}
    found = {PAPER: Budget()}
    for name, entry in table(values, "budget").items():
        with at(f"budget.{name}"):
            given = dict(table(entry, f"budget.{name}"))
            seeds = given.pop("seeds", None)
            if seeds is not None and (type(seeds) is not int or seeds < 1):
                raise UserError(f"seeds must be the number of seeds to run, 1 or more, not {seeds!r}")
            for key, factor in given.items():
                if key not in scalable:
                    raise unknown("hyperparameter to scale", key, scalable)
                if type(factor) is not float or not 0 < factor < 1:
                    raise UserError(f"{key} must be a factor above 0 and below 1, not {factor!r}")
            if name == PAPER and entry:
                raise UserError(f"the budget {PAPER!r} scales nothing: give this one another name")
            found[name] = Budget(name, given, seeds)
    return found
