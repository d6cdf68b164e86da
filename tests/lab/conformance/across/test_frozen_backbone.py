"""Every method with a frozen backbone: it trains what is left, and moves only that, or refuses in
one line."""

from pathlib import Path

import pytest
import torch
from torch import nn

from ekiden import FederatedData, run
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import GivenNetwork, Prepared, of_method
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Classification
from ekiden.core.training import frozen
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import settings
from ekiden.methods import FedELMY, FedOV, FedTasuki, MAEcho
from tests.lab.conformance.test_rules import SHAPES, mostly, small

PARTS = {"head": 8 * 3 + 3, "last:1": 64 * 8 + 8 + 8 * 3 + 3}


def backbone() -> SplitNetwork:
    """A network with BatchNorm and dropout in its features, as pretrained ones have them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        features = nn.Sequential(
            nn.Linear(4, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 8),
            nn.ReLU(),
        )
        network = SplitNetwork(features, nn.Linear(8, 3))
        for _ in range(50):
            network(torch.randn(64, 4) * 2)
    return network


@mostly({*SHAPES, FedELMY, FedTasuki, FedOV, MAEcho})
@pytest.mark.parametrize("part", [pytest.param("head", marks=pytest.mark.slow), "last:1"])
def test_only_what_is_trained_moves_or_it_is_refused_before_anything_is_written(
    kind: type[Method], part: str, few: FederatedData, tmp_path: Path
) -> None:
    method, folder = small(kind), tmp_path / "run"
    try:
        result = run(method, few, backbone(), train=part, folder=folder, **settings())
    except UserError as refusal:
        line = str(refusal)
    else:
        line = ""
    if line:
        assert "\n" not in line
        assert not folder.exists(), line
        return
    own = Prepared(GivenNetwork(backbone()), "", part, 3)
    size = Size.of(Network(of_method(own, method, (4,), 3, 3, Classification())()), (4,))
    assert result.bytes == method.moved(result.state, len(few.clients), size)
    if type(method).own_network is Method.own_network and not method.traits.extra_outputs:
        assert len(size.network.params) == PARTS[part]
        assert not len(size.network.buffers)
    models = [m for m in (result.weights, *result.personal) if m is not None]
    assert models
    assert all(m.is_finite() for m in models)
    assert frozen.digest(own())


@pytest.mark.slow
def test_a_trained_head_beats_chance(few: FederatedData) -> None:
    """The frozen features are useful: methods train on them, and do not only refuse them."""
    result = run("fedavg", few, backbone(), train="head", **settings())
    assert result.accuracy > 0.4
