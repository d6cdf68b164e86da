"""What a method's outer loop can do: order, sample, call, get, and what the ledger says about
it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.base.errors import UserError
from ekiden.core.engine.client import Client
from ekiden.core.engine.drive import told
from ekiden.core.engine.federation import Fed, in_order
from ekiden.core.engine.method import INITIAL, Method, Size, State, Traits, on_client
from ekiden.core.engine.transport import ClientMissing, Transfer
from ekiden.core.engine.wire import EVERYONE, SERVER, Ref
from ekiden.core.engine.worker import Job, Setup, Worker
from ekiden.core.training.weights import Weights, mean
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import SCAFFOLD, FedAvg, FedDC, FedDyn
from tests.core.engine.fakes import CLIENTS, Desk, federation, task, weights

M = 4 * (4 * 8 + 8 + 16 + 8 * 3 + 3) + 4 * 16 + 8
"""Bytes of one `Tiny`: parameters, running statistics, counter."""


def at_step(step: int, **kwargs: Any) -> Fed:
    fed = federation(**kwargs)[0]
    fed.begin(step)
    return fed


# Order and sampling.


def test_orders() -> None:
    fed, _, _ = federation()
    assert fed.order("given") == CLIENTS
    assert fed.order("reversed", 3) == ("d", "c", "b", "a")
    assert fed.order("c,a,d,b") == ("c", "a", "d", "b")


def test_a_random_order_is_drawn_anew_each_round_and_follows_the_seed() -> None:
    clients = [str(i) for i in range(8)]
    drawn = [
        [federation(clients=clients, seed=seed)[0].order("random", r) for r in range(6)]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1]
    assert len({*drawn[0], *drawn[2]}) == 12
    assert all(sorted(order) == clients for order in drawn[0] + drawn[2])
    fed = at_step(5, clients=clients)  # in whatever step it is asked for
    assert fed.order("random", 2) == drawn[0][2]


def test_every_order_is_as_likely() -> None:
    counts = dict.fromkeys(
        ((x, y, z) for x in "abc" for y in "abc" for z in "abc" if len({x, y, z}) == 3), 0
    )
    fed = federation(clients="abc")[0]
    for r in range(1200):
        counts[fed.order("random", r)] += 1  # type: ignore[index]
    assert min(counts.values()) > 140  # 200 ± 5 standard deviations of 12.9
    assert max(counts.values()) < 265


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("a,b,c", "name each of the 4 clients once: a,b,c,d"),
        ("a,b,c,c", "name each of the 4 clients once"),
        ("a,b,c,d,a", "name each of the 4 clients once"),
        ("a,b,c,e", "unknown client or order 'e'"),
        ("", "unknown client or order ''"),
        ("revesed", "did you mean 'reversed'"),
        ("a, b,c,d", "unknown client or order ' b'"),
    ],
)
def test_orders_that_are_none(order: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        in_order(order, CLIENTS)


def test_samples_depend_on_seed_and_step_alone() -> None:
    clients = [str(i) for i in range(20)]
    draws = {
        (s, t): at_step(t, clients=clients, seed=s).sample(5) for s in range(3) for t in range(5)
    }
    assert len(set(draws.values())) == 15
    fed = at_step(4, clients=clients, seed=2)
    fed.call(task, "3")
    assert fed.sample(5) == fed.sample(5) == draws[2, 4]
    for drawn in draws.values():
        assert len(set(drawn)) == 5
        assert list(drawn) == sorted(drawn, key=clients.index)
    assert fed.sample(20) == tuple(clients)


def test_samples_are_uniform() -> None:
    counts = dict.fromkeys(CLIENTS, 0)
    fed = federation()[0]
    for step in range(1000):
        fed.begin(step)
        for client in fed.sample(1):
            counts[client] += 1
    assert all(180 < n < 320 for n in counts.values())  # 250 ± 5 standard deviations of 13.7


@pytest.mark.parametrize("k", [0, -1, 5])
def test_samples_that_cannot_be(k: int) -> None:
    with pytest.raises(UserError, match=f"cannot sample {k} of 4 clients: choose 1 to 4"):
        federation()[0].sample(k)


def test_randomness_of_the_server_differs_by_purpose_and_step() -> None:
    def draw(step: int, purpose: str) -> float:
        return float(torch.rand((), generator=at_step(step).generator(purpose)))

    assert draw(1, "x") == draw(1, "x")
    assert len({draw(1, "x"), draw(2, "x"), draw(1, "y"), draw(2, "y")}) == 4


# What is counted.


def test_a_value_is_counted_where_it_crosses() -> None:
    ref = Ref[Weights]("a", "k")
    fed, desk, ledger = federation({ref: weights(10)})
    fed.begin(3)
    fed.call(task, "a", ref)
    assert ledger == []
    fed.call(task, "b", ref)
    fed.call(task, "c", ref)
    assert ledger == [Transfer(3, "a", to, "task", 52, value="k") for to in "bc"]
    assert fed.get(ref) is desk.values[ref]
    assert ledger[2:] == [Transfer(3, "a", SERVER, "get", 52, value="k")]


def test_what_everyone_has_is_free() -> None:
    fed, _, ledger = federation({INITIAL: weights(10)})
    fed.call(task, "a", INITIAL)
    fed.call(task, "b", [INITIAL, Ref(EVERYONE, "initial")])
    assert isinstance(fed.get(INITIAL), Weights)
    assert ledger == []


def test_what_the_server_holds_is_counted_and_instructions_are_not() -> None:
    fed, desk, ledger = federation({Ref("a", "k"): weights(2)})
    fed.call(task, "b", 3, 0.5, True, None, "text")
    assert ledger == []
    fed.call(task, "b", weights(10), 3, torch.zeros(3, dtype=torch.uint8))
    fed.call(task, "b", [Ref("a", "k"), weights(5)])
    assert ledger == [
        Transfer(0, SERVER, "b", "task", 52 + 3),
        Transfer(0, "a", "b", "task", 20, value="k"),
        Transfer(0, SERVER, "b", "task", 32),
    ]
    assert [(r.client, r.call, r.key) for r in desk.requests] == [
        ("b", i, f"0-{i}-task") for i in range(3)
    ]


def test_calls_are_numbered_per_client_and_step() -> None:
    fed, _, _ = federation()
    keys = [fed.call(task, client).key for client in ("a", "b", "a")]
    fed.begin(1)
    assert [*keys, fed.call(task, "a").key] == ["0-0-task", "0-0-task", "0-1-task", "1-0-task"]


def test_all_clients_are_asked_alike_or_each_with_its_own_value() -> None:
    fed, desk, _ = federation()
    asked = fed.call_all(task, 7) + fed.call_each(task, (1, 2, 3, 4), 7)
    assert [ref.owner for ref in asked] == [*CLIENTS, *CLIENTS]
    assert [r.args for r in desk.requests] == [(7,)] * 4 + [(n, 7) for n in (1, 2, 3, 4)]
    with pytest.raises(ValueError, match="zip"):
        fed.call_each(task, (1, 2))


def test_an_unknown_client_is_refused() -> None:
    fed, desk, ledger = federation()
    with pytest.raises(UserError, match="unknown client 'bb': did you mean 'b'"):
        fed.call(task, "bb", weights(1))
    assert (desk.requests, ledger) == ([], [])


# Who does not answer.


def test_get_goes_on_with_as_many_as_wanted() -> None:
    a, b, c = (Ref[Weights](name, "k") for name in "abc")
    values = {a: weights(1), c: weights(3)}
    fed, _, ledger = federation(dict(values))
    fed.begin(7)
    assert fed.get([a, b, c], at_least=2) == [values[a], values[c]]
    assert ledger == [
        Transfer(7, "a", SERVER, "get", 16, value="k"),
        Transfer(7, "b", SERVER, "get", 0, missing=True, value="k"),
        Transfer(7, "c", SERVER, "get", 24, value="k"),
    ]
    assert fed.get([b], at_least=0) == []
    assert fed.get(iter([a, c])) == [values[a], values[c]]
    for wanted, least in (([a, b, c], None), ([a, b, c], 3), ([b], 1)):
        with pytest.raises(ClientMissing, match="b did not answer: start them again"):
            fed.get(wanted, at_least=least)


def test_one_missing_value_is_in_the_ledger_too() -> None:
    fed, _, ledger = federation()
    with pytest.raises(ClientMissing, match="b did not answer: start them again"):
        fed.get(Ref("b", "k"))
    with pytest.raises(ClientMissing, match="b did not answer: start them again"):
        fed.call(task, "a", Ref("b", "k"))
    gone = Transfer(0, "b", SERVER, "get", 0, missing=True, value="k")
    assert ledger == [gone, replace(gone, target="a", task="task")]


# Sums.


@dataclass(frozen=True)
class Total:
    number: int

    def plus(self, other: "Total") -> "Total":
        return Total(self.number + other.number)


def part(client: Client, start: int, before: Total | None) -> Total:
    raise NotImplementedError


def test_a_running_sum_goes_from_client_to_client() -> None:
    handed = {Ref[Total](name, "2-0-part"): Total(n) for n, name in enumerate("abd")}
    fed, desk, ledger = federation(dict(handed))
    fed.begin(2)
    first = fed.sum(part, ["a"], 7)
    assert fed.sum(part, ["b", "d"], 7, plus=first) == Ref("d", "2-0-part")
    a, b, _ = handed
    assert [(r.client, r.args) for r in desk.requests] == [
        ("a", (7, None)),
        ("b", (7, a)),
        ("d", (7, b)),
    ]
    assert ledger == [Transfer(2, a, b, "part", 8, value="2-0-part") for a, b in ("ab", "bd")]


def test_the_server_adds_up_what_all_send() -> None:
    fed, desk, ledger = federation(
        {Ref(name, "0-0-part"): Total(10**n) for n, name in enumerate("abcd")}
    )
    assert fed.sum(part, CLIENTS, 7, at="server") == Total(1111)
    assert [(r.client, r.args) for r in desk.requests] == [(name, (7, None)) for name in CLIENTS]
    assert ledger == [Transfer(0, name, SERVER, "get", 8, value="0-0-part") for name in CLIENTS]


def test_a_sum_goes_on_without_those_who_are_away() -> None:
    values: dict[Ref[Any], Any] = {
        Ref(name, "0-0-part"): Total(10**n) for n, name in enumerate("abcd") if name != "b"
    }
    fed, _, ledger = federation(dict(values))
    assert fed.sum(part, CLIENTS, 7, at="server") == Total(1101)
    assert Transfer(0, "b", SERVER, "get", 0, missing=True, value="0-0-part") in ledger
    strict = Fed(CLIENTS, Desk(dict(values)), 0, ledger.append, skip=False)
    with pytest.raises(ClientMissing, match="b did not answer"):
        strict.sum(part, CLIENTS, 7, at="server")
    with pytest.raises(ClientMissing, match="a, b, c, d did not answer"):
        federation()[0].sum(part, CLIENTS, 7, at="server")
    with pytest.raises(ClientMissing, match="a did not answer"):
        federation()[0].sum(part, CLIENTS, 7)
    with pytest.raises(UserError, match="at least one client"):
        federation()[0].sum(part, [], 7)


# The same with real clients, in this process and in others.


@dataclass(frozen=True)
class Average(Method):
    """Rounds of training and averaging at the server, with those who answer."""

    rounds: int = 2
    at_least: int | None = None

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            models = fed.get(
                [fed.call(self.train, k, s.model) for k in fed.clients], at_least=self.at_least
            )
            s = s.next(model=mean(models))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        return client.fit(model, epochs=1)

    def steps(self, clients: int) -> int:
        return self.rounds

    def cost(self, clients: int, model: int) -> int:
        return (2 * self.rounds - 1) * clients * model


class Neighbours(Average):
    """Each client averages with its neighbours' values: lists of Refs, including its own."""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            mine = s.personal or (INITIAL,) * len(fed.clients)
            trained = [fed.call(self.train, k, m) for k, m in zip(fed.clients, mine, strict=True)]
            mixed = [
                fed.call(self.mix, k, [trained[i - 1], trained[i]])
                for i, k in enumerate(fed.clients)
            ]
            s = s.next(personal=tuple(mixed), model=None)
            yield s

    def start(self) -> State:
        return State(model=None)

    @on_client
    def mix(self, client: Client, models: list[Weights]) -> Weights:
        return mean(models)


class Unmarked(Average):
    """Asks clients for tasks that they do not have."""

    def train(self, client: Client, model: Weights) -> Weights:
        return model


class Stranger(Average):
    """Calls a client that does not exist."""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        fed.call(self.train, "client-44", s.model)
        yield s.next()


def go(method: Method, data: FederatedData, **kwargs: Any) -> Any:
    training, hardware = Training(lr=0.01, batch_size=32), Hardware(threads=1)
    return run(method, data, Tiny, training=training, hardware=hardware, **kwargs)


def missing(*absent: tuple[int, str]) -> Callable[[int, str], bool]:
    return lambda step, client: (step, client) in absent


def test_bytes_of_a_server_are_counted_both_ways(blobs: FederatedData) -> None:
    result = go(Average(), blobs)
    names = [c.name for c in blobs.clients]
    down = [Transfer(1, SERVER, k, "train", M) for k in names]
    first, second = (
        [Transfer(t, k, SERVER, "get", M, value=f"{t}-0-train") for k in names] for t in range(2)
    )
    assert list(result.ledger) == first + down + second
    assert result.bytes == Average().cost(4, M)
    assert [row["bytes"] for row in result.metrics] == [4 * M, 12 * M]


def test_bytes_between_neighbours_are_counted_once(blobs: FederatedData) -> None:
    result = go(Neighbours(), blobs)
    names = [c.name for c in blobs.clients]
    ring = [(names[i - 1], names[i]) for i in range(4)]
    assert list(result.ledger) == [
        Transfer(step, a, b, "mix", M, value=f"{step}-0-train")
        for step in range(2)
        for a, b in ring
    ]


@pytest.mark.parametrize("processes", [False, True])
def test_absent_clients_are_noted_and_left_out(blobs: FederatedData, processes: bool) -> None:
    away = missing((0, "client-1"), (1, "client-1"), (1, "client-3"))
    result = go(Average(at_least=2), blobs, absent=away, processes=processes)
    gone = [(row.step, row.source, row.bytes) for row in result.ledger if row.missing]
    assert gone == [(0, "client-1", 0), (1, "client-1", 0), (1, "client-3", 0)]
    came = [
        (row.step, row.source) for row in result.ledger if row.task == "get" and not row.missing
    ]
    assert came == [
        (0, "client-0"),
        (0, "client-2"),
        (0, "client-3"),
        (1, "client-0"),
        (1, "client-2"),
    ]
    assert result.metrics[0]["backward"] == sum(len(blobs.clients[i].train) for i in (0, 2, 3))


def test_too_few_clients_stop_the_run_and_it_goes_on_later(
    blobs: FederatedData, tmp_path: Any
) -> None:
    whole = go(Average(), blobs)
    with pytest.raises(ClientMissing, match="client-2 did not answer"):
        go(Average(), blobs, folder=tmp_path / "run", absent=missing((1, "client-2")))
    again = go(Average(), blobs, folder=tmp_path / "run")
    assert torch.equal(again.weights.params, whole.weights.params)
    assert again.ledger == whole.ledger
    assert again.metrics == whole.metrics


def test_a_missing_neighbour_stops_the_run(blobs: FederatedData) -> None:
    with pytest.raises(ClientMissing, match="client-2 did not answer"):
        go(Neighbours(), blobs, absent=missing((1, "client-2")))


@pytest.mark.parametrize("processes", [False, True])
def test_clients_do_only_what_is_marked(blobs: FederatedData, processes: bool) -> None:
    with pytest.raises(
        UserError, match="unmarked has no client task 'train': clients run only functions marked"
    ):
        go(Unmarked(), blobs, processes=processes)


def test_nobody_else_can_be_called(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="unknown client 'client-44': did you mean"):
        go(Stranger(), blobs)


@dataclass(frozen=True)
class Slices(Method):
    """Tasks that give, keep and are given views of larger tensors."""

    traits = Traits(private=Tensor)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        yield s

    @on_client
    def turn(self, client: Client, x: Tensor) -> Tensor:
        for tensor in (x, client.state):
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % 64 == 0
        client.state = client.state[1:]
        return x.T

    def steps(self, clients: int) -> int:
        return 1

    def cost(self, clients: int, model: Size) -> int:
        return 0


def test_what_tasks_give_keep_and_are_given_lies_in_memory_as_if_it_had_travelled(
    blobs: FederatedData,
) -> None:
    setup = Setup(Slices(), Tiny, blobs.dataset, hardware=Hardware(threads=1))
    worker = Worker(setup, {c.name: c for c in blobs.clients})
    flat = torch.arange(40.0)
    outcome = worker.execute(Job(0, 0, "client-0", "turn", (flat[1:13].view(3, 4).T,), flat[3:]))
    for tensor, wanted in ((outcome.value, flat[1:13].view(3, 4)), (outcome.private, flat[4:])):
        assert torch.equal(tensor, wanted)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0


def test_a_step_is_noted_in_numbers_of_clients_once_a_name() -> None:
    fed, _, _ = federation()
    fed.note("spread", 1 / 3)
    fed.note("length", {CLIENTS[1]: 123456789.0, CLIENTS[0]: float("nan")})
    assert list(fed.notes.items()) == [
        ("spread", 0.333333),
        ("length", {CLIENTS[0]: None, CLIENTS[1]: 123457000.0}),
    ]
    assert (
        told(fed.notes)
        == f"spread 0.3333; length not finite ({CLIENTS[0]}), 1.235e+08 ({CLIENTS[1]})"
    )
    with pytest.raises(ValueError, match="once"):
        fed.note("spread", 1)
    with pytest.raises(ValueError, match="which are not clients"):
        fed.note("other", {"nobody": 1.0})
    fed.begin(1)
    assert fed.notes == {}


def test_a_line_tells_the_largest_numbers() -> None:
    assert (
        told({"far": {f"c{i}": float(i) for i in range(5)}})
        == "far 4 (c4), 3 (c3), 2 (c2) and 2 smaller"
    )
    assert told({"far": {}}) == "far none"


def test_values_of_a_mapping_come_under_their_keys() -> None:
    there: dict[Ref[Any], Any] = {Ref(CLIENTS[0], "0-0-t"): 1.0, Ref(CLIENTS[2], "0-0-t"): 3.0}
    fed, _, ledger = federation(there)
    asked = {name: Ref[float](name, "0-0-t") for name in CLIENTS[:3]}
    assert fed.get(asked, at_least=2) == {CLIENTS[0]: 1.0, CLIENTS[2]: 3.0}
    assert [row.missing for row in ledger] == [False, True, False]
    with pytest.raises(ClientMissing, match=CLIENTS[1]):
        fed.get(asked)


@pytest.mark.parametrize("method", [FedAvg, SCAFFOLD, FedDC, FedDyn])
def test_a_mean_needs_one_reply_at_a_time(
    method: type[FedAvg | SCAFFOLD | FedDC | FedDyn],
    blobs: FederatedData,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, most, fit = list[ReferenceType[Tensor]](), list[int](), Client.fit

    def watched(client: Client, *given: Any, **more: Any) -> Weights:
        most.append(sum(reply() is not None for reply in alive))
        trained = fit(client, *given, **more)
        alive.append(ref(trained.params))
        return trained

    monkeypatch.setattr(Client, "fit", watched)
    fast: dict[str, Any] = {"training": Training(batch_size=64), "hardware": Hardware(threads=1)}
    found = run(method(rounds=1, epochs=1), blobs, Tiny, **fast)
    assert max(most) <= 1
    assert len(most) == len(found.clients)


def test_a_value_of_each_is_dropped_when_the_next_is_asked_for() -> None:
    dropped: list[Ref[Any]] = []
    given: dict[Ref[Any], Any] = {
        Ref(k, "0-0-task"): torch.tensor(i) for i, k in enumerate(CLIENTS) if k != "b"
    }
    fed, desk, ledger = federation(given)
    desk.drop = dropped.append  # type: ignore[assignment,method-assign]
    asked: list[Ref[Tensor]] = [Ref(k, "0-0-task") for k in CLIENTS]
    values = fed.each(asked, at_least=3)
    assert int(next(values)) == 0
    assert dropped == []
    assert [int(value) for value in values] == [2, 3], (
        "in their order, without the client that is away"
    )
    assert dropped == list(given)
    assert [(row.source, row.missing) for row in ledger] == [
        ("a", False),
        ("b", True),
        ("c", False),
        ("d", False),
    ]
    with pytest.raises(ClientMissing, match="b did not answer"):
        list(fed.each(asked))
