"""FedSeq: exact numbers on quadratics."""

from typing import cast

import pytest

from ekiden.core.worker import Client
from ekiden.methods import FedSeq
from tests.methods.toys import Quadratic, weights


def chain(method: FedSeq, centres: tuple[float, ...], lr: float, start: float = 0.0, rounds: int = 1) -> list[float]:
    """The model after each round of hops over clients with these optima."""
    model, seen = weights(start), []
    for _ in range(rounds):
        for centre in centres:
            model = method.train(cast(Client, Quadratic([centre], lr=lr)), model)
        seen.append(float(model.params))
    return seen


def test_order_matters() -> None:
    assert chain(FedSeq(epochs=1), (4.0, 8.0), lr=0.5) == [5.0]
    assert chain(FedSeq(epochs=1), (8.0, 4.0), lr=0.5) == [4.0]


def test_exact_local_optimisation_forgets_everything_before() -> None:
    assert chain(FedSeq(epochs=1), (4.0, -3.0, 8.0), lr=0.0) == [8.0]


def test_local_steps() -> None:
    assert chain(FedSeq(epochs=10), (1.0,), lr=0.1)[0] == pytest.approx(1 - 0.9**10, abs=1e-6)


def test_cycle_converges_to_its_own_fixed_point() -> None:
    seen = chain(FedSeq(epochs=1), (4.0, 8.0), lr=0.5, rounds=40)
    assert seen[:3] == [5.0, 6.25, 6.5625]
    assert seen[-1] == pytest.approx(20 / 3)


@pytest.mark.parametrize(("clients", "rounds", "sends"), [(10, 1, 9), (4, 7, 27)])
def test_messages(clients: int, rounds: int, sends: int) -> None:
    assert FedSeq(rounds=rounds).cost(clients, 1) == sends
