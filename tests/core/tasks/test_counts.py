"""What is counted of answers: classes, pairs, numbers far from all others."""

from math import isnan

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from ekiden.core.tasks import (
    Classification,
    MultiLabel,
    Regression,
    Scores,
    Survival,
    Task,
    scaled,
)
from tests.core.tasks.scored import exact, told


def test_a_class_that_is_absent_and_one_that_is_never_answered() -> None:
    p = torch.tensor(
        [[0.6, 0.3, 0.1, 0.0], [0.5, 0.4, 0.1, 0.0], [0.1, 0.8, 0.1, 0.0], [0.2, 0.2, 0.6, 0.0]]
    )
    y = torch.tensor([0, 1, 1, 0])  # nothing is of class 2, which is answered once, nor of class 3
    s = Scores(Classification(), 4, y, p, torch.zeros(4))
    found = exact(s)
    answers = p.argmax(1)
    assert found.values["balanced_accuracy"] == pytest.approx(0.5)
    assert found.values["macro_f1"] == pytest.approx(
        sk.f1_score(y, answers, average="macro", zero_division=0)
    )
    areas = [sk.roc_auc_score(y == k, p[:, k]) for k in (0, 1)]
    assert found.values["auroc"] == pytest.approx(np.mean(areas))
    assert found.values["brier"] == pytest.approx(
        float((p - torch.eye(4)[y]).square().sum(1).mean())
    )
    assert [sorted(row) for row in found.each] == [
        ["accuracy", "auroc", "average_precision", "macro_f1"]
    ] * 2 + [["macro_f1"], []]
    summed = told(s)
    for name, value in found.values.items():
        assert summed.values[name] == pytest.approx(value, abs=1e-6 + summed.errors.get(name, 0)), (
            name
        )


@pytest.mark.parametrize("task", [Classification(), MultiLabel()], ids=lambda task: task.kind)
@pytest.mark.parametrize("k", [2, 3])
def test_probabilities_of_a_model_that_has_diverged_count_as_zero(task: Task, k: int) -> None:
    draw = torch.Generator().manual_seed(k)
    outputs = torch.randn(40, k, generator=draw)
    outputs[:30] = float("nan")
    y = torch.randint(0, k, (40,), generator=draw)
    if task.kind == "multi-label":
        y = torch.nn.functional.one_hot(y, k).float()
    s = Scores(task, k, y, task.answers(outputs, full=True), task.loss(outputs, y))
    summed = told(s)
    for name, value in exact(s).values.items():
        assert summed.values[name] == pytest.approx(value, abs=1e-4 + summed.errors.get(name, 0)), (
            name
        )
    assert s.counts.confidence[0].sum() == 40 * (1 if task.kind == "classification" else k)


def test_an_outlier_counts_as_far_as_it_is_away() -> None:
    y = torch.arange(50.0)[:, None].double()
    task = scaled(Regression(), y)
    for far in (1e5, 1e7):
        answers = y.clone()
        answers[7] += far
        s = Scores(task, 1, y, answers, torch.zeros(50))
        for of in (exact, told):
            assert of(s).values["rmse"] == pytest.approx(far / 50**0.5, rel=1e-6)
            assert of(s).values["mae"] == pytest.approx(far / 50, rel=1e-6)
    answers[7] = float("nan")
    for of in (exact, told):
        assert "rmse" not in of(Scores(task, 1, y, answers, torch.zeros(50))).values


def test_pairs_with_ties_by_hand() -> None:
    y = torch.tensor([[5.0, 1], [5, 0], [3, 1], [3, 1], [7, 0]]).double()
    risk = torch.tensor([[0.1], [0.9], [2.0], [1.0], [0.1]])
    s = Scores(Survival(), 1, y, risk, torch.zeros(5))
    # (0,1): out of order; (0,4): tied risk; (2,*) and (3,*) with 0, 1, 4: in order; (2,3) ended
    # together
    assert exact(s).values["c_index"] == told(s).values["c_index"] == pytest.approx(6.5 / 8)
    alone = s.at(torch.tensor([1, 4]))
    assert "c_index" not in exact(alone).values
    assert isnan(alone.score())
