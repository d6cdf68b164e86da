"""Local: nothing moves, nobody depends on anybody."""

from typing import Any, cast

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.worker import Client
from ekiden.methods import Local
from tests.conftest import Tiny
from tests.methods.toys import Quadratic, weights


def test_numbers_of_the_toy() -> None:
    # F1 = ½(w-1)², F2 = (w+1)², η = 0.1: the second has twice the curvature, so twice the step.
    for epochs, first, second in ((2, 0.19, -0.36), (4, 0.3439, -0.5904)):
        method = Local(epochs=epochs)
        assert float(method.train(cast(Client, Quadratic([1.0], 0.1)), weights(0.0)).params) == pytest.approx(first)
        assert float(method.train(cast(Client, Quadratic([-1.0], 0.2)), weights(0.0)).params) == pytest.approx(second)


def test_rounds_are_book_keeping(blobs: FederatedData) -> None:
    """R rounds of E epochs of plain SGD are R·E epochs; momentum starts anew in each, so there they differ."""
    for momentum, alike in ((0.0, True), (0.9, False)):
        settings: dict[str, Any] = {
            "training": Training(optimizer="sgd", lr=0.05, momentum=momentum, batch_size=512, select="last"),
            "hardware": Hardware(threads=1),
        }
        twice, once = (
            run(Local(rounds=r, epochs=e), blobs, lambda: nn.Linear(4, 3), **settings).personal[0].params
            for r, e in ((2, 2), (1, 4))
        )
        assert torch.allclose(twice, once, atol=1e-6) == alike


def test_a_client_does_not_depend_on_the_others(blobs: FederatedData) -> None:
    fewer = FederatedData(blobs.dataset, blobs.clients[1:3])
    settings = {"training": Training(batch_size=16), "hardware": Hardware(threads=1)}
    many, few = (run(Local(rounds=2, epochs=2), data, Tiny, **settings) for data in (blobs, fewer))  # type: ignore[arg-type]
    for a, b in zip(many.personal[1:3], few.personal, strict=True):
        assert torch.equal(a.params, b.params)


def test_reports_per_client_and_has_no_global_model(blobs: FederatedData) -> None:
    result = run(Local(epochs=2), blobs, Tiny, hardware=Hardware(threads=1))
    row = result.metrics[-1]
    each = torch.tensor(row["clients"], dtype=torch.float64)
    assert len(each) == 4
    assert row["client_mean"] == pytest.approx(float(each.mean()))
    assert row["client_std"] == pytest.approx(float(each.std(correction=0)))
    assert result.ledger == ()
    with pytest.raises(UserError, match="personal"):
        _ = result.model
