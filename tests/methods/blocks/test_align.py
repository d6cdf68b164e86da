"""Barycentres and maps of Gaussians: closed forms for commuting covariances, and what holds for all."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.methods.blocks.mixtures import Gaussian, barycentre, ledoit_wolf, transport


def rotation(dim: int, seed: int = 0) -> Tensor:
    q: Tensor = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(seed)).double())[0]
    return q


def some(dim: int, seed: int) -> Gaussian:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(dim, 2 * dim, generator=draw, dtype=torch.float64)
    return Gaussian(torch.randn(dim, generator=draw, dtype=torch.float64), x @ x.T / dim)


def test_commuting_covariances() -> None:
    """With common eigenvectors the standard deviations are averaged, and the map divides one by the other."""
    q, deviations = rotation(3), np.array([[1.0, 2, 3], [4, 0.5, 1], [2, 2, 2]])
    parts = [
        Gaussian(torch.full((3,), float(i)).double(), q @ torch.tensor(d**2).diag() @ q.T)
        for i, d in enumerate(deviations)
    ]
    found = barycentre(parts, [1, 2, 1])
    mean = np.array([0.25, 0.5, 0.25]) @ deviations
    assert found.mean.tolist() == pytest.approx([1, 1, 1])
    assert torch.allclose(found.covariance, q @ torch.tensor(mean**2).diag() @ q.T, rtol=1e-9)
    to = transport(parts[1], found)
    wanted = q @ torch.tensor(mean / deviations[1]).diag() @ q.T
    assert torch.allclose(to.matrix, wanted, rtol=1e-9)
    assert to.offset.numpy() == pytest.approx(1 - wanted.numpy() @ np.ones(3))


def test_one_dimension() -> None:
    one, two = (Gaussian(torch.tensor([m]).double(), torch.tensor([[v]]).double()) for m, v in ((0, 1), (6, 9)))
    middle = barycentre([one, two], [0.5, 0.5])
    assert (middle.mean.item(), middle.covariance.item()) == pytest.approx((3, 4))
    to = transport(two, middle)
    assert to(torch.tensor([[6.0], [9.0]])).flatten().tolist() == pytest.approx([3, 5])
    assert to.partial(0.5)(torch.tensor([[6.0], [9.0]])).flatten().tolist() == pytest.approx([4.5, 7])
    assert to.partial(0.0)(torch.tensor([[8.0]])).item() == 8


def test_fixed_point_of_covariances_that_do_not_commute() -> None:
    parts, weights = [some(5, seed) for seed in range(3)], [0.2, 0.5, 0.3]
    found = barycentre(parts, weights)
    values, vectors = np.linalg.eigh(found.covariance.numpy())
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    total, maps = np.zeros((5, 5)), np.zeros((5, 5))
    for part, weight in zip(parts, weights, strict=True):
        inner, basis = np.linalg.eigh(root @ part.covariance.numpy() @ root)
        total += weight * basis @ np.diag(np.sqrt(inner)) @ basis.T
        maps += weight * transport(found, part).matrix.numpy()
    assert total == pytest.approx(found.covariance.numpy(), rel=1e-8, abs=1e-9)
    assert maps == pytest.approx(np.eye(5), abs=1e-8), "the maps to the parts average to the identity"


def test_a_map_takes_one_gaussian_to_the_other() -> None:
    source, target = some(4, 1), some(4, 2)
    to, back = transport(source, target), transport(target, source)
    assert torch.allclose(to.matrix @ source.covariance @ to.matrix, target.covariance)
    assert torch.allclose(to(source.mean[None])[0], target.mean)
    z = torch.randn(7, 4, dtype=torch.float64)
    assert torch.allclose(back(to(z)), z)
    assert float(torch.linalg.eigvalsh(to.matrix)[0]) > 0, "the gradient of a convex function"


def test_one_domain_stays() -> None:
    part = some(4, 3)
    found = barycentre([part], [2.0])
    assert torch.allclose(found.covariance, part.covariance)
    assert torch.allclose(transport(part, found).matrix, torch.eye(4).double(), atol=1e-8)


@pytest.mark.parametrize("n", [2, 3, 5, 40])
def test_shrinkage_as_scikit_learn_has_it(n: int) -> None:
    from sklearn.covariance import ledoit_wolf as reference

    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) * torch.arange(1.0, 7) + 3
    wanted, share = reference(x.double().numpy())
    found = ledoit_wolf(x)
    assert (share > 0) == (n > 2)
    assert found.covariance.numpy() == pytest.approx(wanted, rel=1e-8)
    assert found.mean.numpy() == pytest.approx(x.mean(0).numpy(), rel=1e-5)


def test_refuses() -> None:
    part, flat = some(2, 0), Gaussian(torch.zeros(2).double(), torch.tensor([[1.0, 1], [1, 1]]).double())
    for weights in ([1.0], [1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(UserError, match="weight of 0 or more for each domain"):
            barycentre([part, part], weights)
    with pytest.raises(UserError, match="singular: shrink it"):
        barycentre([part, flat], [1.0, 1.0])
    with pytest.raises(UserError, match="singular"):
        transport(flat, part)
    with pytest.raises(UserError, match="equal samples"):
        ledoit_wolf(torch.ones(3, 2))
