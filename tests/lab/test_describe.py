"""Tables and pictures of who holds what."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console

from ekiden.data import Dataset, Dirichlet, FederatedData, Iid, Samples, draw, split, table
from ekiden.lab.describe import counts
from ekiden.lab.reporting.figures import holders
from ekiden.readers.kinds import of_tensor


def toy(classes: int, clients: int, n: int = 2000) -> FederatedData:
    """Samples of classes in turn."""
    y = torch.arange(n) % classes
    samples = Samples(torch.zeros(n, 1), y)
    dataset = Dataset(
        "toy",
        samples,
        samples,
        tuple(f"class{c}" for c in range(classes)),
        inputs=of_tensor(samples.x),
    )
    return split(dataset, Iid() if clients > 20 else Dirichlet(0.5, 1), clients, seed=0)


def lines(fed: FederatedData) -> list[list[str]]:
    """The cells of each row, header first."""
    out = Console(file=StringIO(), width=250)
    out.print(table(fed))
    assert isinstance(out.file, StringIO)
    text = out.file.getvalue().replace("┃", "│")
    return [[c.strip() for c in line.split("│")[1:-1]] for line in text.splitlines() if "│" in line]


def test_the_table_adds_up() -> None:
    fed = toy(10, 10)
    header, *rows, total = lines(fed)
    assert header == ["client", *fed.dataset.classes, "train", "val", "test"]
    numbers = np.array([[0 if c == "-" else int(c) for c in row[1:]] for row in rows])
    assert (numbers[:, :10] == counts(fed)).all()
    assert (numbers[:, :10].sum(axis=1) == numbers[:, 10] + numbers[:, 11]).all()
    assert [int(c) for c in total[1:]] == numbers.sum(axis=0).tolist()
    assert counts(fed).sum(axis=0).tolist() == [200] * 10


def test_many_classes_are_summed_up() -> None:
    fed = toy(100, 20)
    header, first, *_ = lines(fed)
    assert header == ["client", "classes", "largest classes", "train", "val", "test"]
    held = counts(fed)[0]
    assert int(first[1]) == (held > 0).sum()
    top = int(held.argmax())
    assert first[2].startswith(f"class{top} {held[top]}, ")


def test_many_clients_are_cut_short() -> None:
    rows = lines(toy(3, 41))
    assert [r[0] for r in rows[1:]].count("...") == 1
    assert len(rows) == 1 + 20 + 1 + 20 + 1
    assert len(lines(toy(3, 40))) == 1 + 40 + 1


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
