"""Read flags into a dataclass, turn a mistake in them into one line, and write the text of
`--help`.
"""

import ast
import inspect
import re
import shutil
import sys
import textwrap
from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

from ekiden.core.base.checks import Alias, Mark, hints_of
from ekiden.core.base.errors import UserError, listed, nearest, unknown

_LEFT = 26
_LEAST = 40
_MOST = 100
_WORDS = {int: "INT", float: "FLOAT", str: "STR", Path: "PATH"}
_NO_DEFAULTS = (MISSING, None, "", ())
Boxes: TypeAlias = Sequence[tuple[str, str, Sequence[str]]]
"""A title, the line below it, and names of fields; the name of a dataclass stands for all its
fields."""
T = TypeVar("T")
_HELP = {"-h", "--help"}


@dataclass(frozen=True)
class Flag:
    """A field as a flag, or as a positional argument."""

    kind: type
    """the dataclass with the field"""
    field: str
    hint: Any
    default: Any

    @property
    def marks(self) -> tuple[Any, ...]:
        """What the annotation says about the flag."""
        return getattr(self.hint, "__metadata__", ())

    @property
    def positional(self) -> bool:
        """Whether the value comes without a flag."""
        return Mark.POSITIONAL in self.marks

    @property
    def names(self) -> tuple[str, ...]:
        """Empty if the value is positional. A flag that is off needs no name to turn it off."""
        if self.positional:
            return ()
        flag = f"--{self.field.replace('_', '-')}"
        short = [mark.name for mark in self.marks if isinstance(mark, Alias)]
        if self.default is True:
            return (*short, flag, f"--no-{flag[2:]}")
        return (*short, flag)

    @property
    def called(self) -> str:
        """What messages call it."""
        if self.positional:
            return self.field.upper()
        return f"--{self.field.replace('_', '-')}"

    @property
    def several(self) -> bool:
        """Whether it takes a list."""
        return get_origin(_bare(self.hint)) is tuple

    @property
    def value(self) -> str:
        """The word for its value in the help."""
        if not self.positional:
            return _word(self.hint)
        if self.several:
            return f"{self.called} ..."
        return self.called

    @property
    def told(self) -> str:
        """The text about it, with its default."""
        text = texts_below(self.kind).get(self.field, "")
        if self.default not in _NO_DEFAULTS and self.default is not False:
            words = self.default if isinstance(self.default, tuple) else (self.default,)
            text += f" (default: {' '.join(map(str, words))})"
        return text.strip()

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
    """Return the help of a command: its first lines, by default the docstring of `shown`, and all
    flags.

    Values of an instance are the defaults. Boxes are the order of fields; by default a dataclass's
    own come first, then each dataclass in it.
    """
    width = max(_LEAST, min(shutil.get_terminal_size().columns, _MOST))
    found = list(_boxes(shown))
    own = found.pop(0)
    values = [flag for flag in own.flags if not flag.names]
    usage = " ".join([f"usage: {prog}", "[flags]", *(flag.value for flag in values)])
    lines = [usage, "", *_folded(about or own.about, width)]
    rest = [flag for flag in own.flags if flag.names]
    lines += _block("arguments", "", values, width) if values else []
    lines += ["", "options", *_row("-h, --help", "show this help message and exit", width)]
    if boxes:
        found = list(_arranged(found, rest, boxes))
    else:
        lines += _rows(rest, width)
    for box in sorted(found, key=lambda box: box.field != "method"):
        lines += _block(box.title, box.about, box.flags, width)
    return "\n".join(lines) + "\n"


def flags(shown: object) -> list[Flag]:
    """Return all flags of a dataclass and of the dataclasses in it."""
    return [flag for box in _boxes(shown) for flag in box.flags]


def _arranged(found: Sequence[_Box], own: Sequence[Flag], boxes: Boxes) -> Iterator[_Box]:
    """Yield the boxes of the help as `boxes` says. Those without a flag are left out; one that names
    none has the flags that no other names.
    """
    nested = {box.field: box for box in found}
    named = {"method", *(name for _, _, names in boxes for name in names)}
    flat = {flag.field: flag for flag in own}
    for box in found:
        if box.field not in named:
            flat |= {flag.field: flag for flag in box.flags}
    others = [name for name in flat if name not in named]
    yield nested["method"]
    for title, about, names in boxes:
        if names and (whole := nested.get(names[0])):
            yield _Box(title, whole.about, whole.flags, whole.field)
        elif listed := [flat[name] for name in names or others if name in flat]:
            yield _Box(title, about, listed, title)


def _boxes(shown: object, field: str = "") -> Iterator[_Box]:
    """Yield the fields of a dataclass as a box, then those of the dataclasses in it."""
    kind = _class_of(shown)
    title = field
    if field == "method":
        title = kind.title()
    box = _Box(title, inspect.getdoc(kind) or "", [], field)
    inner: list[_Box] = []
    for one in fields(kind):
        default = _default(shown, one)
        hint = hints_of(kind)[one.name]
        if is_dataclass(default):
            inner += _boxes(default, one.name)
        elif Mark.HIDDEN not in getattr(hint, "__metadata__", ()):
            box.flags.append(Flag(kind, one.name, hint, default))
    yield box
    yield from inner


def _class_of(shown: object) -> Any:
    """Return a dataclass, or that of an instance."""
    if isinstance(shown, type):
        return shown
    return type(shown)


def _default(shown: object, field: Field[Any]) -> Any:
    """Return the value that a field has if its flag is not given, MISSING if there is none."""
    default = field.default
    if field.default_factory is not MISSING:
        default = field.default_factory()
    return getattr(shown, field.name, default)


def _bare(hint: Any) -> Any:
    """Return an annotation without its marks; of several kinds the first, which texts are read as."""
    if get_origin(hint) in (Annotated, Union, UnionType):
        return _bare(get_args(hint)[0])
    return hint


def _word(hint: Any) -> str:
    """Return the word for a flag's value."""
    bare = _bare(hint)
    if get_origin(bare) is Literal:
        return f"{{{','.join(map(str, get_args(bare)))}}}"
    return f"{_word(get_args(bare)[0])} ..." if get_origin(bare) is tuple else _WORDS.get(bare, "")


@cache
def texts_below(kind: type) -> dict[str, str]:
    """Return the texts below the fields of a dataclass, by the fields' names."""
    found: dict[str, str] = {}
    for base in reversed([one for one in kind.__mro__ if is_dataclass(one)]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:  # the class is not in a file
            continue
        assert isinstance(node, ast.ClassDef)
        for one, after in pairwise(node.body):
            match one, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


def _block(title: str, about: str, listed: Iterable[Flag], width: int) -> list[str]:
    """Return the lines of a box."""
    lines = ["", title]
    if about:
        lines += [*_folded(about, width), ""]
    return lines + _rows(listed, width)


def _rows(listed: Iterable[Flag], width: int) -> list[str]:
    """Return the lines about some flags."""
    lines: list[str] = []
    for flag in listed:
        lines += _row(*flag.lines, width)
    return lines


def _folded(text: str, width: int) -> list[str]:
    """Return the paragraphs of a text."""
    lines: list[str] = []
    for part in text.split("\n\n"):
        lines += [*_wrap(" ".join(part.split()), width), ""]
    return lines[:-1]


def _wrap(text: str, width: int, **options: str) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        break_on_hyphens=False,
        break_long_words=False,
        **options,  # type: ignore[arg-type]
    ) or [""]


def _row(flag: str, told: str, width: int) -> list[str]:
    told_lines = _wrap(told, width - _LEFT)
    first = f"  {flag}"
    if len(first) > width:
        heads = _wrap(flag.replace(",", ", "), width, initial_indent="  ", subsequent_indent="    ")
    elif len(first) < _LEFT - 1:
        heads = [f"{first:<{_LEFT}}{told_lines[0]}".rstrip()]
        told_lines = told_lines[1:]
    else:
        heads = [first]
    return [*heads, *(f"{'':{_LEFT}}{line}".rstrip() for line in told_lines)]


def parse(
    kind: type[T],
    args: Sequence[str],
    prog: str,
    default: T | None = None,
    about: str = "",
    boxes: Boxes = (),
) -> T:
    """Read the arguments behind `prog` into a dataclass, of which the fields of dataclasses in it
    are flags, too.

    Flags that are not given have the values of `default`. The help has `about`, or the docstring of
    `kind`, and `boxes`; if it was asked for, it is printed, and SystemExit raised.
    """
    shown: Any = default or kind
    if _HELP & set(args):
        sys.stdout.write(page(prog, shown, about, boxes))
        raise SystemExit(0)
    found = flags(shown)
    given, left = _read(found, args, prog)
    # -out is not -o ut
    if left := [arg for arg in args if re.match(r"-[A-Za-z]{2}", arg)] or left:
        raise _unread(next((arg for arg in left if arg.startswith("-")), left[0]), found, prog)
    if lacking := [
        flag.called for flag in found if flag.default is MISSING and flag.field not in given
    ]:
        raise UserError(
            f"{' and '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing: see {prog} "
            "--help"
        )
    made: T = _built(shown, given)
    return made


def parse_some(kind: type[T], args: Sequence[str], prog: str) -> T:
    """Read only the flags of a dataclass, and leave other flags alone."""
    made: T = _built(kind, _read(flags(kind), args, prog)[0])
    return made


def _read(
    found: Sequence[Flag], args: Sequence[str], prog: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the flags that are given, by their fields, and the arguments that belong
    to none.
    """
    parser = ArgumentParser(
        usage="",
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=SUPPRESS,
    )
    actions: dict[str, Flag] = {}
    for flag in found:
        several: Any = None
        if flag.several:
            several = "*"
        if flag.positional:
            action: Action = parser.add_argument(flag.field, nargs=several or "?")
        elif isinstance(flag.default, bool):
            action = parser.add_argument(
                *flag.names[: -1 if flag.default else None],
                action=BooleanOptionalAction,
            )
        else:
            action = parser.add_argument(*flag.names, nargs=several)
        actions["/".join(action.option_strings) or action.dest] = flag
    try:
        values, left = parser.parse_known_intermixed_args([_spelled(arg) for arg in args])
    except ArgumentError as error:
        flag = actions[str(error.argument_name)]
        what = "takes no value" if isinstance(flag.default, bool) else "needs a value"
        raise UserError(f"{flag.called} {what}: see {prog} --help") from None
    texts = vars(values)
    return {
        flag.field: _value(flag, texts[flag.field]) for flag in found if flag.field in texts
    }, left


def _spelled(arg: str) -> str:
    """Return an argument as argparse needs it: --batch_size with hyphens, and -1e-3 with a blank,
    or it is a flag.
    """
    name, equals, value = arg.partition("=")
    if name.startswith("--"):
        return f"{name.replace('_', '-')}{equals}{value}"
    if re.fullmatch(r"-[\d.]+e[-+]?\d+", arg):
        return f" {arg}"
    return arg


def _built(shown: Any, given: Mapping[str, Any]) -> Any:
    """Return the dataclass with the values that are given, and its defaults."""
    kind = _class_of(shown)
    values = {}
    for one in fields(kind):
        default = _default(shown, one)
        values[one.name] = (
            _built(default, given) if is_dataclass(default) else given.get(one.name, default)
        )
    return kind(**values)


def _value(flag: Flag, text: Any) -> Any:
    """Return what the text of a flag means, or texts; a flag without values is read already."""
    if isinstance(text, bool):
        return text
    if not flag.several:
        return _one(flag, flag.hint, text)
    # of a positional one the default may be that there is none
    if not text and not flag.positional:
        raise UserError(f"{flag.called} needs a value")
    try:
        return tuple(_one(flag, get_args(_bare(flag.hint))[0], one) for one in text)
    except UserError as error:
        apart = [part for part in " ".join(text).replace(",", " ").split() if part]
        if len(apart) == len(text):
            raise
        raise UserError(f"{error}; separate values by blanks: {' '.join(apart)}") from None


def _one(flag: Flag, hint: Any, text: str) -> Any:
    """Return what one value means."""
    bare = _bare(hint)
    text = text.removeprefix(" ") if text.startswith(" -") else text
    if text == "None" and NoneType in get_args(hint):
        return None
    if get_origin(bare) is Literal and text not in get_args(bare):
        raise unknown(flag.called, text, get_args(bare))
    if bare not in (int, float):
        return Path(text) if bare is Path else text
    try:
        return bare(text)
    except ValueError:
        wanted = "a whole number" if bare is int else "a number"
        raise UserError(
            f"{flag.called} {text!r} is of the wrong type: it must be {wanted}"
        ) from None


def _unread(arg: str, found: Sequence[Flag], prog: str) -> UserError:
    """Return the error for an argument that belongs to no flag."""
    given = arg.partition("=")[0]
    more = f"see {prog} --help"
    names = [name for flag in found for name in flag.names]
    if not given.startswith("-"):
        near = nearest(given, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]} {given}?" if near else more
        return UserError(f"unexpected argument {given!r}; {hint}")
    for flag in found:
        if flag.positional and given.removeprefix("--").rstrip("s") == flag.field.rstrip("s"):
            return UserError(f"{flag.value} comes without a flag: leave out {given}")
    if prog.startswith("ekiden run ") and (having := _methods_with(given)):
        return UserError(
            f"unknown flag {given}: it is of {listed(having)}. All flags: {prog} --help"
        )
    near = nearest(given, names, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}? All flags: {prog} --help" if near else more
    return UserError(f"unknown flag {given}: {hint}")


def _methods_with(flag: str) -> list[str]:
    """Return the methods that have such a flag of their own."""
    # most commands do not need them
    from ekiden.methods import METHODS

    field = flag.removeprefix("--").replace("-", "_")
    return [method.title() for method in METHODS if field in method.__dataclass_fields__]
