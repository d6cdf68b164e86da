"""FedProx: exact numbers, and the cases in which it is FedAvg."""

import torch

from ekiden import FederatedData, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedProx
from ekiden.methods.blocks.rounds import Proximal
from tests.methods.test_fedavg import SETTINGS, same


def test_gradient_is_exactly_zero_at_the_centre() -> None:
    theta = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    grad = torch.full_like(theta, 1e-3)
    Proximal(0.3, theta.clone())(theta, grad, torch.tensor(1.0))
    assert torch.equal(grad, torch.full_like(theta, 1e-3))


def test_without_mu_it_is_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a, b, c = (
        run(method, blobs, Tiny, **SETTINGS).weights
        for method in (
            FedProx(rounds=2, epochs=2, mu=0),
            FedAvg(rounds=2, epochs=2),
            FedProx(rounds=2, epochs=2, mu=1),
        )
    )
    assert same(a, b)
    assert not same(b, c)
