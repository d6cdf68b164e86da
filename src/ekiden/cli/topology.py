"""The command line for graphs of clients: `ekiden topology`."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Generator, Tensor
from tyro.conf import Positional

from ekiden.base.checks import Checked, Range
from ekiden.base.errors import counted
from ekiden.cli.console import console
from ekiden.methods.gossip.blocks import topology


@dataclass(frozen=True)
class TopologyOptions(Checked):
    """Check a graph of clients and its mixing matrix, and say how fast gossip agrees on it."""

    topology: Positional[str] = "ring"
    """complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching or one_peer"""
    clients: Annotated[int, Range(least=1, most=1000)] = 10
    """N, number of clients"""
    matrix: bool = False
    """print the mixing matrix too"""


def show_topology(options: TopologyOptions) -> None:
    """`ekiden topology NAME --clients N`."""
    topology.check(options.topology, options.clients)
    matrix = topology.mixing(options.topology, options.clients, generator=Generator().manual_seed(0))
    drawn = topology.is_drawn(options.topology)
    degree = (matrix > 0).sum(1) - (matrix.diagonal() > 0).long()
    console.print(f"{options.topology}, {counted(options.clients, 'client')}{', redrawn each round' if drawn else ''}")
    console.print(f"each hears {_range(degree)} others; {int(degree.sum())} models sent a round")
    console.print(
        f"mixing matrix{' of one round' if drawn else ''}: "
        f"{_yes(torch.allclose(matrix, matrix.T), 'symmetric')}, rows sum to 1, "
        f"{_yes(torch.allclose(matrix.sum(0), torch.ones(len(matrix), dtype=matrix.dtype)), 'columns sum to 1')}, "
        f"{_yes(len(topology.components((matrix > 0) | (matrix > 0).T)) == 1, 'connected')}"
    )
    left = topology.contraction(options.topology, options.clients, 100 if drawn else 1)
    gap = 1 - left if drawn else topology.spectral_gap(matrix)
    console.print(f"spectral gap{' in the mean over 100 rounds' if drawn else ''}: {gap:.4f}")
    console.print(f"a round of gossip leaves at most {left:.4f} of the distance between clients")
    if options.matrix:
        for row in matrix.tolist():
            console.print(" ".join(f"{weight:6.4f}" for weight in row), soft_wrap=True)


def _range(degree: Tensor) -> str:
    least, most = int(degree.min()), int(degree.max())
    return str(least) if least == most else f"{least} to {most}"


def _yes(holds: bool, what: str) -> str:
    return what if holds else f"not {what}".replace("not columns sum", "columns do not sum")
