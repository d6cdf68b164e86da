"""Draw the ledger as a graph: who sent how much to whom."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from matplotlib.patches import FancyArrowPatch

from ekiden.engine.folder import read_ledger
from ekiden.engine.wire import SERVER
from ekiden.reporting.maps import heat, hops
from ekiden.reporting.runs import Group
from ekiden.reporting.style import INK, PAPER, SERIES, Drawing, Missing, Value, blank
from ekiden.runs.summary import Summary, size

_MOST_NODES = 24  # in a graph; with more parties a matrix is drawn


def ledger(group: Group, number: int) -> Drawing | Missing:
    """Draw the bytes from party to party over a whole run."""
    run = group.first
    sent, failed = flows(run)
    if not sent:
        return Missing(group.name, "nothing moved")
    clients = hops(run) or list(run.config["clients"])
    moved = [party for edge in sent for party in edge]
    gone = [party for party in moved if party != SERVER]  # a client that was forgotten took part, too
    parties = [*dict.fromkeys([*clients, *gone]), *([SERVER] if SERVER in moved else [])]
    total, largest = sum(sent.values()), max(sent.values())
    note = (
        f"Seed {run.config['seed']}: {size(total)} in all along {len(sent)} edges, at most {size(largest)} along one"
        + (f"; {failed} times nobody answered" if failed else "")
        + "."
    )
    rows: list[list[Value]] = [[a, b, n] for (a, b), n in sorted(sent.items())]
    draw = _graph if len(parties) <= _MOST_NODES else _matrix
    return Drawing(f"ledger-{number}", group.name, note, draw(parties, sent), ["from", "to", "bytes"], rows)


def flows(run: Summary) -> tuple[Counter[tuple[str, str]], int]:
    """Return the bytes by (source, target), and how often a client did not answer."""
    sent: Counter[tuple[str, str]] = Counter()
    failed = 0
    for row in read_ledger(run.folder):
        failed += bool(row.get("missing"))
        if row["bytes"]:
            sent[row["source"], row["target"]] += row["bytes"]
    return sent, failed


def _graph(parties: Sequence[str], sent: Counter[tuple[str, str]]) -> object:
    """Draw clients on a circle and the server in its centre; wider arrows mean more bytes."""
    figure, axes = blank(4.4, 3.3)
    around = [party for party in parties if party != SERVER]
    angles = np.pi / 2 - 2 * np.pi * np.arange(len(around)) / len(around)
    places = {party: np.array([np.cos(a), np.sin(a)]) for party, a in zip(around, angles, strict=True)}
    places[SERVER] = np.zeros(2)
    largest = max(sent.values())
    crowd = min(1.0, 40 / len(sent))
    for (source, target), moved in sorted(sent.items(), key=lambda item: item[1]):
        share = moved / largest
        arrow = FancyArrowPatch(
            tuple(places[source]),
            tuple(places[target]),
            arrowstyle="-|>",
            mutation_scale=9 + 5 * share,
            shrinkA=10,
            shrinkB=10,
            connectionstyle="arc3,rad=0.12",
            linewidth=0.5 + 2.5 * share * max(crowd, 0.4),
            color=SERIES[0],
            alpha=0.25 + 0.6 * share * crowd,
        )
        axes.add_patch(arrow)
    for party in parties:
        x, y = places[party]
        server = party == SERVER
        axes.plot(x, y, "s" if server else "o", color=SERIES[1] if server else SERIES[0], markersize=11)
        axes.text(
            x * 1.14,
            y * 1.14 - (0.2 if server else 0),
            party if len(party) <= 16 else f"{party[:15]}…",
            ha="center" if abs(x) < 0.3 else "left" if x > 0 else "right",
            va="center",
            color=INK,
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1.5, "alpha": 0.8} if server else None,
        )
    axes.set(xlim=(-1.8, 1.8), ylim=(-1.3, 1.3), xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def _matrix(parties: Sequence[str], sent: Counter[tuple[str, str]]) -> object:
    """Draw senders as rows and receivers as columns."""
    values = np.full((len(parties), len(parties)), np.nan)
    for (source, target), moved in sent.items():
        values[parties.index(source), parties.index(target)] = moved / 1e6
    figure, _ = heat(values, parties, parties, unit="MB", form="{:.1f}", labels=("from", "to"))
    return figure
