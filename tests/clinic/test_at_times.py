"""Predicted survival at a time, compared with what was observed: against scikit-survival and
lifelines, from sums."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ekiden import UserError
from ekiden.clinic.counting import EXACT, SHARES, Care, counting_of, real
from ekiden.clinic.figures import AtTime
from ekiden.core.tasks import Scores, Survival
from tests.methods.survival_reference import HAZARD, TIMES, without_ties

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "methods" / "survival.json").read_text()
)
TASK = Survival(times=TIMES, hazard=HAZARD)
COUNTING = counting_of(TASK, 1, full=True)


def answered(days: Any, died: Any, risk: Any) -> Scores:
    y = torch.tensor(np.stack([days, died], 1))
    return Scores(TASK, 1, y, torch.tensor(np.asarray(risk))[:, None], torch.zeros(len(y)))


def told(s: Scores, care: Care = EXACT) -> tuple[AtTime, ...]:
    return COUNTING.told(COUNTING.count(s, care)).survival


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


def test_a_model_that_may_be_made_up_gets_rounded_sums_of_enough_samples() -> None:
    """Whatever it answers to one sample: that moves a number of samples by one, and a sum by a few
    steps."""
    days, died, risk = without_ties()
    near, exact = (
        told(answered(days, died, risk), Care(10, 5, coarse=True)),
        told(answered(days, died, risk)),
    )
    for one, true in zip(near, exact, strict=True):
        assert all(row.samples >= 10 for row in one.groups)
        assert one.whole.observed == pytest.approx(true.whole.observed, abs=0.01)
        assert one.brier == pytest.approx(true.brier, abs=0.01)
    said = set()
    for answer in np.linspace(-0.01, 0.01, 12):
        risk[0] = answer
        said.add(
            tuple(COUNTING.count(answered(days, died, risk), Care(10, 5, coarse=True)).tolist())
        )
    assert len(said) <= 4


def test_nothing_is_told_where_few_would_be_followed_and_at_other_times_than_the_silos() -> None:
    days, died, risk = without_ties()
    assert [one.time for one in told(answered(days, died, risk), Care(10, 5, times=(200.0,)))] == [
        200
    ]
    early = died.astype(bool) | (np.arange(200) % 50 > 0)
    assert [
        one.time
        for one in told(answered(np.where(early, days.clip(max=150), days), 0 * died, risk))
    ] == [100]


def test_two_evaluations_show_between_which_times_a_subject_had_the_event() -> None:
    """The models differ in one subject's prediction; the coordinator knows nobody's times."""
    days, died, _ = without_ties()
    groups = np.where(np.arange(200) % 2, -3.0, 1.5)
    for one in range(0, 200, 13):
        reports = []
        for place in (-3.0, 1.5):
            groups[one] = place
            found = COUNTING.count(answered(days, died, groups), Care(10, 5, coarse=True))
            reports.append(torch.from_numpy(real(COUNTING.split(found)["grouped"].numpy())))
        moved = (reports[1] - reports[0])[:, 2:4].clip(0).amax(
            -1
        ) > 0.5  # by time: without, with the event
        truth = [[days[one] >= time, bool(died[one]) and days[one] <= time] for time in TIMES]
        assert moved.tolist() == truth
        groups[one] = -3.0 if one % 2 else 1.5


def test_one_evaluation_shows_the_time_of_a_subject_to_who_knows_all_others() -> None:
    """Of 15 times and both kinds of ends, few would give the same report."""
    days, died, risk = (each[:40].copy() for each in without_ties())
    care, left = Care(10, 5, coarse=True), set()
    true, truth = COUNTING.count(answered(days, died, risk), care), (days[7], died[7])
    for one in (
        truth,
        *((time, event) for time in np.linspace(5, 700, 15) for event in (0.0, 1.0)),
    ):
        days[7], died[7] = one
        if torch.equal(COUNTING.count(answered(days, died, risk), care), true):
            left.add(one)
    assert truth in left
    assert len(left) <= 5


def test_each_time_has_a_hazard() -> None:
    with pytest.raises(UserError, match="2 times and 1 hazards: give one hazard for each time"):
        Survival(times=(1.0, 2.0), hazard=(0.1,))
