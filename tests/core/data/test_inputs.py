"""Kinds of samples: encoding names what cannot be encoded, and parts need one shape and type."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.data.inputs import Encoding, Inputs, joined
from ekiden.readers.undecoded import Raw


@dataclass(frozen=True)
class Halves(Inputs):
    """Half of each even number; odd ones cannot be encoded."""

    kind = "halves"
    words = "even numbers"
    suffixes = ()

    lost: int = 0
    """samples that are lost on the way"""

    def encode(self, raw: Any) -> Tensor:
        if any(number % 2 == 1 for number in raw):
            raise UserError("it is odd")
        return torch.tensor([[number / 2] for number in raw][self.lost :])


def part(source: str, *numbers: float) -> Raw:
    return Raw(source, list(numbers), np.array(["a"] * len(numbers)), kind=Halves)


def test_the_sample_that_cannot_be_encoded_is_named() -> None:
    assert Halves().encode_part(part("a.csv", 2, 4)).tolist() == [[1.0], [2.0]]
    with pytest.raises(UserError, match=r"row 2 .*of a\.csv cannot be used: it is odd"):
        Halves().encode_part(part("a.csv", 2, 4, 5, 7))


def test_a_kind_must_return_as_many_finite_samples_as_there_are() -> None:
    with pytest.raises(UserError, match=r"Halves\.encode must return 2 finite samples"):
        Halves(lost=1).encode_part(part("a.csv", 2, 4))
    with pytest.raises(UserError, match="some not finite"):
        Halves().encode_part(part("a.csv", 2, float("inf")))


def test_parts_are_joined_by_side_and_need_one_shape() -> None:
    sides = [[part("a.csv", 2), part("b.csv", 4)], [part("c.csv", 6)]]
    (train, test), made = Halves.assembled(sides, Encoding(None))
    assert train.tolist() == [[1.0], [2.0]]
    assert test.tolist() == [[3.0]]
    assert made == Halves()
    with pytest.raises(UserError, match=r"samples of b\.csv are .*, those of a\.csv"):
        joined(sides[:1], [[torch.zeros(1, 1), torch.zeros(1, 2)]])
