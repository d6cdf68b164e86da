"""GLAM: exact numbers of the loss and its gradient."""

from math import log

import pytest
import torch
from torch import Tensor

from ekiden.core.tasks import Classification
from ekiden.methods.blocks.glam import GLAM, aligned
from ekiden.methods.gossip.ua_pdfl import relative_entropy

Z, GLOBAL, PREVIOUS = (
    torch.tensor(v, dtype=torch.float64)
    for v in ([[2, 1, 0], [0, 1, -1]], [[1, 1, 0], [1, 0, 0]], [[0, 2, 0], [0, 0, 1]])
)
Y = torch.tensor([0, 1])
CE, AG, AP = 0.40760596444438, 1.27412776706710, 0.77129938654167


def loss(z: Tensor, tau: float, rho: float, previous: Tensor = PREVIOUS) -> tuple[float, Tensor]:
    z = z.clone().requires_grad_()
    value = aligned(z, GLOBAL, previous, Y, tau, rho)
    value.backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    return value.item(), z.grad


def test_terms() -> None:
    ce, _ = loss(Z, 0, 0)
    assert ce == pytest.approx(CE, abs=1e-12)
    assert loss(Z, 0, 1)[0] - ce == pytest.approx(AG, abs=1e-12)
    assert loss(Z, 1, 0)[0] - ce == pytest.approx(AP, abs=1e-12)


def test_alignment_with_the_previous_model_is_half_of_both_divergences() -> None:
    there, back = (
        [float(relative_entropy(p, q)) for p, q in zip(a.softmax(1), b.softmax(1), strict=True)]
        for a, b in ((Z, PREVIOUS), (PREVIOUS, Z))
    )
    assert there == pytest.approx([0.91769224, 0.62901856], abs=1e-8)
    assert back == pytest.approx([0.74203328, 0.79645346], abs=1e-8)
    assert sum(there + back) / 4 == pytest.approx(AP, abs=1e-12)


@pytest.mark.parametrize(
    ("tau", "rho", "value", "gradient"),
    [
        (
            1,
            1,
            2.45303311805315,
            [[0.24581361, -0.22960613, -0.01620748], [-0.06481757, 0.25821490, -0.19339732]],
        ),
        (
            0.5,
            0.1,
            0.92066843442193,
            [[-0.00936739, -0.01810288, 0.02747027], [0.09505101, -0.04524219, -0.04980882]],
        ),
    ],
)
def test_loss_and_gradient(
    tau: float, rho: float, value: float, gradient: list[list[float]]
) -> None:
    found, grad = loss(Z, tau, rho)
    assert found == pytest.approx(value, abs=1e-12)
    torch.testing.assert_close(grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(grad.sum(1), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_gradient_of_the_alignment_with_the_previous_model() -> None:
    alone = loss(Z, 1, 0)[1] - loss(Z, 0, 0)[1]
    expected = [[0.29173206, -0.26317520, -0.02855685], [-0.02148760, 0.19894472, -0.17745712]]
    torch.testing.assert_close(
        alone, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8
    )


def test_global_term_has_its_floor_at_the_global_model() -> None:
    value, _ = loss(GLOBAL, 0, 1)
    assert value - loss(GLOBAL, 0, 0)[0] == pytest.approx(0.99634251836072, abs=1e-12)


def test_at_the_previous_model_nothing_is_added() -> None:
    value, grad = loss(Z, 1, 0, previous=Z)
    plain, plain_grad = loss(Z, 0, 0)
    assert value == plain
    assert torch.equal(grad, plain_grad)


def test_two_classes() -> None:
    z = torch.tensor([[log(9), 0.0]], dtype=torch.float64)
    q = torch.zeros(1, 2, dtype=torch.float64)
    y = torch.tensor([0])
    assert float(aligned(z, q, q, y, 1, 0) - aligned(z, q, q, y, 0, 0)) == pytest.approx(
        0.2 * log(9), abs=1e-12
    )


def test_large_logits_stay_finite() -> None:
    z = torch.tensor([[1e4, 0.0], [-1e4, 0.0]])
    assert torch.isfinite(aligned(z, -z, -z, torch.tensor([1, 0]), 1.0, 1.0))


def test_frozen_networks_get_no_gradient() -> None:
    student, reference, previous = (torch.nn.Linear(3, 2) for _ in range(3))
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    for objective in (
        GLAM(reference, previous, 1.0, 1.0, Classification()),
        GLAM(None, previous, 1.0, 0.0, Classification()),
    ):
        with torch.no_grad():
            answers = [teacher(x) for teacher in objective.teachers]
        loss = objective(student, x, y, *answers)
        said = answers[0] if objective.reference else None
        assert loss == aligned(student(x), said, answers[-1], y, objective.tau, objective.rho)
        loss.backward()  # type: ignore[no-untyped-call]
    assert student.weight.grad is not None
    assert reference.weight.grad is None
    assert previous.weight.grad is None
