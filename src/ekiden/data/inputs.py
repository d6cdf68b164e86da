"""Kinds of samples: images, rows of a table, tokens or arrays, each a small dataclass of plain values.

A run folder keeps this dataclass, so that files given later become the same tensors (`inputs.encode`).
"""

import json
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ekiden.base.codec import made, plain, reading
from ekiden.base.errors import UserError, unknown
from ekiden.data.arrays import Arrays
from ekiden.data.decode import Images
from ekiden.data.tables import Table
from ekiden.data.texts import PAD, Tokens

__all__ = ["PAD", "Arrays", "Images", "Inputs", "Table", "Tokens"]

Inputs: TypeAlias = Images | Table | Tokens | Arrays
_KINDS: dict[str, type[Inputs]] = {"images": Images, "table": Table, "tokens": Tokens, "arrays": Arrays}


def kind(inputs: Inputs) -> str:
    """Return the name of these inputs: images, table, tokens or arrays."""
    return type(inputs).__name__.lower()


def to_json(inputs: Inputs) -> dict[str, Any]:
    """Return the inputs as plain values."""
    return {"kind": kind(inputs), **plain(inputs)}


def from_json(values: Any) -> Inputs:
    """Return the inputs with these plain values."""
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        name = values.get("kind") if isinstance(values, dict) else values
        raise unknown("kind of inputs", str(name), _KINDS)
    with reading("the inputs", "the version of Ekiden that wrote them"):
        return made(_KINDS[values["kind"]], {name: value for name, value in values.items() if name != "kind"})


def of_tensor(x: Tensor) -> Inputs:
    """Return what samples (n, ...) are if only their tensor is known."""
    if x.dtype == torch.int64:
        return Tokens(vocabulary=int(x.max()) + 1 if x.numel() else 1, length=x.shape[1])
    return Images() if x.dtype == torch.uint8 else Arrays()


def terms(inputs: Inputs) -> str:
    """Return what parties must agree on, as text; "" for plain inputs. A tokenizer's digest stands for its path."""
    if isinstance(inputs, Tokens) and inputs.digest:
        inputs = replace(inputs, tokenizer="model")
    if isinstance(inputs, Images) and inputs == Images(inputs.size):  # the shape says the same
        return ""
    return "" if is_plain(inputs) else json.dumps(to_json(inputs), sort_keys=True)


def of_terms(text: str, x: Tensor) -> Inputs:
    """Return the inputs in a text that `terms` wrote; if it is empty, the inputs of samples like `x`."""
    try:
        return from_json(json.loads(text)) if text else of_tensor(x)
    except (ValueError, RecursionError):
        raise UserError("the inputs cannot be read: they are not valid JSON") from None


def is_plain(inputs: Inputs) -> bool:
    """Return whether the parties need not agree on them: images of their own size, or arrays."""
    return inputs in (Images(), Arrays())
