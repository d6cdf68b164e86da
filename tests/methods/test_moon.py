"""MOON: exact numbers of the contrast, what is kept and what is frozen, and its reduction to
FedAvg."""

from math import log

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.worker import Job, Setup, Worker
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification
from ekiden.core.training.fit import TaskLoss
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import MOON, FedAvg
from ekiden.methods.rounds.moon import ContrastiveLoss, contrastive
from tests.methods.test_fedavg import SETTINGS, same

Z, GLOBAL, PREVIOUS = (
    torch.tensor([v], dtype=torch.float64) for v in ([1.0, 0.0], [1.0, 1.0], [0.0, 1.0])
)


def test_contrast() -> None:
    assert float(contrastive(Z, GLOBAL, [PREVIOUS], 0.5)) == pytest.approx(0.21762172, abs=1e-8)
    assert float(contrastive(Z, PREVIOUS, [GLOBAL], 0.5)) == pytest.approx(1.63183528, abs=1e-8), (
        "roles swapped"
    )
    assert float(contrastive(Z, GLOBAL, [PREVIOUS] * 2, 0.5)) == pytest.approx(0.39624505, abs=1e-8)


def test_equal_models_give_log_two_and_no_gradient() -> None:
    z = torch.tensor([[1.0, 0.0], [0.3, -2.0]], dtype=torch.float64, requires_grad=True)
    other = torch.tensor([[1.0, 1.0], [0.2, 0.1]], dtype=torch.float64)
    loss = contrastive(z, other, [other], 0.5)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(log(2), abs=1e-12)
    assert z.grad is not None
    torch.testing.assert_close(z.grad, torch.zeros_like(z), rtol=0, atol=1e-12)


def test_survives_zero_vectors_and_low_temperature() -> None:
    assert torch.isfinite(contrastive(torch.zeros(1, 2), GLOBAL.float(), [PREVIOUS.float()], 1e-3))


def test_without_mu_it_is_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a, b, c = (
        run(method, blobs, Tiny, **SETTINGS).weights
        for method in (
            MOON(rounds=2, epochs=2, mu=0),
            FedAvg(rounds=2, epochs=2),
            MOON(rounds=2, epochs=2),
        )
    )
    assert same(a, b)
    assert not same(b, c)


def test_keeps_its_last_models_first_in_first_out(blobs: FederatedData) -> None:
    worker = Worker(
        Setup(
            MOON(epochs=1, earlier_models=2),
            Tiny,
            blobs.dataset,
            SETTINGS["training"],
            SETTINGS["hardware"],
        ),
        {c.name: c for c in blobs.clients},
    )
    model, private, trained = worker.network.weights(), None, []
    for step in range(4):
        outcome = worker.execute(Job(step, 0, "client-0", "train", (model, step), private))
        private = outcome.private
        model = outcome.value.model
        trained.append(model)
        assert len(private) == min(step + 1, 2)
        assert all(same(a, b) for a, b in zip(private, trained[-2:], strict=False))
    assert outcome.work.forward == 4 * outcome.work.backward, (
        "the global and two earlier models look at each batch"
    )


def test_frozen_models_stay_as_they_are() -> None:
    def network() -> nn.Module:
        return Tiny().eval().requires_grad_(False)

    received, previous, student = network(), network(), Tiny().train()
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (received, previous)]
    x, y = torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    objective = ContrastiveLoss(
        as_split(received), [as_split(previous)], 5.0, 0.5, TaskLoss(Classification())
    )
    objective(student, x, y, *(teacher(x) for teacher in objective.teachers)).backward()  # type: ignore[no-untyped-call]
    for module, values in zip((received, previous), before, strict=True):
        assert all(torch.equal(v, values[k]) for k, v in module.state_dict().items())
    assert all(p.grad is not None for p in student.parameters())


def test_frozen_models_stay_as_they_are_through_a_round(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(
        Setup(MOON(epochs=2), Tiny, blobs.dataset, SETTINGS["training"], SETTINGS["hardware"]),
        {c.name: c for c in blobs.clients},
    )
    made: list[tuple[nn.Module, Weights]] = []
    build = Client.network

    def network(self: Client, model: Weights) -> nn.Module:
        made.append((build(self, model), model))
        return made[-1][0]

    monkeypatch.setattr(Client, "network", network)
    first = worker.execute(Job(0, 0, "client-0", "train", (worker.network.weights(), 0), None))
    second = worker.execute(Job(1, 0, "client-0", "train", (first.value.model, 1), first.private))
    assert not same(second.value.model, first.value.model)
    assert len(made) == 2, "the received model and the one before"
    for module, model in made:
        assert same(Network(module.requires_grad_(True)).weights(), model)


class Whole(nn.Module):
    """A network that does not say where its representation is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def test_says_what_a_network_must_have(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="features"):
        run(MOON(rounds=2, epochs=1), blobs, Whole, **SETTINGS)
