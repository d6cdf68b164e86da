"""Compare what a run folder reports with what the silos signed: settings, ledger and metrics."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from ekiden.base.errors import UserError
from ekiden.data.tasks import LanguageModelling, Segmentation
from ekiden.engine.drive import Outline
from ekiden.engine.folder import Marks, model_differences, read_ledger
from ekiden.engine.transport import Transfer
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.courier import Absent
from ekiden.transports.flower.custody import Hop, Tally
from ekiden.transports.flower.measure import row_of
from ekiden.transports.flower.parcel import Count

_EXACT = 1e-9
"""largest relative difference at which sums of the same numbers on two machines count as equal"""
_SHOWN = 120


@dataclass(frozen=True)
class Unproven:
    """What a folder reports and signatures do not prove.

    Attributes:
        files: the files that report it; empty if no file does so by itself.
        names: the fields there; empty means all.
        why: the reason, in a few words.
    """

    files: tuple[str, ...]
    names: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        names = f" ({', '.join(self.names)})" if self.names else ""
        files = f"{', '.join(self.files)}{names}: " if self.files else ""
        return files + self.why


@dataclass(frozen=True)
class Signed:
    """What silos signed about a run.

    Attributes:
        terms: the terms that they agreed to.
        hops: the tasks, in order of steps.
        tallies: the measurements.
    """

    terms: Agreement
    hops: tuple[Hop, ...]
    tallies: tuple[Tally, ...]


def settings(config: Mapping[str, Any], signed: Signed, follows: Mapping[str, Any]) -> Iterator[str]:
    """Yield where config.json differs from what was signed.

    Args:
        config: the content of config.json.
        signed: what the silos signed.
        follows: other entries that follow from the signed terms.
    """
    terms = json.loads(signed.terms.text())
    expected = {name: terms[name] for name in (*_SIGNED, "model", "dataset", "run")}
    expected |= {
        "ekiden": signed.terms.version.partition("+")[0],
        **json.loads(json.dumps(follows)),
    }  # as a file has them
    digests = expected.pop("digests")
    if not _one_shape(config.get("digests"), digests) or model_differences(config["digests"], digests):
        yield "config.json says other digests of the initial model than the signed terms give"
    for name, value in expected.items():
        if not same(config.get(name), value):
            yield f"config.json says {name} {_short(config.get(name))}, the terms that silos signed {_short(value)}"
    if set(config["clients"]) != set(signed.terms.clients):
        yield f"config.json says clients {', '.join(config['clients'])}, the terms {', '.join(signed.terms.clients)}"
    for hop in signed.hops:
        if not same(found := config["clients"].get(hop.client), list(hop.held)):
            yield f"config.json says that {hop.client} has {_short(found)} samples, it signed {_short(hop.held)}"
            break
    plan = config.get("remote_plan")
    if not isinstance(plan, dict):
        yield "config.json has no remote_plan"
        return
    wanted: dict[str, Any] = {name: terms[name] for name in (*_SIGNED, "train", "pretrained", "revises")}
    wanted["clients"] = ",".join(signed.terms.clients)
    for name, value in wanted.items():
        if not same(plan.get(name), value):
            yield f"config.json says remote_plan.{name} {_short(plan.get(name))}, the terms {_short(value)}"
    if plan.get("model") not in ("auto", signed.terms.model):
        yield f"config.json says remote_plan.model {_short(plan.get('model'))}, the terms {signed.terms.model}"
    if plan.get("absent") not in get_args(Absent) or (plan.get("absent") == "skip") != signed.terms.skips:
        yield f"config.json says remote_plan.absent {_short(plan.get('absent'))}, the terms skips {signed.terms.skips}"


def samples(signed: Signed) -> Iterator[str]:
    """Yield silos that trained or measured on other samples than before, or whose numbers of samples do not fit."""
    known: dict[str, tuple[str, str]] = {}
    held: dict[str, tuple[int, int, int]] = {}
    said = [(h.step, h.client, h.data, f"step {h.step + 1}, {h.task}") for h in signed.hops]
    said += [(t.step, t.client, t.data, f"the measurement after step {t.step}") for t in signed.tallies]
    for _, client, data, where in sorted(said, key=lambda row: row[0]):
        first, before = known.setdefault(client, (data, where))
        if data != first:
            yield f"{client} had other samples or labels in {where} than in {before}"
    for hop in signed.hops:
        if held.setdefault(hop.client, hop.held) != hop.held:
            yield f"{hop.client} signed {_short(hop.held)} samples in step {hop.step + 1}, {held[hop.client]} before"
    several = isinstance(signed.terms.labels, Segmentation | LanguageModelling)  # samples without labels do not count
    for tally in signed.tallies:
        number = held.get(tally.client, (0, 0, tally.counts[0].samples if tally.counts else 0))[2]
        for count in tally.counts:
            whole = count.samples in (0, number) or (several and 0 < count.samples < number)
            if not (whole and 0 <= count.right <= count.samples):
                yield f"{tally.client} signed {count.right} right of {count.samples} test samples, it has {number}"


def transfers(folder: Path) -> list[Transfer]:
    """Return the rows of ledger.jsonl."""
    found = []
    for number, row in enumerate(read_ledger(folder)):
        kinds = [(f.name, f.type) for f in fields(Transfer)]
        if set(row) != {name for name, _ in kinds} or any(type(row[name]) is not kind for name, kind in kinds):
            raise UserError(f"{folder / 'ledger.jsonl'}, line {number + 1} is not a transfer: the folder was changed")
        found.append(Transfer(**row))
    return found


def moved(found: Sequence[Transfer], plan: Outline, steps: int) -> Iterator[str]:
    """Yield where the ledger differs from what the method moves, with the sizes that the owners signed."""
    expected = [row for row in plan.transfers if row.step < steps]
    if list(found) == expected:
        return
    there, wanted = Counter(found), Counter(expected)
    for row in wanted - there:
        yield f"ledger.jsonl lacks {_transfer(row)}, which follows from the method and the signed sizes"
    for row in there - wanted:
        yield f"ledger.jsonl has {_transfer(row)}, which does not follow from the method and the signed sizes"
    if there == wanted:
        yield "ledger.jsonl is in another order than the method moves values"


@dataclass(frozen=True)
class ReportedModels:
    """The models of the last state, read from the folder.

    Attributes:
        digests: digest of each model, the run's own first.
        results: number of models that are the run's own.
        consensus: how far the personal models are apart; None if there are none.
        parameters: number of parameters of the run's own model; None if the method does not change the network.
    """

    digests: tuple[str, ...]
    results: int
    consensus: float | None
    parameters: int | None


def metrics(
    rows: Sequence[Mapping[str, Any]],
    signed: Signed,
    ledger: Sequence[Transfer],
    marks: Marks,
    steps: int,
    result: ReportedModels | None,
    *,
    compute: bool,
) -> Iterator[str]:
    """Yield where metrics.jsonl differs from what follows from the signed counts.

    Args:
        rows: the rows of the file.
        signed: what the silos signed.
        ledger: what moved.
        marks: the run's sums so far.
        steps: number of steps that are done.
        result: the models of the last state; None before the end, or if they cannot be read.
        compute: whether all computation is done at silos.
    """
    if len(rows) != steps:
        yield f"metrics.jsonl has {len(rows)} lines, {steps} steps are done"
    for number, row in enumerate(rows):
        step = number + 1
        last = result if step == steps else None
        tallies = {t.client: t for t in signed.tallies if t.step == step}
        problems = [*_incomplete(tallies, signed.terms, step, last)]
        yield from problems
        if problems:
            continue
        noted = {NOTES: row[NOTES]} if NOTES in row else {}  # nobody signs them
        expected: dict[str, Any] = noted | {"step": step, "bytes": sum(t.bytes for t in ledger if t.step < step)}
        hops = [hop for hop in signed.hops if hop.step < step]
        sums = {"forward": sum(h.forward for h in hops), "backward": sum(h.backward for h in hops)}
        for name, least in sums.items():
            free = not compute and type(row.get(name)) is int and row[name] >= least
            expected[name] = row[name] if free else least
        expected |= _measured(tallies, signed.terms.clients, row, last, signed.terms)
        for name in sorted(row.keys() | expected.keys()):
            near = 1e-4 if name == "consensus" else _EXACT  # a sum of many squares, taken in another order elsewhere
            if name not in row or name not in expected or not same(row[name], expected[name], near):
                there, wanted = _short(row.get(name, "nothing")), _short(expected.get(name, "nothing"))
                yield f"metrics.jsonl, step {step}, says {name} {there}, what silos signed gives {wanted}"
    for tally in signed.tallies:
        if not 0 < tally.step <= steps:
            yield f"{tally.client} measured models after step {tally.step}, {steps} are done"
    if rows and steps == len(rows):
        for name in ("bytes", "forward", "backward"):
            if rows[-1].get(name) != (mark := getattr(marks, name)):
                yield f"state.safetensors says {name} {mark}, metrics.jsonl {_short(rows[-1].get(name))}"


def _incomplete(
    tallies: Mapping[str, Tally], terms: Agreement, step: int, result: ReportedModels | None
) -> Iterator[str]:
    """Yield where silos did not all measure the same models, or measured models that are not the result."""
    wanted = result is not None and bool(result.digests)
    if not terms.skips and (wanted or tallies):
        for client in terms.clients:
            if client not in tallies:
                yield f"nobody signed what {client} measured after step {step}"
    for tally in tallies.values():
        first = next(iter(tallies.values()))
        if (tally.models, tally.results) != (first.models, first.results) or len(tally.counts) != len(tally.models):
            yield f"{tally.client} did not measure the models that {first.client} measured after step {step}"
        elif result is not None and (tally.models, tally.results) != (result.digests, result.results):
            yield f"the models in the folder are not those that {tally.client} measured after step {step}"
        elif not _fits(tally, len(terms.clients)):
            yield f"{tally.client} measured another number of models after step {step} than the run has"


def _fits(tally: Tally, clients: int) -> bool:
    """Return whether a tally can be from a run over this number of clients."""
    personal = len(tally.models) - tally.results
    one_set = len({count.samples for count in tally.counts}) == 1
    return tally.results in (0, 1) and personal in (0, clients) and bool(tally.models) and one_set


def _measured(
    tallies: Mapping[str, Tally],
    clients: Sequence[str],
    row: Mapping[str, Any],
    result: ReportedModels | None,
    terms: Agreement,
) -> dict[str, Any]:
    """Return what a step's row must say about its models; if they are gone, what only they tell comes from the row."""
    if not tallies:
        return {}
    first = next(iter(tallies.values()))
    nothing = (Count(0, 0.0, 0),) * len(first.models)
    found = row_of(
        [tallies[c].counts if c in tallies else nothing for c in clients], first.results, terms.labels, terms.outputs
    )
    if not found:
        return {}
    if result is None:
        return found | {name: row[name] for name in MODELS_ONLY if name in row}
    only = zip(MODELS_ONLY, (result.consensus, result.parameters), strict=True)
    return found | {name: value for name, value in only if value is not None}


def unproven(
    rows: Sequence[Mapping[str, Any]],
    signed: Signed,
    ledger: Sequence[Transfer],
    result: ReportedModels | None,
    *,
    known: bool,
) -> Iterator[Unproven]:
    """Yield what the folder reports that nobody signed.

    Args:
        rows: the rows of metrics.jsonl.
        signed: what the silos signed.
        ledger: what moved.
        result: the models of the last state.
        known: whether the method knows beforehand what it asks for.
    """
    config = ("hardware", "remote_plan.evaluate_every", "remote_plan.patience", "remote_plan.absent")
    yield Unproven(("config.json",), config, "the coordinator's own settings")
    yield Unproven(_NOTES, (), "the coordinator's own notes")
    yield Unproven(("model.safetensors", "personal/*.safetensors"), ("metadata",), "the header, not the numbers")
    yield Unproven(
        (),
        (),
        "what happens within a silo: its samples, compute and right answers are its own word, the same in all records",
    )
    if not known:
        yield Unproven(
            ("ledger.jsonl",), (), "the server reads values in this method: nobody signs what moved to and from it"
        )
        yield Unproven(
            ("metrics.jsonl",), ("bytes", "forward", "backward"), "a sum over the ledger, and compute of the server"
        )
        yield Unproven(("custody.jsonl",), (), "nobody signs that no record is missing, nor what the server asked for")
        yield Unproven(
            ("model.safetensors", "personal/*.safetensors"),
            (),
            "what the server made of the values: silos signed only that they measured these models",
        )
    models = [name for name in MODELS_ONLY if any(name in row for row in rows[: -1 if result else None])]
    if models:
        yield Unproven(("metrics.jsonl",), tuple(models), "of models on the way, which are gone")
    if any(NOTES in row for row in rows):
        yield Unproven(("metrics.jsonl",), (NOTES,), "what the method noted of its steps")
    silent = [c for c in signed.terms.clients if c not in {h.client for h in signed.hops}]
    if silent:
        names = tuple(f"clients.{name}" for name in silent)
        yield Unproven(("config.json",), names, "these silos did no task, and signed no number of samples")
    if absent := [row for row in ledger if row.missing]:
        said = ", ".join(dict.fromkeys(f"{row.source} in step {row.step + 1}" for row in absent))
        yield Unproven(("ledger.jsonl",), ("missing",), f"absent, as the ledger says and nobody signs: {said}")
    if signed.terms.skips and any(_away(signed, row.get("step")) for row in rows if "loss" in row):
        yield Unproven(("metrics.jsonl",), (), "silos that measured nothing, which nobody signs, count nothing")


def _one_shape(found: Any, expected: Any) -> bool:
    """Return whether two plain values have the same keys, lengths and types."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(_one_shape(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_one_shape(found[k], expected[k]) for k in found)
    return type(found) is type(expected)


def same(found: Any, expected: Any, near: float = _EXACT) -> bool:
    """Return whether two plain values have one type and are equal, numbers up to a relative difference of `near`."""
    if isinstance(found, list) and isinstance(expected, list):
        return len(found) == len(expected) and all(same(*pair, near) for pair in zip(found, expected, strict=True))
    if isinstance(found, dict) and isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k], near) for k in found)
    if type(found) is float and type(expected) is float:
        return (math.isnan(found) and math.isnan(expected)) or math.isclose(found, expected, rel_tol=near)
    return type(found) is type(expected) and bool(found == expected)


def sizes(signed: Signed) -> Callable[[Any], int]:
    """Return a function that gives a value's size, as its owner signed it; 0 if nobody did."""
    found = {hop.ref: hop.size for hop in signed.hops}
    return lambda ref: found.get(ref, 0)


def _away(signed: Signed, step: Any) -> bool:
    return len({t.client for t in signed.tallies if t.step == step}) < len(signed.terms.clients)


def _transfer(row: Transfer) -> str:
    size = "missing" if row.missing else f"{row.bytes} bytes"
    return f"step {row.step + 1}, {row.source} to {row.target} for {row.task}, {size}"


def _short(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


_SIGNED = ("method", "hyperparameters", "training", "seed", "sealed")
_NOTES = ("network.jsonl", "times.jsonl", "attempts.jsonl", "environment.json", "link.json")
NOTES = "notes"
MODELS_ONLY = ("consensus", "parameters")
"""entries that follow from models and not from counts"""
