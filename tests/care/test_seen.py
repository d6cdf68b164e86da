"""Which equal rows are copies, not chance."""

import warnings
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import ekiden
from ekiden.care.seen import fingerprints, rows_of_several
from ekiden.core.base.errors import DataWarning
from ekiden.readers.kinds.tables import Table
from tests.care.rows import N, Rows, visits
from tests.readers.told import drawn, said


def test_rows_that_several_silos_hold_are_counted() -> None:
    one, two, three = (
        pandas.DataFrame(visits(6, 10, seed=k)).drop(columns="patient") for k in range(3)
    )
    two.loc[:4, "v"] = one.loc[10:14, "v"].to_numpy()
    two.loc[:4, "ward"] = one.loc[10:14, "ward"].to_numpy()
    silos = [one, two[["ward", "label", "v"]], three]  # the order of columns does not matter
    with pytest.warns(
        DataWarning, match="silos hold equal rows: client-0 and client-1 5 rows of 60 and 60. A row"
    ):
        ekiden.federate(silos)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.federate([one, three])


def test_fingerprints_depend_on_the_salt_and_on_names_not_on_codes() -> None:

    one = Table(("a", "b"), ("c",), vocabularies=(("x", "y"),))
    other = Table(("b", "a"), ("c",), vocabularies=(("w", "x", "y"),))
    x = torch.tensor([[1.5, float("nan"), 2.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    y = torch.tensor([[float("nan"), 1.5, 3.0], [1.0, -0.0, 2.0]], dtype=torch.float64)
    assert fingerprints(x, one, b"salt") == fingerprints(y, other, b"salt")
    assert not set(fingerprints(x, one, b"salt")) & set(fingerprints(x, one, b"other"))


pytestmark = pytest.mark.usefixtures("no_data")


def test_few_equal_rows_are_named_only_if_they_are_hardly_chance() -> None:
    rng = np.random.default_rng(0)

    def coarse() -> Rows:
        return {
            "age": rng.integers(30, 80, N),
            "v": rng.normal(5, 2, N).round(1),
            "label": ["p", "q"] * (N // 2),
        }

    parts: list[Rows] = [coarse() for _ in range(4)]
    parts[1]["age"][0], parts[1]["v"][0] = parts[0]["age"][0], parts[0]["v"][0]
    assert "equal rows" not in said(lambda: ekiden.federate(parts))
    for part in parts:
        part["dose"] = rng.normal(size=N)
    parts[1]["dose"][0] = parts[0]["dose"][0]
    assert "client-0 and client-1 1 row of 40 and 40" in said(lambda: ekiden.federate(parts))
    held = {"a": ["1", "2", *map(str, range(10, 40))], "b": ["1", *map(str, range(50, 80))]}
    assert "Few may be equal by chance" in "".join(rows_of_several(held))


def test_equal_rows_are_named_also_if_rows_occur_twice_within_a_silo() -> None:
    one = pandas.DataFrame(drawn(seed=0))
    twice = pandas.concat([one, one[:10]])
    copied = pandas.concat([one[:20], pandas.DataFrame(drawn(40, seed=2))])
    silos: list[Any] = [twice, pandas.DataFrame(drawn(seed=1)), copied]
    assert "silos hold equal rows: client-0 and client-2 20 rows" in said(
        lambda: ekiden.federate(silos)
    )


@pytest.mark.parametrize("values", [3, 30])
def test_rows_that_are_equal_by_chance_are_not_called_copies(values: int) -> None:
    rng = np.random.default_rng(0)
    held = {f"s{k}": [str(v) for v in rng.integers(0, values, (300, 2)).tolist()] for k in range(4)}
    assert not [*rows_of_several(held)]
    lines = rows_of_several(held | {"s1": [*held["s1"], *held["s0"]]})
    assert "s0 and s1" in "".join(lines) or values == 3


def test_one_row_that_is_common_at_one_silo_is_no_copy_of_the_same_row_elsewhere() -> None:
    common = ["0"] * 300 + [str(k) for k in range(1, 701)]
    assert not [*rows_of_several({"large": common, "small": ["0"] * 20})]
    copied = [str(k) for k in range(1, 30)]
    assert "large and small 30 rows" in "".join(
        rows_of_several({"large": common, "small": ["0", *copied]})
    )
