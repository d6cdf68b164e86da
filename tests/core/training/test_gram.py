"""Rounded sums: by hand, packed and unpacked, found again from their remainders, and never silently
wrong."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import pack, unpack
from ekiden.core.training.gram import (
    Rounded,
    Rounding,
    Sums,
    TargetSums,
    measure,
    measure_targets,
    rounded,
    rounded_size,
)
from ekiden.core.training.gram import size as sums_size
from ekiden.core.training.gram import size_of_targets as targets_size


def drawn(n: int = 2000, width: int = 30, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features from 0 to 127 with large means, as those of patches are."""
    draw = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 3, generator=draw) @ torch.randn(3, width, generator=draw)
    features = (60 + 8 * common + 8 * torch.randn(n, width, generator=draw)).round().clamp(0, 127)
    return features, torch.randint(classes, (n,), generator=draw)


def of(x: Tensor, y: Tensor, kind: Rounding | None) -> Sums:
    return measure([(x, y)], 4, x.shape[1], rounding=kind)


def bits(sums: Sums) -> list[list[float]]:
    gram = sums.gram
    assert isinstance(gram, Rounded)
    return [t.tolist() for t in (gram.squares, gram.products, sums.classes, sums.counts)]


def test_three_features_by_hand() -> None:
    """Products 1000, -1001 and 95 in units of 10 are 100, -100 (halves go up) and 10; modulo 2^12
    -100 is 3996."""
    gram = torch.tensor([[50.0, 1000, -1005], [0, 60, 95], [0, 0, 70]], dtype=torch.float64)
    found = rounded(gram, Rounding(12, 10))
    assert found.squares.tolist() == [50, 60, 70]
    numbers = "".join(f"{number:012b}" for number in (100, 3996, 10)) + "0000"
    assert found.products.tolist() == [int(numbers[i : i + 8], 2) for i in range(0, 40, 8)]
    assert (found.width, found.parts) == (3, 1)
    assert found.error == pytest.approx(10 / 12**0.5)


@given(st.integers(12, 31), st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=50))
def test_numbers_come_back_modulo_a_power_of_two(b: int, numbers: list[int]) -> None:
    packed = pack(torch.tensor(numbers), b)
    assert len(packed) == -(-b * len(numbers) // 8)
    assert unpack(packed, b, len(numbers)).tolist() == [number % 2**b for number in numbers]


def test_many_products_are_packed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = drawn()
    whole = of(x, y, Rounding(13, 2048))
    monkeypatch.setattr("ekiden.core.base.sums.BLOCK", 16)
    monkeypatch.setattr("ekiden.core.training.gram.BLOCK", 16)
    assert bits(of(x, y, Rounding(13, 2048))) == bits(whole)


@pytest.mark.parametrize("b", [16, 20, 31])
def test_products_are_found_again(b: int) -> None:
    """Each of five parts is at most half a unit away from what it stands for."""
    x, y = drawn()
    kind = Rounding.within(b, len(x), 2**12)
    total = of(x[:0], y[:0], kind)
    for start in range(0, len(x), 400):
        total = total.plus(of(x[start : start + 400], y[start : start + 400], kind))
    exact = x.double().T @ x.double()
    found = total.matrix()
    assert torch.equal(found.diagonal(), exact.diagonal())
    assert torch.equal(found, found.T)
    assert float((found - exact).abs().max()) <= 5 * kind.unit / 2
    assert (kind.unit == 1) == torch.equal(found, exact) == (total.error == 0) == (b == 31)
    assert isinstance(total.gram, Rounded)
    assert total.gram.parts == 6
    deviation = float((found - exact)[torch.ones(30, 30).triu(1).bool()].square().mean().sqrt())
    assert kind.unit == 1 or 0.8 < deviation / (kind.unit * (5 / 12) ** 0.5) < 1.2


@pytest.mark.parametrize("seed", range(10))
def test_the_same_bits_in_any_order_and_without_who_left(seed: int) -> None:
    x, y = drawn(seed=seed)
    draw, kind = torch.Generator().manual_seed(seed), Rounding.within(14, len(x), 2**12)
    cuts = sorted({*torch.randint(1, len(x), (4,), generator=draw).tolist()})
    parts = [of(x[a:b], y[a:b], kind) for a, b in pairwise([0, *cuts, len(x)])]

    def added(order: list[int]) -> Sums:
        total = parts[order[0]]
        for i in order[1:]:
            total = total.plus(parts[i])
        return total

    order = torch.randperm(len(parts), generator=draw).tolist()
    assert bits(added(order)) == bits(added(list(range(len(parts)))))


def test_room_is_for_the_announced_samples_whatever_their_features() -> None:
    """Features that are 0 or 127 in half of the samples have the largest variance."""
    n = 4000
    x = torch.where(
        torch.arange(n)[:, None] % 2 == 0,
        torch.tensor([0.0, 127.0, 0.0]),
        torch.tensor([127.0, 0, 0]),
    )
    y = torch.zeros(n, dtype=torch.int64)
    kind = Rounding.within(12, n, 2**12)
    assert kind.unit == n * 2**12 // 2**11 == 8000
    found = of(x, y, kind).matrix()
    assert float((found - x.double().T @ x.double()).abs().max()) <= kind.unit / 2
    with pytest.raises(
        UserError, match=r"do not fit into 12 bits: start a new run with samples 4000 or more"
    ):
        of(x, y, Rounding.within(12, n // 2, 2**12)).matrix()
    assert Rounding.within(31, 10, 2**12).unit == 1


def test_bytes_are_those_of_the_formula() -> None:
    x, y = drawn(width=9)
    for b in (12, 17, 31):
        kind = Rounding.within(b, len(x), 2**12)
        for sums, expected in (
            (of(x, y, kind), sums_size(4, 9, bits=b)),
            (measure_targets([(x, x[:, :2])], 2, 9, rounding=kind), targets_size(2, 9, bits=b)),
        ):
            gram = sums.gram
            assert isinstance(gram, Rounded)
            tensors = [
                t for t in (*vars(gram).values(), *vars(sums).values()) if isinstance(t, Tensor)
            ]
            numbers = 3 + isinstance(sums, TargetSums)
            assert sum(t.numel() * t.element_size() for t in tensors) + 8 * numbers == expected
    assert rounded_size(1, 12) == 28  # no product at all
    assert of(x[:, :1], y, kind).matrix().tolist() == [[float(x[:, 0].double().square().sum())]]


def test_targets_have_the_same_products() -> None:
    x, y = drawn()
    kind = Rounding.within(16, len(x), 2**12)
    sums = measure_targets([(x, x[:, :2])], 2, 30, rounding=kind)
    assert torch.equal(sums.matrix(), of(x, y, kind).matrix())
    assert torch.equal(sums.plus(sums).matrix(), 2 * sums.matrix())


def test_what_cannot_be_rounded_sums_is_refused() -> None:
    x, y = drawn(20)
    kind = Rounding(16, 4)
    sums = of(x, y, kind)
    with pytest.raises(UserError, match="use one bits and one samples"):
        sums.plus(of(x, y, Rounding(16, 8)))
    with pytest.raises(UserError, match="use one bits and one samples"):
        sums.plus(of(x, y, Rounding(17, 4)))
    with pytest.raises(UserError, match="use the same bits everywhere"):
        sums.plus(of(x, y, None))
    gram = sums.gram
    assert isinstance(gram, Rounded)
    many = Rounded(gram.squares * 0 + 2**31 - 1, gram.products, 16, 4, 1)
    with pytest.raises(UserError, match="does not fit into 32 bits"):
        many.plus(gram)
    with pytest.raises(UserError, match="too many samples"):
        rounded(torch.eye(2, dtype=torch.float64) * 2**31, kind)
    for change, message in (
        ((gram.squares[1:], gram.products, 16, 4, 1), "do not fit together"),
        ((gram.squares, gram.products[1:], 16, 4, 1), "do not fit together"),
        ((gram.squares, gram.products, 17, 4, 1), "do not fit together"),
        ((gram.squares[None], gram.products, 16, 4, 1), "do not fit together"),
        ((gram.squares, gram.products, 40, 4, 1), "of 40 bits in units of 4 are refused"),
        ((gram.squares, gram.products, 16, 0, 1), "in units of 0 are refused"),
        ((gram.squares, gram.products, 16, 2**37, 1), "are refused"),
        ((gram.squares.long(), gram.products, 16, 4, 1), "int32"),
        ((gram.squares, gram.products.int(), 16, 4, 1), "uint8"),
        ((-gram.squares, gram.products, 16, 4, 1), "negative"),
        ((gram.squares, gram.products, 16, 4, -1), "negative"),
    ):
        with pytest.raises(UserError, match=message):
            Rounded(*change)
    with pytest.raises(UserError, match="do not fit together"):
        Sums(gram, sums.classes[:, 1:], sums.counts)
    with pytest.raises(UserError, match="must be of int32"):
        Sums(gram, sums.classes.long(), sums.counts)
