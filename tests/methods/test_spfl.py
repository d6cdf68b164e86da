"""SPFL: exact numbers of its chains, what moves, and the cases in which it is FedAvg or FedSeq."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import FederatedData, Training, UserError, run
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Method, Size
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import (
    MOON,
    SCAFFOLD,
    SPFL,
    FedAvg,
    FedDC,
    FedDisco,
    FedDyn,
    FedNova,
    FedProx,
    FedSeq,
)
from ekiden.methods.rounds.spfl import Chains, Order, host_named
from tests.methods.rounds import Table, Toy, play, quadratic, toy_q, values, weights
from tests.methods.test_fedavg import SETTINGS, same

PLAIN: dict[str, Any] = {"align_previous": 0.0, "align_global": 0.0}


def rounds_of(method: SPFL, toys: list[Any]) -> list[float]:
    """The global model after each round."""
    length = method.shape(len(toys))[1]
    return values(s for s in play(method, toys) if s.step % length == 0)


@pytest.mark.parametrize(
    ("epochs", "first", "second", "fixed", "alone"),
    [
        (1, -0.10, -0.172, -5 / 14, (-3 / 7, -2 / 7)),
        pytest.param(
            2, -0.17, -0.258128, -0.17 / 0.4816, (-0.49502, -0.21096), marks=pytest.mark.slow
        ),
    ],
)
def test_two_chains(
    epochs: int, first: float, second: float, fixed: float, alone: tuple[float, float]
) -> None:
    seen = rounds_of(SPFL(rounds=200, epochs=epochs, **PLAIN), toy_q())
    assert seen[:2] == pytest.approx([first, second], abs=1e-12)
    assert seen[-1] == pytest.approx(fixed, abs=1e-9)
    one = SPFL(rounds=200, epochs=epochs, chains=1, chain_order="fixed", **PLAIN)
    assert rounds_of(one, toy_q())[-1] == pytest.approx(alone[0], abs=1e-5)
    assert rounds_of(one, toy_q()[::-1])[-1] == pytest.approx(alone[1], abs=1e-5)


@pytest.mark.parametrize(
    ("epochs", "start", "ends"),
    [
        (1, 0.0, (-0.12, -0.08)),
        (1, -0.1, (-0.192, -0.152)),
        (2, 0.0, (-0.2384, -0.1016)),
        (2, -0.17, (-0.326528, -0.189728)),
    ],
)
def test_ends_of_the_chains(epochs: int, start: float, ends: tuple[float, float]) -> None:
    one = SPFL(rounds=1, epochs=epochs, chains=1, chain_order="fixed", **PLAIN)
    seen = [values(play(one, toys, start))[-1] for toys in (toy_q(), toy_q()[::-1])]
    assert seen == pytest.approx(ends, abs=1e-12)


def test_three_clients_and_their_orders() -> None:
    def toys() -> list[Any]:
        return [quadratic(a, b) for a, b in ((1, 1), (2, -1), (1, 3))]

    settings: dict[str, Any] = {"rounds": 1, "epochs": 1, **PLAIN}
    one = SPFL(chains=1, chain_order="fixed", **settings)
    shifts = [rounds_of(one, toys()[i:] + toys()[:i])[0] for i in range(3)]
    assert shifts == pytest.approx([0.192, 0.208, 0.096], abs=1e-12)
    assert rounds_of(SPFL(chain_order="fixed", **settings), toys()) == pytest.approx(
        [0.496 / 3], abs=1e-12
    )
    every = [rounds_of(one, list(order))[0] for order in itertools.permutations(toys())]
    assert sum(every) / 6 == pytest.approx(0.162, abs=1e-12)
    assert values(play(FedAvg(rounds=1, epochs=1), toys())) == pytest.approx([0.2 / 3], abs=1e-12)


def test_one_client_is_local_descent() -> None:
    assert rounds_of(SPFL(rounds=3, epochs=2, **PLAIN), toy_q()[:1]) == pytest.approx(
        [1 - 0.9**k for k in (2, 4, 6)]
    )


def chains(method: SPFL, clients: int, step: int = 0) -> tuple[tuple[str, ...], ...]:
    fed = Fed(
        [f"c{i}" for i in range(clients)], Table(method, {}, weights(0.0)), 1, lambda row: None
    )
    fed.begin(step)
    return method.sequences(fed)


def test_latin_chains_use_every_client_once_at_every_position() -> None:
    drawn = [chains(SPFL(), 6, step) for step in (0, 6, 12)]
    for sequences in drawn:
        assert all(len(set(sequence)) == 6 for sequence in sequences)
        assert all(len({sequence[k] for sequence in sequences}) == 6 for k in range(6))
    assert len(set(drawn)) == 3, "a fresh order each round"


@pytest.mark.parametrize("order", ["latin", "random", "fixed"])
def test_chains_of_some_clients(order: Order) -> None:
    sequences = chains(SPFL(chain_order=order, chains=2, participation=0.5), 8)
    assert len(sequences) == 2
    assert all(len(set(sequence)) == 4 for sequence in sequences)
    assert len({client for sequence in sequences for client in sequence}) == 4
    assert sequences[0] != sequences[1]


def test_transfers() -> None:
    assert SPFL(rounds=1).cost(10, 1) == 120
    assert SPFL(rounds=1, **PLAIN).cost(10, 1) == 110
    assert SPFL(rounds=1, align_global=0.0).cost(10, 1) == 110, "w^r is for the global term only"
    assert (
        4 * 15 * 120 * 11_689_512
        == SPFL(rounds=15).cost(10, 4 * 11_689_512)
        == round(4 * 21.0411216e9)
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"chains": 2, "length": 2},
        {"chain_order": "random", "chains": 1},
        {"participation": 0.5},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {},
                PLAIN,
                {"chains": 2},
                {"length": 2},
                {"chain_order": "random"},
                {"align_global": 0.0, "chain_order": "fixed", "chains": 1},
            )
        ),
    ],
)
def test_moves_what_it_declares_and_resumes(
    changes: dict[str, Any], blobs: FederatedData, tmp_path: Path
) -> None:
    method = SPFL(rounds=2, epochs=1, **changes)
    whole = run(method, blobs, Tiny, **SETTINGS)
    assert whole.weights is not None
    assert whole.bytes == method.cost(4, wire.size(whole.weights))
    run(method, blobs, Tiny, folder=tmp_path, stop_after=method.steps(4) // 2 + 1, **SETTINGS)
    assert same(run(method, blobs, Tiny, folder=tmp_path, **SETTINGS).weights, whole.weights)


def test_chains_of_one_client_are_uniform_fedavg_bit_for_bit(blobs: FederatedData) -> None:
    a = run(
        SPFL(rounds=3, epochs=2, length=1, chain_order="fixed", **PLAIN), blobs, Tiny, **SETTINGS
    )
    b = run(FedAvg(rounds=3, epochs=2, weighting="uniform"), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)


def test_the_order_of_such_chains_is_only_that_of_a_sum(blobs: FederatedData) -> None:
    sgd = SETTINGS | {"training": Training(optimizer="sgd", lr=0.05, batch_size=16)}
    a = run(
        SPFL(rounds=3, epochs=2, length=1, participation=0.5, **PLAIN), blobs, Tiny, **sgd
    ).weights
    b = run(
        FedAvg(rounds=3, epochs=2, participation=0.5, weighting="uniform"), blobs, Tiny, **sgd
    ).weights
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-4, atol=1e-5)


def test_one_chain_is_fedseq_bit_for_bit(blobs: FederatedData) -> None:
    a = run(
        SPFL(rounds=2, epochs=2, chains=1, chain_order="fixed", **PLAIN), blobs, Tiny, **SETTINGS
    )
    b = run(FedSeq(rounds=2, epochs=2), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)


def test_alignment_changes_the_model_and_counts_its_passes(blobs: FederatedData) -> None:
    plain, glam = (
        run(SPFL(rounds=1, epochs=2, **changes), blobs, Tiny, **SETTINGS) for changes in (PLAIN, {})
    )
    assert not same(plain.weights, glam.weights)
    assert glam.metrics[-1]["forward"] == 2 * glam.metrics[-1]["backward"], (
        "two teachers answer once for two epochs"
    )
    assert (
        plain.metrics[-1]["forward"]
        == plain.metrics[-1]["backward"]
        == glam.metrics[-1]["backward"]
    )


def test_the_model_changes_at_the_end_of_a_round_only() -> None:
    seen = values(play(SPFL(rounds=2, epochs=1, **PLAIN), toy_q()))
    assert seen == pytest.approx([-0.10, -0.10, -0.172], abs=1e-12), (
        "nothing before the first round ends"
    )
    states = list(play(SPFL(rounds=1, epochs=1, **PLAIN), toy_q()))
    assert [len(s.ends) for s in states if isinstance(s, Chains)] == [2, 0]


def test_random_chains_are_of_all_clients() -> None:
    with pytest.raises(UserError, match="chain_order='random' makes chains of all"):
        SPFL(chain_order="random", length=2)


def test_refuses_more_chains_than_clients(blobs: FederatedData) -> None:
    for changes in ({"chains": 5}, {"length": 3, "participation": 0.5}):
        with pytest.raises(UserError, match=next(iter(changes))):
            run(SPFL(**changes), blobs, Tiny, **SETTINGS)


PLAIN_SGD: dict[str, Any] = {"align_previous": 0.0, "align_global": 0.0}
SGD = SETTINGS | {"training": Training(optimizer="sgd", lr=0.05, momentum=0.5, batch_size=16)}
ALL: list[tuple[str, Method]] = [
    ("fedavg", FedAvg(weighting="uniform")),
    ("fedprox:mu=0.3", FedProx(mu=0.3, weighting="uniform")),
    ("scaffold", SCAFFOLD()),
    ("fednova", FedNova(weighting="uniform")),
    ("feddyn:alpha=0.3", FedDyn(alpha=0.3)),
    ("feddc:alpha=0.1", FedDC(alpha=0.1)),
    ("moon:mu=2,temperature=0.7", MOON(mu=2.0, temperature=0.7, weighting="uniform")),
    ("feddisco:a=0.4,b=0.2,discrepancy=l2", FedDisco(a=0.4, b=0.2, discrepancy="l2")),
]
every_host = pytest.mark.parametrize(("host", "alone"), ALL, ids=[host for host, _ in ALL])
some_hosts = pytest.mark.parametrize(
    ("host", "alone"),
    [
        pytest.param(*one, marks=[] if number % 2 else pytest.mark.slow, id=one[0])
        for number, one in enumerate(ALL)
    ],
)
"""Every second one; all are hosts in `test_moves_what_it_declares_and_resumes_over_each_host`."""
SIZE = Size.of(Network(Tiny()), (4,))

SLOPES: tuple[Callable[[float], float], ...] = (lambda w: w - 1, lambda w: 2 * (w + 1))
"""Of the two clients of `toy_q`."""


@some_hosts
def test_chains_of_one_client_are_the_host(host: str, alone: Method, blobs: FederatedData) -> None:
    a = run(
        SPFL(host=host, rounds=3, epochs=2, length=1, chain_order="fixed", **PLAIN_SGD),
        blobs,
        Tiny,
        **SGD,
    )
    short: dict[str, Any] = {"rounds": 3, "epochs": 2}
    b = run(replace(alone, **short), blobs, Tiny, **SGD)
    assert a.weights is not None
    assert b.weights is not None
    torch.testing.assert_close(a.weights.params, b.weights.params, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(a.weights.buffers, b.weights.buffers, rtol=1e-4, atol=1e-6)
    assert [row["forward"] for row in a.metrics] == [row["forward"] for row in b.metrics]


@some_hosts
def test_hosts_differ_from_fedavg(host: str, alone: Method, blobs: FederatedData) -> None:
    method = SPFL(host=host, rounds=2, epochs=2, length=2, chain_order="fixed", **PLAIN_SGD)
    plain = run(replace(method, host="fedavg"), blobs, Tiny, **SGD)
    same_as_fedavg = same(run(method, blobs, Tiny, **SGD).weights, plain.weights)
    assert same_as_fedavg == (host == "fedavg")


@pytest.mark.parametrize("host", ["fednova", "feddisco"])
def test_full_chains_know_no_weights(host: str, blobs: FederatedData) -> None:
    a, b = (
        run(SPFL(host=h, rounds=2, epochs=1, **PLAIN_SGD), blobs, Tiny, **SGD).weights
        for h in (host, "fedavg")
    )
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-4, atol=1e-6)


@every_host
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(PLAIN_SGD, marks=pytest.mark.slow),
        {"chains": 3, "length": 2, "align_global": 0.0, "participation": 0.75},
    ],
)
def test_moves_what_it_declares_and_resumes_over_each_host(
    host: str, alone: Method, changes: dict[str, Any], blobs: FederatedData, tmp_path: Path
) -> None:
    method = SPFL(host=host, rounds=2, epochs=1, **changes)
    whole = run(method, blobs, Tiny, **SGD)
    assert isinstance(whole.state, Chains)
    assert whole.bytes == method.moved(whole.state, 4, SIZE) <= method.cost(4, SIZE)
    run(method, blobs, Tiny, folder=tmp_path, stop_after=method.steps(4) // 2 + 1, **SGD)
    assert same(run(method, blobs, Tiny, folder=tmp_path, **SGD).weights, whole.weights)


def test_same_bits_in_processes(blobs: FederatedData) -> None:
    method = SPFL(host="feddc", rounds=2, epochs=1, length=2)
    here, there = (run(method, blobs, Tiny, processes=p, **SGD) for p in (False, True))
    assert same(here.weights, there.weights)
    assert here.ledger == there.ledger


def test_one_chain_is_sequential_learning_with_the_hosts_loss() -> None:
    """FedDyn without memory and anchored at the received model: a proximal term at every hop."""
    method = SPFL(
        host="feddyn:alpha=0.5", rounds=1, epochs=3, chains=1, chain_order="fixed", **PLAIN_SGD
    )
    w = 0.0
    for slope in SLOPES:
        anchor = w
        for _ in range(3):
            w -= 0.1 * (slope(w) + 0.5 * (w - anchor))
    assert values(play(method, toy_q()))[-1] == pytest.approx(w, abs=1e-12)
    anchored = SPFL(
        host="fedprox:mu=0.5", rounds=1, epochs=3, chains=1, chain_order="fixed", **PLAIN_SGD
    )
    w = 0.0
    for slope in SLOPES:
        for _ in range(3):
            w -= 0.1 * (slope(w) + 0.5 * w)
    assert values(play(anchored, toy_q()))[-1] == pytest.approx(w, abs=1e-12)


def test_one_chain_over_fedavg_is_fedseq(blobs: FederatedData) -> None:
    a = run(
        SPFL(rounds=2, epochs=2, chains=1, chain_order="fixed", **PLAIN_SGD),
        blobs,
        Tiny,
        **SETTINGS,
    )
    assert same(a.weights, run(FedSeq(rounds=2, epochs=2), blobs, Tiny, **SETTINGS).weights)


CHAINS = ((0, 1), (1, 0))


def rounds_over(host: str, n: tuple[int, int] = (1, 1)) -> list[Chains]:
    """States after two rounds with the chains (1,2) and (2,1), K = 2, η = 0.1."""
    toys = toy_q()
    for toy, samples in zip(toys, n, strict=True):
        toy.n = samples
    method = SPFL(host=host, rounds=2, epochs=2, chain_order="fixed", **PLAIN_SGD)
    return [s for s in play(method, toys) if isinstance(s, Chains) and not s.ends]


def test_scaffold_in_two_rounds() -> None:
    w, c, own = 0.0, 0.0, [0.0, 0.0]
    for s in rounds_over("scaffold"):
        q: list[list[float]] = [[], []]
        ends = []
        for chain in CHAINS:
            at = w
            for i in chain:
                begin = at
                for _ in range(2):
                    at -= 0.1 * (SLOPES[i](at) + c - own[i])
                q[i].append((begin - at) / (2 * 0.1))
            ends.append(at)
        new = [own[i] - c + sum(q[i]) / 2 for i in (0, 1)]
        c, own, w = c + sum(n - o for n, o in zip(new, own, strict=True)) / 2, new, sum(ends) / 2
        assert values(iter([s])) == pytest.approx([w], abs=1e-12)
        assert float(s.memory[0]) == pytest.approx(c, abs=1e-9)
        assert c == pytest.approx(sum(own) / 2), "the server's is the mean of the clients'"


@pytest.mark.parametrize("anchor", ["received", "global"])
def test_feddyn_in_two_rounds(anchor: str) -> None:
    alpha, cloud, h, own = 0.5, 0.0, 0.0, [0.0, 0.0]
    for s in rounds_over(f"feddyn:alpha=0.5,anchor={anchor}"):
        moves: list[list[float]] = [[], []]
        ends = []
        for chain in CHAINS:
            at = cloud
            for i in chain:
                begin = at
                centre = begin if anchor == "received" else cloud
                for _ in range(2):
                    at -= 0.1 * (SLOPES[i](at) - own[i] + alpha * (at - centre))
                moves[i].append(at - begin)
            ends.append(at)
        own = [own[i] - alpha * sum(moves[i]) / 2 for i in (0, 1)]
        middle = sum(ends) / 2
        h -= alpha * (middle - cloud)
        cloud = middle - h / alpha
        assert values(iter([s])) == pytest.approx([middle], abs=1e-12)
        assert float(s.cloud.params) == pytest.approx(cloud, abs=1e-12)  # type: ignore[union-attr]


@pytest.mark.parametrize("n", [(1, 1), (1, 3)])
@pytest.mark.parametrize("anchor", ["received", "global"])
def test_feddc_in_two_rounds(anchor: str, n: tuple[int, int]) -> None:
    alpha, cloud, g = 0.3, 0.0, 0.0
    h, own, omega = [0.0, 0.0], [0.0, 0.0], [n[i] / (sum(n) / 2) for i in (0, 1)]
    for s in rounds_over(f"feddc:alpha=0.3,anchor={anchor}", n):
        moves: list[list[float]] = [[], []]
        ends = []
        for chain in CHAINS:
            at = cloud
            for i in chain:
                begin = at
                centre = begin if anchor == "received" else cloud
                for _ in range(2):
                    pull = alpha / omega[i] * (at + h[i] - centre)
                    at -= 0.1 * (SLOPES[i](at) + pull + g / omega[i] - own[i])
                moves[i].append(at - begin)
            ends.append(at)
        new = [own[i] - g / omega[i] - sum(moves[i]) / 2 / (2 * 0.1) for i in (0, 1)]
        g += sum(omega[i] * (new[i] - own[i]) for i in (0, 1)) / 2
        h, own = [h[i] + sum(moves[i]) / 2 for i in (0, 1)], new
        middle = sum(ends) / 2
        cloud = middle + sum(h) / 2
        assert values(iter([s])) == pytest.approx([middle], abs=1e-9)
        assert float(s.cloud.params) == pytest.approx(cloud, abs=1e-9)  # type: ignore[union-attr]
        assert s.sizes == {"client-0": n[0], "client-1": n[1]}


def test_scaffold_takes_a_chain_nearer_to_the_optimum() -> None:
    def far(host: str) -> float:
        toys = [quadratic(a, b) for a, b in ((1, 1), (2, -1), (1, 3))]
        return abs(values(play(SPFL(host=host, rounds=60, epochs=4, **PLAIN_SGD), toys))[-1] - 0.5)

    assert far("scaffold") < far("fedavg") / 3


def test_fednova_divides_by_the_steps_along_a_chain() -> None:
    toys: list[Toy] = [quadratic(1, 1, speed=3), quadratic(2, -1), quadratic(1, 2)]
    method = SPFL(
        host="fednova", rounds=1, epochs=1, chains=2, length=2, chain_order="fixed", **PLAIN_SGD
    )
    first, second = 0.0, 0.0  # chains (1,2) and (2,3) of 3 + 1 and 1 + 1 steps
    for _ in range(3):
        first -= 0.1 * (first - 1)
    first -= 0.1 * 2 * (first + 1)
    second -= 0.1 * 2 * (second + 1)
    second -= 0.1 * (second - 2)
    assert values(play(method, toys))[-1] == pytest.approx(
        3 * (first / 4 + second / 2) / 2, abs=1e-12
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fedsgd", "unknown host 'fedsgd'.*fedavg, feddc"),
        ("fedprox:nu=1", "unknown setting of host fedprox 'nu'.*mu"),
        ("fedprox:mu=much", "mu must be a number, not 'much'"),
        ("fedprox:mu=-1", "mu"),
        ("fedprox:mu=nan", "mu"),
        ("feddyn:anchor=there", "unknown value of host anchor 'there'.*global, received"),
        ("fedavg:mu=1", "unknown setting of host fedavg 'mu'"),
    ],
)
def test_says_what_is_wrong_with_a_host(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        SPFL(host=text)
    assert host_named("moon:temperature=0.25") == host_named("moon:mu=5,temperature=0.25")


def test_own_model_of_the_round_before_is_another_alignment(blobs: FederatedData) -> None:
    first, other = (
        run(SPFL(rounds=2, epochs=1, previous=p, align_global=0.0), blobs, Tiny, **SETTINGS)
        for p in ("received", "own")
    )
    assert not same(first.weights, other.weights)
    assert other.metrics[3]["forward"] == other.metrics[3]["backward"], (
        "no earlier model in the first round"
    )
    assert first.bytes == other.bytes


@some_hosts
def test_a_client_missing_at_the_end_of_a_chain_costs_its_chain_only(
    host: str, alone: Method, blobs: FederatedData
) -> None:
    name = blobs.clients[1].name
    method = SPFL(host=host, rounds=2, epochs=1, length=1, chain_order="fixed", **PLAIN_SGD)
    missing: dict[str, Any] = SGD | {"absent": lambda step, client: step == 1 and client == name}
    a = run(method, blobs, Tiny, **missing)
    short: dict[str, Any] = {"rounds": 2, "epochs": 1}
    b = run(replace(alone, **short), blobs, Tiny, **missing)
    assert a.weights is not None
    assert b.weights is not None
    torch.testing.assert_close(a.weights.params, b.weights.params, rtol=1e-4, atol=1e-6)
    assert any(row.missing and row.source == name for row in a.ledger)


def test_equal_chains_count_each() -> None:
    method = SPFL(rounds=1, epochs=1, chain_order="random", chains=2, **PLAIN_SGD)
    ends = {-0.12, -0.08, -0.1}  # both chains (1,2), both (2,1), one of each
    seen = {round(values(play(method, toy_q(), seed=seed))[-1], 9) for seed in range(12)}
    assert seen == ends


@pytest.mark.parametrize("host", ["fednova", "feddisco"])
def test_who_is_gone_when_a_round_closes_counts_as_those_of_its_chain(
    host: str, blobs: FederatedData
) -> None:
    """Chains (0, 1) and (1, 2) of equal clients; the first trains and is away at the last hop."""
    equal = replace(
        blobs, clients=tuple(replace(blobs.clients[0], name=f"client-{i}") for i in range(3))
    )
    a, b = (
        run(
            SPFL(host=h, rounds=1, epochs=1, chains=2, length=2, chain_order="fixed", **PLAIN_SGD),
            equal,
            Tiny,
            absent=lambda step, client: (step, client) == (1, "client-0"),
            **SGD,
        ).weights
        for h in (host, "fedavg")
    )
    assert a is not None
    assert b is not None
    torch.testing.assert_close(a.params, b.params, rtol=1e-4, atol=1e-6)
