"""Requests to a silo, and what it says."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden.core.engine import wire
from ekiden.core.engine.folder import code_version
from ekiden.core.engine.method import INITIAL, Method
from ekiden.core.engine.setup import initial_weights
from ekiden.core.training.weights import Weights
from ekiden.methods import FedSeq
from ekiden.readers.kinds import of_tensor
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.parcel import (
    Answer,
    Ask,
    pack,
    unpack,
)
from tests.silos.fakes import NAMES, FakeNodes, public_key, seal_for, with_keys
from tests.silos.sessions import Stop

TERMS = Agreement(
    "0123456789abcdef",
    code_version(),
    Recipe(FedSeq(epochs=1), model="mlp"),
    dataset="digits",
    shape=(1, 8, 8),
    classes=tuple(map(str, range(10))),
    mean=(0.0,),
    std=(1.0,),
    clients=NAMES[:2],
    keys=tuple(public_key(name) for name in NAMES[:2]),
)


def terms(method: Method, **changes: Any) -> Agreement:
    if "clients" in changes:
        changes["keys"] = tuple(public_key(name) for name in changes["clients"])
    return replace(with_recipe(TERMS, method=method), **changes)


def with_recipe(agreed: Agreement, **changes: Any) -> Agreement:
    """The terms with another recipe."""
    return replace(agreed, recipe=replace(agreed.recipe, **changes))


def said_of_recipe(**entries: Any) -> str:
    """The text of terms whose recipe has entries that no recipe can have."""
    values = json.loads(TERMS.text())
    return json.dumps(values | {"recipe": values["recipe"] | entries})


def said(file: SiloFile, data: bytes) -> str:
    """The silo's reason for refusing; on one line."""
    answer, body = unpack(Silo(file).answer(seal_for(file, data)), Answer)
    assert "\n" not in answer.error
    assert not (answer.error and body)
    return answer.error


def task(
    agreed: Agreement = TERMS, model: Any = INITIAL, extra: bytes = b"", **changes: Any
) -> bytes:
    arguments = wire.encode((model,))
    ask = Ask("task", agreed.text(), task="train", length=len(arguments))
    return pack(replace(ask, **changes), (arguments, extra))


def nothing_done(file: SiloFile) -> bool:
    return not list(file.folder.rglob("outcome-*"))


def model(agreed: Agreement = TERMS) -> Weights:
    from ekiden.core.base.settings import Hardware
    from ekiden.data import Dataset, Samples

    none = Samples(torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64))
    return initial_weights(
        agreed.setup(
            Dataset("none", none, none, agreed.classes, inputs=of_tensor(none.x)),
            Hardware(threads=1),
        )
    )


def sealed_in(folder: Path) -> tuple[FakeNodes, dict[str, str]]:
    limits = '[limits]\nmethods = ["fedseq", "dispfl", "scaffold"]\n'
    files, public = with_keys(folder, NAMES, limits)
    return FakeNodes(files), public


@contextmanager
def killed(
    nodes: FakeNodes, step: int, node: int, kind: str = "task", *, done: bool = False
) -> Iterator[None]:
    """The coordinator dies while it asks a silo for something in a step, which the silo does or
    not."""

    def lose(to: int, data: bytes) -> Lost | None:
        ask = unpack(data, Ask)[0]
        if (ask.kind, ask.step, to) == (kind, step, node):
            if done:
                nodes.silo(to).answer(data)
            raise Stop
        return None

    nodes.lose = lose
    with pytest.raises(Stop):
        yield
    nodes.lose = lambda to, data: None


def shelf_of(nodes: FakeNodes, node: int) -> Path:
    (folder,) = (nodes.files[node].folder / "runs").iterdir()
    return folder


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)
