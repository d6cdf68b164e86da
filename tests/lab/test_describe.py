"""Tables and pictures of who holds what."""

from io import StringIO

import numpy as np
from rich.console import Console

from ekiden.data import FederatedData, table
from ekiden.lab.describe import counts
from tests.lab.described import toy


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
