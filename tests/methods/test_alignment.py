"""GLAM in FedSeq and FedELMY: switched off it changes nothing; switched on it is the loss of SPFL's
chain."""

from typing import Any

import pytest

from ekiden import FederatedData, run
from ekiden.core.engine import wire
from ekiden.core.engine.method import Method
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SPFL, FedELMY, FedSeq
from ekiden.methods.blocks.glam import GLAM, alignment
from tests.methods.test_fedavg import SETTINGS, same

SHORT: list[tuple[type[Any], dict[str, Any]]] = [
    (FedSeq, {"epochs": 2}),
    (FedELMY, {"epochs": 1, "models": 2, "warmup": 1, "alpha": 0.5}),
]
each = pytest.mark.parametrize(("kind", "short"), SHORT, ids=["fedseq", "fedelmy"])


@pytest.mark.parametrize("weights", [(0.0, 1.0), (1.0, 0.0), (0.7, 0.3)])
def test_one_chain_of_spfl_is_fedseq_with_the_same_loss(
    weights: tuple[float, float], blobs: FederatedData
) -> None:
    glam = {"align_previous": weights[0], "align_global": weights[1]}
    a = run(
        SPFL(rounds=2, epochs=2, chains=1, chain_order="fixed", **glam),  # type: ignore[arg-type]
        blobs,
        Tiny,
        **SETTINGS,
    )
    b = run(FedSeq(rounds=2, epochs=2, **glam), blobs, Tiny, **SETTINGS)  # type: ignore[arg-type]
    assert same(a.weights, b.weights)
    assert [row["forward"] for row in a.metrics] == [row["forward"] for row in b.metrics]


@each
def test_each_term_changes_the_model_and_is_paid_for(
    kind: type[Any], short: dict[str, Any], blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seen(**glam: float) -> tuple[Any, int]:
        method: Method = kind(rounds=2, **short, **glam)
        result = run(method, blobs, Tiny, **SETTINGS)
        assert result.weights is not None
        assert result.bytes == method.cost(4, wire.size(result.weights))  # type: ignore[arg-type]
        return result, result.bytes // wire.size(result.weights)

    (tau, hops), (rho, more) = seen(align_previous=1.0), seen(align_global=1.0)
    monkeypatch.setattr(GLAM, "__call__", lambda *args: pytest.fail("GLAM is off"))
    plain, fewest = seen()
    assert not same(tau.weights, plain.weights)
    assert not same(rho.weights, plain.weights)
    assert (fewest, hops, more) == (7, 7, 9)
    assert plain.metrics[-1]["forward"] < tau.metrics[-1]["forward"] == rho.metrics[-1]["forward"]


@each
def test_a_run_of_one_round_sends_no_more(
    kind: type[Any], short: dict[str, Any], blobs: FederatedData
) -> None:
    result = run(kind(**short, align_previous=1.0, align_global=1.0), blobs, Tiny, **SETTINGS)
    assert result.weights is not None
    assert result.bytes == 3 * wire.size(result.weights)


@each
@pytest.mark.parametrize("order", ["reversed", "random"])
def test_every_order_sends_as_declared(
    kind: type[Any], short: dict[str, Any], order: str, blobs: FederatedData
) -> None:
    method = kind(rounds=3, order=order, align_global=1.0, **short)
    result = run(method, blobs, Tiny, **SETTINGS)
    assert result.weights is not None
    assert result.bytes == method.cost(4, wire.size(result.weights))


@each
def test_a_pass_whose_first_client_is_away_has_its_own_origin(
    kind: type[Any], short: dict[str, Any], blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    origins: list[Any] = []

    def spy(client: Any, origin: Any, *args: Any) -> Any:
        origins.append(origin)
        return alignment(client, origin, *args)

    monkeypatch.setattr(f"{kind.__module__}.alignment", spy)
    method = kind(rounds=2, align_global=1.0, **short)
    run(method, blobs, Tiny, absent=lambda step, client: step == 4, **SETTINGS)
    first, second = origins[:4], origins[4:]
    assert len(second) == 3, "one of the four clients of the second pass is away"
    assert all(same(o, first[0]) for o in first)
    assert all(same(o, second[0]) for o in second)
    assert not same(second[0], first[0])


@each
def test_survives_a_kill(
    kind: type[Any], short: dict[str, Any], blobs: FederatedData, tmp_path: Any
) -> None:
    method = kind(rounds=2, align_previous=0.5, align_global=0.5, **short)
    whole = run(method, blobs, Tiny, **SETTINGS)
    for step in (3, 4, 6):
        run(method, blobs, Tiny, folder=tmp_path / str(step), stop_after=step, **SETTINGS)
        again = run(method, blobs, Tiny, folder=tmp_path / str(step), **SETTINGS)
        assert same(again.weights, whole.weights)
        assert again.ledger == whole.ledger
