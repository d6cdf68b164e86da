"""Averages in fixed point: near the plain ones, within a bound that is stated, and never wrapped
silently."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden import FederatedData, UserError, run
from ekiden.core.base.sums import fixed, real
from ekiden.core.engine.method import Size
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights, mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SCAFFOLD, FedAvg, FedDC, FedDisco, FedDyn, FedNova, FedProx
from ekiden.methods.blocks.rounds import ModelSums
from ekiden.methods.rounds import feddisco
from tests.methods.rounds import play, toy_q, values
from tests.methods.test_fedavg import SETTINGS, same

SECURE = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, FedDisco)
every_method = pytest.mark.parametrize("kind", SECURE, ids=lambda kind: kind.title())


def model(*numbers: float, counter: int = 0) -> Weights:
    return Weights(torch.tensor(numbers), torch.tensor([0.5]), torch.tensor([counter]))


@pytest.mark.parametrize(
    "kind", [k for k in SECURE if k is not FedDisco], ids=lambda kind: kind.title()
)
def test_near_the_plain_run(kind: type[Any]) -> None:
    """On losses that can be worked out by hand, with clients of different sizes and numbers of
    steps."""
    changes = {"mu": 0.5} if kind is FedProx else {"alpha": 0.1} if kind in (FedDyn, FedDC) else {}
    for participation in (1.0, 0.5):
        method = kind(rounds=8, epochs=3, participation=participation, **changes)
        toys = [toy_q() for _ in range(2)]
        for two in toys:
            two[1].n, two[1].speed = 3, 2
        plain, secure = (
            values(play(m, two))
            for m, two in zip((method, replace(method, secure=True)), toys, strict=True)
        )
        assert secure == pytest.approx(plain, abs=1e-6)
        assert len(plain) == 8


def test_weights_of_feddisco(blobs: FederatedData) -> None:
    """The weights that clients work out from sums are those that the server works out from all
    numbers."""
    parts: list[float] = []
    of = ModelSums.of

    def noted(clients: int, trained: Weights, weight: float, *others: Any) -> ModelSums:
        parts.append(weight)
        return of(clients, trained, weight, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelSums, "of", noted)
        for measure in ("kl", "l1"):
            parts.clear()
            run(
                FedDisco(rounds=1, epochs=1, discrepancy=measure, secure=True),
                blobs,
                Tiny,
                **SETTINGS,
            )
            n = [len(c.train) for c in blobs.clients]
            counts = [c.train.class_counts(blobs.dataset.outputs) for c in blobs.clients]
            d = feddisco.normalised_distances(
                [feddisco.discrepancy(c, measure) for c in counts], measure
            )
            assert [p / sum(parts) for p in parts] == pytest.approx(
                feddisco.disco_weights(n, d, 0.5, 0.1), abs=1e-6
            )


@every_method
def test_bytes_and_a_run_that_was_stopped(
    kind: type[Any], blobs: FederatedData, tmp_path: Path
) -> None:
    method = kind(rounds=3, epochs=1, participation=0.5, secure=True)
    whole = run(method, blobs, Tiny, **SETTINGS)
    size = Size.of(Network(Tiny()))
    assert whole.bytes == method.moved(whole.state, 4, size) <= method.cost(4, size)
    assert {row.task for row in whole.ledger if row.target == "server"} == {"get"}
    run(method, blobs, Tiny, folder=tmp_path / "run", stop_after=2, **SETTINGS)
    assert same(
        run(method, blobs, Tiny, folder=tmp_path / "run", **SETTINGS).weights, whole.weights
    )


@every_method
def test_without_those_who_do_not_answer(kind: type[Any], blobs: FederatedData) -> None:
    """The mean is over the others: it is the run that never had the client, where the method keeps
    nothing of it."""
    away = run(
        kind(rounds=1, epochs=1, secure=True),
        blobs,
        Tiny,
        absent=lambda _, k: k == "client-0",
        **SETTINGS,
    )
    assert away.weights is not None
    rest = FederatedData(blobs.dataset, blobs.clients[1:])
    if kind in (FedAvg, FedProx, FedNova):
        assert same(
            away.weights, run(kind(rounds=1, epochs=1, secure=True), rest, Tiny, **SETTINGS).weights
        )


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(-1000, 1000, width=32), min_size=1, max_size=5),
    st.lists(st.integers(1, 10**6), min_size=1, max_size=6),
)
def test_the_mean_is_wrong_by_no_more_than_is_said(
    numbers: list[float], weights: list[int]
) -> None:
    """By N/(2^29 Σp), and float32's own rounding; equal parts of 2^-28 or more come back as they
    were."""
    models = [model(*(x + i for x in numbers)) for i in range(len(weights))]
    total = None
    for one, weight in zip(models, weights, strict=True):
        part = ModelSums.of(len(weights), one, float(weight))
        total = part if total is None else total.plus(part)
    assert total is not None
    scaled = [m.params.double() * p for m, p in zip(models, weights, strict=True)]
    exact = torch.stack(scaled).sum(0) / sum(weights)
    bound = len(weights) / 2**29 / sum(weights)
    error = (total.mean(models[0]).params.double() - exact).abs()
    assert bool((error <= bound + exact.abs() * 2**-24 + 1e-45).all())


def test_equal_models_stay_equal() -> None:
    one = model(0.25, -3.0, 1e-3, counter=7)
    total = (
        ModelSums.of(3, one, 5.0).plus(ModelSums.of(3, one, 7.0)).plus(ModelSums.of(3, one, 1.0))
    )
    assert torch.equal(total.mean(one).params[:2], one.params[:2])
    assert float((total.mean(one).params - one.params).abs().max()) < 2**-29
    assert total.mean(one).counters.tolist() == [7]
    assert total.clients == 3


def test_the_order_of_clients_does_not_matter() -> None:
    parts = [ModelSums.of(3, model(0.1 * i, 7.7), 1.0 + i) for i in range(3)]
    a, b, c = parts
    for other in (b.plus(c).plus(a), c.plus(a).plus(b)):
        assert same(a.plus(b).plus(c).mean(model(0, 0)), other.mean(model(0, 0)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e12, 2.0**33])
def test_numbers_without_room_are_refused(value: float) -> None:
    with pytest.raises(
        UserError, match=r"values of the model, times the client's weight, reach .* has room for"
    ) as no:
        ModelSums.of(3, model(1.0, value), 2.0)
    assert "\n" not in str(no.value)
    with pytest.raises(UserError, match=r"what goes with the model reach"):
        ModelSums.of(3, model(0.0), 1.0, torch.tensor([value]))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100), st.floats(0, 0.9999), st.booleans())
def test_what_has_room_never_wraps(parts: int, share: float, negative: bool) -> None:
    value = share * 2.0**34 / parts * (-1 if negative else 1)
    one = fixed(torch.tensor([value], dtype=torch.float64), parts, "numbers")
    assert float(real(one * parts)) == pytest.approx(parts * value, rel=1e-6, abs=parts * 2**-29)


def test_sums_that_cannot_be_of_models() -> None:
    one = ModelSums.of(2, model(1.0, 2.0), 1.0)
    for changes in ({"params": one.params.int()}, {"buffers": one.buffers[None]}, {"clients": 0}):
        with pytest.raises(
            UserError, match=r"a sum of models is not as it must be|must be of int64"
        ):
            replace(one, **changes)
    with pytest.raises(UserError, match="sums of different shape cannot be added up"):
        one.plus(ModelSums.of(2, model(1.0), 1.0))
    with pytest.raises(UserError, match="does not fit the network"):
        one.mean(model(1.0))
    with pytest.raises(UserError, match="a sum of vectors does not fit"):
        one.vector(torch.ones(2))
    with pytest.raises(UserError, match="weights of all clients add up to 0"):
        ModelSums.of(2, model(1.0), 0.0).mean(model(1.0))


@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_rules_that_need_single_models_are_refused(kind: type[Any], blobs: FederatedData) -> None:
    for changes in (
        {"combine": "median"},
        {"combine": "krum"},
        {"combine": "geometric-median"},
        {"clip_update": 1.0},
    ):
        method = kind(rounds=1, weighting="uniform", secure=True, faulty=0, **changes)
        with pytest.raises(
            UserError, match=r"(combine|clip_update).* needs single models, secure shows"
        ) as no:
            run(method, blobs, Tiny, **SETTINGS)
        assert "\n" not in str(no.value)


def test_equal_models_agree_with_the_plain_mean() -> None:
    models, weights = [model(0.5, 1.5), model(-2.0, 8.0)], [1.0, 3.0]
    parts = [ModelSums.of(2, m, p) for m, p in zip(models, weights, strict=True)]
    assert same(parts[0].plus(parts[1]).mean(models[0]), mean(models, weights))


def test_every_method_says_the_same_about_the_flag() -> None:
    assert all("secure" in {f.name for f in fields(kind)} for kind in SECURE)
    assert all(kind(secure=True).gives_sums and not kind().gives_sums for kind in SECURE)


def test_one_of_many_makes_a_sum_of_models_what_it_wants() -> None:
    """By its weight, or with an honest one, at which no check of weights could look."""
    others = [ModelSums.of(10, model(0.1 * k, -0.2), 100.0) for k in range(9)]
    honest = others[0]
    for one in others[1:]:
        honest = honest.plus(one)
    heavy = honest.plus(ModelSums.of(10, model(3.0, 4.0), 1e8)).mean(model(0.0, 0.0))
    assert heavy.params.tolist() == pytest.approx([3.0, 4.0], abs=1e-4)
    wanted = torch.tensor([3.0, 4.0]) * 1000 - real(honest.params)
    light = honest.plus(
        replace(ModelSums.of(10, model(0.0, 0.0), 100.0), params=fixed(wanted, 10, ""))
    )
    assert light.total == 1000
    assert light.mean(model(0.0, 0.0)).params.tolist() == pytest.approx([3.0, 4.0], abs=1e-6)
