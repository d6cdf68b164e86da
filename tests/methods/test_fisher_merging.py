"""Fisher merging: numbers by hand, floors, reductions to the average, one client, bytes."""

import numpy as np
import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.conformance.small_runs import Tiny
from ekiden.engine.method import Size
from ekiden.methods import Average, FisherMerging
from ekiden.methods.one_shot.fisher_merging import DiagonalInformed
from ekiden.training.network import Network
from ekiden.training.weights import Layout
from tests.methods.merging import models, trained
from tests.methods.toys import weights

SETTINGS = {"training": Training(lr=0.01, batch_size=16), "hardware": Hardware(threads=1)}
NO_LAYERS = Layout((), (), ())


def informed(params: tuple[float, ...], fisher: tuple[float, ...], n: int = 1) -> DiagonalInformed:
    return DiagonalInformed(trained(weights(*params), n), torch.tensor(fisher))


def test_each_weight_is_averaged_by_its_fisher_information() -> None:
    sent = [informed((0.0, 0.0, 4.0), (1.0, 3.0, 0.0)), informed((8.0, 8.0, 8.0), (3.0, 1.0, 2.0))]
    merged = FisherMerging().merge(sent).params
    torch.testing.assert_close(merged, torch.tensor([6.0, 2.0, 8.0]))


def test_samples_count_like_fisher_information() -> None:
    sent = [informed((0.0,), (2.0,), 30), informed((8.0,), (2.0,), 10)]
    assert float(FisherMerging().merge(sent).params) == 2.0
    uniform = [s._replace(trained=trained(s.trained.model)) for s in sent]
    assert float(FisherMerging(weighting="uniform").merge(uniform).params) == 4.0


def test_weights_about_which_nobody_knows_anything_are_averaged() -> None:
    sent = [informed((0.0, 0.0), (0.0, 0.0)), informed((8.0, 8.0), (0.0, 3e-6))]
    torch.testing.assert_close(FisherMerging().merge(sent).params, torch.tensor([4.0, 6.0]))
    torch.testing.assert_close(FisherMerging(floor=1.0).merge(sent).params, torch.tensor([4.0, 4.0]))


def test_normalised_models_count_alike() -> None:
    sent = [informed((0.0, 0.0), (3.0, 4.0)), informed((8.0, 8.0), (0.04, 0.03))]
    torch.testing.assert_close(FisherMerging(normalise=True).merge(sent).params, torch.tensor([32.0, 24.0]) / 7)


def test_random_numbers_against_the_formula() -> None:
    draw = np.random.default_rng(0)
    w, f, n = draw.normal(size=(4, 14)), draw.exponential(size=(4, 14)), np.array([3.0, 5.0, 1.0, 9.0])
    sent = [informed(tuple(w[k].tolist()), tuple(f[k].tolist()), int(n[k])) for k in range(4)]
    expected = (n[:, None] * f * w).sum(0) / (n[:, None] * f).sum(0)
    np.testing.assert_allclose(FisherMerging().merge(sent).params, expected, rtol=1e-4, atol=1e-6)


def test_equal_fisher_information_gives_the_average() -> None:
    fisher = torch.rand(16, generator=torch.Generator().manual_seed(0))
    sent = [DiagonalInformed(trained(m, 3 + k), fisher) for k, m in enumerate(models(3))]
    expected = Average(weighting="samples").aggregate([s.trained for s in sent], NO_LAYERS)
    found = FisherMerging().merge(sent)
    torch.testing.assert_close(found.params, expected.params, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.buffers, expected.buffers)


def test_equal_models_and_one_client_stay_as_they_are(blobs: FederatedData) -> None:
    (model,) = models(1)
    sent = [DiagonalInformed(trained(model, 2 + k), torch.rand(16)) for k in range(5)]
    assert torch.equal(FisherMerging().merge(sent).params, model.params)
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    merged, averaged = (run(m, alone, Tiny, **SETTINGS) for m in (FisherMerging(epochs=2), Average(epochs=2)))  # type: ignore[arg-type]
    assert merged.weights is not None
    assert averaged.weights is not None
    assert torch.equal(merged.weights.params, averaged.weights.params)
    assert torch.equal(merged.weights.buffers, averaged.weights.buffers)


@pytest.mark.parametrize("kind", ["samples", "uniform"])
def test_bytes(kind: str, blobs: FederatedData) -> None:
    method = FisherMerging(epochs=1, weighting=kind)  # type: ignore[arg-type]
    result = run(method, blobs, Tiny, **SETTINGS)  # type: ignore[arg-type]
    network = Network(Tiny())
    model = 4 * (len(network.params) + len(network.buffers)) + 8
    assert result.bytes == 4 * (model + 4 * len(network.params) + 8 * (kind == "samples"))
    assert result.bytes == method.cost(4, Size.of(network))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="does not have the model"):
        FisherMerging().merge([informed((1.0, 2.0), (1.0,))])


def test_networks_of_other_layers_are_refused_before_anybody_trains(blobs: FederatedData) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.PReLU(), nn.Linear(8, 3))

    with pytest.raises(UserError, match="layer '1' is no"):
        run(FisherMerging(), blobs, build)
