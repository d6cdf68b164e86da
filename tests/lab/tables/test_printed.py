"""Printed values in experiment files against a second transcription of the paper's tables."""

import re
from pathlib import Path

import pytest

from ekiden.lab.tables import experiment
from ekiden.lab.tables.experiment import Published

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
TABLES = (
    (Path(__file__).parent / "ua_pdfl_printed.md")
    .read_text(encoding="utf-8")
    .split("\n## Table ")[1:]
)
NETWORKS = {"CNN": "CNN", "ResNet18": "RN18", "VGG11": "VGG11"}
DATA = {"CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100", "SVHN": "SVHN"}


def label(name: str) -> str:
    """The label of a row in our files: "CNN / CIFAR10" and "IID / CNN" are "CNN CIFAR-10" and "IID
    CNN" there."""
    first, second = name.split(" / ")
    if first in NETWORKS:
        return f"{NETWORKS[first]} {DATA[second]}"
    return f"{first[0].lower() + first[1:] if first.startswith('Extreme') else first} {NETWORKS[second]}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"table {table[0]}")
def test_every_value_of_the_paper_is_in_our_file(table: str) -> None:
    cells = experiment.read(EXPERIMENTS / f"ua-pdfl-table{table[0]}.toml").cells
    columns = len({cell.column for cell in cells})
    found = {}
    for row, line in enumerate(re.findall(r"^- (.*)$", table, re.MULTILINE)):
        name, values = line.split(": ")
        for column, value in enumerate(values.split(", ")):
            mean, std = value.split(" ± ")
            cell = cells[row * columns + column]
            assert cell.row == label(name)
            found[cell.row, cell.column] = cell.published
            assert cell.published == Published(float(mean), float(std), 3)
    assert len(found) == len(cells) >= 24
