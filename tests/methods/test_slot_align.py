"""SLOT-Align: the barycentre, and a whole run written again from the paper's equations, by NumPy on
the features."""

from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import sqrtm
from sklearn.covariance import ledoit_wolf as shrunk
from torch import nn

from ekiden import FederatedData, Hardware, UserError, federate, run
from ekiden.core.engine.setup import as_module
from ekiden.core.models.split import as_split
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram, SLOTAlign
from ekiden.methods.exact.slot_align import Alignment, Gaussian, ledoit_wolf
from ekiden.runs.result import Result

Array = NDArray[np.float64]
CLASSES = 3


def data() -> FederatedData:
    """Three silos whose inputs and labels differ."""
    draw, silos = torch.Generator().manual_seed(3), []
    for n, shift, labels in ((40, 0.0, (0, 1, 2)), (30, 3.0, (0, 1)), (25, -1.0, (2, 1))):
        y = torch.tensor(labels)[torch.arange(n) % len(labels)]
        x = torch.randn(n, 4, generator=draw) @ torch.randn(4, 4, generator=draw) + shift
        silos.append((x + torch.eye(3, 4)[y] * 2, y))
    return federate(silos, test=(silos[0][0][:6], silos[0][1][:6]), val_fraction=0.0)


def own_networks(result: Result) -> list[nn.Module]:
    """Return each client's network."""
    return [as_module(result.build.own, weights) for weights in result.personal]


def gaussian(n: int, mean: float, variances: list[float]) -> Gaussian:
    """A client whose features are independent."""
    d = len(variances)
    covariance, none = (
        torch.tensor(variances).double().diag(),
        torch.zeros(1, d, dtype=torch.float64),
    )
    mean_ = torch.full((d,), mean, dtype=torch.float64)
    return Gaussian(
        n, mean_, n * covariance, covariance, torch.tensor([float(n)], dtype=torch.float64), none
    )


def test_the_barycentre_by_hand() -> None:
    """Without covariances it has the mean standard deviation: (3·1 + 1·5)/4 = 2 and (3·2 + 1·2)/4 =
    2."""
    found = Alignment.of([gaussian(30, 0, [1, 4]), gaussian(10, 4, [25, 4])])
    assert found.mean.tolist() == [1, 1]
    assert torch.allclose(found.maps[0], torch.tensor([2.0, 1]).double().diag(), atol=1e-6)
    assert torch.allclose(found.maps[1], torch.tensor([0.4, 1]).double().diag(), atol=1e-6)


def plain(
    parts: list[tuple[Array, NDArray[np.int64]]], tau: float, head: str, alpha: float
) -> list[Array]:
    """Berardini et al. 2026: the scores of each client's samples, up to a common factor and
    constant."""
    sizes = np.array([len(phi) for phi, _ in parts])
    share = sizes / sizes.sum()
    means = [phi.mean(0) for phi, _ in parts]
    inside = [shrunk(phi)[0] for phi, _ in parts]
    middle = sum(w * s for w, s in zip(share, inside, strict=True))
    for _ in range(300):  # the fixed point as printed, not the steps of the library
        root = sqrtm(middle).real
        middle = sum(w * sqrtm(root @ s @ root).real for w, s in zip(share, inside, strict=True))
    centre, moved = share @ np.stack(means), []
    for (phi, _), mu, s in zip(parts, means, inside, strict=True):
        root = sqrtm(s).real
        inverse = np.linalg.inv(root)
        a = inverse @ sqrtm(root @ middle @ root).real @ inverse
        moved.append((1 - tau) * phi + tau * (centre + (phi - mu) @ a.T))
    z, y = np.concatenate(moved), np.concatenate([y for _, y in parts])
    z = (z - z.mean(0)) / z.std(0)
    by_class = np.stack([z[y == c].mean(0) for c in range(CLASSES)])
    apart = z - by_class[y] if head == "lda" else z
    covariance = apart.T @ apart / (len(z) - (CLASSES if head == "lda" else 1))
    d = len(covariance)
    weight = np.linalg.solve(
        (1 - alpha) * covariance + alpha * np.trace(covariance) / d * np.eye(d), by_class.T
    )
    bias = np.log(np.bincount(y) / len(y)) - (weight * by_class.T).sum(0) / 2
    return np.split(z @ weight + bias, np.cumsum(sizes)[:-1])


@pytest.mark.parametrize(("head", "tau"), [("lda", 0.4), ("cgs", 1.0)])
def test_a_run_is_that_of_the_papers_equations(head: Literal["lda", "cgs"], tau: float) -> None:
    silos = data()
    result = run(
        SLOTAlign(width=5, head=head, tau=tau), silos, Tiny, hardware=Hardware(threads=1), seed=0
    )
    networks = [as_split(network) for network in own_networks(result)]
    with torch.no_grad():
        features = [net.features(c.train.x) for net, c in zip(networks, silos.clients, strict=True)]
        found = [
            net.head(phi).double().numpy() for net, phi in zip(networks, features, strict=True)
        ]
    labels = [c.train.y.numpy() for c in silos.clients]
    parts = [(phi.double().numpy(), y) for phi, y in zip(features, labels, strict=True)]
    scores = np.concatenate(plain(parts, tau, head, 0.05))
    factor = (np.concatenate(found) * scores).sum() / (scores**2).sum()
    assert factor > 0
    np.testing.assert_allclose(
        np.concatenate(found), factor * scores, atol=1e-3 * factor * np.abs(scores).max()
    )


def test_without_maps_it_is_fedgram() -> None:
    """τ = 0 gives every client the classifier of FedGram."""
    silos, hardware = data(), Hardware(threads=1)
    gram = run(FedGram(width=5, head="lda"), silos, Tiny, hardware=hardware, seed=0)
    common = as_module(gram.build.own, gram.weights or gram.personal[0])
    for network in own_networks(
        run(SLOTAlign(width=5, tau=0.0), silos, Tiny, hardware=hardware, seed=0)
    ):
        with torch.no_grad():
            for client in silos.clients:
                assert torch.allclose(
                    network(client.train.x), common(client.train.x), rtol=1e-4, atol=1e-4
                )


def test_maps_undo_an_affine_shift_of_a_client() -> None:
    """Of two clients with the same kind of samples one has them stretched and moved: with τ = 1
    this is undone."""
    draw = torch.Generator().manual_seed(4)
    y = torch.arange(600) % 2
    x = torch.tensor([[-2.0, 0, 0, 0], [2.0, 0, 0, 0]])[y] + torch.randn(600, 4, generator=draw)
    x = x * torch.tensor([1.0, 2, 0.5, 1.5])
    moved = x[300:] * torch.tensor([0.3, 1, 2, 1]) + torch.tensor([6.0, -2, 0, 1])
    clients = [(x[:300], y[:300]), (moved, y[300:])]
    silos = federate(
        clients,
        test=(torch.cat([x[:50], moved[:50]]), torch.cat([y[:50], y[300:350]])),
        val_fraction=0.0,
    )
    right = []
    for tau in (0.0, 1.0):
        result = run(SLOTAlign(width=8, tau=tau), silos, Tiny, hardware=Hardware(threads=1), seed=0)
        with torch.no_grad():
            pairs = zip(own_networks(result), silos.clients, strict=True)
            answers = [
                network(client.train.x).argmax(1) == client.train.y for network, client in pairs
            ]
        right.append(float(torch.cat(answers).float().mean()))
    assert right[1] > right[0] + 0.05
    assert right[1] > 0.95


def test_ledoit_wolf_is_that_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    for n, d in ((30, 5), (4, 9), (200, 3)):
        phi = torch.randn(n, d, generator=draw) * torch.arange(1, d + 1) + 3
        assert ledoit_wolf(phi) == pytest.approx(shrunk(phi.double().numpy())[1], rel=1e-9)
    assert ledoit_wolf(torch.ones(3, 2)) == 1


def test_a_client_whose_samples_are_equal_is_refused() -> None:
    silos = federate(
        [(torch.rand(9, 4), torch.arange(9) % 3), (torch.ones(4, 4), torch.zeros(4).long())],
        test=(torch.rand(3, 4), torch.arange(3)),
        val_fraction=0.0,
    )
    with pytest.raises(UserError, match="all have the same features"):
        run(SLOTAlign(width=5), silos, Tiny, hardware=Hardware(threads=1))
