"""Check the fields of a dataclass by their annotations when an instance is made.

    @dataclass(frozen=True)
    class Settings(Checked):
        form: Literal["paper", "released"] = "paper"
        epochs: Annotated[int, Range(least=1)] = 200
        share: Fraction = 0.5  # a name for a common range

The command line reads the same annotations, so it refuses the same values. Plain values, as in JSON
and TOML, become such dataclasses (`made`), and dataclasses become plain values (`plain`).
"""

import math
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, wraps
from inspect import signature
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from ekiden.core.base.errors import UserError, unknown

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """A range of numbers, with or without its bounds; `Annotated[float, Range(above=0)]` allows all
    above 0.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {
            f"{self.least} or more": self.least,
            f"greater than {self.above}": self.above,
            f"at most {self.most}": self.most,
            f"below {self.below}": self.below,
        }
        return " and ".join(text for text, end in words.items() if end is not None)


Count = Annotated[int, Range(least=1)]  # 1, 2, 3, ...
CountOrZero = Annotated[int, Range(least=0)]  # 0, 1, 2, ...
Positive = Annotated[float, Range(above=0)]  # greater than 0
NonNegative = Annotated[float, Range(least=0)]  # 0 or more
Fraction = Annotated[float, Range(above=0, most=1)]  # greater than 0 and at most 1
BelowOne = Annotated[float, Range(least=0, below=1)]  # 0 or more and below 1


class Mark(Enum):
    """What the command line does with a field, other than to make it a flag."""

    POSITIONAL = "the value comes without a flag"
    HIDDEN = "no flag: code sets it"


Positional = Annotated[T, Mark.POSITIONAL]


@dataclass(frozen=True)
class Alias:
    """A short name of a flag, such as -o."""

    name: str


class Checked:
    """Base class of dataclasses whose fields are checked when an instance is made, before their own
    `__post_init__`.

    Values are converted to the declared type: an int becomes a float if the field is a float, a
    NumPy integer becomes an int, and a list becomes a tuple if the field is a tuple. So equal
    settings are also equal as JSON.
    """

    _flag: ClassVar[str] = "--{}"
    """how messages call a field"""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own: Callable[[Any], None] | None = vars(cls).get("__post_init__")
        if own is not None:

            @wraps(own)
            def checked_first(self: Checked) -> None:
                _check_fields(self)
                own(self)

            cls.__post_init__ = checked_first  # type: ignore[method-assign]

    if not TYPE_CHECKING:  # type checkers know the arguments from the fields

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """Refuse a name that no field has, with the nearest one."""
            known = [field.name for field in fields(cls) if field.init]
            for name in kwargs:
                if name not in known:
                    raise unknown(f"setting of {cls.__name__}", name, known)
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check the fields."""
        _check_fields(self)


def checked(*but: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Check the arguments of a function like fields of a `Checked` dataclass, except the names in
    `but`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def checking(*args: P.args, **kwargs: P.kwargs) -> T:
            bound = signature(function).bind(*args, **kwargs)
            hints = hints_of(function)
            for name in bound.arguments.keys() & hints.keys() - set(but):
                bound.arguments[name] = admitted(name, bound.arguments[name], hints[name])
            return function(*bound.args, **bound.kwargs)

        return checking

    return decorate


def admitted(name: str, value: Any, kind: Any) -> Any:
    """Return `value` as `kind`, an annotation; unchanged if that annotation cannot be checked."""
    try:
        return _as(value, kind)
    except _Refused as refused:
        shown = " ".join(reprlib.repr(value).split())
        raise UserError(f"{name} {shown} is {refused.why}: it must be {refused.wanted}") from None


def allows(kind: type, field: str, value: Any) -> bool:
    """Return whether the annotation of this field of `kind` admits a value."""
    try:
        admitted(field, value, hints_of(kind)[field])
    except UserError:
        return False
    return True


def require(holds: bool, name: str, value: object, wanted: str) -> None:
    """Raise the error of values out of range, for a condition that an annotation cannot express."""
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} {value} is out of range: it must be {wanted}")


class _Refused(Exception):
    """A value does not fit its annotation."""

    def __init__(self, why: str, wanted: str) -> None:
        super().__init__(why, wanted)
        self.why = why
        self.wanted = wanted


_WRONG_TYPE = "of the wrong type"
_UNKNOWN = "unknown"
_OUT_OF_RANGE = "out of range"


def _check_fields(instance: Any) -> None:
    kind: Any = type(instance)
    for name, flag, wanted in _fields_of(kind):
        value = getattr(instance, name)
        new = admitted(flag, value, wanted)
        if new is not value:
            object.__setattr__(instance, name, new)


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, str, Any], ...]:
    """Return name, flag and annotation of each field of a class."""
    names = (field.name for field in fields(kind))
    hints = hints_of(kind)
    return tuple((name, kind._flag.format(name.replace("_", "-")), hints[name]) for name in names)


@cache
def hints_of(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a class or function, with their ranges."""
    return typing.get_type_hints(annotated, include_extras=True)


def _as(value: Any, kind: Any) -> Any:
    """Return `value` as `kind`."""
    # most values: no annotation to take apart
    if type(value) is kind and kind is not float:
        return value
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        new = _within(value, kind)
    elif origin is Literal:
        new = _choice(value, kind)
    elif origin in (Union, UnionType):
        new = _one_of(value, args)
    elif origin is tuple:
        new = _sequence(value, kind)
    elif isinstance(kind, TypeVar):
        new = value if kind.__bound__ is None else _as(value, kind.__bound__)
    elif kind in (int, float):
        new = _number(value, kind)
    else:
        new = _instance(value, kind)
    return new


def _number(value: Any, kind: Any) -> Any:
    """Return `value` as an int or float, whichever `kind` is."""
    if type(value) is kind:
        number: Any = value
    elif isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        raise _Refused(_WRONG_TYPE, _names(kind))
    else:
        try:
            number = kind(value)
        except OverflowError:
            number = math.inf
    if kind is float and not math.isfinite(number):
        raise _Refused(_OUT_OF_RANGE, "a finite number")
    return number


def _choice(value: Any, kind: Any) -> Any:
    if not any(type(value) is type(choice) and value == choice for choice in get_args(kind)):
        raise _Refused(_UNKNOWN, _names(kind))
    return value


def _sequence(value: Any, kind: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _Refused(_WRONG_TYPE, _names(kind))
    parts = list(value)
    kinds = get_args(kind)
    if kinds[1:] == (...,):
        kinds = kinds[:1] * len(parts)
    if len(parts) != len(kinds):
        raise _Refused(_WRONG_TYPE, _names(kind))
    return tuple(map(_as, parts, kinds))


def _instance(value: Any, kind: Any) -> Any:
    """Return `value`, which must be an instance of `kind` if that is a class."""
    plain = get_origin(kind) or kind
    known = (
        isinstance(plain, type) and plain is not Any and not getattr(plain, "_is_protocol", False)
    )
    if known and not isinstance(value, plain):
        raise _Refused(_WRONG_TYPE, _names(kind))
    return value


def _within(value: Any, kind: Any) -> Any:
    """Return `value` as an annotation with ranges."""
    try:
        new = _as(value, kind.__origin__)
    except _Refused as refused:
        if refused.why == _WRONG_TYPE:
            refused.wanted = _names(kind)
        raise
    for allowed in kind.__metadata__:
        if isinstance(allowed, Range) and new not in allowed:
            raise _Refused(_OUT_OF_RANGE, str(allowed))
    return new


def _one_of(value: Any, kinds: Sequence[Any]) -> Any:
    """Return `value` as the first of `kinds` that it fits."""
    if value is None and NoneType in kinds:
        return None
    refusals = []
    for kind in kinds:
        try:
            return _as(value, kind)
        except _Refused as refused:
            refusals.append(refused)
    for refusal in refusals:
        # If a type fits and its range does not, the range is the helpful message.
        if refusal.why == _OUT_OF_RANGE:
            raise refusal
    raise _Refused(refusals[0].why, " or ".join(map(_names, kinds)))


def _names(kind: Any) -> str:
    """Return in words what an annotation allows."""
    origin = get_origin(kind)
    args = get_args(kind)
    if origin is Annotated:
        return ", ".join(
            [_names(args[0]), *(str(mark) for mark in args[1:] if isinstance(mark, Range))]
        )
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        if ... in args:
            return f"a list, each element {_names(args[0])}"
        return f"a list of {len(args)} elements"
    known = {
        float: "a number",
        int: "a whole number",
        bool: "True or False",
        str: "a text",
        dict: "a table",
        NoneType: "None",
    }
    plain = origin or kind
    return known.get(plain) or f"of type {getattr(plain, '__name__', plain)}"


def made(kind: type[T], values: object, table: str = "", what: str = "entry") -> T:
    """Return the dataclass of `kind` with these values, each checked by the annotation of its
    field.

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
            where = f" in [{table}]" if table else ""
            raise unknown(what + where, str(name)[:80], known)
    for name, field in known.items():
        if name not in values and field.default is field.default_factory is MISSING:
            raise UserError(f"there is no {_path(table, name)}")
    return kind(
        **{name: _value(hints[name], value, _path(table, name)) for name, value in values.items()}
    )


@contextmanager
def reading(what: str, reader: str = "the version of Ekiden that wrote it") -> Iterator[None]:
    """Turn errors of reading into a message that says what cannot be read, and what can read it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{what} cannot be read ({error}): use {reader}") from None


def plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as plain values."""
    return {field.name: _as_read(getattr(record, field.name)) for field in fields(record)}


def all_but(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return values by name without some of them."""
    return {name: value for name, value in values.items() if name not in names}


def _as_read(value: Any) -> Any:
    """Return a value as it is read back from a file, where sequences are lists."""
    match value:
        case dict():
            return {key: _as_read(one) for key, one in value.items()}
        case list() | tuple():
            return [_as_read(one) for one in value]
        case _:
            if is_dataclass(value):
                return plain(value)
            return value


def _path(table: str, name: str) -> str:
    if table:
        return f"{table}.{name}"
    return name


def _value(kind: Any, value: object, name: str) -> Any:
    if isinstance(kind, type) and is_dataclass(kind) and not isinstance(value, kind):
        return made(kind, value, name)
    one, *more = get_args(kind) if get_origin(kind) is tuple else (None,)
    if more == [...] and is_dataclass(one) and isinstance(value, list | tuple):
        return tuple(_value(one, part, f"{name}[{k}]") for k, part in enumerate(value))
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        _, held = get_args(kind)
        return {str(key): _value(held, part, f"{name}.{key}") for key, part in value.items()}
    return admitted(name, value, kind)
