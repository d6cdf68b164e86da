"""Checks a run folder against what the silos signed: who trained on which values, in which order, to which model."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ekiden import api
from ekiden.core import wire
from ekiden.core.folder import Marks, read_config, read_ledger, read_lines
from ekiden.core.method import EVERYONE, INITIAL, Model, Ref, State
from ekiden.core.outline import Outline, outline
from ekiden.core.store import read
from ekiden.core.worker import Setup
from ekiden.errors import UserError
from ekiden.evaluation import Built
from ekiden.experiments.plan import read_model
from ekiden.learning.training import Hardware
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import custody, keys
from ekiden.transports.flower.agreement import AGREEMENT, Agreement, no_samples
from ekiden.transports.flower.custody import Hop, Record


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        hops: what was signed, in order.
        wrong: one line for each thing that is not as signed.
        remarks: what signatures cannot tell of this run.
        result: whether the method says which of the signed values the result is, and the run has ended.
    """

    hops: tuple[Hop, ...]
    wrong: tuple[str, ...]
    remarks: tuple[str, ...]
    result: bool


def verify(folder: Path, trusted: Mapping[str, str] | None = None) -> Verdict:
    """Check a run folder.

    Args:
        folder: of a run between silos.
        trusted: public keys of the silos; by default those in the run's own terms.

    Raises:
        UserError: there is nothing that was signed.
    """
    agreed = terms(folder)
    setup = agreed.setup(no_samples(agreed), Hardware(threads=1))
    state, _ = read(folder / "state.safetensors", tuple[type(setup.method.start()), Marks])  # type: ignore[misc]
    records, wrong = _records(folder)
    missing = _missing(folder) if agreed.skips else {}
    plan = outline(setup, agreed.clients, absent=lambda step, client: (step, client) in missing)
    ended = state.step >= setup.method.steps(len(agreed.clients))
    initial = custody.digest(wire.chunks(api.initial_weights(setup)))
    wrong += [
        *_terms_differ(read_config(folder), agreed, trusted),
        *_unsigned(records, agreed),
        *_broken(records, initial),
        *(_out_of_order(records, plan, state.step) if plan else ()),
    ]
    if ended:
        # The file of the state is nobody's word: where the method says how the run ends, that counts.
        if plan and wire.encode(state) != wire.encode(plan.end):
            wrong.append("state.safetensors is not the state in which the method ends")
        wrong += _other_models(folder, records, setup, agreed, plan.end if plan else state, initial)
    remarks = _remarks(state, missing, ended=ended, known=plan is not None)
    return Verdict(tuple(r.hop for r in records), tuple(wrong), tuple(remarks), ended and plan is not None)


def terms(folder: Path) -> Agreement:
    """What the silos of a run signed.

    Raises:
        UserError: nothing, or it cannot be read.
    """
    if read_config(folder).get("on") != "flower":
        raise UserError(f"{folder} is of a run on one machine: nothing in it is signed")
    try:
        agreed = agreements.parse((folder / AGREEMENT).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{folder} has no {AGREEMENT}: the run did not begin, or the folder is damaged") from None
    if not agreed.keys:
        raise UserError(f"{folder} is of a run without silo keys (--insecure): nothing in it is signed")
    for public in agreed.keys:
        keys.check(public)
    return agreed


def _missing(folder: Path) -> dict[tuple[int, str], None]:
    """Who was away in which step, in order, as the ledger says."""
    rows = read_ledger(folder)
    return {(row["step"], row["source"]): None for row in rows if row["missing"]}


def _records(folder: Path) -> tuple[list[Record], list[str]]:
    """The records in order of steps, and those that cannot be read."""
    records, wrong = [], []
    for number, row in enumerate(read_lines(folder / custody.FILE)):
        try:
            records.append(custody.parse(json.dumps(row)))
        except UserError as error:
            wrong.append(f"{custody.FILE}, line {number + 1}: {error}")
    return sorted(records, key=lambda r: (r.hop.step, r.hop.call, r.hop.client)), wrong


def _terms_differ(config: Mapping[str, Any], agreed: Agreement, trusted: Mapping[str, str] | None) -> Iterator[str]:
    """Where the terms that silos signed are not those that the folder reports."""
    signed = json.loads(agreed.text())
    for name in ("run", "method", "hyperparameters", "training", "model", "seed", "dataset", "sealed"):
        if config.get(name) != signed[name]:
            yield f"config.json says {name} {config.get(name)}, the terms that silos signed {signed[name]}"
    if set(config["clients"]) != set(agreed.clients):
        yield f"config.json says clients {', '.join(config['clients'])}, the terms {', '.join(agreed.clients)}"
    for name, public in agreed.silos.items():
        if trusted is not None and not keys.same(trusted.get(name, "none"), public):
            yield f"the run knew another key of {name}, {keys.fingerprint(public)}, than you gave"


def _unsigned(records: list[Record], agreed: Agreement) -> Iterator[str]:
    """Records that no silo of the run signed, or for another run."""
    places = set()
    for record in records:
        hop = record.hop
        if (hop.run, hop.terms, hop.method) != (agreed.run, agreed.digest, agreed.method):
            yield f"{_name(hop)}: is of another run, or of other terms"
        if not record.signed_by(agreed.silos.get(hop.client, "")):
            yield f"{_name(hop)}: the signature is not {hop.client}'s"
        if (hop.client, hop.step, hop.call) in places:
            yield f"{_name(hop)}: is there twice"
        places.add((hop.client, hop.step, hop.call))


def _broken(records: list[Record], initial: str) -> Iterator[str]:
    """Where what one silo took is not what another gave."""
    given = {(r.hop.client, r.hop.key): r.hop.given for r in records}
    for record in records:
        for taken in record.hop.taken:
            found = initial if taken.owner == EVERYONE else given.get((taken.owner, taken.key))
            if found is None:
                yield f"{_name(record.hop)}: nobody signed {taken.key} of {taken.owner}, which it took"
            elif found != taken.digest:
                source = "the initial model" if taken.owner == EVERYONE else f"{taken.key} of {taken.owner}"
                yield f"{_name(record.hop)}: did not take {source}, but {taken.digest[:12]} in its place"


def _out_of_order(records: list[Record], plan: Outline, steps: int) -> Iterator[str]:
    """Where silos were asked for something else than the method says."""
    signed = {(r.hop.step, r.hop.call, r.hop.client): r.hop for r in records}
    for request in plan.requests:
        if request.step >= steps:
            break
        hop = signed.pop((request.step, request.call, request.client), None)
        name = f"step {request.step + 1}, {request.client}, {request.task}"
        if hop is None:
            yield f"{name}: nobody signed it"
        elif hop.task != request.task or hop.arguments != custody.digest([wire.encode(request.args)]):
            yield f"{name}: was asked for something else than the method says"
    for hop in signed.values():
        yield f"{_name(hop)}: the method does not ask for it"


def _other_models(
    folder: Path, records: list[Record], setup: Setup, agreed: Agreement, end: State, initial: str
) -> Iterator[str]:
    """Models in the folder that are not those of the last state: what silos signed, where they live there."""
    signed: dict[Ref[Any], str] = {Ref(r.hop.client, r.hop.key): r.hop.model for r in records}
    signed[INITIAL] = initial
    build = Built(setup.method, setup.build, len(agreed.clients))
    named: dict[str, tuple[Model, Callable[[], nn.Module]]] = {
        f"personal/{client}.safetensors": (own, setup.build)
        for client, own in zip(agreed.clients, end.personal, strict=False)
    }
    if end.model is not None:
        named["model.safetensors"] = end.model, build
    for name, (model, made) in named.items():
        try:
            found = custody.digest(wire.chunks(read_model(folder, name, made)))
        except UserError as error:
            yield str(error)
            continue
        if found == (signed.get(model) if isinstance(model, Ref) else custody.digest(wire.chunks(model))):
            continue
        if isinstance(model, Ref) and model != INITIAL:
            yield f"{name} is not the model that {model.owner} signed as {model.key}"
        else:
            yield f"{name} is not the {'initial model' if model == INITIAL else 'model in state.safetensors'}"
    for file in (*folder.glob("model.safetensors"), *folder.glob("personal/*.safetensors")):
        if (name := file.relative_to(folder).as_posix()) not in named:
            yield f"{name} is no result of {agreed.method}"


def _remarks(state: State, missing: Collection[tuple[int, str]], *, ended: bool, known: bool) -> Iterator[str]:
    if not ended:
        yield f"the run has not ended: {state.step} steps are done, and there is no result to check"
    if not known:
        yield (
            "the server reads values in this method: what it made of them, what it asked for, and which of them is the "
            "result, nobody signs"
        )
    if missing:
        absent = ", ".join(f"{client} in step {step + 1}" for step, client in missing)
        yield f"absent, as the ledger says and nobody signs: {absent}"


def _name(hop: Hop) -> str:
    return f"step {hop.step + 1}, {hop.client}, {hop.task}"
