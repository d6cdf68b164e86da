"""Silos that hold data of a kind, in this process: files, keys, and what they agree on."""

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from ekiden import Training
from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust import keys
from tests.lifecycle.kinds import SILOS, Kind
from tests.silos.fakes import FakeNodes

TRAINING = Training(lr=3e-3, batch_size=16)


@dataclass(frozen=True)
class Silos:
    """Silos of a kind of data.

    Attributes:
        kind: what they hold.
        root: the folder of their files.
        public: their public keys.
    """

    kind: Kind
    root: Path
    public: Mapping[str, str]

    @property
    def paths(self) -> list[Path]:
        """The data of each silo."""
        return [self.root / f"{name}{self.kind.suffix}" for name in SILOS]

    def nodes(self) -> FakeNodes:
        """The engine, which asks each silo through its file."""
        return FakeNodes([read(self.root / f"{name}.toml") for name in SILOS])

    def run(self, method: Method, folder: Path, nodes: FakeNodes | None = None) -> Result:
        """Run a method over them, or continue it."""
        plan: RemotePlan[Method] = RemotePlan(
            Recipe(method, model=self.kind.network(self.root), training=TRAINING, evaluate_every=0),
            ",".join(SILOS),
            patience=20.0,
            evaluate_dp="exact",  # as on one machine
        )
        return session.run(
            plan, nodes or self.nodes(), folder, self.public, lambda line: None, poll=0
        )


def silos(kind: Kind, root: Path, link: Callable[[str], str] = lambda name: "") -> Silos:
    """Make the files of all silos; tables are agreed on by the commands that users type.

    Args:
        kind: what they hold.
        root: the folder of their files, which may have their keys already.
        link: how a silo reaches its SuperLink.
    """
    kind.make(root)
    _write(kind, root, {}, link)
    public = {name: keys.read_public(_key(root / f"{name}.key")) for name in SILOS}
    (root / "peers").mkdir(exist_ok=True)
    for name in SILOS:
        (root / "peers" / f"{name}.pub").write_text(public[name])
    if kind.agreed:
        for name in SILOS:
            ekiden("silo", "sums", root / f"{name}.toml")
        sums = [root / f"{name}-sums.json" for name in SILOS]
        ekiden("federation", "agree", *sums, "--out", root / "agreed.json")
        _write(kind, root, {"agreed": "agreed.json"}, link)
    return Silos(kind, root, public)


def _key(private: Path) -> Path:
    """Return the public key, made if it is not there."""
    public = private.with_name(f"{private.name}.pub")
    return public if public.exists() else keys.generate(private)


def ekiden(*args: str | Path) -> str:
    """Run a command of the command line in this process; return what it printed.

    Raises:
        UserError: the command line would print this line and exit with code 2.
    """
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        call([str(arg) for arg in args])
    return out.getvalue()


def refused(do: Callable[[], object]) -> str:
    """Return the line with which something is refused; the test fails if it is not, or in any other
    way."""
    with pytest.raises(UserError) as caught:
        do()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _write(kind: Kind, root: Path, more: Mapping[str, str], link: Callable[[str], str]) -> None:
    for name in SILOS:
        data = kind.toml(root / f"{name}{kind.suffix}", more)
        reach = f'[link]\nkey = "{name}.key"\npeers = "peers"\n{link(name)}'
        (root / f"{name}.toml").write_text(
            f'name = "{name}"\n{data}[hardware]\nthreads = 1\n[limits]\nlevel = "all"\napprove = false\n{reach}'
        )
