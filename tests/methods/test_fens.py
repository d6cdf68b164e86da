"""FENS: one round and the ridge against independent rewrites; what is held out; equal weights are
an ensemble."""

from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.training import fit as fitting
from ekiden.core.training.fit import Bench
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FENS
from ekiden.methods.one_shot.blocks.ensemble import EnsembleModel
from ekiden.methods.one_shot.fens import (
    Form,
    HeldOut,
    JointNetwork,
    LinearCombiner,
    Perceptron,
    RegressionSums,
    Stacking,
    Weighted,
    minibatches,
    ridge,
)
from ekiden.runs.result import Result
from tests.methods.toys import Table

FORMS: tuple[Form, ...] = ("linear", "per-class", "mlp", "ridge")


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


def small(**changes: Any) -> FENS:
    return FENS(**({"epochs": 2, "rounds": 2, "holdout": 0.2} | changes))


def client(m: int, seed: int, members: int = 2, classes: int = 3) -> Any:
    """Stands for a client that has the models' answers for its m held-out samples."""
    draw = torch.Generator().manual_seed(seed)
    answers = 2 * torch.randn(m, members, classes, generator=draw)
    held = HeldOut(torch.arange(m), torch.arange(m) % classes, answers)
    return SimpleNamespace(
        state=held, classes=classes, generator=lambda purpose: torch.Generator().manual_seed(7)
    )


class Federation(Table):
    layout = SimpleNamespace(classes=3)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return cast(np.ndarray, e / e.sum(axis=1, keepdims=True))


def sgd_by_hand(held: HeldOut, w: np.ndarray, lr: float) -> np.ndarray:
    """A full-batch step on w (N, K): ∂ℓ/∂w_nc = mean over i of (p_ic - y_ic) z_inc."""
    z, y = held.answers.double().numpy(), np.eye(3)[held.y.numpy()]
    slope = np.zeros_like(w)
    p = softmax((z * w).sum(1))
    for i in range(len(z)):
        for n in range(w.shape[0]):
            for c in range(w.shape[1]):
                slope[n, c] += (p[i, c] - y[i, c]) * z[i, n, c] / len(z)
    return w - lr * slope


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_two_rounds_by_hand(server: Literal["sgd", "adam"]) -> None:
    clients = [client(5, 1), client(9, 2)]
    method = FENS(
        server_optimizer=server,
        server_lr=0.5,
        server_momentum=0.9,
        aggregator_lr=0.3,
        aggregator_batch_size=100,
    )
    fed = cast(Fed, Federation(clients))
    fed.generator = lambda purpose: torch.Generator()  # type: ignore[method-assign]
    s = Stacking(step=2, model=None)  # the clients have the answers
    w, m, v = np.full((2, 3), 0.5), np.zeros((2, 3)), np.full((2, 3), 1e-6)
    for _ in range(2):
        s = method.round(fed, s)
        sent = [sgd_by_hand(c.state, w, 0.3) for c in clients]
        change = (5 * sent[0] + 9 * sent[1]) / 14 - w
        if server == "sgd":
            m = 0.9 * m + change
            w = w + 0.5 * m
        else:
            m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
            w = w + 0.5 * m / (np.sqrt(v) + 1e-3)
        assert s.aggregator is not None
        np.testing.assert_allclose(s.aggregator.params.view(2, 3).numpy(), w, rtol=2e-5)


@pytest.mark.parametrize(
    ("steps", "batch", "seen"), [(1, 100, 5), (1, 2, 2), (2, 2, 4), (3, 2, 5), (7, 2, 5)]
)
def test_a_client_weighs_as_much_as_the_samples_that_it_saw(
    steps: int, batch: int, seen: int
) -> None:
    method, start = (
        FENS(local_steps=steps, aggregator_batch_size=batch),
        Network(Weighted(2, 3)).weights(),
    )
    assert method.improve(client(5, 1), (), start).weight == seen


def test_without_held_out_samples_a_client_has_no_weight() -> None:
    start = Network(Weighted(2, 3)).weights()
    sent = FENS().improve(client(0, 1), (), start)
    assert (sent.weight, sent.aggregator) == (0, start)


def test_mini_batches_are_shuffled_passes() -> None:
    parts = list(minibatches(5, 2, 5, torch.Generator()))
    assert [len(part) for part in parts] == [2, 2, 1, 2, 2]
    assert sorted(torch.cat(parts[:3]).tolist()) == [0, 1, 2, 3, 4]


def sums(phi: Tensor, y: Tensor, classes: int) -> RegressionSums:
    """By loops over samples."""
    d = phi.shape[1]
    gram, cross = (
        torch.zeros(d, d, dtype=torch.float64),
        torch.zeros(d, classes, dtype=torch.float64),
    )
    for row, label in zip(phi, y.tolist(), strict=True):
        gram += torch.outer(row, row)
        cross[:, label] += row
    return RegressionSums(torch.cat([gram[i, i:] for i in range(d)]), cross, len(phi))


def answers(n: int, members: int, classes: int) -> tuple[Tensor, Tensor]:
    """Probabilities (n, N·K), the right class a little more probable, and labels."""
    draw = torch.Generator().manual_seed(5)
    y = torch.randint(classes, (n,), generator=draw)
    logits = torch.randn(n, members, classes, generator=draw, dtype=torch.float64)
    logits[torch.arange(n), :, y] += 1.5
    return logits.softmax(2).flatten(1), y


@pytest.mark.parametrize(("n", "penalty"), [(60, 0.3), (60, 0.0), (7, 0.0), (60, 1e12)])
def test_the_ridge_of_the_sums_is_that_of_pooled_samples(n: int, penalty: float) -> None:
    members, classes = 4, 3
    phi, y = answers(n, members, classes)
    parts = [sums(phi[rows], y[rows], classes) for rows in torch.split(torch.arange(n), 4)]
    found = ridge(parts, penalty)

    x, target, start = (
        phi.numpy(),
        np.eye(classes)[y.numpy()],
        np.tile(np.eye(classes), (members, 1)) / members,
    )
    rest, best = target - x @ start, (np.inf, penalty)
    size = (x**2).sum() / x.shape[1]
    for weight in [] if penalty else np.logspace(-4, 4, 81) * size:
        hat = x @ np.linalg.solve(x.T @ x + weight * np.eye(x.shape[1]), x.T)
        left = rest - hat @ rest
        best = min(best, (float((left**2).sum() / (n - np.trace(hat)) ** 2), float(weight)))
    expected = start + np.linalg.solve(x.T @ x + best[1] * np.eye(x.shape[1]), x.T @ rest)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-8)
    np.testing.assert_allclose((phi @ found).sum(1), 1.0, atol=1e-9)
    if penalty > 1e6:
        np.testing.assert_allclose(found.numpy(), start, atol=1e-9)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The rows that each fit trained on."""
    seen: list[Tensor] = []
    train = fitting.fit

    def spy(bench: Bench, start: Weights, subset: Any, *args: Any, **options: Any) -> Weights:
        seen.append(subset.rows)
        return train(bench, start, subset, *args, **options)

    monkeypatch.setattr(fitting, "fit", spy)
    return seen


def joint(result: Result) -> JointNetwork:
    module = result.model
    assert isinstance(module, JointNetwork)
    return module.eval()


def test_stacking_uses_every_model_and_only_rows_that_no_model_learned_from(
    blobs: FederatedData, learned: list[Tensor]
) -> None:
    module = joint(run(small(aggregator="ridge", ridge=0.5), blobs, Tiny, **settings()))
    held = []
    assert len(learned) == len(blobs.clients)
    for data in blobs.clients:
        everything = set(data.train.rows.tolist())
        (rows,) = (found for one in learned if (found := set(one.tolist())) < everything)
        held += sorted(everything - rows)
    assert len(held) == sum(round(0.2 * len(c.train)) for c in blobs.clients)
    x, y = blobs.dataset.train.x[held], blobs.dataset.train.y[held]
    with torch.no_grad():
        phi = np.concatenate(
            [softmax(member(x).double().numpy()) for member in module.members], axis=1
        )
    start = np.tile(np.eye(3), (4, 1)) / 4
    rest = np.eye(3)[y.numpy()] - phi @ start
    expected = start + np.linalg.solve(phi.T @ phi + 0.5 * np.eye(12), phi.T @ rest)
    assert isinstance(module.combiner, LinearCombiner)
    np.testing.assert_allclose(module.combiner.weight.detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("form", ["linear", "per-class", "ridge"])
def test_an_aggregator_of_equal_weights_is_an_ensemble(form: Form, blobs: FederatedData) -> None:
    still = {
        "server_optimizer": "sgd",
        "aggregator_lr": 1e-12,
        "ridge": 1e12,
        "server_momentum": 0.0,
    }
    result = run(small(aggregator=form, rounds=1, **still), blobs, Tiny, **settings())
    module, x = joint(result), blobs.dataset.test.x
    ensemble = EnsembleModel(
        list(module.members), 3, "probabilities" if form == "ridge" else "logits"
    ).eval()
    with torch.no_grad():
        expected = ensemble(x).clamp(min=float(np.log(1e-3))) if form == "ridge" else ensemble(x)
        torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-5)


def test_the_perceptron_is_two_linear_layers() -> None:
    module = Perceptron(20, 10, 40, torch.Generator())
    assert sum(p.numel() for p in module.parameters()) == 200 * 40 + 40 + 40 * 10 + 10
    plain = nn.Sequential(nn.Flatten(), nn.Linear(200, 40), nn.ReLU(), nn.Linear(40, 10))
    torch.nn.utils.vector_to_parameters(
        torch.nn.utils.parameters_to_vector(module.parameters()), plain.parameters()
    )
    z = torch.randn(6, 20, 10)
    torch.testing.assert_close(module(z), plain(z))
    for layer, inputs in ((module.first, 200), (module.second, 40)):
        assert 0.95 / inputs**0.5 < float(layer.detach().abs().max()) <= 1 / inputs**0.5


def test_a_score_of_nothing_is_a_thousandth() -> None:
    module = LinearCombiner(1, 2)
    with torch.no_grad():
        module.weight.copy_(torch.tensor([[1.5, -0.5], [0.0, 1.0]]))
        logits = module(torch.tensor([[[40.0, 0.0]]]))
    torch.testing.assert_close(logits.exp(), torch.tensor([[1.5, 0.001]]))


@pytest.mark.parametrize("form", FORMS)
def test_bytes(form: Form, blobs: FederatedData) -> None:
    result = run(small(aggregator=form), blobs, Tiny, evaluate_every=10**9, **settings())
    model = (
        4 * (4 * 8 + 8 + 16 + 8 * 3 + 3) + 4 * 16 + 8
    )  # parameters, running statistics, the counter of batches
    numbers = {"linear": 4, "per-class": 12, "mlp": 12 * 8 + 8 + 8 * 3 + 3, "ridge": 0}[form]
    rounds = 4 * (8 * 78 + 8 * 36 + 8) if form == "ridge" else 2 * 4 * (2 * 4 * numbers + 8)
    assert result.bytes == 4 * model + 4 * 3 * model + rounds
    between = [row for row in result.ledger if row.source != "server" and row.target != "server"]
    assert [row.bytes for row in between] == [model] * 12
    assert {row.step for row in between} == {1}, "models go to the clients once"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_learns(form: Form, blobs: FederatedData) -> None:
    method = small(aggregator=form, epochs=10, rounds=40, server_lr=0.05)
    result = run(method, blobs, Tiny, evaluate_every=10**9, **settings())
    assert result.metrics[-1]["accuracy"] > 0.7


def silos(*sizes: int) -> FederatedData:
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(n, 4, generator=draw), (torch.arange(n) + k) % 3) for k, n in enumerate(sizes)
    ]
    return federate(parts, test=parts[0], val_fraction=0, classes=("a", "b", "c"))


@pytest.mark.parametrize("form", ["per-class", "ridge"])
def test_a_client_with_one_sample_trains_and_stays_out(form: Form) -> None:
    result = run(small(aggregator=form), silos(1, 6), Tiny, **settings())
    assert result.weights is not None
    assert result.weights.is_finite()
    with pytest.raises(UserError, match="no client has two training samples"):
        run(small(aggregator=form), silos(1, 1), Tiny, **settings())


def test_an_aggregator_that_diverges_is_refused() -> None:
    bad = client(5, 1)
    bad.state.answers[0, 0, 0] = torch.inf
    fed = cast(Fed, Federation([bad, client(5, 2)]))
    fed.generator = lambda purpose: torch.Generator()  # type: ignore[method-assign]
    with pytest.raises(UserError, match="lower aggregator_lr"):
        FENS().round(fed, Stacking(step=2, model=None))


def test_every_client_starts_from_its_own_model_unless_told_otherwise(blobs: FederatedData) -> None:
    starts: dict[str, list[Tensor]] = {"same": [], "different": []}
    for init, seen in starts.items():

        def fit(self: Client, model: Weights, seen: list[Tensor] = seen, **options: Any) -> Weights:
            seen.append(model.params)
            return model

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Client, "fit", fit)
            run(small(init=init), blobs, Tiny, stop_after=1, **settings())
    assert all(torch.equal(starts["same"][0], p) for p in starts["same"])
    assert not torch.equal(starts["different"][0], starts["different"][1])
