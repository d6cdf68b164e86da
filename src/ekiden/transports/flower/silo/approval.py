"""Approval of plans: who runs a silo reads what a run would do here, and agrees to exactly that,
once.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ekiden.base.checks import plain
from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.base.outside import summary_of
from ekiden.base.settings import Hardware
from ekiden.transports.flower.silo import policy
from ekiden.transports.flower.silo.silo_file import SiloFile
from ekiden.transports.flower.trust import agreement as agreements
from ekiden.transports.flower.trust import keys
from ekiden.transports.flower.trust.agreement import Agreement, no_samples
from ekiden.transports.flower.trust.parcel import said

PLANS = "plans"  # folder in the silo's folder
_NO_RUN = "0" * 16
_APPROVED = "approved"
_MOST = 100  # plans that wait
_LONG = 160  # characters of a value that are shown


def digest(file: SiloFile, terms: Agreement) -> str:
    """Return the digest that names a plan at a silo: all terms but the run's id, and the SuperLink
    that sent them.
    """
    certificate = file.beside(file.link.certificate) if file.link.certificate else None
    link = (
        hashlib.sha256(certificate.read_bytes()).hexdigest()
        if certificate and certificate.is_file()
        else ""
    )
    text = json.dumps([replace(terms, run=_NO_RUN).text(), file.link.address, link])
    return hashlib.sha256(text.encode()).hexdigest()


def check(file: SiloFile, terms: Agreement) -> None:
    """Refuse a run whose plan nobody approved here, if the silo's file wants that; keep the plan to
    be read.

    A plan of a method with a table [allow.METHOD] is approved by that rule.
    """
    if _by_rule(file, terms):
        return
    plan = digest(file, terms)
    if (_plans(file) / f"{plan}.{_APPROVED}").exists() or _taken(file, terms) == plan:
        return
    _wait(file, terms, plan)
    raise UserError(
        f"nobody at {file.name} has approved this plan: who runs it reads the plan by `ekiden silo "
        "approve silo.toml`, "
        f"and agrees to one run of it by `ekiden silo approve silo.toml {plan}`; then start the "
        "run again"
    )


def take(file: SiloFile, terms: Agreement) -> None:
    """Use the approval for the run of these terms, at its first task: no other run has it
    afterwards.

    A run that another silo refuses has no task, so approvals stay until all silos agree.
    """
    plan = digest(file, terms)
    if _by_rule(file, terms) or _taken(file, terms) == plan:
        return
    try:
        os.rename(_plans(file) / f"{plan}.{_APPROVED}", _run(file, terms))
    except FileNotFoundError:
        raise UserError(
            f"another run has used the approval that {file.name} gave to this plan: ask again"
        ) from None


def waiting(file: SiloFile) -> Iterator[tuple[str, Agreement]]:
    """Yield the plans that wait for approval, with their digests; the oldest first."""
    for path in sorted(_plans(file).glob("*.json"), key=lambda path: path.stat().st_mtime):
        with suppress(UserError):
            yield path.stem, _read(file, path)


def approved(file: SiloFile) -> list[str]:
    """Return the digests of plans that were approved, and that no run has begun."""
    return sorted(path.stem for path in _plans(file).glob(f"*.{_APPROVED}"))


def approve(file: SiloFile, plan: str) -> Agreement:
    """Agree to one run of the plan with this digest, and return its terms."""
    path = _plans(file) / f"{plan}.json"
    if not plan.isalnum() or not path.exists():
        raise UserError(
            f"no plan {plan[:80]!r} waits at {file.name}: `ekiden silo approve silo.toml` lists "
            "them"
        )
    terms = _read(file, path)
    os.rename(path, path.with_suffix(f".{_APPROVED}"))
    return terms


def told(file: SiloFile, terms: Agreement) -> dict[str, str]:
    """Return everything that a plan says, in words; long texts with their digest."""
    recipe, method = terms.recipe, terms.recipe.method
    about = summary_of(type(method))
    lines = {
        "what": f"measure the model {terms.measures}, train nothing" if terms.measures else "train",
        "measured on": "validation samples" if terms.validation else "test samples",
        **({"subgroups by": ", ".join(terms.by)} if terms.by else {}),
        **({"survival at": ", ".join(f"{time:g}" for time in terms.times)} if terms.times else {}),
        "method": f"{terms.method}: {about}",
        "hyperparameters": _pairs(plain(method)),
        "training": _pairs(plain(recipe.training)),
        "differential privacy": recipe.dp or "none",
        "network": _pairs(
            {name: getattr(recipe, name) for name in ("model", "pretrained", "train", "seed")}
        ),
        "measured": _pairs(
            {name: getattr(recipe, name) for name in ("metric", "evaluate_every", "evaluate_on")}
        ),
        "silos": ", ".join(terms.clients) or "not named",
        **{f"key of {name}": keys.fingerprint(key) for name, key in terms.silos.items()},
        "hand-offs": "sealed" if terms.sealed else "NOT SEALED: the coordinator can read them",
        "missing silos": "left out" if terms.skips else "waited for",
        "coordinator reads": _read_by_server(file, terms),
        "data set": terms.data or "the only one",
        "samples": f"{terms.dataset}: shape {terms.shape}, {len(terms.classes)} classes",
        "read as": _pairs(
            {name: getattr(terms, name) for name in ("classes", "mean", "std", "augment", "inputs")}
        ),
        "labels": _pairs({name: getattr(terms, name) for name in ("task", "spelling", "schema")}),
        "own values": terms.values or "none",
        "replaces": terms.revision.told() + f" ({_brief(terms.revises)})"
        if terms.revision
        else "no run",
        "code": terms.version,
        "coordinator at": file.link.address or "not named",
    }
    return {name: _line(text) for name, text in lines.items()}


def _read_by_server(file: SiloFile, terms: Agreement) -> str:
    """Return which values of the run the coordinator reads."""
    try:
        setup = terms.setup(no_samples(terms), Hardware(threads=1), file.pretrained_folder)
        policy.check_size(file, setup)
        plan = policy.plan_of(file, terms, setup)
    except UserError as error:
        return f"unknown ({error})"
    return "models during the run, and the result" if plan is None else "the result only"


def _by_rule(file: SiloFile, terms: Agreement) -> bool:
    return not file.limits.approve or (terms.method in file.ruled and not terms.measures)


def _plans(file: SiloFile) -> Path:
    return file.folder / PLANS


def _run(file: SiloFile, terms: Agreement) -> Path:
    return file.folder / "runs" / terms.run / _APPROVED


def _taken(file: SiloFile, terms: Agreement) -> str:
    """Return the digest of the plan that was approved for this run; "" if none was."""
    try:
        return digest(file, agreements.parse(_run(file, terms).read_text(encoding="utf-8")))
    except (OSError, UserError):
        return ""


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
    terms = agreements.parse(path.read_text(encoding="utf-8"))
    if digest(file, terms) != path.stem:
        raise UserError(
            f"{path} is not the plan of that name, or came from another SuperLink: remove it"
        )
    return terms


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {_brief(value)}" for name, value in values.items()) or "none"


def _brief(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=plain)
    return _line(text, _LONG) or "none"


def _line(text: str, most: int = 100_000) -> str:
    """Return a text on one line; if anything of it is not shown, its digest says that it is another
    text.
    """
    line = said(text, most)
    return line if line == text else f"{line} (SHA-256 {hashlib.sha256(text.encode()).hexdigest()})"
