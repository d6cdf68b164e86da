"""Counts with noise: how far one sample moves them, what that shows of it, and what follows from them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.clinic.counting import EXACT, counting_of
from ekiden.clinic.figures import figures
from ekiden.clinic.noisy import GRID, Noisy, NoisyPart, _estimate, _monotone, _nearest, _tree
from ekiden.clinic.ranked import Wanted
from ekiden.core.base.errors import UserError
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
    Survival,
    Task,
)
from ekiden.core.training.private.accountant import noise_for
from ekiden.core.training.private.noise import Draw, Noise

TASKS: dict[str, tuple[Task, int]] = {
    "two": (Classification(), 2),
    "five": (Classification(), 5),
    "many": (Classification(), 110),
    "labels": (MultiLabel(), 3),
    "numbers": (Regression(mean=(1.0, 2.0), std=(2.0, 3.0)), 2),
    "times": (Survival(), 1),
    "pixels": (Segmentation(), 3),
    "words": (LanguageModelling(vocabulary=7), 7),
}


def drawn(task: Task, outputs: int, n: int, seed: int) -> Scores:
    """Labels and answers as wild as a made-up model can give them."""
    g = torch.Generator().manual_seed(seed)
    wild = torch.randn(n, outputs, generator=g) * 10 ** float(torch.rand(1, generator=g) * 6)
    loss = torch.randn(n, generator=g) * 10 ** float(torch.rand(1, generator=g) * 8)
    loss[0] = float("nan")
    match task:
        case Classification():
            y, answers = torch.randint(0, outputs, (n,), generator=g), torch.softmax(wild, 1)
        case MultiLabel():
            y, answers = torch.randint(0, 2, (n, outputs), generator=g).float(), wild.sigmoid()
        case Survival():
            ends = torch.randint(1, 5, (n,), generator=g).float()
            y, answers = (
                torch.stack([ends, torch.randint(0, 2, (n,), generator=g).float()], 1),
                wild,
            )
        case Segmentation():
            y = torch.randint(0, outputs, (n, 4, 4), generator=g)
            answers = torch.randint(0, outputs, (n, 4, 4), generator=g)
        case LanguageModelling():
            y = torch.randint(0, outputs, (n, 16), generator=g)
            answers = torch.randint(0, outputs, (n, 15), generator=g)
        case _:
            y, answers = wild + 1, wild.flip(0)
    return Scores(task, outputs, y, answers, loss)


def noisy(name: str, noise: float = 1.0, **more: object) -> Noisy:
    task, outputs = TASKS[name]
    return replace(Noisy(counting_of(task, outputs, full=True), noise, 16), **more)  # type: ignore[arg-type]


def shift(telling: Noisy, part: NoisyPart, one: Scores, other: Scores) -> Tensor:
    """How far a part of what is told moves between two sets of samples, before noise: with bins, the nodes."""
    apart = telling._bounded(one)[part.name].double() - telling._bounded(other)[part.name].double()
    if part.tree:
        apart = apart @ torch.from_numpy(_tree(part.shape[-1])).T
    return apart


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), n=st.integers(2, 12))
def test_one_sample_moves_no_part_further_than_its_norm(name: str, seed: int, n: int) -> None:
    telling = noisy(name)
    s = drawn(*TASKS[name], n, seed)
    for left_out in range(2):
        without = s.at(torch.tensor([i for i in range(n) if i != left_out]))
        spent = 0.0
        for part in telling.parts:
            far = float(shift(telling, part, s, without).norm())
            assert far <= part.norm * (1 + 1e-3), part.name
            spent += (far * GRID / telling.deviation(part)) ** 2
        assert spent <= 1 / telling.noise**2 * (1 + 1e-3)


def test_membership_of_a_known_record_shows_no_more_than_epsilon() -> None:
    """Who knows all samples but one, and makes up the model, gives the best test of whether the one is
    there: without noise it is always right."""
    epsilon, delta, trials = 1.0, 1e-3, 150
    noise = noise_for(epsilon, delta, 1.0, 1)
    telling = noisy("two", noise)
    y, p = torch.zeros(40, dtype=torch.int64), torch.full((40,), 0.02, dtype=torch.float64)
    y[7], p[7] = 1, 0.97
    answers = torch.stack([1 - p, p], 1)
    s = Scores(Classification(), 2, y, answers, torch.where(y == 1, 10.0, 0.0))
    without = s.at(torch.tensor([i for i in range(40) if i != 7]))
    exact = counting_of(Classification(), 2, full=True)
    assert exact.split(exact.count(s) - exact.count(without))["table"].sum() == 1

    def seen(samples: Scores, seed: int) -> float:
        """The logarithm of how much likelier the report is with the record."""
        told = telling.release(samples, Draw(Noise(seed.to_bytes(32))))
        _, _, found = telling.split(told)
        middle, total = telling._bounded(without), 0.0
        for part in telling.parts:
            apart = shift(telling, part, s, without)
            off = torch.from_numpy(np.array(found[part.name])) - middle[part.name].double()
            if part.tree:
                off = off @ torch.from_numpy(_tree(part.shape[-1])).T
            total += float((off * apart).sum()) * (GRID / telling.deviation(part)) ** 2
        return total

    there = np.array([seen(s, 2 * k) for k in range(trials)])
    gone = np.array([seen(without, 2 * k + 1) for k in range(trials)])
    for threshold in np.quantile(np.concatenate([there, gone]), np.linspace(0.02, 0.98, 25)):
        hits, false = float((there > threshold).mean()), float((gone > threshold).mean())
        slack = 4 * math.sqrt(max(hits * (1 - hits), 1e-3) / trials) + 4 * math.exp(
            epsilon
        ) * math.sqrt(max(false * (1 - false), 1e-3) / trials)
        assert hits <= math.exp(epsilon) * false + delta + slack
        assert 1 - false <= math.exp(epsilon) * (1 - hits) + delta + slack
    told = (there.mean() - gone.mean()) / gone.std()
    assert told > 0.2 / noise, "the attack sees what is there"
    assert told < 1.5 / noise


def one_of(samples: int, classes: int, seed: int = 0) -> Scores:
    """Answers of a fair model."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (samples,), generator=g)
    z = torch.randn(samples, classes, generator=g).double()
    z[torch.arange(samples), y] += 2
    p = torch.softmax(z, 1)
    return Scores(Classification(), classes, y, p, -p[torch.arange(samples), y].log())


def told_by_three(telling: Noisy, s: Scores, seed: int) -> Tensor:
    parts = [s.at(torch.arange(k, len(s), 3)) for k in range(3)]
    draws = [Draw(Noise(bytes([seed, k] + [0] * 30))) for k in range(3)]
    found = [telling.release(part, draw) for part, draw in zip(parts, draws, strict=True)]
    return torch.stack(found).sum(0)


def test_figures_come_near_and_say_how_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 samples at three silos, each of which adds all of its own noise."""
    monkeypatch.setattr("ekiden.clinic.noisy._REDRAWN", 20)
    counting = counting_of(Classification(), 2, full=True)
    telling, apart = Noisy(counting, noise_for(2.0, 1e-5, 1.0, 1)), list[float]()
    for seed in range(5):
        s = one_of(5000, 2, seed)
        whole = figures(counting.task, counting.told(counting.count(s, EXACT)), Wanted())
        found = telling.figures(told_by_three(telling, s, seed), Wanted())
        for name, most in (("accuracy", 0.006), ("auroc", 0.015), ("loss", 0.06), ("brier", 0.012)):
            assert abs(found.values[name] - whole.values[name]) < most, name
            assert found.noise[name] < most
        assert all(map(math.isfinite, found.noise.values()))
        for name in ("accuracy", "auroc", "calibration_slope"):
            wider, ends = found.intervals[name], whole.intervals[name]
            assert wider[1] - wider[0] > ends[1] - ends[0]
        apart.append(
            (found.values["accuracy"] - whole.values["accuracy"]) / found.noise["accuracy"]
        )
    assert 0.4 < float(np.std(apart)) < 2.0, "the noise is as large as the figures say"


def test_silos_that_share_the_noise_add_less_together() -> None:
    alone, shared = noisy("two", 3.0), noisy("two", 3.0, honest=4)
    for part in alone.parts:
        assert shared.deviation(part) == pytest.approx(alone.deviation(part) / 2, rel=0.01)


def test_too_few_samples_tell_nothing_and_of_a_subgroup_not_even_how_many() -> None:
    s, draw = one_of(9, 2), Draw(Noise(bytes(32)))
    assert not noisy("two").release(s, draw, least=10).any()
    part = noisy("two", whole=False)
    for few in (s, s.at(torch.arange(0))):
        told = part.release(few, draw, least=10)
        assert told[:2].tolist() == [1, 0]
        assert int((told[2:] != 0).sum()) > 100
    with pytest.raises(UserError, match="do not fit"):
        part.split(told[1:])


@pytest.mark.parametrize("name", TASKS)
def test_a_subgroup_without_samples_tells_noise_alone(name: str) -> None:
    nobody = drawn(*TASKS[name], 9, seed=4).at(torch.arange(0))
    told = noisy(name, whole=False).release(nobody, Draw(Noise(bytes(32))))
    assert told[:2].tolist() == [1, 0]
    assert told[2:].any()


@pytest.mark.parametrize("name", TASKS)
def test_what_follows_from_noise_alone_are_counts_that_answers_can_have(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ekiden.clinic.noisy._REDRAWN", 3)  # how far figures move is not asked here
    telling = noisy(name, 50.0)
    s = drawn(*TASKS[name], 12, 3)
    for seed in range(3):
        told = telling.release(s, Draw(Noise(bytes([seed] * 32))))
        split = telling.counting.split(telling.vector(told))
        assert int(split["samples"]) == 12
        for part, numbers in split.items():
            if part not in ("loss", "target", "moments", "absolute", "squared", "target_squared"):
                assert int(numbers.min()) >= 0 if numbers.numel() else True, part
        found = telling.figures(told, Wanted())
        assert all(math.isfinite(value) for value in found.values.values()) or name == "words"
        for low, high in found.intervals.values():
            assert low <= high


def test_the_estimate_of_bins_is_that_of_least_squares_and_sums_are_better_than_bins() -> None:
    tree, estimate = _tree(64), _estimate(64)
    assert np.allclose(estimate @ tree, np.eye(64))
    covariance = estimate @ estimate.T
    for bins in (16, 32, 48):
        ones = np.arange(64) < bins
        flat = bins / 7  # noise of as many bins that have the whole budget
        assert ones @ covariance @ ones < 0.6 * max(flat, 4.0)


rows = st.lists(st.floats(-50, 50), min_size=16, max_size=16).map(np.array)


@given(rows, st.integers(0, 60))
def test_likely_counts_are_whole_not_negative_and_add_up(
    found: "np.ndarray[tuple[int], np.dtype[np.float64]]", n: int
) -> None:
    near = _nearest(found, n)
    assert near.min() >= 0
    assert near.sum() == pytest.approx(n, abs=1e-6)
    counts = _monotone(found.reshape(2, 8), n)
    assert counts.min() >= 0
    assert counts.sum() == n
    assert np.array_equal(counts, counts.round())


@given(st.lists(st.integers(0, 9), min_size=16, max_size=16).filter(any))
def test_counts_without_noise_stay_as_they_are(found: list[int]) -> None:
    counts = np.array(found, dtype=np.float64).reshape(2, 8)
    assert np.array_equal(_monotone(counts, counts.sum()), counts)
    assert np.allclose(_nearest(counts, counts.sum()), counts)
