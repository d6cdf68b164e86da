"""A picture of who holds what."""

from pathlib import Path

import pytest
from PIL import Image

from ekiden.data import draw
from ekiden.lab.describe import counts
from ekiden.lab.reporting.figures import holders
from tests.lab.described import toy


@pytest.mark.parametrize(
    ("classes", "clients"),
    [(10, 10), (1, 1), (2, 300), pytest.param(1000, 2, marks=pytest.mark.slow)],
)
def test_a_picture_of_any_size(tmp_path: Path, classes: int, clients: int) -> None:
    draw(toy(classes, clients), tmp_path / "who.png")
    with Image.open(tmp_path / "who.png") as image:
        assert image.format == "PNG"
        assert 200 < image.width < 2500
        assert 150 < image.height < 3000


def test_the_picture_has_the_samples_of_each_class_at_each_client() -> None:
    fed = toy(3, 4)
    axes = holders(fed).axes[0]
    assert (axes.collections[0].get_array() == counts(fed)).all()
    written = [int(text.get_text()) for text in axes.texts]
    assert written == counts(fed).flatten().tolist()
    assert [tick.get_text() for tick in axes.get_yticklabels()] == [c.name for c in fed.clients]
