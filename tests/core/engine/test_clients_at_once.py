"""Many clients are measured at once: the same values as one by one."""

from math import inf, isnan
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from ekiden.core.engine.evaluation import TestSet as Measure
from ekiden.core.tasks import Classification, Scores


def test_clients_measured_at_once_have_the_values_of_each_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    y, logits = torch.randint(3, (40,), generator=draw), torch.randn(40, 3, generator=draw)
    task = Classification()
    loss = task.loss(logits, y)
    loss[35] = float("nan")
    scores = Scores(task, 3, y, task.answers(logits, full=False), loss)
    rows = [
        torch.arange(10),
        torch.tensor([], dtype=torch.int64),
        torch.tensor([3, 3, 12]),
        torch.arange(30, 40),
    ]
    of_clients = cast(Any, Measure)._by_client
    own, losses = of_clients(SimpleNamespace(task=task), [(scores, one) for one in rows])
    for k in (0, 2, 3):
        assert own[k] == scores.score(rows[k])
    assert losses[0] == pytest.approx(scores.mean_loss(rows[0]))
    assert losses[2] == pytest.approx(scores.mean_loss(rows[2]))
    assert isnan(own[1])
    assert isnan(losses[1])
    assert losses[3] == inf
