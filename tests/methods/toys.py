"""Clients whose losses are quadratics, so that the results of methods can be worked out by hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.samples import Subset
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Method, State
from ekiden.core.training import fit as fitting
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench, Forward, Objective, Penalty, TaskLoss
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Part, Weights
from ekiden.data import from_tensors


def weights(*values: float) -> Weights:
    """A model of these parameters and no buffers."""
    return Weights(torch.tensor(values), torch.empty(0), torch.empty(0, dtype=torch.int64))


@dataclass
class Quadratic:
    """Stands for a client: loss ½‖θ - c‖², `epochs` full-batch gradient steps of size η; η = 0
    jumps to c."""

    centre: Sequence[float]
    lr: float = 0.0
    loss: float = 6.02
    fits: list[int] = field(default_factory=list)
    penalties: list[Penalty | None] = field(default_factory=list)

    def fit(
        self, model: Weights, *, epochs: int, penalty: Penalty | None = None, **plain: Any
    ) -> Weights:
        """Gradient descent on the quadratic, plus the penalty's gradient."""
        self.fits.append(epochs)
        self.penalties.append(penalty)
        centre = torch.tensor(self.centre)
        if not epochs:
            return model
        if not self.lr:
            return model.with_params(centre)
        params: Tensor = model.params.clone()
        for _ in range(epochs):
            gradient = params - centre
            if penalty:
                penalty(params, gradient, torch.tensor(self.loss))
            params = params - self.lr * gradient
        return model.with_params(params)


Loss = Callable[[Tensor], Tensor]
"""The loss of a client as a function of its parameters (P,)."""


class Free(nn.Module):
    """Parameters without a network: the first are its extractor, the last `heads` its
    classifier."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(size - heads))
        self.head = nn.ParameterList([nn.Parameter(torch.zeros(heads))] if heads else [])

    def forward(self, x: Tensor) -> Tensor:
        """All parameters, whatever the input."""
        return torch.cat([self.base, *self.head])


class Silo:
    """Stands for a client: the library's own training loop on any loss; an epoch is one step."""

    def __init__(
        self, size: int, loss: Loss, *, heads: int = 0, n: int = 1, **training: object
    ) -> None:
        plain: dict[str, object] = {
            "optimizer": "sgd",
            "lr": 0.1,
            "weight_decay": 0.0,
            "select": "last",
        }
        self.training = Training(**(plain | training))  # type: ignore[arg-type]
        sample = (torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
        dataset = from_tensors(sample, sample)
        self._train = Subset(dataset.train, torch.arange(1))
        self._bench = Bench(
            Network(Free(size, heads)), Feed(dataset, Hardware()), self.training, Hardware()
        )
        self._loss = loss
        self.n = n
        self.state: Any = None

    @property
    def loss(self) -> Objective:
        """What a method's objective may be built around; `fit` has the loss of this client
        instead."""
        return TaskLoss(self._bench.task)

    @property
    def head(self) -> Part:
        """The last parameters."""
        return self._bench.network.head

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of extractor and classifier."""
        return self._bench.network.shapes

    def seed(self, *parts: object) -> int:
        """Always the same."""
        return 7

    def generator(self, purpose: str) -> torch.Generator:
        """Always the same."""
        return torch.Generator().manual_seed(7)

    def unit(self) -> Tensor:
        """Any input works."""
        return torch.ones(1, 1)

    def probe(self, x: Tensor, model: Weights) -> tuple[Tensor, Tensor]:
        """The extractor's parameters stand for what it gives, the head's for logits."""
        return (~self.head).of(model).params[None], self.head.of(model).params[None]

    def fit(
        self,
        model: Weights,
        *,
        epochs: int,
        training: Training | None = None,
        penalty: Penalty | None = None,
        objective: Objective | None = None,
    ) -> Weights:
        """`epochs` steps from `model`."""
        assert objective is None or isinstance(objective, TaskLoss), "a toy has its own loss"

        def own(forward: Forward, x: Tensor, y: Tensor) -> Tensor:
            return self._loss(forward(x))

        bench = replace(self._bench, training=training or self.training)
        return fitting.fit(
            bench,
            model,
            self._train,
            self._train,
            epochs=epochs,
            seed=0,
            penalty=penalty,
            objective=own,
        )


class Table:
    """Stands for a federation whose values are everywhere at once."""

    def __init__(self, silos: Sequence[Any]) -> None:
        self.silos = {str(i): silo for i, silo in enumerate(silos)}
        self.clients = tuple(self.silos)

    def call(self, task: Callable[..., Any], client: str, *args: Any) -> Any:
        """Execute the task now; its value is used as its Ref."""
        return task(self.silos[client], *args)

    def call_all(self, task: Callable[..., Any], *args: Any) -> Any:
        """Execute the task at all clients."""
        return tuple(self.call(task, client, *args) for client in self.clients)

    def call_each(self, task: Callable[..., Any], own: Sequence[Any], *args: Any) -> Any:
        """Execute the task at all clients, each with its value."""
        pairs = zip(self.clients, own, strict=True)
        return tuple(self.call(task, client, value, *args) for client, value in pairs)

    def get(self, wanted: Any) -> Any:
        """The values themselves."""
        return wanted

    def generator(self, purpose: str) -> torch.Generator:
        """The same in every step."""
        return torch.Generator().manual_seed(0)


def rounds(method: Method, silos: Sequence[Any], start: State) -> list[list[list[float]]]:
    """The parameters of all personal models after each step."""
    fed = cast(Fed, Table(silos))
    return [[cast(Weights, m).params.tolist() for m in s.personal] for s in method.run(fed, start)]


def two_quadratics(**training: Any) -> list[Silo]:
    """F1 = ½(w - 1)² and F2 = (w + 1)², the toy of the notes; η = 0.1."""
    return [
        Silo(1, lambda w: 0.5 * (w - 1).pow(2).sum(), **training),
        Silo(1, lambda w: (w + 1).pow(2).sum(), **training),
    ]
