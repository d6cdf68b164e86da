"""What data print in a notebook: sizes and names, never tensors."""

from dataclasses import replace
from math import log2
from typing import Any

import pytest
import torch

from ekiden import federate
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Samples, Subset


def test_data_print_their_sizes() -> None:
    x, y = torch.randint(256, (60, 3, 8, 8), dtype=torch.uint8), torch.arange(60) % 2
    data = federate(
        [(x[:40], y[:40]), (x[40:], y[40:])],
        classes=["a", "b"],
        names=["north", "south"],
        val_fraction=0.25,
    )
    lines = repr(data).splitlines()
    assert lines[0].startswith("FederatedData(Dataset(")
    assert (
        "48 training and 12 test samples of uint8 (3, 8, 8), Classification, outputs: 2" in lines[0]
    )
    assert lines[1:] == [
        "  ClientData('north', 24 training, 8 validation, 8 test samples),",
        "  ClientData('south', 12 training, 4 validation, 4 test samples),",
        ")",
    ]
    assert repr(data.clients[1].train) == "Subset(12 of 48 samples)"
    assert repr(data.dataset.train) == "Samples(48 samples of uint8 (3, 8, 8))"


def test_variety_counts_different_rows_and_values() -> None:
    draw = torch.Generator().manual_seed(0)
    whole = torch.randint(0, 3, (300, 5), generator=draw)
    for x in (
        whole,
        torch.where(whole == 1, -0.0, whole.float()),
        torch.randn(300, 5, generator=draw),
    ):
        kept = torch.arange(7, 300)
        rows = x[kept].tolist()
        values = [len(set(column)) for column in zip(*rows, strict=True)]
        found = Subset(Samples(x, torch.zeros(300)), kept).variety
        assert found == (len({tuple(row) for row in rows}), sum(map(log2, values)))


def test_a_digest_names_samples_labels_and_rows() -> None:
    samples = Samples(torch.arange(12.0).view(4, 3), torch.arange(4))
    part = Subset(samples, torch.tensor([0, 2]))
    others = [
        replace(part, rows=torch.tensor([2, 0])),
        replace(part, samples=replace(samples, x=samples.x + 1)),
        replace(part, samples=replace(samples, y=samples.y + 1)),
        replace(part, samples=replace(samples, x=samples.x.view(4, 3, 1))),
    ]
    assert replace(part, samples=replace(samples, x=samples.x.clone())).digest == part.digest
    assert len({part.digest, *(one.digest for one in others)}) == 5


@pytest.mark.parametrize("samples", ["5", 0, 2.5])
def test_a_subset_has_a_number_of_samples(samples: Any) -> None:
    data = federate([(torch.rand(9, 2), torch.arange(9) % 2)]).dataset
    with pytest.raises(UserError, match="samples"):
        data.subset(samples)
