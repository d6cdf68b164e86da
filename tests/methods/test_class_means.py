"""Class means of inputs: exact numbers, sums that can be subtracted again, inputs moved between
means."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden import UserError
from ekiden.methods.chain.fedtasuki import ClassInputs, mean_shape, measure_means, size_of_means


def means(x: Tensor, y: Tensor, classes: int = 3) -> ClassInputs:
    return measure_means([(x[:2], y[:2]), (x[2:], y[2:])], classes, tuple(x.shape[1:]))


def test_means_of_samples() -> None:
    x, y = torch.tensor([[1.0, 2.0], [3.0, 6.0], [10.0, 20.0]]), torch.tensor([0, 0, 2])
    found = means(x, y)
    assert found.counts.tolist() == [2, 0, 1]
    assert found.means.tolist() == [[2.0, 4.0], [0.0, 0.0], [10.0, 20.0]]


def test_images_are_averaged_over_the_cells_of_a_grid() -> None:
    x = torch.arange(16.0).view(1, 1, 4, 4)
    found = measure_means([(x, torch.tensor([1]))], 2, (1, 2, 2))
    assert found.means[1].flatten().tolist() == [2.5, 4.5, 10.5, 12.5]


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 20), st.integers(1, 20))
def test_what_is_merged_comes_apart_again(seed: int, n: int, m: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n + m, 2, 3, 3, generator=draw), torch.randint(3, (n + m,), generator=draw)
    whole, one, other = means(x, y), means(x[:n], y[:n]), means(x[n:], y[n:])
    both = one.merged(other)
    rest = both.without(other)
    for a, b in ((both, whole), (rest, one)):
        assert torch.equal(a.counts, b.counts)
        here = b.counts > 0
        torch.testing.assert_close(a.means[here], b.means[here], rtol=1e-4, atol=1e-4)


def test_inputs_move_from_the_mean_of_their_class_to_that_of_another() -> None:
    torch.manual_seed(0)
    known = ClassInputs(
        torch.tensor([0, 30, 10]),
        torch.tensor([0.0, 5.0, -5.0]).view(3, 1, 1, 1).expand(3, 2, 2, 2),
    )
    own = ClassInputs(torch.tensor([4, 0, 0]), torch.full((3, 2, 2, 2), 1.0))
    x = torch.rand(400, 2, 8, 8).contiguous(memory_format=torch.channels_last)
    out = known.moved(own, x, torch.zeros(400, dtype=torch.long))
    assert out.is_contiguous(memory_format=torch.channels_last)
    change = (out - x).mean((1, 2, 3))
    assert set(change.round().tolist()) == {4.0, -6.0}, (
        "to a class that others hold, by as much as the means differ"
    )
    assert 0.65 < float((change > 0).float().mean()) < 0.85, "drawn by the counts, 3 to 1"


def test_other_samples_than_images_move_too() -> None:
    torch.manual_seed(0)
    known, own = (
        ClassInputs(torch.tensor([1]), torch.tensor([row])) for row in ([1.0, 2.0], [0.5, 0.0])
    )
    out = known.moved(own, torch.zeros(2, 2), torch.zeros(2, dtype=torch.long))
    assert out.tolist() == [[0.5, 2.0]] * 2


@pytest.mark.parametrize(
    ("classes", "shape", "model", "wanted"),
    [
        (10, (3, 32, 32), 248_024, (3, 7, 7)),  # 2.5 %: 6,200 bytes; 7x7 takes 5,960
        (10, (1, 28, 28), 796_840, (1, 8, 8)),  # never finer
        (10, (1, 6, 28), 796_840, (1, 6, 8)),
        (5, (12,), 20_000, (12,)),
    ],
)
def test_means_are_as_fine_as_fits(
    classes: int, shape: tuple[int, ...], model: int, wanted: tuple[int, ...]
) -> None:
    found = mean_shape(classes, shape, model)
    assert found == wanted
    assert size_of_means(classes, found) <= 0.025 * model


def test_means_leave_room_for_statistics() -> None:
    assert mean_shape(10, (3, 32, 32), 248_024, taken=size_of_means(10, (84,))) == (3, 6, 6)


def test_size_is_that_of_counts_and_means() -> None:
    assert size_of_means(10, (3, 7, 7)) == 8 * 10 + 4 * 10 * 147


@pytest.mark.parametrize(
    ("shape", "model"), [((3, 32, 32), 4_000), ((100,), 4_000), ((3, 32, 32), 100)]
)
def test_means_that_do_not_fit_are_refused(shape: tuple[int, ...], model: int) -> None:
    with pytest.raises(UserError, match="recall"):
        mean_shape(10, shape, model)


def test_means_of_something_else_are_refused() -> None:
    a, b = (
        ClassInputs(torch.ones(2, dtype=torch.int64), torch.zeros(2, *shape))
        for shape in ((3,), (4,))
    )
    with pytest.raises(UserError, match="other classes or inputs"):
        a.merged(b)
