"""FedPFT: mixtures against numpy, draws against their moments, heads against a plain loop, and
bytes."""

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ekiden import FederatedData, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedPFT
from ekiden.methods.blocks.symmetric import symmetric
from ekiden.methods.one_shot import fedpft as gaussians
from ekiden.methods.one_shot.fedpft import Covariance, JointMixtures, Mixtures, fit
from tests.methods.rounds import weights
from tests.methods.test_fedavg import SETTINGS

KINDS: tuple[Covariance, ...] = ("spherical", "diagonal", "full")


def some(n: int = 60, dim: int = 3) -> tuple[Tensor, Tensor]:
    """Correlated features of two classes out of three."""
    draw = Generator().manual_seed(0)
    mix = torch.randn(dim, dim, generator=draw)
    return torch.randn(n, dim, generator=draw) @ mix + 5, torch.arange(n) % 2 * 2


@pytest.mark.parametrize("kind", KINDS)
def test_one_gaussian_is_mean_and_covariance(kind: Covariance) -> None:
    x, y = some()
    found = fit(x, y, 3, 1, kind, seed=0, dtype=torch.float32)
    assert found.weights.tolist() == [[1], [0], [1]]
    for c in (0, 2):
        own = x[y == c].double().numpy()
        centred = own - own.mean(0)
        covariance = centred.T @ centred / len(own) + 1e-6 * np.eye(3)
        assert found.means[c, 0].numpy() == pytest.approx(own.mean(0), rel=1e-6)
        packed = {
            "spherical": [np.trace(covariance) / 3],
            "diagonal": np.diag(covariance),
            "full": [covariance[i, j] for i in range(3) for j in range(i, 3)],
        }
        assert found.covariances[c, 0].numpy() == pytest.approx(packed[kind], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_clusters_far_apart_are_found(kind: Covariance) -> None:
    """EM then has one fixed point near each cluster: its share, mean and variance."""
    draw = Generator().manual_seed(1)
    sizes, centres = (30, 10, 20), torch.tensor([[0.0, 0], [50, 0], [0, 50]])
    parts = [c + torch.randn(n, 2, generator=draw) for n, c in zip(sizes, centres, strict=True)]
    found = fit(
        torch.cat(parts),
        torch.zeros(60, dtype=torch.int64),
        1,
        3,
        kind,
        seed=0,
        dtype=torch.float32,
    )
    for n, part in zip(sizes, parts, strict=True):
        own = part.double().numpy()
        (g,) = [g for g in range(3) if np.abs(found.means[0, g].numpy() - own.mean(0)).max() < 1e-3]
        assert float(found.weights[0, g]) == pytest.approx(n / 60, rel=1e-5)
        variances = own.var(0) + 1e-6
        diagonal = {"spherical": [variances.mean()], "diagonal": variances, "full": variances}[kind]
        seen = found.covariances[0, g][[0, 2]] if kind == "full" else found.covariances[0, g]
        assert seen.numpy() == pytest.approx(np.array(diagonal), rel=1e-4)


def test_em_stands_still_where_a_plain_step_does() -> None:
    x, _ = some(n=200, dim=2)
    x = torch.cat([x, 0.7 * x + 3])
    found = fit(x, torch.zeros(400, dtype=torch.int64), 1, 2, "full", seed=3, dtype=torch.float32)
    points, pi, mu = (
        x.double().numpy(),
        found.weights[0].double().numpy(),
        found.means[0].double().numpy(),
    )
    sigma = symmetric(found.covariances[0].double()).numpy()
    density = np.zeros((400, 2))
    for g in range(2):
        apart = points - mu[g]
        power = np.einsum("ni,ij,nj->n", apart, np.linalg.inv(sigma[g]), apart)
        density[:, g] = pi[g] * np.exp(-power / 2) / np.sqrt(np.linalg.det(2 * np.pi * sigma[g]))
    share = density / density.sum(1, keepdims=True)
    assert share.mean(0) == pytest.approx(pi, abs=0.02)
    assert (share.T @ points) / share.sum(0)[:, None] == pytest.approx(mu, abs=0.1)


def test_few_samples() -> None:
    x, y = torch.tensor([[1.0, 2], [3, 4], [5, 6]]), torch.tensor([0, 2, 2])
    found = fit(x, y, 3, 5, "diagonal", seed=0, dtype=torch.float32)
    assert found.weights[0].tolist() == [1, 0, 0, 0, 0]
    assert found.means[0, 0].tolist() == [1, 2]
    assert found.covariances[0, 0].tolist() == pytest.approx([1e-6, 1e-6])
    assert not found.weights[1].any()
    assert sorted(found.means[2, :2].round(decimals=3).tolist()) == [[3, 4], [5, 6]]
    assert found.weights[2].tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_alike_samples_do_not_break_it() -> None:
    found = fit(
        torch.ones(8, 2),
        torch.zeros(8, dtype=torch.int64),
        1,
        3,
        "full",
        seed=0,
        dtype=torch.float32,
    )
    x, _ = found.draw(torch.tensor([100]), 1, 2, Generator().manual_seed(0))
    assert float((x - 1).abs().max()) < 0.01


def test_square_roots() -> None:
    matrix = torch.tensor([[1.0, 2, 4], [2, 3, 5], [4, 5, 6]])
    square = matrix @ matrix
    assert torch.allclose(
        gaussians.square_roots(square.double()) @ gaussians.square_roots(square.double()),
        square.double(),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_moments_of_the_mixture(kind: Covariance) -> None:
    pi, mu = np.array([0.25, 0.75]), np.array([[0.0, 0], [4, -2]])
    sigma = {
        "spherical": [np.eye(2) * 2, np.eye(2)],
        "diagonal": [np.diag([1.0, 3]), np.diag([2.0, 0.5])],
        "full": [np.array([[2, 1.0], [1, 1]]), np.array([[1, -0.5], [-0.5, 2]])],
    }[kind]
    rows = {
        "spherical": lambda s: [s[0, 0]],
        "diagonal": np.diag,
        "full": lambda s: [s[0, 0], s[1, 0], s[1, 1]],
    }[kind]
    spread = torch.tensor(np.array([[rows(s) for s in sigma]]))  # type: ignore[operator]
    mixture = Mixtures(torch.tensor(pi[None]), torch.tensor(mu[None]), spread)
    x, y = mixture.draw(torch.tensor([200_000]), 1, 2, Generator().manual_seed(0))
    mean = pi @ mu
    covariance = sum(
        p * (s + np.outer(m - mean, m - mean)) for p, s, m in zip(pi, sigma, mu, strict=True)
    )
    assert x.shape == (200_000, 2)
    assert not y.any()
    assert x.mean(0).numpy() == pytest.approx(mean, abs=0.03)
    assert np.cov(x.numpy().T) == pytest.approx(covariance, abs=0.05)


def test_draws_are_as_many_as_there_were_samples() -> None:
    mixture = Mixtures(
        torch.ones(3, 1), torch.arange(3.0)[:, None, None].repeat(1, 1, 2), torch.zeros(3, 1, 1)
    )
    x, y = mixture.draw(torch.tensor([2, 0, 3]), 3, 2, Generator().manual_seed(0))
    assert y.tolist() == [0, 0, 2, 2, 2]
    assert x.tolist() == [[0, 0], [0, 0], [2, 2], [2, 2], [2, 2]]


@pytest.mark.parametrize(
    ("weights", "means", "spread", "counts"),
    [
        ((2, 1), (2, 1, 3), (2, 1, 4), (1, 1)),  # no such covariance
        ((2, 1), (2, 1, 4), (2, 1, 1), (1, 1)),  # other features
        ((3, 1), (3, 1, 3), (3, 1, 1), (1, 1)),  # other classes
        ((3, 1), (3, 1, 3), (3, 1, 1), (1, 1, 1)),  # other classes, counts too
        ((2,), (2, 3), (2, 1), (1, 1)),  # no mixtures
        ((), (), (), (1, 1)),
    ],
)
def test_refuses_mixtures_of_another_shape(
    weights: Any, means: Any, spread: Any, counts: Any
) -> None:
    mixture = Mixtures(torch.ones(weights), torch.ones(means), torch.ones(spread))
    with pytest.raises(UserError, match="use the same model at every client"):
        mixture.draw(torch.tensor(counts), 2, 3, Generator())


def test_refuses_what_is_no_mixture() -> None:
    good = Mixtures(torch.ones(1, 1), torch.ones(1, 1, 3), torch.ones(1, 1, 3))
    for bad in (
        good._replace(weights=torch.zeros(1, 1)),
        good._replace(covariances=-torch.ones(1, 1, 3)),
    ):
        with pytest.raises(UserError, match="refused"):
            bad.draw(torch.tensor([1]), 1, 3, Generator())
    with pytest.raises(UserError, match="refused"):
        good.draw(torch.tensor([-1]), 1, 3, Generator())


def test_refuses_what_16_bits_cannot_hold() -> None:
    x, y = torch.full((4, 2), 1e5), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(UserError, match="use half=False"):
        fit(x, y, 1, 1, "diagonal", seed=0, dtype=torch.float16)


class Points:
    """Stands for a client whose features are its samples."""

    name, classes = "somebody", 2

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def batches(self, *, passes: int) -> Iterator[tuple[Tensor, Tensor]]:
        yield self.x, self.y

    def probe(self, x: Tensor, model: object) -> tuple[Tensor, Tensor]:
        return x, x

    def class_counts(self) -> Tensor:
        return torch.bincount(self.y, minlength=2)

    def seed(self, *parts: object) -> int:
        return 5

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(5)


def points(*of: tuple[float, int]) -> Client:
    x = torch.tensor([[value] for value, _ in of])
    return cast(Client, Points(x, torch.tensor([label for _, label in of])))


def test_a_chain_adds_up() -> None:
    """Variances are next to 0, so the second client draws the first one's features."""
    method = FedPFT(topology="chain", mixtures=1, half=False)
    first = method.join(points((1.0, 0), (1.0, 0), (7.0, 1)), weights(0.0), None)
    assert first.counts.tolist() == [2, 1]
    assert first.mixtures.means.flatten().tolist() == pytest.approx([1, 7])
    second = method.join(points((4.0, 0)), weights(0.0), first)
    assert second.counts.tolist() == [3, 1]
    assert second.mixtures.means.flatten().tolist() == pytest.approx([2, 7], abs=0.01)
    assert float(second.mixtures.covariances[0]) == pytest.approx(2, abs=0.02), "of 1, 1, 4"


def test_with_several_mixtures_a_chain_keeps_the_places_of_all() -> None:
    method = FedPFT(topology="chain", mixtures=2, half=False)
    first = method.join(points((1.0, 0), (1.0, 0)), weights(0.0), None)
    second = method.join(points((4.0, 0), (4.0, 0), (4.0, 0)), weights(0.0), first)
    assert sorted(second.mixtures.means[0].flatten().tolist()) == pytest.approx([1, 4], abs=0.01)
    assert sorted(second.mixtures.weights[0].tolist()) == pytest.approx([0.4, 0.6], abs=1e-3)


def test_head_by_a_plain_loop() -> None:
    x, y = some(50, 8)
    method = FedPFT(head_epochs=3, head_lr=0.05, head_weight_decay=0.1, head_batch_size=20)
    network = Network(Tiny())
    start = network.weights()
    found = method.with_head(start, network.module, network.head, x, y, Generator().manual_seed(2))
    draw, seen, wanted = Generator().manual_seed(2), 0, network.head.of(start).params.clone()
    mean, square = torch.zeros(27), torch.zeros(27)
    for _ in range(3):
        order = torch.randperm(50, generator=draw)
        for i in range(0, 50, 20):
            rows, seen = order[i : i + 20], seen + 1
            surplus = (x[rows] @ wanted[:24].view(3, 8).T + wanted[24:]).softmax(1) - F.one_hot(
                y[rows], 3
            )
            gradient = torch.cat([(surplus.T @ x[rows]).flatten(), surplus.sum(0)]) / len(rows)
            wanted = wanted * (1 - 0.05 * 0.1)  # AdamW
            mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
            wanted = wanted - 0.05 * mean / (1 - 0.9**seen) / (
                (square / (1 - 0.999**seen)).sqrt() + 1e-8
            )
    assert torch.allclose(network.head.of(found).params, wanted, atol=1e-5)
    rest = ~network.head
    assert torch.equal(rest.of(found).params, rest.of(start).params), "the extractor stays"
    assert torch.equal(found.buffers, start.buffers)


@pytest.mark.parametrize("form", ["star", "chain"])
@pytest.mark.parametrize(
    ("kind", "half", "numbers"),
    [("spherical", True, 1), ("diagonal", False, 8), ("full", True, 36)],
)
def test_bytes(blobs: FederatedData, form: Any, kind: Covariance, half: bool, numbers: int) -> None:
    method = FedPFT(topology=form, covariance=kind, half=half, mixtures=2, head_epochs=1)
    result = run(method, blobs, Tiny, **SETTINGS)
    each = 3 * 8 + (2 if half else 4) * 3 * 2 * (1 + 8 + numbers)
    assert result.bytes == (4 if form == "star" else 3) * each
    assert result.bytes == method.cost(4, Size.of(Network(Tiny()), (4,)))


@pytest.mark.parametrize("form", ["star", "chain"])
def test_learns_what_the_initial_features_tell(blobs: FederatedData, form: Any) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        network = nn.Sequential()
        network.features = nn.Sequential(nn.Linear(4, 40), nn.ReLU())
        network.head = nn.Linear(40, 3)
        return network

    result = run(
        FedPFT(topology=form, mixtures=2, order="random" if form == "chain" else "given"),
        blobs,
        wide,
        **SETTINGS,
    )
    assert result.metrics[-1]["accuracy"] > 0.75
    assert result.metrics[-1]["backward"] == 0
    samples = sum(len(c.train) for c in blobs.clients)
    assert result.metrics[-1]["forward"] == samples, "each sample once"


def test_a_lonely_client_trains_on_its_own_features() -> None:
    one, two = (FedPFT(topology="chain", mixtures=m) for m in (1, 9))
    x, y = one.joined(points((1.0, 0), (3.0, 1)), weights(0.0), None)
    assert x.tolist() == [[1], [3]]
    assert y.tolist() == [0, 1]
    assert (
        one.cost(1, Size.of(Network(Tiny()), (4,)))
        == two.cost(1, Size.of(Network(Tiny()), (4,)))
        == 0
    )


def test_received_mixtures_must_fit() -> None:
    wrong = JointMixtures(
        torch.tensor([1, 1]), Mixtures(torch.ones(2, 1), torch.ones(2, 1, 5), torch.ones(2, 1, 5))
    )
    with pytest.raises(UserError, match="2 classes and 1 features"):
        FedPFT(topology="chain").join(points((1.0, 0)), weights(0.0), wrong)


def test_refuses_features_that_are_no_numbers() -> None:
    with pytest.raises(UserError, match="somebody: the extractor gives NaN"):
        FedPFT().describe(points((float("nan"), 0)), weights(0.0))


@pytest.mark.parametrize(
    "changes", [{"mixtures": 0}, {"head_lr": 0}, {"covariance": "tied"}, {"order": "random"}]
)
def test_refuses_what_does_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(changes))):
        FedPFT(**changes)


def test_a_network_that_is_given_stays_as_it_is(blobs: FederatedData) -> None:
    given = Tiny()
    with torch.no_grad():
        given.get_submodule("features").get_submodule("0").get_parameter("weight").copy_(
            torch.arange(32).view(8, 4) / 9
        )
    result = run(FedPFT(mixtures=1, head_epochs=2), blobs, given, **SETTINGS)
    network = Network(given)
    assert result.weights is not None
    rest = ~network.head
    assert torch.equal(rest.of(result.weights).params, rest.of(network.weights()).params)
    assert not torch.equal(
        network.head.of(result.weights).params, network.head.of(network.weights()).params
    )
