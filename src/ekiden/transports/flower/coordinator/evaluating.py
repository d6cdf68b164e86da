"""Measure the model of a finished run at silos, also at others than those that trained it."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

import torch

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.base.settings import Hardware
from ekiden.data.tasks import Classification, terms
from ekiden.engine import wire
from ekiden.engine.evaluation import Built
from ekiden.engine.networks import initial_weights, read_model
from ekiden.engine.subgroups import check_task, divisions
from ekiden.methods import among
from ekiden.transports.flower.coordinator.courier import Courier, Patience
from ekiden.transports.flower.coordinator.session import Nodes, Roll, Say
from ekiden.transports.flower.coordinator.transport import Remote, SiloTests
from ekiden.transports.flower.trust import agreement as agreements
from ekiden.transports.flower.trust import custody
from ekiden.transports.flower.trust.agreement import AGREEMENT, Agreement, no_samples
from ekiden.transports.flower.trust.custody import Record, SignedTally

EVALUATIONS = "evaluations"
"""folder in a run folder that holds what silos measured of its model later"""
METRICS = "metrics.jsonl"
_PATIENCE = 3600.0


def evaluate(
    run: Path,
    clients: Sequence[str],
    nodes: Nodes,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    *,
    validation: bool = False,
    by: Sequence[str] = (),
    seconds: float = _PATIENCE,
    poll: float = 1.0,
) -> dict[str, Any]:
    """Measure the model of a run at the silos behind `nodes`, and return the row of metrics.

    Args:
        run: folder of a run over silos that has ended.
        clients: names of the silos that measure.
        nodes: the engine.
        folder: where to keep the terms, what silos signed, and the row.
        public_keys: public keys of the silos that must prove their names.
        say: shows a line to the user.
        validation: measure on validation samples, not on test samples.
        by: columns that divide test samples into subgroups.
        seconds: time without a sign of life before a silo counts as missing.
        poll: longest time in seconds between two looks at the post.
    """
    before = made_by(run)
    agreed, model = terms_for(before, run, clients, public_keys, validation=validation, by=by)
    patience = Patience(seconds, poll, "stop")
    roll = Roll(nodes, tuple(clients), public_keys, patience, say, agreed.data)
    roll.gather(all_of_them=True)
    roll.introduce(agreed.text())
    roll.gather(all_of_them=True)
    setup = agreed.setup(no_samples(agreed), Hardware(threads=1))
    torch.set_num_threads(1)
    signed: list[str] = []

    def note(row: Record | SignedTally) -> None:
        signed.append(dumps(asdict(row), separators=(",", ":")) + "\n")

    courier = Courier(roll, patience, lambda row: None, say)
    remote = Remote(courier, setup, agreed, partial(initial_weights, setup), setup.method.start(), note)
    row = SiloTests(remote, agreed)(model, [], last=True)
    if not row:
        raise UserError("no silo has enough samples to report anything (limits.min_samples in their silo.toml)")
    folder.mkdir(parents=True)
    write(folder / AGREEMENT, [agreed.text().encode()])
    write(folder / custody.FILE, ["".join(signed).encode()])
    write(folder / METRICS, [dumps(row).encode() + b"\n"])
    return row


def made_by(run: Path) -> Agreement:
    """Return the terms under which a run was made."""
    file = run / AGREEMENT
    if not file.exists():
        raise UserError(f"{run} is not of a run over silos: measure it here, `ekiden evaluate {run} --data DATA`")
    return agreements.parse(file.read_text(encoding="utf-8"))


def terms_for(
    before: Agreement,
    run: Path,
    clients: Sequence[str],
    public_keys: Mapping[str, str],
    *,
    validation: bool = False,
    by: Sequence[str] = (),
) -> tuple[Agreement, Any]:
    """Return the terms for measuring the model of a run, and the model."""
    setup = before.setup(no_samples(before), Hardware(threads=1))
    method = setup.method
    if method.changes_network and len(clients) != len(before.clients):
        raise UserError(
            f"the model of {method.title()} depends on the number of silos: name {len(before.clients)} by --clients"
        )
    model = read_model(run, "model.safetensors", Built(method, setup.build, len(before.clients)))
    labels = before.labels
    unweighted = replace(labels, weights=()) if isinstance(labels, Classification) else labels
    agreed = replace(
        before,
        run=secrets.token_hex(8),
        task=terms(unweighted),  # other silos have other counts of classes
        recipe=replace(before.recipe, method=among(method, clients)),
        clients=tuple(clients),
        keys=tuple(public_keys[name] for name in clients) if public_keys else (),
        sealed=before.sealed and bool(public_keys),
        skips=False,
        revises="",
        measures=custody.digest(wire.chunks(model)),
        validation=validation,
        by=tuple(one.text() for one in divisions(by)),
    )
    if agreed.subgroups:
        check_task(agreed.labels)
    return agreed, model
