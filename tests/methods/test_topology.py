"""Graphs and mixing matrices: exact weights, exact spectra, and what is refused."""

from math import cos, log2, pi

import pytest
import torch
from torch import Generator, Tensor

from ekiden.core.base.errors import UserError
from ekiden.methods.gossip.topology import (
    adjacency,
    check,
    components,
    contraction,
    is_drawn,
    metropolis,
    mixing,
    sends,
)


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def drawn(seed: int = 1) -> Generator:
    return Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("topology", "clients", "degrees"),
    [
        ("complete", 5, {4}),
        ("ring", 8, {2}),
        ("ring", 3, {2}),
        ("ring", 2, {1}),
        ("ring", 1, {0}),
        ("torus", 9, {4}),
        ("torus", 12, {4}),
        ("torus", 6, {3}),
        ("star", 5, {1, 4}),
        ("exponential", 8, {5}),
        ("matching", 6, {1}),
        ("matching", 7, {0, 1}),
    ],
)
def test_degrees_of_undirected_graphs(topology: str, clients: int, degrees: set[int]) -> None:
    edges = adjacency(topology, clients, generator=drawn())
    assert torch.equal(edges, edges.T)
    assert not edges.diagonal().any()
    assert set(edges.sum(1).tolist()) == degrees


def test_ring_of_four() -> None:
    third = 1 / 3
    expected = tensor(
        [third, third, 0, third],
        [third, third, third, 0],
        [0, third, third, third],
        [third, 0, third, third],
    )
    torch.testing.assert_close(mixing("ring", 4), expected)


def test_complete_graph_is_the_uniform_mean() -> None:
    torch.testing.assert_close(mixing("complete", 4), torch.full((4, 4), 0.25, dtype=torch.float64))


def test_metropolis_of_a_path() -> None:
    path = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    third = 1 / 3
    torch.testing.assert_close(
        metropolis(path), tensor([1 - third, third, 0], [third] * 3, [0, third, 1 - third])
    )


@pytest.mark.parametrize(
    "topology", ["complete", "ring", "torus", "star", "exponential", "erdos_renyi:0.5", "matching"]
)
def test_undirected_mixing_is_doubly_stochastic(topology: str) -> None:
    matrix = mixing(topology, 12, generator=drawn())
    assert torch.equal(matrix, matrix.T)
    assert bool((matrix >= 0).all())
    assert bool((matrix.diagonal() > 0).all())
    for axis in (0, 1):
        torch.testing.assert_close(matrix.sum(axis), torch.ones(12, dtype=torch.float64))


@pytest.mark.parametrize(
    ("topology", "clients", "gap"),
    [
        ("ring", 8, 1 - (1 + 2 * cos(pi / 4)) / 3),
        ("ring", 10, 1 - 0.872678),
        ("ring", 100, 1 - 0.998684),
        ("ring", 4, 1 - 1 / 3),
        ("complete", 7, 1.0),
        ("torus", 9, 0.6),
        ("exponential", 8, 2 / 3),
        ("star", 4, 0.25),
    ],
)
def test_a_fixed_graph_contracts_by_one_minus_its_gap(
    topology: str, clients: int, gap: float
) -> None:
    assert contraction(topology, clients, 3) == pytest.approx(1 - gap, abs=1e-6)
    assert not is_drawn(topology)


def test_peers_are_drawn_one_way_anew_and_never_oneself() -> None:
    generator = drawn()
    first, second = (adjacency("peers:3", 10, round, generator) for round in (0, 1))
    for edges in (first, second):
        assert (edges.sum(1) == 3).all()
        assert not edges.diagonal().any()
    assert not torch.equal(first, second)
    assert torch.equal(first, adjacency("peers:3", 10, 0, drawn()))
    matrix = mixing("peers:3", 10, 0, drawn())
    assert matrix[first].tolist() == [0.25] * 30
    assert matrix.diagonal().tolist() == [0.25] * 10


def test_every_other_client_can_be_drawn() -> None:
    generator, seen = drawn(), torch.zeros(5, 5)
    for _ in range(400):
        seen += adjacency("peers:2", 5, 0, generator)
    share = seen / 400
    assert bool((share[~torch.eye(5, dtype=torch.bool)] - 0.5).abs().max() < 0.12)


def test_a_share_of_peers() -> None:
    assert (adjacency("peers:0.1", 100, generator=drawn()).sum(1) == 10).all()
    assert (adjacency("peers:0.1", 4, generator=drawn()).sum(1) == 1).all()


def test_one_peer_cycles_through_the_powers_and_averages_exactly() -> None:
    product = torch.eye(8, dtype=torch.float64)
    for round in range(int(log2(8))):
        matrix = mixing("one_peer", 8, round)
        assert matrix[0, 2**round] == 0.5
        torch.testing.assert_close(matrix.sum(0), torch.ones(8, dtype=torch.float64))
        product = matrix @ product
    torch.testing.assert_close(product, torch.full((8, 8), 1 / 8, dtype=torch.float64))
    assert torch.equal(mixing("one_peer", 8, 3), mixing("one_peer", 8, 0))


def test_erdos_renyi_is_fixed_by_its_own_seed() -> None:
    one = adjacency("erdos_renyi:0.3:5", 20, 0, drawn(1))
    assert torch.equal(one, adjacency("erdos_renyi:0.3:5", 20, 7, drawn(2)))
    assert not torch.equal(one, adjacency("erdos_renyi:0.3:6", 20))
    assert adjacency("erdos_renyi:1", 6).sum() == 30


@pytest.mark.parametrize(
    ("topology", "clients", "count"),
    [
        ("ring", 10, 20),
        ("complete", 10, 90),
        ("peers:5", 30, 150),
        ("star", 5, 8),
        ("matching", 7, 6),
        ("one_peer", 8, 8),
    ],
)
def test_sends_of_three_rounds(topology: str, clients: int, count: int) -> None:
    assert sends(topology, clients, 3) == 3 * count


def test_components() -> None:
    edges = torch.zeros(5, 5, dtype=torch.bool)
    edges[0, 3] = edges[3, 0] = edges[1, 4] = edges[4, 1] = True
    assert components(edges) == [[0, 3], [1, 4], [2]]


def test_refuses_a_disconnected_graph() -> None:
    with pytest.raises(UserError, match=r"falls into 6 groups .* \(one is: clients 0\): choose"):
        check("erdos_renyi:0", 6)
    check("matching", 6)  # connected over the rounds


@pytest.mark.parametrize(
    ("topology", "clients", "message"),
    [
        ("circle", 4, "circle"),
        ("peers:4", 4, "at most 3"),
        ("peers:0", 4, "at least 1"),
        ("peers:1.5", 4, "does not fit"),
        ("peers", 4, "not understood"),
        ("peers:many", 4, "not understood"),
        ("ring:3", 4, "not understood"),
        ("erdos_renyi:1.5", 4, "not a probability"),
        ("torus", 7, "do not form a torus"),
    ],
)
def test_refuses_what_cannot_be(topology: str, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(topology, clients)


@pytest.mark.slow
def test_drawn_graphs_contract_although_one_alone_need_not() -> None:
    # Pairs: a given other client is the partner with probability 1/(N-1), so E[W'W] = E[W] leaves 1
    # - N/(2(N-1)).
    assert contraction("matching", 6, 3000) == pytest.approx((1 - 6 / 10) ** 0.5, abs=0.03)
    assert len(components(mixing("matching", 6, generator=drawn()) > 0)) == 3
    assert is_drawn("matching")
    assert [contraction("ring", 1), contraction("complete", 5)] == pytest.approx([0, 0], abs=1e-7)


@pytest.mark.parametrize("topology", ["peers:2", "one_peer"])
def test_contraction_is_what_gossip_does(topology: str) -> None:
    """The distance left by a round, over many rounds from the worst direction: its root mean square
    is not larger."""
    bound, n = contraction(topology, 8, 300), 8
    x = torch.randn(n, 50, dtype=torch.float64, generator=drawn(3))
    x -= x.mean(0)
    generator, left = drawn(4), []
    for round in range(300):
        y = mixing(topology, n, round, generator) @ x
        left.append(float((y - y.mean(0)).pow(2).sum() / x.pow(2).sum()))
    assert 0 < (sum(left) / len(left)) ** 0.5 <= bound * 1.02
