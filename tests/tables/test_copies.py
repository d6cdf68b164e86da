"""What is reported about the copies of data sets, and how many test images are in the training part."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ekiden.tables import ledger


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data set of class folders, `own`; one of its two test images is a training image in another format."""
    monkeypatch.setenv("EKIDEN_DATA", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (4, 5, 6), dtype=np.uint8)
    for name, image in zip(("train/a/0.png", "train/b/0.png", "test/a/1.png"), images, strict=False):
        file = tmp_path / "own" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    (tmp_path / "own" / "test" / "b").mkdir()
    Image.fromarray(images[1]).save(tmp_path / "own" / "test" / "b" / "copy.bmp")
    return tmp_path / "own"


def test_what_is_said_of_a_copy(own: Path) -> None:
    assert ledger.copy_described("own") == (
        "2 training and 2 test images, 3 PNG of 6 x 5 pixels, 1 BMP of 6 x 5 pixels. "
        "1 of the 2 test images equals a training image."
    )
    (own / "test" / "b" / "copy.bmp").unlink()
    Image.fromarray(np.zeros((5, 6), np.uint8)).save(own / "test" / "b" / "other.png")
    (own / "info.json").write_text(json.dumps({"fidelity": "cut\nby hand", "split": "at random", "train": 2}))
    assert ledger.copy_described("own") == (
        "2 training and 2 test images, PNG of 6 x 5 pixels; fidelity as noted: cut by hand; split as noted: at random. "
        "0 of the 2 test images equal a training image."
    )
    (own / "info.json").write_text("[]")
    assert "noted" not in ledger.copy_described("own")


def test_only_what_is_there_is_described(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = "- `gone`: as it was,\n  in two lines.\n- `own`: as it was.\n"
    lines = ledger.paragraph_on_copies(["own", "digits", "gone", "own"], old)
    assert lines[0].startswith("**Data sets used.** ")
    assert lines[2] == "- `gone`: as it was,\n  in two lines."
    assert lines[3].startswith("- `own`: 2 training")
    monkeypatch.delenv("EKIDEN_DATA")
    assert ledger.paragraph_on_copies(["own"], old)[2:4] == [
        "- `gone`: as it was,\n  in two lines.",
        "- `own`: as it was.",
    ]
    assert ledger.paragraph_on_copies(["own"]) == []


def test_equal_images_are_counted_once_each() -> None:
    train = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 2, 2)
    test = torch.stack([train[1], train[1], train[2], train[2] + 1])
    assert ledger.equal_images(train, test) == 3
    assert ledger.equal_images(test[3:], train) == 0
