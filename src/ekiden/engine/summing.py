"""Take an addable payload apart into whole numbers that masks can hide, and put a complete sum together again."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.modular import Masked, Packed, Shared, bits_of, digest, narrowed, wide
from ekiden.engine import wire


class Summands(NamedTuple):
    """The whole numbers of a payload.

    Attributes:
        form: JSON tree of the payload, with places in place of the numbers that are added up.
        words: these numbers as unsigned words, tensor by tensor; single numbers are in the last one.
        bits: how many bits of each count.
        shared: whole numbers that are not added up.
    """

    form: str
    words: list["np.ndarray[Any, Any]"]
    bits: list[int]
    shared: list[int]

    @property
    def check(self) -> int:
        """The digest of the numbers, except for those that may wrap around."""
        return digest([w.view(f"<i{b // 8}") for w, b in zip(self.words, self.bits, strict=True) if _whole_word(w, b)])

    def tensors(self) -> list[Tensor]:
        """Return the numbers as they travel."""
        return [narrowed(w, b) for w, b in zip(self.words, self.bits, strict=True)]


def summands(value: Any) -> Summands:
    """Take a payload apart."""
    taken = _Taken([], [], [], [])
    tree = taken.tree(value)
    if taken.singles:
        taken.tensors.append((torch.tensor(taken.singles, dtype=torch.int64), 64))
    form = json.dumps({"tree": tree, "shapes": taken.shapes}, separators=(",", ":"))
    words = [wide(t.flatten(), b) for t, b in taken.tensors]
    return Summands(form, words, [b for _, b in taken.tensors], taken.shared)


def opened(total: Masked, kind: Any) -> Any:
    """Return the payload of type `kind` that a complete sum hides."""
    words = [wide(t, b) for t, b in zip(total.numbers, total.bits, strict=True)]
    if Summands(total.form, words, total.bits, total.shared).check != total.check:
        raise UserError(
            f"sum {total.sum} does not open: a number in it is too large (leave out silos, or some samples of the "
            "largest), or a silo changed it"
        )
    try:
        form = json.loads(total.form)
        shapes = form["shapes"]
        named = {str(i): t.reshape(shape) for i, (t, shape) in enumerate(zip(total.numbers, shapes, strict=False))}
        singles = total.numbers[-1].tolist() if len(total.numbers) > len(shapes) else []
        tree = _with_numbers(form["tree"], {"number": singles, "shared": total.shared})
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise wire.WireError(f"sum {total.sum} cannot be read ({type(error).__name__}): refused") from None
    return wire.read_tree(tree, named, kind)


class _Taken(NamedTuple):
    """What `summands` found so far."""

    tensors: list[tuple[Tensor, int]]
    shapes: list[tuple[int, ...]]
    singles: list[int]
    shared: list[int]

    def tree(self, value: Any, packed: int = 0) -> Any:
        """Return the JSON tree of `value`; its numbers go into the lists."""
        if isinstance(value, Tensor):
            if not (bits := packed or bits_of(value)):
                raise UserError(
                    f"a sum of {value.dtype} cannot be masked: add up whole numbers of int32 or int64 (FedKrylov: "
                    "--sums whole), or start the run with --no-sealed where silos allow that"
                )
            self.tensors.append((value, bits))
            self.shapes.append(tuple(value.shape))
            return {"tensor": len(self.tensors) - 1}
        if type(value) is int:
            self.singles.append(value)
            return {"number": len(self.singles) - 1}
        if (dataclasses.is_dataclass(value) and not isinstance(value, type)) or hasattr(value, "_fields"):
            return {"record": wire.record_name(type(value)), "fields": self.record(value)}
        if isinstance(value, (list, tuple)):
            return [self.tree(part) for part in value]
        if isinstance(value, Mapping):
            return {"dict": [[key, self.tree(part)] for key, part in value.items()]}
        raise UserError(f"a {type(value).__name__} in a sum cannot be masked: add up whole numbers")

    def record(self, value: Any) -> dict[str, Any]:
        """Return the fields of a record as `tree` gives them."""
        hints = get_type_hints(type(value), include_extras=True)
        found = {}
        for name in wire.field_names(type(value)):
            marks, part = getattr(hints[name], "__metadata__", ()), getattr(value, name)
            packed = next((getattr(value, mark.bits) for mark in marks if isinstance(mark, Packed)), 0)
            if Shared in marks:
                self.shared.append(part)
                found[name] = {"shared": len(self.shared) - 1}
            else:
                found[name] = self.tree(part, packed)
        return found


def _whole_word(words: "np.ndarray[Any, Any]", bits: int) -> bool:
    return bool(words.itemsize * 8 == bits)


def _with_numbers(node: Any, numbers: Mapping[str, list[int]]) -> Any:
    """Return a tree with numbers in their places."""
    if isinstance(node, dict):
        kind, *more = node or [""]
        if kind in numbers and not more:
            return numbers[kind][node[kind]]
        return {key: _with_numbers(part, numbers) for key, part in node.items()}
    return [_with_numbers(part, numbers) for part in node] if isinstance(node, list) else node
