"""Sums of whole numbers, added up field by field."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.methods.blocks.sums import WholeSums


@dataclass(frozen=True)
class Counted(WholeSums):
    samples: int
    totals: Tensor


def test_each_field_is_added_up() -> None:
    found = Counted(3, torch.tensor([1, 2])).plus(Counted(4, torch.tensor([10, 20])))
    assert found.samples == 7
    assert found.totals.tolist() == [11, 22]


def test_sums_of_another_shape_or_type_are_refused() -> None:
    with pytest.raises(UserError, match="sums of different shape"):
        # would be broadcast
        Counted(3, torch.tensor([1, 2])).plus(Counted(4, torch.tensor([1])))
    with pytest.raises(UserError, match="sums must be of int64"):
        Counted(3, torch.tensor([1.0]))
