"""Convert plain values, as in JSON and TOML, to checked dataclasses, and back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, TypeVar

from ekiden.base.checks import admitted, hints_of
from ekiden.base.errors import UserError, unknown

T = TypeVar("T")


def made(kind: type[T], values: object, table: str = "", what: str = "entry") -> T:
    """Return the dataclass of `kind` with these values, each checked by the annotation of its field.

    Args:
        kind: a dataclass; a table of values becomes the dataclass that its field is annotated with.
        values: the values of its fields, by name.
        table: what messages call the table of these values; empty for the outermost table.
        what: what messages call a field.
    """
    if not isinstance(values, Mapping):
        raise UserError(f"{table or 'this'} must be a table" + (f", [{table}]" if table else ""))
    hints: Mapping[str, Any] = hints_of(kind)  # type: ignore[arg-type]
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise unknown(f"{what} in [{table}]" if table else what, str(name)[:80], known)
    for name, field in known.items():
        if name not in values and field.default is field.default_factory is MISSING:
            raise UserError(f"there is no {_path(table, name)}")
    return kind(**{name: _value(hints[name], value, _path(table, name)) for name, value in values.items()})


@contextmanager
def reading(what: str, reader: str = "the version of Ekiden that wrote it") -> Iterator[None]:
    """Turn errors of reading into a message that says what cannot be read, and what can read it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what} cannot be read ({error}): use {reader}") from None


def plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values."""
    return {name: _as_read(value) for name, value in asdict(record).items()}


def _as_read(value: Any) -> Any:
    """Return a value as it is read back from a file, where sequences are lists."""
    match value:
        case dict():
            return {key: _as_read(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_read(one) for one in value]
        case _:
            return value


def _path(table: str, name: str) -> str:
    return f"{table}.{name}" if table else name


def _value(kind: Any, value: object, name: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
        return made(kind, value, name)
    return admitted(name, value, kind)
