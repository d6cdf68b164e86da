"""Masks that a model predicts, as files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from ekiden import Training, federate, run
from ekiden.methods import FedSeq
from tests.runs.predicted import reported

Command = Callable[..., tuple[int, str]]


class Pixels(torch.nn.Module):
    """Three classes for each pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.head = torch.nn.Conv2d(4, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).relu())  # type: ignore[no-any-return]


@pytest.fixture
def segmented(tmp_path: Path) -> Path:
    """A finished run that tells dark, grey and bright pixels apart, its network, and its test
    images."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (60, 1, 6, 6), generator=draw, dtype=torch.uint8)
    y = x[:, 0].long() // 86
    silos = federate(
        [(x[:20], y[:20]), (x[20:40], y[20:40])], test=(x[40:], y[40:]), task="segmentation"
    )
    training = Training(lr=2e-2, batch_size=4)
    done = run(FedSeq(epochs=20), silos, Pixels(), training=training, folder=tmp_path / "run")
    assert done.score > 0.5
    np.savez(tmp_path / "images.npz", x=x[40:].numpy(), y=y[40:].numpy())
    (tmp_path / "net.py").write_text("from tests.runs.test_masks import Pixels as pixels\n")
    return tmp_path


def test_a_segmentation_gives_a_mask_for_each_image(segmented: Path, command: Command) -> None:
    run_folder, out = segmented / "run", segmented / "masks"
    typed = (
        "predict",
        str(run_folder),
        str(segmented / "images.npz"),
        "--network",
        f"{segmented / 'net.py'}:pixels",
    )
    code, said = command(*typed, "-o", str(out))
    assert code == 0, said
    table = pd.read_csv(out / "masks.csv")
    truth = np.load(segmented / "images.npz")["y"]
    masks = np.stack([np.array(Image.open(out / name)) for name in table["mask"]])
    assert (masks == truth).mean() == pytest.approx(reported(run_folder), abs=1e-6)
    assert table.row.tolist() == list(range(20))
    shares = table.filter(like="share_").to_numpy()
    assert np.allclose(
        shares, [[(mask == k).mean() for k in range(3)] for mask in masks], atol=1e-6
    )
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    code, said = command(*typed, "-o", str(out))
    assert (code, said) == (2, f"ekiden: {out} exists: choose another name, or add --overwrite\n")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    code, said = command(*typed, "-o", str(out), "--overwrite")
    assert code == 0, said
    (out / "mine.txt").write_text("keep me")  # then it is not ours alone to replace
    code, said = command(*typed, "-o", str(out), "--overwrite")
    assert (code, said) == (2, f"ekiden: {out} exists: choose another name\n")


@pytest.mark.parametrize("out", ["-", "masks.csv"])
def test_masks_need_a_folder(
    out: str, segmented: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(segmented)
    typed = ("predict", "run", "images.npz", "--network", "net.py:pixels", "-o", out)
    assert command(*typed) == (
        2,
        "ekiden: a segmentation gives a mask for each image: name a folder for them by -o FOLDER\n",
    )


def test_a_broken_image_leaves_no_folder_of_masks(segmented: Path, command: Command) -> None:
    (segmented / "pictures").mkdir()
    Image.new("L", (6, 6)).save(segmented / "pictures" / "a.png")
    (segmented / "pictures" / "b.png").write_text("no image")
    before = sorted(segmented.iterdir())
    network = f"{segmented / 'net.py'}:pixels"
    code, said = command(
        "predict",
        str(segmented / "run"),
        str(segmented / "pictures"),
        "--network",
        network,
        "-o",
        f"{segmented}/out",
    )
    assert (code, said.count("\n")) == (2, 1)
    assert "b.png cannot be decoded" in said
    assert sorted(segmented.iterdir()) == before
