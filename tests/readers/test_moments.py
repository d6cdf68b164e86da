"""Columns and targets are scaled to unit deviation, wherever their values lie."""

import json
from collections.abc import Callable
from fractions import Fraction
from math import isclose, sqrt
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ekiden.core.base.errors import DataWarning, UserError
from ekiden.core.tasks import Regression
from ekiden.data import FederatedData, federate, from_tensors, load, split
from ekiden.readers.kinds import Table
from ekiden.readers.moments import ColumnMoments, ColumnSums

pytestmark = pytest.mark.usefixtures("no_data")

FAR = {
    "clock in ms": (1.7e12, 3e5),
    "tiny": (1e-12, 3e-13),
    "identifier": (9e15, 4e6),
    "usual": (50.0, 9.0),
}
NUMBERS = st.floats(-1e100, 1e100, allow_subnormal=False)


def drawn(mean: float, std: float, n: int = 90, seed: int = 0) -> pandas.DataFrame:
    rng = np.random.default_rng(seed)
    return pandas.DataFrame(
        {"v": mean + std * rng.normal(size=n), "label": [("a", "b")[k % 2] for k in range(n)]}
    )


def assert_unit(data: FederatedData, mean: float, std: float) -> None:
    rows = torch.cat([client.train.x for client in data.clients])[:, 0].double()
    assert abs(rows.mean()) < 1e-3
    assert isclose(rows.std(correction=0), 1, rel_tol=1e-3)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert isclose(table.scale[0], std, rel_tol=0.2)
    assert isclose(table.centre[0], mean, rel_tol=0.2)


@pytest.mark.parametrize(("mean", "std"), FAR.values(), ids=list(FAR))
def test_a_column_far_from_zero_or_near_it_has_unit_deviation(mean: float, std: float) -> None:
    parts = [drawn(mean, std, seed=seed) for seed in range(3)]
    assert_unit(federate(parts, val_fraction=0.0), mean, std)
    assert_unit(split(load(pandas.concat(parts)), "iid", 3, val_fraction=0.0), mean, std)


@pytest.mark.parametrize(("mean", "std"), FAR.values(), ids=list(FAR))
def test_silos_on_their_own_machines_agree_on_the_same_scale(
    mean: float, std: float, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    from ekiden.silos.silo.silo_file import read

    for seed, name in enumerate("abc"):
        drawn(mean, std, seed=seed).to_csv(tmp_path / f"{name}.csv", index=False)
        file = tmp_path / f"{name}.toml"
        file.write_text(f'name = "{name}"\n[data]\npath = "{name}.csv"\nval_fraction = 0.0\n')
        assert command("silo", "sums", str(file))[0] == 0
    agreed = []
    for order in ("abc", "cab"):
        sums = [str(tmp_path / f"{name}-sums.json") for name in order]
        code, said = command("federation", "agree", *sums, "--out", str(tmp_path / "agreed.json"))
        assert code == 0, said
        agreed.append((tmp_path / "agreed.json").read_bytes())
    assert agreed[0] == agreed[1]  # in any order of the silos
    (tmp_path / "a.toml").write_text(
        'name = "a"\n[data]\npath = "a.csv"\nval_fraction = 0.0\nagreed = "agreed.json"\n'
    )
    rows = read(tmp_path / "a.toml").load()[1].train.x[:, 0]
    assert isclose(rows.std(correction=0), 1, rel_tol=0.25)
    assert abs(rows.mean()) < 0.5


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_targets_of_billions_with_a_deviation_of_hundreds_are_learned() -> None:
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(3):
        v = rng.normal(size=120)
        parts.append(
            pandas.DataFrame({"v": v, "w": rng.normal(size=120), "label": 3e9 + 800 * v + 0.5})
        )
    data = federate(parts)
    task = data.dataset.task
    assert isinstance(task, Regression)
    assert isclose(task.std[0], 800, rel_tol=0.1)
    standardised = task.standardised(data.dataset.train.y)
    assert standardised.dtype == torch.float32
    assert len(set(standardised[:, 0].tolist())) == len(
        standardised
    )  # float32 has only 16 numbers within two deviations
    answers = task.answers(standardised, full=False)
    assert (answers[:, 0] - data.dataset.train.y).abs().max() < 1e-3
    x, y = (
        torch.tensor(rng.normal(size=(60, 2))).float(),
        torch.tensor(3e9 + 800 * rng.normal(size=60) + 0.5),
    )
    tensors = from_tensors((x, y)).task
    assert isinstance(tensors, Regression)
    assert isclose(tensors.std[0], 800, rel_tol=0.3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=8), min_size=1, max_size=5), st.randoms())
def test_moments_of_parts_are_those_of_all_values_in_any_order(
    parts: list[list[float]], random: Random
) -> None:
    told = [ColumnMoments.of(np.array(part), "it") for part in parts]
    whole = ColumnMoments.together(told)
    values = [Fraction(value) for part in parts for value in part]
    mean = sum(values, Fraction()) / len(values)
    squares = sum(((value - mean) ** 2 for value in values), Fraction())
    largest = float(max(map(abs, values)))
    assert whole.count == len(values)
    assert abs(whole.mean - mean) <= 1e-15 * 4 * largest
    assert abs(sqrt(whole.squares) - sqrt(squares)) <= 1e-7 * sqrt(squares) + 1e-14 * largest
    random.shuffle(told)
    assert ColumnMoments.together(told) == whole  # the same bits


@given(NUMBERS, st.integers(1, 50), st.integers(1, 50))
def test_a_constant_has_no_deviation(value: float, first: int, second: int) -> None:
    parts = [ColumnMoments.of(np.full(n, value), "it") for n in (first, second)]
    assert ColumnMoments.together(parts) == ColumnMoments(first + second, value, 0.0)
    assert ColumnMoments.together(parts).deviation == 0


def test_rounding_errors_are_no_deviation() -> None:
    assert ColumnMoments.of(np.array([0.3, 0.1 + 0.2] * 20), "it").deviation == 0
    assert ColumnMoments.of(np.array([1.0, 1 + 1e-9] * 20), "it").deviation == pytest.approx(5e-10)


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


def test_a_number_to_predict_that_does_not_vary_is_refused() -> None:
    parts = [drawn(5, 1, seed=seed).assign(label=2.5) for seed in range(2)]
    with pytest.raises(UserError, match=r"the label 'label' is 2\.5 in all training rows"):
        federate(parts)
    x = torch.randn(40, 2)
    with pytest.raises(UserError, match=r"the label 'target' is 2\.5 in all training rows"):
        from_tensors((x, torch.full((40,), 2.5)))


def test_numbers_too_large_to_be_squared_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"column 'v' holds -1e\+200: no number may be above 1e\+140"
    ):
        federate([drawn(5, 1).assign(v=-1e200), drawn(5, 1)])


BROKEN: dict[str, Any] = {
    "the former format": {"values": {"v": [3, 1.0, 2.0]}, "missing": {"v": 0}, "categories": {}},
    "no number": {"moments": {"v": {"count": 3, "mean": float("nan"), "squares": 1.0}}},
    "infinity": {"moments": {"v": {"count": 3, "mean": 1.0, "squares": float("inf")}}},
    "negative squares": {"moments": {"v": {"count": 3, "mean": 1.0, "squares": -1.0}}},
    "a negative count": {"moments": {"v": {"count": -3, "mean": 1.0, "squares": 1.0}}},
    "fewer than no missing values": {
        "moments": {"v": {"count": 3, "mean": 1.0, "squares": 1.0}},
        "missing": {"v": -1},
    },
}


@pytest.mark.parametrize("values", BROKEN.values(), ids=list(BROKEN))
def test_sums_that_no_rows_have_are_refused(values: dict[str, Any]) -> None:
    text = json.dumps({"missing": {"v": 0}, "categories": {}, "dates": [], "marks": []} | values)
    with pytest.raises(UserError, match="here holds no sums of a table"):
        ColumnSums.from_json(text, "here")


def test_silos_on_their_own_machines_agree_on_dates_and_marks(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    from ekiden.silos.silo.silo_file import read

    days = pandas.date_range("2024-01-05", periods=40, freq="3D")
    frame = pandas.DataFrame({"seen": days, "v": range(40), "label": ["a", "b"] * 20})
    frame["v"] = frame["v"].astype(object).where(frame.index % 5 > 0, "n.d.")
    for name, seen in (
        ("a", days),
        ("b", days + pandas.Timedelta("1D")),
        ("c", range(20240101, 20240141)),
    ):
        frame.assign(seen=seen).to_csv(tmp_path / f"{name}.csv", index=False)
        text = f'name = "{name}"\n[data]\npath = "{name}.csv"\nmissing = ["n.d."]\nmin_count = 2\n'
        (tmp_path / f"{name}.toml").write_text(text)
        assert command("silo", "sums", str(tmp_path / f"{name}.toml"))[0] == 0
    sums, out = (
        [str(tmp_path / f"{name}-sums.json") for name in "abc"],
        str(tmp_path / "agreed.json"),
    )
    code, said = command("federation", "agree", *sums, "--out", out)
    assert (code, "holds dates in the column 'seen'" in said) == (2, True), said
    code, said = command("federation", "agree", *sums[:2], "--out", out)
    assert code == 0, said
    agreed = json.loads(Path(out).read_text())["table"]
    assert (agreed["dates"], agreed["missing"], agreed["gaps"]) == (["seen"], ["n.d."], ["v"])
    # The agreed marks count at a silo that does not name them.
    (tmp_path / "a.toml").write_text('name = "a"\n[data]\npath = "a.csv"\nagreed = "agreed.json"\n')
    assert read(tmp_path / "a.toml").load()[1].train.x[:, -1].sum() > 0


def test_a_value_far_from_all_others_is_told_by_mean_and_deviation() -> None:
    """Nothing hides it but the operator, who reads the file before: see docs/security.md."""
    rest = np.random.default_rng(0).normal(50, 10, 99)
    told = ColumnMoments.of(np.append(rest, 1050.0), "a column")
    guess = told.mean + np.sqrt(told.squares * 99 / 100)
    assert abs(guess - 1050) < 0.01 * 1050
