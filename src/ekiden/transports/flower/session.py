"""A run over silos, from the roll call to the model."""

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.base.settings import Hardware
from ekiden.engine import networks
from ekiden.engine.drive import Row, told
from ekiden.engine.evaluation import Built, divergence
from ekiden.engine.folder import RunFolder, model_digest, read_config, read_ledger, read_lines
from ekiden.engine.method import Method, Size, State
from ekiden.engine.run import Run, last
from ekiden.engine.setup import describe_model
from ekiden.engine.worker import Setup
from ekiden.methods import written
from ekiden.results.result import Result
from ekiden.training.network import Network
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import custody
from ekiden.transports.flower.agreeing import agree, check_measuring, check_reading
from ekiden.transports.flower.agreement import AGREEMENT, Agreement, no_samples
from ekiden.transports.flower.coordinator import Remote
from ekiden.transports.flower.courier import Courier, Crossing, Patience
from ekiden.transports.flower.custody import Record, SignedTally
from ekiden.transports.flower.measure import SiloTests, headline
from ekiden.transports.flower.parcel import Hello
from ekiden.transports.flower.remote_plan import RemotePlan, check
from ekiden.transports.flower.roll import Nodes, Roll

Say = Callable[[str], None]
ENDED = "ekiden ended: "
"""beginning of the line in the log of a run's ServerApp that says why the run ended early"""


def run(
    plan: RemotePlan[Method],
    nodes: Nodes,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    *,
    link: str = "{}",
    poll: float = 1.0,
) -> Result:
    """Run `plan` over the silos behind `nodes`, or continue it, in `folder`.

    Args:
        plan: what to run.
        nodes: the engine.
        folder: where to keep the run.
        public_keys: public keys of the silos that must prove their names.
        say: shows a line to the user.
        link: JSON that says how to reach the engine again; kept in the folder for `ekiden resume`.
        poll: longest time in seconds between two looks at the post.
    """
    check(plan)
    patience = Patience(plan.patience, poll, plan.absent)
    run_id, before = _run_id(folder), _agreed_before(folder)
    everybody = before is None or plan.absent != "skip"
    roll = Roll(nodes, plan.names, public_keys, patience, say)
    hellos = roll.gather(all_of_them=everybody)
    agreed = before or agree(plan, hellos, run_id, public_keys)
    check_measuring(plan, hellos)
    setup = agreed.setup(no_samples(agreed), Hardware(threads=1))
    torch.set_num_threads(setup.hardware.threads)  # so the server computes the same bits on any machine
    check_reading(plan, agreed, setup)
    plan.method.check_network(Size.of(Network(setup.build()), setup.dataset.shape, setup.dataset.task))
    roll.introduce(agreed.text())
    hellos = roll.gather(all_of_them=everybody)
    with closing(RunFolder(folder, _config(plan, agreed, setup, hellos, folder))) as run_folder:
        write(folder / "link.json", [link.encode()])
        write(folder / AGREEMENT, [agreed.text().encode()])
        return _go(plan, agreed, setup, run_folder, roll, patience, say)


def _go(
    plan: RemotePlan[Method],
    agreed: Agreement,
    setup: Setup,
    run_folder: RunFolder,
    roll: Roll,
    patience: Patience,
    say: Say,
) -> Result:
    """Run all steps that are left, and return the result with its models."""
    method, clients, folder = plan.method, plan.names, run_folder.path
    total = method.steps(len(clients))
    build = Built(method, setup.build, len(clients))

    def remote(state: State, written: Mapping[str, str] | None) -> Remote:
        """Make the transport, which records in the folder what crosses the network and what silos sign."""
        if state.step:
            say(f"going on after step {state.step} of {total}")
        _cut_custody(folder, state.step)
        held = {name: counts[0] for name, counts in read_config(folder)["clients"].items() if counts}
        courier = Courier(roll, patience, lambda row: _append(run_folder, "network.jsonl", row), say)
        initial = partial(networks.initial_weights, setup)
        note = partial(_append, run_folder, custody.FILE)
        return Remote(courier, setup, agreed, initial, state, note, _void(folder), held, written)

    def told_of(row: Row) -> None:
        metric = headline(agreed.labels)
        value = row.get(metric.name) if metric else None
        shown = f", {metric.name} {metric.shown(value)}{metric.unit}" if metric and value is not None else ""
        say(f"step {row['step']} of {total} done{shown}")
        if notes := row.get("notes"):
            say(f"step {row['step']}: {told(notes)}")

    every = plan.evaluate_every or total
    tests = partial(SiloTests, clients=clients, task=agreed.labels, outputs=agreed.outputs)
    run = Run(setup, clients, remote, tests, build, run_folder, every, told_of, skip=agreed.skips, elsewhere=True)
    end = last(run.steps())
    metrics, ledger, (weights, personal) = tuple(end.trace.metrics), tuple(end.trace.ledger), end.models
    if metrics and (line := divergence(metrics[-1], agreed.labels.guess(agreed.outputs), plan.training.lr)):
        say(line)
    models = weights, tuple(personal)
    return Result(end.state, metrics, ledger, folder, build, read_config(folder), lambda: models)


def _append(folder: RunFolder, file: str, row: Crossing | Record | SignedTally) -> None:
    """Add a line to a growing file."""
    folder.append(file, asdict(row))


def _config(
    plan: RemotePlan[Method], agreed: Agreement, setup: Setup, hellos: Mapping[str, Hello], folder: Path
) -> dict[str, Any]:
    """Return the configuration of the run; for a silo that is not connected yet, with what it reported before."""
    samples = read_config(folder)["clients"] if (folder / "config.json").exists() else {}
    samples |= {name: list(hello.samples) for name, hello in hellos.items()}
    return {
        "on": "flower",
        "run": agreed.run,
        "sealed": agreed.sealed,
        "model": agreed.model,
        **written(plan.method),
        "steps": plan.method.steps(len(plan.names)),
        "training": asdict(plan.training),
        "selection": plan.method.selection(plan.training.select),
        "hardware": {},
        "seed": plan.seed,
        "dataset": agreed.dataset,
        "clients": samples,
        "model_bytes": networks.model_bytes(setup),
        **describe_model(setup),
        "digests": {"model": model_digest(setup)},  # not of the data: those are the silos' own
        "remote_plan": plan.to_json(),
    }


def _run_id(folder: Path) -> str:
    """Return the id of the run in `folder`, or a new one."""
    if not (folder / "config.json").exists():
        return secrets.token_hex(8)
    found = read_config(folder).get("run")
    if not isinstance(found, str):
        raise UserError(f"{folder} holds a run on one machine: choose another folder")
    return found


def _agreed_before(folder: Path) -> Agreement | None:
    """Return the terms of the run in `folder`, if it has begun."""
    file = folder / AGREEMENT
    return agreements.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def _cut_custody(folder: Path, steps: int) -> None:
    """Drop records of interrupted steps: they are done again, and signed again."""
    file = folder / custody.FILE
    rows = [row for row in read_lines(file) if custody.step_of(row) < steps]
    if file.exists():
        write(file, [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows])


def _void(folder: Path) -> dict[str, set[int]]:
    """Return in which steps each silo was missing; what it did in them does not count."""
    void: dict[str, set[int]] = {}
    for row in read_ledger(folder):
        if row["missing"]:
            void.setdefault(row["source"], set()).add(row["step"])
    return void
