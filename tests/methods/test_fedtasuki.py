"""FedTasuki: exact numbers of its loss, its counts and its tail average, and reductions."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

from ekiden import FederatedData, Hardware, Result, Training, UserError, run
from ekiden.core.base.checks import plain
from ekiden.core.base.settings import batches
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size
from ekiden.core.engine.wire import Ref
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.tasks import Classification, Task
from ekiden.core.training.fit import Forward, Loss, Objective
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, FedTasuki, note_few_steps
from ekiden.methods.blocks.distillation import Distillation
from ekiden.methods.chain import fedtasuki
from ekiden.methods.chain.fedtasuki import (
    ClassInputs,
    ClassMoments,
    TeacherHandoff,
    mean_shape,
    measure,
    measure_means,
    rank,
    size,
    size_of_means,
)
from ekiden.methods.chain.fedtasuki import measure_means as means_of
from ekiden.methods.chain.fedtasuki import size_of_means as means_size
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import trained
from tests.methods.tasuki_runs import Fixed
from tests.methods.toys import weights


@dataclass
class Silo:
    """Stands for a client of `n` samples: hands back what it gets and remembers how it was asked to
    train."""

    n: int
    training: Training = field(default_factory=lambda: Training(tail=0.25))
    task: Task = field(default_factory=Classification)
    factors: list[float | None] = field(default_factory=list)
    selects: list[str] = field(default_factory=list)

    def network(self, model: Weights) -> nn.Module:
        return Fixed(model.params[None])

    def fit(
        self,
        model: Weights,
        *,
        epochs: int,
        training: Training,
        objective: Objective | Loss | None = None,
    ) -> Weights:
        self.factors.append(objective.factor if isinstance(objective, Distillation) else None)
        self.selects.append(training.select)
        assert training.tail == self.training.tail
        return model


class Chain:
    """Stands for the federation: does each task at once."""

    def __init__(self, silos: Sequence[Silo]) -> None:
        self.silos = {f"c{i}": silo for i, silo in enumerate(silos)}
        self.clients = tuple(self.silos)

    def call(self, task: Any, client: str, model: Any, *args: Any) -> Any:
        return task(self.silos[client], weights(0.0) if isinstance(model, Ref) else model, *args)

    def order(self, order: str, round: int = 0) -> tuple[str, ...]:
        return self.clients


def chain(method: FedTasuki, *silos: Silo) -> list[int]:
    """N after each hop."""
    states = method.run(cast(Any, Chain(silos)), cast(Any, method.start()))
    return [cast(Any, s.model).seen for s in states]


def test_weight_is_what_others_hold_over_what_is_own() -> None:
    silos = Silo(200), Silo(100), Silo(400)
    assert chain(FedTasuki(), *silos) == [200, 300, 700]
    assert [s.factors for s in silos] == [[None], [2.0], [0.75]]


def test_second_pass_counts_everybody_once() -> None:
    silos = Silo(200), Silo(100), Silo(400)
    assert chain(FedTasuki(rounds=2), *silos) == [200, 300, 700, 700, 700, 700]
    assert [s.factors for s in silos] == [[None, 2.5], [2.0, 6.0], [0.75, 0.75]]


def test_other_weights() -> None:
    one, hop = [Silo(200), Silo(100), Silo(400)], [Silo(200), Silo(100), Silo(400)]
    chain(FedTasuki(distill_weighting="one", rounds=2), *one)
    chain(FedTasuki(distill_weighting="hop", rounds=2), *hop)
    assert [s.factors for s in one] == [[None, 1], [1, 1], [1, 1]]
    assert [s.factors for s in hop] == [[None, 2], [1, 2], [2, 2]]


def test_averages_the_tail_unless_told_not_to() -> None:
    averaged, chosen = [Silo(1), Silo(1)], [Silo(1), Silo(1)]
    chain(FedTasuki(), *averaged)
    chain(FedTasuki(average_iterates=False), *chosen)
    assert [s.selects for s in averaged] == [["tail"], ["tail"]]
    assert [s.selects for s in chosen] == [["best"], ["best"]]


class Counter(nn.Module):
    """One parameter; logits that do not depend on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.w, self.w]).expand(len(x), 2)


def test_tail_mean_of_iterates_1_to_8_is_six_and_a_half() -> None:
    def climb(forward: Forward, x: Tensor, y: Tensor) -> Tensor:
        return -forward(x)[:, 0].mean()

    x = torch.zeros(8, 1)
    data = federate([(x, torch.arange(8) % 2)], test=(x, torch.arange(8) % 2), val_fraction=0.0)
    training = Training(optimizer="sgd", lr=1.0, weight_decay=0.0, batch_size=1)
    setup = Setup(FedTasuki(), Counter, data.dataset, training, Hardware(threads=1))
    bench = Worker(setup, {}).bench("here")
    client = Client(bench, data.clients[0], None, 0, "key")
    start = bench.network.weights()
    fitted = client.fit(start, epochs=1, training=FedTasuki().training(client), objective=climb)
    assert client.n == 8
    assert float(fitted.params) == 6.5


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    } | changes


TAIL = Training(lr=0.01, batch_size=16, select="tail")


def test_first_client_is_fedseq_with_tail_averaging_bit_for_bit(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    a = run(FedTasuki(epochs=3), alone, Tiny, **settings())
    b = run(FedSeq(epochs=3), alone, Tiny, **settings(training=TAIL))
    assert a.weights is not None
    assert b.weights is not None
    assert torch.equal(a.weights.params, b.weights.params)
    assert torch.equal(a.weights.buffers, b.weights.buffers)
    assert a.metrics == b.metrics
    assert a.bytes == 0


def test_weight_zero_is_fedseq_with_tail_averaging_bit_for_bit(blobs: FederatedData) -> None:
    worker = Worker(Setup(FedTasuki(), Tiny, blobs.dataset, TAIL, Hardware(threads=1)), {})
    start, fitted = worker.network.weights(), []
    for distils in (False, True):
        client = Client(worker.bench("here"), blobs.clients[0], None, 0, "key")
        objective = (
            Distillation(client.network(start), 0.0, "both", 1.0) if distils else client.loss
        )
        fitted.append(client.fit(start, epochs=2, objective=objective))
    assert torch.equal(fitted[0].params, fitted[1].params)
    assert not torch.equal(fitted[0].params, start.params)


def test_every_client_after_the_first_holds_on(blobs: FederatedData) -> None:
    a = run(FedTasuki(epochs=3), blobs, Tiny, **settings())
    b = run(FedSeq(epochs=3), blobs, Tiny, **settings(training=TAIL))
    assert a.metrics[0]["accuracy"] == b.metrics[0]["accuracy"]
    assert a.weights is not None
    assert b.weights is not None
    assert not torch.equal(a.weights.params, b.weights.params)


def test_teacher_keeps_its_own_statistics(blobs: FederatedData) -> None:
    worker = Worker(Setup(FedTasuki(), Tiny, blobs.dataset, TAIL, Hardware(threads=1)), {})
    client = Client(worker.bench("here"), blobs.clients[0], None, 0, "key")
    model = worker.network.weights()
    teacher = client.network(model)
    x, _ = worker.bench("here").feed.batch(blobs.clients[0].train, slice(None), train=False)
    before = teacher(x)
    fitted = client.fit(model, epochs=2, objective=Distillation(teacher, 1.0, "both", 1.0))
    assert torch.equal(teacher(x), before)
    assert not torch.equal(fitted.buffers, model.buffers)


def test_counts_the_passes_of_the_teacher(blobs: FederatedData) -> None:
    result = run(FedTasuki(epochs=3), blobs, Tiny, **settings())
    n = [len(c.train) for c in blobs.clients]
    assert result.metrics[-1]["backward"] == 3 * sum(n)
    assert result.metrics[-1]["forward"] == 3 * sum(n) + sum(n[1:]), (
        "it answers once for all epochs"
    )
    widened = run(FedTasuki(epochs=3, widen=0.25), blobs, Tiny, **settings())
    parts = [
        torch.arange(k).tensor_split([16 * i for i in range(1, batches(k, 16))]) for k in n[1:]
    ]
    quarters = sum(int(0.25 * len(batch)) for part in parts for batch in part)
    assert widened.metrics[-1]["forward"] == 3 * (sum(n) + quarters) + sum(n[1:])


@pytest.mark.parametrize(("clients", "rounds", "sends"), [(10, 1, 9), (4, 3, 11)])
def test_messages(clients: int, rounds: int, sends: int) -> None:
    model = Size.of(Network(Deep()))
    assert FedTasuki(rounds=rounds).cost(clients, model) == sends * (model + 8)
    assert FedTasuki(rounds=rounds, statistics=True).cost(clients, model) == sends * (
        model + 8 + size(3, 6, 6)
    )


def test_ten_clients_move_nine_models_and_nine_counts(blobs: FederatedData) -> None:
    ten = FederatedData(
        blobs.dataset, tuple(replace(blobs.clients[i % 4], name=f"c{i}") for i in range(10))
    )
    result = run(FedTasuki(epochs=1), ten, Tiny, **settings())
    assert result.weights is not None
    size = wire.size(result.weights)
    assert [row.bytes for row in result.ledger] == [size + 8] * 9
    assert wire.size(TeacherHandoff(result.weights, 7)) == size + 8


class Deep(nn.Module):
    """So many weights, and so few features, that statistics of full rank are a small part of
    them."""

    def __init__(self, features: int = 6, bias: bool = True) -> None:
        super().__init__()
        wide = [
            nn.Linear(4, 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, features),
            nn.ReLU(),
        ]
        self.features = nn.Sequential(*wide)
        self.head = nn.Linear(features, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # type: ignore[no-any-return]


def last_features(result: Result, x: Tensor) -> Tensor:
    model = result.model
    assert isinstance(model, Deep)
    with torch.no_grad():
        return cast(Tensor, model.features(x))


def test_statistics_cost_what_is_said_and_stand_for_all_samples(blobs: FederatedData) -> None:
    result = run(FedTasuki(epochs=2, statistics=True), blobs, Deep, **settings())
    assert result.weights is not None
    each = wire.size(result.weights) + 8 + size(3, 6, 6)
    assert [row.bytes for row in result.ledger] == [each] * 3
    assert size(3, 6, 6) < 0.05 * wire.size(result.weights)
    n = [len(c.train) for c in blobs.clients]
    assert result.metrics[-1]["forward"] == 2 * sum(n) + sum(n[1:]) + n[0] + 6 * sum(n[1:])


def test_first_client_describes_its_own_samples(blobs: FederatedData) -> None:
    worker = Worker(Setup(FedTasuki(), Deep, blobs.dataset, Training(), Hardware(threads=1)), {})
    client = Client(worker.bench("here"), blobs.clients[0], None, 0, "key")
    method: Any = FedTasuki(epochs=1, statistics=True)
    handed = method.train(client, worker.network.weights())
    x, y = worker.bench("here").feed.batch(blobs.clients[0].train, slice(None), train=False)
    with torch.no_grad():
        features = worker.network.probe(x)[0]
    found, wanted = handed.statistics.moments(3, 6), measure(features, y, 3)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_only_the_last_classifier_takes_statistics_in(blobs: FederatedData) -> None:
    plain, told = (
        run(FedTasuki(epochs=2, statistics=s), blobs, Deep, **settings()) for s in (False, True)
    )
    x = blobs.dataset.test.x
    assert torch.equal(last_features(plain, x), last_features(told, x)), "training does not change"
    accuracies = [[m["accuracy"] for m in r.metrics] for r in (plain, told)]
    assert accuracies[0][:-1] == accuracies[1][:-1]
    before, after = (r.model.head for r in (plain, told))
    assert not torch.equal(cast(nn.Linear, before).weight, cast(nn.Linear, after).weight)


@pytest.mark.slow
def test_statistics_help_where_clients_have_two_classes_each() -> None:
    data = Plan(Recipe(FedTasuki()), "digits", "classes:2", 10).federation()
    fields: dict[str, Any] = {"hardware": Hardware(threads=1), "evaluate_every": 10}
    plain, told = (
        run(FedTasuki(epochs=20, statistics=s), data, "mlp", **fields) for s in (False, True)
    )
    assert told.metrics[-1]["accuracy"] > plain.metrics[-1]["accuracy"] + 0.2


def test_statistics_count_everybody_once_in_a_second_pass(blobs: FederatedData) -> None:
    method: Any = FedTasuki(epochs=1, statistics=True)
    worker = Worker(Setup(method, Deep, blobs.dataset, Training(), Hardware(threads=1)), {})
    one, other = (Client(worker.bench("here"), blobs.clients[i], None, 0, "key") for i in range(2))
    first = method.train(one, worker.network.weights())
    second = method.distil(other, first, 1, False, False)
    third = method.distil(one, second, 1, True, False)
    everybody = one.class_counts() + other.class_counts()
    assert second.statistics.counts.tolist() == everybody.tolist()
    assert third.statistics.counts.tolist() == everybody.tolist()
    assert third.seen == int(everybody.sum())


@pytest.mark.parametrize(
    "more", [{}, {"recall": 0.25, "widen": 0.25}], ids=["alone", "with recall"]
)
def test_statistics_survive_a_stop_and_other_processes(
    more: dict[str, float], blobs: FederatedData, tmp_path: Path
) -> None:
    method = FedTasuki(epochs=2, statistics=True, **more)  # type: ignore[arg-type]
    whole = run(method, blobs, Deep, **settings())
    run(method, blobs, Deep, folder=tmp_path / "a", stop_after=2, **settings())
    results = [run(method, blobs, Deep, folder=tmp_path / "a", **settings())]
    results.append(run(method, blobs, Deep, folder=tmp_path / "b", workers=2, **settings()))
    assert whole.weights is not None
    for result in results:
        assert result.weights is not None
        assert torch.equal(result.weights.params, whole.weights.params)
        assert (result.metrics, result.ledger) == (whole.metrics, whole.ledger)


def test_a_handoff_with_statistics_travels() -> None:
    known = measure(torch.rand(9, 6), torch.arange(9) % 3, 3).compressed(4)
    sent = TeacherHandoff(Network(Deep()).weights(), 9, known)
    back = wire.decode(wire.encode(sent), TeacherHandoff)
    assert back.statistics is not None
    for a, b in zip(known, back.statistics, strict=True):
        assert torch.equal(a, b)


def test_recall_costs_what_is_said(blobs: FederatedData) -> None:
    whole = {"recall": 0.5, "statistics": True}
    for fields in ({"recall": 0.5}, whole):
        method = FedTasuki(epochs=2, **fields)  # type: ignore[arg-type]
        result = run(method, blobs, Deep, **settings())
        assert result.weights is not None
        each = (
            wire.size(result.weights)
            + 8
            + means_size(3, (4,))
            + (size(3, 6, 6) if "statistics" in fields else 0)
        )
        assert [row.bytes for row in result.ledger] == [each] * 3
        assert method.cost(4, Size.of(Network(Deep()), (4,))) == 3 * each
    n = [len(c.train) for c in blobs.clients]
    recalled = run(FedTasuki(epochs=3, recall=0.25), blobs, Deep, **settings())
    parts = [
        torch.arange(k).tensor_split([16 * i for i in range(1, batches(k, 16))]) for k in n[1:]
    ]
    quarters = sum(int(0.25 * len(batch)) for part in parts for batch in part)
    assert recalled.metrics[-1]["forward"] == 3 * (sum(n) + quarters) + sum(n[1:])


def test_recall_counts_everybody_once_in_a_second_pass(blobs: FederatedData) -> None:
    method: Any = FedTasuki(epochs=1, recall=0.5)
    worker = Worker(Setup(method, Deep, blobs.dataset, Training(), Hardware(threads=1)), {})
    one, other = (Client(worker.bench("here"), blobs.clients[i], None, 0, "key") for i in range(2))
    first = method.train(one, worker.network.weights())
    assert first.inputs.counts.tolist() == one.class_counts().tolist()
    feed = worker.bench("here").feed
    x, y = feed.batch(blobs.clients[0].train, slice(None), train=False)
    for k in set(y.tolist()):
        torch.testing.assert_close(first.inputs.means[k], x[y == k].mean(0), rtol=1e-4, atol=1e-5)
    second = method.distil(other, first, 1, False, False)
    third = method.distil(one, second, 1, True, False)
    everybody = one.class_counts() + other.class_counts()
    assert second.inputs.counts.tolist() == everybody.tolist()
    assert third.inputs.counts.tolist() == everybody.tolist()
    torch.testing.assert_close(third.inputs.means, second.inputs.means, rtol=1e-4, atol=1e-5)
    alone = method.distil(one, first, 0, True, False)
    assert alone.inputs.counts.tolist() == first.inputs.counts.tolist(), "nobody else to recall"


@pytest.mark.slow
def test_recall_helps_where_clients_have_two_classes_each() -> None:
    data = Plan(Recipe(FedTasuki()), "digits", "classes:2", 10).federation()
    fields: dict[str, Any] = {"hardware": Hardware(threads=1), "evaluate_every": 10}
    plain, told = (run(FedTasuki(epochs=20, recall=r), data, "mlp", **fields) for r in (0.0, 0.5))
    assert told.metrics[-1]["accuracy"] > plain.metrics[-1]["accuracy"] + 0.2


def test_a_handoff_with_class_means_travels() -> None:
    known = means_of([(torch.rand(9, 4), torch.arange(9) % 3)], 3, (4,))
    back = wire.decode(
        wire.encode(TeacherHandoff(Network(Deep()).weights(), 9, None, known)), TeacherHandoff
    )
    assert back.inputs is not None
    for a, b in zip(known, back.inputs, strict=True):
        assert torch.equal(a, b)


def test_recall_needs_a_large_enough_network(blobs: FederatedData, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="recall"):
        run(FedTasuki(recall=0.5), blobs, Tiny, folder=tmp_path / "run", **settings())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("network", "why"), [(lambda: Deep(bias=False), "biases"), (Tiny, "fewer features")]
)
def test_statistics_need_a_fit_network(
    blobs: FederatedData, network: Any, why: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=why):
        run(FedTasuki(statistics=True), blobs, network, folder=tmp_path / "run", **settings())
    assert not (tmp_path / "run").exists()


def test_refuses_an_order_of_other_clients(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="nobody"):
        run(FedTasuki(order="nobody"), blobs, Tiny, **settings())


def test_who_was_left_out_counts_when_it_first_takes_part(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    factors: list[float] = []

    def spy(teacher: nn.Module, factor: float, *others: Any) -> Distillation:
        factors.append(factor)
        return Distillation(teacher, factor, *others)

    monkeypatch.setattr("ekiden.methods.chain.fedtasuki.Distillation", spy)
    data = replace(blobs, clients=blobs.clients[:2])
    a, b = (len(c.train) for c in data.clients)
    away = data.clients[1].name
    for weight, expected in [("counts", [a / b, b / a, a / b]), ("hop", [1.0, 1.0, 1.0])]:
        factors.clear()
        run(
            FedTasuki(epochs=1, rounds=3, distill_weighting=weight),  # type: ignore[arg-type]
            data,
            Tiny,
            absent=lambda step, client: (step, client) == (1, away),
            **settings(),
        )
        # The second pass begins with who trained the model alone: nobody else's samples are behind
        # it.
        assert factors == pytest.approx([0.0, *expected])


def test_what_show_and_the_card_say_of_training_is_what_the_method_did() -> None:
    config: dict[str, Any] = {
        "recipe": Recipe(FedTasuki()).to_json(),
        "selection": FedTasuki().selection("best"),
        "hardware": plain(Hardware()),
    }
    assert trained(config, {"backward": 3}) == config["recipe"]["training"] | {"select": "tail"}
    assert trained(config, {"backward": 0}) == {}


def test_a_run_with_few_steps_says_so(caplog: pytest.LogCaptureFixture) -> None:
    note_few_steps(FedTasuki(epochs=5), [540, 540, 20], Training())
    assert "half of the clients make at most 25 steps: FedTasuki" in caplog.text
    caplog.clear()
    note_few_steps(FedTasuki(epochs=20), [540, 540, 20], Training())
    note_few_steps(FedSeq(epochs=5), [540, 540, 20], Training())
    assert not caplog.records


K, A = 4, 5


def samples(n: int, seed: int = 0, classes: int = K) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    mix = torch.randn(A, A, generator=generator)
    return torch.randn(n, A, generator=generator) @ mix + 3 * torch.randn(
        K, A, generator=generator
    )[y], y


def assert_same(a: ClassMoments, b: ClassMoments, rtol: float = 1e-9) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=rtol)


def test_means_and_covariance_are_those_of_each_class() -> None:
    x, y = samples(40)
    known = measure(x, y, K)
    assert known.counts.tolist() == [10] * K
    for k in range(K):
        torch.testing.assert_close(known.means[k], x[y == k].double().mean(0))
    within = sum(torch.cov(x[y == k].T.double(), correction=0) for k in range(K)) / K
    torch.testing.assert_close(known.covariance, torch.as_tensor(within))


def test_merging_is_measuring_all_at_once() -> None:
    (x, y), (u, v) = samples(41, 1), samples(30, 2, classes=2)
    whole = measure(torch.cat([x, u]), torch.cat([y, v]), K)
    assert_same(measure(x, y, K).merged(measure(u, v, K)), whole)
    assert_same(measure(u, v, K).merged(measure(x, y, K)), whole)


def test_whole_rank_loses_rounding_only() -> None:
    known = measure(*samples(50), K)
    assert_same(known.compressed(A).moments(K, A), known, rtol=1e-5)


def test_low_rank_keeps_all_variances_and_the_leading_directions() -> None:
    known = measure(*samples(50), K)
    rough = known.compressed(2).moments(K, A)
    torch.testing.assert_close(
        rough.covariance.diagonal(), known.covariance.diagonal(), rtol=1e-5, atol=1e-6
    )
    values, vectors = torch.linalg.eigh(known.covariance)
    leading = vectors[:, -2:] * values[-2:] @ vectors[:, -2:].T
    off = ~torch.eye(A, dtype=torch.bool)
    torch.testing.assert_close(rough.covariance[off], leading[off], rtol=1e-4, atol=1e-5)


def test_moves_with_a_linear_map_of_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedtasuki, "_RIDGE", 0.0)
    (x, y), (own, _) = samples(80), samples(30, 3)
    change, shift = (
        torch.eye(A) + 0.3 * torch.randn(A, A, generator=torch.Generator().manual_seed(4)),
        torch.ones(A),
    )
    moved = measure(x, y, K).moved(own, own @ change + shift)
    assert_same(moved, measure(x @ change + shift, y, K), rtol=1e-4)


def test_what_own_samples_do_not_show_does_not_move() -> None:
    known = measure(*samples(80), K)
    assert_same(known.moved(torch.zeros(9, A), torch.zeros(9, A)), known)
    line = torch.zeros(9, A)
    line[:, 0] = torch.arange(9.0)
    moved = known.moved(line, 2 * line)
    torch.testing.assert_close(moved.means[:, 1:], known.means[:, 1:])
    torch.testing.assert_close(moved.means[:, 0], 2 * known.means[:, 0], rtol=0.02, atol=0.02)


def test_a_class_without_samples_stays_without() -> None:
    known = measure(*samples(30, classes=2), K)
    moved = known.moved(torch.randn(9, A), torch.randn(9, A))
    assert (moved.means[2:] == 0).all()
    assert moved.counts.tolist() == known.counts.tolist()


def test_classifier_gives_the_posterior_of_the_gaussians() -> None:
    x, y = samples(200)
    rare = torch.cat([torch.nonzero(y != 0)[:, 0], torch.nonzero(y == 0)[:7, 0]])
    known = measure(x[rare], y[rare], K)
    rows = known.classifier()
    logits = x.double() @ rows[:, :-1].T + rows[:, -1]
    covariance = known.covariance + 0.05 * known.covariance.diagonal().mean() * torch.eye(
        A, dtype=torch.float64
    )
    gaussians: list[Any] = [MultivariateNormal(m, covariance) for m in known.means]
    joint = [g.log_prob(x.double()) for g in gaussians]
    expected = (torch.stack(joint, 1) + known.counts.log()).softmax(1)
    torch.testing.assert_close(logits.softmax(1), expected, rtol=1e-5, atol=1e-7)


def test_classifier_answers_as_scikit_learn_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedtasuki, "_SHRINK", 0.0)
    x, y = samples(200)
    rows = measure(x, y, K).classifier()
    ours = (x.double() @ rows[:, :-1].T + rows[:, -1]).argmax(1)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy()).predict(x.numpy())
    assert ours.tolist() == theirs.tolist()


def test_a_class_that_nobody_has_is_not_chosen_near_others() -> None:
    x, y = samples(90, classes=3)
    rows = measure(x, y, K).classifier()
    assert torch.isfinite(rows).all()
    assert ((x.double() @ rows[:, :-1].T + rows[:, -1]).argmax(1) != 3).float().mean() > 0.98


def test_one_sample_and_features_that_never_change_give_finite_numbers() -> None:
    known = measure(torch.zeros(1, A), torch.zeros(1, dtype=torch.long), K)
    known = (
        known.moved(torch.zeros(1, A), torch.zeros(1, A)).merged(known).compressed(A).moments(K, A)
    )
    assert torch.isfinite(known.classifier()).all()


@pytest.mark.parametrize("r", [0, 3, A])
def test_size(r: int) -> None:
    assert wire.size(measure(*samples(20), K).compressed(r)) == size(K, A, r)


@pytest.mark.parametrize("model", [1000, 4321, 10**6])
def test_rank_is_what_fits(model: int) -> None:
    r = rank(K, A, 20 * model)
    assert size(K, A, r) <= model
    assert r == A or size(K, A, r + 1) > model
    assert rank(K, A, 100) < 0


@pytest.mark.parametrize(("classes", "features"), [(K + 1, A), (K, A - 1)])
def test_refuses_those_of_another_network(classes: int, features: int) -> None:
    known = measure(*samples(20), K).compressed(2)
    with pytest.raises(UserError, match="same model"):
        known.moments(classes, features)
    with pytest.raises(UserError, match="same model"):
        known._replace(factor=known.factor[1:]).moments(K, A)


def means(x: Tensor, y: Tensor, classes: int = 3) -> ClassInputs:
    return measure_means([(x[:2], y[:2]), (x[2:], y[2:])], classes, tuple(x.shape[1:]))


def test_means_of_samples() -> None:
    x, y = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]]), torch.tensor([0, 0, 2])
    found = means(x, y)
    assert found.counts.tolist() == [2, 0, 1]
    assert found.means.tolist() == [[2.0, 4.0], [0.0, 0.0], [10.0, 20.0]]


def test_images_are_averaged_over_the_cells_of_a_grid() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    found = measure_means([(x, torch.tensor([1]))], 2, (1, 2, 2))
    assert found.means[1].flatten().tolist() == [2.5, 4.5, 10.5, 12.5]


@examples(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 20))
def test_what_is_merged_comes_apart_again(seed: int, n: int, m: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n + m, 2, 3, 3, generator=draw), torch.randint(3, (n + m,), generator=draw)
    whole, one, other = means(x, y), means(x[:n], y[:n]), means(x[n:], y[n:])
    both = one.merged(other)
    rest = both.without(other)
    for a, b in ((both, whole), (rest, one)):
        assert torch.equal(a.counts, b.counts)
        here = b.counts > 0
        torch.testing.assert_close(a.means[here], b.means[here], rtol=1e-4, atol=1e-4)


def test_inputs_move_from_the_mean_of_their_class_to_that_of_another() -> None:
    torch.manual_seed(0)
    known = ClassInputs(
        torch.tensor([0, 30, 10]),
        torch.tensor([0.0, 5.0, -5.0]).view(3, 1, 1, 1).expand(3, 2, 2, 2),
    )
    own = ClassInputs(torch.tensor([4, 0, 0]), torch.full((3, 2, 2, 2), 1.0))
    x = torch.rand(400, 2, 8, 8).contiguous(memory_format=torch.channels_last)
    out = known.moved(own, x, torch.zeros(400, dtype=torch.long))
    assert out.is_contiguous(memory_format=torch.channels_last)
    change = (out - x).mean((1, 2, 3))
    assert set(change.round().tolist()) == {4.0, -6.0}, (
        "to a class that others hold, by as much as the means differ"
    )
    assert 0.65 < float((change > 0).float().mean()) < 0.85, "drawn by the counts, 3 to 1"


def test_other_samples_than_images_move_too() -> None:
    torch.manual_seed(0)
    known, own = (
        ClassInputs(torch.tensor([1]), torch.tensor([row])) for row in ([1.0, 2.0], [0.5, 0.0])
    )
    out = known.moved(own, torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
    assert out.tolist() == [[0.5, 2.0]] * 2


@pytest.mark.parametrize(
    ("classes", "shape", "model", "wanted"),
    [
        (10, (3, 32, 32), 248_024, (3, 7, 7)),  # 2.5 %: 6,200 bytes; 7x7 takes 5,960
        (10, (1, 28, 28), 796_840, (1, 8, 8)),  # never finer
        (10, (1, 6, 28), 796_840, (1, 6, 8)),
        (5, (12,), 20_000, (12,)),
    ],
)
def test_means_are_as_fine_as_fits(
    classes: int, shape: tuple[int, ...], model: int, wanted: tuple[int, ...]
) -> None:
    found = mean_shape(classes, shape, model)
    assert found == wanted
    assert size_of_means(classes, found) <= 0.025 * model


def test_means_leave_room_for_statistics() -> None:
    assert mean_shape(10, (3, 32, 32), 248_024, taken=size_of_means(10, (84,))) == (3, 6, 6)


def test_size_is_that_of_counts_and_means() -> None:
    assert size_of_means(10, (3, 7, 7)) == 8 * 10 + 4 * 10 * 147


@pytest.mark.parametrize(
    ("shape", "model"), [((3, 32, 32), 4_000), ((100,), 4_000), ((3, 32, 32), 100)]
)
def test_means_that_do_not_fit_are_refused(shape: tuple[int, ...], model: int) -> None:
    with pytest.raises(UserError, match="recall"):
        mean_shape(10, shape, model)


def test_means_of_something_else_are_refused() -> None:
    a, b = (
        ClassInputs(torch.ones(2, dtype=torch.int64), torch.zeros(2, *shape))
        for shape in ((3,), (4,))
    )
    with pytest.raises(UserError, match="other classes or inputs"):
        a.merged(b)
