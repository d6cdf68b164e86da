"""Arrays of images whose channels come last, and floats that are pixels."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from ekiden import DataWarning, UserError, federate
from ekiden.data import from_tensors, load
from tests.readers.pictures import encoded


def given_as(x: Any, kind: str) -> Any:
    """(x, y) as tensors, as arrays, or as a dataset of pairs."""
    y = torch.arange(len(x)) % 2
    if kind == "pairs":
        return list(zip(x, y.tolist(), strict=True))
    return (x, y) if kind == "tensors" else (x.numpy(), y.numpy())


def images(*shape: int) -> Tensor:
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


@settings(max_examples=20, deadline=None)
@given(
    st.integers(5, 12),
    st.integers(5, 12),
    st.sampled_from([1, 3, 4]),
    st.sampled_from(["tensors", "arrays", "pairs"]),
)
def test_channels_that_come_last_are_moved_with_a_line(
    height: int, width: int, channels: int, kind: str
) -> None:
    x = images(20, channels, height, width)
    with pytest.warns(DataWarning) as seen:
        fed = federate([given_as(x.movedim(1, 3), kind)] * 2, test=given_as(x.movedim(1, 3), kind))
    said = [str(one.message) for one in seen if "channels come last" in str(one.message)]
    assert said[0].startswith(
        f"silo client-0 has x of shape (20, {height}, {width}, {channels}): the channels come last"
    )
    assert len(said) == 3
    assert fed.dataset.shape == (channels, height, width)
    assert torch.equal(fed.dataset.test.x, x)


def test_what_is_unclear_is_not_moved_but_said() -> None:
    with pytest.warns(
        DataWarning,
        match=r"train has x of shape \(20, 2, 9, 3\), which is read as 2 channels of 9 x 3",
    ):
        assert from_tensors(given_as(images(20, 2, 9, 3), "tensors")).shape == (2, 9, 3)
    with pytest.warns(
        DataWarning, match=r"\(20, 8, 8, 3\), which is read as 8 channels of 8 x 3: if the"
    ):
        assert from_tensors(given_as(torch.randn(20, 8, 8, 3), "tensors")).shape == (8, 8, 3)
    with pytest.warns(
        DataWarning, match=r"\(20, 3, 8, 3\), which is read as 3 channels of 8 x 3: if the"
    ):
        assert from_tensors(given_as(images(20, 3, 8, 3), "tensors")).shape == (3, 8, 3)
    for shape in ((3, 8, 8), (1, 8, 8), (3, 3, 3), (8, 8, 8), (1, 9, 1)):
        assert (
            from_tensors(given_as(images(20, *shape), "tensors")).shape == shape
        )  # without a line


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 8), (8, 8)])
def test_floats_that_are_pixels_are_named(shape: tuple[int, ...]) -> None:
    whole, scaled = images(20, *shape).float(), images(20, *shape) / 255
    with pytest.warns(
        DataWarning,
        match="silo client-1 has floats from 0 to 255, which are used unchanged: .* divide",
    ):
        fed = federate(
            [given_as(scaled, "tensors"), given_as(whole, "tensors")],
            test=given_as(scaled, "arrays"),
        )
    assert fed.dataset.train.x.max() == 255
    for other in (scaled, whole - 100, whole * 10):
        from_tensors(given_as(other, "tensors"))  # without a line


def test_arrays_in_any_layout_are_the_same_and_objects_are_one_line() -> None:
    x, y = images(20, 3, 8, 8).numpy(), np.arange(20) % 2
    plain = from_tensors((x / 255, y)).train.x
    big = (x / 255).astype(">f4")
    for other in (big, (x / 255).astype(np.float32)[:, ::-1][:, ::-1], np.asfortranarray(x / 255)):
        assert torch.equal(from_tensors((other, y)).train.x, plain)
    assert torch.equal(
        from_tensors((x[..., ::-1], y.astype(">i8"))).train.x.flip(-1), from_tensors((x, y)).train.x
    )
    frozen = x.copy()
    frozen.flags.writeable = False
    assert torch.equal(from_tensors((frozen, y)).train.x, from_tensors((x, y)).train.x)
    with pytest.raises(UserError, match="train holds values that are not numbers"):
        from_tensors((np.array([1, None] * 10, dtype=object), y))


def test_files_of_arrays_are_noticed_too(tmp_path: Any) -> None:
    x, y = images(20, 8, 9, 3).numpy(), np.arange(20) % 2
    np.savez(tmp_path / "last.npz", x=x, y=y)
    with pytest.warns(
        DataWarning, match=r"last.npz has x of shape \(20, 8, 9, 3\): the channels come"
    ):
        assert load(str(tmp_path / "last.npz")).shape == (3, 8, 9)
    np.savez(tmp_path / "floats.npz", x=x.astype(np.float32).transpose(0, 3, 1, 2), y=y)
    with pytest.warns(DataWarning, match=r"floats.npz has floats from 0 to 255"):
        load(str(tmp_path / "floats.npz"))


def test_pairs_of_opened_images_are_read_as_files_are() -> None:
    from io import BytesIO

    shown = images(6, 5, 3).numpy()
    for stored in (
        encoded(Image.fromarray(shown), "PNG", 6),
        encoded(
            Image.fromarray(np.concatenate([shown, np.full((6, 5, 1), 255, np.uint8)], axis=2)),
            "PNG",
        ),
        encoded(Image.fromarray(shown), "TIFF", 3),
    ):
        pairs = [(Image.open(BytesIO(stored)), k % 2) for k in range(10)]
        data = from_tensors(pairs)
        assert torch.equal(data.train.x[0], torch.from_numpy(shown).permute(2, 0, 1))
