"""A run over silos, from the roll call to the model."""

import json
import secrets
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from ekiden import api, models
from ekiden._version import __version__
from ekiden.core.files import write
from ekiden.core.folder import Marks, RunFolder, Trace, read_config
from ekiden.core.method import Method
from ekiden.core.run import drive
from ekiden.core.run import models as models_of
from ekiden.data import Dataset, Samples
from ekiden.errors import UserError
from ekiden.evaluation import Built
from ekiden.learning.training import Hardware, Training, require
from ekiden.methods import method_named
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.coordinator import Courier, Crossing, Patience, Remote, SiloTests
from ekiden.transports.flower.parcel import Hello
from ekiden.transports.flower.roll import Nodes, Roll

M = TypeVar("M", bound=Method)
Say = Callable[[str], None]


@dataclass(frozen=True)
class RemotePlan(Generic[M]):
    """A method, the silos, a network and how to train it."""

    method: M
    clients: str = ""
    """names of the silos, separated by commas, in the order that methods see"""
    model: str = "auto"
    """network (see `ekiden list`); auto: the one fit for the data"""
    training: Training = field(default_factory=Training)
    seed: int = 0
    """of everything random: initial model, training"""
    evaluate_every: int = 0
    """steps between evaluations on the silos' test data, one more message to each silo; 0: at the end only"""
    patience: float = 3600.0
    """seconds without a sign of life before a silo counts as missing and the run stops; `ekiden resume` goes on"""

    def __post_init__(self) -> None:
        names = self.names
        require(not self.clients or all(names), "clients", self.clients, "names separated by commas")
        for name in names:
            if names.count(name) > 1:
                raise UserError(f"--clients names {name!r} twice: give each silo its own name")
        require(self.evaluate_every >= 0, "evaluate_every", self.evaluate_every, "0 or more")
        require(self.patience > 0, "patience", self.patience, "greater than 0")

    @property
    def names(self) -> tuple[str, ...]:
        """The silos' names."""
        return tuple(self.clients.split(",")) if self.clients else ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"method": self.method.title(), "hyperparameters": asdict(self.method)}


def from_json(values: Mapping[str, Any]) -> RemotePlan[Method]:
    """The plan with these plain values.

    Raises:
        UserError: they are no plan of this version.
    """
    try:
        parts = {k: v for k, v in values.items() if k not in ("method", "hyperparameters", "training")}
        if set(parts) - {f.name for f in fields(RemotePlan)}:
            raise UserError("the plan has unknown fields: use the same Ekiden at the SuperLink")
        method = method_named(values["method"])(**values["hyperparameters"])
        return RemotePlan(method, training=Training(**values["training"]), **parts)
    except (KeyError, TypeError) as error:
        raise UserError(f"the plan cannot be read ({error}): use the same Ekiden at the SuperLink") from None


def run(
    plan: RemotePlan[Method],
    nodes: Nodes,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    *,
    link: str = "{}",
    poll: float = 1.0,
) -> api.Result:
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
    method, clients = plan.method, plan.names
    if not clients:
        raise UserError("say which silos take part: --clients NAME,NAME,...")
    if method.pools_data:
        raise UserError(f"{method.title()} brings all data to one place: it runs in simulation only")
    method.check(clients)
    patience = Patience(plan.patience, poll)
    roll = Roll(nodes, clients, public_keys, patience, say)
    hellos = roll.gather()
    agreed = agree(plan, hellos, _run_id(folder))
    setup = agreed.setup(_no_samples(agreed), Hardware(threads=1))
    config = {
        "on": "flower",
        "run": agreed.run,
        "model": agreed.model,
        "method": method.title(),
        "hyperparameters": asdict(method),
        "training": asdict(plan.training),
        "hardware": {},
        "seed": plan.seed,
        "dataset": agreed.dataset,
        "clients": {name: list(hello.samples) for name, hello in hellos.items()},
        "model_bytes": api.model_bytes(setup),
        "remote_plan": plan.to_json(),
    }
    total = method.steps(len(clients))
    with closing(RunFolder(folder, config)) as run_folder:
        write(folder / "link.json", [link.encode()])
        state, marks = run_folder.load(type(method.start())) or (method.start(), Marks())
        if state.step:
            say(f"going on after step {state.step} of {total}")

        def crossed(row: Crossing) -> None:
            run_folder.append("network.jsonl", asdict(row))

        courier = Courier(roll, patience, crossed, say)
        remote = Remote(courier, method, agreed, lambda: api.initial_weights(setup), state)
        trace, tests = Trace(), SiloTests(remote, clients)
        every = plan.evaluate_every or total
        steps = drive(method, clients, remote, tests, plan.seed, state, marks, trace, run_folder, every, setup)
        for state in steps:
            accuracy = trace.metrics[-1].get("accuracy")
            say(f"step {state.step} of {total} done" + (f", accuracy {100 * accuracy:.2f} %" if accuracy else ""))
        build = Built(method, setup.build, len(clients))
        weights, personal = models_of(state, remote)
        api.write_models(run_folder, setup.build, build, clients, weights, personal)
        trace = run_folder.trace()
    return api.Result(state, weights, tuple(personal), tuple(trace.metrics), tuple(trace.ledger), folder, build)


def agree(plan: RemotePlan[Method], hellos: Mapping[str, Hello], run_id: str) -> Agreement:
    """The terms of the run, from the plan and from what the silos hold.

    Raises:
        UserError: the silos hold data that do not go together.
    """
    first, *others = hellos
    one = hellos[first]
    for name in others:
        for what in ("shape", "classes", "mean", "std", "augment"):
            here, there = getattr(one, what), getattr(hellos[name], what)
            if here != there:
                raise UserError(
                    f"{first} and {name} hold data of different {what}: {here} and {there}; make them equal"
                )
    model = models.default_for(one.dataset, one.shape) if plan.model == "auto" else plan.model
    crop, flip, rotation = one.augment
    return Agreement(
        run_id,
        __version__,
        plan.method.title(),
        asdict(plan.method),
        asdict(plan.training),
        model,
        one.dataset,
        one.shape,
        one.classes,
        one.mean,
        one.std,
        {"crop": crop, "flip": flip, "rotation": rotation},
        plan.seed,
    )


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


def _no_samples(agreed: Agreement) -> Dataset:
    """What the coordinator holds: nothing."""
    none = Samples(torch.empty(0, *agreed.shape), torch.empty(0, dtype=torch.int64))
    return Dataset(agreed.dataset, none, none, agreed.classes, (), agreed.mean, agreed.std)


def as_text(plan: RemotePlan[Method]) -> str:
    """For the run configuration of Flower, which knows no tables of unknown fields."""
    return json.dumps(plan.to_json(), separators=(",", ":"))
