"""What a silo reports about its test samples is coarse if another party could have made the
model."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from ekiden.clinic.counting import Care, counting_of, real
from ekiden.clinic.noisy import Exact
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
    Task,
)
from ekiden.core.tasks.base import IGNORED
from ekiden.silos.trust import report as measured
from ekiden.silos.trust.report import Reported, SiloReport, fits, total_of

TEN = Care(10, coarse=True)


def told(s: Scores, care: Care = TEN) -> dict[str, Tensor]:
    """The numbers that a silo reports about answers, by name."""
    counting = counting_of(s.task, s.outputs, full=False)
    return counting.split(counting.count(s, care))


def coarse(right: Tensor, losses: Tensor) -> float:
    """The mean loss that is reported about a classifier of two classes."""
    y = torch.zeros(len(losses), dtype=torch.int64)
    numbers = told(Scores(Classification(), 2, y, (~right).long(), losses))
    return float(real(numbers["loss"].numpy())) / len(losses)


@pytest.mark.parametrize(
    ("samples", "step"), [(10, 1.0), (91, 0.2), (116, 0.09), (1000, 0.01), (10**6, 1e-5)]
)
def test_one_sample_moves_the_loss_by_one_step(samples: int, step: float) -> None:
    """10/n rounded up to one digit; where two significant digits of the mean are coarser, these."""
    right = torch.zeros(samples, dtype=torch.bool)
    said = [coarse(right, torch.tensor([own] + [0.0] * (samples - 1))) for own in (0.0, 3.0, 9e9)]
    assert said[0] == 0
    assert max(said) <= step + 1e-9
    all_of_them = coarse(right, torch.full((samples,), 3.14159))
    assert all_of_them == pytest.approx({10: 3.0, 91: 3.2}.get(samples, 3.1), abs=1e-6)


def test_nothing_is_said_of_nine_samples_or_none() -> None:
    for n in (0, 9):
        y = torch.zeros(n, dtype=torch.int64)
        assert not any(
            v.any() for v in told(Scores(Classification(), 2, y, y, torch.ones(n))).values()
        )
    y = torch.zeros(10, dtype=torch.int64)
    found = told(Scores(Classification(), 2, y, y, torch.ones(10)))
    assert (int(found["right"]), int(found["samples"]), found["loss"].tolist()) == (10, 10, [10, 0])


def labelled(task: Task, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels (n, ...), answers that are all right, and answers that are all wrong."""
    y = torch.arange(n * 6).reshape(n, 6)
    match task:
        case MultiLabel():
            labels = (y % 2).float()
            return labels, labels, 1 - labels
        case Segmentation():
            pixels = (y % 3).reshape(n, 2, 3)
            return pixels, pixels, (pixels + 1) % 3
        case LanguageModelling():
            tokens = y % 7
            return tokens, tokens[:, 1:], (tokens[:, 1:] + 1) % 7
        case Regression():
            numbers = y[:, :1].float()
            return numbers, numbers, numbers + 1e6
        case _:
            return y[:, 0] % 3, y[:, 0] % 3, (y[:, 0] + 1) % 3


TASKS = (
    Classification(),
    MultiLabel(),
    Regression(),
    Segmentation(),
    LanguageModelling(vocabulary=7),
)
OUTPUTS = {"multi-label": 6, "regression": 1}


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_one_sample_moves_what_is_said_by_a_few_steps(task: Task) -> None:
    """By its own place in each count, and few steps of a sum, whatever the model answers to it and
    to the others."""
    n = 40
    y, good, bad = labelled(task, n)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        mixed = torch.rand(good.shape, generator=draw) < 0.5
        answers, losses = torch.where(mixed, good, bad), 20 * torch.rand(n, generator=draw)
        said = []
        for own, loss in ((good, 0.0), (bad, 1e30), (answers, 5.0), (good, math.inf)):
            answers[0], losses[0] = own[0], loss
            said.append(told(Scores(task, OUTPUTS.get(task.kind, 7), y, answers, losses)))
        steps = [float(real(one["loss"].numpy())) / n for one in said]
        assert max(steps) - min(steps) <= 0.3 + 1e-6  # 10/40, rounded up to one digit
        most = {"absolute": 10**0.5 / 16 * 17, "squared": 10 / 16 * 17}
        most["moments"] = (3 * 10**2 + 2 * 10**1.5) / 16 * 17
        for name in said[0].keys() - {"loss", "broken", "far"}:
            values = [one[name].double().numpy() for one in said]
            if name in most:
                values = [real(one) for one in values]
            apart = max(float(np.abs(one - values[0]).sum()) for one in values)
            assert apart <= most.get(name, 12), (
                name
            )  # 6 labels of a sample at most, each in another place


@pytest.mark.parametrize("task", [Regression(), Segmentation()], ids=lambda task: task.kind)
def test_a_sum_shows_no_small_change_of_one_sample(task: Task) -> None:
    """A crafted model cannot write a pixel into the digits of a sum."""
    n = 20
    y = (
        torch.zeros(n, 1)
        if isinstance(task, Regression)
        else torch.zeros(n, 16, 16, dtype=torch.int64)
    )
    said = set()
    for size in range(32):
        answers = y.clone()
        answers[0].flatten()[:1] = 0.003 * size if isinstance(task, Regression) else 0
        if isinstance(task, Segmentation):
            answers[0].flatten()[:size] = 1
        found = told(Scores(task, OUTPUTS.get(task.kind, 3), y, answers, torch.zeros(n)))
        said.add(str({name: values.tolist() for name, values in found.items()}))
    assert len(said) <= 3


def test_samples_without_a_label_that_counts_are_left_out() -> None:
    task = Segmentation()
    y, good, _ = labelled(task, 20)
    y[:8] = IGNORED
    found = told(Scores(task, 3, y, good, torch.ones(20)))
    assert int(found["samples"]) == 12
    assert float(real(found["loss"].numpy())) == pytest.approx(12 * 0.9)
    assert not told(Scores(task, 3, y, good, torch.ones(20)), Care(13, coarse=True))["samples"]


def test_reports_add_up_and_fit_or_not() -> None:
    counting = counting_of(Classification(), 2, full=True)
    y = torch.arange(12) % 2
    answers = torch.stack([1 - y, y], 1).float() * 0.8 + 0.1
    told_ = counting.count(Scores(Classification(), 2, y, answers, torch.ones(12)), Care(), y)
    one = measured.report(Exact(counting), told_[None], 0)
    assert fits(one, Exact(counting), 1)
    assert not fits(one, Exact(counting), 2)
    assert not fits(SiloReport(one.counts.float(), one.own), Exact(counting), 1)
    both = total_of({"a": Reported(shown=one), "b": Reported(shown=one)}, 0)
    assert both is not None
    assert torch.equal(both.counts, 2 * one.counts)
    assert total_of({}, 0) is None
    hidden = Masked("", [], [], [], 0, "sum", "list", ["a"])
    assert (
        total_of({"a": Reported(hidden)}, 2) is None
    )  # not all gave their part: it cannot be opened
    with pytest.raises(UserError, match="twice"):
        total_of({"a": Reported(hidden), "b": Reported(hidden)}, 2)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_confusion_matrix_shows_one_of_k_answers_of_a_sample_and_no_more(classes: int) -> None:
    """A made-up model gives one class to all samples but one. The matrix can only say the class of
    that one."""
    y, seen = torch.arange(40) % classes, set()
    for answer in range(classes):
        for loss in (0.0, 3.0, 9.0):
            answers, losses = torch.zeros(40, dtype=torch.int64), torch.zeros(40)
            answers[7], losses[7] = answer, loss
            seen.add(
                tuple(
                    told(Scores(Classification(), classes, y, answers, losses))["table"]
                    .flatten()
                    .tolist()
                )
            )
    assert len(seen) == classes
