"""A task reveals nothing but what has noise."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import ekiden
from ekiden import DP, UserError
from ekiden.authoring import Client, Weights, on_client
from ekiden.core.data.samples import FederatedData
from ekiden.methods import METHODS, FedGram, FedSeq
from ekiden.methods.blocks.glam import alignment
from ekiden.runs.summary import privacy
from tests.core.training.private.small import SEEDED, features, run


def test_the_seed_gives_the_noise_of_a_simulation(few: FederatedData) -> None:
    first, again, other = (run(few, seed=seed).weights for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, other.params)


@pytest.mark.parametrize(
    "kind", [k for k in METHODS if k().fits() is not None], ids=lambda kind: kind.title()
)
def test_methods_with_a_guarantee_read_samples_in_training_only(
    kind: Any, few: FederatedData
) -> None:
    short = {name: 1 for name in ("rounds", "epochs") if name in kind.__dataclass_fields__}
    data = few
    module = nn.Sequential()
    module.add_module("features", nn.Linear(3, 3))
    module.add_module("head", nn.Linear(3, 2))
    assert ekiden.run(
        kind(**short), data, module, dp=DP(8.0, 1e-3), quiet=True, evaluate_every=0
    ).metrics


def test_a_task_that_reads_samples_is_stopped(few: FederatedData) -> None:
    class Reads(FedSeq):
        @on_client(gives="model")
        def train(self, client: Client, model: Weights) -> Weights:
            compares = alignment(client, None, model, 1.0, 0.0)
            return client.fit(model, epochs=self.epochs, objective=compares)

    reads = Reads(epochs=1)
    with pytest.raises(UserError, match="a loss of its own, for which"):
        run(few, method=reads)


def test_a_task_that_reads_samples_without_giving_noisy_sums_is_stopped() -> None:
    class Peeks(FedGram):
        def settled_by(self, client: Any, model: Any) -> Any:
            client.class_counts()
            return super().settled_by(client, model)

    x, y = features(rows=40)
    data = ekiden.federate(
        [(x, y), (x, y)], tests=[(x, y)] * 2, classes=["a", "b", "c"], val_fraction=0.0
    )
    dp = DP(1.0, 1e-3)
    result = ekiden.run(FedGram(**SEEDED), data, dp=replace(dp, honest=2), quiet=True)
    assert "if 2 silos add their noise" in privacy(result.config)
    with pytest.raises(UserError, match="reads samples other than by training"):
        ekiden.run(Peeks(**SEEDED), data, dp=dp, quiet=True)
