"""Co-Boosting: weights, losses, directions and steps of the student against independent
rewrites."""

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.federation import Fed
from ekiden.core.models import catalogue
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import CoBoosting
from ekiden.methods.one_shot.blocks.ensemble import Distilled, EnsembleModel, synthesise
from ekiden.methods.one_shot.co_boosting import WeightedEnsemble, hard, moved


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return cast(np.ndarray, e / e.sum(axis=1, keepdims=True))


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


def small(**changes: Any) -> CoBoosting:
    fields = {
        "epochs": 3,
        "distill_epochs": 2,
        "steps_per_batch": 3,
        "distill_batch_size": 8,
        "noise": 8,
        "generator_width": 4,
    }
    return CoBoosting(**(fields | changes))


def server(**changes: Any) -> Fed:
    """Stands for a federation of Tiny's shape that feeds samples as they are."""
    plain = {
        "layout": Network(Tiny()).layout,
        "shape": (4,),
        "feed": lambda raw, draw=None: raw,
        "generator": lambda purpose: torch.Generator().manual_seed(1),
        "autocast": nullcontext,
        "work": Work(),
    }
    return cast(Fed, SimpleNamespace(**(plain | changes)))


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


@pytest.mark.parametrize("start", [[0.25] * 4, [0.1, 0.9, 0.4, 0.003]])
def test_a_step_of_the_weights(start: list[float]) -> None:
    """∂ℓ/∂w_k = mean over i of Σ_c (p_ic - y_ic)(z_kic - A_ic) / Σ w, by loops."""
    draw = torch.Generator().manual_seed(2)
    z, y = (
        3 * torch.randn(4, 6, 3, generator=draw, dtype=torch.float64),
        torch.tensor([0, 1, 2, 2, 1, 0]),
    )
    w = np.array(start)
    a = sum(w[k] * z[k].numpy() for k in range(4)) / w.sum()
    p, slope = softmax(a), np.zeros(4)
    for k in range(4):
        for i in range(6):
            for c in range(3):
                slope[k] += (p[i, c] - float(y[i] == c)) * (z[k, i, c] - a[i, c]) / 6 / w.sum()
    assert {-1, 1} == set(np.sign(slope)), "both directions"
    expected = np.clip(w - 0.01 * np.sign(slope), 0, 1)
    np.testing.assert_allclose(
        moved(torch.tensor(start, dtype=torch.float64), z, y, 0.01).numpy(), expected
    )


def test_weights_stay_in_bounds_and_never_all_vanish() -> None:
    good, bad = torch.tensor([[5.0, 0.0]]), torch.tensor([[0.0, 5.0]])
    weights = torch.tensor([0.5, 0.5])
    y = torch.tensor([0])
    assert moved(weights, torch.stack([good, bad]), y, 0.1).tolist() == pytest.approx([0.6, 0.4])
    assert moved(weights, torch.stack([good, bad]), y, 0.7).tolist() == [1.0, 0.0]
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):  # the slope of a single weight is 0, except for rounding
        alone, y = torch.randn(1, 4, 3, generator=draw), torch.randint(3, (4,), generator=draw)
        assert float(moved(torch.tensor([0.01]), alone, y, 0.01)) > 0


def test_hard_samples_count_more() -> None:
    answers, wanted = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    p = [1 / (1 + math.exp(-2)), 1 / (1 + math.exp(1))]
    for exponent in (0.0, 1.0, 2.5):
        expected = sum((1 - q) ** exponent * -math.log(q) for q in p) / 2
        assert float(hard(answers, wanted, exponent)) == pytest.approx(expected, rel=1e-5)
    at = answers.clone().requires_grad_()
    hard(at, wanted, 1.0).backward()  # type: ignore[no-untyped-call]
    assert at.grad is not None
    assert float(at.grad[0, 0]) == pytest.approx(-((1 - p[0]) ** 2) / 2, rel=1e-5), (
        "1 - p is a constant"
    )


def test_the_rate_falls_and_weights_see_earlier_samples_only(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[float] = []
    seen: list[tuple[int, float]] = []
    distil, reweighed = CoBoosting.distil, CoBoosting.reweighed

    def spy_distil(self: CoBoosting, *args: Any) -> None:
        rates.append(args[-2])
        distil(self, *args)

    def spy_reweighed(
        self: CoBoosting, fed: Fed, teacher: Any, pool: Tensor, labels: Tensor, step: float
    ) -> Tensor:
        assert len(pool) == len(labels)
        seen.append((len(pool), step))
        return reweighed(self, fed, teacher, pool, labels, step)

    monkeypatch.setattr(CoBoosting, "distil", spy_distil)
    monkeypatch.setattr(CoBoosting, "reweighed", spy_reweighed)
    state = run(small(distill_epochs=4, epochs=1), blobs, Tiny, **settings()).state
    assert rates == pytest.approx([0.01, 0.0085355, 0.005, 0.0014645], rel=1e-4)
    assert [n for n, _ in seen] == [8, 16, 24]
    assert [step for _, step in seen] == pytest.approx(
        [0.01 * 0.99, 0.01 * 0.99**2, 0.01 * 0.99**3]
    )
    assert isinstance(state, Distilled)
    assert state.pool is not None
    assert state.labels is not None
    assert (len(state.pool), len(state.labels)) == (32, 32)
    assert state.weights is not None
    assert not torch.equal(state.weights, torch.full((4,), 0.25))
    # Mini-batches of 8: 1 + 2 + 3 steps, each of the epoch's length.
    assert (
        float((state.weights - 0.25).abs().max())
        <= 0.01 * (0.99 + 2 * 0.99**2 + 3 * 0.99**3) + 1e-6
    )


def test_without_steps_the_ensemble_is_the_mean_of_the_logits(blobs: FederatedData) -> None:
    state = run(small(weight_steps=0, distill_epochs=3, epochs=1), blobs, Tiny, **settings()).state
    assert isinstance(state, Distilled)
    assert state.weights is not None
    assert torch.equal(state.weights, torch.full((4,), 0.25))
    members = [linear(k) for k in range(4)]
    x = torch.randn(5, 4)
    torch.testing.assert_close(
        WeightedEnsemble(members, state.weights)(x), EnsembleModel(members, 3, "logits")(x)
    )


def test_the_smallest_loss_wins_and_a_loss_that_is_no_number_is_refused() -> None:
    generator, z = nn.Linear(2, 4), torch.randn(3, 2, requires_grad=True)
    losses, made = iter([3.0, 1.0, 2.0]), []

    def loss_of(raw: Tensor) -> Tensor:
        made.append(raw.detach().clone())
        return raw.sum() * 0.1 + (next(losses) - raw.sum() * 0.1).detach()

    best = synthesise(server(), cast(Any, generator), z, 3, 0.1, loss_of)
    assert torch.equal(best, made[1])
    assert not torch.equal(made[0], made[1])
    with pytest.raises(UserError, match="lower generator_lr"):
        synthesise(server(), cast(Any, generator), z, 2, 0.1, lambda raw: raw.sum() * math.nan)


@pytest.mark.parametrize("clip", [1e-3, math.inf])
def test_the_generator_s_gradient_is_clipped(clip: float) -> None:
    generator, z = nn.Linear(2, 4), torch.ones(3, 2, requires_grad=True)
    synthesise(server(), cast(Any, generator), z, 1, 0.1, lambda raw: raw.sum(), clip)
    norm = math.sqrt(
        sum(float(p.grad.square().sum()) for p in generator.parameters() if p.grad is not None)
    )
    assert norm == pytest.approx(min(clip, 3 * math.sqrt(12)), rel=1e-2)


def test_passes_at_the_server_count(blobs: FederatedData) -> None:
    result = run(small(distill_epochs=3), blobs, Tiny, **settings())
    clients = 4
    for epoch, (before, row) in enumerate(
        zip(result.metrics, result.metrics[1:], strict=False), start=1
    ):
        synthesis, pool = 3 * 8 * (clients + 2), 8 * epoch
        weighing = clients * 8 * (epoch - 1)
        assert row["forward"] - before["forward"] == synthesis + weighing + (2 * clients + 1) * pool
        assert row["backward"] - before["backward"] == synthesis + (clients + 1) * pool


def test_images_make_a_pool_of_bytes() -> None:
    draw = torch.Generator().manual_seed(0)
    silo = (
        torch.randint(256, (20, 1, 16, 16), generator=draw, dtype=torch.uint8),
        torch.arange(20) % 3,
    )
    result = run(
        small(epochs=1),
        federate([silo, silo], test=silo),
        lambda: catalogue.build("lenet", (1, 16, 16), 3),
        **settings(),
    )
    assert isinstance(result.state, Distilled)
    assert result.state.pool is not None
    assert (result.state.pool.dtype, result.state.pool.shape) == (torch.uint8, (16, 1, 16, 16))
    assert result.bytes == 2 * 4 * sum(
        p.numel() for p in catalogue.build("lenet", (1, 16, 16), 3).parameters()
    )
