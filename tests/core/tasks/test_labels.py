"""Losses and metrics of each task, against scikit-learn and against numbers worked out by hand."""

from dataclasses import replace
from math import exp, isnan, log
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from ekiden import UserError
from ekiden.core.tasks import (
    KINDS,
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
    named,
    scaled,
)
from ekiden.data import from_tensors
from tests.core.tasks.scored import K, N, scores

DRAW = torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def classes() -> Scores:
    """Four classes, of which one has no sample."""
    y = torch.randint(3, (N,), generator=DRAW)
    return scores(Classification(), torch.randn(N, K, generator=DRAW) + 2 * torch.eye(K)[y], y)


@pytest.fixture(scope="module")
def labels() -> Scores:
    y = torch.randint(2, (N, K), generator=DRAW).float()
    return scores(MultiLabel(), torch.randn(N, K, generator=DRAW) + 2 * y - 1, y)


def test_metrics_of_classes_are_those_of_scikit_learn(classes: Scores) -> None:
    p, y = classes.answers.numpy(), classes.y.numpy()
    answer, found = p.argmax(1), classes.metrics()
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(y, answer))
    assert found["balanced_accuracy"] == pytest.approx(
        np.mean([np.mean(answer[y == c] == c) for c in range(3)])
    )
    assert found["macro_f1"] == pytest.approx(
        sk.f1_score(y, answer, average="macro", zero_division=0)
    )
    areas = [sk.roc_auc_score(y == c, p[:, c]) for c in range(3)]
    assert found["auroc"] == pytest.approx(np.mean(areas), abs=1e-6)
    precisions = [sk.average_precision_score(y == c, p[:, c]) for c in range(3)]
    assert found["average_precision"] == pytest.approx(np.mean(precisions), abs=1e-6)
    assert found["calibration_error"] == pytest.approx(ece(p.max(1), answer == y), abs=1e-6)
    assert classes.confusion() == sk.confusion_matrix(y, answer, labels=range(K)).tolist()
    assert classes.mean_loss() == pytest.approx(sk.log_loss(y, p, labels=range(K)), abs=1e-6)
    each = classes.by_class()
    assert [row["auroc"] for row in each[:3]] == pytest.approx(areas, abs=1e-6)
    assert not {"auroc", "accuracy"} & each[3].keys()
    assert each[1]["accuracy"] == pytest.approx(np.mean(answer[y == 1] == 1))


def ece(confidence: "np.ndarray[Any, Any]", right: "np.ndarray[Any, Any]") -> float:
    """Naeini et al., 2015: Σ (n_b/n) |accuracy - confidence| over 15 bins of equal width."""
    places = np.digitize(confidence, np.linspace(0, 1, 16)[1:-1], right=True)
    inside = [places == b for b in range(15)]
    return float(
        sum(abs(right[i].mean() - confidence[i].mean()) * i.mean() for i in inside if i.any())
    )


def test_of_two_classes_average_precision_is_that_of_the_second() -> None:
    y = torch.randint(2, (N,), generator=DRAW)
    found = scores(Classification(), torch.randn(N, 2, generator=DRAW) + torch.eye(2)[y], y, 2)
    p = found.answers[:, 1].numpy()
    assert found.metrics()["average_precision"] == pytest.approx(
        sk.average_precision_score(y.numpy(), p), abs=1e-6
    )
    assert found.metrics()["auroc"] == pytest.approx(sk.roc_auc_score(y.numpy(), p), abs=1e-6)


def test_metrics_of_labels_are_those_of_scikit_learn(labels: Scores) -> None:
    p, y = labels.answers.numpy(), labels.y.numpy()
    answer, found = p >= 0.5, labels.metrics()
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-6)
    assert found["average_precision"] == pytest.approx(sk.average_precision_score(y, p), abs=1e-6)
    assert found["macro_f1"] == pytest.approx(sk.f1_score(y, answer, average="macro"))
    assert found["accuracy"] == pytest.approx((answer == y).mean())
    both = np.mean([sk.balanced_accuracy_score(y[:, k], answer[:, k]) for k in range(K)])
    assert found["balanced_accuracy"] == pytest.approx(both)
    assert labels.mean_loss() == pytest.approx(
        np.mean([sk.log_loss(y[:, k], p[:, k]) for k in range(K)]), abs=1e-6
    )
    one_kind = replace(labels, y=torch.ones_like(labels.y))
    assert "auroc" not in one_kind.metrics()
    assert isnan(one_kind.score())


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    y = 50 + 20 * torch.randn(N, 2, generator=DRAW)
    task = scaled(Regression(), y)
    assert isinstance(task, Regression)
    assert torch.tensor(task.mean) == pytest.approx(y.mean(0))
    outputs = task.standardised(y) + 0.3 * torch.randn(N, 2, generator=DRAW)
    found = scores(task, outputs, y, 2)
    answers = found.answers.numpy()
    assert found.metrics()["rmse"] == pytest.approx(
        sk.root_mean_squared_error(y, answers), rel=1e-5
    )
    assert found.metrics()["mae"] == pytest.approx(sk.mean_absolute_error(y, answers), rel=1e-5)
    assert found.metrics()["r2"] == pytest.approx(sk.r2_score(y, answers), rel=1e-5)
    assert found.mean_loss() == pytest.approx(
        float(((outputs - (y - y.mean(0)) / y.std(0, correction=0)) ** 2).mean())
    )
    assert float(task.mean_loss(torch.zeros(N, 2), y)) == pytest.approx(task.guess(2), rel=1e-5)
    one = scores(replace(task, mean=(50.0,), std=(20.0,)), outputs[:, :1], y[:, 0], 1)  # y (n,)
    assert one.metrics()["rmse"] == pytest.approx(
        sk.root_mean_squared_error(y[:, 0], one.answers[:, 0]), rel=1e-5
    )
    assert not task.headline.higher


def test_metrics_of_pixels_by_hand() -> None:
    y = torch.tensor([[[0, 0], [1, 1]], [[0, -100], [-100, 1]]])
    answer = torch.tensor([[[0, 1], [1, 1]], [[0, 0], [1, 0]]])
    outputs = 4.0 * torch.eye(2)[answer].movedim(-1, 1)
    found = scores(Segmentation(), outputs, y, 2)
    assert found.confusion() == [[2, 1], [1, 2]]
    assert found.metrics()["miou"] == pytest.approx((2 / 4 + 2 / 4) / 2)
    assert found.metrics()["dice"] == pytest.approx(2 * 2 / 6)
    assert found.metrics()["accuracy"] == pytest.approx(4 / 6)
    wrong, right = log(1 + exp(4)), log(1 + exp(-4))
    assert found.loss.tolist() == pytest.approx([(wrong + 3 * right) / 4, (right + wrong) / 2])
    assert found.mean_loss() == pytest.approx(
        (2 * wrong + 4 * right) / 6
    )  # of pixels, not of images
    assert float(Segmentation().mean_loss(outputs, y)) == pytest.approx(found.mean_loss())


def test_perplexity_is_that_of_the_tokens_that_count() -> None:
    y = torch.tensor([[1, 2, 3, -100], [3, 1, -100, -100]])
    outputs = torch.randn(2, 4, K, generator=DRAW)
    logs = outputs.log_softmax(-1)
    known = [logs[0, 0, 2], logs[0, 1, 3], logs[1, 0, 1]]
    found = scores(LanguageModelling(), outputs, y)
    assert found.metrics()["perplexity"] == pytest.approx(exp(-float(sum(known)) / 3), rel=1e-5)
    assert float(found.task.mean_loss(outputs, y)) == pytest.approx(-float(sum(known)) / 3)
    shorter = scores(LanguageModelling(), outputs[:, :3], y)  # a batch is cut to its longest text
    assert shorter.metrics() == pytest.approx(found.metrics())
    hits = [(0, 0, 2), (0, 1, 3), (1, 0, 1)]
    assert found.accuracy() == pytest.approx(
        sum(int(outputs[i, t].argmax()) == c for i, t, c in hits) / 3
    )


def test_a_mean_loss_is_that_of_the_losses() -> None:
    for task, outputs, y in (
        (Classification(), torch.randn(9, K, generator=DRAW), torch.arange(9) % K),
        (
            MultiLabel(),
            torch.randn(9, K, generator=DRAW),
            (torch.randn(9, K, generator=DRAW) > 0).float(),
        ),
        (Regression(), torch.randn(9, K, generator=DRAW), torch.randn(9, K, generator=DRAW)),
    ):
        assert float(task.mean_loss(outputs, y)) == pytest.approx(
            float(task.loss(outputs, y).mean()), rel=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_distance_is_zero_from_oneself_and_has_a_gradient_towards_the_teacher(kind: str) -> None:
    shape = {"segmentation": (3, K, 2, 2), "language-modelling": (3, 5, K)}.get(kind, (3, K))
    student, teacher = (
        torch.randn(shape, generator=DRAW).requires_grad_(),
        torch.randn(shape, generator=DRAW),
    )
    task = named(kind)
    assert float(task.distance(teacher, teacher, 2.0)) == pytest.approx(0, abs=1e-6)
    far = task.distance(student, teacher, 2.0)
    (slope,) = torch.autograd.grad(far, student)
    nearer = task.distance(student.detach() - 0.1 * slope, teacher, 2.0)
    assert 0 < nearer.item() < far.item()


def test_binary_divergence_by_hand() -> None:
    student, teacher = torch.tensor([[0.0]]), torch.tensor([[log(3)]])  # 1/2 and 3/4
    kl = 0.75 * log(0.75 / 0.5) + 0.25 * log(0.25 / 0.5)
    assert float(MultiLabel().distance(student, teacher, 1.0)) == pytest.approx(kl)


@pytest.mark.parametrize(
    ("y", "task", "message"),
    [
        (
            torch.zeros(4),
            None,
            r"integers, one class a sample; numbers to predict need task='regression'",
        ),
        (torch.eye(4).long(), None, r"of one-hot rows, y.argmax\(1\).*multi-label"),
        (
            torch.tensor([1.0, 2, float("nan"), 3]),
            "regression",
            "NaN or infinity in the target of row 2",
        ),
        (torch.tensor([[0, 2]] * 4), "multi-label", "a row of 0 and 1 for each of 4 samples"),
        (
            torch.zeros(4, 2, 2).long() - 1,
            "segmentation",
            "label -1: give classes from 0 on, or -100",
        ),
        (torch.zeros(4, 2, 2), "segmentation", "float32 y of shape"),
        (torch.zeros(4).long(), "language-modelling", "at least two each"),
        (torch.zeros(4).long(), "regressing", "did you mean.*regression"),
        (torch.randn(3), "regression", "4 samples and 3 labels"),
    ],
)
def test_labels_of_another_task_are_refused(y: Tensor, task: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        from_tensors((torch.zeros(4, 3), y), task=task)
    assert "\n" not in str(refusal.value)


def test_groups_for_partitions() -> None:
    assert MultiLabel().strata(torch.tensor([[0, 1.0], [1, 1], [0, 0]])).tolist() == [1, 0, 2]
    assert Segmentation().strata(
        torch.tensor([[[2, 2], [1, -100]], [[0, 0], [1, 0]]])
    ).tolist() == [2, 0]
    assert Regression().strata(torch.tensor([-9.0, -0.1, 0.1, 9.0])).tolist() == [0, 4, 5, 9]
