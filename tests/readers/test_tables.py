"""Tensors of the rows of a table."""

import json
from pathlib import Path

import pandas
import pytest
import torch

import ekiden
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import federate
from ekiden.readers.kinds import Table, from_json
from tests.readers.one_column import drawn
from tests.readers.own_data import clinic, parquet, patients

pytestmark = pytest.mark.usefixtures("no_data")


def test_columns_that_do_not_vary_are_named_in_one_line() -> None:
    parts = [drawn(5, 1, seed=seed).assign(k=7, j=0.1) for seed in range(2)]
    with pytest.warns(
        DataWarning,
        match=r"learns nothing from columns with one value at all silos, .* drop_columns=\['k', 'j'\]",
    ):
        data = federate(parts)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.scale[1:] == (1.0, 1.0)
    assert (data.dataset.train.x[:, 1:] == 0).all()


@pytest.mark.filterwarnings("ignore:.* categories that the model does not know")
def test_inputs_are_plain_values_and_encode_new_rows(tmp_path: Path) -> None:
    rows = patients()
    data = clinic(rows, min_count=2)
    table = from_json(json.loads(json.dumps(data.dataset.inputs.to_json())))
    assert table == data.dataset.inputs
    given = {
        "sex": ["male", "other"],
        "age": [60.0, None],
        "dose": [5.0, None],
    }  # columns in another order
    x = table.encode(given)
    assert isinstance(table, Table)
    assert x[0, 0] == pytest.approx((60 - table.centre[0]) / table.scale[0], abs=1e-6)
    assert x[1].tolist() == [0, 0, 1, 0]
    assert torch.equal(table.encode(parquet(tmp_path / "new.parquet", given)), x)
    with pytest.raises(UserError, match="has no column 'dose', which"):
        table.encode({"age": [1.0], "sex": ["male"]})
    with pytest.raises(
        UserError,
        match=r"column 'age' .* holds text \('old' in row 0 .*\), but numbers are expected",
    ):
        table.encode(given | {"age": ["old", "60"]})


def test_columns_of_numbers_can_be_categories_and_dates_are_numbers() -> None:
    rows = patients(60) | {"zip": [k % 2 for k in range(60)]}
    rows["seen"] = pandas.date_range("2020-01-01", periods=60).to_pydatetime().tolist()
    data = clinic(rows, categorical_columns="zip", min_count=2)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.categorical == ("sex", "zip")
    assert table.vocabularies[1] == ("0", "1")
    assert table.numeric == ("age", "dose", "seen")
    assert table.centre[2] == pytest.approx(18262 + 29.5, abs=5)  # days since 1970


def test_a_category_that_training_never_saw_is_one_of_the_others() -> None:
    rows = patients(60)
    data = clinic(rows, min_count=2)
    assert isinstance(data.dataset.inputs, Table)
    with pytest.warns(
        ekiden.DataWarning, match=r"does not know \(column 'sex': 'unheard of' in 1 of 1 rows\)"
    ):
        encoded = data.dataset.inputs.encode({"age": [50], "sex": ["unheard of"], "dose": [1]})
    assert encoded[0, -1] == 0
