"""FedSeq: exact numbers on quadratics."""

import pytest

from ekiden import Training
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
