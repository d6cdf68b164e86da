"""Networks for tables and for texts."""

import pytest
import torch

import ekiden
from ekiden.core.models.catalogue import NETWORKS, build, fitting
from ekiden.core.models.tables_and_texts import TableRows
from ekiden.methods import FedAvg
from ekiden.readers.kinds import Tokens
from tests.readers.own_data import clinic, patients

WIDTHS = {"table_mlp": 64, "table_transformer": 32}
"""of the representations"""


@pytest.mark.parametrize("model", [n for n, one in NETWORKS.items() if one.reads is TableRows])
def test_networks_for_tables_learn(model: str) -> None:
    silos = clinic(patients(240), min_count=2)
    training = ekiden.Training(lr=1e-2, batch_size=32)
    result = ekiden.run(FedAvg(rounds=3, epochs=5), silos, model, training=training)
    assert result.accuracy > 0.8  # the larger class has 0.5 to 0.6
    assert result.model.get_submodule("head").in_features == WIDTHS[model]


def test_padding_says_nothing_to_networks_for_texts() -> None:
    tokens = Tokens()
    one = tokens.encode(["A fine film."])
    two = tokens.encode(["A fine film.", "so much more than that, is it not?"])
    torch.manual_seed(0)
    for name in fitting((10,), tokens):
        network = build(name, (10,), 2, tokens).eval()
        torch.testing.assert_close(network(two)[:1], network(one))
        assert torch.isfinite(network(torch.zeros(1, 3, dtype=torch.int64))).all()  # an empty text
