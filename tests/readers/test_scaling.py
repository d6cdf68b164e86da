"""Silos scale numbers alike, by the sums that they tell."""

import json
from collections.abc import Callable
from math import isclose
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.core.tasks import Regression
from ekiden.data import FederatedData, federate, from_tensors, load, split
from ekiden.readers.kinds import Table
from tests.readers.one_column import drawn
from tests.readers.own_data import clinic, others, patients

pytestmark = pytest.mark.usefixtures("no_data")
FAR = {
    "clock in ms": (1.7e12, 3e5),
    "tiny": (1e-12, 3e-13),
    "identifier": (9e15, 4e6),
    "usual": (50.0, 9.0),
}


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


def test_a_table_is_scaled_by_what_the_clients_tell() -> None:
    data = clinic(patients(), min_count=2)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert (table.numeric, table.categorical, table.gaps) == (("age", "dose"), ("sex",), ("dose",))
    assert table.vocabularies == (("female", "male"),)
    assert [client.name for client in data.clients] == ["east", "north", "south"]
    rows = torch.cat([client.train.x for client in data.clients])
    assert rows.dtype == torch.float32
    assert rows.shape[1] == 4  # age, dose, whether dose is missing, sex
    assert rows[:, 0].mean().abs() < 1e-5
    assert (rows[:, 0].std(correction=0) - 1).abs() < 1e-5
    assert set(rows[:, 3].tolist()) == {1.0, 2.0}
    missing = rows[:, 2] == 1
    assert 0 < missing.sum() < len(rows)
    assert (rows[missing, 1] == 0).all()  # the mean
    assert torch.equal(data.dataset.train.x[data.clients[0].train.rows], data.clients[0].train.x)


def test_the_scale_is_that_of_pooled_training_rows_and_nothing_else() -> None:
    rows = patients()
    raw = load(
        rows, label_column="died", group_column="ward", drop_columns=others("died"), min_count=1
    )
    before = raw.train.x.clone()
    data = split(raw, "natural", val_fraction=0.0)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.centre[0] == pytest.approx(float(before[:, 0].mean()))
    assert table.scale[0] == pytest.approx(float(before[:, 0].std(correction=0)))


def test_a_rare_category_and_a_rare_gap_are_not_told_of() -> None:
    rows = patients(90)
    rows["sex"][4] = "Ada Lovelace"
    rows["dose"] = [5.0 + k % 7 for k in range(90)]
    rows["dose"][5] = None
    data = clinic(rows, min_count=5)
    table = data.dataset.inputs
    assert isinstance(table, Table)
    assert table.vocabularies == (("female", "male"),)
    assert table.gaps == ()
    assert "Ada" not in json.dumps(table.to_json())
    assert 0.0 in torch.cat(
        [data.dataset.train.x[:, -1], data.dataset.test.x[:, -1]]
    )  # the code of all others


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_targets_are_standardised_by_what_clients_tell() -> None:
    data = load(
        patients(),
        label_column="days",
        group_column="ward",
        drop_columns=others("days"),
        min_count=2,
    )
    silos = split(data, "natural", val_fraction=0.0)
    task = silos.dataset.task
    assert isinstance(task, Regression)
    assert task.mean[0] == pytest.approx(float(silos.dataset.train.y.double().mean()))
    assert task.std[0] == pytest.approx(float(silos.dataset.train.y.double().std(correction=0)))


def test_a_column_with_the_name_of_a_targets_sums_is_refused() -> None:
    parts = [drawn(50, 10, seed=seed).rename(columns={"v": "target: y"}) for seed in range(2)]
    for part in parts:
        part["label"] = part["target: y"] / 7
    with pytest.raises(UserError, match="rename the column 'target: y'"):
        federate(parts, label_column="label", task="regression")
