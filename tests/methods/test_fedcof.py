"""FedCOF: its estimate of covariances, what clients send, what is refused. A rewrite lies in
`tests/rewrites`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ekiden import Hardware, UserError, federate, run
from ekiden.core.tasks import Classification
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedCOF
from ekiden.methods.exact.fedcof import ClassMeans, MeanScatter


def told(phi: Tensor, y: Tensor, classes: int) -> ClassMeans:
    """Return what a client sends."""
    counts = torch.bincount(y, minlength=classes)
    sums = torch.zeros(classes, phi.shape[1]).index_add(0, y, phi)
    return ClassMeans(counts[None], (sums / counts.clamp(min=1)[:, None])[None])


def test_the_scatter_by_hand() -> None:
    """Class 0 has means 1 of two samples and 4 of one: their mean is 2, Σ̂ = 2·1 + 4 = 6, and N - 1
    = 2."""
    parts = [
        ClassMeans(torch.tensor([[2, 0]]), torch.tensor([[[1.0], [0.0]]])),
        ClassMeans(torch.tensor([[1, 3]]), torch.tensor([[[4.0], [7.0]]])),
    ]
    scatter = MeanScatter.of(parts)
    assert scatter.counts.tolist() == [3, 3]
    assert scatter.sums.tolist() == [[6, 21]]
    assert float(scatter.rows @ scatter.rows.T) == pytest.approx(2 * 6), (
        "class 1 has one mean, so no scatter"
    )


def test_the_estimate_is_without_bias() -> None:
    """Over 150 draws of six clients with different numbers of samples it is the covariance, to
    three errors."""
    draw = torch.Generator().manual_seed(2)
    root = torch.tensor([[2.0, 0.0], [1.5, 0.5]])
    cuts, found = (3, 4, 14, 16, 25), []
    for _ in range(150):
        phi = torch.randn(30, 2, generator=draw) @ root.T + 5
        parts = [
            told(part, torch.zeros(len(part), dtype=torch.int64), 1)
            for part in torch.tensor_split(phi, cuts)
        ]
        rows = MeanScatter.of(parts).rows
        found.append(rows @ rows.T / 29)
    each = torch.stack(found)
    error = each.std(0) / 150**0.5
    assert ((each.mean(0) - (root @ root.T)).abs() < 3 * error).all()
    assert (error < 0.4).all()


def test_it_learns_from_means_and_cannot_from_one_client() -> None:
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(240) % 3
    x = 2 * torch.eye(4)[y] + torch.randn(240, 4, generator=draw)
    held = list(zip(torch.tensor_split(x, 8), torch.tensor_split(y, 8), strict=True))
    method = FedCOF(width=12)
    for one, clients in ((method, held), (replace(method, groups=4), [(x, y)])):
        data = federate(clients, test=(x[::3], y[::3]), val_fraction=0.0)
        result = run(one, data, Tiny, hardware=Hardware(threads=1), seed=0)
        assert result.accuracy is not None
        assert result.accuracy > 0.6
    with pytest.raises(UserError, match="give more clients, or more groups"):
        run(
            method,
            federate([(x, y)], test=(x, y), val_fraction=0.0),
            Tiny,
            hardware=Hardware(threads=1),
        )


def test_groups_keep_the_least_number_of_samples() -> None:
    """With `min_active` = 4 no mean has fewer samples than 4, unless there are no more groups to
    join."""
    draw = torch.Generator().manual_seed(1)
    y = torch.arange(60) % 3
    x = 2 * torch.eye(4)[y] + torch.randn(60, 4, generator=draw)
    seen: list[ClassMeans] = []
    real = MeanScatter.of

    def noted(told: list[ClassMeans]) -> MeanScatter:
        seen.extend(told)
        return real(told)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeanScatter, "of", noted)
        data = federate([(x[:40], y[:40]), (x[40:], y[40:])], test=(x, y), val_fraction=0.0)
        run(
            FedCOF(width=8, groups=9, min_active=4),
            data,
            Tiny,
            hardware=Hardware(threads=1),
            seed=0,
        )
    counts = torch.cat([one.counts for one in seen])
    assert counts[counts > 0].min() >= 4
    assert counts.sum() == 60
    assert (counts > 0).sum() == 3 * (3 + 1), (
        "13 or 14 samples of a class make three groups, 6 or 7 one"
    )


def test_what_is_refused() -> None:
    good = told(torch.rand(9, 4), torch.arange(9) % 3, 3)
    assert good.checked(1, 3, 4) is good
    for wrong in (
        good._replace(counts=-good.counts),
        good._replace(means=good.means * float("nan")),
        good._replace(means=good.means * 1e6),
        good._replace(means=good.means[..., :3]),
        good._replace(means=good.means.double()),
    ):
        with pytest.raises(UserError, match="class means of"):
            wrong.checked(1, 3, 4)
    still = MeanScatter.of([told(torch.ones(3, 4), torch.arange(3), 3)] * 2)
    with pytest.raises(UserError, match="finds no variance"):
        still.head(1.0, Classification())
