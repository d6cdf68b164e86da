"""Every metric at its edges: from samples against scikit-learn or a rewrite, and from counts, as
silos tell them."""

from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from ekiden.clinic.counting import counting_of
from ekiden.clinic.figures import CountedAnswers, Figures, figures
from ekiden.clinic.ranked import Wanted
from ekiden.core.engine.evaluation import of_imbalanced
from ekiden.core.tasks import Classification, MultiLabel, Regression, Scores, Survival, scaled
from ekiden.core.tasks.base import better
from ekiden.core.tasks.measures import ratio

Array = np.ndarray[Any, Any]
EDGES = [k / 15 for k in range(16)]


def ece(p: Array, right: Array) -> float:
    """Σ (n_b/n) |accuracy - confidence| over 15 groups (k/15, (k + 1)/15]."""
    group = np.clip(np.ceil(p * 15).astype(int) - 1, 0, 14)
    inside = [group == k for k in range(15)]
    return float(sum(i.mean() * abs(p[i].mean() - right[i].mean()) for i in inside if i.any()))


def of_two(p: Any, y: Any) -> Scores:
    high = torch.tensor(np.asarray(p), dtype=torch.float64)
    return Scores(
        Classification(),
        2,
        torch.tensor(np.asarray(y)),
        torch.stack([1 - high, high], 1),
        torch.zeros(len(high)),
    )


def exact(s: Scores) -> Figures:
    return figures(s.task, CountedAnswers(s.counts), Wanted())


def told(s: Scores) -> Figures:
    counting = counting_of(s.task, s.outputs, full=True)
    return figures(s.task, counting.told(counting.count(s)), Wanted())


SCORE = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1 - 1e-9, *EDGES]), st.floats(0, 1), st.floats(0.49, 0.51)
)


@given(st.lists(st.tuples(SCORE, st.integers(0, 1)), min_size=2, max_size=60))
def test_two_classes_are_as_scikit_learn_has_them_also_from_counts(
    samples: list[tuple[float, int]],
) -> None:
    p, y = (np.array(part) for part in zip(*samples, strict=True))
    s = of_two(p, y)
    most = np.maximum(p, 1 - p)
    right = (p > 0.5) == (y == 1)
    wanted = {
        "accuracy": right.mean(),
        "brier": ((p - y) ** 2).mean(),
        "calibration_error": ece(most, right),
    }
    if 0 < y.sum() < len(y):
        wanted["auroc"] = sk.roc_auc_score(y, p)
    if y.any():
        wanted["average_precision"] = sk.average_precision_score(y, p)
    found, summed = exact(s), told(s)
    assert found.exact
    assert not summed.exact
    assert not found.errors
    for name, value in wanted.items():
        assert found.values[name] == pytest.approx(value, abs=1e-9), name
        assert s.metrics()[name] == found.values[name]
        assert abs(summed.values[name] - value) <= summed.errors.get(name, 0) + 1e-6, name
    assert ("auroc" in found.values) == ("auroc" in summed.values) == ("auroc" in wanted)
    if "auroc" in wanted:
        for one in found.thresholds:
            called = p >= one.threshold
            assert one.sensitivity == pytest.approx(called[y == 1].mean())
            assert one.specificity == pytest.approx((~called)[y == 0].mean())


@pytest.mark.parametrize("kind", ["tiny", "middle", "float32"])
def test_scores_that_lie_close_together_are_told_apart(kind: str) -> None:
    """Below 1e-7, where bins ended before, and between 0.49 and 0.51, where there were ten of
    them."""
    draw = np.random.default_rng(0)
    y = (draw.random(2000) < 0.1).astype(int)
    z = draw.normal(size=2000) + y
    p = {"tiny": 1e-9 * np.exp(z), "middle": 0.5 + 0.002 * z, "float32": 1 / (1 + np.exp(30 - z))}[
        kind
    ]
    s = of_two(p, y)
    assert exact(s).values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-12)
    found = told(s)
    assert found.values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=2e-3)
    assert found.values["average_precision"] == pytest.approx(
        sk.average_precision_score(y, p), abs=5e-3
    )


def test_a_class_that_is_absent_and_one_that_is_never_answered() -> None:
    p = torch.tensor(
        [[0.6, 0.3, 0.1, 0.0], [0.5, 0.4, 0.1, 0.0], [0.1, 0.8, 0.1, 0.0], [0.2, 0.2, 0.6, 0.0]]
    )
    y = torch.tensor([0, 1, 1, 0])  # nothing is of class 2, which is answered once, nor of class 3
    s = Scores(Classification(), 4, y, p, torch.zeros(4))
    found = exact(s)
    answers = p.argmax(1)
    assert found.values["balanced_accuracy"] == pytest.approx(0.5)
    assert found.values["macro_f1"] == pytest.approx(
        sk.f1_score(y, answers, average="macro", zero_division=0)
    )
    areas = [sk.roc_auc_score(y == k, p[:, k]) for k in (0, 1)]
    assert found.values["auroc"] == pytest.approx(np.mean(areas))
    assert found.values["brier"] == pytest.approx(
        float((p - torch.eye(4)[y]).square().sum(1).mean())
    )
    assert [sorted(row) for row in found.each] == [
        ["accuracy", "auroc", "average_precision", "macro_f1"]
    ] * 2 + [["macro_f1"], []]
    summed = told(s)
    for name, value in found.values.items():
        assert summed.values[name] == pytest.approx(value, abs=1e-6 + summed.errors.get(name, 0)), (
            name
        )


def test_samples_of_one_class_have_no_area() -> None:
    for of in (exact, told):
        found = of(of_two([0.1, 0.9, 1.0], [1, 1, 1]))
        assert not {"auroc", "calibration_slope"} & found.values.keys()
        assert found.values["average_precision"] == 1
        assert found.values["accuracy"] == pytest.approx(2 / 3)
        assert not found.thresholds


def test_a_perfect_classifier_has_intervals_that_are_not_points() -> None:
    y = np.array([0] * 40 + [1] * 12)
    for of in (exact, told):
        found = of(of_two(y.astype(float), y))
        assert (
            found.values["auroc"]
            == found.values["average_precision"]
            == found.values["accuracy"]
            == 1
        )
        for name in (
            "accuracy",
            "balanced_accuracy",
            "macro_f1",
            "auroc",
            "average_precision",
            "brier",
        ):
            low, high = found.intervals[name]
            assert low <= found.values[name] <= high
            assert high - low > 0.05, name
    three = torch.arange(30) % 3
    s = Scores(Classification(), 3, three, torch.eye(3)[three], torch.zeros(30))
    labels = Scores(MultiLabel(), 3, torch.eye(3)[three], torch.eye(3)[three], torch.zeros(30))
    times = Scores(
        Survival(),
        1,
        torch.stack([torch.arange(1.0, 21), torch.ones(20)], 1).double(),
        -torch.arange(20.0)[:, None],
        torch.zeros(20),
    )
    for one in (s, labels, times):
        for of in (exact, told):
            ends = of(one).intervals
            assert ends
            assert all(high - low > 0.05 for low, high in ends.values()), ends


def test_labels_with_confidences_of_one() -> None:
    draw = np.random.default_rng(0)
    logit = np.where(np.arange(3000)[:, None] % 2 == 0, -18.0, -3.2) * np.ones((1, 2))
    p = torch.sigmoid(torch.tensor(logit, dtype=torch.float32))
    y = torch.tensor(draw.random((3000, 2)) < np.where(logit < -10, 0.05, 0.001)).float()
    s = Scores(MultiLabel(), 2, y, p, torch.zeros(3000))
    q, right = (
        torch.maximum(p, 1 - p).double().numpy().ravel(),
        ((p >= 0.5) == (y > 0.5)).double().numpy().ravel(),
    )
    assert exact(s).values["calibration_error"] == pytest.approx(ece(q, right), abs=1e-7)
    assert told(s).values["calibration_error"] == pytest.approx(ece(q, right), abs=1e-6)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.3])
def test_tiny_errors_of_numbers_are_told(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    y = 50 + 20 * torch.randn(300, 1, generator=draw, dtype=torch.float64)
    task = scaled(Regression(), y)
    answers = y + 20 * size * torch.randn(300, 1, generator=draw, dtype=torch.float64)
    s = Scores(task, 1, y, answers, torch.zeros(300))
    wanted = {
        "rmse": sk.root_mean_squared_error(y, answers),
        "mae": sk.mean_absolute_error(y, answers),
    }
    for of in (exact, told):
        found = of(s)
        for name, value in wanted.items():
            assert found.values[name] == pytest.approx(value, rel=1e-4), name
            if of is exact or size > 1e-4:
                assert found.intervals[name][0] < value < found.intervals[name][1]
        assert 1 - found.values["r2"] == pytest.approx(
            1 - sk.r2_score(y, answers), rel=1e-3, abs=1e-12
        )


def test_an_outlier_counts_as_far_as_it_is_away() -> None:
    y = torch.arange(50.0)[:, None].double()
    task = scaled(Regression(), y)
    for far in (1e5, 1e7):
        answers = y.clone()
        answers[7] += far
        s = Scores(task, 1, y, answers, torch.zeros(50))
        for of in (exact, told):
            assert of(s).values["rmse"] == pytest.approx(far / 50**0.5, rel=1e-6)
            assert of(s).values["mae"] == pytest.approx(far / 50, rel=1e-6)
    answers[7] = float("nan")
    for of in (exact, told):
        assert "rmse" not in of(Scores(task, 1, y, answers, torch.zeros(50))).values


def test_pairs_with_ties_by_hand() -> None:
    y = torch.tensor([[5.0, 1], [5, 0], [3, 1], [3, 1], [7, 0]]).double()
    risk = torch.tensor([[0.1], [0.9], [2.0], [1.0], [0.1]])
    s = Scores(Survival(), 1, y, risk, torch.zeros(5))
    # (0,1): out of order; (0,4): tied risk; (2,*) and (3,*) with 0, 1, 4: in order; (2,3) ended
    # together
    assert exact(s).values["c_index"] == told(s).values["c_index"] == pytest.approx(6.5 / 8)
    alone = s.at(torch.tensor([1, 4]))
    assert "c_index" not in exact(alone).values
    assert isnan(alone.score())


def test_a_score_that_is_not_defined_loses_to_every_other() -> None:
    nan = float("nan")
    assert better(0.1, nan)
    assert better(nan, nan)  # the last of several epochs
    assert not better(nan, 0.1)
    assert not better(0.1, 0.1)
    assert better(0.2, 0.1)


def test_accuracy_of_rare_events_is_not_success() -> None:
    row = {
        "majority": 0.965,
        "metrics": {"accuracy": 0.965, "auroc": 0.5, "average_precision": 0.035},
        "confusion": [[965, 0], [35, 0]],
    }
    line = of_imbalanced(row, Classification(), ("no", "yes"))
    wanted = "auroc 50.00 %, average_precision 3.50 %, sensitivity 0.00 %, never answers 'yes'"
    assert line == wanted
    assert not of_imbalanced(row | {"majority": 0.7}, Classification(), ("no", "yes"))


def test_net_benefit_is_that_of_the_samples() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 300)
    p = 1 / (1 + np.exp(-(draw.normal(size=300) + y - 0.5)))
    found = exact(of_two(p, y)).decisions
    assert [one.threshold for one in found][:3] == [0.01, 0.02, 0.05]
    for one, binned in zip(found, told(of_two(p, y)).decisions, strict=True):
        act, odds = p >= one.threshold, one.threshold / (1 - one.threshold)
        assert one.model == pytest.approx((act & (y == 1)).mean() - odds * (act & (y == 0)).mean())
        assert one.all == pytest.approx(y.mean() - odds * (1 - y).mean())
        assert binned.model == pytest.approx(one.model, abs=0.01 * (1 + odds))


def test_a_ratio_of_two_numbers_is_not_defined_where_it_has_no_denominator() -> None:
    assert np.isnan(ratio(0.0, 0.0))
    assert ratio(1.0, 2.0) == 0.5
