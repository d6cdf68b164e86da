"""Predicted survival at a time, compared with what was observed: against scikit-survival and
lifelines, from sums."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ekiden import UserError
from ekiden.clinic.counting import (
    SHARES,
    actuarial_sums,
    counting_of,
    predicted_at,
    status_at,
)
from ekiden.clinic.figures import AtTime, at_time
from ekiden.clinic.noisy import Noisy
from ekiden.clinic.ranked import Wanted
from ekiden.core.tasks import Scores, Survival
from ekiden.core.training.private import Draw, Noise, noise_for
from tests.methods.survival_reference import HAZARD, TIMES, without_ties

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "methods" / "survival.json").read_text()
)
TASK = Survival(times=TIMES, hazard=HAZARD)
COUNTING = counting_of(TASK, 1, full=True)


def answered(days: Any, died: Any, risk: Any) -> Scores:
    y = torch.tensor(np.stack([days, died], 1))
    return Scores(TASK, 1, y, torch.tensor(np.asarray(risk))[:, None], torch.zeros(len(y)))


def told(s: Scores) -> tuple[AtTime, ...]:
    return COUNTING.told(COUNTING.count(s)).survival


def test_they_are_those_of_scikit_survival_and_lifelines() -> None:
    found = told(answered(*without_ties()))
    assert [one.time for one in found] == list(TIMES)
    assert [one.brier for one in found] == pytest.approx(REFERENCE["brier"], abs=1e-6)
    assert [one.whole.observed for one in found] == pytest.approx(REFERENCE["observed"], abs=1e-6)
    risk = without_ties()[2]
    for one, hazard in zip(found, HAZARD, strict=True):
        predicted = np.exp(-hazard * np.exp(risk))
        assert one.whole.predicted == pytest.approx(predicted.mean(), abs=1e-6)
        inside = np.floor(predicted * SHARES)
        for row in one.groups:
            same = inside == min(row.predicted * SHARES // 1, SHARES - 1)
            assert row.samples == same.sum()
            assert row.predicted == pytest.approx(predicted[same].mean(), abs=1e-6)
        assert (
            sum(row.samples for row in one.groups) >= 195
        )  # without those whose samples were all last seen earlier


def test_counts_of_silos_add_up_with_weights_of_their_own() -> None:
    """What is observed is the mean of the silos' Kaplan-Meier estimates, also with ties."""
    s = answered(np.ceil(without_ties()[0]), *without_ties()[1:])
    parts = [s.at(torch.arange(90)), s.at(torch.arange(90, 200))]
    total = sum(
        (COUNTING.count(part) for part in parts), torch.zeros(COUNTING.size, dtype=torch.int64)
    )
    each = [told(part) for part in parts]
    for k, one in enumerate(COUNTING.told(total).survival):
        shares = [(len(part), at[k].whole.observed) for part, at in zip(parts, each, strict=True)]
        assert one.whole.observed == pytest.approx(
            sum(n * share for n, share in shares) / 200, abs=1e-6
        )
        curve = [REFERENCE["curves"][name] for name in "ab"]
        for (_, share), km in zip(shares, curve, strict=True):
            wanted = [v for v, t in zip(km["survival"], km["times"], strict=True) if t <= one.time][
                -1
            ]
            assert share == pytest.approx(wanted, abs=1e-6)


def test_with_noise_they_come_near_and_are_told_of_all_together() -> None:
    """Of 2,000 samples; each silo's noise hides one of them."""
    days, died, risk = (np.tile(each, 10) for each in without_ties())
    s = answered(days, died, risk)
    telling = Noisy(COUNTING, noise_for(2.0, 1e-5, 1.0, 1))
    halves = [s.at(torch.arange(1000)), s.at(torch.arange(1000, 2000))]
    reports = [telling.release(s, Draw(Noise(bytes([k] * 32)))) for k, s in enumerate(halves)]
    found = telling.figures(reports[0] + reports[1], Wanted()).survival
    for one, true in zip(found, told(s), strict=True):
        assert one.whole.observed == pytest.approx(true.whole.observed, abs=0.08)
        assert one.whole.predicted == pytest.approx(true.whole.predicted, abs=0.05)
        assert one.brier == pytest.approx(true.brier, abs=0.05)
        assert one != true


def test_a_life_table_is_near_to_the_estimate_by_kaplan_and_meier() -> None:
    s, counts = answered(*without_ties()), []
    for time, hazard in zip(TIMES, HAZARD, strict=True):
        without, had = status_at(s, time)
        place, group = torch.where(without, 0, torch.where(had, 1, 2)), predicted_at(s, hazard)[1]
        counts.append(torch.bincount(place * SHARES + group, minlength=3 * SHARES))
    table = torch.stack(counts).view(-1, 3, SHARES).double().numpy()
    for time, true, sums, errors in zip(TIMES, told(s), *actuarial_sums(table), strict=True):
        assert float(sums[2:4].sum()) == pytest.approx(200), "the weights are those of all samples"
        one = at_time(time, sums.numpy(), errors.numpy())
        assert one.whole.observed == pytest.approx(true.whole.observed, abs=0.03)
        assert one.brier == pytest.approx(true.brier, abs=0.02)
    few = np.array([[[1.0] + [0.0] * 9, [0.0] * 10, [9.0] * 10]])
    assert not actuarial_sums(few)[0].any()


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    draw, hits = np.random.default_rng(0), np.zeros(2)
    for _ in range(200):
        due, last = draw.exponential(300, 150), draw.uniform(50, 900, 150)
        one = told(answered(np.minimum(due, last), (due <= last).astype(float), np.zeros(150)))[2]
        truth = np.exp(-1)
        brier = truth * (1 - one.whole.predicted) ** 2 + (1 - truth) * one.whole.predicted**2
        for k, (value, ends) in enumerate(((truth, one.whole.interval), (brier, one.interval))):
            hits[k] += ends[0] <= value <= ends[1]
    assert (hits >= 0.92 * 200).all(), hits


def test_a_perfect_prediction_has_an_interval_that_is_not_a_point() -> None:
    days = np.full(200, 800.0)
    one = told(answered(days, 0 * days, days * 0 - 50))[0]
    assert one.brier == pytest.approx(0, abs=1e-12)
    assert one.interval[0] == pytest.approx(0, abs=1e-12)
    assert one.interval[1] == pytest.approx(1.96**2 / (200 + 1.96**2), rel=1e-3)


def test_nothing_is_told_where_few_would_be_followed() -> None:
    days, died, risk = without_ties()
    early = died.astype(bool) | (np.arange(200) % 50 > 0)
    assert [
        one.time
        for one in told(answered(np.where(early, days.clip(max=150), days), 0 * died, risk))
    ] == [100]


def test_each_time_has_a_hazard() -> None:
    with pytest.raises(UserError, match="2 times and 1 hazards: give one hazard for each time"):
        Survival(times=(1.0, 2.0), hazard=(0.1,))
