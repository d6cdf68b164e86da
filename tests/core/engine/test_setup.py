"""Names that clients may have."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ekiden
from ekiden import UserError
from ekiden.core.engine.setup import check_clients
from ekiden.methods import FedAvg
from ekiden.runs.tracking import check_names


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["h" * 201], "has 201 bytes: use 200 at most"),
        (["病" * 67], "has 201 bytes: use 200 at most"),
        (["病" * 66], ""),
        (["North", "north"], "'North' and 'north' have one file"),
        (["a", "a "], "have one file"),
        ([unicodedata.normalize(form, "Köln") for form in ("NFC", "NFD")], "have one file"),
        (["north", "south", "مستشفى"], ""),
    ],
)
def test_names_that_are_no_files_of_their_own_are_refused(names: list[str], refused: str) -> None:
    sizes = dict.fromkeys(names, (9, 0, 0))
    if not refused:
        return check_clients(sizes, FedAvg())
    with pytest.raises(UserError, match=refused) as refusal:
        check_clients(sizes, FedAvg())
    assert "\n" not in str(refusal.value)
    return None


def test_names_that_a_tracker_makes_one_are_refused() -> None:
    check_names(["tensorboard"], ["a#b", "a:b"])
    check_names(["mlflow"], ["a-b", "a b"])
    with pytest.raises(UserError, match="mlflow writes 'a#b' and 'a:b' as one name"):
        check_names(["mlflow"], ["a#b", "a:b"])


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
