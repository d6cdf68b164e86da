"""FedLPA: linear systems against explicit Kronecker products, reductions, conjugate gradients,
bytes, bad input."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FedLPA
from ekiden.methods.one_shot.average import Informed
from ekiden.methods.one_shot.blocks.curvature import half
from ekiden.methods.one_shot.fedlpa import conjugate
from tests.methods.merging import layout, matrix, models, semidefinite, trained

SETTINGS: dict[str, Any] = {
    "training": Training(lr=0.01, batch_size=16),
    "hardware": Hardware(threads=1),
}
SIZES = ((4, 2), (2, 2))


def factors(k: int, rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    return [
        (semidefinite(d, 20 * k + d + i, rank), 0.1 * semidefinite(o, 20 * k + 9 + i, rank))
        for i, (d, o) in enumerate(SIZES)
    ]


def posteriors(clients: int, rank: int | None = None) -> list[Informed]:
    return [
        Informed(trained(m, 2 + k), [half(side) for pair in factors(k, rank) for side in pair])
        for k, m in enumerate(models(clients))
    ]


def test_mean_factors_written_out() -> None:
    sent = posteriors(3)
    found = FedLPA(solve="mean-factors").merge(sent, layout())
    for i, (d, o) in enumerate(SIZES):
        a_mean, b_mean, z = np.zeros((d, d)), np.zeros((o, o)), np.zeros((o, d))
        for k in range(3):
            a, b = (side.numpy() + 0.001**0.5 * np.eye(len(side)) for side in factors(k)[i])
            p = (2 + k) / 9
            a_mean, b_mean, z = (
                a_mean + p * a,
                b_mean + p * b,
                z + p * b @ matrix(sent[k].trained.model, i) @ a,
            )
        expected = np.linalg.inv(b_mean) @ z @ np.linalg.inv(a_mean)
        np.testing.assert_allclose(matrix(found, i), expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("solve", ["system", "mean-factors"])
def test_equal_fisher_information_gives_the_average(solve: str) -> None:
    same = [half(side) for pair in factors(0) for side in pair]
    sent = [Informed(trained(m, 2 + k), same) for k, m in enumerate(models(3))]
    found = FedLPA(solve=solve).merge(sent, layout())  # type: ignore[arg-type]
    expected = Average(weighting="samples").aggregate([s.trained for s in sent], layout())
    torch.testing.assert_close(found.params, expected.params, rtol=1e-4, atol=1e-5)


def test_much_damping_gives_the_average() -> None:
    sent = posteriors(3)
    found = FedLPA(damping=1e12).merge(sent, layout())
    expected = Average(weighting="samples").aggregate([s.trained for s in sent], layout())
    torch.testing.assert_close(found.params, expected.params, rtol=1e-4, atol=1e-4)


def test_one_client_keeps_its_model(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    merged, averaged = (
        run(m, alone, Tiny, **SETTINGS) for m in (FedLPA(epochs=2), Average(epochs=2))
    )
    assert merged.weights is not None
    assert averaged.weights is not None
    assert torch.equal(merged.weights.params, averaged.weights.params)


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_unknowns() -> None:
    matrix = semidefinite(5, 3) + torch.eye(5).double()
    target = torch.arange(5.0).double()[:, None]
    asked = []

    def system(x: Tensor) -> Tensor:
        asked.append(1)
        return matrix @ x

    found = conjugate(system, lambda x: x, target, 1000)
    torch.testing.assert_close(matrix @ found, target, rtol=1e-6, atol=1e-6)
    assert len(asked) <= 7
    one = conjugate(system, lambda x: x, target, 1)
    step = (target**2).sum() / (target * (matrix @ target)).sum()
    torch.testing.assert_close(one, step * target)
    perfect = conjugate(system, lambda x: torch.linalg.solve(matrix, x), target, 1)
    torch.testing.assert_close(matrix @ perfect, target)


def test_an_indefinite_system_ends_in_something_defined() -> None:
    target = torch.ones(2, 1).double()
    for sign in (-1.0, 0.0):
        found = conjugate(lambda x, s=sign: s * x, lambda x: x, target, 10)  # type: ignore[misc]
        assert torch.equal(found, torch.zeros(2, 1).double())
    assert torch.equal(conjugate(lambda x: x, lambda x: x, 0 * target, 10), 0 * target)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="1 tensors came with a model, not 4"):
        FedLPA().merge([Informed(trained(models(1)[0], 2), [torch.zeros(3)])], layout())
    with pytest.raises(UserError, match="damping"):
        FedLPA(damping=0)
