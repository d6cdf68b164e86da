"""Requests: what is refused before anything is executed."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch
from torch import nn

from ekiden.core.engine.method import OwnSamples
from ekiden.core.engine.wire import WireError
from ekiden.core.training.network import Network
from ekiden.silos.trust.parcel import check, check_claims


@dataclass
class Claims:
    samples: Annotated[Any, OwnSamples]


@pytest.mark.parametrize("said", [2**70, 10**400, -5, True, 4.0, float("nan")])
def test_another_number_of_samples_is_refused_in_one_line(said: Any) -> None:
    with pytest.raises(WireError, match="training samples, its sender has 5: refused"):
        check_claims(Claims(said), 5)


@pytest.mark.parametrize("samples", [5, 2**24 + 1, 2**53 - 1])
def test_the_number_of_samples_is_exact(samples: int) -> None:
    counts = torch.tensor([samples - 2, 2])
    for said in (samples, float(samples), counts):
        check_claims(Claims(said), samples)
        with pytest.raises(WireError, match="training samples, its sender has"):
            check_claims(Claims(said), samples + 1)


def test_large_finite_values_pass_though_their_sum_overflows() -> None:
    values = torch.full((4,), 3e38)
    assert values.sum().isinf()
    check([values], Network(nn.Linear(1, 1)), whole=False)
    check([torch.arange(3)], Network(nn.Linear(1, 1)), whole=False)


@pytest.mark.parametrize(
    "bad", [[float("nan"), 1.0], [float("inf"), float("-inf")], [3e38, 3e38, float("inf")]]
)
def test_nan_and_infinity_are_refused(bad: list[float]) -> None:
    with pytest.raises(WireError, match="NaN or infinity"):
        check({"a": torch.tensor(bad)}, Network(nn.Linear(1, 1)), whole=False)
    with pytest.raises(WireError, match="NaN or infinity"):
        check(
            [(0.0, 1), (bad[-1] if bad[-1] != 1 else bad[0],)],
            Network(nn.Linear(1, 1)),
            whole=False,
        )
