"""Requests: what is refused before anything is executed."""

import pytest
import torch
from torch import nn

from ekiden.core.engine.wire import WireError
from ekiden.core.training.network import Network
from ekiden.silos.trust.parcel import check


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
