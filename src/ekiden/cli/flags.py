"""Read flags into a dataclass, turn a mistake in them into one line, and write the text of `--help`."""

import ast
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import tyro
from tyro import _errors as mistakes  # not public, but the only place where tyro gives a mistake as data, not text
from tyro.conf import HelptextFromCommentsOff, OmitArgPrefixes, Positional, Suppress
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from ekiden.base.checks import hints_of
from ekiden.base.errors import UserError, listed, nearest, unknown
from ekiden.engine.method import Method

_LEFT = 26
_MOST = 100
_WORDS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
_NO_DEFAULTS = (MISSING, None, "", ())
Boxes: TypeAlias = Sequence[tuple[str, str, Sequence[str]]]
"""A title, the line below it, and names of fields; the name of a dataclass stands for all its fields."""
T = TypeVar("T")
_HELP = {"-h", "--help"}
_READING = ConstructorRegistry()
_CONFIG = (OmitArgPrefixes, HelptextFromCommentsOff)  # our own help reads the comments, if it is asked for


@dataclass(frozen=True)
class Flag:
    """The help for one field."""

    field: str
    names: tuple[str, ...]
    """Empty if the value is positional."""
    value: str
    told: str

    @property
    def lines(self) -> tuple[str, str]:
        """The flag with its value, and the text about it."""
        shown = [f"{name} {self.value}".strip() for name in self.names] or [self.value]
        return ", ".join(shown), self.told


@dataclass
class _Box:
    title: str
    about: str
    flags: list[Flag]
    field: str


def page(prog: str, shown: object, about: str = "", boxes: Boxes = ()) -> str:
    """Return the help of a command: its first lines, by default the docstring of `shown`, and all flags.

    Values of an instance are the defaults. Boxes are the order of fields; by default a dataclass's own come first, then
    each dataclass in it.
    """
    width = min(shutil.get_terminal_size().columns, _MOST)
    found = list(_boxes(shown))
    own = found.pop(0)
    values = [flag for flag in own.flags if not flag.names]
    usage = " ".join([f"usage: {prog}", "[flags]", *(flag.value for flag in values)])
    lines = [usage, "", *_folded(about or own.about, width)]
    named = [Flag("help", ("-h", "--help"), "", "show this help message and exit")]
    rest = [flag for flag in own.flags if flag.names]
    lines += _block("arguments", "", values, width) if values else []
    lines += _block("options", "", named if boxes else [*named, *rest], width)
    if boxes:
        found = list(_arranged(found, rest, boxes))
    for box in sorted(found, key=lambda box: box.field != "method"):
        lines += _block(box.title, box.about, box.flags, width)
    return "\n".join(lines) + "\n"


def flags(shown: object) -> list[Flag]:
    """Return all flags of a dataclass and of the dataclasses in it."""
    return [flag for box in _boxes(shown) for flag in box.flags]


def _arranged(found: Sequence[_Box], own: Sequence[Flag], boxes: Boxes) -> Iterator[_Box]:
    """Yield the boxes of the help as `boxes` says."""
    flat = {flag.field: flag for box in found for flag in box.flags} | {flag.field: flag for flag in own}
    nested = {box.field: box for box in found}
    yield nested["method"]
    for title, about, names in boxes:
        if whole := nested.get(names[0]):
            yield _Box(title, whole.about, whole.flags, whole.field)
        else:
            yield _Box(title, about, [flat[name] for name in names], title)


def _boxes(shown: object, field: str = "") -> Iterator[_Box]:
    """Yield the fields of a dataclass as a box, then those of the dataclasses in it."""
    kind: Any = shown if isinstance(shown, type) else type(shown)
    hints, texts = hints_of(kind), _texts(kind)
    box = _Box(kind.title() if issubclass(kind, Method) else field, inspect.getdoc(kind) or "", [], field)
    inner: list[_Box] = []
    for one in fields(kind):
        default = getattr(shown, one.name, one.default if one.default_factory is MISSING else one.default_factory())
        if is_dataclass(default):
            inner += _boxes(default, one.name)
        elif not any(mark is Suppress for mark in getattr(hints[one.name], "__metadata__", ())):
            box.flags.append(_flag(one.name, hints[one.name], default, texts.get(one.name, "")))
    yield box
    yield from inner


def _flag(name: str, hint: Any, default: Any, text: str) -> Flag:
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    if any(mark is Positional for mark in marks):
        several = _value(hint).removeprefix(_value(hint).partition(" ")[0])
        return Flag(name, (), name.upper() + several, text)
    flag = f"--{name.replace('_', '-')}"
    short = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
    names = (*short, flag, *([f"--no-{flag[2:]}"] if isinstance(default, bool) else []))
    words = default if isinstance(default, tuple) else (default,)
    told = f"{text} (default: {' '.join(map(str, words))})" if default not in _NO_DEFAULTS else text
    return Flag(name, names, _value(hint), told.strip())


def _value(hint: Any) -> str:
    """Return the word for a flag's value."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _value(args[0])
    if origin is Literal:
        return f"{{{','.join(map(str, args))}}}"
    if origin is tuple:
        return f"{_value(args[0])} ..."
    if NoneType in args:
        return _value(args[0])
    return _WORDS.get(hint, "")


def _texts(kind: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass, by the fields' names."""
    found: dict[str, str] = {}
    for base in reversed([one for one in kind.__mro__ if is_dataclass(one)]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # the class is not in a file
            continue
        assert isinstance(node, ast.ClassDef)
        for one, after in pairwise(node.body):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(text, str) and isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = " ".join(text.split())
    return found


def _block(title: str, about: str, listed: Iterable[Flag], width: int) -> list[str]:
    """Return the lines of a box."""
    rows = [line for flag in listed for line in _row(*flag.lines, width)]
    return ["", title, *([*_folded(about, width), ""] if about else []), *rows]


def _folded(text: str, width: int) -> list[str]:
    """Return the paragraphs of a text."""
    parts = ["\n".join(_wrap(" ".join(part.split()), width)) for part in text.split("\n\n")]
    return "\n\n".join(parts).split("\n")


def _wrap(text: str, width: int, **options: str) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False, **options) or [""]  # type: ignore[arg-type]


def _row(flag: str, told: str, width: int) -> list[str]:
    told_lines, first = _wrap(told, width - _LEFT), f"  {flag}"
    if len(first) > width:
        heads = _wrap(flag.replace(",", ", "), width, initial_indent="  ", subsequent_indent="    ")
    elif len(first) < _LEFT - 1:
        heads, told_lines = [f"{first:<{_LEFT}}{told_lines[0]}".rstrip()], told_lines[1:]
    else:
        heads = [first]
    return [*heads, *(f"{'':{_LEFT}}{line}".rstrip() for line in told_lines)]


class _HelpWanted(Exception):
    """`--help` is among the arguments."""


def parse(
    kind: type[T], args: Sequence[str], prog: str, default: T | None = None, about: str = "", boxes: Boxes = ()
) -> T:
    """Read the arguments behind `prog` into a dataclass, of which the fields of dataclasses in it are flags, too.

    Flags that are not given have the values of `default`. The help has `about`, or the docstring of `kind`, and
    `boxes`; if it was asked for, it is printed, and SystemExit raised.
    """
    shown = kind if default is None else default
    extra: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with mistakes.on_parse_error(lambda event: _refuse(event, args, prog, shown)):
            parsed: T = tyro.cli(
                kind, args=list(args), prog=prog, config=_CONFIG, registry=_READING, add_help=False, **extra
            )
    except _HelpWanted:
        sys.stdout.write(page(prog, shown, about, boxes))
        raise SystemExit(0) from None
    return parsed


def parse_some(kind: type[T], args: Sequence[str], prog: str) -> T:
    """Read only the flags of a dataclass, and leave other flags alone."""
    args = [arg for arg in args if arg not in _HELP]
    with mistakes.on_parse_error(lambda event: _refuse(event, args, prog, kind)):
        parsed: T = tyro.cli(
            kind, args=args, config=_CONFIG, registry=_READING, add_help=False, return_unknown_args=True
        )[0]
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
            for flag in flags(shown):
                if not flag.names and given.removeprefix("--").rstrip("s") == flag.field.rstrip("s"):
                    raise UserError(f"{flag.value} comes without a flag: leave out {given}")
            if prog.startswith("ekiden run ") and (having := _methods_with(given)):
                raise UserError(f"unknown flag {given}: it is of {listed(having)}. All flags: {prog} --help")
            near = nearest(given, [name for flag in flags(shown) for name in flag.names], n=3, cutoff=0.7)
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


def _methods_with(flag: str) -> list[str]:
    """Return the methods that have such a flag of their own."""
    from ekiden.methods import METHODS  # noqa: PLC0415  (most commands do not need them)

    field = flag.removeprefix("--").replace("-", "_")
    return [method.title() for method in METHODS if field in {f.name for f in fields(method)}]


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
