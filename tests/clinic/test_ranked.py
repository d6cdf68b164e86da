"""Intervals of ranks, calibration, thresholds and net benefit of two classes."""

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from sklearn.linear_model import LogisticRegression

from ekiden.clinic import ranked
from ekiden.clinic.figures import Figures
from ekiden.clinic.ranked import Wanted, recalibrated, wilson
from ekiden.core.base.checks import made
from ekiden.core.tasks.ranked import Ranked
from tests.clinic.counted import Array, bins, counted, of, skewed, two_classes
from tests.core.tasks.scored import exact, of_two, told


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


def test_the_curve_of_the_calibration_is_that_of_scikit_learn() -> None:
    """Its tenths have as many samples, up to samples of one bin."""
    p, y = skewed(10_000, 2, 0.2)
    shares, scores = calibration_curve(y, p, n_bins=10, strategy="quantile")
    rows = np.array(of(*counted(two_classes(p, y)), Wanted()).calibration)
    assert rows[:, 0] == pytest.approx(1000, abs=40)
    assert rows[:, 1] == pytest.approx(scores, abs=1e-3)
    assert rows[:, 2] == pytest.approx(shares, abs=0.01)


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


def test_slope_and_intercept_are_those_of_a_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(-1, 2, 3000)
    y = rng.random(3000) < 1 / (1 + np.exp(-(0.6 * z + 0.8)))
    edges = np.linspace(-16, 16, 4097)
    low, high = (np.histogram(z[of], edges)[0].astype(float) for of in (~y, y))
    ends = 1 / (1 + np.exp(-edges))
    ranked = Ranked(low, high, 1 / (1 + np.exp(-(edges[1:] + edges[:-1]) / 2)), ends)
    for shift in (True, False):
        line = LogisticRegression(C=1e9, fit_intercept=shift, tol=1e-10).fit(z[:, None], y)
        wanted = (line.coef_[0, 0], line.intercept_[0] if shift else 0.0)
        assert recalibrated(ranked, shift=shift) == pytest.approx(wanted, abs=2e-3)
    apart = Ranked(low * (edges[1:] < 0), high * (edges[:-1] > 0), ranked.scores, ends)
    assert recalibrated(apart, shift=True) is None, "without an error the slope has no bound"
    assert recalibrated(Ranked(high, low, ranked.scores, ends), shift=False) is None, (
        "the other way round"
    )
