"""FedSeq: exact numbers on quadratics."""

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import Ref
from ekiden.methods import FedSeq
from tests.methods.rounds import Table, quadratic, weights


def chain(
    method: FedSeq, centres: tuple[float, ...], lr: float, ledger: list[Transfer] | None = None
) -> list[float]:
    """The model after each hop over clients with these optima, from 0; an epoch is a step, and lr =
    1 leads there."""
    training = Training(optimizer="sgd", lr=lr, weight_decay=0.0)
    toys = {f"client-{i}": quadratic(1, c, training=training) for i, c in enumerate(centres)}
    table, seen = Table(method, toys, weights(0.0)), []
    fed = Fed(list(toys), table, 0, ([] if ledger is None else ledger).append)
    fed.begin(0)
    for s in method.run(fed, method.start()):
        assert isinstance(s.model, Ref)
        seen.append(float(table.value(s.model).params))
        fed.begin(s.step)
    return seen


def test_order_matters() -> None:
    assert chain(FedSeq(epochs=1), (4.0, 8.0), lr=0.5) == [2.0, 5.0]
    assert chain(FedSeq(epochs=1, order="reversed"), (4.0, 8.0), lr=0.5) == [4.0, 4.0]


@pytest.mark.parametrize(("clients", "rounds", "sends"), [(10, 1, 9), (4, 7, 27)])
def test_messages(clients: int, rounds: int, sends: int) -> None:
    ledger: list[Transfer] = []
    method = FedSeq(rounds=rounds, epochs=1)
    chain(method, (1.0,) * clients, lr=0.1, ledger=ledger)
    assert method.cost(clients, 1) == sends == len(ledger)


@pytest.mark.parametrize(("steps", "alike"), [(1, True), (2, False)])
def test_alignment_is_with_a_copy_that_training_leaves_behind(
    blobs: FederatedData, steps: int, alike: bool
) -> None:
    training = Training(lr=0.05, batch_size=16, max_steps=steps, select="last")
    plain, aligned = (
        run(
            method, blobs, lambda: nn.Linear(4, 3), training=training, hardware=Hardware(threads=1)
        ).weights
        for method in (FedSeq(epochs=1), FedSeq(epochs=1, align_previous=1.0))
    )
    assert plain is not None
    assert aligned is not None
    assert torch.equal(plain.params, aligned.params) is alike
