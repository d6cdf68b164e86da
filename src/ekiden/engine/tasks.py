"""The tasks of a method, and the types of their values."""

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from ekiden.base.errors import UserError
from ekiden.engine.method import Method


def tasks(kind: type[Method]) -> list[str]:
    """Return the names of a method's tasks."""
    return [name for name, function in inspect.getmembers(kind) if getattr(function, "__on_client__", False)]


def payload_types(method: Method, name: str) -> tuple[list[Any], Any]:
    """Return the annotated types of a task's arguments (after the client) and of its value.

    Raises:
        UserError: an annotation is missing, or uses a name that its file does not know.
    """
    task = task_of(method, name)
    where = f"{name} of {type(method).__name__}"
    try:
        hints = get_type_hints(task)
    except NameError as error:
        raise UserError(f"the annotations of {where} cannot be read ({error}): import what they name") from None
    arguments = list(inspect.signature(task).parameters)[1:]
    if missing := [p for p in (*arguments, "return") if p not in hints]:
        what = ", ".join("what it returns" if p == "return" else repr(p) for p in missing)
        raise UserError(f"{where} does not say the type of {what}: annotate it, as values are checked when they arrive")
    return [hints[p] for p in arguments], hints["return"]


def task_of(method: Method, name: str) -> Callable[..., Any]:
    """Return the function `name` of `method`, if it is a task."""
    task: Callable[..., Any] = getattr(method, name, _nothing)
    if not getattr(task, "__on_client__", False):
        raise UserError(f"{method.title()} has no client task {name!r}: clients run only functions marked @on_client")
    return task


def asks_for_sums(method: Method) -> bool:
    """Return whether the source of a method asks for sums, which transports can mask."""
    try:
        return "fed.sum(" in inspect.getsource(type(method))
    except (OSError, TypeError):
        return False


def _nothing() -> None:
    """Placeholder for a task that a method does not have."""
