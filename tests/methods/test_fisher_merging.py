"""Fisher merging: numbers by hand, floors, reductions to the average, one client, bytes."""

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.training.weights import Layout
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, FisherMerging
from ekiden.methods.one_shot.average import Informed
from tests.methods.merging import models, trained
from tests.methods.toys import weights

SETTINGS = {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1)}
NO_LAYERS = Layout((), (), ())


def informed(params: tuple[float, ...], fisher: tuple[float, ...], n: int = 1) -> Informed:
    return Informed(trained(weights(*params), n), [torch.tensor(fisher)])


def test_weights_about_which_nobody_knows_anything_are_averaged() -> None:
    sent = [informed((0.0, 0.0), (0.0, 0.0)), informed((8.0, 8.0), (0.0, 3e-6))]
    torch.testing.assert_close(
        FisherMerging().merge(sent, NO_LAYERS).params, torch.tensor([4.0, 6.0])
    )
    torch.testing.assert_close(
        FisherMerging(floor=1.0).merge(sent, NO_LAYERS).params, torch.tensor([4.0, 4.0])
    )


def test_normalised_models_count_alike() -> None:
    sent = [informed((0.0, 0.0), (3.0, 4.0)), informed((8.0, 8.0), (0.04, 0.03))]
    torch.testing.assert_close(
        FisherMerging(normalise=True).merge(sent, NO_LAYERS).params, torch.tensor([32.0, 24.0]) / 7
    )


def test_equal_fisher_information_gives_the_average() -> None:
    fisher = torch.rand(16, generator=torch.Generator().manual_seed(0))
    sent = [Informed(trained(m, 3 + k), [fisher]) for k, m in enumerate(models(3))]
    expected = Average(weighting="samples").aggregate([s.trained for s in sent], NO_LAYERS)
    found = FisherMerging().merge(sent, NO_LAYERS)
    torch.testing.assert_close(found.params, expected.params, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.buffers, expected.buffers)


def test_equal_models_and_one_client_stay_as_they_are(blobs: FederatedData) -> None:
    (model,) = models(1)
    sent = [Informed(trained(model, 2 + k), [torch.rand(16)]) for k in range(5)]
    assert torch.equal(FisherMerging().merge(sent, NO_LAYERS).params, model.params)
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    merged, averaged = (
        run(m, alone, Tiny, **SETTINGS)  # type: ignore[arg-type]
        for m in (FisherMerging(epochs=2), Average(epochs=2))
    )
    assert merged.weights is not None
    assert averaged.weights is not None
    assert torch.equal(merged.weights.params, averaged.weights.params)
    assert torch.equal(merged.weights.buffers, averaged.weights.buffers)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="does not have the model"):
        FisherMerging().merge([informed((1.0, 2.0), (1.0,))], NO_LAYERS)
    with pytest.raises(UserError, match="0 tensors came with a model, not 1"):
        FisherMerging().merge([Informed(trained(weights(1.0), 1), [])], NO_LAYERS)


def test_networks_of_other_layers_are_refused_before_anybody_trains(blobs: FederatedData) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3))

    with pytest.raises(UserError, match="layer '1' is no"):
        run(FisherMerging(), blobs, build)
