"""What a run says about a result that is so bad that training must have diverged."""

import warnings
from dataclasses import replace
from math import log, nan

import pytest
import torch
from torch import nn

from ekiden import DivergenceWarning, FederatedData, Training, federate, run
from ekiden.core.engine.evaluation import diverged, divergence
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram, FedSeq, Local
from ekiden.runs.recipe import Recipe


def test_far_above_guessing_is_ten_times_its_loss() -> None:
    guess = log(40)
    assert not diverged([9.9 * guess, 9.9 * guess], log(40), personal=False)
    assert diverged([10.1 * guess, 10.1 * guess], log(40), personal=False)
    assert not diverged(
        [1e9, 9.9 * guess], log(40), personal=False
    )  # it has forgotten one client, or never learned it
    assert not diverged([nan, 9.9 * guess], log(40), personal=False)
    assert diverged([nan, 10.1 * guess], log(40), personal=False)
    assert not diverged([nan], log(40), personal=False)
    assert diverged(
        [1e9, 0.1], log(40), personal=True
    )  # each model is measured where it was trained
    assert not diverged([15 * guess, 0.1, 0.1], log(40), personal=True)
    assert not diverged([-log(1e-12)], log(2), personal=False)  # an ensemble whose votes all miss
    assert diverged([30.1], log(2), personal=False)
    assert not diverged([2.0], log(1), personal=False)  # where there is nothing to guess


def test_the_line_says_what_to_do() -> None:
    line = divergence({"loss": 1.23e29, "diverged": True}, log(10), 1e6)
    assert line == (
        "training diverged: the loss is 1.23e+29, that of guessing 2.30 (ln 10); "
        "lower lr (now 1e+06), or scale the inputs"
    )
    assert divergence({"loss": 50.0}, log(10), 1e6) == ""
    noisy = Recipe(FedGram(dictionary="seed", width=20), dp="epsilon=2,delta=1e-4,clip=1")
    assert divergence({"loss": 80.0, "diverged": True}, log(10), noisy.step_size) == (
        "noise hides the sums: the loss is 80, that of guessing 2.30 (ln 10); "
        "train on more samples, or give a larger epsilon or a smaller --width"
    )
    assert replace(noisy, dp="").step_size == noisy.training.lr


@pytest.mark.parametrize("method", [FedSeq(epochs=3), Local(epochs=3)], ids=lambda m: m.title())
def test_a_run_that_diverged_warns(method: FedSeq | Local, blobs: FederatedData) -> None:
    with pytest.warns(
        DivergenceWarning, match=r"training diverged: .* guessing 1.10 \(ln 3\); lower lr \(now 1e"
    ):
        result = run(method, blobs, plain(), training=Training(lr=1e6))
    assert result.diverged
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = run(method, blobs, plain(), training=Training(lr=1e-2))
    assert not good.diverged
    assert "diverged" not in good.metrics[-1]


class Silent(nn.Module):
    """Trains, and gives no finite output when it is measured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out if self.training else out * nan


def test_answers_that_are_not_finite_are_divergence(blobs: FederatedData) -> None:
    with pytest.warns(
        DivergenceWarning, match="training diverged: the loss is nan, that of guessing"
    ):
        assert run(FedSeq(epochs=1), blobs, Silent(), training=Training(lr=1e-3)).diverged


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_forgetting_and_overfitting_are_no_divergence() -> None:
    """Two silos without a common class: the model is surely wrong at the first, and right at the
    second."""
    draw = torch.Generator().manual_seed(0)
    silos = [(100 * torch.randn(60, 4, generator=draw), torch.full((60,), k)) for k in range(2)]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    forgot = run(
        FedSeq(epochs=150), federate(silos), model, training=Training(lr=0.1, select="last")
    )
    assert forgot.metrics[-1]["loss"] > 30, (
        "the union of the test data alone would look like divergence"
    )
    assert not forgot.diverged
    noise = [
        (torch.randn(40, 4, generator=draw), torch.randint(3, (40,), generator=draw))
        for _ in range(2)
    ]
    overfit = run(
        FedSeq(epochs=100), federate(noise), Tiny(), training=Training(lr=0.01, select="last")
    )
    assert overfit.metrics[-1]["loss"] > log(3)
    assert not overfit.diverged
