"""Local: nothing moves, and no client depends on another."""

from typing import Any

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import State
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DFedAvgM, Local
from ekiden.methods.gossip import topology
from tests.methods.toys import rounds, two_quadratics, weights

START = State(model=None, personal=(weights(0.0), weights(0.0)))


def test_numbers_of_the_toy() -> None:
    """w1 = 1 - 0.9^t and w2 = -1 + 0.8^t after t steps, however they are divided into rounds."""
    (once,) = rounds(Local(epochs=4), two_quadratics(), START)
    first, second = rounds(Local(rounds=2, epochs=2), two_quadratics(), START)
    assert first == [pytest.approx([0.19]), pytest.approx([-0.36])]
    assert second == [pytest.approx([0.3439]), pytest.approx([-0.5904])]
    assert second == once, "bit for bit"


def test_momentum_starts_anew_each_round() -> None:
    (once,) = rounds(Local(epochs=3), two_quadratics(momentum=0.5), START)
    assert once == [pytest.approx([0.386]), pytest.approx([-0.698])]
    assert rounds(Local(rounds=2, epochs=2), two_quadratics(momentum=0.5), START)[0][
        0
    ] == pytest.approx([0.24])
    after_two = State(model=None, personal=(weights(0.24), weights(0.0)))
    assert rounds(Local(epochs=1), two_quadratics(momentum=0.5), after_two)[0][0] == pytest.approx(
        [0.316]
    )


def test_learning_rate_decays_by_round() -> None:
    after = rounds(Local(rounds=2, epochs=1, lr_decay=0.5), two_quadratics(), START)[1]
    assert after == [pytest.approx([0.1 + 0.05 * 0.9]), pytest.approx([-0.2 - 0.05 * 2 * 0.8])]


def test_gossip_of_everybody_with_himself_is_local_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(topology, "mixing", lambda *_: torch.eye(2))
    gossip = rounds(DFedAvgM(rounds=2, epochs=3, theta=0.5), two_quadratics(), START)
    assert gossip == rounds(Local(rounds=2, epochs=3), two_quadratics(momentum=0.5), START)


def test_rounds_are_book_keeping(blobs: FederatedData) -> None:
    """R rounds of E epochs of plain SGD are R·E epochs; momentum restarts in each, so there they
    differ."""
    for momentum, alike in ((0.0, True), (0.9, False)):
        settings: dict[str, Any] = {
            "training": Training(
                optimizer="sgd", lr=0.05, momentum=momentum, batch_size=512, select="last"
            ),
            "hardware": Hardware(threads=1),
        }
        twice, once = (
            run(Local(rounds=r, epochs=e), blobs, lambda: nn.Linear(4, 3), **settings)
            .personal[0]
            .params
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
