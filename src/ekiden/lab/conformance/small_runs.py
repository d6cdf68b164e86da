"""A method under test, and small runs that several checks use, each made once, with what it
requests and computes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ekiden.core.base.checks import allows
from ekiden.core.base.settings import Hardware, Training, seeded
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine import wire
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import Method
from ekiden.core.engine.worker import Job, Outcome, Worker
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights
from ekiden.readers.sources import federate
from ekiden.runs.api import run
from ekiden.runs.result import Result

CLIENTS = 4


@cache
def blobs(least: int = 40) -> FederatedData:
    """Return four silos of 40 to 70 points each (or from `least` on) in three Gaussian classes, in
    different shares.
    """
    generator = torch.Generator().manual_seed(7)
    centres = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])

    def draw(n: int, classes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=generator)]
        return centres[y] + torch.randn(n, 4, generator=generator), y

    silos: list[tuple[Tensor, Tensor]] = []
    for mix in ((0, 1), (1, 2), (0, 2), (0, 1, 2)):
        silos.append(draw(least + 10 * len(silos), mix))
    return federate(silos, test=draw(60, (0, 1, 2)))


class Tiny(nn.Module):
    """A network of 4 inputs with BatchNorm and dropout, every place in which state can hide."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Passes:
    """A client's task: the work that it reported, and the samples that went through the network.

    A sample counts once per pass: when it enters the first layer (the only one with 4 inputs), and
    on the way back when it leaves the first layer, or the last layer if the first is frozen.
    """

    task: str
    reported: Work
    measured: Work


@dataclass
class Seen:
    """What was seen of tasks."""

    passes: list[Passes] = field(default_factory=list)  # the passes of each task
    # tasks that kept something in `client.state` that does not fit the method's declaration, and
    # why
    misfits: dict[str, str] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch the tasks of runs in this process, while the context is open."""
    seen = Seen()
    forward = nn.Linear.forward
    execute = Worker.execute
    measured = Work()
    reaches_first = False

    def back(gradient: torch.Tensor) -> None:
        measured.backward += len(gradient)

    def counted(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        nonlocal reaches_first
        out = forward(layer, x)
        if layer.in_features == 4:
            measured.forward += len(x)
            reaches_first = out.requires_grad
        last = layer.out_features in (3, 4) and not reaches_first
        if out.requires_grad and (layer.in_features == 4 or last):
            out.register_hook(back)  # type: ignore[no-untyped-call]
        return out

    def spy(worker: Worker, job: Job, *journal: Any) -> Outcome:
        nonlocal measured
        measured = Work()
        outcome = execute(worker, job, *journal)
        seen.passes.append(Passes(job.task, outcome.work, replace(measured)))
        if job.task not in seen.misfits and (
            why := _misfit(outcome.private, worker.setup.method.traits.private)
        ):
            seen.misfits[job.task] = why
        return outcome

    with patch.object(nn.Linear, "forward", counted), patch.object(Worker, "execute", spy):
        yield seen


def _misfit(private: Any, kind: Any) -> str:
    """Say why a client's state does not have the type that the method declares; empty if it has."""
    if private is None:
        return ""
    keeps = f"it keeps a {type(private).__name__} there, but the class"
    if kind is None:
        return f"{keeps} has no `traits = Traits(private=TYPE)`"
    try:
        wire.decode(wire.encode(private), kind)
    except wire.WireError as error:
        return f"{keeps} says {getattr(kind, '__name__', kind)}: {error}"
    return ""


class Broken(Exception):
    """A method breaks a line of the contract; the text is what was found."""


class Subject:
    """A method under test."""

    def __init__(self, kind: type[Method]) -> None:
        # its class
        self.kind = kind
        # what was seen in `watched`, also if that run failed
        self.seen = Seen()
        # those of `watched`
        self.files: dict[str, bytes] = {}

    @cached_property
    def default(self) -> Method:
        """The method with its defaults."""
        return self.kind()

    @property
    def small(self) -> Method:
        """A new instance with counts reduced to 2; 2 rounds if it has rounds, with half the clients
        or more in each.

        Whole numbers that may not be 2 stay as they are.

        Each run gets its own instance, so that nothing is carried over.
        """
        _ = self.default
        method = self.kind()
        if getattr(method, "participation", 1.0) < 0.5:
            method = replace(method, **{"participation": 0.5})
        counts = {name: min(getattr(method, name), 2) for name in self.counts}
        if "rounds" in counts:
            counts["rounds"] = 2
        return replace(method, **counts)

    @property
    def counts(self) -> list[str]:
        """The fields with whole numbers that may be 2."""
        whole = [f.name for f in fields(self.kind) if type(getattr(self.default, f.name)) is int]
        return [name for name in whole if allows(self.kind, name, 2)]

    @cached_property
    def steps(self) -> int:
        """The number of steps of the small run, as the method says."""
        return self.small.steps(CLIENTS)

    @cached_property
    def plain(self) -> Result:
        """The small run in memory. One step more than allowed is made, so that it can be
        noticed.
        """
        with seeded(1):
            return run(self.small, blobs(), Tiny, stop_after=self.steps + 1, **settings())

    @cached_property
    def watched(self) -> tuple[Result, dict[str, Any]]:
        """The small run in a folder, watched, and the folder's configuration. Models are only
        measured at the end.
        """
        # a run that fails is only made once
        _ = self.plain
        with TemporaryDirectory() as folder, watched() as self.seen, seeded(2):
            path = Path(folder) / "run"
            once = settings() | {"evaluate_every": 10**9}
            result = run(self.small, blobs(), Tiny, folder=path, stop_after=self.steps + 1, **once)
            self.files = files(path)
            return result, read_config(path)


def settings() -> dict[str, Any]:
    """Return the settings of the small runs."""
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


def same(a: Weights | None, b: Weights | None) -> bool:
    """Return whether two models are equal bit for bit."""
    if a is None or b is None:
        return a is b
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that must not depend on how the run was made."""
    names = ["metrics.jsonl", "ledger.jsonl", "model.safetensors"]
    names += [str(p.relative_to(folder)) for p in sorted(folder.glob("personal/*"))]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
