"""What a run requests, reads and computes, watched from outside the method."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ekiden.engine import wire
from ekiden.engine.transport import Request
from ekiden.engine.wire import Ref
from ekiden.engine.worker import Job, Outcome, Worker
from ekiden.training import fit as fitting
from ekiden.training.fit import Bench
from ekiden.training.objective import Work
from ekiden.training.weights import Weights
from ekiden.transports.local.simulation import Simulation


@dataclass(frozen=True)
class Passes:
    """A client's task: the work that it reported, and the samples that went through the network.

    A sample counts once per pass: when it enters the first layer (the only one with 4 inputs), and on the way back when
    it leaves the first layer, or the last layer if the first is frozen.
    """

    task: str
    reported: Work
    measured: Work


@dataclass
class Seen:
    """What was seen.

    Attributes:
        requests: the method's requests.
        read: the values that were read from the transport.
        passes: the passes of each task.
        selected: what local training was told to return, each value that occurred.
        misfits: tasks that kept something in `client.state` that does not fit the method's declaration, and why.
    """

    requests: list[Request] = field(default_factory=list)
    read: set[Ref[Any]] = field(default_factory=set)
    passes: list[Passes] = field(default_factory=list)
    selected: set[str] = field(default_factory=set)
    misfits: dict[str, str] = field(default_factory=dict)


@contextmanager
def watched() -> Iterator[Seen]:
    """Watch what runs in this process do, while the context is open."""
    seen = Seen()
    with _transport(seen), _tasks(seen), watched_fits() as seen.selected:
        yield seen


@contextmanager
def watched_fits() -> Iterator[set[str]]:
    """Watch what local training is told to return, while the context is open."""
    selected: set[str] = set()
    train = fitting.fit

    def spy(bench: Bench, *args: Any, **options: Any) -> Weights:
        selected.add(bench.training.select)
        return train(bench, *args, **options)

    with patch.object(fitting, "fit", spy):
        yield selected


@contextmanager
def _transport(seen: Seen) -> Iterator[None]:
    submit, value = Simulation.submit, Simulation.value

    def spy_submit(self: Simulation, request: Request) -> None:
        seen.requests.append(request)
        submit(self, request)

    def spy_value(self: Simulation, ref: Ref[Any]) -> Any:
        seen.read.add(ref)
        return value(self, ref)

    with patch.object(Simulation, "submit", spy_submit), patch.object(Simulation, "value", spy_value):
        yield


@contextmanager
def _tasks(seen: Seen) -> Iterator[None]:
    forward, execute = nn.Linear.forward, Worker.execute
    measured, reaches_first = Work(), False

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
        if job.task not in seen.misfits and (why := _misfit(outcome.private, worker.setup.method.traits.private)):
            seen.misfits[job.task] = why
        return outcome

    with patch.object(nn.Linear, "forward", counted), patch.object(Worker, "execute", spy):
        yield


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
        return (
            f"it keeps a {type(private).__name__} there, but the class says {getattr(kind, '__name__', kind)}: {error}"
        )
    return ""
