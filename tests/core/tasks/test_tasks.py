"""Which task labels are of; tasks as plain values; weights of classes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ekiden import UserError
from ekiden.core.tasks import (
    KINDS,
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Segmentation,
    Task,
    balanced,
    inferred,
    named,
    recorded,
    task_of,
    task_of_terms,
    terms,
)
from ekiden.data import Dataset, from_tensors

DRAW = torch.Generator().manual_seed(0)


def test_what_labels_look_like() -> None:
    x = torch.zeros(4, 3)
    assert inferred(torch.tensor([0, 1, 1, 2]), x) == Classification()
    assert inferred(torch.tensor([0.5, 1, 1, 2]), x) == Regression()
    assert inferred(torch.randn(4, 2), x) == Regression()
    assert inferred(torch.tensor([[0, 1], [1, 1], [0, 0], [1, 0]]), x) == MultiLabel()
    assert inferred(torch.zeros(4, 5, 5).long(), torch.zeros(4, 1, 5, 5)) == Segmentation()
    tokens = torch.randint(1, 9, (4, 6), generator=DRAW)
    assert inferred(tokens, tokens) == LanguageModelling()


@pytest.mark.parametrize(
    "task",
    [
        Classification(),
        Classification(metric="auroc"),
        MultiLabel(metric="macro_f1"),
        Regression(mean=(1.0, 2.0), std=(3.0, 4.0)),
        Segmentation(),
        LanguageModelling(vocabulary=7),
    ],
)
def test_a_task_is_plain_values(task: Task) -> None:
    import json

    assert task_of(json.loads(json.dumps(recorded(task)))) == task


def test_all_kinds_are_here(tmp_path: Any) -> None:
    kinds = {
        "classification",
        "multi-label",
        "regression",
        "survival",
        "segmentation",
        "language-modelling",
    }
    assert set(KINDS) == kinds
    made: Callable[..., Dataset] = from_tensors
    tokens = torch.randint(1, 9, (10, 6), generator=DRAW)
    assert made((tokens, tokens)).outputs == int(tokens.max()) + 1
    assert made((tokens, tokens), task="language-modelling").outputs == int(tokens.max()) + 1


def test_weights_of_classes_multiply_the_loss_of_each_sample_in_training_only() -> None:
    task = balanced(Classification(), {"no": 6, "yes": 2}, ("no", "yes"))
    assert isinstance(task, Classification)
    assert task.weights == (8 / 12, 2.0)
    outputs, y = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0]]), torch.tensor([0, 1, 1])
    each = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
    assert torch.equal(task.loss(outputs, y), each)
    assert float(task.mean_loss(outputs, y)) == pytest.approx(
        float((each * torch.tensor([8 / 12, 2, 2])).mean())
    )
    assert task_of_terms(terms(task)) == task_of(recorded(task)) == task
    with pytest.raises(UserError, match="none of 'yes' is counted"):
        balanced(Classification(), {"no": 6}, ("no", "yes"))
    with pytest.raises(UserError, match="is for classes, the task is regression"):
        balanced(named("regression"), {}, ())
