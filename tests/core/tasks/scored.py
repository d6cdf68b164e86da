"""Scores of made-up answers, and their figures: from samples, and as silos count them."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.clinic.counting import EXACT, Care, counting_of
from ekiden.clinic.figures import CountedAnswers, Figures, figures
from ekiden.clinic.ranked import Wanted
from ekiden.core.tasks import Classification, Scores, Task

Array = np.ndarray[Any, Any]

N, K = 60, 4


def scores(task: Task, outputs: Tensor, y: Tensor, k: int = K) -> Scores:
    return Scores(task, k, y, task.answers(outputs, full=True), task.loss(outputs, y))


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


def told(s: Scores, care: Care = EXACT) -> Figures:
    counting = counting_of(s.task, s.outputs, full=True)
    return figures(s.task, counting.told(counting.count(s, care)), Wanted())
