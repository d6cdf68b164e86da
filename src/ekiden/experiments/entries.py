"""Entries of a TOML file: checks that name the place of a mistake."""

from collections.abc import Mapping
from typing import Any

from ekiden.base.errors import UserError

Entry = dict[str, Any]


def table(value: object, name: str) -> Entry:
    """A value that must be a table.

    Raises:
        UserError: it is none.
    """
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table, [{name}]")
    return value


def text(values: Mapping[str, Any], key: str) -> str:
    """The text of an entry in one line, empty where there is none.

    Raises:
        UserError: it is not text.
    """
    value = values.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{key} must be text, not {value!r}")
    return " ".join(value.split())
