"""Figures from counts: against scikit-learn and scipy on the scores themselves; sums over silos;
what is left out."""

from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from torch import Tensor

from ekiden import UserError
from ekiden.clinic import ranked
from ekiden.clinic.counting import (
    EXACT,
    Care,
    Counting,
    counting_of,
    real,
)
from ekiden.clinic.figures import Figures, figures
from ekiden.clinic.ranked import Wanted, wilson
from ekiden.core.base.checks import made
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
    scaled,
)
from ekiden.core.tasks.base import IGNORED, Task
from ekiden.core.tasks.counts import ClassCounts
from ekiden.core.tasks.ranked import Ranked

Array = np.ndarray[Any, Any]


def two_classes(p: Array, y: Array) -> Scores:
    """A classifier of two classes that gives these probabilities of the second one."""
    high, there = torch.tensor(p, dtype=torch.float64), torch.tensor(y).long()
    answers = torch.stack([1 - high, high], 1)
    loss = -torch.log(answers[torch.arange(len(y)), there].clamp(min=1e-9))
    return Scores(Classification(), 2, there, answers, loss)


def counted(s: Scores, care: Care = EXACT, train: Tensor | None = None) -> tuple[Counting, Tensor]:
    counting = counting_of(s.task, s.outputs, full=True)
    return counting, counting.count(s, care, train)


def of(counting: Counting, numbers: Tensor, wanted: Wanted | None = None) -> Figures:
    return figures(counting.task, counting.told(numbers), wanted)


def told(s: Scores, care: Care = EXACT) -> Figures:
    return of(*counted(s, care), Wanted())


def skewed(n: int, seed: int, prevalence: float = 0.03) -> tuple[Array, Array]:
    """Scores of a model for a rare class, all below 0.1."""
    draw = np.random.default_rng(seed)
    y = (draw.random(n) < prevalence).astype(int)
    y[:3] = 1
    return 0.1 / (1 + np.exp(-draw.normal(-1.5, 1.2, n) - 0.9 * y)), y


def bins(counting: Counting, numbers: Tensor) -> Ranked:
    """The bins of the second of two classes."""
    counts = counting.told(numbers).counts
    assert isinstance(counts, ClassCounts)
    return counts.ranked[1]


PROBABILITIES = st.one_of(
    st.floats(0, 1),
    st.floats(0, 0.1),
    st.sampled_from([0.0, 1e-12, 0.25, 0.5, np.nextafter(0.5, 0), 0.75, 1.0]),
)
SAMPLES = st.lists(st.tuples(PROBABILITIES, st.booleans()), min_size=2, max_size=80)


@given(SAMPLES)
def test_values_of_any_scores_are_as_far_from_scikit_learn_as_is_said(
    samples: list[tuple[float, bool]],
) -> None:
    """Also with ties, with scores at the ends, and with all scores in one bin: the error is a
    bound."""
    p, y = np.array([s for s, _ in samples]), np.array([int(label) for _, label in samples])
    assume(0 < y.sum() < len(y))
    counting, numbers = counted(two_classes(p, y))
    found, near = of(counting, numbers), 1e-9
    assert abs(found.values["auroc"] - sk.roc_auc_score(y, p)) <= found.errors["auroc"] + near
    precision = sk.average_precision_score(y, p)
    assert (
        abs(found.values["average_precision"] - precision)
        <= found.errors["average_precision"] + near
    )
    assert found.values["brier"] == pytest.approx(sk.brier_score_loss(y, p), abs=1e-6)
    answer = np.where(p > 0.5, 1, 0)  # of equal probabilities, the first class
    assert found.values["accuracy"] == pytest.approx(sk.accuracy_score(y, answer))
    assert found.values["macro_f1"] == pytest.approx(
        sk.f1_score(y, answer, average="macro", zero_division=0)
    )
    assert found.confusion == tuple(
        map(tuple, sk.confusion_matrix(y, answer, labels=[0, 1]).tolist())
    )
    for one in ranked.thresholds(bins(counting, numbers), Wanted()):
        called = p >= one.threshold - 1e-12
        at = np.abs(p - one.threshold) < 1e-12  # sklearn's tie with a boundary
        if not at.any():
            assert one.sensitivity == pytest.approx(called[y == 1].mean())
            assert one.specificity == pytest.approx((~called)[y == 0].mean())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("n", [1000, 10_000])
def test_scores_of_a_rare_class_are_told_to_a_thousandth(n: int, seed: int) -> None:
    """3 % of the samples, all scores below 0.1. The precision needs more samples than the area; see
    the page."""
    p, y = skewed(n, seed)
    found, exact = told(two_classes(p, y)), two_classes(p, y).metrics()
    assert found.values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-3)
    assert found.errors["auroc"] < 4e-3
    wide = 5e-3 if n == 1000 else 1e-3
    assert found.values["average_precision"] == pytest.approx(
        sk.average_precision_score(y, p), abs=wide
    )
    assert found.values["brier"] == pytest.approx(sk.brier_score_loss(y, p), abs=1e-6)
    assert found.values["calibration_error"] == pytest.approx(exact["calibration_error"], abs=1e-6)


@pytest.mark.parametrize("spread", [0.5, 2.0, 4.0])
def test_scores_of_two_even_classes_are_told_to_a_thousandth(spread: float) -> None:
    draw = np.random.default_rng(1)
    y = draw.integers(0, 2, 2000)
    p = 1 / (1 + np.exp(-spread * (draw.normal(size=2000) + y - 0.5)))
    found = told(two_classes(p, y))
    assert found.values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-3)
    assert found.values["average_precision"] == pytest.approx(
        sk.average_precision_score(y, p), abs=1e-3
    )


def test_the_curve_of_the_calibration_is_that_of_scikit_learn() -> None:
    """Its tenths have as many samples, up to samples of one bin."""
    p, y = skewed(10_000, 2, 0.2)
    shares, scores = calibration_curve(y, p, n_bins=10, strategy="quantile")
    rows = np.array(of(*counted(two_classes(p, y)), Wanted()).calibration)
    assert rows[:, 0] == pytest.approx(1000, abs=40)
    assert rows[:, 1] == pytest.approx(scores, abs=1e-3)
    assert rows[:, 2] == pytest.approx(shares, abs=0.01)


def test_counts_of_silos_add_up_to_those_of_all() -> None:
    p, y = skewed(600, 7)
    s = two_classes(p, y)
    counting, total = counted(s, train=s.y)
    parts = [
        counting.count(s.at(rows), train=s.y[rows]) for rows in torch.split(torch.arange(600), 170)
    ]
    together = counting.split(sum(parts, torch.zeros_like(total)))
    whole = counting.split(total)
    assert int(together.pop("reports")) == 4
    assert int(whole.pop("reports")) == 1
    for name, numbers in whole.items():
        if name in ("loss", "brier", "confidence"):  # each silo rounds its sum
            assert real(together[name].numpy()) == pytest.approx(real(numbers.numpy()), abs=4e-6)
        else:
            assert torch.equal(together[name], numbers), name


def test_several_classes() -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(5, (3000,), generator=draw)
    logits = torch.randn(3000, 5, generator=draw) + 1.5 * torch.eye(5)[y]
    task = Classification()
    s = Scores(task, 5, y, task.answers(logits, full=True), task.loss(logits, y))
    found, exact = told(s), s.metrics()
    assert found.values["loss"] == pytest.approx(s.mean_loss(), abs=1e-5)
    for name, near in (
        ("auroc", 1e-3),
        ("average_precision", 1e-3),
        ("brier", 1e-6),
        ("calibration_error", 1e-6),
    ):
        assert found.values[name] == pytest.approx(exact[name], abs=near), name
    for name in ("accuracy", "balanced_accuracy", "macro_f1"):
        assert found.values[name] == pytest.approx(exact[name])
        low, high = found.intervals[name]
        assert low < found.values[name] < high
    assert found.prevalence == pytest.approx(np.bincount(y, minlength=5) / 3000)
    assert exact["brier"] == pytest.approx(
        np.mean(((s.answers - torch.eye(5)[y]) ** 2).sum(1).numpy()), abs=1e-6
    )


def test_many_classes_have_no_scores() -> None:
    y = torch.arange(200) % 150
    answers = torch.eye(150)[(y + (torch.arange(200) < 20)) % 150]
    found = told(Scores(Classification(), 150, y, answers, torch.zeros(200)))
    assert found.values["accuracy"] == 0.9
    assert found.values["macro_f1"] == pytest.approx(
        sk.f1_score(y, answers.argmax(1), average="macro")
    )
    assert not {"auroc", "brier"} & found.values.keys()
    assert found.confusion == ()


def test_labels() -> None:
    draw = torch.Generator().manual_seed(0)
    y = (torch.rand(2000, 3, generator=draw) < torch.tensor([0.05, 0.4, 0.5])).float()
    logits = torch.randn(2000, 3, generator=draw) + 2 * y - 2
    task = MultiLabel()
    s = Scores(task, 3, y, task.answers(logits, full=True), task.loss(logits, y))
    found, exact = told(s), s.metrics()
    assert found.values["brier"] == pytest.approx(np.mean((s.answers - y).numpy() ** 2), abs=1e-6)
    for name, value in exact.items():
        assert found.values[name] == pytest.approx(value, abs=1e-3), name
    assert found.each[0]["auroc"] == pytest.approx(
        sk.roc_auc_score(y[:, 0], s.answers[:, 0]), abs=1e-3
    )


def test_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    y = 50 + 20 * torch.randn(400, 2, generator=draw) ** 3
    task = scaled(Regression(), y)
    outputs = task.standardised(y) + 0.3 * torch.randn(400, 2, generator=draw)  # type: ignore[attr-defined]
    s = Scores(task, 2, y.double(), task.answers(outputs, full=True), task.loss(outputs, y))
    found = told(s)
    for name, value in s.metrics().items():
        assert found.values[name] == pytest.approx(value, rel=1e-4), name
    assert found.values["r2"] == pytest.approx(sk.r2_score(y, s.answers), abs=1e-5)
    assert found.values["mse"] == pytest.approx(sk.mean_squared_error(y, s.answers), rel=1e-5)


def test_places() -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (30, 4, 4), generator=draw)
    y[torch.rand(30, 4, 4, generator=draw) < 0.1] = IGNORED
    answer = torch.where(torch.rand(30, 4, 4, generator=draw) < 0.7, y.clamp(min=0), 2)
    logits = 3.0 * torch.eye(3)[answer].movedim(-1, 1)
    pixels, tokens = Segmentation(), LanguageModelling()
    s = Scores(pixels, 3, y, pixels.answers(logits, full=True), pixels.loss(logits, y))
    found = told(s)
    assert found.values == pytest.approx(s.metrics() | {"loss": s.mean_loss()}, abs=1e-6)
    assert [list(row) for row in found.confusion] == s.confusion()
    there, answers = y[y != IGNORED], logits.argmax(1)[y != IGNORED]
    assert found.values["miou"] == pytest.approx(sk.jaccard_score(there, answers, average="macro"))
    assert found.values["dice"] == pytest.approx(sk.f1_score(there, answers, average="macro"))
    texts, outputs = (
        torch.randint(5, (40, 7), generator=draw),
        torch.randn(40, 7, 5, generator=draw),
    )
    t = Scores(tokens, 5, texts, tokens.answers(outputs, full=True), tokens.loss(outputs, texts))
    assert told(t).values == pytest.approx(t.metrics() | {"loss": t.mean_loss()}, rel=1e-5)


def answered(kind: str, n: int = 150) -> tuple[Scores, set[str]]:
    """Answers to samples, and the figures that are of one number and not means of several."""
    draw = torch.Generator().manual_seed(1)
    match kind:
        case "numbers":
            y = torch.randn(n, 1, generator=draw)
            task = scaled(Regression(), 7 + 3 * y)
            x = 0.8 * y + 0.4 * y.abs() * torch.randn(n, 1, generator=draw)
            return Scores(task, 1, (7 + 3 * y).double(), (7 + 3 * x).double(), torch.zeros(n)), {
                "rmse",
                "mae",
                "r2",
            }
        case "labels":
            there = (torch.rand(n, 3, generator=draw) < torch.tensor([0.2, 0.4, 0.5])).float()
            p = (torch.randn(n, 3, generator=draw) + 2 * there - 1).sigmoid()
            return Scores(MultiLabel(), 3, there, p, torch.zeros(n)), set()
        case "classes":
            y = torch.randint(3, (n,), generator=draw)
            p = (torch.randn(n, 3, generator=draw) + 2 * torch.eye(3)[y]).softmax(1)
            return Scores(Classification(), 3, y, p, torch.zeros(n)), set()
        case _:
            y = torch.randint(3, (n, 6, 6), generator=draw)
            right = torch.rand(n, 6, 6, generator=draw) < torch.rand(n, 1, 1, generator=draw)
            return Scores(Segmentation(), 3, y, torch.where(right, y, 2), torch.zeros(n)), {
                "accuracy"
            }


@pytest.mark.parametrize("kind", ["numbers", "labels", "classes", "pixels"])
def test_intervals_are_those_of_leaving_one_sample_out_or_wider(kind: str) -> None:
    s, single = answered(kind, 60)
    counting, whole = counted(s)
    found = of(counting, whole, Wanted())
    n = len(s)
    rest = [of(counting, whole - counting.count(s.at(torch.tensor([i])))).values for i in range(n)]
    others = {"auroc", "brier", "macro_f1", "dice", "miou", "mse", "balanced_accuracy", "accuracy"}
    assert single <= found.intervals.keys() <= single | others
    assert len(found.intervals) >= 3
    for name, (low, high) in found.intervals.items():
        each = np.array([values[name] for values in rest])
        error = ((n - 1) / n * ((each - each.mean()) ** 2).sum()) ** 0.5
        assert low < found.values[name] < high
        ratio = (high - low) / (2 * 1.96 * error)
        assert (0.93 if name in single else 0.97) < ratio < (1.08 if name in single else 3), (
            name,
            ratio,
        )


def test_a_bootstrap_of_the_calibration_error_does_not_hold_its_true_value() -> None:
    """So there is none: chance makes the error larger, and drawing again adds chance a second
    time."""
    draw, n = np.random.default_rng(0), 200

    def error(right: Array, p: Array) -> float:
        group = np.clip(np.ceil(p * 15).astype(int), 1, 15) - 1
        return float(np.abs(np.bincount(group, right - p, 15)).sum() / len(p))

    held = 0
    for _ in range(20):
        p = 0.5 + draw.random(n) / 2
        right = (draw.random(n) < p).astype(float)
        again = [error(right[rows], p[rows]) for rows in draw.integers(0, n, (100, n))]
        held += float(np.percentile(again, 2.5)) <= 0  # the true error is 0
    assert held == 0


def test_slope_and_calibration_in_the_large_have_intervals_that_hold() -> None:
    """Of 40 samples of 300, whose logits should be 0.6·z + 0.8. With the slope 1, as many are
    expected as there are."""
    draw, inside = (
        np.random.default_rng(0),
        dict.fromkeys(("calibration_slope", "calibration_in_the_large"), 0),
    )
    for _ in range(40):
        z = draw.normal(-1, 1.5, 300)
        y = (draw.random(300) < 1 / (1 + np.exp(-(0.6 * z + 0.8)))).astype(int)
        found = ranked.calibration(bins(*counted(two_classes(1 / (1 + np.exp(-z)), y))))
        for name, truth in (("calibration_slope", 0.6), ("calibration_in_the_large", 1.2416)):
            inside[name] += found[name][1][0] <= truth <= found[name][1][1]
    assert all(35 <= hits <= 40 for hits in inside.values()), inside
    value = found["calibration_in_the_large"][0]
    assert (1 / (1 + np.exp(-z - value))).sum() == pytest.approx(y.sum(), abs=0.05)


def test_intervals_of_shares_are_wilsons() -> None:
    for hits, n in ((0, 5), (3, 10), (97, 100), (10, 10)):
        expected = binomtest(hits, n).proportion_ci(method="wilson")
        assert wilson(hits, n) == pytest.approx((expected.low, expected.high), abs=1e-9)


def delong(p: Array, y: Array) -> float:
    """The variance of the area, from pairs of samples."""
    high, low = p[y == 1], p[y == 0]
    pairs = (high[:, None] > low[None]) + 0.5 * (high[:, None] == low[None])
    return float(pairs.mean(1).var(ddof=1) / len(high) + pairs.mean(0).var(ddof=1) / len(low))


def test_the_interval_of_the_area_is_delongs() -> None:
    p, y = skewed(800, 3, 0.2)
    found = told(two_classes(p, y))
    area, low, high = found.values["auroc"], *found.intervals["auroc"]
    spread = (np.log(high / (1 - high)) - np.log(low / (1 - low))) / (2 * 1.959964)
    assert (spread * area * (1 - area)) ** 2 == pytest.approx(delong(p, y), rel=0.01)


@pytest.mark.slow
def test_intervals_hold_the_true_value_about_as_often_as_they_say() -> None:
    """Of 60 samples of 150 from one population."""
    p, y = skewed(40_000, 11, 0.3)
    truth = {"auroc": sk.roc_auc_score(y, p), "brier": sk.brier_score_loss(y, p)}
    draw, inside = np.random.default_rng(0), dict.fromkeys(truth, 0)
    for _ in range(60):
        rows = draw.integers(0, len(y), 150)
        found = told(two_classes(p[rows], y[rows]))
        for name, value in truth.items():
            low, high = found.intervals[name]
            inside[name] += low <= value <= high
    assert all(52 <= hits <= 60 for hits in inside.values()), inside


def test_perfect_ranks_have_an_interval_that_is_not_a_point() -> None:
    one = Ranked(
        np.array([9.0, 0, 0]),
        np.array([0.0, 0, 12]),
        np.array([0.1, 0.5, 0.9]),
        np.array([0, 0.3, 0.6, 1]),
    )
    low, high = ranked.delong(one)
    assert (low, high) == pytest.approx(wilson(9, 9))


def test_a_threshold_that_was_chosen_and_one_of_a_sensitivity() -> None:
    p, y = skewed(5000, 5)
    s = two_classes(p, y)
    found = of(*counted(s), Wanted(threshold=0.04, sensitivity=0.8))
    by_rule = {one.rule: one for one in found.thresholds}
    assert list(by_rule) == ["0.5", "Youden", "sensitivity 0.8", "chosen"]
    chosen = by_rule["chosen"]
    assert chosen.threshold == pytest.approx(0.04, abs=2e-4)
    assert chosen.sensitivity == pytest.approx((p[y == 1] >= 0.04).mean(), abs=0.01)
    enough = by_rule["sensitivity 0.8"]
    assert 0.8 <= enough.sensitivity < 0.82
    wrong, hits, _ = sk.roc_curve(y, p)
    best = by_rule["Youden"]
    assert best.sensitivity + best.specificity - 1 == pytest.approx((hits - wrong).max(), abs=3e-3)
    assert sum(n for n, _, _ in found.calibration) == 5000
    assert sum(n * rate for n, _, rate in found.calibration) == pytest.approx(y.sum())
    read = made(Figures, found.to_json())
    assert (read.thresholds[0].rule, read.calibration, read.confusion) == (
        "0.5",
        found.calibration,
        found.confusion,
    )
    assert read.to_json() == found.to_json()


def test_too_few_samples_and_too_few_of_a_class_are_left_out() -> None:
    p, y = skewed(40, 2, 0.0)  # three of the second class
    s = two_classes(p, y)
    counting, numbers = counted(s, Care(samples=41))
    assert not numbers.any()
    few = of(counting, counting.count(s, Care(positives=4)))
    assert few.samples == 40
    assert few.values["accuracy"] == pytest.approx(37 / 40)  # the right answers of all are told
    assert few.confusion == ((37, 0), (0, 0))
    assert "auroc" not in few.values
    labels = MultiLabel()
    both = torch.stack([s.y.float(), (torch.arange(40) < 20).float()], 1)
    t = Scores(labels, 2, both, torch.rand(40, 2), torch.zeros(40))
    tables = counting_of(labels, 2, full=True).count(t, Care(positives=4))
    split = counting_of(labels, 2, full=True).split(tables)
    assert not split["tables"][0].any()
    assert int(split["tables"][1].sum()) == 40
    assert not split["scores"][0].any()


def test_losses_that_are_not_numbers_are_told() -> None:
    s = two_classes(*skewed(30, 1))
    s.loss[3] = float("nan")
    found = told(s)
    assert "loss" not in found.values
    assert isnan(float("nan"))
    counting, numbers = counted(s)
    assert int(counting.split(numbers)["far"]) == 1
    s.answers[3] = float("nan")
    assert "auroc" in told(s).values


def test_numbers_of_another_length_are_refused() -> None:
    counting = counting_of(Classification(), 3, full=False)
    for bad in (torch.zeros(counting.size + 1, dtype=torch.int64), torch.zeros(counting.size)):
        with pytest.raises(UserError, match="do not fit classification"):
            counting.split(bad)


def test_the_majority_is_that_of_the_training_samples() -> None:
    s = two_classes(*skewed(100, 4))
    found = of(*counted(s, train=torch.tensor([0, 0, 1])))
    assert found.majority == pytest.approx(float((s.y == 0).double().mean()))
    other = of(*counted(s, train=torch.tensor([0, 1, 1])))
    assert other.majority == pytest.approx(float((s.y == 1).double().mean()))


TASKS: list[Task] = [
    Classification(),
    MultiLabel(),
    Regression(),
    Segmentation(),
    LanguageModelling(vocabulary=7),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_fixed_point_and_whole_numbers_only(task: Task) -> None:
    counting = counting_of(task, 4, full=True)
    assert sum(part.size for part in counting.layout) == counting.size
    assert of(counting, torch.zeros(counting.size, dtype=torch.int64)).values == {}


def test_the_interval_of_few_positives_is_no_narrower_than_that_of_as_few_draws() -> None:
    """One positive above 98 of 100 negatives says little, though its distance to them varies
    little."""
    low, high = np.zeros(4), np.array([0.0, 0.0, 1.0, 0.0])
    low[:] = (60, 38, 0, 2)
    area = ranked.delong(
        Ranked(low, high, np.array([0.1, 0.4, 0.6, 0.9]), np.array([0.0, 0.25, 0.5, 0.75, 1.0]))
    )
    assert area[0] < 0.3
    assert area[1] > 0.98
