"""What there is: `ekiden list` (methods, networks and data sets) and `ekiden topology` (graphs of
clients).
"""

from dataclasses import dataclass
from typing import Annotated

from rich.table import Table as RichTable

from ekiden.cli.console import console, print_json
from ekiden.commands import available, topology
from ekiden.core.base.checks import Checked, Positional, Range
from ekiden.core.base.errors import counted


@dataclass(frozen=True)
class ListOptions:
    """List methods, networks and data sets."""

    json: bool = False
    """print JSON: `methods`, `networks`, `pretrained`, `data`, and which of these are `local`,
    in EKIDEN_DATA"""


def list_all(options: ListOptions) -> None:
    """`ekiden list`."""
    if options.json:
        return print_json(available())
    table = RichTable("name", "what it is", title="methods", title_justify="left")
    found = available()
    for method, summary in found["methods"].items():
        table.add_row(method, summary)
    console.print(table)
    console.print(
        f"networks: {', '.join(found['networks'])}; pretrained: {', '.join(found['pretrained'])}"
    )
    console.print(f"data sets: {', '.join(found['data'])}")
    console.print(
        f"of these in EKIDEN_DATA: {', '.join(found['local']) or 'none (it is not set, or empty)'}"
    )


@dataclass(frozen=True)
class TopologyOptions(Checked):
    """Check a graph of clients and its mixing matrix, and say how fast gossip agrees on it."""

    topology: Positional[str] = "ring"
    """complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching or
    one_peer"""
    clients: Annotated[int, Range(least=2, most=1000)] = 10
    """N, number of clients"""
    json: bool = False
    """print JSON: `neighbours`, models `sent` in a round, `drawn`, `symmetric`,
    `columns_sum_to_1`, `connected`, `spectral_gap`, `left`, what a round leaves of the distance
    between clients, and the mixing `matrix`"""


def show_topology(options: TopologyOptions) -> None:
    """`ekiden topology NAME --clients N`."""
    found = topology(options.topology, options.clients)
    if options.json:
        return print_json(found)
    least = min(found["neighbours"])
    most = max(found["neighbours"])
    others = counted(most, "other", "others")
    if least < most:
        others = f"{least} to {others}"
    redrawn = of_one = over_all = ""
    if found["drawn"]:
        redrawn = ", redrawn each round"
        of_one = " of one round"
        over_all = " in the mean over 100 rounds"
    console.print(f"{options.topology}, {counted(options.clients, 'client')}{redrawn}")
    console.print(f"each hears {others}; {found['sent']} models sent a round")
    console.print(
        f"mixing matrix{of_one}: {_unless(found['symmetric'], 'not ')}symmetric, rows sum to 1, "
        f"columns {_unless(found['columns_sum_to_1'], 'do not ')}sum to 1, "
        f"{_unless(found['connected'], 'not ')}connected"
    )
    console.print(f"spectral gap{over_all}: {found['spectral_gap']:.4f}")
    console.print(
        f"a round of gossip leaves at most {found['left']:.4f} of the distance between clients"
    )


def _unless(holds: bool, word: str) -> str:
    if holds:
        return ""
    return word
