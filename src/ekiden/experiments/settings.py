"""Settings by name, as a person writes them in a file: checked, and made into a plan."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ekiden import models
from ekiden.base import outside
from ekiden.base.errors import UserError, unknown
from ekiden.base.settings import Hardware, Training
from ekiden.data import Reading, parse
from ekiden.engine.method import Method
from ekiden.experiments.plan import Plan
from ekiden.methods import METHODS, method_named

Values = Mapping[str, Any]


@cache
def common() -> dict[str, Any]:
    """Type of every setting that all methods share, by its name."""
    own = {k: v for k, v in _hints(Plan).items() if k not in ("method", "seed", "reading", "training", "hardware")}
    return own | _hints(Reading) | _hints(Training) | _hints(Hardware)


def hyperparameters(kind: type[Method]) -> dict[str, Any]:
    """Type of every hyperparameter of a method, by its name."""
    return _hints(kind)


@cache
def known_anywhere() -> frozenset[str]:
    """Names of all settings of all methods."""
    return frozenset(common()) | {name for kind in METHODS for name in hyperparameters(kind)}


def is_grid(name: str, value: object) -> bool:
    """Whether a list of values is given for a setting that has one."""
    if not isinstance(value, list):
        return False
    one_is_a_list = _origin(common().get(name)) is tuple
    return not one_is_a_list or any(isinstance(v, list) for v in value)


def plan(method: str, values: Values) -> Plan[Method]:
    """The plan of `method` with these settings; a process of its own has one thread, unless they say otherwise.

    Raises:
        UserError: a name is unknown, or a value is of another type or out of range.
    """
    kind = method_named(method)
    hints = common() | hyperparameters(kind)
    for name in values:
        if name not in hints:
            raise unknown(f"setting of {kind.title()}", name, hints)
    typed = {"threads": 1} | {name: _typed(name, hints[name], value) for name, value in values.items()}
    typed |= {name: outside.located(typed[name]) for name in ("model", "data", "metric") if name in typed}
    if "silos" in typed:
        typed["silos"] = tuple(str(Path(path).expanduser().absolute()) for path in typed["silos"])

    def of(part: Any) -> dict[str, Any]:
        return {f.name: typed[f.name] for f in fields(part) if f.name in typed}

    made = Plan(
        kind(**of(kind)),
        reading=Reading(**of(Reading)),
        training=Training(**of(Training)),
        hardware=Hardware(**of(Hardware)),
        **of(Plan),
    )
    if made.model != "auto":
        models.check_name(made.model)
    if made.partition != "auto":
        parse(made.partition)
    return made


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _origin(hint: Any) -> Any:
    """The type behind `X | None`, without its parameters."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(h for h in get_args(hint) if h is not type(None))
    return get_origin(hint) or hint


def _typed(name: str, hint: Any, value: Any) -> Any:
    """A value as its field wants it.

    Raises:
        UserError: it is of another type.
    """
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        hint = next(h for h in get_args(hint) if h is not type(None))
        return _typed(name, hint, value)
    if origin is Literal:
        if value not in get_args(hint):
            raise unknown(f"value of {name}", str(value), map(str, get_args(hint)))
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(name, get_args(hint)[0], v) for v in value)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        wanted = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(hint, "a list")
        raise UserError(f"{name} must be {wanted}, not {value!r}")
    return value
