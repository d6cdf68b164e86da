"""Methods of many rounds over clients whose gradients are known, so that runs can be worked out by
hand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ekiden import Training
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import INITIAL, Method, State, task_of
from ekiden.core.engine.transport import Request, Transfer, Transport, resolve
from ekiden.core.engine.wire import Ref
from ekiden.core.tasks import Classification
from ekiden.core.training.fit import Objective, Penalty, TaskLoss, Work
from ekiden.core.training.weights import Weights


def weights(*values: float) -> Weights:
    """A model of these parameters in float64 and no buffers."""
    empty = torch.empty(0)
    return Weights(
        torch.tensor(values, dtype=torch.float64), empty, torch.empty(0, dtype=torch.int64)
    )


@dataclass
class Toy:
    """Stands for a client: `epochs` full-batch steps of SGD on a loss with this gradient, `speed`
    steps an epoch."""

    gradient: Callable[[Tensor], Tensor]
    n: int = 1
    speed: int = 1
    training: Training = field(
        default_factory=lambda: Training(optimizer="sgd", lr=0.1, weight_decay=0.0)
    )
    state: Any = None
    trainings: list[Training] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    accuracies: Callable[[Weights], float] = lambda model: 0.0
    classes: int = 2
    loss: Objective = field(default_factory=lambda: TaskLoss(Classification()))

    def steps(self, epochs: int) -> int:
        return epochs * self.speed

    def added(self, before: Any, own: Any, about: Any) -> Any:
        return own if before is None else before.plus(own)

    def accuracy(self, model: Weights) -> float:
        return self.accuracies(model)

    def fit(
        self,
        model: Weights,
        *,
        epochs: int,
        penalty: Penalty | None = None,
        training: Training | None = None,
        objective: Objective | None = None,
    ) -> Weights:
        assert objective is None or isinstance(objective, TaskLoss), "a toy has its own loss"
        training = training or self.training
        self.trainings.append(training)
        self.starts.append(float(model.params[0]))
        params, velocity = model.params.clone(), torch.zeros_like(model.params)
        for _ in range(self.steps(epochs)):
            gradient = self.gradient(params).clone()
            if penalty is not None:
                penalty(params, gradient, torch.tensor(1.0))
            velocity = training.momentum * velocity + gradient + training.weight_decay * params
            params = params - training.lr * velocity
        return model.with_params(params)


def quadratic(a: float, b: float, **changes: Any) -> Toy:
    """Loss ½ a (w - b)²."""
    return Toy(lambda w: a * (w - b), **changes)


def linear(slope: float, **changes: Any) -> Toy:
    """Loss slope · w."""
    return Toy(lambda w: torch.full_like(w, slope), **changes)


def toy_q(**changes: Any) -> list[Toy]:
    """½(w - 1)² and (w + 1)²: the two clients of most numbers here."""
    return [quadratic(1, 1, **changes), quadratic(2, -1, **changes)]


class Table(Transport):
    """A transport that executes each task at once on the toy of that name."""

    def __init__(self, method: Method, toys: dict[str, Toy], initial: Weights) -> None:
        self.method, self.toys, self.initial = method, toys, initial
        self.values: dict[Ref[Any], Any] = {}

    def submit(self, request: Request) -> None:
        toy = self.toys[request.client]
        args = resolve(request.args, self.value)
        self.values[Ref(request.client, request.key)] = task_of(self.method, request.task)(
            toy, *args
        )

    def value(self, ref: Ref[Any]) -> Any:
        return self.initial if ref == INITIAL else self.values[ref]

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> dict[Ref[Any], Work]:
        return {}


def play(
    method: Method,
    toys: Sequence[Toy],
    start: float = 0.0,
    seed: int = 0,
    ledger: list[Transfer] | None = None,
) -> Iterator[State]:
    """Run `method` over `toys` from w = `start`; yields the states, models at the server."""
    named = {f"client-{i}": toy for i, toy in enumerate(toys)}
    table = Table(method, named, weights(start))
    fed = Fed(list(named), table, seed, (ledger if ledger is not None else []).append)
    fed.begin(0)
    for state in method.run(fed, method.start()):
        yield state
        fed.begin(state.step)


def values(states: Iterator[State]) -> list[float]:
    """The one parameter of the global model in each state."""
    return [float(s.model.params) for s in states if isinstance(s.model, Weights)]
