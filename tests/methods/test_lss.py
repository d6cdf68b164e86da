"""LSS: two rounds against a second implementation of its equations, and its mixtures."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, federate, run
from ekiden.core.training.network import Network
from ekiden.methods import LSS, FedAvg
from ekiden.methods.rounds import lss
from tests.methods.test_fedavg import same

LR = 0.3
LINEAR = torch.nn.Linear(4, 3)
torch.nn.init.orthogonal_(LINEAR.weight, generator=torch.Generator().manual_seed(0))
torch.nn.init.zeros_(LINEAR.bias)
SETTINGS: dict[str, Any] = {
    "training": Training(optimizer="sgd", lr=LR, batch_size=50),
    "hardware": Hardware(threads=1),
}


def silos() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, 4, generator=draw), torch.randint(3, (n,), generator=draw))
        for n in (20, 30)
    ]


def data() -> FederatedData:
    return federate(silos(), silos()[0], val_fraction=0.0)


def shares(models: int) -> Tensor:
    """Shares that a second implementation knows."""
    return torch.arange(1.0, models + 1) / sum(range(models + 1))


def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """The cross-entropy of a linear network whose values are flat: 12 weights, 3 biases."""
    return F.cross_entropy(x @ w[:12].view(3, 4).T + w[12:], y)


def soup(received: Tensor, x: Tensor, y: Tensor, method: LSS) -> Tensor:
    """Algorithm 1 at a client whose samples are one batch; autograd does all gradients."""
    pool = [received]
    for _ in range(method.models):
        own = torch.stack(pool).mean(0)
        for _ in range(method.epochs):
            own = own.clone().requires_grad_()
            c = shares(len(pool) + 1)
            mixed = c[-1] * own + sum(share * w for share, w in zip(c, pool, strict=False))
            value = loss(mixed, x, y)
            if not torch.equal(own, received):  # a distance of 0 has no slope
                apart = torch.stack([(own - w).norm() for w in pool])
                value = value + method.affinity * apart[0] - method.diversity * apart.mean()
            (slope,) = torch.autograd.grad(value, own)
            own = (own - LR * slope).detach()
        pool.append(own)
    return torch.stack(pool).mean(0)


def test_two_rounds_against_a_second_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lss, "shares", shares)
    method = LSS(rounds=2, models=3, epochs=2, affinity=0.2, diversity=0.5)
    found = run(method, data(), LINEAR, evaluate_every=0, **SETTINGS).weights
    assert found is not None
    w: Any = Network(copy.deepcopy(LINEAR)).weights().params
    for _ in range(2):
        w = sum(n / 50 * soup(w, x, y, method) for n, (x, y) in zip((20, 30), silos(), strict=True))
    torch.testing.assert_close(found.params, w, rtol=1e-3, atol=1e-4)


def test_shares_are_uniform_on_the_simplex() -> None:
    """Of three shares each is below 1/2 in three of four draws, and they sum to 1."""
    torch.manual_seed(0)
    drawn = torch.stack([lss.shares(3) for _ in range(4000)])
    torch.testing.assert_close(drawn.sum(1), torch.ones(4000))
    torch.testing.assert_close(drawn.mean(0), torch.full((3,), 1 / 3), atol=0.01, rtol=0)
    torch.testing.assert_close(
        (drawn < 0.5).float().mean(0), torch.full((3,), 0.75), atol=0.02, rtol=0
    )


def test_the_terms_pull_to_the_received_model_and_push_from_the_pool() -> None:
    pool = [torch.zeros(2), torch.tensor([3.0, 0.0])]
    grad = torch.zeros(2)
    lss.Spread(pool, affinity=1.0, diversity=0.5)(torch.tensor([3.0, 4.0]), grad, torch.tensor(0.0))
    # (1 - 1/4)·(3, 4)/5 - 1/4·(0, 4)/4
    assert grad.tolist() == pytest.approx([0.45, 0.35])
    still = torch.zeros(2)
    lss.Spread(pool, affinity=1.0, diversity=0.0)(torch.zeros(2), still, torch.tensor(0.0))
    assert still.tolist() == [0, 0]


def test_it_differs_from_averaging() -> None:
    averaged = run(FedAvg(rounds=1, epochs=2), data(), LINEAR, **SETTINGS).weights
    assert not same(run(LSS(epochs=2, models=1), data(), LINEAR, **SETTINGS).weights, averaged)
