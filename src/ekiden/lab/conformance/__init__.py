"""The contract that every method keeps, as functions, for the library's own tests and for `ekiden
check`.

Each check takes a `Subject`. Its docstring is the line of the contract that it measures, and it
raises `Broken` with what it found.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.core.engine.local import MakesTransport
from ekiden.core.engine.method import Method
from ekiden.lab.conformance import rules
from ekiden.lab.conformance.small_runs import Broken as Broken
from ekiden.lab.conformance.small_runs import Subject as Subject
from ekiden.methods import method_named

Check = Callable[[Subject], None]

TEXT: tuple[Check, ...] = (
    rules.is_a_frozen_dataclass,
    rules.describes_itself,
    rules.cites_its_source,
    rules.every_field_has_default_and_help,
    rules.flags_do_not_collide,
)
CONDUCT: tuple[Check, ...] = (
    rules.ends_after_its_steps,
    rules.keeps_what_it_declares,
    rules.repeats,
    rules.learns,
    rules.weighs_classes,
    rules.counts_every_pass,
    rules.ledger_equals_the_cost,
    rules.resumes,
    rules.same_on_processes,
)
CHECKS = (*TEXT, rules.refuses_wrong_values, rules.tasks_are_annotated, *CONDUCT)
"""All checks. Those of the class come first: a run of a class that breaks them shows little."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: name of the check.
        line: the line of the contract.
        broken: what was found; empty where the line holds.
        tried: False if an earlier failure prevents the check.
    """

    name: str
    line: str
    broken: str = ""
    tried: bool = True

    @property
    def holds(self) -> bool:
        """Whether the line holds."""
        return self.tried and not self.broken


def line(check: Callable[..., None]) -> str:
    """Return the line of the contract that a check measures."""
    return " ".join((check.__doc__ or "").split())


def check(
    kind: type[Method] | Method | str,
    report: Callable[[Finding], None] = lambda finding: None,
    checks: Sequence[Check] = CHECKS,
) -> tuple[Finding, ...]:
    """Check a method against the contract. No mistake of the method raises an error here.

    Args:
        kind: the method's class, an instance, or a name as in `ekiden.run`.
        report: called with each finding as soon as it is there.
        checks: the checks to make.

    Raises:
        UserError: it is not a class, or no method has this name.
    """
    if isinstance(kind, str):
        kind = method_named(kind)
    if isinstance(kind, Method):
        kind = type(kind)
    if not isinstance(kind, type):
        raise UserError(f"{type(kind).__name__} is not a method: give its class or its name")
    subject = Subject(kind)
    published = kind.__module__.startswith("ekiden.methods.")
    findings: list[Finding] = []
    # what prevented an earlier check
    known: set[str] = set()
    for one in checks:
        if one is rules.cites_its_source and not published:
            continue
        broken = {finding.name for finding in findings if finding.broken}
        unmade = one not in TEXT and broken and not _can_be_made(subject)
        if unmade or (one in CONDUCT and broken & _FIRST):
            finding = Finding(one.__name__, line(one), tried=False)
        else:
            finding = _tried(one, subject, kind, known)
        findings.append(finding)
        report(finding)
    return tuple(findings)


def check_transport(make: MakesTransport) -> tuple[Finding, ...]:
    """Check a transport against its contract, see `ekiden.transports.Transport`. Its mistakes raise
    no error here.

    Args:
        make: makes the transport, as `ekiden.run(..., transport=...)` takes it.
    """
    return tuple(_tried(one, make, make, set()) for one in rules.OF_TRANSPORTS)


_FIRST = {f.__name__ for f in (rules.is_a_frozen_dataclass, rules.tasks_are_annotated)}
"""Checks that must pass before a run can show anything."""


def _can_be_made(subject: Subject) -> bool:
    try:
        return isinstance(subject.default, Method)
    except Exception:
        return False


def _tried(one: Callable[[Any], None], subject: Any, kind: Any, known: set[str]) -> Finding:
    broken = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            one(subject)
    except Exception as error:
        broken = _found(error, kind)
        if broken in known:
            return Finding(one.__name__, line(one), tried=False)
        known.add(broken)
    return Finding(one.__name__, line(one), broken)


def _found(error: Exception, kind: Any) -> str:
    """Return in one line what went wrong."""
    if isinstance(error, Broken) and isinstance(error.__cause__, Exception):
        return f"{error} ({_found(error.__cause__, kind)})"
    if not isinstance(error, Broken | UserError):
        file = outside.source(kind) or Path(getattr(kind, "__name__", "it"))
        error = outside.failure(file, error)
    return " ".join(str(error).split())
