"""What there is: `ekiden list` (methods, networks and data sets) and `ekiden topology` (graphs of
clients).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from rich.table import Table
from torch import nn

from ekiden import data as datasets
from ekiden.cli.console import console, print_json
from ekiden.commands import available, topology
from ekiden.core import models
from ekiden.core.base.checks import Checked, Positional, Range
from ekiden.core.base.errors import counted
from ekiden.core.base.outside import summary_of
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import of_method
from ekiden.core.tasks import Classification
from ekiden.core.training.network import Network
from ekiden.methods import METHODS

_CLIENTS, _SHAPE, _CLASSES = (
    10,
    (1, 8, 8),
    10,
)  # the digits over ten clients, which `ekiden run` takes by default
_INTRO = f"""# Methods, networks and data sets

`ekiden list --markdown` prints this page from the code. [Which method when](which-method.md) helps to choose.

## Methods

*Moves* is what a run with default settings sends over {_CLIENTS} clients, in models: 1 is the size of the network once.
*Ends with* is one model, a model for each client (personal), or all clients' models that answer together.
"""
_NETWORKS = """## Networks

`--model NAME`. Without it, the data choose: see the last column of the data sets. Pretrained networks are in
[Pretrained networks](models.md).
"""
_DATA = """## Data sets

`--data NAME`. A named set is looked for in `$EKIDEN_DATA/NAME/{train,test}.parquet`, then on the Hugging Face hub.
Files of your own need no name: see [your own data](own-data.md).
"""


@dataclass(frozen=True)
class ListOptions:
    """Methods, networks and data sets."""

    markdown: bool = False
    """print the tables of docs/catalogue.md: what each is, what a method moves and ends with, where
    data come from"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


def list_all(options: ListOptions) -> None:
    """`ekiden list`."""
    if options.markdown:
        print(catalogue(), end="")
        return
    if options.json:
        return print_json(available())
    table = Table("name", "what it is", title="methods", title_justify="left")
    for method in METHODS:
        table.add_row(method.title(), summary_of(method))
    console.print(table)
    found = available()
    console.print(
        f"networks: {', '.join(found['networks'])}; with values: {', '.join(found['pretrained'])}"
    )
    console.print(f"data sets: {', '.join(found['data'])}")
    console.print(
        f"of these in EKIDEN_DATA: {', '.join(found['local']) or 'none (it is not set, or empty)'}"
    )


def catalogue() -> str:
    """Return what the library has as a page in Markdown, without other packages and without this
    machine's data.
    """
    pages = {m: f"[{m.title()}](methods/{m.__module__.rsplit('.', 1)[1]}.md)" for m in METHODS}
    methods = ([link, summary_of(m), moves(m), ends_with(m)] for m, link in pages.items())
    networks = ([f"`{name}`", *about] for name, about in models.described().items())
    sets = ([f"`{name}`", *_source(name)] for name in sorted(datasets.NAMED))
    parts = (
        _INTRO,
        _table(["name", "what it is", "moves", "ends with"], methods),
        _NETWORKS,
        _table(["name", "samples", "what it is"], networks),
        _DATA,
        _table(["name", "Hugging Face hub", "test part", "prepared", "network"], sets),
    )
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def moves(method: type[Method]) -> str:
    """Return the bytes of a run with defaults, in sizes of the network that the user chose."""

    def chosen() -> nn.Module:
        return models.build("mlp", _SHAPE, _CLASSES)

    made = of_method(chosen, method(), _SHAPE, _CLASSES, seed=0, task=Classification())
    bytes_moved = method().cost(_CLIENTS, Size.of(Network(made()), _SHAPE))
    models_moved = bytes_moved / Size.of(Network(chosen()), _SHAPE)
    return f"{models_moved:,.0f}" if models_moved >= 100 else f"{models_moved:.2g}"


def ends_with(method: type[Method]) -> str:
    """Return what a run ends with: "one model", "all models" or "personal"."""
    if method.traits.joins_models:
        return "all models"
    return "one model" if method().one_model else "personal"


def _source(name: str) -> list[str]:
    """Return where a named data set is, its test part, what is done to its images, and its
    network.
    """
    named = datasets.NAMED[name]
    hub = (
        f"[{named.hub}](https://huggingface.co/datasets/{named.hub})"
        if named.hub
        else "not there: give local files"
    )
    if name == "digits":  # it has one part and is in scikit-learn
        hub, named = "not needed: scikit-learn has them", replace(named, test=None)
    done = [f"{named.size}x{named.size} pixels" if named.size else "", *named.augment.words()]
    network = models.usual(name)
    return [
        hub,
        "given" if named.test else "20 % held out",
        ", ".join(filter(None, done)) or "-",
        f"`{network}`",
    ]


@dataclass(frozen=True)
class TopologyOptions(Checked):
    """Check a graph of clients and its mixing matrix, and say how fast gossip agrees on it."""

    topology: Positional[str] = "ring"
    """complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching or
    one_peer"""
    clients: Annotated[int, Range(least=2, most=1000)] = 10
    """N, number of clients"""
    matrix: bool = False
    """print the mixing matrix too"""
    json: bool = False
    """print JSON instead of tables; see docs/json.md"""


def show_topology(options: TopologyOptions) -> None:
    """`ekiden topology NAME --clients N`."""
    found = topology(options.topology, options.clients)
    if options.json:
        return print_json(found)
    drawn, least, most = found["drawn"], min(found["neighbours"]), max(found["neighbours"])
    others = str(least) if least == most else f"{least} to {most}"
    console.print(
        f"{options.topology}, "
        f"{counted(options.clients, 'client')}{', redrawn each round' if drawn else ''}"
    )
    console.print(
        f"each hears {others} {'other' if most == 1 else 'others'}; {found['sent']} models sent a "
        "round"
    )
    console.print(
        f"mixing matrix{' of one round' if drawn else ''}: "
        f"{_yes(found['symmetric'], 'symmetric')}, rows sum to 1, "
        f"{_yes(found['columns_sum_to_1'], 'columns sum to 1')}, "
        f"{_yes(found['connected'], 'connected')}"
    )
    console.print(
        f"spectral gap{' in the mean over 100 rounds' if drawn else ''}: "
        f"{found['spectral_gap']:.4f}"
    )
    console.print(
        f"a round of gossip leaves at most {found['left']:.4f} of the distance between clients"
    )
    if options.matrix:
        for row in found["matrix"]:
            console.print(" ".join(f"{weight:6.4f}" for weight in row), soft_wrap=True)


def _yes(holds: bool, what: str) -> str:
    return what if holds else f"not {what}".replace("not columns sum", "columns do not sum")
