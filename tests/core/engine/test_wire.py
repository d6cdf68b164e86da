"""The wire format: values come out bit for bit as they went in, and what is not a payload is
refused."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.core.base.checks import require
from ekiden.core.engine import wire
from ekiden.core.engine.folder import Marks
from ekiden.core.engine.method import INITIAL, State
from ekiden.core.engine.transport import live_refs
from ekiden.core.engine.wire import Ref, WireError, decode, encode, size
from ekiden.core.models import catalogue
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from tests.fuzz import examples

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
ANY_BITS = (math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1)


class Pair(NamedTuple):
    """A record without a dataclass."""

    left: Tensor
    right: float


@dataclass(frozen=True)
class Everything:
    """A payload with every kind of part."""

    number: int
    real: float
    switch: bool
    text: str
    tensor: Tensor
    weights: Optional[Weights]  # noqa: UP045  (both spellings must work)
    pair: Pair
    either: Ref[Weights] | Weights | None
    many: list[Tensor]
    fixed: tuple[int, str]
    any_length: tuple[float, ...]
    by_name: dict[str, Pair]
    by_number: Mapping[int, list[bool]]
    nested: Sequence[tuple[list[dict[str, int]], ...]]


@dataclass(frozen=True)
class Positive:
    """A payload that checks itself."""

    value: int

    def __post_init__(self) -> None:
        require(self.value > 0, "value", self.value, "1 or more")


def same(a: Any, b: Any) -> bool:
    """Whether two payloads are equal in type and in every bit (a float NaN has one bit pattern
    here)."""
    if isinstance(a, Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, Weights):
        return same(vars(a), vars(b))
    if isinstance(a, float):
        return type(b) is float and (
            (a == b and math.copysign(1, a) == math.copysign(1, b)) or (a != a and b != b)
        )
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if hasattr(a, "_fields") or isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (Everything, State)):
        return type(a) is type(b) and same(vars(a), vars(b))
    return type(a) is type(b) and bool(a == b)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype and small shape, 0-d and empty ones too, of any bits."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    n = math.prod(shape)
    if dtype == torch.bool:
        return torch.tensor(
            draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=dtype
        ).reshape(shape)
    width = n * torch.empty(0, dtype=dtype).element_size()
    data = draw(st.binary(min_size=width, max_size=width))
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


reals = st.floats() | st.sampled_from(ANY_BITS)
weights = st.builds(Weights, tensors(), tensors(), tensors())
pairs = st.builds(Pair, tensors(), reals)
refs: st.SearchStrategy[Ref[Weights]] = st.builds(Ref, st.text(), st.text())
everything = st.builds(
    Everything,
    number=st.integers(),
    real=reals,
    switch=st.booleans(),
    text=st.text(),
    tensor=tensors(),
    weights=st.none() | weights,
    pair=pairs,
    either=st.none() | weights | refs,
    many=st.lists(tensors(), max_size=3),
    fixed=st.tuples(st.integers(), st.text()),
    any_length=st.lists(reals, max_size=3).map(tuple),
    by_name=st.dictionaries(st.text(), pairs, max_size=2),
    by_number=st.dictionaries(st.integers(), st.lists(st.booleans(), max_size=2), max_size=2),
    nested=st.lists(
        st.lists(
            st.lists(st.dictionaries(st.text(), st.integers(), max_size=2), max_size=2), max_size=2
        ).map(tuple),
        max_size=2,
    ),
)


def example() -> Everything:
    """One payload for tests that damage it."""
    model = Weights(torch.arange(3.0), torch.tensor([0.5]), torch.tensor([7]))
    return Everything(
        3,
        0.1,
        True,
        "né",
        torch.ones(2, 2, dtype=torch.bfloat16),
        model,
        Pair(torch.tensor(1.0), math.inf),
        Ref("a", "0-0-train"),
        [torch.empty(0, 3), torch.tensor([True])],
        (1, "x"),
        (1.0, 2.0),
        {"p": Pair(torch.zeros(1, dtype=torch.int8), 0.0)},
        {4: [False]},
        [([{"k": 1}],)],
    )


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and tensor bytes of an encoding."""
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(header: object, body: bytes) -> bytes:
    """The encoding with this header."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def with_tree(value: Any, change: Any) -> bytes:
    """The encoding of `value` with its tree replaced by `change(tree)`."""
    header, body = parts(encode(value))
    header["__metadata__"]["tree"] = json.dumps(change(json.loads(header["__metadata__"]["tree"])))
    return joined(header, body)


def read_or_refuse(data: bytes) -> None:
    """Damage may go unnoticed, but only a payload or a WireError comes out."""
    with suppress(WireError):
        assert isinstance(decode(data, Everything), Everything)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(everything)
def test_what_goes_in_comes_out_bit_for_bit(value: Everything) -> None:
    data = encode(value)
    assert same(decode(data, Everything), value)
    assert data == b"".join(wire.chunks(value))
    assert encode(decode(data, Everything)) == data


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3), (1, 2, 1, 2)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    assert same(decode(encode(value), Tensor), value)
    assert size(value) == value.numel() * value.element_size()


def test_views_and_tensors_with_gradients_travel_as_their_values() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for value in (
        base.T,
        base[:, 1],
        base[::2],
        base.expand(2, 3, 4),
        base.clone().requires_grad_(),
    ):
        got = decode(encode(value), Tensor)
        assert torch.equal(got, value)
        assert not got.requires_grad


@pytest.mark.parametrize(
    ("value", "expected"),
    [(v, float) for v in ANY_BITS]
    + [(v, int) for v in (0, -1, 2**63, -(2**80))]
    + [(v, str) for v in ("", "a\x00b", "日本 \U0001f3c3", '"\\\n')]
    + [(None, None), (None, Weights | None), (True, bool), (True, bool | None), (1.5, float | None)]
    + [([], list[int]), ((), tuple[int, ...]), ((), tuple[()]), ({}, dict[str, Tensor])],
)
def test_plain_values(value: Any, expected: Any) -> None:
    assert same(decode(encode(value), expected), value)


def test_size_counts_content_only() -> None:
    assert size(None) == 0
    assert (size(1), size(1.0), size(True), size("né")) == (8, 8, 1, 3)
    model = Weights(torch.zeros(10), torch.zeros(4), torch.zeros(2, dtype=torch.int64))
    assert size(model) == 40 + 16 + 16
    assert size(Pair(torch.zeros(3, dtype=torch.int16), 2.0)) == 6 + 8
    assert size([model, None, {"ab": 1, "c": True}]) == 72 + (2 + 8) + (1 + 1)
    assert size({3: torch.empty(0)}) == 8
    # number, real, switch, text, tensor, weights, pair, either, many, fixed, any_length, by_name,
    # by_number, nested
    assert size(example()) == sum(
        (8, 8, 1, 3, 8, 12 + 4 + 8, 4 + 8, 1 + 9, 1, 8 + 1, 16, 1 + 1 + 8, 8 + 1, 1 + 8)
    )


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(tensors(), max_size=5))
def test_size_of_tensors_is_what_lies_behind_the_header(values: list[Tensor]) -> None:
    data = encode(values)
    assert size(values) == len(data) - 8 - int.from_bytes(data[:8], "little")


def test_shared_tensors_travel_as_often_as_they_occur() -> None:
    vector = torch.arange(4.0)
    value = [vector, vector, vector[1:3]]
    got = decode(encode(value), list[Tensor])
    assert same(got, value)
    assert size(value) == 16 + 16 + 8
    got[0][0] = 9
    assert got[1][0] == 0


def test_the_safetensors_library_reads_it() -> None:
    value = [torch.arange(3.0), torch.tensor(True), torch.empty(0, 2, dtype=torch.float16)]
    loaded = safetensors.torch.load(encode(value))
    assert same([loaded[str(i)] for i in range(3)], value)
    assert json.loads(parts(encode(value))[0]["__metadata__"]["tree"]) == [
        {"tensor": i} for i in range(3)
    ]


def test_a_resnet18_is_44_73_megabytes() -> None:
    model = Network(catalogue.build("resnet18", (3, 32, 32), 10)).weights()
    assert size(model) == 44_734_408
    assert len(model.params) == 11_173_962
    on_the_wire = sum(len(chunk) for chunk in wire.chunks(model))
    assert size(model) < on_the_wire < 1.001 * size(model)


def test_truncated_at_any_length_is_refused() -> None:
    data = encode(example())
    for length in range(len(data)):
        with pytest.raises(WireError):
            decode(data[:length], Everything)
    with pytest.raises(WireError):
        decode(data + b"\0", Everything)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_noise_is_refused(noise: bytes, with_length: bool) -> None:
    with pytest.raises(WireError):
        decode(len(noise).to_bytes(8, "little") + noise if with_length else noise, Everything)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_changed_bytes_give_a_value_or_a_wire_error(data: st.DataObject) -> None:
    damaged = bytearray(encode(example()))
    header = 8 + int.from_bytes(damaged[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    read_or_refuse(bytes(damaged))


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_a_changed_tree_gives_a_value_or_a_wire_error(data: st.DataObject) -> None:
    """Any node of the tree replaced by any JSON, or by something that looks like another kind of
    node."""
    kinds = st.sampled_from(["tensor", "float", "dict", "record", "fields"])

    def change(node: Any) -> Any:
        if isinstance(node, list) and node and data.draw(st.booleans()):
            i = data.draw(st.integers(0, len(node) - 1))
            return [*node[:i], change(node[i]), *node[i + 1 :]]
        if isinstance(node, dict) and node and data.draw(st.integers(0, 3)):
            name = data.draw(st.sampled_from(sorted(node)))
            return node | {name: change(node[name])}
        return data.draw(json_values | st.dictionaries(kinds, json_values, max_size=2))

    read_or_refuse(with_tree(example(), change))


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_a_changed_tensor_table_gives_a_value_or_a_wire_error(data: st.DataObject) -> None:
    header, body = parts(encode(example()))
    name = data.draw(st.sampled_from(sorted(header)))
    field = data.draw(st.sampled_from(sorted(header[name])))
    dtypes = st.sampled_from(["F64", "F32", "F8_E4M3", "F8_E8M0", "F4", "U64", "C64", "X"])
    shapes = st.lists(st.integers(0, 2**64), max_size=3)
    header[name][field] = data.draw(json_values | dtypes | shapes)
    read_or_refuse(joined(header, body))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, bool),
        (True, int),
        (1, float),
        (1.0, int),
        ("1", int),
        (1, str),
        (None, int),
        (0, None),
        (torch.ones(1), float),
        (1.0, Tensor),
        ([1], list[str]),
        ([1], tuple[int, int]),
        ([1], int),
        ([1], dict[str, int]),
        ({"a": 1}, dict[int, int]),
        ({"a": 1}, dict[str, str]),
        ({"a": 1}, list[int]),
        ({1: 1}, dict[str, int]),
        (Pair(torch.ones(1), 1.0), Weights),
        (Pair(torch.ones(1), 1.0), dict[str, Tensor]),
        (Weights(torch.ones(1), torch.ones(1), torch.ones(1)), Tensor),
        (Weights(torch.ones(1), torch.ones(1), torch.ones(1)), Weights | None),
        (State(), Weights),
        (State(), tuple[State, Marks]),
        (1, str | None),
        (torch.ones(1), Weights | float | None),
        ({"a": 1}, Pair | list[int]),
        ([1], Pair | None),
    ],
)
def test_another_type_than_announced_is_refused(value: Any, expected: Any) -> None:
    if expected == Weights | None:
        assert isinstance(decode(encode(value), expected), Weights)
        return
    with pytest.raises(WireError):
        decode(encode(value), expected)


def test_a_record_needs_exactly_its_fields() -> None:
    value = Pair(torch.ones(1), 1.0)
    assert isinstance(decode(with_tree(value, lambda t: t), Pair), Pair)
    for change in (
        lambda t: t | {"fields": {"left": t["fields"]["left"]}},
        lambda t: t | {"fields": t["fields"] | {"more": None}},
        lambda t: t | {"fields": {}},
        lambda t: t | {"record": "Other"},
        lambda t: {"fields": t["fields"]},
        lambda t: t["fields"],
    ):
        with pytest.raises(WireError):
            decode(with_tree(value, change), Pair)


def test_each_tensor_belongs_somewhere_once() -> None:
    two = [torch.ones(1), torch.zeros(1)]
    with pytest.raises(WireError, match="belong to no value"):
        decode(with_tree(two, lambda t: t[:1]), list[Tensor])
    for other in (0, 2, -1, True, "1"):
        with pytest.raises(WireError):
            decode(with_tree(two, lambda t, other=other: [t[0], {"tensor": other}]), list[Tensor])


def test_a_record_that_refuses_its_values_is_a_wire_error() -> None:
    assert decode(encode(Positive(1)), Positive) == Positive(1)
    with pytest.raises(WireError):
        decode(with_tree(Positive(1), lambda t: t | {"fields": {"value": 0}}), Positive)


@pytest.mark.parametrize("depth", [40, 5000, 200_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    header, body = parts(encode(1))
    header["__metadata__"]["tree"] = "[" * depth + "]" * depth
    expected: Any = int
    for _ in range(60):
        expected = list[expected]
    with pytest.raises(WireError):
        decode(joined(header, body), expected)
    deep = b'{"__metadata__":' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(WireError):
        decode(len(deep).to_bytes(8, "little") + deep, expected)


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 10**8 + 1, 10**9, 2**32, 0])
def test_a_huge_header_is_refused_without_memory_for_it(length: int) -> None:
    data = encode(example())
    with pytest.raises(WireError):
        decode(length.to_bytes(8, "little") + data[8:], Everything)


def test_files_of_others_are_refused() -> None:
    plain = safetensors.torch.save({"0": torch.ones(1)})
    other = safetensors.torch.save(
        {"0": torch.ones(1)}, {"format": "ekiden-0", "tree": '{"tensor":0}'}
    )
    mine = safetensors.torch.save(
        {"0": torch.ones(1)}, {"format": wire.FORMAT, "tree": '{"tensor":0}'}
    )
    assert torch.equal(decode(mine, Tensor), torch.ones(1))
    for data in (plain, other, b"", b"\x80\x04N.", b"PK\x03\x04"):
        with pytest.raises(WireError):
            decode(data, Tensor)
    with pytest.raises(WireError, match="version"):
        decode(other, Tensor)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        b"bytes",
        1j,
        [lambda: 0],
        {(1, 2): 3},
        torch.ones(1, dtype=torch.complex64),
    ],
)
def test_what_is_no_payload_does_not_travel(value: Any) -> None:
    with pytest.raises(WireError, match="cannot travel"):
        encode(value)


def test_states_travel_with_their_refs() -> None:
    model = Weights(torch.arange(3.0), torch.empty(0), torch.empty(0, dtype=torch.int64))
    for state in (
        State(),
        State(2, None),
        State(3, Ref("a", "k"), (model, Ref("b", "k"))),
        State(4, model),
    ):
        got, marks = decode(encode((state, Marks(1, 2, 3))), tuple[State, Marks])
        assert same(got, state)
        assert marks == Marks(1, 2, 3)
        assert live_refs(got) == live_refs(state)
    assert INITIAL not in live_refs(State())


def test_refs_stand_for_values_only_where_they_are_fetched() -> None:
    ref: Ref[Tensor] = Ref("a", "0-0-train")
    data = encode(([ref, torch.ones(1)], 3))
    with pytest.raises(WireError):
        decode(data, tuple[list[Tensor], int])
    asked = []

    def fetch(ref: Ref[Any]) -> Tensor:
        asked.append(ref)
        return torch.zeros(2)

    (first, second), number = decode(data, tuple[list[Tensor], int], fetch)
    assert asked == [ref]
    assert (first.tolist(), second.tolist(), number) == ([0, 0], [1], 3)
    others: list[Any] = [Ref("a", 3), Pair(torch.ones(1), 1.0)]  # type: ignore[arg-type]
    for bad in others:
        with pytest.raises(WireError):
            decode(encode([bad]), list[Tensor], fetch)


def test_moves_all_tensors_to_a_device_and_nothing_else() -> None:
    weights = Weights(torch.ones(3), torch.empty(0), torch.zeros(1, dtype=torch.int64))
    payload = [("a", weights, 2.5), {"b": torch.ones(2), "c": None}, Marks(bytes=3)]
    moved = wire.placed(payload, torch.device("meta"))
    tensors = [leaf for leaf in wire.leaves(moved) if isinstance(leaf, Tensor)]
    assert len(tensors) == 4
    assert all(t.is_meta for t in tensors)
    assert moved[0][0] == "a"
    assert moved[0][2] == 2.5
    assert moved[2] == Marks(bytes=3)
    assert isinstance(moved[0], tuple)
    assert isinstance(moved[0][1], Weights)
    assert wire.placed(payload, torch.device("cpu")) is payload
    assert wire.placed(None, torch.device("meta")) is None


def _lies_well(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def test_what_travelled_and_what_did_not_lie_alike_in_memory() -> None:
    flat = torch.arange(40.0)
    payload = (
        Weights(flat[1:13], flat[16:], torch.zeros(1, dtype=torch.int64)),
        flat[:12].view(3, 4).T,
    )
    kind = tuple[Weights, Tensor]
    assert not _lies_well(payload[0].params)
    there, here = wire.decode(wire.encode(payload), kind), wire.placed(payload)
    for value in (there, here):
        tensors = [leaf for leaf in wire.leaves(value) if isinstance(leaf, Tensor)]
        assert all(map(_lies_well, tensors))
        assert all(
            map(
                torch.equal,
                tensors,
                [leaf for leaf in wire.leaves(payload) if isinstance(leaf, Tensor)],
            )
        )
    assert wire.placed(here) is here


@pytest.mark.parametrize("name", ["a", "ab", "abcdefgh"])
def test_what_is_read_lies_well_whatever_stands_before_it(name: str) -> None:
    for n in range(1, 20):
        found = wire.decode(
            wire.encode({name: torch.ones(n), "more": torch.ones(3)}), dict[str, Tensor]
        )
        assert all(map(_lies_well, found.values()))
