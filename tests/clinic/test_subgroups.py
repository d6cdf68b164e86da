"""Tables of subgroups: figures against the scores themselves, gaps, and what subtracting tables
shows."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from ekiden import UserError
from ekiden.clinic.counting import counting_of
from ekiden.clinic.figures import figures
from ekiden.clinic.ranked import Wanted, wilson
from ekiden.clinic.subgroups import (
    Division,
    Subgroup,
    cell,
    check_task,
    divisions,
    shift,
    table,
)
from ekiden.core.tasks import Classification, MultiLabel
from ekiden.readers.kinds import Table
from tests.clinic.counted import two_classes

TABLE = Table(
    ("age", "lab"),
    ("sex",),
    centre=(50.0, 0.0),
    scale=(7.3, 1.0),
    gaps=("age",),
    vocabularies=(("", "f", "m"),),
)


def rows_of(ages: list[float], sexes: list[str]) -> Tensor:
    numbers = np.array([[age, 0.5] for age in ages])
    return TABLE.scaled(numbers, [np.array(sexes)])


def made_table(p: Any, y: Any, group: Any, threshold: float | None = None) -> Any:
    scores = two_classes(p, y)
    counting = counting_of(scores.task, 2, full=True)
    places = torch.tensor(group)
    numbers = [counting.count(scores.at((places == k).nonzero().flatten())) for k in range(2)]
    whole = figures(counting.task, counting.told(counting.count(scores)), Wanted())
    return table(counting, {"sex": dict(zip(("f", "m"), numbers, strict=True))}, whole, threshold)


def test_figures_of_subgroups_are_those_of_their_scores() -> None:
    draw = np.random.default_rng(0)
    y, group = draw.integers(0, 2, 1000), draw.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-draw.normal(0, 1, 1000) - (1 + group) * (y - 0.5)))
    found = made_table(p, y, group, 0.4)
    groups = found["groups"]["sex"]
    assert [(name, row["samples"], row["positives"]) for name, row in groups.items()] == [
        (name, int((group == g).sum()), int(y[group == g].sum())) for g, name in enumerate("fm")
    ]
    f, m = groups["f"], groups["m"]
    areas = [sk.roc_auc_score(y[group == g], p[group == g]) for g in (0, 1)]
    assert [f["values"]["auroc"], m["values"]["auroc"]] == pytest.approx(areas, abs=1e-3)
    gap, other = f["gaps"]["auroc"], m["gaps"]["auroc"]
    assert gap[0] == pytest.approx(areas[0] - areas[1], abs=2e-3)
    assert gap[0] == -other[0]
    assert gap[1] == pytest.approx(-other[2])
    recall = [(p[(group == g) & (y == 1)] >= found["threshold"]).mean() for g in (0, 1)]
    assert [f["values"]["sensitivity"], m["values"]["sensitivity"]] == pytest.approx(
        recall, abs=5e-3
    )


def test_a_metric_says_whether_tables_of_subgroups_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = [replace(one, divides=one.name == "macro_f1") for one in Classification.metrics]
    monkeypatch.setattr(Classification, "metrics", tuple(metrics))
    draw = np.random.default_rng(0)
    shown = made_table(draw.random(200), draw.integers(0, 2, 200), draw.integers(0, 2, 200), 0.5)
    assert shown["shares"] == {
        "macro_f1": True,
        "sensitivity": True,
        "specificity": True,
        "shift": False,
    }
    assert shown["groups"]["sex"]["f"]["values"].keys() == shown["shares"].keys()


def test_the_interval_of_a_gap_of_shares_is_newcombes() -> None:
    """His example: 56 of 70 against 48 of 80 gives 0.2, from 0.0524 to 0.3339 (method 10,
    Statistics in Medicine)."""
    y = np.array([1] * 70 + [0] * 10 + [1] * 80 + [0] * 10)
    p = np.concatenate([[0.9] * 56 + [0.1] * 24, [0.9] * 48 + [0.1] * 42])
    group = np.array([0] * 80 + [1] * 90)
    gap = made_table(p, y, group, 0.5)["groups"]["sex"]["f"]["gaps"]["sensitivity"]
    assert tuple(gap) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert wilson(56, 70)[0] < 0.8 < wilson(56, 70)[1]


@pytest.mark.slow  # many tables
def test_intervals_of_gaps_cover_the_truth() -> None:
    """AUROC of both groups is the same, so 95 % of the intervals have 0 in them."""
    draw, covered = np.random.default_rng(1), 0
    for _ in range(60):
        y, group = draw.integers(0, 2, 200), np.arange(200) % 2
        p = 1 / (1 + np.exp(-draw.normal(0, 1, 200) - 1.5 * (y - 0.5)))
        gap = made_table(p, y, group, 0.5)["groups"]["sex"]["f"]["gaps"]["auroc"]
        covered += gap[1] <= 0 <= gap[2]
    assert covered >= 52


def test_columns_of_a_table_divide_samples() -> None:
    x = rows_of([39.0, 40.0, 64.9, 65.0, float("nan")], ["f", "m", "", "x", "f"])
    age, sex = divisions(["age:40:65,sex"])
    assert age.names(TABLE) == ("below 40", "40 to below 65", "65 or more", "missing")
    assert age.places(x, TABLE).tolist() == [0, 1, 1, 2, 3]
    assert sex.names(TABLE) == ("other", "missing", "f", "m")
    assert sex.places(x, TABLE).tolist() == [2, 3, 1, 0, 2]
    assert Division("domain").names(TABLE, ("ge", "philips")) == ("ge", "philips")


def test_subgroups_of_a_column_have_different_names() -> None:
    names = ("", "missing", "other", "(other)")
    table = Table((), ("race",), vocabularies=(names,))
    assert Division("race").names(table) == ("((other))", "(missing)", *names[1:])
    assert Division.parse("lab:0.1:1000000:1000001:1000002").names(TABLE) == (
        "below 0.1",
        "0.1 to below 1000000",
        "1000000 to below 1000001",
        "1000001 to below 1000002",
        "1000002 or more",
    )


def test_a_column_called_domain_comes_before_the_domains() -> None:
    table = Table((), ("domain",), vocabularies=(("skin", "lung"),))
    rows = table.scaled(np.zeros((2, 0)), [np.array(["lung", "skin"])])
    division = Division("domain")
    names = division.names(table, ("ge", "philips"))
    places = division.places(rows, table, torch.tensor([0, 0])).tolist()
    assert [names[k] for k in places] == ["lung", "skin"]


@pytest.mark.parametrize(
    ("by", "said"),
    [
        (["age"], "say where to divide it, by age:40:65"),
        (["sex:3"], "categories, which no number divides: by sex"),
        (["seks"], "did you mean 'sex'"),
        (["age:65:40"], "ascending numbers"),
        (["age:old"], "numbers that divide it"),
        (["age:nan"], "ascending numbers"),
        (["age:40", "age:41"], "twice: two divisions subtracted would show a few samples"),
    ],
)
def test_other_columns_are_refused(by: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        [one.names(TABLE) for one in divisions(by)]


def test_tasks_without_subgroups_are_refused() -> None:
    check_task(Classification())
    with pytest.raises(UserError, match="not for multi-label: leave out by"):
        check_task(MultiLabel())


def test_the_shift_of_scores_is_the_stability_index_of_tenths() -> None:
    """20 samples of each kind, in two bins: p = (15.5, 5.5, 0.5, ...), q = (5.5, 15.5, 0.5, ...),
    of 25 in all."""
    own, others = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8)
    own[0, 0, 1], own[0, 1, 6], others[0, 0, 1], others[0, 1, 6] = 15, 5, 5, 15
    assert shift(own, others) == pytest.approx(2 * (10 / 25) * np.log(15.5 / 5.5))
    assert shift(own, own) == 0
    assert shift(own, torch.zeros(1, 2, 8)) is None
    assert shift(torch.ones(3, 2, 8), torch.ones(3, 2, 8)) is None, (
        "of more classes there is no such index"
    )


def test_a_subgroup_in_which_nothing_is_defined_has_cells() -> None:
    """Without an event there is no pair to rank."""
    row = Subgroup(12, None, {}, {}, {}, ()).to_json()
    assert row == {"samples": 12, "values": {}}
    assert cell(row, "c_index", share=True) == "–"
