"""MetaFed: exact numbers of its rules, what moves, and what is reported."""

from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Training, UserError, run
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import State
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import Ref
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification
from ekiden.core.training.weights import Weights
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import MetaFed
from ekiden.methods.gossip.metafed import FeatureDistillation, distillation_weight
from tests.methods.rounds import Table, Toy, weights
from tests.methods.test_fedavg import SETTINGS, same


@pytest.mark.parametrize(
    ("own", "teacher", "trust", "weight"),
    [
        (0.6, 0.6, 0.4, 0.1),
        (0.6, 0.7, 0.4, 0.316228),
        (0.6, 0.8, 0.4, 1),
        (0.6, 0.9, 0.4, 1),
        (0.5, 0.3, 0.4, 0),
        (0.65, 0.55, 0.4, 0.031623),
        (0.65, 0.55, 0.6, 0),
        (0.3, 0.35, 0.4, 0.177828),
        (0.9, 0.4, 0.4, 0.000316),
    ],
)
def test_weight_of_the_last_lesson(own: float, teacher: float, trust: float, weight: float) -> None:
    assert distillation_weight(1.0, own, teacher, trust) == pytest.approx(weight, abs=1e-6)
    assert distillation_weight(3.0, own, teacher, trust) == pytest.approx(3 * weight, abs=3e-6)


class Fixed(nn.Module):
    """Features and logits that do not depend on the input."""

    def __init__(self, features: list[float]) -> None:
        super().__init__()
        self.values = torch.tensor([features])
        self.features = self._Features(self.values)
        self.head = self._Zero()

    class _Features(nn.Module):
        def __init__(self, values: Tensor) -> None:
            super().__init__()
            self.values = values

        def forward(self, x: Tensor) -> Tensor:
            return self.values

    class _Zero(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return torch.zeros(1, 2)


def test_loss() -> None:
    x, y = torch.zeros(1, 1), torch.tensor([0])
    student, teacher = Fixed([1.0, 2.0]), as_split(Fixed([0.0, 0.0]))
    for weight, expected in ((0.1, 0.943147), (0.0, log(2))):
        objective = FeatureDistillation(teacher, weight, Classification())
        (wanted,) = (answer(x) for answer in objective.teachers)
        assert float(objective(student, x, y, wanted)) == pytest.approx(expected, abs=1e-6)


@dataclass
class Best:
    """Stands for a client that trains to its own optimum, wherever it starts."""

    optimum: float
    accuracies: tuple[float, ...] = (0.0,)
    state: Any = None
    asked: int = 0
    name: str = "somebody"

    def __post_init__(self) -> None:
        self.starts: list[float] = []

    @property
    def data(self) -> Any:
        return type("Data", (), {"val": [0]})

    def fit(self, model: Weights, **settings: Any) -> Weights:
        self.starts.append(float(model.params))
        return model.with_params(torch.full_like(model.params, self.optimum))

    def accuracy(self, model: Weights) -> float:
        self.asked += 1
        return self.accuracies[min(self.asked, len(self.accuracies)) - 1]


def ring(method: MetaFed, clients: list[Best]) -> tuple[list[State], list[Transfer], Table]:
    named: Any = {f"client-{i}": c for i, c in enumerate(clients)}
    ledger: list[Transfer] = []
    table, states = Table(method, named, weights(0.0)), []
    fed = Fed(list(named), table, 0, ledger.append)
    fed.begin(0)
    for s in method.run(fed, method.start()):
        states.append(s)
        fed.begin(s.step)
    return states, ledger, table


@dataclass
class Descending(Toy):
    """A client of validation data whose first step leads to its optimum."""

    name: str = "somebody"
    data: Any = field(default_factory=lambda: type("Data", (), {"val": [0]}))


def descending(centre: float) -> Descending:
    return Descending(
        lambda w: w - centre, training=Training(optimizer="sgd", lr=1.0, weight_decay=0.0)
    )


@pytest.mark.parametrize("kind", [Best, descending])
def test_ring_of_copies(kind: Any) -> None:
    clients = [kind(c) for c in (4.0, -3.0, 8.0)]
    states, _, table = ring(MetaFed(warmup=2, epochs=2), clients)
    after_ring = states[3]
    assert [float(table.value(m).params) for m in after_ring.personal if isinstance(m, Ref)] == [
        4.0,
        -3.0,
        8.0,
    ]
    assert [c.starts for c in clients] == [[0.0, 4.0, 8.0], [0.0, 4.0, 8.0], [0.0, -3.0, 8.0]]
    assert states[-1].model == after_ring.personal[-1], (
        "the teacher of all is the last client's model"
    )


def test_flags_are_never_reset() -> None:
    clients = [Best(1.0, (0.9, 0.1, 0.1, 0.1)), Best(2.0, (0.5, 0.7, 0.1, 0.1)), Best(3.0, (0.5,))]
    method = MetaFed(distill_weight=0.0)  # who is good trains on alone
    ring(method, clients)
    assert [c.state for c in clients] == [True, True, False]
    assert clients[0].starts == [0.0, 1.0, 1.0]
    assert clients[1].starts == [0.0, 1.0, 2.0], "copied in the ring, kept after it"
    assert clients[2].starts == [0.0, 2.0, 3.0]


def test_exactly_the_threshold_is_not_above_it() -> None:
    clients = [Best(1.0, (0.6,))] * 1
    ring(MetaFed(), clients)
    assert clients[0].state is False


def test_messages() -> None:
    # printed: 2N - 1 = 7, the teacher passed on round the whole ring; here it goes straight to the
    # N - 1 others
    _, ledger, _ = ring(MetaFed(), [Best(float(i)) for i in range(4)])
    assert [(t.source, t.target) for t in ledger] == [
        ("client-0", "client-1"),
        ("client-1", "client-2"),
        ("client-2", "client-3"),
        ("client-3", "client-0"),
        ("client-3", "client-1"),
        ("client-3", "client-2"),
    ]
    assert MetaFed().cost(4, 1) == 6
    assert MetaFed(rounds=3).cost(4, 1) == 14
    assert MetaFed(rounds=3).cost(1, 1) == 0


def test_reports_the_global_and_the_personal_models(blobs: FederatedData) -> None:
    method = MetaFed(epochs=2, warmup=2, distill_above=0.0)
    result = run(method, blobs, Tiny, **SETTINGS)
    row = result.metrics[-1]
    assert {"accuracy", "loss", "global_accuracy", "global_loss", "client_mean", "clients"} <= set(
        row
    )
    assert result.weights is not None
    assert len(result.personal) == 4
    assert not same(result.weights, result.personal[-1]), "the last client personalised too"
    assert result.bytes == method.cost(4, wire.size(result.weights))
    assert row["global_accuracy"] == result.metrics[-2]["global_accuracy"], (
        "personalising leaves the global model"
    )


def test_distilling_differs_from_copying_and_from_training_alone(blobs: FederatedData) -> None:
    results = [
        run(MetaFed(epochs=2, warmup=2, **changes), blobs, Tiny, **SETTINGS).personal[0]  # type: ignore[arg-type]
        for changes in (
            {"distill_above": 0.0},
            {"distill_above": 1.1},
            {"distill_above": 0.0, "distill_weight": 0.0},
        )
    ]
    assert not same(results[0], results[1])
    assert not same(results[0], results[2])


def test_threshold_above_one_never_distils(blobs: FederatedData) -> None:
    one, other = (
        run(
            MetaFed(epochs=2, warmup=2, distill_above=1.1, distill_weight=w),
            blobs,
            Tiny,
            **SETTINGS,
        )
        for w in (0.0, 9.0)
    )
    assert all(same(a, b) for a, b in zip(one.personal, other.personal, strict=True))


def test_needs_validation_data(tmp_path: Path) -> None:
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    data = federate([(x, y), (x, y)], val_fraction=0.0)
    with pytest.raises(
        UserError, match="metafed needs validation data at every client, client-0 has none: raise"
    ):
        run(MetaFed(epochs=1, warmup=1), data, Tiny, folder=tmp_path / "run", **SETTINGS)
    assert not (tmp_path / "run").exists()
