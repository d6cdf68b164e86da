"""Figures from counts: against scikit-learn and scipy on the scores themselves."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn import metrics as sk

from ekiden.clinic import ranked
from ekiden.clinic.ranked import Wanted
from ekiden.core.tasks import (
    KINDS,
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
    Survival,
    scaled,
)
from ekiden.core.tasks.base import IGNORED
from tests.clinic.counted import Array, bins, counted, of, skewed, two_classes
from tests.core.tasks.scored import exact, of_two, told

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


def test_the_majority_is_that_of_the_training_samples() -> None:
    s = two_classes(*skewed(100, 4))
    found = of(*counted(s, train=torch.tensor([0, 0, 1])))
    assert found.majority == pytest.approx(float((s.y == 0).double().mean()))
    other = of(*counted(s, train=torch.tensor([0, 1, 1])))
    assert other.majority == pytest.approx(float((s.y == 1).double().mean()))


def test_a_perfect_classifier_has_intervals_that_are_not_points() -> None:
    y = np.array([0] * 40 + [1] * 12)
    for count in (exact, told):
        found = count(of_two(y.astype(float), y))
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
        for count in (exact, told):
            ends = count(one).intervals
            assert ends
            assert all(high - low > 0.05 for low, high in ends.values()), ends


def test_the_page_names_each_metric_and_whether_it_has_an_interval() -> None:
    page = (Path(__file__).parents[2] / "docs/evaluation-figures.md").read_text(encoding="utf-8")
    for task in KINDS.values():
        for metric in task.metrics:
            assert f"`{metric.name}`" in page
    found = exact(of_two([0.1, 0.6, 0.4, 0.9] * 5, [0, 0, 1, 1] * 5))
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for names, *_, interval in rows:
        for name in re.findall(r"`(\w+)`", names):
            if name in found.values:
                assert (name in found.intervals) == ("none" not in interval), name
