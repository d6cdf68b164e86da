"""UA-PDFL: exact divergences, branches and penalties, and its ablation switches."""

from math import exp, inf, log
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.base.settings import batches
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Size, State
from ekiden.core.models import catalogue
from ekiden.core.tasks import Classification
from ekiden.core.training.fit import TaskLoss
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import UAPDFL, DFedAvgM, FedPer
from ekiden.methods.gossip.ua_pdfl import (
    Branches,
    Choice,
    Divergence,
    Heard,
    HeldNear,
    Units,
    auxiliary,
    divergence,
)
from tests.methods.toys import Silo, Table, rounds, weights

UNITS = torch.tensor([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8]], dtype=torch.float64)
AUX = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
SIZES = (10, 20, 30)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("jeffreys", (0.0279807894, 1.3462349433, 1.2856056358)),
        ("js", (0.0069588563, 0.2899875477, 0.2801649971)),
    ],
)
def test_divergences(kind: Divergence, expected: tuple[float, ...]) -> None:
    for (i, j), d in zip([(0, 1), (0, 2), (1, 2)], expected, strict=True):
        assert divergence(UNITS[i], UNITS[j], kind) == pytest.approx(d, abs=1e-9)
        assert divergence(UNITS[j], UNITS[i], kind) == pytest.approx(d, abs=1e-9)
        assert divergence(UNITS[i], UNITS[i], kind) == 0


def test_no_mass_is_infinitely_far_and_never_nan() -> None:
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    assert divergence(p, q, "jeffreys") == inf
    assert divergence(p, q, "js") == pytest.approx(log(2))
    assert divergence(p, p, "jeffreys") == 0


def test_only_jensen_shannon_keeps_unlike_clients_below_the_papers_toy_value() -> None:
    """Two confident clients: each gives the other's class one part in a million."""
    rest = 1e-6
    p, q = (
        torch.tensor(v, dtype=torch.float64)
        for v in ([1 - 2 * rest, rest, rest], [rest, 1 - 2 * rest, rest])
    )
    assert divergence(p, q, "jeffreys") == pytest.approx(
        (1 - 3 * rest) * log((1 - 2 * rest) / rest)
    )
    assert divergence(p, q, "jeffreys") == pytest.approx(13.8, abs=0.02)
    assert 0.61 < divergence(p, q, "js") < log(2)


def still(n: int, heard: Heard | None = None) -> Silo:
    """A client with one shared and one personal parameter that training does not change."""
    silo = Silo(2, lambda w: 0 * w.sum(), heads=1, n=n)
    silo.state = heard
    return silo


def units(i: int) -> Units:
    return Units(UNITS[i], AUX[i], SIZES[i])


def compared(method: UAPDFL, i: int, peers: list[int]) -> tuple[Choice, Heard]:
    silo = still(SIZES[i])
    choice = method.compare(cast(Client, silo), units(i), [units(j) for j in peers])
    return choice, silo.state


def test_one_near_and_one_far_peer() -> None:
    choice, heard = compared(UAPDFL(threshold=0.1), 0, [1, 2])
    assert choice == Choice([True, False], -1)
    torch.testing.assert_close(heard.aux, torch.tensor([2 / 3, 2 / 3]))
    assert heard.n == [20, 30]


def test_two_far_peers() -> None:
    assert compared(UAPDFL(threshold=0.1), 2, [0, 1])[0] == Choice([False, False], -1)


def test_all_near_takes_one_over() -> None:
    assert compared(UAPDFL(threshold=0.1), 0, [1])[0] == Choice([True], 0)
    assert compared(UAPDFL(threshold=0.1, dropout=False), 0, [1])[0] == Choice([True], -1)
    assert compared(UAPDFL(threshold=2.0), 0, [1, 2])[0].adopt in (0, 1)


def test_the_threshold_itself_is_near_for_a_whole_model_but_not_for_a_head() -> None:
    same = [Units(UNITS[0], AUX[0], 10)]
    client = cast(Client, still(10))
    assert UAPDFL(threshold=0.0).compare(client, units(0), same) == Choice([False], 0)


def combined(i: int, peers: list[int], similar: tuple[bool, ...]) -> list[float]:
    models = [weights(1.0, 10.0), weights(2.0, 20.0), weights(3.0, 30.0)]
    client = cast(Client, still(SIZES[i], Heard(AUX[0], [SIZES[j] for j in peers])))
    method = UAPDFL(epochs=1, mu=0.0)
    bases = [method.base(client, models[j]) for j in peers]
    heads = [method.head(client, models[j]) for j, s in zip(peers, similar, strict=True) if s]
    return method.combine(client, models[i], bases, heads, similar, 0).params.tolist()


def test_averages_extractors_of_all_and_heads_of_those_near() -> None:
    assert combined(0, [1, 2], (True, False)) == pytest.approx([140 / 60, 500 / 30])
    assert combined(2, [0, 1], (False, False)) == pytest.approx([140 / 60, 30])


def test_takes_over_the_whole_model() -> None:
    method = UAPDFL(epochs=1, mu=0.0)
    assert method.adopt(cast(Client, still(10)), weights(2.0, 20.0), 0).params.tolist() == [2, 20]


def test_penalty_and_its_gradient() -> None:
    aux, target = AUX[0].clone().requires_grad_(), torch.tensor([2 / 3, 2 / 3])
    penalty = auxiliary(aux, target, average=False)
    penalty.backward()  # type: ignore[no-untyped-call]
    assert float(penalty.detach()) == pytest.approx(5 / 9)
    torch.testing.assert_close(aux.grad, torch.tensor([2 / 3, -4 / 3]))
    assert float(auxiliary(AUX[0], target, average=True)) == pytest.approx(5 / 18)


class Probed:
    """Stands for a client whose extractor answers `aux` to the unit input."""

    loss = TaskLoss(Classification())

    def __init__(self, aux: torch.Tensor) -> None:
        self.aux = aux

    def probe(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.aux[None], torch.zeros(1, 2)


@pytest.mark.parametrize(("average", "penalty"), [(False, 5 / 9), (True, 5 / 18)])
def test_the_penalty_weighs_mu(average: bool, penalty: float) -> None:
    aux, x = AUX[0].clone().requires_grad_(), torch.tensor([[0.3, -0.2]])
    held = HeldNear(
        cast(Client, Probed(aux)), torch.ones(1, 2), torch.tensor([2 / 3, 2 / 3]), 0.3, average
    )
    loss = held(lambda x: x, x, torch.tensor([0]))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == pytest.approx(log(1 + exp(-0.5)) + 0.3 * penalty)
    torch.testing.assert_close(
        aux.grad, 0.3 * torch.tensor([2 / 3, -4 / 3]) / (2 if average else 1)
    )


def test_the_pass_of_the_unit_input_counts(blobs: FederatedData) -> None:
    settled: dict[str, Any] = {"rounds": 2, "epochs": 1, "peers": 2}
    held, free = (
        run(UAPDFL(mu=mu, **settled), blobs, Tiny, **settings()).metrics[-1] for mu in (0.5, 0.0)
    )
    steps = 2 * sum(batches(len(c.train), 16) for c in blobs.clients)
    assert [held[kind] - free[kind] for kind in ("forward", "backward")] == [steps, steps], (
        "one a mini-batch"
    )


TARGETS = ((1.0, 2.0), (-2.0, 1.0), (4.0, 0.0), (3.0, -5.0))


def silos() -> list[Silo]:
    def pulled(target: Tensor) -> Silo:
        return Silo(2, lambda w: 0.5 * (w - target).pow(2).sum(), heads=1)

    return [pulled(torch.tensor(t)) for t in TARGETS]


START = State(model=None, personal=(weights(0.5, 0.25),) * 4)
PLAIN: dict[str, Any] = {
    "rounds": 2,
    "epochs": 2,
    "peers": 3,
    "mu": 0.0,
    "lr_decay": 1.0,
    "dropout": False,
}


def again(models: list[list[float]]) -> list[list[float]]:
    """Each client's model after another local training."""
    fed = Table(silos())
    train = DFedAvgM(epochs=2, theta=0.0).train
    return [
        fed.call(train, k, weights(*w), 0).params.tolist()
        for k, w in zip(fed.clients, models, strict=True)
    ]


def test_without_both_switches_it_is_plain_averaging() -> None:
    _, ours = rounds(
        UAPDFL(**PLAIN, personal_heads=False), silos(), Branches(personal=START.personal)
    )
    (mixed,) = rounds(DFedAvgM(epochs=2, theta=0.0), silos(), START)
    for a, b in zip(ours, again(mixed), strict=True):
        assert a == pytest.approx(b)


def test_with_nobody_near_it_is_fedper() -> None:
    _, ours = rounds(UAPDFL(**PLAIN, threshold=0.0), silos(), Branches(personal=START.personal))
    (mixed,) = rounds(FedPer(rounds=1, epochs=2), silos(), START)
    for a, b in zip(ours, again(mixed), strict=True):
        assert a == pytest.approx(b)


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


@pytest.mark.parametrize(
    ("dropout", "personal_heads"), [(True, True), (True, False), (False, True), (False, False)]
)
def test_bytes_follow_the_branches(
    blobs: FederatedData, dropout: bool, personal_heads: bool
) -> None:
    method = UAPDFL(
        rounds=3, epochs=2, peers=2, dropout=dropout, personal_heads=personal_heads, threshold=0.05
    )
    result = run(method, blobs, Tiny, **settings())
    size = Size.of(Network(Tiny()), (4,))
    assert isinstance(result.state, Branches)
    assert result.bytes == method.moved(result.state, 4, size) <= method.cost(4, size)
    if not dropout:
        assert (result.state.models, result.state.bases) == (0, 16), (
            "none in the first of three rounds"
        )
    if not dropout and not personal_heads:
        assert result.state.heads == 16
        assert result.bytes == method.cost(4, size)
    to_server = sum(row.bytes for row in result.ledger if row.target == "server")
    assert to_server == 3 * 4 * (2 + 8)  # choices only


@pytest.mark.parametrize("dropout", [True, False])
def test_the_first_round_is_local_training_and_no_model_travels(
    dropout: bool, blobs: FederatedData
) -> None:
    """All models are the initial one, which everybody has."""
    short: dict[str, Any] = {"rounds": 1, "epochs": 2, "peers": 3, "dropout": dropout}
    first = run(UAPDFL(**short, mu=0.0), blobs, Tiny, **settings())
    assert isinstance(first.state, Branches)
    assert (first.state.models, first.state.bases, first.state.heads) == (0, 0, 0)
    pulled = run(UAPDFL(**short, mu=1.0), blobs, Tiny, **settings())
    assert first.bytes == pulled.bytes
    assert max(row.bytes for row in first.ledger) < wire.size(first.personal[0])
    other = run(UAPDFL(**short | {"dropout": not dropout}, mu=0.0), blobs, Tiny, **settings())
    assert all(
        torch.equal(a.params, b.params) for a, b in zip(first.personal, other.personal, strict=True)
    )


def spread(models: tuple[Weights, ...]) -> float:
    """How far the extractors' answers to the unit input are from their mean."""
    network, answers = Network(Tiny()), []
    for m in models:
        network.load(m)
        answers.append(network.probe(torch.ones(1, 4))[0].detach())
    each = torch.cat(answers)
    return float((each - each.mean(0)).pow(2).sum())


def test_the_penalty_holds_the_extractors_together(blobs: FederatedData) -> None:
    loose, tight = (
        run(UAPDFL(rounds=3, epochs=3, peers=3, mu=mu, threshold=0.0), blobs, Tiny, **settings())
        for mu in (0.0, 10.0)
    )
    assert spread(tight.personal) < 0.5 * spread(loose.personal)


def test_probing_leaves_statistics_and_mode_alone() -> None:
    network = Network(Tiny())
    network.module.train()
    before = network.weights()
    aux, logits = network.probe(torch.ones(1, 4))
    assert (aux.shape, logits.shape) == ((1, 8), (1, 3))
    assert torch.equal(network.module.get_submodule("head")(aux), logits)
    assert torch.equal(network.weights().buffers, before.buffers)
    assert network.module.training


def test_refuses_a_model_that_does_not_call_its_head() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)  # type: ignore[no-any-return]

    with pytest.raises(UserError, match="call its `head` once"):
        Network(Idle()).probe(torch.ones(1, 4))


def test_head_of_the_papers_cnn_stays_at_home() -> None:
    """With nobody near, only the convolutions travel: 3.6 % of the CNN."""
    size = Size.of(Network(catalogue.build("cnn_ua_pdfl", (3, 32, 32), 10)), (3, 32, 32))
    alone, all_near = (
        UAPDFL(rounds=2).moved(Branches(step=2, bases=5, heads=h), 1, size) for h in (0, 5)
    )
    talk = 2 * (5 * (4 * 10 + 4 * 4096 + 8) + 5 + 8)
    assert alone == talk + 5 * 4 * (3 * 32 * 9 + 32 + 32 * 64 * 9 + 64)
    assert all_near == talk + 5 * size


def test_refuses_as_many_peers_as_clients(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="at most 3"):
        run(UAPDFL(peers=4), blobs, Tiny, **settings())
