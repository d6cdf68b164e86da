"""Exact sums: by hand, in any order and division, subtracted again, and never silently wrong."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.training.gram import (
    FARTHEST,
    WIDE,
    Sums,
    TargetSums,
    diagonal,
    measure,
    measure_targets,
    size,
    size_of_targets,
)


def drawn(n: int = 3000, width: int = 40, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    features = torch.randint(-127, 128, (n, width), generator=draw).float()
    return features, torch.randint(classes, (n,), generator=draw)


def of(x: Tensor, y: Tensor, classes: int = 4, block: int = 100) -> Sums:
    pairs = zip(torch.split(x, block), torch.split(y, block), strict=True)
    return measure(pairs, classes, x.shape[1])


def gram(sums: Sums | TargetSums) -> Tensor:
    assert isinstance(sums.gram, Tensor)
    return sums.gram


def equal(a: Sums, b: Sums) -> bool:
    return all(
        torch.equal(x, y) and x.dtype == y.dtype
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True)
    )


def test_three_samples_by_hand() -> None:
    x = torch.tensor([[1.0, 2, 0], [3, -1, 5], [127, 0, -127]])
    sums = of(x, torch.tensor([0, 2, 2]), classes=3)
    assert gram(sums).tolist() == [1 + 9 + 127**2, 2 - 3, 15 - 127**2, 5, -5, 25 + 127**2]
    assert sums.classes.tolist() == [[1, 2, 0], [0, 0, 0], [130, -1, -122]]
    assert sums.counts.tolist() == [1, 0, 2]
    assert (sums.samples, sums.width) == (3, 3)
    assert diagonal(gram(sums), 3).tolist() == [10 + 127**2, 5, 25 + 127**2]
    assert sums.matrix().tolist() == (x.double().T @ x.double()).tolist()


def test_equals_whole_numbers_added_up_one_by_one() -> None:
    x, y = drawn()
    sums = of(x, y)
    whole = x.long()
    assert torch.equal(sums.matrix().long(), whole.T @ whole)
    assert torch.equal(sums.classes.long(), torch.stack([whole[y == c].sum(0) for c in range(4)]))


def test_the_largest_features_are_exact_beyond_what_float32_can_count() -> None:
    """5000 · 127² is above 2^24, and odd."""
    sums = of(torch.full((4999, 2), 127.0), torch.zeros(4999, dtype=torch.int64), block=4999)
    assert gram(sums).tolist() == [4999 * 127**2] * 3


@pytest.mark.parametrize("seed", range(20))
def test_the_same_bits_in_any_order_and_division(seed: int) -> None:
    x, y = drawn()
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=draw)
    cuts = sorted({*torch.randint(1, len(x), (seed,), generator=draw).tolist()})
    parts = [order[a:b] for a, b in pairwise([0, *cuts, len(x)])]
    total: Sums | None = None
    for i in torch.randperm(len(parts), generator=draw).tolist():
        own = of(x[parts[i]], y[parts[i]], block=1 + 37 * seed)
        total = own if total is None else total.plus(own)
    assert total is not None
    assert equal(total, of(x, y))


def test_no_samples_are_sums_too() -> None:
    x, y = drawn(10)
    nothing = measure([], 4, 40)
    assert nothing.samples == 0
    assert equal(of(x, y).plus(nothing), of(x, y))


@pytest.mark.parametrize("value", [0.5, 128.0, -128.0, float("nan"), float("inf")])
def test_features_that_cannot_be_added_exactly_are_refused(value: float) -> None:
    x, y = drawn(10)
    x[3, 5] = value
    with pytest.raises(UserError, match="whole numbers from -127 to 127"):
        of(x, y)


def test_sums_too_large_for_their_type_are_refused() -> None:
    x, y = torch.full((1, 1), 127.0), torch.zeros(1, dtype=torch.int64)
    one = of(x, y, classes=1)
    most = (2**31 - 1) // 127**2
    assert most == 133_144
    many = Sums(gram(one) * most, one.classes * most, one.counts * most)
    assert gram(many).tolist() == [most * 127**2]
    with pytest.raises(UserError, match="does not fit into 32 bits"):
        many.plus(one)


def test_parts_that_cannot_be_sums_are_refused() -> None:
    good = of(*drawn(10))
    with pytest.raises(UserError, match="do not fit together"):
        Sums(gram(good)[1:], good.classes, good.counts)
    with pytest.raises(UserError, match="do not fit together"):
        Sums(gram(good), good.classes[:, 0], good.counts)
    with pytest.raises(UserError, match="int32"):
        Sums(gram(good).long(), good.classes, good.counts)
    with pytest.raises(UserError, match="int32"):
        Sums(gram(good).double(), good.classes.double(), good.counts)
    with pytest.raises(UserError, match="negative"):
        Sums(-gram(good), good.classes, good.counts)
    with pytest.raises(UserError, match="cannot be combined"):
        good.plus(of(*drawn(10, width=39)))
    with pytest.raises(UserError, match="announced"):
        measure([drawn(10)], 4, 41)


def test_bytes_are_those_of_the_formula() -> None:
    x, y = drawn(5, 9)
    sums = of(x, y)
    assert size(4, 9) == sum(t.numel() * t.element_size() for t in vars(sums).values())


def test_wide_features_by_hand() -> None:
    """Odd products beyond 2^24 and odd sums beyond 2^31, which float32 and int32 cannot hold."""
    x = torch.tensor([[WIDE, 1.0], [-WIDE, 2], [WIDE, -3]])
    sums = measure([(x, torch.tensor([0, 1, 1]))], 2, 2, largest=WIDE)
    assert gram(sums).tolist() == [3 * 32767**2, -4 * 32767, 14]
    assert sums.classes.tolist() == [[32767, 1], [0, -1]]
    assert gram(sums).dtype == sums.classes.dtype == torch.int64
    assert gram(sums.plus(sums)).tolist() == [6 * 32767**2, -8 * 32767, 28]
    assert size(2, 2, wide=True) == sum(t.numel() * t.element_size() for t in vars(sums).values())
    with pytest.raises(UserError, match="whole numbers from -32767 to 32767"):
        measure([(x + 1, torch.tensor([0, 1, 1]))], 2, 2, largest=WIDE)
    with pytest.raises(UserError, match="cannot be combined"):
        sums.plus(of(x.clamp(-1, 1), torch.tensor([0, 1, 1]), classes=2))


def test_wide_sums_are_exact_up_to_2_53() -> None:
    one = measure(
        [(torch.full((1, 1), float(WIDE)), torch.zeros(1, dtype=torch.int64))], 1, 1, largest=WIDE
    )
    most = (2**53 - 1) // WIDE**2
    assert most > 8_388_608
    many = Sums(gram(one) * most, one.classes * most, one.counts * most)
    assert many.matrix().tolist() == [[float(most * WIDE**2)]]
    with pytest.raises(UserError, match="does not fit into 53 bits"):
        many.plus(one)


def with_targets(n: int = 3000, width: int = 40) -> tuple[Tensor, Tensor]:
    features, _ = drawn(n, width)
    draw = torch.Generator().manual_seed(1)
    return features, torch.randint(-FARTHEST, FARTHEST + 1, (n, 2), generator=draw).float()


def of_targets(x: Tensor, y: Tensor, block: int = 100) -> TargetSums:
    pairs = zip(torch.split(x, block), torch.split(y, block), strict=True)
    return measure_targets(pairs, y.shape[1], x.shape[1])


def test_targets_equal_whole_numbers_added_up_one_by_one() -> None:
    """Targets of 20 bits, whose squares and products float32 and int32 cannot hold."""
    x, y = with_targets()
    sums, phi, rows = of_targets(x, y), x.long(), y.long()
    assert torch.equal(sums.matrix().long(), phi.T @ phi)
    assert torch.equal(sums.features, phi.sum(0))
    assert torch.equal(sums.products, rows.T @ phi)
    assert torch.equal(sums.targets, rows.sum(0))
    assert torch.equal(sums.powers, rows.square().sum(0))
    assert int(sums.powers.min()) > 2**40
    assert sums.samples == 3000
    tensors = [t for t in vars(sums).values() if isinstance(t, Tensor)]
    assert size_of_targets(2, 40) == sum(t.numel() * t.element_size() for t in tensors) + 8


@pytest.mark.parametrize("seed", range(20))
def test_targets_give_the_same_bits_in_any_order_and_division(seed: int) -> None:
    x, y = with_targets()
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(x), generator=draw)
    parts = torch.tensor_split(order, 1 + seed)
    total = of_targets(x[parts[0]], y[parts[0]])
    for part in parts[1:]:
        total = total.plus(of_targets(x[part], y[part], block=1 + 37 * seed))
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for a, b in zip(vars(total).values(), vars(of_targets(x, y)).values(), strict=True)
    )


def test_targets_that_cannot_be_added_exactly_are_refused() -> None:
    x, y = with_targets(10)
    with pytest.raises(UserError, match="whole numbers"):
        of_targets(x, y + 0.5 * (y.abs() < 1000) + 0.5)
    with pytest.raises(UserError, match="more than 1048576 steps"):
        of_targets(x, y + 2 * FARTHEST)
    with pytest.raises(UserError, match="whole numbers"):
        of_targets(x, y * float("nan"))


def test_sums_of_classes_and_of_targets_do_not_mix() -> None:
    (x, y), (_, labels) = with_targets(10), drawn(10)
    good, classes = of_targets(x, y), of(x, labels)
    with pytest.raises(
        UserError,
        match="40 features and 4 outputs cannot be combined with sums of 40 features and 2",
    ):
        classes.plus(good)
    with pytest.raises(UserError, match="cannot be combined"):
        good.plus(classes)
    with pytest.raises(UserError, match="cannot be combined"):
        good.plus(of_targets(x[:, :39], y))
    with pytest.raises(UserError, match="do not fit together"):
        TargetSums(gram(good), good.features, good.products[:1], good.targets, good.powers, 10)
    with pytest.raises(UserError, match="int64"):
        TargetSums(gram(good), good.features, good.products.int(), good.targets, good.powers, 10)
