"""Times and events: Cox regression and the C-index against lifelines, and what is refused or
named."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ekiden
from ekiden import GLM, FederatedData, UserError, federate, run
from ekiden.clinic.counting import Care, counting_of
from ekiden.clinic.figures import figures
from ekiden.clinic.ranked import Wanted
from ekiden.core.engine.method import Size
from ekiden.core.tasks import Survival
from ekiden.core.tasks.base import Scores
from ekiden.core.tasks.counts import pairs
from ekiden.core.training.network import Network
from ekiden.data import load
from ekiden.methods.statistics.hazards import baseline, hazard_counts
from ekiden.runs.card import card
from ekiden.runs.result import Result
from tests.methods.survival_reference import CUT, SHOWN, TIMES, cohort

REFERENCE: dict[str, Any] = json.loads((Path(__file__).parent / "survival.json").read_text())
ROWS = {"a": slice(0, CUT), "b": slice(CUT, None)}
LABELS = ["days", "died"]
NAMES = ["age", "bmi", "sex = m", "stage = II", "stage = III"]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* equal a training row", "ignore:.* with one value"
)


def held(rows: dict[str, slice] = ROWS, **changed: Any) -> FederatedData:
    """Two silos; all rows are for training, and for testing too."""
    table = cohort() | changed
    silos: list[Any] = [
        {name: list(values[part]) for name, values in table.items()} for part in rows.values()
    ]
    return federate(
        silos, tests=silos, names=[*rows], val_fraction=0.0, label_column=LABELS, task="survival"
    )


def patients(rows: slice = SHOWN) -> dict[str, Any]:
    """Some of the patients, as columns."""
    return {name: list(values[rows]) for name, values in cohort().items()}


def shares(model: Any, **options: Any) -> list[list[float]]:
    """Survival of the first patients at the times of the reference."""
    found = ekiden.predict(model, patients(), at=TIMES, **options)
    return [[row[f"survival_{time:g}"] for time in TIMES] for row in found]


@cache
def fitted() -> Result:
    return run(GLM(family="cox"), held(), evaluate_every=10**9)


def test_it_is_the_stratified_regression_of_pooled_data() -> None:
    found = fitted().coefficients
    assert [one.column for one in found] == NAMES
    for k, one in enumerate(found):
        error = REFERENCE["error"][k]
        assert one.error == pytest.approx(error, rel=1e-6)
        assert one.estimate == pytest.approx(REFERENCE["estimate"][k], abs=1e-6 * error)
        assert one.p == pytest.approx(REFERENCE["p"][k], abs=1e-6)


def test_its_concordance_counts_all_pairs_where_samples_are_at_hand_and_those_inside_silos_else() -> (
    None
):
    row, wanted = fitted().metrics[-1], REFERENCE["c_index"]
    assert row["c_index"] == pytest.approx(wanted["all"], abs=1e-9)
    assert row["clients"] == pytest.approx([wanted["a"], wanted["b"]], abs=1e-9)
    weights = []
    for rows in ROWS.values():
        days, died = (np.array(cohort()[name][rows]) for name in LABELS)
        early, late = days[:, None], days
        weights.append(
            int(((died[:, None] > 0) & ((early < late) | ((early == late) & (died == 0)))).sum())
        )
    assert row["figures"]["values"]["c_index"] == row["metrics"]["c_index"] == row["c_index"]
    counting, result = counting_of(Survival(), 1, full=True), fitted()
    assert result.weights is not None
    scores = result.judge(held()).scores(result.weights)
    parts = [scores.at(torch.arange(len(scores))[rows]) for rows in ROWS.values()]
    total = torch.stack([counting.count(part) for part in parts]).sum(0)
    inside = np.average([wanted["a"], wanted["b"]], weights=weights)
    found = figures(Survival(), counting.told(total))
    assert found.values["c_index"] == pytest.approx(inside, abs=1e-9)
    assert found.silos == 2


def test_its_hazard_expects_as_many_events_as_there_are() -> None:
    data, task = held().dataset, Survival(mean=(float(np.mean(cohort()["days"])),))
    with torch.no_grad():
        expected = (
            data.train.y[:, 0] / task.mean[0] * fitted().model(data.train.x)[:, 0].double().exp()
        )
    assert float(expected.sum()) == pytest.approx(float(data.train.y[:, 1].sum()), rel=1e-5)


def test_survival_is_that_of_the_pooled_baseline_hazard(tmp_path: Path) -> None:
    """One silo: Breslow's estimate, though rows end between the times. Two: nearly that of all
    patients together."""
    times = ",".join(f"{time:g}" for time in TIMES)
    one = run(
        GLM(family="cox", laps=5, times=times), held({"a": slice(None)}), evaluate_every=10**9
    )
    for row, wanted in zip(
        shares(one.load_model()), REFERENCE["survival"]["one silo"], strict=True
    ):
        assert row == pytest.approx(wanted, abs=1e-6)
    grid, folder = ",".join(str(time) for time in range(20, 501, 20)), tmp_path / "run"
    both = run(GLM(family="cox", laps=5, times=grid), held(), evaluate_every=10**9, folder=folder)
    assert both.bytes == both.build.method.cost(2, Size.of(Network(both.model)))
    found = ekiden.load_model(folder).baseline
    assert found
    assert found.hazard == pytest.approx(breslow(both, found.times), rel=1e-6)
    assert f"| {found.times[-1]:g} | {found.hazard[-1]:.6g} |" in card(ekiden.open_run(folder))


def breslow(result: Result, times: Sequence[float]) -> list[float]:
    """Return Σ d / Σ exp(z) over the times of events of all patients together."""
    y = held().dataset.train.y.numpy()
    with torch.no_grad():
        weights = result.model(held().dataset.train.x)[:, 0].double().exp().numpy()
    steps = {t: y[y[:, 0] == t, 1].sum() / weights[y[:, 0] >= t].sum() for t in np.unique(y[:, 0])}
    return [sum(step for t, step in steps.items() if t <= time) for time in times]


def test_sums_of_silos_give_the_hazard_of_all_rows_where_none_ends_between_the_times() -> None:
    table, draw = cohort(), np.random.default_rng(0)
    y, risk = np.stack([table["days"], table["died"]], 1), draw.normal(size=200)
    grid = np.arange(20.0, 901, 20).tolist()
    each = [
        hazard_counts(y[part], risk[part], grid)
        for part in (slice(30), slice(30, 100), slice(100, 200))
    ]
    events, exposure = (sum(parts) for parts in zip(*each, strict=True))
    assert baseline(events, exposure, 0) == pytest.approx(
        baseline(*hazard_counts(y, risk, grid), 0), rel=1e-12
    )


def test_a_silo_that_names_its_rows_gets_the_survival_of_its_own_stratum() -> None:
    for name, rows in ROWS.items():
        own = fitted().baseline(patients(rows), TIMES, label_column=LABELS, task="survival")
        for found, wanted in zip(
            shares(fitted().load_model(), baseline=own), REFERENCE["survival"][name], strict=True
        ):
            assert found == pytest.approx(wanted, abs=1e-6)
    with pytest.raises(UserError, match="no row is followed up to 5000: choose earlier times"):
        fitted().baseline(patients(ROWS["a"]), (5000.0,), label_column=LABELS, task="survival")


def test_no_step_of_the_hazard_rests_on_fewer_than_five_events() -> None:
    """On any grid: neighbours of a published time differ by five events or more, so no time of one
    event shows."""
    table = cohort()
    y, risk = np.stack([table["days"], table["died"]], 1), np.zeros(200)
    for step in (1.0, 7.0, 60.0):
        grid = np.arange(step, 900.0, step)
        told = baseline(*hazard_counts(y, risk, grid.tolist()), 5)
        shown = grid[told > 0]
        assert len(shown) > 5
        steps = [y[(a < y[:, 0]) & (y[:, 0] <= b), 1].sum() for a, b in pairwise((0.0, *shown))]
        assert min(steps) >= 5
    assert (
        min(y[y[:, 0] == t, 1].sum() for t in np.unique(y[:, 0])) == 0
    )  # a finer grid does have smaller steps


def test_survival_without_a_hazard_and_times_that_are_none_are_refused() -> None:
    with pytest.raises(
        UserError, match="Cox regression tells no baseline hazard by itself: run glm"
    ):
        shares(fitted().load_model())
    for text in ("90,x", "-1", "90,90", "inf"):
        with pytest.raises(
            UserError, match="not positive numbers in ascending order: write 90,180,365"
        ):
            GLM(family="cox", times=text)
    with pytest.raises(UserError, match="times are for cox"):
        GLM(family="linear", times="90")


def scores(n: int = 300) -> Scores:
    draw = np.random.default_rng(2)
    y = torch.tensor(
        np.stack([draw.integers(1, 20, n), draw.integers(0, 2, n)], 1), dtype=torch.float64
    )
    risk = torch.tensor(draw.integers(0, 9, (n, 1)) - y[:, :1].numpy() / 5)
    return Scores(Survival(), 1, y, risk, torch.zeros(n))


def test_the_interval_is_that_of_the_jackknife() -> None:
    s, counting = scores(), counting_of(Survival(), 1, full=True)
    found = figures(s.task, counting.told(counting.count(s)), Wanted())
    low, high = found.intervals["c_index"]
    ordered, comparable = (each.double() for each in pairs(s))
    total, all_ = ordered.sum() / 4, comparable.sum() / 2
    without = (total - ordered / 2) / (all_ - comparable)
    error = float((without - total / all_).square().sum().sqrt())
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.02)
    assert found.values["c_index"] == pytest.approx(float(total / all_))


def test_of_few_events_no_pairs_are_told() -> None:
    s, counting = scores(), counting_of(Survival(), 1, full=True)
    few = counting.split(counting.count(s, Care(positives=len(s))))
    assert not few["ordered"]
    assert not few["squares"].any()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"days": -cohort()["days"]},
            r"-\d+ in row 0 .*: a time, the first label, must be positive",
        ),
        ({"died": cohort()["days"]}, "an event, the second label, must be 0 or 1"),
    ],
)
def test_labels_that_are_no_times_and_events_are_refused(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        held(**changed)
    assert "\n" not in str(refusal.value)


def test_a_silo_without_an_event_adds_its_exposure_and_nothing_else() -> None:
    """Its rows compare nobody, so estimates stay; left out, the hazard would be too high."""
    table = cohort()
    twice = {name: np.concatenate([values, values[CUT:]]) for name, values in table.items()}
    twice["died"][len(table["died"]) :] = 0
    rows = ROWS | {"b": slice(CUT, 200), "c": slice(200, None)}
    silos: list[Any] = [
        {name: list(values[part]) for name, values in twice.items()} for part in rows.values()
    ]
    data = federate(
        silos, tests=silos, names=[*rows], val_fraction=0.0, label_column=LABELS, task="survival"
    )
    result = run(GLM(family="cox"), data, evaluate_every=10**9)
    for one, wanted in zip(result.coefficients, fitted().coefficients, strict=True):
        assert one.error == pytest.approx(wanted.error, rel=1e-6)
        assert one.estimate == pytest.approx(wanted.estimate, abs=1e-6 * (wanted.error or 0))
    y, mean = data.dataset.train.y, float(np.mean(twice["days"]))
    with torch.no_grad():
        expected = y[:, 0] / mean * result.model(data.dataset.train.x)[:, 0].double().exp()
    assert float(expected.sum()) == pytest.approx(float(y[:, 1].sum()), rel=1e-5)


def test_training_without_any_event_is_refused() -> None:
    with pytest.raises(UserError, match="no training sample has the event"):
        run(GLM(family="cox"), held(died=0 * cohort()["died"]))


@pytest.mark.parametrize(("yes", "no"), [(True, False), ("Yes", "no")])
def test_events_may_be_words(yes: Any, no: Any) -> None:
    died = held(died=np.where(cohort()["died"] > 0, yes, no)).dataset.train.y[:, 1]
    assert died.tolist() == cohort()["died"].tolist()


def test_times_and_events_are_a_task_of_their_own() -> None:
    table = {name: list(values) for name, values in cohort().items()}
    with pytest.raises(
        UserError,
        match=r"the labels 'died', 'days' of .* are not all 0 and 1: .*task='survival' for a time and an event",
    ):
        load(table, label_column=["died", "days"])
    load(table, label_column="days", task="regression")
    with pytest.raises(UserError, match="needs a time and an event"):
        load(table, label_column="days", task="survival")


def test_families_and_tasks_must_fit() -> None:
    with pytest.raises(
        UserError, match="logistic regression explains classes, the task is survival"
    ):
        run(GLM(), held())
    draw = torch.Generator().manual_seed(0)
    silos = [(torch.randn(20, 2, generator=draw), torch.randn(20, generator=draw)) for _ in ROWS]
    with pytest.raises(UserError, match=r"cox explains times and events .* the task is regression"):
        run(GLM(family="cox"), federate(silos))


@pytest.mark.filterwarnings("ignore:column 'marker'")
def test_a_column_that_orders_all_times_is_refused_with_its_name() -> None:
    with pytest.raises(UserError, match=r"'marker'|have no room"):
        run(
            GLM(family="cox"),
            held(days=1.0 + np.arange(200), marker=np.arange(200) ** 0.5, died=np.ones(200)),
        )
