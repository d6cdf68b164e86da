"""Settings by name, as a person writes them in a file: checked and turned into a plan."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ekiden import models
from ekiden.base import outside
from ekiden.base.checks import made
from ekiden.base.errors import unknown
from ekiden.base.settings import Hardware, Training
from ekiden.data import Reading, parse
from ekiden.data.holdings import located_silo
from ekiden.engine.method import Method
from ekiden.methods import METHODS, method_named
from ekiden.runs.plan import Plan

Values = Mapping[str, Any]
_PARTS: dict[str, type[Any]] = {"reading": Reading, "training": Training, "hardware": Hardware}


@cache
def common() -> dict[str, Any]:
    """Return the type of every setting that all methods share, by its name."""
    own = {k: v for k, v in _hints(Plan).items() if k not in ("method", "seed", *_PARTS)}
    return own | _hints(Reading) | _hints(Training) | _hints(Hardware)


def hyperparameters(kind: type[Method]) -> dict[str, Any]:
    """Return the type of every hyperparameter of a method, by its name."""
    return _hints(kind)


@cache
def known_anywhere() -> frozenset[str]:
    """Return the names of all settings of all methods."""
    return frozenset(common()) | {name for kind in METHODS for name in hyperparameters(kind)}


def is_grid(name: str, value: object) -> bool:
    """Return whether the value is a list of values for a setting, and not one value that is a list."""
    if not isinstance(value, list):
        return False
    one_is_a_list = _origin(common().get(name)) is tuple
    return not one_is_a_list or any(isinstance(v, list) for v in value)


def plan(method: str, values: Values) -> Plan[Method]:
    """Return the plan of `method` with these settings, with one thread unless they say otherwise."""
    kind = method_named(method)
    hints = common() | hyperparameters(kind)
    for name in values:
        if name not in hints:
            raise unknown(f"setting of {kind.title()}", name, hints)
    given = {"threads": 1, **values}

    def of(part: type[Any]) -> dict[str, Any]:
        return {f.name: given[f.name] for f in fields(part) if f.name in given}

    parts = {name: made(part, of(part)) for name, part in _PARTS.items()}
    plan = made(Plan, of(Plan) | parts | {"method": made(kind, of(kind))})
    places = tuple(map(located_silo, plan.silos))
    model, data, metric = map(outside.located, (plan.model, plan.data, plan.metric))
    plan = replace(plan, model=model, data=data, metric=metric, silos=places, reading=plan.reading.located())
    if plan.model != "auto":
        models.check_name(plan.model)
    if plan.partition != "auto":
        parse(plan.partition)
    return plan


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _origin(hint: Any) -> Any:
    """Return the type behind `X | None`, without its parameters."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(h for h in get_args(hint) if h is not type(None))
    return get_origin(hint) or hint
