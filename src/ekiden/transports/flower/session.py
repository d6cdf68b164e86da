"""A run over silos, from the roll call to the model."""

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import torch
import tyro

from ekiden import models
from ekiden._version import __version__
from ekiden.base import outside
from ekiden.base.checks import Checked, CountOrZero, Positive, require
from ekiden.base.codec import plain
from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.base.settings import Hardware, Training
from ekiden.data.augment import Augment
from ekiden.data.inputs import of_terms
from ekiden.engine import identity, modules
from ekiden.engine.drive import Row, told
from ekiden.engine.evaluation import Built, divergence
from ekiden.engine.folder import RunFolder, read_config, read_ledger, read_lines
from ekiden.engine.method import Method, Size, State
from ekiden.engine.outline import outline
from ekiden.engine.run import Run, last
from ekiden.engine.setup import describe_model
from ekiden.engine.worker import Setup
from ekiden.methods import ClosingLap, check_needs, plan_of, written
from ekiden.models import training_part
from ekiden.results.result import Result
from ekiden.training.network import Network
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import custody
from ekiden.transports.flower.agreement import AGREEMENT, Agreement, check_name, no_samples
from ekiden.transports.flower.coordinator import Remote
from ekiden.transports.flower.courier import Absent, Courier, Crossing, Patience
from ekiden.transports.flower.custody import Record, SignedTally
from ekiden.transports.flower.measure import SiloTests, headline
from ekiden.transports.flower.parcel import Hello, said
from ekiden.transports.flower.roll import Nodes, Roll

M = TypeVar("M", bound=Method)
Say = Callable[[str], None]
ENDED = "ekiden ended: "
"""what the line in the log of a run's ServerApp begins with that says why the run ended before its time"""


@dataclass(frozen=True)
class RemotePlan(Checked, Generic[M]):
    """A method, the silos, a network and how to train it."""

    method: M
    clients: str = ""
    """names of the silos, separated by commas, in the order that methods see"""
    model: str = "auto"
    """network (see `ekiden list`); auto: the one fit for the data"""
    pretrained: str = ""
    """safetensors file with the network's values; each silo has a file of this name in its own pretrained.folder"""
    train: str = "all"
    """what is trained: all; head; last:K; lora:r=8,alpha=16,targets=query+value. The rest is frozen, does not travel,
    and is checked by every silo"""
    training: Training = field(default_factory=Training)
    closing_lap: bool = False
    """after the method's last step, refit the classifier exactly on the final features of all silos' training data: the
    model goes to all of them, and sums from one to the next"""
    seed: CountOrZero = 0
    """of everything random: initial model, training"""
    evaluate_every: CountOrZero = 0
    """steps between evaluations on the silos' test data, one more message to each silo; 0: at the end only"""
    patience: Positive = 3600.0
    """seconds without a sign of life before a silo counts as missing"""
    absent: Absent = "stop"
    """what follows then: wait on without end; skip it: a hop is left out, a round goes on with those who replied; or
    stop the run, which `ekiden resume` goes on with"""
    sealed: bool = True
    """encrypt each value from the silo that has it to the party that uses it, so that nobody between can read it"""
    revises: Annotated[str, tyro.conf.Suppress] = ""
    """the run that this one replaces, as `ekiden forget` and `ekiden join` say it"""

    def __post_init__(self) -> None:
        if isinstance(self.method, ClosingLap):
            object.__setattr__(self, "closing_lap", True)
            object.__setattr__(self, "method", self.method.method)
        training_part.parsed(self.train)
        if outside.is_file(self.model):
            raise UserError(agreements.NO_CODE)
        method, model, pretrained = self.method.with_source(self.model, self.pretrained)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "pretrained", models.located_file(pretrained))
        object.__setattr__(self, "model", models.located(model))
        _ = self.whole
        names = self.names
        require(not self.clients or all(names), "clients", self.clients, "names separated by commas")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--clients names {name!r} twice: give each silo its own name")
            check_name(name, "--clients")

    @property
    def whole(self) -> Method:
        """All that is run: the method, with its closing lap if there is one."""
        return ClosingLap(self.method) if self.closing_lap else self.method

    @property
    def names(self) -> tuple[str, ...]:
        """The silos' names."""
        return tuple(self.clients.split(",")) if self.clients else ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        values = plain(self, ("closing_lap", "train", "pretrained", "revises"))
        return values | {"method": self.method.title(), "hyperparameters": self.method.settings()}


def from_json(values: Mapping[str, Any]) -> RemotePlan[Method]:
    """The plan with these plain values.

    Raises:
        UserError: they are not a plan of this version.
    """
    return plan_of(RemotePlan, values, "the same Ekiden at the SuperLink")


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
    """Run `plan` over the silos behind `nodes`, or go on with it, in `folder`.

    Args:
        plan: what to run.
        nodes: the engine.
        folder: where to keep the run.
        public_keys: of the silos that must prove their names.
        say: tells the user.
        link: JSON that says how to reach the engine again; kept in the folder for `ekiden resume`.
        poll: seconds between looks at the post.

    Raises:
        UserError: something that the user can put right; the run folder then holds the last good state.
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
    torch.set_num_threads(setup.hardware.threads)  # what the server computes is the same bits on any machine
    check_reading(plan, agreed, setup)
    plan.whole.check_network(Size.of(Network(setup.build()), setup.dataset.shape, setup.dataset.task))
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
    """All steps that are left, and the models."""
    method, clients, folder = plan.whole, plan.names, run_folder.path
    total = method.steps(len(clients))
    build = Built(method, setup.build, len(clients))

    def remote(state: State, written: Mapping[str, str] | None) -> Remote:
        """The transport, which notes in the folder what crosses and what silos sign."""
        if state.step:
            say(f"going on after step {state.step} of {total}")
        _cut_custody(folder, state.step)
        held = {name: counts[0] for name, counts in read_config(folder)["clients"].items() if counts}
        courier = Courier(roll, patience, lambda row: _append(run_folder, "network.jsonl", row), say)
        initial = partial(modules.initial_weights, setup)
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


def check(plan: RemotePlan[Method]) -> None:
    """Refuse what cannot run between silos.

    Raises:
        UserError: says what to change.
    """
    method, clients = plan.whole, plan.names
    if not clients:
        raise UserError("say which silos take part: --clients NAME,NAME,...")
    if method.pools_data:
        raise UserError(f"{method.title()} brings all data to one place: it runs in simulation only")
    if plan.absent == "skip" and not method.skips:
        raise UserError(f"{method.title()} needs every silo in every step: choose --absent wait or stop, not skip")
    method.check(clients)


def check_reading(plan: RemotePlan[Method], agreed: Agreement, setup: Setup) -> None:
    """Refuse to measure models on the way that nobody but silos may read.

    Raises:
        UserError: says what to change.
    """
    if not plan.evaluate_every or not agreed.sealed or outline(setup, agreed.clients) is None:
        return
    raise UserError(
        f"--evaluate-every shows the coordinator models that only silos read in {plan.method.title()}: leave it out, "
        "or let it read them with --no-sealed"
    )


def check_measuring(plan: RemotePlan[Method], hellos: Mapping[str, Hello]) -> None:
    """Refuse to measure more often than a silo allows, before the run starts.

    Raises:
        UserError: names the silo.
    """
    steps = plan.whole.steps(len(plan.names))
    often = -(-steps // plan.evaluate_every) if plan.evaluate_every else 1
    for name, hello in hellos.items():
        if often > hello.evaluations:
            raise UserError(
                f"the run measures models {often} times, {name} allows {hello.evaluations} (limits.evaluations in its "
                "silo.toml): raise --evaluate-every"
            )


def _config(
    plan: RemotePlan[Method], agreed: Agreement, setup: Setup, hellos: Mapping[str, Hello], folder: Path
) -> dict[str, Any]:
    """What the run folder says of the run; of a silo that is not there yet, what it said before."""
    samples = read_config(folder)["clients"] if (folder / "config.json").exists() else {}
    samples |= {name: list(hello.samples) for name, hello in hellos.items()}
    return {
        "on": "flower",
        "run": agreed.run,
        "sealed": agreed.sealed,
        "model": agreed.model,
        **written(plan.whole),
        "training": asdict(plan.training),
        "selection": plan.method.selection(plan.training.select),
        "hardware": {},
        "seed": plan.seed,
        "dataset": agreed.dataset,
        "clients": samples,
        "model_bytes": modules.model_bytes(setup),
        **describe_model(setup),
        "digests": {"model": identity.model_digest(setup)},  # not of the data: those are the silos' own
        "remote_plan": plan.to_json(),
    }


def agree(
    plan: RemotePlan[Method], hellos: Mapping[str, Hello], run_id: str, public_keys: Mapping[str, str]
) -> Agreement:
    """The terms of the run, from the plan and from what the silos hold.

    Raises:
        UserError: the silos hold data that do not go together, or no validation data that the method needs.
    """
    for name, hello in hellos.items():
        if plan.method.needs_validation and not hello.samples[1]:
            raise UserError(
                f"{plan.method.title()} needs validation data at every silo, {name} has none: "
                "raise data.val_fraction in its silo.toml"
            )
    first, *others = hellos
    one = hellos[first]
    for name in others:
        for what in ("shape", "classes", "mean", "std", "augment"):
            here, there = getattr(one, what), getattr(hellos[name], what)
            if here != there:
                raise UserError(
                    f"{first} and {name} hold data of different {what}: {said(str(here), 300)} and "
                    f"{said(str(there), 300)}; make them equal"
                )
        if one.task != hellos[name].task:
            raise UserError(
                f"{first} and {name} hold labels of different tasks, or scale their targets in different ways: name "
                "one task in [data] of all silos, and agree on the scale by `ekiden silo sums`"
            )
        if one.inputs != hellos[name].inputs:
            raise UserError(
                f"{first} and {name} read or scale their samples in different ways: use the same columns and "
                "options in [data] of all silos, and the same data.agreed"
            )
    inputs = of_terms(one.inputs, torch.empty(0, *one.shape)) if one.inputs else None
    model = models.default_for(one.dataset, one.shape, inputs) if plan.model == "auto" else plan.model
    agreed = Agreement(
        run_id,
        __version__,
        plan.method.title(),
        plan.method.settings(),
        asdict(plan.training),
        model,
        one.dataset,
        one.shape,
        one.classes,
        one.mean,
        one.std,
        Augment(*one.augment),
        plan.seed,
        plan.names,
        tuple(public_keys[name] for name in plan.names) if public_keys else (),
        plan.sealed and bool(public_keys),
        plan.absent == "skip",
        plan.closing_lap,
        plan.train,
        plan.pretrained,
        inputs=one.inputs,
        task=one.task,
        revises=plan.revises,
    )
    check_needs(plan.whole, no_samples(agreed))
    plan.whole.check_source(plan.pretrained, no_samples(agreed))
    if not agreed.has_values:
        return agreed
    return replace(agreed, values=identity.values_digest(agreed.builder(plan.whole)()))


def stored(folder: Path) -> RemotePlan[Method] | None:
    """The plan of a run folder, if it is of a run over silos."""
    config = read_config(folder)
    return from_json(config["remote_plan"]) if config.get("on") == "flower" else None


def _run_id(folder: Path) -> str:
    """The id of the run in `folder`, or a new one."""
    if not (folder / "config.json").exists():
        return secrets.token_hex(8)
    found = read_config(folder).get("run")
    if not isinstance(found, str):
        raise UserError(f"{folder} holds a run on one machine: choose another folder")
    return found


def _agreed_before(folder: Path) -> Agreement | None:
    """The terms of the run in `folder`, if it has begun."""
    file = folder / AGREEMENT
    return agreements.parse(file.read_text(encoding="utf-8")) if file.exists() else None


def _cut_custody(folder: Path, steps: int) -> None:
    """Drop records of steps that died: they are done again, and signed again."""
    file = folder / custody.FILE
    rows = [row for row in read_lines(file) if custody.step_of(row) < steps]
    if file.exists():
        write(file, [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows])


def _void(folder: Path) -> dict[str, set[int]]:
    """In which steps a silo was missing, so that what it did then, if anything, does not count."""
    void: dict[str, set[int]] = {}
    for row in read_ledger(folder):
        if row["missing"]:
            void.setdefault(row["source"], set()).add(row["step"])
    return void


def as_text(plan: RemotePlan[Method]) -> str:
    """For the run configuration of Flower, which knows no tables of unknown fields."""
    return json.dumps(plan.to_json(), separators=(",", ":"))
