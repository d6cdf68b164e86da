"""Who talks to whom: graphs of clients, and the matrices with which neighbours average.

A topology is a text, as partitions are: a name, and what it needs after colons. See `HELP`.
"""

import math
from collections.abc import Sequence
from itertools import takewhile
from math import isqrt

import torch
from torch import Generator, Tensor

from ekiden.authoring import Client, Fed, Model, Ref, State, UserError, Weights, mean, on_client
from ekiden.core.base.errors import unknown
from ekiden.methods.blocks.rounds import PersonalMethod

HELP = (
    "complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching or one_peer"
)
_FIXED = ("complete", "ring", "torus", "star", "exponential", "erdos_renyi")
_DRAWN = ("peers", "matching", "one_peer")


def adjacency(
    topology: str, clients: int, round: int = 0, generator: Generator | None = None
) -> Tensor:
    """Return who receives from whom: (N, N) bool, row i true at the neighbours of client i, false
    on the diagonal.

    Args:
        topology: one of complete, ring, star (around the first client); torus: a grid as square as
            N allows, closed at its edges; exponential: the clients 1, 2, 4, ... places away, on
            both sides; erdos_renyi:P[:SEED]: each edge with probability P, drawn once, the same in
            every run and round; peers:K: K others, drawn by every client each round, one way; K
            below 1 is a share of N; matching: pairs, drawn each round, one client left alone if N
            is odd; one_peer: in round r the client 2^r places ahead, one way, then from 1 again.
        clients: N.
        round: which round it is for.
        generator: for what is drawn each round.
    """
    name, *given = topology.split(":")
    if name not in (*_FIXED, *_DRAWN):
        raise unknown("topology", name, (*_FIXED, *_DRAWN))
    numbers = _numbers(topology, given)
    place = torch.arange(clients)
    # how many places client l is ahead of client i
    ahead = (place[None, :] - place[:, None]) % max(clients, 1)
    if name == "ring":
        edges = (ahead == 1) | (ahead == clients - 1)
    elif name == "exponential":
        steps = torch.tensor(_powers(clients), dtype=torch.int64)
        edges = torch.isin(ahead, steps) | torch.isin(clients - ahead, steps)
    elif name == "one_peer":
        # a client alone has no other: 0 places ahead is itself, which the diagonal leaves out
        cycle = _powers(clients) or [0]
        edges = ahead == cycle[round % len(cycle)]
    elif name == "star":
        edges = (place[:, None] == 0) | (place[None, :] == 0)
    elif name == "torus":
        edges = _torus(clients)
    elif name == "erdos_renyi":
        edges = _erdos_renyi(clients, numbers[0], int(numbers[1]) if len(numbers) > 1 else 0)
    elif name == "peers":
        edges = _peers(clients, _count(numbers[0], clients), generator)
    elif name == "matching":
        order = torch.randperm(clients, generator=generator)[: clients // 2 * 2].view(-1, 2)
        edges = torch.zeros(clients, clients, dtype=torch.bool)
        edges[order[:, 0], order[:, 1]] = True
        edges |= edges.T.clone()
    else:
        edges = torch.ones(clients, clients, dtype=torch.bool)
    return edges.fill_diagonal_(False)


def mixing(
    topology: str, clients: int, round: int = 0, generator: Generator | None = None
) -> Tensor:
    """Return the mixing matrix W of a topology: (N, N) float64, w_il what client i gives to the
    model of client l.

    Where edges go both ways, Metropolis weights: symmetric, rows and columns sum to 1, so the mean
    over all clients is conserved. Where peers are drawn one way, the uniform mean of a client and
    its peers: rows sum to 1.
    """
    edges = adjacency(topology, clients, round, generator)
    if torch.equal(edges, edges.T):
        return metropolis(edges)
    weights = (edges | torch.eye(clients, dtype=torch.bool)).double()
    return weights / weights.sum(1, keepdim=True)


def circles(
    topology: str, clients: int, round: int = 0, generator: Generator | None = None
) -> list[list[int]]:
    """Return for each client the positions of the clients that it receives from, including itself,
    in order.
    """
    edges = adjacency(topology, clients, round, generator).fill_diagonal_(True)
    return [row.nonzero().flatten().tolist() for row in edges]


def metropolis(edges: Tensor) -> Tensor:
    """Return Metropolis weights of an undirected graph: w_il = 1 / (1 + max(deg_i, deg_l)),
    diagonal: the rest.
    """
    degree = edges.sum(1)
    weights = edges.double() / (1 + torch.maximum(degree[:, None], degree[None, :]))
    return weights + torch.diag(1 - weights.sum(1))


def check(topology: str, clients: int) -> None:
    """Refuse a topology that cannot be over so many clients, or that leaves some out of reach."""
    edges = adjacency(topology, clients, generator=Generator().manual_seed(0))
    parts = components(edges)
    # a graph that is drawn again in each round may fall apart in one of them
    if len(parts) > 1 and not is_drawn(topology):
        smallest = min(parts, key=len)
        raise UserError(
            f"{topology} falls into {len(parts)} groups of clients that never exchange models (one "
            f"is: clients {', '.join(map(str, smallest))}): choose a denser graph, or ring"
        )


def components(edges: Tensor) -> list[list[int]]:
    """Return the connected groups of an undirected graph, each as positions of clients."""
    # imported here since it takes a while, and few need it
    from scipy.sparse.csgraph import connected_components

    count, group = connected_components(edges.numpy(), directed=False)
    return [(group == i).nonzero()[0].tolist() for i in range(count)]


def contraction(topology: str, clients: int, rounds: int = 100) -> float:
    """Return what a round of gossip leaves of the distance between clients at most, in the mean
    over rounds.

    √λ, λ the largest eigenvalue of the mean of Wᵀ(I - J)W on what sums to 0, J the matrix of
    entries 1/N. Of a fixed symmetric W this is its largest |eigenvalue| after the first, 1 minus
    the spectral gap; graphs redrawn each round have it too, though one of them alone may not even
    be connected. Gossip reaches agreement if it is below 1.
    """
    generator = Generator().manual_seed(0)
    centre = torch.eye(clients, dtype=torch.float64) - 1 / clients
    left = torch.zeros_like(centre)
    for round in range(rounds):
        apart = centre @ mixing(topology, clients, round, generator)
        left += apart.T @ apart / rounds
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(centre @ left @ centre)[-1])))


def is_drawn(topology: str) -> bool:
    """Return whether the topology is drawn again in each round."""
    return topology.split(":", 1)[0] in _DRAWN


class GossipMethod(PersonalMethod):
    """A method whose clients average with their neighbours in a graph that the user names."""

    topology: str

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a graph that does not fit the clients or is not connected."""
        check(self.topology, len(clients))

    def circles(self, fed: Fed, s: State) -> list[list[int]]:
        """Return for each client the positions of those that it hears in this step, and itself."""
        return circles(self.topology, len(fed.clients), s.step, fed.generator("topology"))


class MixingMethod(GossipMethod):
    """A method whose clients average complete models with the weights of a mixing matrix."""

    def mixed(
        self, fed: Fed, s: State, models: Sequence[Model], times: int = 1
    ) -> tuple[Model, ...]:
        """Return the models after exchanges over the graph of this step."""
        matrix = mixing(self.topology, len(fed.clients), s.step, fed.generator("topology"))
        for _ in range(times):
            models = self.exchanged(fed, models, matrix)
        return tuple(models)

    def exchanged(
        self, fed: Fed, models: Sequence[Model], matrix: Tensor
    ) -> tuple[Ref[Weights], ...]:
        """Make one exchange: every client averages its own and its neighbours' models with its row
        of W.
        """
        mixed = []
        for client, row in zip(fed.clients, matrix.tolist(), strict=True):
            near = [m for m, w in zip(models, row, strict=True) if w]
            mixed.append(fed.call(self.mix, client, near, tuple(filter(None, row))))
        return tuple(mixed)

    @on_client(gives="model")
    def mix(self, client: Client, models: list[Weights], weights: tuple[float, ...]) -> Weights:
        """Return the average of the client's own model and its neighbours'."""
        return mean(models, weights)


def sends(topology: str, clients: int, rounds: int) -> int:
    """Return the number of models sent from client to client in these rounds, with one exchange
    each.
    """
    return sum(
        int(adjacency(topology, clients, round, Generator().manual_seed(0)).sum())
        for round in range(rounds)
    )


def _numbers(topology: str, given: list[str]) -> list[float]:
    """Return the numbers that follow the name of a topology."""
    name = topology.split(":", 1)[0]
    most = 0
    if name == "peers":
        most = 1
    elif name == "erdos_renyi":
        most = 2
    try:
        numbers = [float(part) for part in given]
    except ValueError:
        numbers = []
    if (
        len(numbers) != len(given)
        or not min(most, 1) <= len(given) <= most
        or not all(0 <= n < 2**31 for n in numbers)
    ):
        raise UserError(f"topology {topology!r} is not understood: give {HELP}")
    return numbers


def _powers(clients: int) -> list[int]:
    """Return 1, 2, 4, ... below N."""
    return list(takewhile(lambda p: p < clients, (1 << i for i in range(64))))


def _torus(clients: int) -> Tensor:
    height = max(d for d in range(1, isqrt(clients) + 1) if clients % d == 0)
    if height < 2:
        raise UserError(
            f"{clients} clients do not form a torus: take a number that is not prime, or "
            "--topology=ring"
        )
    place = torch.arange(clients).view(height, -1)
    edges = torch.zeros(clients, clients, dtype=torch.bool)
    for axis in (0, 1):
        other = place.roll(1, axis)
        edges[place.flatten(), other.flatten()] = True
    return edges | edges.T


def _erdos_renyi(clients: int, probability: float, seed: int) -> Tensor:
    if probability > 1:
        raise UserError(
            f"erdos_renyi:{probability:g} is not a probability: give a number from 0 to 1"
        )
    draws = torch.rand(
        clients, clients, generator=Generator().manual_seed(seed), dtype=torch.float64
    )
    upper = (draws < probability).triu(1)
    return upper | upper.T


def _count(k: float, clients: int) -> int:
    """Return N_com: a number of clients, or a share of all below 1 (at least one client)."""
    count = max(1, round(k * clients)) if 0 < k < 1 else int(k)
    if not 1 <= count < clients or (k >= 1 and k != count):
        raise UserError(
            f"peers:{k:g} does not fit {clients} clients: each needs at least 1 peer and can have "
            f"at most {clients - 1}, all the others"
        )
    return count


def _peers(clients: int, count: int, generator: Generator | None) -> Tensor:
    """Draw `count` others for each row, uniformly and without replacement."""
    edges = torch.zeros(clients, clients, dtype=torch.bool)
    for i in range(clients):
        drawn = torch.randperm(clients - 1, generator=generator)[:count]
        edges[i, drawn + (drawn >= i)] = True
    return edges
