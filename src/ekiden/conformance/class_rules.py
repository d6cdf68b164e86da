"""The contract about a method's class, checked without a run."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass, replace
from itertools import pairwise
from math import inf, nan
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ekiden.base.errors import UserError
from ekiden.base.settings import Hardware, Training
from ekiden.conformance.small_runs import Broken, Subject
from ekiden.engine.method import Method, payload_types, task_names
from ekiden.recipe import Recipe
from ekiden.runs.plan import Plan

_WRONG: dict[Any, tuple[object, ...]] = {
    int: ("3", 3.5, True, None, nan),
    float: ("0.1", True, None, nan, inf, -inf),
    bool: (1, "yes", None),
    str: (3, None, True),
    Literal: ("no such choice", nan),
    tuple: ("0.5", 0.5, None),
}


def is_a_frozen_dataclass(subject: Subject) -> None:
    """It is a frozen dataclass derived from `Method` that defines `run`, `steps` and `cost`."""
    kind = subject.kind
    if "__dataclass_fields__" not in vars(kind) or not is_dataclass(kind):
        raise Broken("the class is not a dataclass: write @dataclass(frozen=True) above it")
    if inspect.isabstract(kind):
        raise Broken(f"the class does not define {', '.join(sorted(kind.__abstractmethods__))}")


def describes_itself(subject: Subject) -> None:
    """It describes itself: the docstring begins with a line of one sentence."""
    text = inspect.cleandoc(vars(subject.kind)["__doc__"] or "")
    if text.startswith(f"{subject.kind.__name__}("):  # `dataclass` writes this if there is no docstring
        raise Broken("the class has no docstring")
    if not re.match(r"\S.*\.(\n\n|$)", text):
        raise Broken("the docstring's first line is not one sentence with a full stop, followed by an empty line")


def cites_its_source(subject: Subject) -> None:
    """A published method names its source: the year, an https link, and a paragraph "Departures from the paper:"."""
    text = inspect.getdoc(subject.kind) or ""
    if not re.search(r"https://[\w-]+\.\S+", text):
        raise Broken("the docstring has no https link")
    if not re.search(r"\b(19|20)\d\d\b", text):
        raise Broken("the docstring has no year")
    if "Departures from the paper:" not in text:
        raise Broken('the docstring has no paragraph "Departures from the paper:"')


def every_field_has_default_and_help(subject: Subject) -> None:
    """Every field has a default and a help text."""
    helped = {name for kind in subject.kind.__mro__ if issubclass(kind, Method) for name in _helped(kind)}
    for f in fields(subject.kind):
        if f.default is MISSING and f.default_factory is MISSING:
            raise Broken(f"{f.name} has no default")
        if f.name not in helped:
            raise Broken(f"{f.name} has no text below it that says what it is")


def flags_do_not_collide(subject: Subject) -> None:
    """No field is called like another flag of the command line."""
    if taken := _flags() & {f.name for f in fields(subject.kind)}:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(taken))
        raise Broken(f"{flags} is a flag of `ekiden run` already: choose another name")


def refuses_wrong_values(subject: Subject) -> None:
    """It refuses wrong values: of another type, unknown choices, NaN and infinity."""
    default, hints = subject.default, get_type_hints(subject.kind, include_extras=True)
    for f in fields(subject.kind):
        for value in _WRONG.get(_base(hints[f.name], getattr(default, f.name)), ()):
            try:
                replace(default, **{f.name: value})
            except UserError:
                continue
            except Exception as error:
                raise Broken(f"{f.name}={value!r} ends in {type(error).__name__}, not in a UserError") from error
            raise Broken(f"{f.name}={value!r} is accepted")


def tasks_are_annotated(subject: Subject) -> None:
    """Tasks of clients are marked `@on_client`. Their arguments, after the client, and their results are annotated."""
    found = task_names(subject.kind)
    if not found:
        raise Broken("no function is marked @on_client")
    for name in _called(subject.kind):
        if callable(getattr(subject.kind, name, None)) and name not in found:
            raise Broken(f"{name} is called at clients, but is not marked @on_client")
    for name in found:
        try:
            arguments, value = payload_types(subject.default, name)
        except UserError as error:
            raise Broken(str(error)) from None
        if Any in (*arguments, value):
            raise Broken(f"{name} takes or returns Any: say which type")
        if value is type(None):
            raise Broken(f"{name} returns None: return what the method needs of the client")


def _base(hint: Any, default: object) -> Any:
    """Return the kind of value that an annotation describes; if it says nothing, that of the default."""
    if get_origin(hint) is Annotated:
        return _base(get_args(hint)[0], default)
    return type(default) if hint in (Any, object) else get_origin(hint) or hint


def _body(kind: type[Method]) -> list[ast.stmt]:
    """Return the statements of a class.

    Raises:
        Broken: its source is not available.
    """
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError):
        raise Broken(f"the source of {kind.__name__} cannot be read: put it into a file") from None
    assert isinstance(node, ast.ClassDef)
    return node.body


def _helped(kind: type[Method]) -> Iterator[str]:
    """Yield the fields of a class that have a text below them."""
    body = _body(kind)
    for node, after in pairwise(body):
        text = getattr(after.value, "value", None) if isinstance(after, ast.Expr) else None
        if isinstance(text, str) and isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def _called(kind: type[Method]) -> Iterator[str]:
    """Yield the functions that `run` passes to `fed.call` or `fed.sum` as `self.NAME`."""
    for node in (n for statement in _body(kind) for n in ast.walk(statement) if isinstance(n, ast.Call)):
        asks = isinstance(node.func, ast.Attribute) and node.func.attr in ("call", "sum")
        if asks and ast.unparse(node.func.value) == "fed" and node.args:  # type: ignore[attr-defined]
            task = node.args[0]
            if isinstance(task, ast.Attribute) and ast.unparse(task.value) == "self":
                yield task.attr


def _flags() -> set[str]:
    """Return the names of the command line's own flags."""
    from ekiden.cli.runs import RunOptions  # noqa: PLC0415  (the command line is slow to import)
    from ekiden.cli.silos import RemoteOptions  # noqa: PLC0415
    from ekiden.transports.flower.coordinator.remote_plan import RemotePlan  # noqa: PLC0415

    own = (Plan, RemotePlan, Recipe, Training, Hardware, RunOptions, RemoteOptions)
    return {f.name for kind in own for f in fields(kind)}
