"""What silos report is compared before training: units of columns, spellings of names."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ekiden
from ekiden.base.errors import DataWarning, UserError
from ekiden.data import across
from ekiden.data.tabular import Moments


def hospitals(silos: int = 3, rows: int = 60) -> list[Any]:
    made = []
    for k in range(silos):
        rng = np.random.default_rng(k)
        made.append(
            {
                "height": rng.normal(170, 10, rows),
                "weight": rng.normal(75, 12, rows),
                "sex": rng.choice(["f", "m"], rows),
                "label": ["p", "q"] * (rows // 2),
            }
        )
    return made


@pytest.mark.parametrize(
    ("silos", "factor", "line"),
    [
        (3, 0.01, r"column 'height' of client-1 differs from other silos by a factor of about 100 \(mean 1.69"),
        (4, 10, r"column 'height' of client-1 differs from other silos by a factor of about 10 \("),
        (3, 1000, "a factor of about 1,000"),
        (2, 0.01, r"column 'height' of client-0 and client-1 differs by a factor of about 100 \(means 1.* and 1.*\)"),
    ],
)
def test_a_silo_in_another_unit_is_named(silos: int, factor: float, line: str) -> None:
    parts = hospitals(silos)
    parts[1]["height"] = parts[1]["height"] * factor
    with pytest.warns(DataWarning, match=line) as seen:
        ekiden.federate(parts)
    assert len(seen) == 1
    assert "weight" not in str(seen[0].message)


def test_fahrenheit_is_many_deviations_away_and_hospitals_that_differ_are_not_named() -> None:
    parts = hospitals()
    for k, part in enumerate(parts):
        part["height"] = part["height"] + 8 * k  # other people, the same unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.federate(parts)
    for part in parts:
        part["temperature"] = np.random.default_rng(0).normal(37, 0.5, 60)
    parts[2]["temperature"] = parts[2]["temperature"] * 9 / 5 + 32
    with pytest.warns(DataWarning, match=r"'temperature' of client-2 differs .* standard deviations"):
        ekiden.federate(parts)


@given(st.integers(3, 8), st.integers(0, 7), st.sampled_from((0.001, 0.01, 0.1, 10, 100, 1000)), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_one_silo_in_another_unit_is_the_only_one_named(silos: int, odd: int, factor: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    each = {}
    for k in range(silos):
        values = rng.normal(rng.uniform(40, 60), rng.uniform(8, 12), 100) * (factor if k == odd % silos else 1)
        each[f"s{k}"] = {"column 'dose'": Moments.of(values, "dose")}
    with pytest.warns(DataWarning, match=f"of s{odd % silos} differs from other silos by a factor of about") as seen:
        across.check_units(each)
    assert str(seen[0].message).count("differs") == 1


def test_a_partition_of_one_table_is_not_a_difference_of_units() -> None:
    table = {name: np.concatenate([part[name] for part in hospitals()]) for name in hospitals()[0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.split(ekiden.load(table), "dirichlet:0.1", 4)


NAMES = {"north": {"Yes": 40, "No": 20}, "south": {"yes": 30, "no ": 50}, "east": {"maybe": 3, "No": 9}}


def test_names_that_differ_in_case_or_blanks_are_found_with_their_silos() -> None:
    assert across.spellings(NAMES) == [
        [("Yes", ["north"]), ("yes", ["south"])],
        [("no ", ["south"]), ("No", ["north", "east"])],
    ]
    with pytest.raises(UserError, match=r"the label has 'Yes' \(north\) and 'yes' \(south\); the label has 'no '"):
        across.refuse_spellings({"the label": NAMES})
    assert across.merging(NAMES) == {"yes": "Yes", "No": "no "}
    assert across.merging(NAMES, known=("No", "yes")) == {"Yes": "yes", "no ": "No"}
    assert across.merging({"north": {"a b": 1, "c": 2}}) == {}


@given(st.lists(st.text(st.sampled_from("aA bB"), min_size=1, max_size=4), min_size=1, max_size=12, unique=True))
def test_after_merging_no_two_names_are_alike(names: list[str]) -> None:
    each = {"silo": dict.fromkeys(names, 1)}
    instead = across.merging(each)
    left = {instead.get(name, name) for name in names}
    assert len(left) == len({across.fold(name) for name in names})
    assert left <= set(names)
