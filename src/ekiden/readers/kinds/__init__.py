"""Kinds of samples: images, rows of a table, tokens or arrays, each a small dataclass of plain
values.

A run folder keeps this dataclass, so that files given later become the same tensors
(`inputs.encode`).
"""

import json
from dataclasses import is_dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import all_but, made, reading
from ekiden.core.base.errors import UserError, at, unknown
from ekiden.core.data.inputs import Inputs
from ekiden.readers.kinds.arrays import Arrays
from ekiden.readers.kinds.images import Images
from ekiden.readers.kinds.tables import Table
from ekiden.readers.kinds.texts import PAD, Tokens

__all__ = ["PAD", "Arrays", "Images", "Inputs", "Table", "Tokens"]

_KINDS: dict[str, type[Inputs]] = {kind.kind: kind for kind in (Images, Table, Tokens, Arrays)}
_GROUP: Final = "ekiden.kinds"


def named(name: str) -> type[Inputs]:
    """Return the kind of samples with this name: one of Ekiden's, of another package, or
    FILE.py:NAME.
    """
    if name in _KINDS:
        return _KINDS[name]
    own = outside.installed(_GROUP)
    if not outside.is_file(name) and name not in own:
        raise unknown("kind of samples", name, (*_KINDS, *own))
    found = outside.load(name) if outside.is_file(name) else own[name].load()
    if (
        not (isinstance(found, type) and issubclass(found, Inputs) and is_dataclass(found))
        or found.__abstractmethods__
    ):
        raise UserError(
            f"{name} is not a kind of samples: derive a frozen dataclass from ekiden.data.Inputs"
        )
    for part in ("kind", "words"):
        if not isinstance(getattr(found, part, None), str):
            raise UserError(f"{name} does not say its {part}: give the class a text {part!r}")
    if found.kind in _KINDS:
        raise UserError(
            f"{name} has the kind {found.kind!r}, which is Ekiden's own: give it another name"
        )
    return found


def from_json(values: Any) -> Inputs:
    """Return the inputs with these plain values."""
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        raise unknown("kind of samples", str(values)[:40], _KINDS)
    kind = named(values["kind"])
    with reading("the inputs", "the version of Ekiden that wrote them"):
        return made(kind, all_but(values, "kind"))


def of_tensor(x: Tensor) -> Inputs:
    """Return what samples (n, ...) are if only their tensor is known."""
    if x.dtype == torch.int64:
        return Tokens(vocabulary=int(x.max()) + 1 if x.numel() else 1, length=x.shape[1])
    return Images() if x.dtype == torch.uint8 else Arrays()


def terms(inputs: Inputs) -> str:
    """Return what parties must agree on, as text."""
    values = inputs.terms().to_json()
    # no code travels: each party has its own copy of the file
    if outside.is_file(values["kind"]):
        values["kind"] = outside.by_content(values["kind"])
    return json.dumps(values, sort_keys=True)


def of_terms(text: str) -> Inputs:
    """Return the inputs in a text that `terms` wrote."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("the inputs cannot be read: they are not valid JSON") from None
    if isinstance(values, dict) and outside.is_file(str(values.get("kind"))):
        with at("the kind of samples"):
            values["kind"] = outside.own_copy(str(values["kind"]))
    return from_json(values)
