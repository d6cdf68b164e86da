"""A run on pictures of many sizes and kinds, like users' pictures."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

from ekiden.methods import FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

SIZES = ((16, 16), (20, 20), (31, 22), (12, 40))


def picture(pixels: NDArray[np.float64], number: int) -> Image.Image:
    """A digit as people save it, with some size and mode."""
    grey = Image.fromarray((pixels * 15.9).astype(np.uint8)).resize(SIZES[number % len(SIZES)])
    match number % 6:
        case 0:
            return grey
        case 1:
            return Image.merge("RGB", (grey, grey.point(lambda v: v // 2), grey))
        case 2:
            return grey.convert("RGBA")
        case 3:
            return grey.convert("P")
        case 4:
            return Image.fromarray(np.asarray(grey).astype(np.uint16) * 256)
        case _:
            return grey.convert("LA")


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of class folders, below train and test."""
    root = tmp_path_factory.mktemp("pictures")
    digits = load_digits()
    for number, (pixels, label) in enumerate(
        zip(digits.images[:300], digits.target[:300], strict=True)
    ):
        if label < 3:
            folder = root / ("test" if number % 3 == 0 else "train") / ("none", "one", "two")[label]
            folder.mkdir(parents=True, exist_ok=True)
            picture(pixels, number).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def run_on_pictures(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on them: colour, 20 pixels, scaled."""
    folder = tmp_path_factory.mktemp("runs") / "pictures"
    plan = Plan(Recipe(FedSeq(epochs=3), model="lenet"), str(pictures), "iid", 2, 20)
    plan.run(folder, plan.federation())
    return folder


@pytest.fixture(scope="session")
def run_on_digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run on grey images of 8 pixels."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EKIDEN_DATA", raising=False)
        plan = Plan(Recipe(FedSeq(epochs=2), model="mlp"), "digits", "iid", 3)
        plan.run(folder, plan.federation())
    return folder
