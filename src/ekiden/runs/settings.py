"""Settings by name in one table, as in experiment files and in the file of `ekiden run --config`."""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from ekiden import models
from ekiden.base import outside
from ekiden.base.checks import made, plain
from ekiden.base.errors import UserError, at, unknown
from ekiden.base.settings import Hardware, Training
from ekiden.data import Reading, parse
from ekiden.data.columns import listed
from ekiden.data.holdings import located_silo
from ekiden.engine.method import Method
from ekiden.methods import method_named
from ekiden.recipe import Recipe
from ekiden.runs.plan import Plan

_PARTS: dict[str, type[Any]] = {"reading": Reading, "training": Training, "hardware": Hardware}


@cache
def common_settings() -> dict[str, Any]:
    """Return the type of every setting that all methods share, by its name."""
    own = {k: v for k, v in (_hints(Plan) | _hints(Recipe)).items() if k not in ("recipe", "method", "seed", *_PARTS)}
    return own | _hints(Reading) | _hints(Training) | _hints(Hardware)


def hyperparameters(kind: type[Method]) -> dict[str, Any]:
    """Return the type of every hyperparameter of a method, by its name."""
    return _hints(kind)


def plan_of(method: str, values: Mapping[str, Any]) -> Plan[Method]:
    """Return the plan of `method` with these settings."""
    kind = method_named(method)
    hints = common_settings() | hyperparameters(kind) | {"seed": int}
    for name in values:
        if name not in hints:
            raise unknown(f"setting of {kind.title()}", name, hints)

    def of(part: type[Any]) -> dict[str, Any]:
        return listed({f.name: values[f.name] for f in fields(part) if f.name in values})  # type: ignore[no-any-return]

    parts = {name: made(part, of(part)) for name, part in _PARTS.items()}
    recipe = made(Recipe, of(Recipe) | {"training": parts.pop("training"), "method": made(kind, of(kind))})
    plan = made(Plan, of(Plan) | parts | {"recipe": recipe})
    places = tuple(map(located_silo, plan.silos))
    plan = replace(plan, data=outside.located(plan.data), silos=places, reading=plan.reading.located())
    if plan.recipe.model != "auto":
        models.check_name(plan.recipe.model)
    if plan.partition != "auto":
        parse(plan.partition)
    return plan


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def read(path: Path, method: str = "") -> Plan[Method]:
    """Read the plan in a file of settings.

    Args:
        path: TOML file.
        method: the method, if the file names none.
    """
    with at(str(path)):
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(
                f"it cannot be read ({error.strerror}): `ekiden run METHOD --print-config` writes one"
            ) from None
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"it is not valid TOML: {error}") from None
        named = values.pop("method", method)
        if not isinstance(named, str) or not named:
            raise UserError('it names no method: add a line such as method = "fedseq"')
        if method and method_named(named) is not method_named(method):
            raise UserError(f"it is for {named}, not for {method}: leave out one of them")
        outside.trust_all(values)
        return plan_of(named, values)


def written(plan: Plan[Any]) -> str:
    """Return all settings of a plan as the text of such a file."""
    recipe, rest = plain(plan.recipe), plain(plan)
    parts = [rest[name] for name in ("reading", "hardware")]
    own = {name: value for name, value in rest.items() if name not in ("recipe", "reading", "hardware")}
    training, hyper = recipe.pop("training"), recipe.pop("method")
    tables = [{"method": plan.recipe.name}, hyper, own, parts[0], recipe, training, parts[1]]
    return "".join(f"{name} = {_toml(v)}\n" for one in tables for name, v in one.items() if v is not None)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
