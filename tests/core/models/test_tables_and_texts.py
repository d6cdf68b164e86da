"""Networks for tables."""

import pytest

import ekiden
from ekiden.methods import FedAvg
from tests.readers.own_data import clinic, patients


@pytest.mark.parametrize(("model", "width"), [("table_mlp", 64), ("table_transformer", 32)])
def test_networks_for_tables_learn(model: str, width: int) -> None:
    silos = clinic(patients(240), min_count=2)
    training = ekiden.Training(lr=1e-2, batch_size=32)
    result = ekiden.run(FedAvg(rounds=3, epochs=5), silos, model, training=training)
    assert result.accuracy > 0.8  # the larger class has 0.5 to 0.6
    assert result.model.get_submodule("head").in_features == width
