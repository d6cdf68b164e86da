"""What regressions tell: survival that follows from a baseline hazard."""

import numpy as np
import pytest
import torch

from ekiden.clinic.regressions import Baseline
from ekiden.core.base.errors import UserError
from ekiden.core.tasks import Survival


def test_a_network_has_a_constant_hazard() -> None:
    network = Baseline.of(Survival(mean=(200.0,)), {}, {})
    assert network
    assert network.survival(torch.tensor([[0.0]]), (200.0,)).item() == pytest.approx(np.exp(-1))


def test_survival_is_told_at_the_times_of_the_hazard_alone() -> None:
    with pytest.raises(
        UserError, match="survival at 100 is not known, only at 90: choose one of these"
    ):
        Baseline((90.0,), (0.1,)).survival(torch.zeros(1, 1), (100.0,))
