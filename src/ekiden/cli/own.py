"""`ekiden new` and `ekiden trust`: your own methods, and the files that a new one starts with."""

import importlib.util
import keyword
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import ekiden
from ekiden.cli.console import say
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error
from ekiden.core.base.files import write as write_file
from ekiden.core.engine.method import Method

ROOT = Path(ekiden.__file__).parent


@dataclass(frozen=True)
class NewOptions:
    """Write a method to begin with, its test and its page into the current folder."""

    name: Positional[str]
    """name of the method, such as half_seq or HalfSeq"""
    like: str = ""
    """a method of the library to begin with a copy of, such as fedprox; in a checkout of Ekiden the
    files go where they belong, and the method into the list of all methods"""


@dataclass(frozen=True)
class ProjectOptions:
    """Write a project to copy: data, settings, a script, its test and a README."""

    name: Positional[Path]
    """new folder"""


@dataclass(frozen=True)
class TrustOptions:
    """Allow run folders made elsewhere to load your Python files, or to reach a SuperLink."""

    files: Positional[tuple[Path, ...]]
    """Python files, loaded only as long as they are unchanged; or RUN/link.json, to reach the
    SuperLink of that run"""


def new(options: NewOptions) -> None:
    """`ekiden new method NAME`."""
    files, name = write(Path(), options.name, options.like)
    _tell(files)
    say(f"next: ekiden check {name}; ekiden run {name} --data digits; pytest {files[1]}")


def new_study(options: ProjectOptions) -> None:
    """`ekiden new study NAME`."""
    _project("study", options.name)


def new_hospital(options: ProjectOptions) -> None:
    """`ekiden new hospital NAME`."""
    _project("hospital", options.name)


def _project(kind: str, folder: Path) -> None:
    if folder.exists():
        raise UserError(f"{folder} exists already: choose another name; nothing was written")
    _tell(_copied(kind, folder))
    say(f"next: read {folder / 'README.md'}")


def _tell(files: Iterable[Path]) -> None:
    for file in files:
        say(f"wrote {file}")


def _copied(kind: str, folder: Path) -> Iterator[Path]:
    """Copy a template into a new folder, named after it, file by file."""
    template = Path(__file__).parent / "templates" / kind
    for source in sorted(file for file in template.rglob("*") if file.is_file()):
        # `.txt` keeps tests and checks from reading a template as code
        file = folder / str(source.relative_to(template)).removesuffix(".txt")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace("NAME", folder.name)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise disk_error(error, file) from error
        yield file


def trust(options: TrustOptions) -> None:
    """`ekiden trust FILE...`."""
    for file in options.files:
        if file.suffix == ".json":
            # it needs the extra flower
            from ekiden.cli import coordinator

            say(f"runs may reach {coordinator.trust(file)}")
            continue
        if file.suffix != ".py":
            raise UserError(
                f"{file} is neither a Python file nor the link.json of a run: nothing else needs "
                "trust"
            )
        outside.trust(f"{file}:")
        say(f"runs that name {file} may execute it, as it is now")


def write(folder: Path, name: str, like: str = "") -> tuple[tuple[Path, Path, Path], str]:
    """Write NAME.py, test_NAME.py and NAME.md into `folder`; return the files, and the method's name
    on the command line.

    The name is as in half_seq, half-seq or HalfSeq. With `like` the method is a copy of that one,
    and in a checkout of Ekiden (`folder` is its root) each file goes where such files are.
    """
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    kind = name
    if "_" in name or not name[:1].isupper():
        kind = "".join(p[:1].upper() + p[1:] for p in module.split("_"))
    if not (
        module.isascii() and module.isidentifier() and kind.isidentifier()
    ) or keyword.iskeyword(module):
        raise UserError(
            f"{name!r} cannot name a Python file and a class: choose a name of letters, digits and "
            "_"
        )
    places = (folder, folder, folder)
    texts = (_METHOD, _TEST, _PAGE)
    where = module
    command = f"{module}.py:{kind}"
    listed = False
    method = _of_library(like) if like else Method
    if like:
        package = Path(*method.__module__.split("."))
        text = (ROOT.parent / package).with_suffix(".py").read_text(encoding="utf-8")
        texts = (re.sub(rf"\b{method.__name__}\b", "KIND", text), _LIKE_TEST, _PAGE)
        source = (folder / "src" / package).with_suffix(".py")
        if source.is_file():
            places = (source.parent, folder / "tests/methods", folder / "docs/methods")
            where = method.__module__.rpartition(".")[0] + f".{module}"
            command = kind.lower()
            _refuse_name_of_another(command)
            listed = True
    files = (
        places[0] / f"{module}.py",
        places[1] / f"test_{module}.py",
        places[2] / f"{module}.md",
    )
    if there := [str(file) for file in files if file.exists()]:
        raise UserError(
            f"{', '.join(there)} exists already: choose another name; nothing was written"
        )
    if importlib.util.find_spec(module) is not None:
        raise UserError(f"Python has a module called {module} already: choose another name")
    for file, text in zip(files, texts, strict=True):
        named = text.replace("OTHER", method.__name__).replace("KIND", kind)
        try:
            with open(file, "x", encoding="utf-8") as new:
                new.write(named.replace("COMMAND", command).replace("MODULE", where))
        except OSError as error:
            raise disk_error(error, file) from error
    if listed:
        _list(folder / "src/ekiden/methods/__init__.py", method, where, kind)
    return files, command


def _of_library(name: str) -> type[Method]:
    """Return a method of the library, by its name."""
    # other commands here do not need them
    from ekiden.methods import METHODS, method_named

    kind = method_named(name)
    if kind not in METHODS:
        raise UserError(f"--like {name} is not a method of the library: choose one of ekiden list")
    return kind


def _refuse_name_of_another(name: str) -> None:
    """Refuse a name that a method of the library has."""
    from ekiden.methods import titles

    if name in titles():
        raise UserError(f"a method called {name} is there already: choose another name")


def _list(file: Path, other: type[Method], module: str, kind: str) -> None:
    """Name a new method next to another one in the list of all methods."""
    text = file.read_text(encoding="utf-8")
    name = other.__name__
    own = f"import {name} as {name}\n"
    place = f':{name}",\n'
    text = text.replace(own, f"{own}    from {module} import {kind} as {kind}\n")
    listed = f"{module.removeprefix('ekiden.methods.')}:{kind}"
    text = text.replace(place, f'{place}        "{listed}",\n')
    write_file(file, [text.encode()])


_METHOD = '''"""KIND: a method to start from. Replace the bodies of `run` and `train`."""

from collections.abc import Iterator
from dataclasses import dataclass

from ekiden.authoring import Client, Count, Fed, Fraction, Method, Size, State, Weights, mean, on_client


@dataclass(frozen=True)
class KIND(Method):
    """Each client trains the model that it receives and hands on its average with the received one."""

    epochs: Count = 10
    """E, epochs at each client"""
    keep: Fraction = 0.5
    """κ, weight of the received model"""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """The outer loop; after each `yield` the state is saved and the model measured."""
        while s.step < self.steps(len(fed.clients)):
            s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        """What happens at a client; what this returns leaves it."""
        return mean([model, client.fit(model, epochs=self.epochs)], [self.keep, 1 - self.keep])

    def steps(self, clients: int) -> int:
        """N: one client a step."""
        return clients

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·M bytes: each client but the first receives a model."""
        return (clients - 1) * model
'''

_TEST = '''"""KIND: the contract of all methods, and numbers worked out by hand."""

import ekiden
import torch
from ekiden.lab.conformance import check

from MODULE import KIND

SILOS = [(torch.randn(20, 4), torch.arange(20) % 2) for _ in range(3)]


def test_it_keeps_the_contract() -> None:
    assert [finding.broken for finding in check(KIND) if not finding.holds] == []


def test_nothing_changes_where_all_of_the_received_model_is_kept() -> None:
    network = torch.nn.Linear(4, 2)
    result = ekiden.run(KIND(keep=1.0), SILOS, network)
    assert result.weights is not None
    assert torch.equal(result.weights.params, torch.cat([network.weight.flatten(), network.bias]).detach())


def test_three_clients_receive_two_models() -> None:
    model = 4 * (4 * 2 + 2)  # bytes of 10 parameters
    assert ekiden.run(KIND(epochs=1), SILOS, torch.nn.Linear(4, 2)).bytes == 2 * model
'''

_LIKE_TEST = '''"""KIND: the contract of all methods, and what differs from OTHER."""

import torch

import ekiden
from ekiden.lab.conformance import check
from ekiden.methods import OTHER
from MODULE import KIND

SILOS = [(torch.randn(20, 4), torch.arange(20) % 2) for _ in range(3)]


def test_it_keeps_the_contract() -> None:
    assert [finding.broken for finding in check(KIND) if not finding.holds] == []


def test_it_is_the_other_one_until_it_is_changed() -> None:
    network = torch.nn.Linear(4, 2)
    one = ekiden.run(KIND(), SILOS, network, evaluate_every=0)
    other = ekiden.run(OTHER(), SILOS, network, evaluate_every=0)
    assert one.metrics[-1]["loss"] == other.metrics[-1]["loss"]
'''

_PAGE = """# KIND

The site begins this page with the docstring's first sentence, and ends it with the source and the departures. Say here
what a reader must know in addition, or nothing.

## When to use it

For which data, networks and budgets it is meant, and when another method is better.

## Command

```sh
ekiden run COMMAND --data digits --clients 10 --seeds 0 1 2
```

## Cost

Bytes as a formula, such as (N - 1)·M: each of the N clients but the first receives a model of M bytes.

## Settings

Which hyperparameters to choose first, and from which values.

## Results

Numbers from finished runs, with the command that made them, next to the printed ones; and what was not run.
"""
