"""Survival curves and the log-rank test: against lifelines, and what coarse grids and small silos
show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ekiden.clinic import curves, study
from ekiden.core.base.errors import UserError
from ekiden.data import federate
from ekiden.readers.followed import Followed
from ekiden.readers.moments import ColumnSums
from tests.clinic.survival_times import ROWS, Y, told
from tests.methods.survival_reference import cohort as patients

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "methods" / "survival.json").read_text()
)

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")


def test_with_all_times_they_are_those_of_lifelines() -> None:
    found = curves.compared("days", told(sorted(set(Y["all"][:, 0]))))
    assert [found.statistic, found.p] == pytest.approx(REFERENCE["log-rank"], rel=1e-6)
    assert found.p_range == (found.p, found.p), "all times are known"
    for name, curve in found.curves.items():
        wanted = REFERENCE["curves"][name]
        at = [curve.times.index(time) for time in wanted["times"]]
        for what in ("survival", "low", "high"):
            assert [getattr(curve, what)[k] for k in at] == pytest.approx(wanted[what], abs=1e-6)
        assert not any(curve.error)
        ends = [
            [float("inf") if t is None else t for t in each] for each in curve.quartiles.values()
        ]
        assert ends == wanted["quartiles"]


def test_a_coarse_grid_is_off_by_less_than_it_says() -> None:
    grid = [100.0, 250.0, 500.0, 800.0]
    curve = curves.compared("days", told(grid)).curves["all"]
    exact = REFERENCE["curves"]["all"]
    for k, time in enumerate(grid):
        true = [s for s, t in zip(exact["survival"], exact["times"], strict=True) if t <= time][-1]
        assert abs(curve.survival[k] - true) <= curve.error[k] < 0.1
        assert curve.survival[k] == pytest.approx(true, abs=0.02)
    assert any(error > 0.01 for error in curve.error)


@pytest.mark.parametrize("seed", range(8))
def test_a_test_on_a_coarse_grid_tells_how_far_off_it_can_be(seed: int) -> None:
    """Two silos with one hazard; one loses its rows soon. On a grid, life tables see a difference."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name, most in (("a", 0.8), ("b", 5.0)):
        ends, seen = rng.exponential(1, 300), rng.uniform(0, most, 300)
        silos[name] = np.stack([np.minimum(ends, seen), (ends <= seen).astype(float)], 1)
    every = sorted({*silos["a"][:, 0], *silos["b"][:, 0]})
    rows = curves.compared("t", {name: Followed.of(y, every, 1) for name, y in silos.items()})
    found = curves.compared("t", {name: Followed.of(y, [0.5, 1.0], 1) for name, y in silos.items()})
    assert found.p_range is not None
    assert rows.p is not None
    low, high = found.p_range
    assert low < rows.p < high
    assert found.p is not None
    assert low < found.p < high


@pytest.mark.parametrize("seed", [29, 101, 107, 131])
def test_the_range_of_several_silos_holds_the_test_of_all_rows(seed: int) -> None:
    """Three or four silos, each with a hazard and a follow-up of its own."""
    rng = np.random.default_rng(seed)
    silos = {}
    for name in "abcd"[: 3 + seed % 2]:
        n, most = int(rng.integers(60, 300)), rng.choice([0.6, 1.0, 3.0])
        ends, seen = rng.exponential(rng.choice([0.8, 1.0, 1.3]), n), rng.uniform(0, most, n)
        silos[name] = np.stack([np.minimum(ends, seen), (ends <= seen).astype(float)], 1)
    every = sorted(set(np.concatenate([y[:, 0] for y in silos.values()])))
    rows = curves.compared("t", {name: Followed.of(y, every, 1) for name, y in silos.items()})
    found = curves.compared("t", {name: Followed.of(y, [0.3, 0.6], 1) for name, y in silos.items()})
    assert found.p is not None
    assert rows.p is not None
    assert found.p_range is not None
    assert found.p_range[0] <= min(found.p, rows.p)
    assert max(found.p, rows.p) <= found.p_range[1]


def test_sums_carry_them_and_a_crafted_file_is_refused() -> None:
    table = patients()
    silos: list[Any] = [
        {name: list(values[ROWS[silo]]) for name, values in table.items()} for silo in ("a", "b")
    ]
    fed = federate(
        silos,
        tests=silos,
        names=["a", "b"],
        val_fraction=0.0,
        label_column=["days", "died"],
        task="survival",
    )
    sums = study.cohort_sums(fed, [200.0, 400.0])
    read = [ColumnSums.from_json(one.to_json(), "a file") for one in sums]
    assert read == sums
    found = study.survival(read)
    assert found is not None
    assert found.curves["all"].at_risk[0] == 2 * len(
        Y["all"]
    )  # these rows are in training and in the test
    with pytest.raises(UserError, match="b tells no events between times"):
        study.survival([read[0], study.cohort_sums(fed)[1]])
    for changed in ({"times": [400, 200]}, {"events": [1]}, {"later": -1}, {"times": "x"}):
        values = json.loads(sums[0].to_json())
        values["followed"] |= changed
        with pytest.raises(UserError):
            ColumnSums.from_json(json.dumps(values), "a file")
    plain = federate(silos, tests=silos, label_column="died", drop_columns=["days"])
    with pytest.raises(UserError, match=r"survival is shown need task=.survival"):
        study.cohort_sums(plain, [200.0])


def test_the_command_shows_them(tmp_path: Path, command: Callable[..., tuple[int, str]]) -> None:
    names = list(patients())
    files = []
    for silo in ("a", "b"):
        rows = zip(*(patients()[name][ROWS[silo]] for name in names), strict=True)
        files.append(str(tmp_path / f"{silo}.csv"))
        Path(files[-1]).write_text(
            "\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)])
        )
    flags = (
        "--label-column",
        "days",
        "died",
        "--task",
        "survival",
        "--table-one",
        "--times",
        "200",
        "400",
    )
    code, said = command("data", "--silos", *files, *flags)
    assert not code, said
    k = REFERENCE["curves"]["all"]["times"].index(400)
    assert "log-rank between silos: " in said
    assert f"{100 * REFERENCE['curves']['all']['survival'][k]:.0f}." in said
    code, said = command("data", "--silos", *files, *flags, "--json")
    assert not code, said
    assert json.loads(said[said.index("{") : said.rindex("}") + 1])["survival"]["curves"]["a"][
        "times"
    ] == [200, 400]
