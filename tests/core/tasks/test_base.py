"""Metrics of tasks and of users; what is not defined; which scores are better."""

from dataclasses import replace
from math import isnan

import pytest
import torch
from torch import Tensor

from ekiden import UserError
from ekiden.core.tasks import (
    KINDS,
    Classification,
    LanguageModelling,
    Metric,
    Regression,
    Segmentation,
    Task,
    own_metric,
    recorded,
)
from ekiden.core.tasks.base import better
from ekiden.core.tasks.measures import OF_NUMBERS
from tests.core.tasks.scored import scores

DRAW = torch.Generator().manual_seed(0)


def test_a_metric_that_the_task_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="metric of regression"):
        _ = Regression(metric="auroc").headline


def near(answers: Tensor, y: Tensor) -> float:
    return float((answers[:, 0] - y).abs().max())


def broken(answers: Tensor, y: Tensor) -> float:
    raise ValueError("what now")


def test_a_metric_of_ones_own() -> None:
    task = Regression(metric=own_metric(near, higher=False))
    found = scores(task, torch.tensor([[1.0], [2.0]]), torch.tensor([1.0, 5.0]), 1)
    assert found.score() == 3
    assert list(found.metrics()) == ["near", *(one.name for one in OF_NUMBERS)]
    assert recorded(task)["metric"] == "near"
    assert recorded(task)["higher"] is False
    with pytest.raises(UserError, match="the metric broken failed: what now"):
        replace(found, task=Regression(metric=own_metric(broken))).score()
    for taken in ("rmse", "loss", "two words"):
        with pytest.raises(UserError, match="cannot be called"):
            _ = Regression(metric=own_metric(near, taken)).headline


def test_undefined_is_left_out_and_not_counted_as_zero() -> None:
    y = torch.zeros(5, dtype=torch.int64)
    found = scores(Classification(metric="auroc"), torch.randn(5, 2, generator=DRAW), y, 2)
    assert isnan(found.score())
    assert "auroc" not in found.metrics()
    assert scores(Regression(), torch.zeros(1, 1), torch.ones(1), 1).metrics().keys() == {
        one.name for one in OF_NUMBERS if one.name != "r2"
    }


@pytest.mark.parametrize(
    "metric", [metric for kind in KINDS.values() for metric in kind.metrics], ids=lambda m: m.name
)
def test_metrics_travel_to_other_processes(metric: Metric) -> None:
    import pickle

    assert pickle.loads(pickle.dumps(metric)).name == metric.name


@pytest.mark.parametrize("task", [Segmentation(), LanguageModelling()])
def test_tasks_without_vectors_say_so(task: Task) -> None:
    with pytest.raises(UserError, match="no vector of outputs"):
        task.targets(torch.zeros(2, 3), 4)
    with pytest.raises(UserError, match="no vector of outputs"):
        task.drawn(2, 4, torch.Generator())


def test_a_score_that_is_not_defined_loses_to_every_other() -> None:
    nan = float("nan")
    assert better(0.1, nan)
    assert better(nan, nan)  # the last of several epochs
    assert not better(nan, 0.1)
    assert not better(0.1, 0.1)
    assert better(0.2, 0.1)


def test_a_line_gives_no_unit_to_what_is_not_defined() -> None:
    accuracy = Classification().metrics[0]
    assert accuracy.said(0.5) == "accuracy 50.00 %"
    assert accuracy.said(float("nan")) == accuracy.said(None) == "accuracy -"
