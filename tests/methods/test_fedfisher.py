"""FedFisher: Adam against a rewrite with explicit matrices, its limits, reductions, bytes, bad
input."""

from typing import Any

import numpy as np
import pytest
import torch

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FedFisher, FisherMerging
from ekiden.methods.one_shot.average import Informed
from ekiden.methods.one_shot.blocks.curvature import half
from tests.methods.merging import layout, models, semidefinite, trained

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}
SIZES = ((4, 2), (2, 2))
"""(inputs, outputs) of both layers"""


def fishers(clients: int) -> list[np.ndarray]:
    """(16, 16) for each client in the order of the parameters: kron for both layers, zero for the
    normalisation."""
    # A row of the first layer is its three weights and its bias, which lies six places on, or seven
    # for the second.
    order = [0, 1, 2, 6, 3, 4, 5, 7]
    found = []
    for k in range(clients):
        full = np.zeros((16, 16))
        (a, b), (c, d) = factors(k)
        full[np.ix_(order, order)] = np.kron(b, a)
        full[12:, 12:] = np.kron(d, c)
        found.append(full)
    return found


def factors(k: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        (semidefinite(d, 20 * k + d + i), 0.1 * semidefinite(o, 20 * k + 9 + i))
        for i, (d, o) in enumerate(SIZES)
    ]


def sent_kfac(clients: int) -> list[Informed]:
    return [
        Informed(trained(m, 2 + k), [half(side) for pair in factors(k) for side in pair])
        for k, m in enumerate(models(clients))
    ]


def test_diagonal_ends_at_fisher_merging() -> None:
    draw = torch.Generator().manual_seed(2)
    sent = [Informed(trained(m, 4), [0.1 + torch.rand(16, generator=draw)]) for m in models(3)]
    found = FedFisher(curvature="diagonal").merge(sent, layout())
    informed = [Informed(s.trained, s.curvature) for s in sent]
    closed = FisherMerging().merge(informed, layout())
    torch.testing.assert_close(found.params, closed.params, rtol=1e-3, atol=1e-3)


def test_kfac_ends_at_the_minimum() -> None:
    sent = sent_kfac(3)
    found = FedFisher().merge(sent, layout()).params.double().numpy()
    n, full = np.array([2.0, 3.0, 4.0]), fishers(3)
    gradient = sum(
        n[k] / 9 * full[k] @ (found - sent[k].trained.model.params.double().numpy())
        for k in range(3)
    )
    start = (
        Average(weighting="samples")
        .aggregate([s.trained for s in sent], layout())
        .params.double()
        .numpy()
    )
    before = sum(
        n[k] / 9 * full[k] @ (start - sent[k].trained.model.params.double().numpy())
        for k in range(3)
    )
    assert np.abs(gradient).max() < 1e-2 * np.abs(before).max()


@pytest.mark.parametrize("form", ["kfac", "diagonal"])
def test_equal_fisher_information_gives_the_average(form: str) -> None:
    same = (
        [half(side) for pair in factors(0) for side in pair] if form == "kfac" else [torch.rand(16)]
    )
    sent = [Informed(trained(m, 2 + k), same) for k, m in enumerate(models(3))]
    found = FedFisher(curvature=form, iterations=50).merge(sent, layout())  # type: ignore[arg-type]
    expected = Average(weighting="samples").aggregate([s.trained for s in sent], layout())
    torch.testing.assert_close(found.params, expected.params, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["kfac", "diagonal"])
def test_one_client_keeps_its_model(form: str, blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    method = FedFisher(epochs=2, curvature=form, iterations=20)  # type: ignore[arg-type]
    merged, averaged = (run(m, alone, Tiny, **SETTINGS) for m in (method, Average(epochs=2)))
    assert merged.weights is not None
    assert averaged.weights is not None
    assert torch.equal(merged.weights.params, averaged.weights.params)


def test_what_does_not_fit_is_refused() -> None:
    (model,) = models(1)
    with pytest.raises(UserError, match="1 tensors came with a model, not 4"):
        FedFisher().merge([Informed(trained(model, 2), [torch.zeros(3)])], layout())
    with pytest.raises(UserError, match="do not fit a symmetric matrix"):
        FedFisher().merge([Informed(trained(model, 2), [torch.zeros(3)] * 4)], layout())
    with pytest.raises(UserError, match="does not have the model"):
        FedFisher(curvature="diagonal").merge(
            [Informed(trained(model, 2), [torch.zeros(3)])], layout()
        )
    with pytest.raises(UserError, match="2 tensors came with a model, not 1"):
        FedFisher(curvature="diagonal").merge(
            [Informed(trained(model, 2), [torch.zeros(16)] * 2)], layout()
        )
