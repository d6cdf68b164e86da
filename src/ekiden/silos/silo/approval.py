"""Approval of plans: who runs a silo reads what a run would do here, and agrees to exactly that,
once.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path

from ekiden.core.base.checks import Checked, made, plain
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import read_text, write
from ekiden.core.base.outside import summary_of
from ekiden.core.base.settings import Hardware
from ekiden.silos.silo import trusted
from ekiden.silos.silo.levels import TELLS
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import Agreement, no_samples
from ekiden.silos.trust.parcel import said

# folder in the silo's folder
PLANS = "plans"
_NO_RUN = "0" * 16
_APPROVED = "approved"
# plans that wait
_MOST = 100
# for which an approval holds if nobody says how long
DAYS = 30
# characters of a value that are shown
_LONG = 160


def read_terms(file: SiloFile, text: str) -> Agreement:
    """Return the terms in a text that came to a silo."""
    return agreements.parse(text, partial(trusted.own_copy, file))


def digest(file: SiloFile, terms: Agreement) -> str:
    """Return the digest that names a plan at a silo: all terms but the run's id, and the SuperLink
    that sent them.
    """
    certificate = file.beside(file.link.certificate)
    link = ""
    if certificate.is_file():
        link = hashlib.sha256(certificate.read_bytes()).hexdigest()
    # an agreement is about these rows
    query = file.holding(terms.data).query
    text = json.dumps([replace(terms, run=_NO_RUN).text(), file.link.address, link, query])
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Approval(Checked):
    """What the operator of a silo agreed to, as the silo keeps it.

    The terms name method, hyperparameters, evaluations and ε, so all of them are bound.
    """

    # the plan, without the run's id
    terms: str
    # the last day, such as 2027-01-31
    until: str

    def holds(self, file: SiloFile, terms: Agreement) -> bool:
        """Return whether it is for a run of these terms, and its last day is not over."""
        plan = digest(file, read_terms(file, self.terms))
        return plan == digest(file, terms) and _is_open(date.fromisoformat(self.until))


def check(file: SiloFile, terms: Agreement) -> None:
    """Refuse a run whose plan nobody approved here, or whose approval has ended; keep the plan to
    be read.

    A plan of a method with a table [allow.METHOD] is approved by that rule until its last day.
    """
    plan = digest(file, terms)
    places = _plans(file) / f"{plan}.{_APPROVED}", _run(file, terms)
    if _by_rule(file, terms) or any(_held(file, terms, place) for place in places):
        return
    _wait(file, terms, plan)
    ended = " now" if places[1].exists() else ""
    raise UserError(
        f"nobody at {file.name} has approved this plan{ended}: who runs it reads the plan by "
        "`ekiden silo approve silo.toml`, and agrees to one run of it by "
        f"`ekiden silo approve silo.toml {plan}`; then start the run again"
    )


def take(file: SiloFile, terms: Agreement) -> None:
    """Use the approval for the run of these terms, at its first task: no other run has it
    afterwards, and the run ends with its last day.

    A run that another silo refuses has no task, so approvals stay until all silos agree.
    """
    if _by_rule(file, terms) or _held(file, terms, _run(file, terms)):
        return
    given = _plans(file) / f"{digest(file, terms)}.{_APPROVED}"
    if not _held(file, terms, given):
        raise UserError(
            f"another run has used the approval that {file.name} gave to this plan, or its last "
            "day is over: ask again"
        )
    os.replace(given, _run(file, terms))


def waiting(file: SiloFile) -> Iterator[tuple[str, Agreement]]:
    """Yield the plans that wait for approval, with their digests; the oldest first."""
    for path in sorted(_plans(file).glob("*.json"), key=lambda path: path.stat().st_mtime):
        with suppress(UserError):
            yield path.stem, _read(file, path)


def approved(file: SiloFile) -> list[str]:
    """Return the digests of plans that were approved, and that no run has begun."""
    return sorted(path.stem for path in _plans(file).glob(f"*.{_APPROVED}"))


def approve(file: SiloFile, plan: str, until: date | None = None) -> Approval:
    """Agree to one run of the plan with this digest, until a day (by default for `DAYS` days)."""
    path = _plans(file) / f"{plan}.json"
    if not plan.isalnum() or not path.exists():
        raise UserError(
            f"no plan {plan[:80]!r} waits at {file.name}: `ekiden silo approve silo.toml` lists "
            "them"
        )
    until = until or datetime.now(UTC).date() + timedelta(days=DAYS)
    if not _is_open(until):
        raise UserError(f"--until {until} is over: give a day to come")
    given = Approval(_read(file, path).text(), until.isoformat())
    write(path.with_suffix(f".{_APPROVED}"), [json.dumps(plain(given)).encode()])
    path.unlink()
    return given


def told(file: SiloFile, terms: Agreement) -> dict[str, str]:
    """Return each entry of the terms by its name, so that none is hidden, and what follows from them
    at this silo; long texts with their digest.
    """
    query = file.holding(terms.data).query
    entries = plain(terms) | terms.recipe.shared()
    # a plan is for any run, and keys are shown as people compare them
    for name in ("run", "recipe", "keys"):
        del entries[name]
    lines = {
        "what": f"measure the model {terms.measures}, train nothing" if terms.measures else "train",
        **{name: _brief(value) for name, value in entries.items()},
        "method": f"{terms.method}: {summary_of(type(terms.recipe.method))}",
        **{f"key of {name}": keys.fingerprint(key) for name, key in terms.silos.items()},
        "measured after steps": _brief(terms.measured_steps),
        "level": _level(file, terms),
        "coordinator reads": _read_by_server(file, terms),
        "files of code": ", ".join(terms.code) or "none",
        "rows": f"of the query with SHA-256 {query}" if query else "of files, or of own code",
        "coordinator at": file.link.address or "not named",
    }
    return {name: _line(text) for name, text in lines.items()}


def _level(file: SiloFile, terms: Agreement) -> str:
    """Return what a run needs of `level` in `silo.toml`, and what that lets out."""
    if terms.measures:
        return "any: no sample is trained on"
    # to list plans is quicker without it
    from ekiden.silos.silo import policy

    wanted = policy.level_of(file, terms.recipe)
    return f"{wanted}: {TELLS[wanted]}"


def _read_by_server(file: SiloFile, terms: Agreement) -> str:
    """Return which values of the run the coordinator reads."""
    from ekiden.silos.silo import policy

    try:
        setup = terms.setup(no_samples(terms), Hardware(threads=1), file.pretrained_folder)
        policy.check_size(file, setup)
        plan = policy.plan_of(file, terms, setup)
    except UserError as error:
        return f"unknown ({error})"
    return "models during the run, and the result" if plan is None else "the result only"


def _by_rule(file: SiloFile, terms: Agreement) -> bool:
    if not file.limits.approve:
        return True
    until = file.ruled.get(terms.method)
    return until is not None and not terms.measures and _is_open(until)


def _is_open(until: date) -> bool:
    return until >= datetime.now(UTC).date()


def _plans(file: SiloFile) -> Path:
    return file.folder / PLANS


def _run(file: SiloFile, terms: Agreement) -> Path:
    return file.folder / "runs" / terms.run / _APPROVED


def _held(file: SiloFile, terms: Agreement, path: Path) -> bool:
    """Return whether a file is an approval that holds for these terms."""
    try:
        return made(Approval, json.loads(read_text(path))).holds(file, terms)
    except (OSError, ValueError, UserError):
        return False


def _wait(file: SiloFile, terms: Agreement, plan: str) -> None:
    folder = _plans(file)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{plan}.json"
    if path.exists():
        return
    if sum(1 for _ in folder.glob("*.json")) >= _MOST:
        raise UserError(
            f"{_MOST} plans wait for approval at {file.name}: remove those in {folder} that nobody "
            "wants"
        )
    write(path, [replace(terms, run=_NO_RUN).text().encode()])
    path.chmod(0o600)


def _read(file: SiloFile, path: Path) -> Agreement:
    """Return the terms of a plan that waits."""
    terms = read_terms(file, path.read_text(encoding="utf-8"))
    if digest(file, terms) != path.stem:
        raise UserError(
            f"{path} is not the plan of that name, or came from another SuperLink: remove it"
        )
    return terms


def _brief(value: object) -> str:
    """Return a value of the terms as text; each entry of a table by its name."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} = {_brief(one)}" for name, one in value.items())
    text = value if isinstance(value, str) else json.dumps(value, default=plain)
    return _line(text, _LONG) or "none"


def _line(text: str, most: int = 100_000) -> str:
    """Return a text on one line; if anything of it is not shown, its digest says that it is another
    text.
    """
    line = said(text, most)
    return line if line == text else f"{line} (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
