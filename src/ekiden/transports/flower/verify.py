"""Check a run folder against what the silos signed: who trained on which values, in which order, to which model.

The module `reported` checks what the folder reports (sizes, counts, accuracy).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ekiden.base.errors import UserError
from ekiden.base.files import read_regular
from ekiden.base.settings import Hardware
from ekiden.engine import wire
from ekiden.engine.drive import Outline, outline
from ekiden.engine.evaluation import Built, consensus
from ekiden.engine.folder import Marks, model_digest, read_config, read_lines
from ekiden.engine.method import INITIAL, Model, State
from ekiden.engine.networks import initial_weights, model_bytes, read_model
from ekiden.engine.setup import describe_model
from ekiden.engine.store import read
from ekiden.engine.transport import Transfer, refs
from ekiden.engine.wire import EVERYONE, Ref
from ekiden.engine.worker import Setup
from ekiden.training.weights import Weights
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import custody, keys, reported
from ekiden.transports.flower.agreement import AGREEMENT, Agreement, no_samples
from ekiden.transports.flower.custody import Hop, Record, SignedTally
from ekiden.transports.flower.reported import ReportedModels, Signed, Unproven

_MODEL = "model.safetensors"


@dataclass(frozen=True)
class Verdict:
    """The findings of a check.

    Attributes:
        hops: signed tasks, in order.
        wrong: one line for each difference from what was signed.
        unproven: what the folder reports and signatures cannot prove.
        result: whether the method says which of the signed values is the result, and the run has ended.
    """

    hops: tuple[Hop, ...]
    wrong: tuple[str, ...]
    unproven: tuple[Unproven, ...]
    result: bool


def verify(folder: Path, trusted: Mapping[str, str] | None = None) -> Verdict:
    """Check a run folder.

    Args:
        folder: folder of a run between silos.
        trusted: public keys of the silos; by default those in the run's own terms.
    """
    agreed = terms(folder)
    setup = agreed.setup(no_samples(agreed), Hardware(threads=1))
    state, marks = read(folder / "state.safetensors", tuple[type(setup.method.start()), Marks])  # type: ignore[misc]
    ended = state.step >= setup.method.steps(len(agreed.clients))
    records, measured, wrong = _records(folder)
    rows, ledger = read_lines(folder / "metrics.jsonl"), reported.transfers(folder)
    if not ended:  # a resume drops what a killed run leaves of an unfinished step
        records = [r for r in records if r.hop.step < state.step]
        measured = [m for m in measured if m.tally.step <= state.step]
        rows, ledger = rows[: state.step], [row for row in ledger if row.step < state.step]
    signed = Signed(agreed, tuple(r.hop for r in records), tuple(m.tally for m in measured))
    plan = _plan(setup, signed, ledger)
    first = initial_weights(setup)
    initial = custody.digest(wire.chunks(first))
    config = read_config(folder)
    wrong += [
        *reported.settings(config, signed, _follows(setup, len(agreed.clients))),
        *_other_keys(agreed, trusted),
        *_unsigned(records, measured, agreed),
        *_broken(records, initial),
        *(_out_of_order(records, plan, state.step) if plan else ()),
        *reported.samples(signed),
        *(reported.moved(ledger, plan, state.step) if plan else ()),
    ]
    result = None
    if ended:
        # Nobody signs the file of the state. If the method says how the run ends, that counts.
        if plan and wire.encode(state) != wire.encode(plan.end):
            wrong.append("state.safetensors is not the state in which the method ends")
        found, problems = _models(folder, records, setup, agreed, plan.end if plan else state, initial)
        wrong += problems
        result = _result(found, setup) if not problems else None
    wrong += reported.metrics(rows, signed, ledger, marks, state.step, result, compute=plan is not None)
    unproven = [*_unended(state, ended=ended), *reported.unproven(rows, signed, ledger, result, known=plan is not None)]
    return Verdict(signed.hops, tuple(wrong), tuple(unproven), ended and plan is not None)


def _follows(setup: Setup, clients: int) -> dict[str, Any]:
    """Return what config.json must say because of the signed terms."""
    return {
        "steps": setup.method.steps(clients),
        "model_bytes": model_bytes(setup),
        "selection": setup.method.selection(setup.training.select),
        **describe_model(setup),
        "digests": {"model": model_digest(setup)},
    }


def terms(folder: Path) -> Agreement:
    """Return the terms that the silos of a run signed."""
    if read_config(folder).get("on") != "flower":
        raise UserError(f"{folder} is of a run on one machine: nothing in it is signed")
    try:
        agreed = agreements.parse(read_regular(folder / AGREEMENT).decode(errors="replace"))
    except (OSError, UnicodeDecodeError):
        raise UserError(f"{folder} has no {AGREEMENT}: the run did not begin, or the folder is damaged") from None
    if not agreed.keys:
        raise UserError(f"{folder} is of a run without silo keys (--insecure): nothing in it is signed")
    for public in agreed.keys:
        keys.check(public)
    return agreed


def _plan(setup: Setup, signed: Signed, ledger: Sequence[Transfer]) -> Outline | None:
    """Return what the method asks for without the clients absent in the ledger; None if that depends on values."""
    away = {(row.step, row.source) for row in ledger if row.missing} if signed.terms.skips else set()
    clients = signed.terms.clients
    return outline(setup, clients, absent=lambda *place: place in away, size=reported.sizes(signed))


def _records(folder: Path) -> tuple[list[Record], list[SignedTally], list[str]]:
    """Return the records of tasks and of measurements in order of steps, and lines about those that cannot be read."""
    records, measured, wrong = [], [], []
    for number, row in enumerate(read_lines(folder / custody.FILE)):
        custody.check_format(row, folder / custody.FILE)
        try:
            if "tally" in row:
                measured.append(custody.parse_measured(json.dumps(row)))
            else:
                records.append(custody.parse(json.dumps(row)))
        except UserError as error:
            wrong.append(f"{custody.FILE}, line {number + 1}: {error}")
    records.sort(key=lambda r: (r.hop.step, r.hop.call, r.hop.client))
    return records, sorted(measured, key=lambda m: (m.tally.step, m.tally.client)), wrong


def _other_keys(agreed: Agreement, trusted: Mapping[str, str] | None) -> Iterator[str]:
    """Yield silos whose key in the run differs from the user's."""
    for name, public in agreed.silos.items():
        if trusted is not None and not keys.same(trusted.get(name, "none"), public):
            yield f"the run knew another key of {name}, {keys.fingerprint(public)}, than you gave"


def _unsigned(records: list[Record], measured: list[SignedTally], agreed: Agreement) -> Iterator[str]:
    """Yield records that no silo of the run signed, or that belong to another run."""
    tallies, digest = set(), agreed.digest
    for one in measured:
        tally = one.tally
        name = f"what {tally.client} measured after step {tally.step}"
        if (tally.run, tally.terms) != (agreed.run, digest):
            yield f"{name}: is of another run, or of other terms"
        if not one.signed_by(agreed.silos.get(tally.client, "")):
            yield f"{name}: the signature is not {tally.client}'s"
        if (tally.client, tally.step) in tallies:
            yield f"{name}: is there twice"
        tallies.add((tally.client, tally.step))
    places = set()
    for record in records:
        hop = record.hop
        if (hop.run, hop.terms, hop.method) != (agreed.run, digest, agreed.method):
            yield f"{_name(hop)}: is of another run, or of other terms"
        if not record.signed_by(agreed.silos.get(hop.client, "")):
            yield f"{_name(hop)}: the signature is not {hop.client}'s"
        if (hop.client, hop.step, hop.call) in places:
            yield f"{_name(hop)}: is there twice"
        places.add((hop.client, hop.step, hop.call))


def _broken(records: list[Record], initial: str) -> Iterator[str]:
    """Yield where a value that one silo took is not what another gave."""
    given = {(r.hop.client, r.hop.key): r.hop for r in records}
    for record in records:
        for taken in record.hop.taken:
            hop = given.get((taken.owner, taken.key))
            found = initial if taken.owner == EVERYONE else hop and hop.given
            if found is None:
                yield f"{_name(record.hop)}: nobody signed {taken.key} of {taken.owner}, which it took"
            elif found != taken.digest:
                source = "the initial model" if taken.owner == EVERYONE else f"{taken.key} of {taken.owner}"
                yield f"{_name(record.hop)}: did not take {source}, but {taken.digest[:12]} in its place"
            elif hop and hop.size != taken.size:
                yield f"{_name(record.hop)}: {taken.key} has {taken.size} bytes, {taken.owner} signed {hop.size}"


def _out_of_order(records: list[Record], plan: Outline, steps: int) -> Iterator[str]:
    """Yield where silos were asked for something that the method does not say."""
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
        elif [(t.owner, t.key) for t in hop.taken] != [(r.owner, r.key) for r in dict.fromkeys(refs(request.args))]:
            yield f"{name}: did not take the values that the method says"
    for hop in signed.values():
        yield f"{_name(hop)}: the method does not ask for it"


def _models(
    folder: Path, records: list[Record], setup: Setup, agreed: Agreement, end: State, initial: str
) -> tuple[dict[str, Weights], list[str]]:
    """Return the models in the folder by file, and lines about those that are not in the last state or not signed."""
    signed: dict[Ref[Any], str] = {r.hop.ref: r.hop.model for r in records}
    signed[INITIAL] = initial
    build = Built(setup.method, setup.build, len(agreed.clients))
    named: dict[str, tuple[Model, Callable[[], nn.Module]]] = {}
    if end.model is not None:
        named[_MODEL] = end.model, build
    for client, own in zip(agreed.clients, end.personal, strict=False):
        named[f"personal/{client}.safetensors"] = own, setup.build
    found, wrong = {}, []
    for name, (model, made) in named.items():
        try:
            found[name] = read_model(folder, name, made)
        except UserError as error:
            wrong.append(str(error))
            continue
        digest = custody.digest(wire.chunks(found[name]))
        if digest == (signed.get(model) if isinstance(model, Ref) else custody.digest(wire.chunks(model))):
            continue
        if isinstance(model, Ref) and model != INITIAL:
            wrong.append(f"{name} is not the model that {model.owner} signed as {model.key}")
        else:
            wrong.append(f"{name} is not the {'initial model' if model == INITIAL else 'model in state.safetensors'}")
    for file in (*folder.glob(_MODEL), *folder.glob("personal/*.safetensors")):
        if (name := file.relative_to(folder).as_posix()) not in named:
            wrong.append(f"{name} is not a result of {agreed.method}")
    return found, wrong


def _result(found: Mapping[str, Weights], setup: Setup) -> ReportedModels:
    """Return what metrics need of these models, the run's own first."""
    digests = tuple(custody.digest(wire.chunks(model)) for model in found.values())
    personal = [model for name, model in found.items() if name != _MODEL]
    shared = found.get(_MODEL)
    parameters = len(shared.params) if shared is not None and setup.method.changes_network else None
    return ReportedModels(digests, int(shared is not None), consensus(personal) if personal else None, parameters)


def _unended(state: State, *, ended: bool) -> Iterator[Unproven]:
    if not ended:
        why = f"the run has not ended: {state.step} steps are done, and there is no result to check"
        yield Unproven((), (), why)


def _name(hop: Hop) -> str:
    return f"step {hop.step + 1}, {hop.client}, {hop.task}"
