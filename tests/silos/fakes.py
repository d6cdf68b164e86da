"""Silos without an engine between them: what Flower does, without processes and sockets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ekiden.data import FederatedData
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.remote_plan import Measuring
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, SiloFile, read
from ekiden.silos.trust import keys

NAMES = ("client-0", "client-1", "client-2")
SILENT = ("broke off on the way there", "broke off on the way back")
SPLIT = """
from dataclasses import replace

import torch

from ekiden.data import load, parse, split

def mine():
    digits = load("digits")
    few = replace(digits, train=digits.train.taken(torch.arange(480)))
    return split(few, parse("dirichlet:0.5"), 3, seed=0)
"""


def with_keys(
    folder: Path, names: Sequence[str], more: str = "", *, trusting: bool = True
) -> tuple[list[SiloFile], dict[str, str]]:
    """Silos with keys, each of which knows those of the others, and their public keys."""
    link = '[link]\nkey = "{name}.key"\npeers = "peers"\n'
    files = [
        silo_file(folder, name, more + link.format(name=name), trusting=trusting) for name in names
    ]
    public = {f.name: keys.read_public(keys.generate(f.beside(f.link.key))) for f in files}
    (folder / "peers").mkdir(exist_ok=True)
    for name, key in public.items():
        (folder / "peers" / f"{name}.pub").write_text(key)
    return files, public


def silo_file(folder: Path, name: str, more: str = "", *, trusting: bool = True) -> SiloFile:
    """The `silo.toml` of one of three silos that share some digits; some trust each other with the
    features."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(SPLIT)
    path = folder / f"{name}.toml"
    path.write_text(
        f'name = "{name}"\n[data]\npython = "own.py:mine"\n[hardware]\nthreads = 1\n{more}'
    )
    file = read(path)
    if not trusting:
        return file
    least = file.limits.min_clients or 2
    limits = replace(file.limits, level="all", min_active=0, min_clients=least)
    return replace(file, limits=limits)


@cache
def silos() -> FederatedData:
    """What `own.py` gives all silos, loaded once as by the process that answers all messages of
    one."""
    scope: dict[str, Any] = {}
    exec(SPLIT, scope)
    found = scope["mine"]()
    assert isinstance(found, FederatedData)
    return found


def mine(name: str) -> Held:
    """What it gives one of them."""
    return silos().dataset, next(c for c in silos().clients if c.name == name)


class FakeNodes:
    """Every request is answered by a new `Silo`, as every message gets a new process."""

    def __init__(self, files: Sequence[SiloFile]) -> None:
        self.files = {100 + i: file for i, file in enumerate(files)}
        self.log: list[tuple[int, bytes]] = []
        self.lose: Callable[[int, bytes], Lost | None] = lambda node, data: None
        self.corrupt: dict[int, bytes] = {}
        self.said: list[bytes] = []
        self._answers: dict[str, bytes | Lost] = {}

    def ids(self) -> Sequence[int]:
        return list(self.files)

    def send(self, node: int, data: bytes) -> str | Lost:
        ticket = str(len(self.log))
        self.log.append((node, data))
        lost = self.lose(node, data)
        done = lost is None or lost.why not in ("unsent", SILENT[0])
        answer = self.silo(node).answer(data) if done and node not in self.corrupt else b""
        self.said.append(answer)
        if lost is None or lost.why not in SILENT:
            self._answers[ticket] = lost or self.corrupt.get(node, answer)
        return ticket

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        return Silo(file, mine(file.name) if file.data.python and file.name in NAMES else None)

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        return {t: self._answers.pop(t) for t in tickets if t in self._answers}


def evaluate(
    run: Path,
    names: Sequence[str],
    nodes: session.Nodes,
    out: Path,
    keys: Mapping[str, str],
    say: Callable[[str], None],
    *,
    at: Mapping[float, float] = {},
    weights: Path | None = None,
    validation: bool = False,
    by: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """Measure a model of a run at silos."""
    file = str(weights.absolute()) if weights else ""
    asked = Measuring(str(run), validation, tuple(by), tuple(at.items()), file)
    return session.evaluate(asked, names, nodes, out, keys, say, **more)
