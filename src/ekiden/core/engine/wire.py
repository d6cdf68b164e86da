"""References to values, and the wire format: typed payloads as safetensors plus a small typed
header.

Nothing that comes from a file or another machine is ever unpickled.

A payload is weights, a tensor, a number, text, or a dataclass, NamedTuple, list, tuple or dict of
payloads. Encoded, it is one safetensors file: its tensors are named "0", "1", ... and its metadata
holds the tree that they belong to. Annotations tell the reader what to expect; whatever does not
fit is refused.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import (
    Any,
    Generic,
    NamedTuple,
    Protocol,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import DTYPES, safetensors_chunks
from ekiden.core.base.sums import Masked

T_co = TypeVar("T_co", covariant=True)
SERVER = "server"
EVERYONE = "*"
FORMAT = "ekiden-1"
_DEPTH = 32
# bytes, as PyTorch has it
_ALIGNMENT = 64


@dataclass(frozen=True)
class Ref(Generic[T_co]):
    """A reference to a value that stays at its owner and moves only when another party uses it.

    Attributes:
        owner: name of the client that holds it, or `EVERYONE` for values that all can derive from
            the seed.
        key: its name there.
    """

    owner: str
    key: str


class WireError(UserError):
    """A payload that cannot be read, or is not of the expected type."""


class Addable(Protocol):
    """A payload for which only the sum over clients is needed."""

    def plus(self, other: Self, /) -> Self:
        """Return the sum of both; the order must not matter."""


def leaves(value: Any) -> Iterator[Any]:
    """Yield all tensors, numbers, texts and Refs of a payload, in order; of a masked sum, those of
    the payload.
    """
    if isinstance(value, Masked):
        value = (value.numbers, value.shared)
    if isinstance(value, Ref):
        yield value
    elif is_record(value):
        for _, part in _fields(value):
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield key
            yield from leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from leaves(part)
    elif value is not None:
        yield value


def size(value: Any) -> int:
    """Return the bytes of content in a payload: tensors as they are, 8 for a number, 1 for a bool,
    text in UTF-8.

    The header around it (a few hundred bytes, whatever the model) is not counted.
    """
    return sum(_leaf_size(leaf) for leaf in leaves(value))


def placed(value: Any, device: torch.device | None = None) -> Any:
    """Return `value` with its tensors on `device`, laid out in memory as if it had travelled;
    itself if they are so.

    On some CPUs the rounding of a product depends on the order and alignment of its operands in
    memory. Tensors are therefore stored row by row, at the alignment that PyTorch gives them. A
    value then gives the same bits whether it travelled or not.
    """
    if isinstance(value, Tensor):
        value = value if device is None else value.to(device)
        if _lies_well(value):
            return value
        return value.clone(memory_format=torch.contiguous_format)
    tensors = [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    if all(_lies_well(t) and (device is None or t.device.type == device.type) for t in tensors):
        return value
    return rebuilt(value, lambda part: placed(part, device))


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a record, mapping, list or tuple in which each part is what `change` gives for it."""
    if is_record(value):
        return type(value)(**{name: change(part) for name, part in _fields(value)})
    if isinstance(value, Mapping):
        return {key: change(part) for key, part in value.items()}
    return type(value)(map(change, value))


def _lies_well(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % _ALIGNMENT == 0


class Encoded(NamedTuple):
    """A value as it travels."""

    data: bytes  # what `encode` gave
    digest: str  # its SHA-256 in hexadecimal

    @classmethod
    def of(cls, data: bytes) -> "Encoded":
        """`data` with its digest."""
        return cls(data, hashlib.sha256(data).hexdigest())


def encode(value: Any) -> bytes:
    """Return `value` as bytes.

    Raises:
        WireError: it holds something that is not a payload.
    """
    return b"".join(chunks(value))


def chunks(value: Any) -> Iterator[bytes | memoryview]:
    """Return the pieces of `encode(value)`, without copying tensors."""
    tensors: list[Tensor] = []
    tree = _describe(value, tensors)
    named = {str(i): t for i, t in enumerate(tensors)}
    return safetensors_chunks(
        named, {"format": FORMAT, "tree": json.dumps(tree, separators=(",", ":"))}
    )


def read_tree(tree: Any, tensors: Mapping[str, Tensor], expected: Any) -> Any:
    """Return the value of type `expected` that a JSON tree and the tensors named in it describe.

    Raises:
        WireError: they describe no such value.
    """
    return _Reader(dict(tensors)).read(tree, expected)


def decode(
    data: bytes | memoryview, expected: Any, fetch: Callable[[Ref[Any]], Any] | None = None
) -> Any:
    """Return the value of type `expected` that `data` holds.

    Args:
        data: what `encode` gave.
        expected: its type.
        fetch: gives the value behind a Ref that stands in place of another type; without it such a
            Ref is refused.

    Raises:
        WireError: the data are truncated, not a payload, or hold a value of another type.
    """
    # bytes are not copied
    data = bytes(data)
    try:
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    except (
        SafetensorError,
        ValueError,
        KeyError,
        RecursionError,
        TypeError,
        AttributeError,
    ) as error:
        raise _unreadable(error) from None
    return assemble(tensors, metadata, expected, fetch)


def assemble(
    tensors: dict[str, Tensor],
    metadata: Mapping[str, str],
    expected: Any,
    fetch: Callable[[Ref[Any]], Any] | None = None,
) -> Any:
    """Return what `decode` returns, from the tensors and the metadata of the encoded value."""
    try:
        if metadata.get("format") != FORMAT:
            raise WireError(
                f"not a payload of this version (expected {FORMAT}): was it written by Ekiden?"
            )
        tree = json.loads(metadata["tree"])
    except (ValueError, KeyError, RecursionError, TypeError, AttributeError) as error:
        raise _unreadable(error) from None
    reader = _Reader(tensors, fetch)
    value = reader.read(tree, expected)
    if reader.tensors:
        raise WireError(
            f"payload holds {len(reader.tensors)} tensors that belong to no value: refused"
        )
    return value


def _unreadable(error: Exception) -> WireError:
    return WireError(
        f"unreadable payload ({type(error).__name__}): truncated, or not written by Ekiden"
    )


def _leaf_size(leaf: Any) -> int:
    if isinstance(leaf, Tensor):
        return leaf.numel() * leaf.element_size()
    if isinstance(leaf, bool):
        return 1
    if isinstance(leaf, Ref):
        return size([leaf.owner, leaf.key])
    if isinstance(leaf, str):
        return len(leaf.encode())
    return 8


def is_record(value: Any) -> bool:
    """Return whether a value is a dataclass or a NamedTuple."""
    return _is_record_type(type(value))  # type: ignore[arg-type]  # mypy issue 11469


@cache
def _is_record_type(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")


def _fields(value: Any) -> list[tuple[str, Any]]:
    return [(name, getattr(value, name)) for name in field_names(type(value))]  # type: ignore[arg-type]  # mypy issue 11469


def _describe(value: Any, tensors: list[Tensor]) -> Any:
    """Return the JSON tree of `value`, and append its tensors to `tensors`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        if isinstance(value, float):
            return {"float": value.hex()}
        return value
    if isinstance(value, Tensor):
        if value.dtype not in DTYPES:
            raise WireError(
                f"a tensor of {value.dtype} cannot travel: convert it to one of "
                f"{', '.join(DTYPES.values())}"
            )
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if is_record(value):
        parts = {name: _describe(part, tensors) for name, part in _fields(value)}
        return {"record": record_name(type(value)), "fields": parts}
    if isinstance(value, (list, tuple)):
        return [_describe(part, tensors) for part in value]
    if isinstance(value, Mapping) and all(isinstance(k, (str, int)) for k in value):
        return {"dict": [[k, _describe(part, tensors)] for k, part in value.items()]}
    raise WireError(
        f"a {type(value).__name__} cannot travel: return weights, tensors, numbers, or dataclasses "
        "of them"
    )


class _Reader:
    """Builds a value of an expected type from a JSON tree. Each tensor is used once."""

    def __init__(
        self, tensors: dict[str, Tensor], fetch: Callable[[Ref[Any]], Any] | None = None
    ) -> None:
        self.tensors = tensors
        self._fetch = fetch
        self._depth = 0

    def read(self, node: Any, expected: Any) -> Any:
        if self._depth > _DEPTH:
            raise WireError("payload nested too deeply: refused")
        if self._fetch is not None and isinstance(node, dict) and node.get("record") == "Ref":
            return self._fetch(self._record(node, Ref))
        if isinstance(node, dict) and node.get("record") == Masked.__name__ and _addable(expected):
            expected = Masked
        self._depth += 1
        if get_origin(expected) in (Union, types.UnionType):
            expected = _member(node, get_args(expected))
        value = self._leaf(node, expected) if expected in _LEAVES else self._branch(node, expected)
        self._depth -= 1
        return value

    def _leaf(self, node: Any, expected: Any) -> Any:
        if expected in (None, type(None)) and node is None:
            return None
        if expected in (bool, int, str) and type(node) is expected:
            return node
        if expected is float and isinstance(node, dict) and isinstance(node.get("float"), str):
            try:
                return float.fromhex(node["float"])
            except (ValueError, OverflowError):
                raise WireError("payload holds an unreadable number: refused") from None
        if expected is Tensor and isinstance(node, dict) and isinstance(node.get("tensor"), int):
            name = str(node["tensor"])
            if name in self.tensors:
                return placed(self.tensors.pop(name))
            raise WireError("payload names a tensor that is missing or used twice: refused")
        raise _other(expected)

    def _branch(self, node: Any, expected: Any) -> Any:
        origin = get_origin(expected)
        args = get_args(expected)
        if origin in (list, Sequence) and isinstance(node, list):
            return [self.read(part, args[0]) for part in node]
        if origin is tuple and isinstance(node, list):
            kinds = [args[0]] * len(node) if len(args) == 2 and args[1] is Ellipsis else list(args)
            if len(kinds) == len(node):
                return tuple(self.read(part, kind) for part, kind in zip(node, kinds, strict=True))
        if not isinstance(node, dict):
            raise _other(expected)
        if origin in (dict, Mapping) and isinstance(node.get("dict"), list):
            pairs = [
                p
                for p in node["dict"]
                if isinstance(p, list) and len(p) == 2 and type(p[0]) is args[0]
            ]
            if len(pairs) == len(node["dict"]):
                return {key: self.read(part, args[1]) for key, part in pairs}
        return self._record(node, origin or expected)

    def _record(self, node: dict[str, Any], record: Any) -> Any:
        parts = node.get("fields")
        if (
            not isinstance(record, type)
            or node.get("record") != record_name(record)
            or not isinstance(parts, dict)
            or set(parts) != set(field_names(record))
        ):
            raise _other(record)
        hints = _field_types(record)
        values = {name: self.read(part, hints[name]) for name, part in parts.items()}
        try:
            return record(**values)
        except (UserError, ValueError, TypeError) as error:  # the dataclass checks its own values
            raise WireError(
                f"payload holds an impossible {record.__name__} ({error}): refused"
            ) from None


_LEAVES = (None, type(None), bool, int, str, float, Tensor)


def _addable(kind: Any) -> bool:
    """Return whether a masked sum can stand in place of a value of this type."""
    union = get_origin(kind) in (Union, types.UnionType)
    return any(
        hasattr(get_origin(one) or one, "plus") for one in (get_args(kind) if union else (kind,))
    )


def _other(expected: Any) -> WireError:
    return WireError(
        f"payload does not hold the {getattr(expected, '__name__', expected)} that was announced: "
        "refused"
    )


def _member(node: Any, kinds: tuple[Any, ...]) -> Any:
    """Return the one member of a union that `node` can be."""
    for kind in kinds:
        record = get_origin(kind) or kind
        name = record_name(record)
        if isinstance(node, dict):
            fits = (
                node.get("record") == name
                or ("tensor" in node and record is Tensor)
                or ("float" in node and record is float)
                or ("dict" in node and record is dict)
            )
        elif isinstance(node, list):
            fits = record in (list, tuple, Sequence)
        else:
            fits = record is type(node)
        if fits:
            return kind
    raise WireError("payload holds a value of a type that was not announced: refused")


def record_name(record: Any) -> str:
    """Return the name of a dataclass in payloads."""
    if isinstance(record, type):
        return record.__name__
    return ""


@cache
def field_names(record: type) -> Sequence[str]:
    """Return the names of the fields of a dataclass or NamedTuple; none for other types."""
    if dataclasses.is_dataclass(record):
        return [f.name for f in dataclasses.fields(record)]
    return typing.cast(Sequence[str], getattr(record, "_fields", ()))


@cache
def _field_types(record: type) -> Mapping[str, Any]:
    """Return the types of the fields of a dataclass or NamedTuple. To find them takes longer than
    to read a record.
    """
    return get_type_hints(record)
