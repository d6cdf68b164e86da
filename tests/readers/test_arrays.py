"""Arrays of images whose channels come last, and floats that are pixels."""

from typing import Any

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize("kind", ["tensors", "arrays", "pairs"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_bytes_whose_channels_come_last_are_refused(channels: int, kind: str) -> None:
    given = given_as(images(20, 9, 12, channels), kind)
    with pytest.raises(
        UserError, match=r"silo client-0 has x of shape \(20, 9, 12, .\): the channels come last"
    ):
        federate([given, given])


def test_what_is_unclear_is_said() -> None:
    with pytest.warns(DataWarning, match=r"\(20, 8, 8, 3\), which is read as 8 channels of 8 x 3"):
        assert from_tensors(given_as(torch.randn(20, 8, 8, 3), "tensors")).shape == (8, 8, 3)
    with pytest.warns(DataWarning, match=r"\(20, 3, 8, 3\), which is read as 3 channels of 8 x 3"):
        assert from_tensors(given_as(images(20, 3, 8, 3), "tensors")).shape == (3, 8, 3)
    for shape in ((3, 8, 8), (1, 8, 8), (3, 3, 3), (8, 8, 8), (1, 9, 1)):
        # without a line
        assert from_tensors(given_as(images(20, *shape), "tensors")).shape == shape


def test_floats_that_are_pixels_are_named() -> None:
    whole, scaled = images(20, 3, 8, 8).float(), images(20, 3, 8, 8) / 255
    with pytest.warns(DataWarning, match="floats of silo client-1 go up to 255, and are used"):
        fed = federate(
            [given_as(scaled, "tensors"), given_as(whole, "tensors")],
            test=given_as(scaled, "arrays"),
        )
    assert fed.dataset.train.x.max() == 255
    from_tensors(given_as(scaled, "tensors"))  # without a line


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


def test_files_of_arrays_are_looked_at_too(tmp_path: Any) -> None:
    x, y = images(20, 8, 9, 3).numpy(), np.arange(20) % 2
    np.savez(tmp_path / "last.npz", x=x, y=y)
    with pytest.raises(UserError, match=r"last.npz has x of shape \(20, 8, 9, 3\): the channels"):
        load(str(tmp_path / "last.npz"))
    np.savez(tmp_path / "floats.npz", x=x.astype(np.float32).transpose(0, 3, 1, 2), y=y)
    with pytest.warns(DataWarning, match=r"floats of .*floats.npz go up to 255"):
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
