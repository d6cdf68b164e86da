"""FedELMY: exact numbers of the paper's form and of the released code's, and reductions."""

import itertools
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.transport import Transport
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedELMY, FedSeq, Local
from ekiden.methods.chain import fedelmy as diversity
from ekiden.methods.chain.fedelmy import (
    Measure,
    Paper,
    Released,
    magnitude,
    paper_scale,
    power_of_ten,
    released_divisor,
)
from tests.methods.toys import Quadratic, weights


def f32(x: float) -> Tensor:
    return torch.tensor(x)


def f64(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


@pytest.mark.parametrize(
    ("loss", "d2", "a"),
    [
        (6.02, 45, 100),
        (6.02, 1.0, 10),
        (6.02, 0.999, 1),
        (6.02, 0.45, 1),
        (0.05, 45, 10000),
        (0.05, 0.02, 10),
        (0.05, 0.002, 1),
        (0.9, 123, 10000),
        (2.3, 0, 1),
    ],
)
def test_released_divisor(loss: float, d2: float, a: float) -> None:
    assert released_divisor(f64(loss), f64(d2)) == a


@pytest.mark.parametrize(
    ("loss", "d", "scaled"), [(6.02, 45.0, 0.45), (6.02, 2**0.5, 0.1 * 2**0.5), (0.05, 45, 0.0045)]
)
def test_paper_scale_brings_a_distance_one_order_below_the_loss(
    loss: float, d: float, scaled: float
) -> None:
    assert d * float(paper_scale(f64(loss), f64(d))) == pytest.approx(scaled)


def test_scales_survive_a_zero_loss_and_a_zero_distance() -> None:
    assert released_divisor(f64(0.0), f64(1e38)).isfinite()
    assert paper_scale(f64(0.0), f64(0.0)) == 0


@pytest.mark.parametrize("exponent", [-30, -5, -1, 0, 1, 7, 30])
def test_orders_of_magnitude_are_exact_at_powers_of_ten(exponent: int) -> None:
    at = 10.0**exponent
    assert magnitude(f64(at)) == exponent
    assert magnitude(f64(math.nextafter(at, 0))) == exponent - 1
    assert power_of_ten(f64(exponent)) == at


def test_a_loss_that_is_not_finite_is_left_to_the_check_of_the_epoch() -> None:
    for loss in (float("nan"), float("inf")):
        for penalty in (Paper(POOL, START, "l2", 1.0, 1.0), Released(POOL[0], START, 1.0, 1.0)):
            grad = torch.zeros(2)
            penalty(THETA, grad, f32(loss))
            assert not grad.isfinite().all()


POOL = [torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.0])]
START, THETA = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])


def autograd(penalty: Paper, theta: Tensor, loss: Tensor) -> Tensor:
    """The gradient of -α d1~ + β d2~ by walking the pool with autograd, scales held constant."""
    theta = theta.double().requires_grad_()
    pool = [m.double() for m in penalty.pool]

    def d(m: Tensor) -> Tensor:
        if penalty.measure == "l1":
            return (theta - m).abs().sum()
        if penalty.measure == "cosine":
            return 1 - torch.nn.functional.cosine_similarity(theta, m, dim=0)
        return (
            (theta - m).pow(2).sum()
            if penalty.measure == "squared_l2"
            else torch.linalg.vector_norm(theta - m)
        )

    d1, d2 = torch.stack([d(m) for m in pool]).mean(), d(pool[0])
    s1, s2 = paper_scale(loss, d1.detach()), paper_scale(loss, d2.detach())
    (-penalty.alpha * s1 * d1 + penalty.beta * s2 * d2).backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    return theta.grad


@pytest.mark.parametrize("block", [7, 50, 1 << 16])
@pytest.mark.parametrize("measure", ["l2", "squared_l2", "l1", "cosine"])
def test_closed_gradients_equal_autograd(
    measure: Measure, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diversity, "_SMALL", block)
    monkeypatch.setattr(diversity, "piece", lambda flat: block)
    generator = torch.Generator().manual_seed(1)
    pool = [torch.randn(50, generator=generator) for _ in range(4)]
    theta, grad = torch.randn(50, generator=generator), torch.zeros(50)
    penalty = Paper(pool, torch.stack(pool).mean(0), measure, 0.3, 0.7)
    penalty(theta, grad, f32(0.7))
    torch.testing.assert_close(
        grad.double(), autograd(penalty, theta, f32(0.7)), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("away", [3e-4, 0.0])
def test_gradient_near_a_member_far_from_the_start(away: float) -> None:
    generator = torch.Generator().manual_seed(1)
    start, far = torch.randn(2, 64, generator=generator)
    pool = [start, start + far]
    theta, grad = pool[1] + away * torch.randn(64, generator=generator), torch.zeros(64)
    penalty = Paper(pool, start, "l2", 1.0, 1.0)
    penalty(theta, grad, f32(0.7))
    torch.testing.assert_close(
        grad.double(), autograd(penalty, theta, f32(0.7)), rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize("measure", ["l2", "squared_l2", "l1", "cosine"])
def test_no_gradient_where_there_is_no_distance(measure: Measure) -> None:
    theta, grad = torch.tensor([1.0, 2.0]), torch.zeros(2)
    Paper([theta.clone()], theta.clone(), measure, 1.0, 1.0)(theta, grad, f32(1.0))
    torch.testing.assert_close(grad, torch.zeros(2), atol=1e-6, rtol=0)


def test_released_form_equals_walking_the_pool() -> None:
    generator = torch.Generator().manual_seed(2)
    pool = [torch.randn(30, generator=generator) for _ in range(5)]
    theta = torch.randn(30, generator=generator).double().requires_grad_()
    start = torch.stack(pool).mean(0)
    d1 = torch.stack([(theta - m).pow(2).sum() for m in [*pool, start]]).mean()
    d2 = (theta - pool[0]).pow(2).sum()
    a = released_divisor(f64(0.8), d2.detach())
    (-0.4 * d1 / a + 0.9 * d2 / a).backward()  # type: ignore[no-untyped-call]
    grad = torch.zeros(30)
    Released(pool[0], start, 0.4, 0.9)(theta.detach().float(), grad, f32(0.8))
    assert theta.grad is not None
    torch.testing.assert_close(grad.double(), theta.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("models", "result"), [(1, 5.0), (5, 7.0 + 2 / 9), (10, 7.603306)])
def test_chain_identity(models: int, result: float) -> None:
    method = FedELMY(models=models, alpha=0, beta=0, epochs=1)
    model = weights(0.0)
    for centre in (4.0, 8.0):
        model = method.extend_pool(cast(Client, Quadratic([centre])), model)
    assert float(model.params) == pytest.approx(result, abs=1e-5)


def test_warms_up_the_first_client_only_and_without_distances(blobs: FederatedData) -> None:
    asked: list[tuple[str, str]] = []

    class Spy(Fed):
        def call(self, task: Callable[..., Any], client: str, *args: Any) -> Ref[Any]:
            asked.append((task.__name__, client))
            return Ref(client, "model")

    names = [c.name for c in blobs.clients]
    spy = Spy(names, cast(Transport, None), 0, lambda row: None)
    assert len(list(FedELMY(rounds=2).run(spy, FedELMY().start()))) == 8
    assert asked == [("warm_up", names[0])] + [("extend_pool", name) for name in names * 2]

    client = Quadratic([1.0], lr=0.1)
    FedELMY(warmup=7).warm_up(cast(Client, client), weights(0.0))
    assert client.fits == [7]
    assert client.penalties == [None]


def test_every_model_is_held_apart_from_the_pool() -> None:
    client = Quadratic([1.0], lr=0.1)
    FedELMY(models=2, epochs=3, alpha=0.5, form="released").extend_pool(
        cast(Client, client), weights(0.0)
    )
    assert client.fits == [3, 3]
    assert all(isinstance(p, Released) for p in client.penalties)


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    } | changes


def equal(a: Weights | None, b: Weights | None) -> bool:
    assert a is not None
    assert b is not None
    return torch.equal(a.params, b.params) and torch.equal(a.buffers, b.buffers)


def test_without_pool_and_distances_it_is_fedseq(blobs: FederatedData) -> None:
    elmy = FedELMY(models=1, epochs=3, warmup=0, alpha=0, beta=0, average_start=False)
    a, b = run(elmy, blobs, Tiny, **settings()), run(FedSeq(epochs=3), blobs, Tiny, **settings())
    assert equal(a.weights, b.weights)
    assert a.metrics == b.metrics


def test_one_client_is_local_training(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    elmy = FedELMY(models=1, epochs=3, warmup=0, alpha=0, beta=0, average_start=False)
    a, b = run(elmy, alone, Tiny, **settings()), run(Local(epochs=3), alone, Tiny, **settings())
    assert equal(a.weights, b.personal[0])
    assert a.bytes == 0


def test_first_model_with_equal_weights_is_plain_training(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    plain, regular = (
        run(
            FedELMY(models=1, epochs=3, warmup=0, alpha=w, beta=w, form="released"),
            alone,
            Tiny,
            **settings(),
        )
        for w in (0.0, 1.0)
    )
    assert equal(plain.weights, regular.weights)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_distances_change_the_models_after_the_first(blobs: FederatedData, form: Any) -> None:
    plain, regular = (
        run(
            FedELMY(models=2, epochs=3, warmup=0, alpha=w, beta=w, form=form),
            blobs,
            Tiny,
            **settings(),
        )
        for w in (0.0, 1.0)
    )
    assert not equal(plain.weights, regular.weights)


@pytest.mark.parametrize(("clients", "rounds", "sends"), [(10, 1, 9), (4, 3, 11)])
def test_messages(clients: int, rounds: int, sends: int) -> None:
    assert FedELMY(rounds=rounds).cost(clients, 1) == sends


def test_order_of_hops(blobs: FederatedData) -> None:
    names = [c.name for c in blobs.clients]
    for order, expected in (
        ("reversed", names[::-1]),
        (",".join(names[2:] + names[:2]), names[2:] + names[:2]),
    ):
        result = run(FedELMY(models=1, epochs=1, warmup=1, order=order), blobs, Tiny, **settings())
        assert [(row.source, row.target) for row in result.ledger] == list(
            itertools.pairwise(expected)
        )
