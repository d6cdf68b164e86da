"""A network whose output is cut off from its parameters is refused before anything is trained or
written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ekiden
from ekiden.core.base.errors import UserError


class Cut(nn.Module):
    """Its output has no gradient."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "no_grad":
            with torch.no_grad():
                return self.layer(x)  # type: ignore[no-any-return]
        found: torch.Tensor = self.layer(x)
        return (
            torch.from_numpy(found.detach().cpu().numpy())
            if self.how == "numpy"
            else found.detach()
        )


@pytest.mark.parametrize("how", ["detach", "no_grad", "numpy"])
def test_a_network_that_is_cut_off_from_its_output_is_refused(how: str, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    silos = [(x, np.arange(40) % 2), (x + 1, np.arange(40) % 2)]
    with pytest.raises(
        UserError, match="no gradient reaches the model's parameters: its output is cut off"
    ) as error:
        ekiden.run(ekiden.FedAvg(rounds=1), silos, Cut(how), folder=tmp_path / "run", quiet=True)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
