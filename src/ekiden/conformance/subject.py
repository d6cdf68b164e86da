"""A method under test, and the small runs that several checks use; each run is made once."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, NoReturn, TypeVar, overload

import torch

from ekiden.api import run
from ekiden.base.checks import allows
from ekiden.base.seeds import seeded
from ekiden.base.settings import Hardware, Training
from ekiden.conformance import toy
from ekiden.conformance.watching import Seen, watched
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.results.result import Result
from ekiden.training.weights import Weights

CLIENTS = 4
T = TypeVar("T")


class Broken(Exception):
    """A method breaks a line of the contract; the text is what was found."""


class _Once(Generic[T]):
    """A property that is computed once, whether that succeeds or fails."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, subject: None, owner: type) -> "_Once[T]": ...
    @overload
    def __get__(self, subject: object, owner: type) -> T: ...
    def __get__(self, subject: object | None, owner: type) -> "T | _Once[T]":
        if subject is None:
            return self
        kept: dict[str, T | Exception] = subject.__dict__
        if self._name not in kept:
            try:
                kept[self._name] = self._make(subject)
            except Exception as error:
                kept[self._name] = error
        value = kept[self._name]
        if isinstance(value, Exception):
            raise value
        return value

    def __set__(self, subject: object, value: object) -> NoReturn:
        raise AttributeError(self._name)


class Subject:
    """A method under test.

    Attributes:
        kind: its class.
        seen: what was seen in `watched`, also if that run failed.
    """

    def __init__(self, kind: type[Method]) -> None:
        self.kind = kind
        self.seen = Seen()

    @_Once
    def default(self) -> Method:
        """The method with its defaults."""
        return self.kind()

    @property
    def small(self) -> Method:
        """A new instance with counts reduced to 2; 2 rounds if it has rounds, with half the clients or more in each.

        Whole numbers that may not be 2 stay as they are.

        Each run gets its own instance, so that nothing is carried over.
        """
        _ = self.default
        method = self.kind()
        if getattr(method, "participation", 1.0) < 0.5:
            method = replace(method, **{"participation": 0.5})
        counts = {name: getattr(method, name) for name in self.counts}
        return replace(method, **{name: 2 if name == "rounds" else min(value, 2) for name, value in counts.items()})

    @property
    def counts(self) -> list[str]:
        """The fields with whole numbers that may be 2."""
        whole = [f.name for f in fields(self.kind) if type(getattr(self.default, f.name)) is int]
        return [name for name in whole if allows(self.kind, name, 2)]

    @_Once
    def steps(self) -> int:
        """The number of steps of the small run, as the method says."""
        return self.small.steps(CLIENTS)

    @_Once
    def plain(self) -> Result:
        """The small run in memory. One step more than allowed is made, so that it can be noticed."""
        with seeded(1):
            return run(self.small, toy.blobs(), toy.Tiny, stop_after=self.steps + 1, **settings())

    @_Once
    def watched(self) -> tuple[Result, dict[str, Any]]:
        """The small run in a folder, watched, and the folder's configuration. Models are only measured at the end."""
        _ = self.plain  # a run that fails is only made once
        with TemporaryDirectory() as folder, watched() as self.seen, seeded(2):
            path = Path(folder) / "run"
            once = settings() | {"evaluate_every": 10**9}
            result = run(self.small, toy.blobs(), toy.Tiny, folder=path, stop_after=self.steps + 1, **once)
            return result, read_config(path)


def settings() -> dict[str, Any]:
    """Return the settings of the small runs."""
    return {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1), "seed": 3}


def same(a: Weights | None, b: Weights | None) -> bool:
    """Return whether two models are equal bit for bit."""
    if a is None or b is None:
        return a is b
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def files(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that must not depend on how the run was made."""
    names = ["metrics.jsonl", "ledger.jsonl", "model.safetensors"]
    names += [str(p.relative_to(folder)) for p in sorted(folder.glob("personal/*"))]
    return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
