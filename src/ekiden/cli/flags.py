"""Read flags into a dataclass; a mistake in them becomes one line."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

import tyro
from tyro import _errors as mistakes  # not public, but the only place where tyro gives a mistake as data, not text
from tyro.conf import OmitArgPrefixes, Positional
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
)

from ekiden.base.errors import UserError, unknown
from ekiden.cli.helping import Boxes, flags, page

T = TypeVar("T")
_HELP = {"-h", "--help"}
_READING = ConstructorRegistry()


class _HelpWanted(Exception):
    """`--help` is among the arguments."""


def parse(
    kind: type[T], args: Sequence[str], prog: str, default: T | None = None, about: str = "", boxes: Boxes = ()
) -> T:
    """Read flags into a dataclass.

    Args:
        kind: the dataclass; the fields of dataclasses in it are flags, too.
        args: the arguments behind `prog`.
        prog: the command, as it appears in messages.
        default: the values of flags that are not given.
        about: the first lines of the help; by default the docstring of `kind`.
        boxes: how the help groups the flags (see `helping.page`).

    Raises:
        SystemExit: the help was asked for; it is printed.
    """
    shown = kind if default is None else default
    extra: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with mistakes.on_parse_error(lambda event: _refuse(event, args, prog, shown)):
            parsed: T = tyro.cli(
                kind, args=list(args), prog=prog, config=(OmitArgPrefixes,), registry=_READING, add_help=False, **extra
            )
    except _HelpWanted:
        sys.stdout.write(page(prog, shown, about, boxes))
        raise SystemExit(0) from None
    return parsed


def parse_some(kind: type[T], args: Sequence[str], prog: str) -> T:
    """Read only the flags of a dataclass, and leave other flags alone."""
    args = [arg for arg in args if arg not in _HELP]
    with mistakes.on_parse_error(lambda event: _refuse(event, args, prog, kind)):
        parsed: T = tyro.cli(kind, args=args, registry=_READING, add_help=False, return_unknown_args=True)[0]
    return parsed


def _refuse(event: mistakes.ParseErrorEvent, args: Sequence[str], prog: str, shown: object) -> None:
    """Raise an error for what tyro could not read."""
    if _HELP & set(args):  # unknown to tyro, because we write the help
        raise _HelpWanted
    more = f"see {prog} --help"
    match event:
        case mistakes.UnrecognizedArgs(tokens=[first, *_]):
            given = first.partition("=")[0]
            if not given.startswith("-"):
                raise UserError(f"{given!r} belongs to no flag: {more}")
            near = get_close_matches(given, [name for flag in flags(shown) for name in flag.names], n=3)
            hint = f"did you mean {' or '.join(near)}? All flags: {prog} --help" if near else more
            raise UserError(f"unknown flag {given}: {hint}")
        case mistakes.MissingArgs(missing_arguments=missing):
            names = " and ".join(_name(arg.arg) for arg in missing)
            raise UserError(f"{names} {'is' if len(missing) == 1 else 'are'} missing: {more}")
        case mistakes.InvalidChoice(argument=argument, value=value, choices=choices):
            raise unknown(_name(argument), value, choices)
        case mistakes.BadValue(argument=argument):
            raise UserError(f"{_name(argument)} needs a value: {more}")
        case mistakes.InstantiationFailure(argument=argument, message=message):
            raise UserError(f"{_name(argument) if argument else 'these flags'} {message}")
    raise UserError(f"cannot read these arguments: {more}")


def _name(argument: Any) -> str:
    """Return the name of a tyro argument for messages."""
    name: str = argument.lowered.name_or_flags[-1]
    return name.rpartition(".")[2].upper() if argument.is_positional() else name


@_READING.primitive_rule
def _number(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Refuse what is not a number, with our own message."""
    kind: Any = info.type
    if kind not in (int, float):
        return None

    def read(texts: list[str]) -> Any:
        try:
            return kind(texts[0])
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise ValueError(f"{texts[0]!r} is of the wrong type: it must be {wanted}") from None

    return _spec(1, read)


@_READING.primitive_rule
def _optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Keep the message of an optional value; for unions tyro would print its own."""
    kinds = get_args(info.type)
    if len(kinds) != 2 or kinds[1] is not NoneType:
        return None
    one = _of(kinds[0], info)
    return _spec(1, lambda texts: None if texts == ["None"] else one.instance_from_str(texts))


@_READING.primitive_rule
def _list(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Require at least one value for a flag that takes a list."""
    if get_origin(info.type) is not tuple or get_args(info.type)[1:] != (...,):
        return None
    one = _of(get_args(info.type)[0], info)

    def read(texts: list[str]) -> tuple[Any, ...]:
        if not texts and Positional not in info.markers:  # commands check positional arguments themselves
            raise ValueError("needs a value")
        return tuple(map(element, texts))

    def element(text: str) -> Any:
        try:
            return one.instance_from_str([text])
        except ValueError as error:
            apart = [part for part in text.split(",") if part]
            if len(apart) < 2:
                raise
            raise ValueError(f"{error}; separate values by blanks: {' '.join(apart)}") from None

    return _spec("*", read)


def _of(kind: Any, info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any]:
    found = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, info.markers))
    assert isinstance(found, PrimitiveConstructorSpec)
    return found


def _spec(nargs: Any, read: Any) -> PrimitiveConstructorSpec[Any]:
    """Say how a value is read. tyro's help is not shown, so the rest does not matter."""
    return PrimitiveConstructorSpec(nargs, "VALUE", read, lambda _: True, lambda value: [str(value)])
