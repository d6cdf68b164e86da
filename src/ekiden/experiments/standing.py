"""Find out whether an existing run counts for a sweep: it counts if it has the plan that the file wants."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ekiden.base.errors import UserError
from ekiden.engine.method import Method
from ekiden.experiments.plan import Plan, plan_in
from ekiden.experiments.portable import portable
from ekiden.experiments.summary import Summary


@dataclass(frozen=True)
class Standing:
    """The state of a run of a sweep; all fields are empty before the run has begun.

    Attributes:
        result: the run's numbers, if it is finished and counts.
        changed: settings that differ from those in the file, as text.
        damage: why it cannot be read; empty if it can.
    """

    result: Summary | None = None
    changed: tuple[str, ...] = ()
    damage: str = ""

    @property
    def why(self) -> str:
        """Say why an existing run does not count; empty if it counts, or may count once it is finished."""
        return self.damage or (f"its settings have changed: {'; '.join(self.changed[:3])}" if self.changed else "")


def standing(read: Callable[[], Summary], wanted: Plan[Method]) -> Standing:
    """Return the state of a run, as far as it can be read."""
    try:
        run = read()
        if changed := _differ(written(run), wanted):
            return Standing(changed=changed)
        return Standing(run if run.finished else None)
    except UserError as error:
        return Standing(damage=str(error))


def written(run: Summary) -> Plan[Method]:
    """Return the plan of a run, with the data as its experiment file names them: a path there may be relative."""
    plan, swept = plan_in(run.config, run.folder), run.config.get("sweep")
    named = swept.get("data") if isinstance(swept, dict) else None
    return replace(plan, data=named) if isinstance(named, str) else plan


def _differ(found: Plan[Method], wanted: Plan[Method]) -> tuple[str, ...]:
    """Return the settings that differ, as text; of the hardware only those that change results beyond rounding."""
    there, here = flat(found), flat(wanted)
    return tuple(
        f"{k} is {there.get(k)} there, {here.get(k)} in the file"
        for k in sorted(there.keys() | here.keys())
        if there.get(k) != here.get(k)
    )


def flat(plan: Plan[Method]) -> dict[str, Any]:
    """Return what decides the results of a plan, by setting. Paths are reduced to names, see `portable`."""
    values: dict[str, Any] = portable(plan.to_json())
    values["model"] = _last_part(values["model"])
    training, hyperparameters = values.pop("training"), values.pop("hyperparameters")
    values["precision"] = values.pop("hardware")["precision"]
    values |= training
    return values | dict(hyperparameters)


def _last_part(model: str) -> str:
    """Return the last part of a transformers network's name: without its folder, a path looks like a hub's name."""
    return f"hf:{model.removeprefix('hf:').rpartition('/')[2]}" if model.startswith("hf:") else model
