"""Answers of two classes, counted as silos count them, and the figures that follow."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.clinic.counting import (
    EXACT,
    Care,
    Counting,
    counting_of,
)
from ekiden.clinic.figures import Figures, figures
from ekiden.clinic.ranked import Wanted
from ekiden.core.tasks import (
    Classification,
    Scores,
)
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
