"""Read entries of a TOML file; errors name the place of a mistake."""

from collections.abc import Mapping
from typing import Any

from ekiden.base.errors import UserError

Entry = dict[str, Any]


def table(value: object, name: str) -> Entry:
    """Return a value that must be a table."""
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table, [{name}]")
    return value


def text(values: Mapping[str, Any], key: str) -> str:
    """Return the text of an entry in one line, empty if there is no such entry."""
    value = values.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{key} must be text, not {value!r}")
    return " ".join(value.split())
