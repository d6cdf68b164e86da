"""Methods with a model of their own for tables take no other network."""

import pytest
from torch import nn

from ekiden import GLM, UserError
from ekiden.core.training import frozen


def test_only_the_linear_network_is_taken() -> None:
    method = GLM()
    for model in ("auto", "linear"):
        assert method.with_source(model, "") == (method, "linear", "")
    for model, pretrained in (("mlp", ""), ("linear", "weights.safetensors")):
        with pytest.raises(UserError, match="leave out model and pretrained"):
            method.with_source(model, pretrained)


def test_networks_that_read_codes_and_frozen_ones_are_refused() -> None:
    fixed = frozen.fix(nn.Linear(4, 1).requires_grad_(False))
    for network in (nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1)), fixed):
        with pytest.raises(UserError, match="has a model of its own for numbers and tables"):
            GLM().columns_of(network, (4,), 1)
    assert GLM().columns_of(nn.Linear(4, 1), (4,), 1) is not None
