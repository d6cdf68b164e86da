"""What a silo reports about its test samples is coarse."""

import math

import pytest
import torch
from torch import Tensor

from ekiden.data.tasks import Classification, LanguageModelling, MultiLabel, Regression, Scores, Segmentation, Task
from ekiden.data.tasks.base import IGNORED
from ekiden.transports.flower.silo import measuring
from ekiden.transports.flower.trust.parcel import Count


def coarse(right: Tensor, losses: Tensor, least: int) -> Count:
    """The report about a classifier of two classes whose answers are right or not."""
    y = torch.zeros(len(losses), dtype=torch.int64)
    return measuring.coarse(Scores(Classification(), 2, y, (~right).long(), losses), least)


@pytest.mark.parametrize(("samples", "step"), [(10, 1.0), (91, 0.2), (116, 0.09), (1000, 0.01), (10**6, 1e-5)])
def test_one_sample_moves_the_loss_by_one_step(samples: int, step: float) -> None:
    """10/n rounded up to one digit; where two significant digits of the mean are coarser, these."""
    right = torch.zeros(samples, dtype=torch.bool)
    said = [coarse(right, torch.tensor([own] + [0.0] * (samples - 1)), 10).loss / samples for own in (0.0, 3.0, 9e9)]
    assert said[0] == 0
    assert max(said) <= step + 1e-12
    all_of_them = coarse(right, torch.full((samples,), 3.14159), 10).loss / samples
    assert all_of_them == pytest.approx({10: 3.0, 91: 3.2}.get(samples, 3.1))
    assert coarse(right, torch.full((samples,), math.nan), 10).loss != all_of_them


def test_nothing_is_said_of_nine_samples_or_none() -> None:
    for n in (0, 9):
        assert coarse(torch.ones(n, dtype=torch.bool), torch.ones(n), 10) == Count(0, 0.0, 0)
    assert coarse(torch.ones(0, dtype=torch.bool), torch.ones(0), 1) == Count(0, 0.0, 0)
    assert coarse(torch.ones(10, dtype=torch.bool), torch.ones(10), 10) == Count(10, 10.0, 10)


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


TASKS = (Classification(), MultiLabel(), Regression(), Segmentation(), LanguageModelling(vocabulary=7))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_one_sample_moves_what_is_said_by_one_step(task: Task) -> None:
    """By one right answer, and one step of the loss, whatever the model answers to it, and wherever the others are."""
    n = 40
    y, good, bad = labelled(task, n)
    draw = torch.Generator().manual_seed(0)
    for _ in range(50):
        mixed = torch.rand(good.shape, generator=draw) < 0.5
        answers, losses = torch.where(mixed, good, bad), 20 * torch.rand(n, generator=draw)
        said = []
        for own, loss in ((good, 0.0), (bad, 1e30), (answers, 5.0), (good, math.inf)):
            answers[0], losses[0] = own[0], loss
            said.append(measuring.coarse(Scores(task, 7, y, answers, losses), 10))
        assert {count.samples for count in said} == {n}
        assert max(c.right for c in said) - min(c.right for c in said) <= 1
        assert all(type(c.right) is int and 0 <= c.right <= n for c in said)
        steps = [c.loss / n for c in said]
        assert max(steps) - min(steps) <= 0.3 + 1e-9  # 10/40, rounded up to one digit
    ends = [measuring.coarse(Scores(task, 7, y, answers, torch.zeros(n)), 10).right for answers in (good, bad)]
    assert ends == [0, 0] if isinstance(task, Regression) else [n, 0]


def test_samples_without_a_label_that_counts_are_left_out() -> None:
    task = Segmentation()
    y, good, _ = labelled(task, 20)
    y[:8] = IGNORED
    found = measuring.coarse(Scores(task, 3, y, good, torch.ones(20)), 10)
    assert (found.right, found.samples) == (12, 12)
    assert found.loss == pytest.approx(12 * 0.9)
    assert measuring.coarse(Scores(task, 3, y, good, torch.ones(20)), 13) == Count(0, 0.0, 0)
