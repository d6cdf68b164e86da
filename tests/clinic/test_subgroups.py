"""Tables of subgroups: figures against the scores themselves, gaps, and what subtracting tables
shows."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk
from torch import Tensor

from ekiden import UserError
from ekiden.clinic.counting import EXACT, Care, counting_of
from ekiden.clinic.figures import figures
from ekiden.clinic.ranked import Wanted, wilson
from ekiden.clinic.subgroups import Division, check_task, count, divisions, shift, table, told
from ekiden.core.tasks import Classification, MultiLabel, Scores, Survival
from ekiden.readers.kinds import Table
from tests.clinic.test_figures import two_classes

CARE = Care(samples=10, positives=5, coarse=True)
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


def random_silo(seed: int, n: int = 60, columns: int = 2) -> tuple[Scores, list[Tensor]]:
    """A silo with small subgroups, and with columns that divide each other."""
    draw = np.random.default_rng(seed)
    y = (draw.random(n) < 0.4).astype(int)
    first = draw.choice(4, n, p=draw.dirichlet(np.ones(4) * 0.6))
    second = np.where(draw.random(n) < 0.08, draw.integers(0, 4, n), first // 2)  # nearly nested
    places = [
        torch.from_numpy(np.asarray(at)) for at in (first, second, draw.integers(0, 3, n))[:columns]
    ]
    return two_classes(draw.random(n), y), places


def differences(scores: Scores, places: list[Tensor], shown: Tensor) -> list[int]:
    """Numbers of samples of a class in all sets that sums and differences of what is said about
    this class can show."""
    found = []
    for kind in (0, 1):
        inside = scores.y == kind
        cells = [inside & (at == g) & shown for at in places for g in range(int(at.max()) + 1)]
        sums = torch.stack([inside, *[cell for cell in cells if cell.any()]]).int()
        signs = torch.tensor(list(product((-1, 0, 1), repeat=len(sums))), dtype=torch.int32)
        totals = signs @ sums
        sets = totals[(totals.amin(1) >= 0) & (totals.amax(1) == 1)]
        found += sets.sum(1).tolist()
    return found


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_no_sums_and_differences_of_subgroups_show_few_samples(seed: int) -> None:
    scores, places = random_silo(seed, n=90)
    assert (
        min(differences(scores, places, told(places, scores, CARE)), default=99) >= CARE.positives
    )


def test_without_cells_a_difference_shows_few_samples() -> None:
    """The attack works where subgroups are left out only for being small themselves."""
    worst = 99
    for seed in range(6):
        scores, places = random_silo(seed, n=90)
        shown = torch.ones(90, dtype=torch.bool)
        for at in places:
            alike = (at[:, None] == at) & (scores.y[:, None] == scores.y)
            shown &= alike.sum(1) >= CARE.positives
        worst = min(worst, *differences(scores, places, shown))
    assert worst < CARE.positives


def test_a_small_subgroup_takes_another_one_with_it() -> None:
    """Women are 3 of 60: the table without them, subtracted from all, would be theirs."""
    sex = torch.tensor([0] * 3 + [1] * 57)
    scores = two_classes(np.linspace(0.1, 0.9, 60), np.arange(60) % 2)
    assert not told([sex], scores, CARE).any()
    ward = torch.tensor([0] * 3 + [1] * 20 + [2] * 37)
    shown = told([ward], scores, CARE)
    assert shown[ward == 2].all()
    assert 3 <= int((~shown).sum()) <= 23


def test_what_is_left_out_does_not_depend_on_what_was_asked() -> None:
    """Two requests by one column each tell no more than one by both."""
    scores, places = random_silo(3, n=200)
    counting = counting_of(scores.task, 2, full=True)
    sizes = [int(at.max()) + 1 for at in places]
    both = count(counting, scores, places, sizes, CARE, [0, 1])
    each = [count(counting, scores, places, sizes, CARE, [c]) for c in (0, 1)]
    assert torch.equal(both, torch.cat(each))


def test_a_subgroup_with_few_of_a_class_tells_of_the_other_class_only() -> None:
    y = np.array([1] * 2 + [0] * 30 + [1] * 30 + [0] * 30)
    group = torch.tensor([0] * 32 + [1] * 60)
    shown = told([group], two_classes(np.linspace(0, 1, 92), y), CARE)
    assert shown[torch.tensor(y) == 0].all()
    assert not shown[torch.tensor(y) == 1].any()


def test_subgroups_with_few_events_tell_no_pairs() -> None:
    y = torch.stack([torch.arange(60.0), (torch.arange(60) < 20).float()], 1)
    scores = Scores(Survival(), 1, y, torch.randn(60, 1), torch.ones(60))
    few = torch.tensor([0] * 17 + [1] * 43)  # 17 and 3 events
    assert not told([few], scores, CARE).any()
    assert told([torch.arange(60) % 2], scores, CARE).all()


def made_table(p: Any, y: Any, group: Any, threshold: float | None = None) -> Any:
    scores = two_classes(p, y)
    counting = counting_of(scores.task, 2, full=True)
    numbers = count(counting, scores, [torch.tensor(group)], [2], EXACT, [0])
    whole = figures(counting.task, counting.told(counting.count(scores)), Wanted())
    return table(counting, {"sex": dict(zip(("f", "m"), numbers, strict=True))}, whole, threshold)


def test_figures_of_subgroups_are_those_of_their_scores() -> None:
    draw = np.random.default_rng(0)
    y, group = draw.integers(0, 2, 1000), draw.integers(0, 2, 1000)
    p = 1 / (1 + np.exp(-draw.normal(0, 1, 1000) - (1 + group) * (y - 0.5)))
    found = made_table(p, y, group, 0.4)
    assert [(row.name, row.samples, row.positives) for row in found.rows] == [
        (name, int((group == g).sum()), int(y[group == g].sum())) for g, name in enumerate("fm")
    ]
    f, m = found.rows
    areas = [sk.roc_auc_score(y[group == g], p[group == g]) for g in (0, 1)]
    assert [f.values["auroc"], m.values["auroc"]] == pytest.approx(areas, abs=1e-3)
    assert f.gaps["auroc"].value == pytest.approx(areas[0] - areas[1], abs=2e-3)
    assert f.gaps["auroc"].value == -m.gaps["auroc"].value
    assert f.gaps["auroc"].low == pytest.approx(-m.gaps["auroc"].high)
    recall = [(p[(group == g) & (y == 1)] >= found.threshold).mean() for g in (0, 1)]
    assert [f.values["sensitivity"], m.values["sensitivity"]] == pytest.approx(recall, abs=5e-3)


def test_the_interval_of_a_gap_of_shares_is_newcombes() -> None:
    """His example: 56 of 70 against 48 of 80 gives 0.2, from 0.0524 to 0.3339 (method 10,
    Statistics in Medicine)."""
    y = np.array([1] * 70 + [0] * 10 + [1] * 80 + [0] * 10)
    p = np.concatenate([[0.9] * 56 + [0.1] * 24, [0.9] * 48 + [0.1] * 42])
    group = np.array([0] * 80 + [1] * 90)
    gap = made_table(p, y, group, 0.5).rows[0].gaps["sensitivity"]
    assert tuple(gap) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)
    assert wilson(56, 70)[0] < 0.8 < wilson(56, 70)[1]


@pytest.mark.slow  # many tables
def test_intervals_of_gaps_cover_the_truth() -> None:
    """AUROC of both groups is the same, so 95 % of the intervals have 0 in them."""
    draw, covered = np.random.default_rng(1), 0
    for _ in range(60):
        y, group = draw.integers(0, 2, 200), np.arange(200) % 2
        p = 1 / (1 + np.exp(-draw.normal(0, 1, 200) - 1.5 * (y - 0.5)))
        gap = made_table(p, y, group, 0.5).rows[0].gaps["auroc"]
        covered += gap.low <= 0 <= gap.high
    assert covered >= 52


def test_columns_of_a_table_divide_samples() -> None:
    x = rows_of([39.0, 40.0, 64.9, 65.0, float("nan")], ["f", "m", "", "x", "f"])
    age, sex = divisions(["age:40:65,sex"])
    assert age.names(TABLE) == ("below 40", "40 to below 65", "65 or more", "missing")
    assert age.places(x, TABLE).tolist() == [0, 1, 1, 2, 3]
    assert sex.names(TABLE) == ("other", "missing", "f", "m")
    assert sex.places(x, TABLE).tolist() == [2, 3, 1, 0, 2]
    assert Division("domain").names(TABLE, ("ge", "philips")) == ("ge", "philips")


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
