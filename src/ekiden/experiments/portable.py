"""Make settings independent of a machine's folders: keep only the names of files."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

_PATHS = frozenset({"data", "dataset", "silos", "model", "network", "pretrained", "tokenizer"})
"""settings and entries of `config.json` that may be paths"""


def portable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which absolute paths of data and networks are the names of their files or folders."""
    return {name: _portable(name, value) for name, value in values.items()}


def _portable(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return portable(value)
    if name not in _PATHS:
        return value
    if isinstance(value, list | tuple):
        return type(value)(_portable(name, each) for each in value)
    if not isinstance(value, str):
        return value
    kind, colon, path = value.rpartition(":") if value.startswith("hf:") else ("", "", value)
    return f"{kind}{colon}{PurePath(path).name}" if PurePath(path).is_absolute() and ".py:" not in value else value
