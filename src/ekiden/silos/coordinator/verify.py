"""Check a run folder against what the silos signed: who trained on which values, in which order, to
which model.

What the folder reports (sizes, counts, accuracy) is checked, too.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from torch import nn

from ekiden.core.base.checks import made, plain, reading
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.drive import Outline, outline
from ekiden.core.engine.evaluation import Built, consensus
from ekiden.core.engine.folder import Marks, model_differences, read_config, read_ledger, read_lines
from ekiden.core.engine.method import INITIAL, Model, State
from ekiden.core.engine.setup import initial_weights, read_model
from ekiden.core.engine.store import read
from ekiden.core.engine.transport import Transfer, refs
from ekiden.core.engine.wire import EVERYONE, Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.training.weights import Weights
from ekiden.silos.coordinator.courier import Absent
from ekiden.silos.coordinator.session import EVALUATIONS, MODEL, config_of, made_by
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.agreement import AGREEMENT, Agreement
from ekiden.silos.trust.custody import Entry, Hop, Tally
from ekiden.silos.trust.parcel import said
from ekiden.silos.trust.report import Reported, fits, row_of, shown_of, telling, total_of
from ekiden.silos.trust.report import rows as rows_of

# largest relative difference at which sums of the same numbers on two machines count as equal
_EXACT = 1e-9
_SHOWN = 120


@dataclass(frozen=True)
class Unproven:
    """What a folder reports and signatures do not prove."""

    # the files that report it; empty if no file does so by itself
    files: tuple[str, ...]
    # the fields there; empty means all
    names: tuple[str, ...]
    # the reason, in a few words
    why: str

    def __str__(self) -> str:
        if not self.files:
            return self.why
        where = ", ".join(self.files)
        if self.names:
            where += f" ({', '.join(self.names)})"
        return f"{where}: {self.why}"


@dataclass(frozen=True)
class Signed:
    """What silos signed about a run."""

    # the terms that they agreed to
    terms: Agreement
    # the tasks, in order of steps
    hops: tuple[Hop, ...]
    # the measurements
    tallies: tuple[Tally, ...]


def check_settings(config: Mapping[str, Any], signed: Signed, setup: Setup) -> Iterator[str]:
    """Yield where config.json differs from what was signed, and from what follows from that."""
    terms = signed.terms
    plan = config.get("remote_plan")
    if not isinstance(plan, dict):
        yield "config.json has no remote_plan"
        return
    absent = plan.get("absent")
    if (absent == "skip") != terms.skips or absent not in get_args(Absent):
        yield f"config.json says absent {_short(absent)}, the terms skips {terms.skips}"
    samples: dict[str, list[int]] = {
        name: config["clients"].get(name, []) for name in terms.clients
    }
    for hop in reversed(signed.hops):
        # Samples are empty for a silo that came after the beginning.
        if samples[hop.client]:
            samples[hop.client] = [*hop.samples]
    wanted = {**config_of(terms, setup, samples), "ekiden": terms.version.partition("+")[0]}
    digests = config.get("digests", {})
    if _leaves(digests).keys() != _leaves(wanted["digests"]).keys() or model_differences(
        digests, wanted["digests"]
    ):
        yield "config.json says other digests of the initial model than the signed terms give"
    wanted |= {name: config.get(name) for name in ("format", "hardware", "digests")}
    wanted["remote_plan"] |= {name: plan.get(name) for name in ("patience", "absent")}
    yield from _differences("config.json", config, wanted)


def check_samples(signed: Signed) -> Iterator[str]:
    """Yield silos that trained or measured on other samples than before."""
    known: dict[str, Entry] = {}
    for entry in sorted((*signed.hops, *signed.tallies), key=lambda one: one.after):
        before = known.setdefault(entry.client, entry)
        if entry.data != before.data:
            yield f"{entry.client} had other samples or labels in {entry} than in {before}"


@dataclass(frozen=True)
class ReportedModels:
    """The models of the last state, read from the folder."""

    # digest of each model, the run's own first
    digests: tuple[str, ...]
    # number of models that are the run's own
    results: int
    # what follows from the models and not from counts: `MODELS_ONLY`
    figures: Mapping[str, Any]


def check_metrics(
    rows: Sequence[Mapping[str, Any]],
    signed: Signed,
    ledger: Sequence[Transfer],
    steps: int,
    result: ReportedModels | None,
    *,
    compute: bool,
) -> Iterator[str]:
    """Yield where metrics.jsonl differs from what follows from the signed counts.

    The models of the last state are None before the end, or if they cannot be read. `compute` says
    that silos do all computation.
    """
    expected = list[Mapping[str, Any]]()
    told = dict(enumerate(rows, 1))
    for step in range(1, steps + 1):
        row = told.get(step, {})
        last = result if step == steps else None
        tallies = {t.client: t for t in signed.tallies if t.step == step}
        problems = [*_incomplete(tallies, signed.terms, step, last)]
        if not problems:
            counted = _counted(step, row, signed, ledger, compute=compute)
            try:
                row = counted | _measured(tallies, row, last, signed.terms)
            except UserError as error:
                problems.append(f"metrics.jsonl, line {step}: {error}")
        yield from problems
        expected.append(row)
    yield from _different_lines("metrics.jsonl", rows, expected)
    for tally in signed.tallies:
        if not 0 < tally.step <= steps:
            yield f"{tally.client} measured models after step {tally.step}, {steps} are done"


def _counted(
    step: int,
    row: Mapping[str, Any],
    signed: Signed,
    ledger: Sequence[Transfer],
    *,
    compute: bool,
) -> dict[str, Any]:
    """Return what a step's row must say about bytes and compute."""
    found: dict[str, Any] = {"step": step, "bytes": sum(t.bytes for t in ledger if t.step < step)}
    for name in _COMPUTE:
        found[name] = sum(getattr(hop, name) for hop in signed.hops if hop.step < step)
        # the server's own, which nobody signs
        if not compute and type(row.get(name)) is int:
            found[name] = max(found[name], row[name])
    if NOTES in row:
        found[NOTES] = row[NOTES]
    return found


def evaluated(rows: Sequence[Mapping[str, Any]], signed: Signed) -> Iterator[str]:
    """Yield where the row of a later measurement differs from what follows from the signed
    reports.
    """
    tallies = {tally.client: tally for tally in signed.tallies}
    if missing := [client for client in signed.terms.clients if client not in tallies]:
        yield f"nobody signed what {', '.join(missing)} measured"
    elif any(tally.models != (signed.terms.measures,) for tally in signed.tallies):
        yield "it is not a measurement of the model that the terms name"
    else:
        try:
            expected = _measured(tallies, {}, None, signed.terms)
        except UserError as error:
            yield str(error)
        else:
            yield from _different_lines("metrics.jsonl", rows, [expected])


def _incomplete(
    tallies: Mapping[str, Tally], terms: Agreement, step: int, result: ReportedModels | None
) -> Iterator[str]:
    """Yield where silos did not all measure the same models, or measured models that are not the
    result.
    """
    wanted = result is not None and bool(result.digests) and step in terms.measured_steps
    if not terms.skips and (wanted or tallies):
        for client in terms.clients:
            if client not in tallies:
                yield f"nobody signed what {client} measured after step {step}"
    for tally in tallies.values():
        first = next(iter(tallies.values()))
        about = tally.models, tally.results
        if about != (first.models, first.results):
            yield f"{tally.client} did not measure the models that {first.client} measured after step {step}"
        elif result is not None and about != (result.digests, result.results):
            yield f"the models in the folder are not those that {tally.client} measured after step {step}"
        elif not custody.is_number_of_models(len(tally.models), tally.results, len(terms.clients)):
            yield f"{tally.client} measured another number of models after step {step} than the run has"


def _measured(
    tallies: Mapping[str, Tally],
    row: Mapping[str, Any],
    result: ReportedModels | None,
    terms: Agreement,
) -> dict[str, Any]:
    """Return what a step's row must say about its models.

    If the models are gone, what only they show comes from the row.

    Raises:
        UserError: the reports do not add up.
    """
    if not tallies:
        return {}
    first = next(iter(tallies.values()))
    last = terms.ends_with(first.step)
    told = telling(terms, len(first.models), last=last)
    number = rows_of(terms, len(first.models))
    reports = {name: _report(tallies[name]) for name in terms.clients if name in tallies}
    shown = shown_of(reports)
    total = total_of(reports, len(reports))
    if total is None or not all(fits(one, told, number) for one in (total, *shown.values())):
        raise UserError("the reports of the silos give no sum")
    found = row_of(total, shown, terms, first.results, told, last=last)
    if not found:
        return {}
    figures = {name: row[name] for name in MODELS_ONLY if name in row}
    if result is not None:
        figures = dict(result.figures)
    return found | figures


def _report(tally: Tally) -> Reported:
    """Return what a silo reported."""
    try:
        found: Reported = wire.decode(custody.bytes_of(tally.report), Reported)
    except UserError:
        raise UserError(f"what {tally.client} signed of its tests cannot be read") from None
    return found


def not_proven(
    rows: Sequence[Mapping[str, Any]], signed: Signed, ledger: Sequence[Transfer], *, known: bool
) -> Iterator[Unproven]:
    """Yield what the folder reports that nobody signed.

    `known` says that the method knows beforehand what it asks for.
    """
    config = ("hardware", "remote_plan.patience", "remote_plan.absent")
    yield Unproven(("config.json",), config, "the coordinator's own settings")
    yield Unproven(_NOTES, (), "the coordinator's own notes")
    yield Unproven(_MODELS, ("metadata",), "the header, not the numbers")
    yield Unproven(
        (),
        (),
        "what happens within a silo: its samples, compute and right answers are its own word, the "
        "same in all records",
    )
    if not known:
        yield Unproven(
            ("ledger.jsonl", "custody.jsonl", *_MODELS),
            (),
            "the server reads values in this method: nobody signs what moved to and from it, what "
            "it asked for, and what the server made of the values; silos signed only what they "
            "did, and which models they measured",
        )
        sums = ("bytes", *_COMPUTE)
        yield Unproven(("metrics.jsonl",), sums, "sums over the ledger, and the server's own")
    names = (*MODELS_ONLY, NOTES)
    if noted := tuple(name for name in names if any(name in row for row in rows)):
        yield Unproven(("metrics.jsonl",), noted, "of models on the way, which are gone, or notes")
    silent = {*signed.terms.clients} - {hop.client for hop in signed.hops}
    if silent:
        counts = tuple(f"clients.{name}" for name in sorted(silent))
        yield Unproven(("config.json",), counts, "these silos did no task, and signed no number")
    if absent := [f"{row.source} in step {row.step + 1}" for row in ledger if row.missing]:
        said = ", ".join(dict.fromkeys(absent))
        yield Unproven(
            ("ledger.jsonl",), ("missing",), f"absent, as the ledger says and nobody signs: {said}"
        )
    if signed.terms.skips:
        yield Unproven(
            ("metrics.jsonl",), (), "silos that measured nothing, which nobody signs, count nothing"
        )


def _different_lines(
    file: str, found: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield where the lines of a file differ from those that follow from what silos signed."""
    none: Mapping[str, Any] = {}
    for number, (row, wanted) in enumerate(zip_longest(found, expected, fillvalue=none), 1):
        yield from _differences(f"{file}, line {number},", row, wanted)


def _differences(file: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Yield where plain values differ from those that follow from what silos signed."""
    here = _leaves(found)
    wanted = _leaves(json.loads(json.dumps(expected)))
    for name in sorted(here.keys() | wanted.keys()):
        if name not in here or name not in wanted or not _same(name, here[name], wanted[name]):
            there = _short(here.get(name, "nothing"))
            signed = _short(wanted.get(name, "nothing"))
            yield f"{file} says {name} {there}, what silos signed gives {signed}"


def _leaves(value: Any, *place: str) -> dict[str, Any]:
    """Return the values within a plain value by their places, such as clients.client-0.1."""
    parts = value
    if isinstance(value, list):
        parts = dict(enumerate(value))
    if not isinstance(parts, dict) or (place and not parts):
        return {".".join(place): value}
    found = dict[str, Any]()
    for key, part in parts.items():
        found |= _leaves(part, *place, str(key))
    return found


def _same(name: str, found: Any, expected: Any) -> bool:
    """Return whether two values have one type and are equal, numbers up to a small difference."""
    if type(found) is not type(expected):
        return False
    if not isinstance(found, float):
        return bool(found == expected)
    # A sum of many squares, taken in another order elsewhere, comes less near.
    near = 1e-4 if name == "consensus" else _EXACT
    return math.isclose(found, expected, rel_tol=near) or found != found != expected  # noqa: PLR0124


def _short(value: Any) -> str:
    if not isinstance(value, str):
        value = json.dumps(value)
    return said(value, _SHOWN)


_NOTES = (
    "network.jsonl",
    "passes.jsonl",
    "times.jsonl",
    "attempts.jsonl",
    "environment.json",
    "link.json",
)
_MODELS = ("model.safetensors", "personal/*.safetensors")
NOTES = "notes"
_COMPUTE = ("forward", "backward")
# entries that follow from models and not from counts
MODELS_ONLY = ("consensus", "parameters")


@dataclass(frozen=True)
class Verdict:
    """The findings of a check."""

    # signed tasks, in order
    hops: tuple[Hop, ...]
    # one line for each difference from what was signed
    wrong: tuple[str, ...]
    # what the folder reports and signatures cannot prove
    unproven: tuple[Unproven, ...]
    # whether the method says which of the signed values is the result, and the run has ended
    result: bool


def verify(folder: Path, trusted: Mapping[str, str] | None = None) -> Verdict:
    """Check the folder of a run between silos, or of another run whose model silos measured.

    Trusted are the public keys of the silos that `signers` names; by default those in the run's own
    terms.
    """
    agreed = terms(folder)
    # a run on one machine
    if not agreed.keys:
        return Verdict((), tuple(_evaluations(folder, agreed, trusted)), (), False)
    setup = agreed.coordinators_setup()
    state, marks = read(folder / "state.safetensors", tuple[type(setup.method.start()), Marks])  # type: ignore[misc]
    ended = state.step >= setup.method.steps(len(agreed.clients))
    hops, tallies, wrong = _entries(folder, agreed)
    rows = read_lines(folder / "metrics.jsonl")
    with reading(str(folder / "ledger.jsonl")):
        ledger = [made(Transfer, row) for row in read_ledger(folder)]
    # a resume drops what a killed run leaves of an unfinished step
    if not ended:
        hops = [hop for hop in hops if hop.after <= state.step]
        tallies = [tally for tally in tallies if tally.after <= state.step]
        rows = rows[: state.step]
        ledger = [row for row in ledger if row.step < state.step]
    signed = Signed(agreed, tuple(hops), tuple(tallies))
    plan = _plan(setup, signed, ledger)
    first = initial_weights(setup)
    initial = custody.digest(wire.chunks(first))
    config = read_config(folder)
    wrong += [
        *check_settings(config, signed, setup),
        *_other_keys(agreed, trusted),
        *_broken(hops, initial),
        *check_samples(signed),
    ]
    if plan:
        wrong += _out_of_order(hops, plan, state.step)
        moved = [plain(row) for row in plan.transfers if row.step < state.step]
        wrong += _different_lines("ledger.jsonl", [*map(plain, ledger)], moved)
    if rows:
        last = {name: rows[-1].get(name) for name in ("bytes", *_COMPUTE)}
        counted = {name: getattr(marks, name) for name in last}
        wrong += _differences("state.safetensors", counted, last)
    result = None
    if ended:
        # Nobody signs the file of the state. If the method says how the run ends, that counts.
        end = state
        if plan:
            end = plan.end
        if wire.encode(state) != wire.encode(end):
            wrong.append("state.safetensors is not the state in which the method ends")
        found, problems = _models(folder, hops, setup, agreed, end, initial)
        wrong += problems
        if not problems:
            result = _result(found, setup)
    wrong += check_metrics(rows, signed, ledger, state.step, result, compute=plan is not None)
    wrong += _evaluations(folder, agreed, trusted)
    unproven = [*not_proven(rows, signed, ledger, known=plan is not None)]
    if not ended:
        why = f"the run has not ended: {state.step} steps are done, and there is no result to check"
        unproven.insert(0, Unproven((), (), why))
    return Verdict(signed.hops, tuple(wrong), tuple(unproven), ended and plan is not None)


def evaluations(folder: Path) -> dict[Path, Agreement]:
    """Return the terms of the measurements after a run, by their files."""
    files = sorted(folder.glob(f"{EVALUATIONS}/*/{AGREEMENT}"))
    return {file: agreements.of_run(file.parent) for file in files}


def signers(folder: Path) -> tuple[str, ...]:
    """Return the names of the silos that signed something in a run folder."""
    all_terms = (terms(folder), *evaluations(folder).values())
    return tuple(dict.fromkeys(name for each in all_terms for name in each.silos))


def _evaluations(
    folder: Path, agreed: Agreement, trusted: Mapping[str, str] | None
) -> Iterator[str]:
    """Yield what is wrong with what silos measured of the run's model after the run."""
    for file, later in evaluations(folder).items():
        _, tallies, wrong = _entries(file.parent, later)
        wrong += _other_keys(later, trusted)
        build = Built(agreed.recipe.method, later.builder(), len(agreed.clients))
        # the values of another file
        given = file.with_name(MODEL).exists()
        model = read_model(file.parent if given else folder, MODEL, build, own=not given)
        if later.measures != custody.digest(wire.chunks(model)):
            wrong.append("silos measured another model than the one in the folder")
        signed = Signed(later, (), tuple(tallies))
        wrong += evaluated(read_lines(file.parent / "metrics.jsonl"), signed)
        yield from (f"{EVALUATIONS}/{file.parent.name}: {line}" for line in wrong)


def terms(folder: Path) -> Agreement:
    """Return the terms that the silos of a run signed; without keys if the run is on one machine,
    and was measured.
    """
    if read_config(folder).get("on") != "flower":
        if evaluations(folder):
            return made_by(folder)
        raise UserError(f"{folder} is of a run on one machine: nothing in it is signed")
    agreed = agreements.of_run(folder)
    for public in agreed.keys:
        keys.check(public)
    return agreed


def _plan(setup: Setup, signed: Signed, ledger: Sequence[Transfer]) -> Outline | None:
    """Return what the method asks for without the clients absent in the ledger; None if that
    depends on values.
    """
    skips = signed.terms.skips
    away = {(row.step, row.source) for row in ledger if row.missing and skips}
    sizes = {hop.ref: hop.size for hop in signed.hops}
    return outline(
        setup,
        signed.terms.clients,
        absent=lambda *place: place in away,
        size=lambda ref: sizes.get(ref, 0),
    )


def _entries(folder: Path, agreed: Agreement) -> tuple[list[Hop], list[Tally], list[str]]:
    """Return what silos signed about tasks and measurements of a run, in order of steps, and lines
    about what they did not sign, or for another run.
    """
    entries: dict[tuple[int, int, str, str], Entry] = {}
    wrong = []
    for number, row in enumerate(read_lines(folder / custody.FILE), 1):
        try:
            entry = custody.opened(json.dumps(row), agreed.silos)
        except UserError as error:
            wrong.append(f"{custody.FILE}, line {number}: {error}")
            continue
        if (entry.run, entry.terms) != (agreed.run, agreed.digest):
            wrong.append(f"{entry}: is of another run, or of other terms")
        place = (entry.step, getattr(entry, "call", 0), entry.client, type(entry).__name__)
        if place in entries:
            wrong.append(f"{entry}: is there twice")
        entries[place] = entry
    hops = list[Hop]()
    tallies = list[Tally]()
    for place in sorted(entries):
        match entries[place]:
            case Hop() as hop:
                hops.append(hop)
            case Tally() as tally:
                tallies.append(tally)
    return hops, tallies, wrong


def _other_keys(agreed: Agreement, trusted: Mapping[str, str] | None) -> Iterator[str]:
    """Yield silos whose key in the run differs from the user's."""
    for name, public in agreed.silos.items():
        if trusted is not None and not keys.same(trusted.get(name, "none"), public):
            yield f"the run knew another key of {name}, {keys.fingerprint(public)}, than you gave"


def _broken(hops: Sequence[Hop], initial: str) -> Iterator[str]:
    """Yield where a value that one silo took is not what another gave."""
    given = {hop.ref: hop for hop in hops}
    for hop in hops:
        for taken in hop.taken:
            source = given.get(Ref(taken.owner, taken.key))
            found = initial if taken.owner == EVERYONE else source and source.given
            if found is None:
                yield f"{hop}: nobody signed {taken.key} of {taken.owner}, which it took"
            elif found != taken.digest:
                yield f"{hop}: did not take {taken.key} of {taken.owner}, but another value"
            elif source and source.size != taken.size:
                yield f"{hop}: {taken.key} has {taken.size} bytes, {taken.owner} signed {source.size}"


def _out_of_order(hops: Sequence[Hop], plan: Outline, steps: int) -> Iterator[str]:
    """Yield where silos were asked for something that the method does not say."""
    signed = {hop.ref: hop for hop in hops}
    for request in plan.requests:
        if request.step >= steps:
            break
        hop = signed.pop(Ref(request.client, request.key), None)
        used = [(r.owner, r.key) for r in dict.fromkeys(refs(request.args))]
        name = f"step {request.step + 1}, {request.client}, {request.task}"
        if hop is None:
            yield f"{name}: nobody signed it"
        elif hop.arguments != custody.digest([wire.encode(request.args)]):
            yield f"{name}: was asked for something else than the method says"
        elif [(t.owner, t.key) for t in hop.taken] != used:
            yield f"{name}: did not take the values that the method says"
    for hop in signed.values():
        yield f"{hop}: the method does not ask for it"


def _models(
    folder: Path, hops: Sequence[Hop], setup: Setup, agreed: Agreement, end: State, initial: str
) -> tuple[dict[str, Weights], list[str]]:
    """Return the models in the folder by file, and lines about those that are not in the last state
    or not signed.
    """
    signed: dict[Ref[Any], str] = {hop.ref: hop.model for hop in hops}
    signed[INITIAL] = initial
    build = Built(setup.method, setup.build, len(agreed.clients))
    named: dict[str, tuple[Model, Callable[[], nn.Module]]] = {}
    if end.model is not None:
        named[MODEL] = end.model, build
    for client, own in zip(agreed.clients, end.personal, strict=False):
        named[f"personal/{client}.safetensors"] = own, setup.build
    found = {}
    wrong = []
    for name, (model, build_it) in named.items():
        try:
            found[name] = read_model(folder, name, build_it)
        except UserError as error:
            wrong.append(str(error))
            continue
        if isinstance(model, Ref):
            wanted = signed.get(model)
            what = f"that {model.owner} signed as {model.key}"
        else:
            wanted = custody.digest(wire.chunks(model))
            what = "in state.safetensors"
        if custody.digest(wire.chunks(found[name])) != wanted:
            wrong.append(f"{name} is not the model {what}")
    for file in (*folder.glob(MODEL), *folder.glob("personal/*.safetensors")):
        if (name := file.relative_to(folder).as_posix()) not in named:
            wrong.append(f"{name} is not a result of {agreed.method}")
    return found, wrong


def _result(found: Mapping[str, Weights], setup: Setup) -> ReportedModels:
    """Return what metrics need of these models, the run's own first."""
    digests = tuple(custody.digest(wire.chunks(model)) for model in found.values())
    personal = [model for name, model in found.items() if name != MODEL]
    figures: dict[str, Any] = {}
    if personal:
        figures["consensus"] = consensus(personal)
    if MODEL in found and setup.method.changes_network:
        figures["parameters"] = len(found[MODEL].params)
    return ReportedModels(digests, int(MODEL in found), figures)
