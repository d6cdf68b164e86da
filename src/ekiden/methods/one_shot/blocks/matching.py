"""Match the units of several models to common ones: a Beta-Bernoulli process with Gaussian units.

Every unit of a client is one of the global units, its atom, seen with Gaussian noise. No two units
of a client are the same atom. The assignment is found by solving one assignment problem per client,
again and again.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from ekiden.authoring import (
    Client,
    Method,
    Size,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.training.network import check
from ekiden.methods.blocks.combining import Init, Trained, first_model

_MOST_POPULAR = 10
# number of atoms in a layer above which only few new ones are offered, as in the code of PFNM:
# with all of them the assignment problem would take long
_ATOMS = 700


class Prior(NamedTuple):
    """The prior of atoms, before any unit is seen."""

    mean: Tensor  # (D,) μ0
    precision: Tensor  # (D,) 1/σ0²


class MatchingMethod(Method):
    """A method that matches the hidden units of the models that clients trained."""

    epochs: int
    gamma: float
    sigma0: float
    bias: float
    sweeps: int
    init: Init

    def prior(self, weights: int, biases: int, more: int = 0) -> Prior:
        """Return the prior of vectors of this many weights, then biases, then weights again."""
        mean = torch.zeros(weights + biases + more, dtype=torch.float64)
        mean[weights : weights + biases] = self.bias
        return Prior(mean, torch.full_like(mean, 1 / self.sigma0))

    def check_network(self, model: Size) -> None:
        """Refuse a network whose hidden units cannot be permuted."""
        check(model.network.module, model.shape)

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Trained:
        """Train on the plain loss."""
        model = client.fit(first_model(client, model, self.init), epochs=self.epochs)
        return Trained(model, client.class_counts().int())


class Atoms(NamedTuple):
    """Global units, given the units that are assigned to them."""

    total: Tensor  # (L, D) sum of prior and units, each times its precision
    precision: Tensor  # (L, D) sum of the precisions
    members: Tensor  # (L,) number of units

    @property
    def mode(self) -> Tensor:
        """Return (L, D), the most probable values."""
        return self.total / self.precision


class Matching(NamedTuple):
    """The result of matching."""

    units: list[Tensor]  # for each client (L_j,) int64, the atom of each of its units
    atoms: Tensor  # (L, D) the values of the atoms


def match(
    units: Sequence[Tensor],
    precisions: Sequence[Tensor],
    prior: Prior,
    method: MatchingMethod,
    generator: Generator,
) -> Matching:
    """Match the units of all clients.

    The client with the most units comes first. In every sweep each client in turn, in random order,
    is taken out and matched again. If there is only one client, its units are the atoms.

    Args:
        units: for each client (L_j, D).
        precisions: for each client (D,) >= 0, 1/σ² of its noise.
        prior: prior of the atoms.
        method: γ, mass of the process: larger values give more new atoms; and the sweeps.
        generator: draws the orders.
    """
    clients = len(units)
    if len({rows.shape[1] for rows in units}) != 1:
        raise UserError(
            "models of different shape cannot be matched: use the same network at every client"
        )
    units = [rows.double() for rows in units]
    precisions = [s.double() for s in precisions]
    first, *others = sorted(range(clients), key=lambda j: -len(units[j]))
    assigned = {first: torch.arange(len(units[first]))}
    if not others:
        return Matching([assigned[first]], units[first])
    for order in (
        others,
        *(torch.randperm(clients, generator=generator).tolist() for _ in range(method.sweeps)),
    ):
        for j in order:
            assigned.pop(j, None)
            assigned = compact(assigned)
            atoms = gather(units, precisions, assigned, prior)
            columns = best(scores(units[j], precisions[j], atoms, prior, method.gamma, clients))
            new = columns >= len(atoms.members)
            columns[new] = len(atoms.members) + torch.arange(int(new.sum()))
            assigned[j] = columns
    return Matching(
        [assigned[j] for j in range(clients)], gather(units, precisions, assigned, prior).mode
    )


def scores(
    rows: Tensor, precision: Tensor, atoms: Atoms, prior: Prior, gamma: float, clients: int
) -> Tensor:
    """Return the score of assigning each unit to each atom, and to the 1st, 2nd, ... new atom.

    Args:
        rows: (n, D) float64, the units of one client.
        precision: (D,) precision of the client's noise.
        atoms: atoms from the units of the other clients.
        prior: prior of new atoms.
        gamma: γ, mass of the process.
        clients: J, number of clients.

    Returns:
        (n, L + R) float64.
    """
    scaled = rows * precision
    known = len(atoms.members)
    popular = atoms.members.clamp(max=_MOST_POPULAR).double()
    old = _gain(scaled, precision, atoms.total, atoms.precision)
    # m_l / (J - m_l), the odds that a client has the atom
    old = old + (popular / (clients - popular)).log()
    # as in the released code; but in addition every unit must find a place
    count = max(min(len(rows), max(_ATOMS - known, 1)), len(rows) - known)
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    start = (prior.mean * prior.precision)[None]
    new = _gain(scaled, precision, start, prior.precision[None])
    new = new - 2 * rank.log() + 2 * math.log(gamma / clients)
    return torch.cat([old, new], 1)


def _gain(scaled: Tensor, precision: Tensor, total: Tensor, held: Tensor) -> Tensor:
    """Return (n, L) Σ_d (s·w + G)²/(s + S) - G²/S. The square is expanded so that no (n, L, D) is
    in memory.
    """
    inverse = 1 / (held + precision)
    own = scaled.square() @ inverse.T + 2 * scaled @ (total * inverse).T  # (n, L)
    # G²/(s + S) - G²/S = -G² s / (S (s + S)).
    return own - (total.square() * inverse * precision / held).sum(1)


def best(scores: Tensor) -> Tensor:
    """Return (n,), the column of each row in the assignment with the largest sum."""
    # imported here since it takes a while, and few need it
    from scipy.optimize import linear_sum_assignment

    if not torch.isfinite(scores).all():
        raise UserError("a model holds NaN or infinite weights: its units cannot be matched")
    rows, columns = linear_sum_assignment(scores.numpy(), maximize=True)
    assert len(rows) == len(scores)
    return torch.from_numpy(columns)


def gather(
    units: Sequence[Tensor],
    precisions: Sequence[Tensor],
    assigned: Mapping[int, Tensor],
    prior: Prior,
) -> Atoms:
    """Return the atoms of these assignments of clients."""
    size = 1 + max(int(a.max()) for a in assigned.values())
    total = (prior.mean * prior.precision).repeat(size, 1)
    precision = prior.precision.repeat(size, 1)
    members = torch.zeros(size, dtype=torch.int64)
    # in one order, so that sums do not depend on who was matched last
    for j in sorted(assigned):
        places = assigned[j]
        total[places] += units[j] * precisions[j]
        precision[places] += precisions[j]
        members[places] += 1
    return Atoms(total, precision, members)


def compact(assigned: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return the same assignments without atoms that have no units; the others keep their order."""
    _, places = torch.unique(torch.cat(list(assigned.values())), return_inverse=True)
    parts = places.split([len(a) for a in assigned.values()])
    return dict(zip(assigned, parts, strict=True))


def class_shares(counts: Tensor) -> Tensor:
    """Return (N, K), each client's share of the samples of each class, from counts (N, K); 0 for an
    absent class.
    """
    return counts.double() / counts.double().sum(0).clamp(min=1)
