"""Average: exact numbers, the classifier by class, running statistics, bad input."""

from typing import cast

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Layout, Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average
from ekiden.methods.blocks.combining import Trained, class_mean
from tests.methods.toys import Quadratic, weights


def linear(rows: list[list[float]], bias: list[float] | None = None) -> tuple[Weights, Layout]:
    layer = nn.Linear(len(rows[0]), len(rows), bias=bias is not None)
    layer.weight.data = torch.tensor(rows)
    if bias is not None:
        layer.bias.data = torch.tensor(bias)
    built = Network(nn.Sequential(layer))
    return built.weights(), built.layout


@pytest.mark.parametrize(
    ("head", "rows"), [("class-wise", [[1.0, 1.0], [3.0, 3.0]]), ("mean", [[4.0, 4.0], [6.0, 6.0]])]
)
def test_classifier_by_owners(head: str, rows: list[list[float]]) -> None:
    (a, layout), (b, _) = linear([[1.0, 1.0], [9.0, 9.0]]), linear([[7.0, 7.0], [3.0, 3.0]])
    sent = [Trained(a, torch.tensor([30, 1])), Trained(b, torch.tensor([0, 20]))]
    assert Average(combine_heads=head).aggregate(sent, layout).params.view(2, 2).tolist() == rows  # type: ignore[arg-type]


def test_classifier_by_class_counts() -> None:
    (a, layout), (b, _) = linear([[1.0], [1.0]], [1.0, 1.0]), linear([[5.0], [9.0]], [5.0, 9.0])
    sent = [Trained(a, torch.tensor([30, 0])), Trained(b, torch.tensor([10, 20]))]
    result = Average(combine_heads="class-counts").aggregate(sent, layout)
    assert result.params.tolist() == [2.0, 9.0, 2.0, 9.0]


def test_a_class_that_nobody_has_gets_a_zero_row_and_bias() -> None:
    a, layout = linear([[1.0], [2.0]], [3.0, 4.0])
    sent = [Trained(a, torch.tensor([5, 1])), Trained(a, torch.tensor([5, 0]))]
    assert Average(combine_heads="class-wise").aggregate(sent, layout).params.tolist() == [
        1.0,
        0.0,
        3.0,
        0.0,
    ]


def test_running_statistics() -> None:
    sent = []
    for centre in (0.0, 4.0):
        module = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1))
        cast(nn.BatchNorm1d, module[0]).running_mean.fill_(centre)  # type: ignore[union-attr]
        built = Network(module)
        sent.append(Trained(built.weights(), torch.tensor([7])))
    assert Average().aggregate(sent, built.layout).buffers.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("head", ["mean", "class-wise", "class-counts"])
def test_identical_models_average_to_themselves(head: str) -> None:
    built = Network(Tiny())
    sent = [Trained(built.weights(), torch.tensor([3, 5 + i, 7])) for i in range(5)]
    result = Average(combine_heads=head, weighting="samples").aggregate(sent, built.layout)  # type: ignore[arg-type]
    assert torch.equal(result.params, built.params)
    assert torch.equal(result.buffers, built.buffers)


def test_models_of_different_shape_are_refused() -> None:
    a, layout = linear([[1.0], [2.0]])
    with pytest.raises(UserError, match="different shape"):
        Average().aggregate(
            [Trained(a, torch.tensor([])), Trained(weights(1.0), torch.tensor([]))], layout
        )
    with pytest.raises(UserError, match="do not fit"):
        class_mean([a, a], torch.ones(2, 3), layout)


@pytest.mark.parametrize("head", ["mean", "class-wise", "class-counts"])
@pytest.mark.parametrize("kind", ["uniform", "samples"])
def test_ledger_with_counts(blobs: FederatedData, head: str, kind: str) -> None:
    method = Average(epochs=1, combine_heads=head, weighting=kind)  # type: ignore[arg-type]
    result = run(method, blobs, Tiny, training=Training(lr=0.01), hardware=Hardware(threads=1))
    network = Network(Tiny())
    size = 4 * (len(network.params) + len(network.buffers)) + 8
    numbers = {"mean": int(kind == "samples")}.get(head, 3)
    assert result.bytes == 4 * (size + 8 * numbers) == method.cost(4, Size.of(network))


def test_one_client_keeps_its_model_and_inits_differ(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    same, other = (
        run(Average(epochs=1, init=init), alone, Tiny, hardware=Hardware(threads=1))
        for init in ("same", "different")
    )
    assert same.weights is not None
    assert other.weights is not None
    assert not torch.equal(same.weights.params, other.weights.params)
    assert same.accuracy > 0


def test_the_client_counts_its_training_samples(blobs: FederatedData) -> None:
    class Stub(Quadratic):
        n = 7

        def class_counts(self) -> torch.Tensor:
            return torch.tensor([4, 0, 3])

    client = cast(Client, Stub([1.0]))
    assert Average(epochs=1).train(client, weights(0.0)).counts.tolist() == []
    assert Average(epochs=1, weighting="samples").train(client, weights(0.0)).counts.tolist() == [7]
    assert Average(epochs=1, combine_heads="class-wise").train(
        client, weights(0.0)
    ).counts.tolist() == [4, 0, 3]
