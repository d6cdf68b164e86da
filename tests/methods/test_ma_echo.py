"""MA-Echo: exact numbers of projectors, weights and iterations; alignment; bytes; bad input."""

import itertools
import logging
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, load, run
from ekiden.core.data.samples import ClientData, Subset
from ekiden.core.engine.method import Method, Size
from ekiden.core.models import catalogue
from ekiden.core.training.network import Network
from ekiden.core.training.weights import mean
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Average, MAEcho
from ekiden.methods.one_shot import ma_echo
from ekiden.methods.one_shot.blocks.curvature import (
    Closed,
    Recursion,
    compress,
    layer_inputs,
    projectors,
    thin,
)
from ekiden.methods.one_shot.ma_echo import (
    Contribution,
    aligned,
    carried,
    min_norm,
    project,
    unit_rows,
)
from tests.methods.test_ot_fusion import shuffled
from tests.silos.sessions import assert_equal, far, nodes_in
from tests.silos.sessions import here as in_one_process


def f64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def recursion(x: Tensor, c: float, z: float) -> Tensor:
    made = Recursion(torch.eye(x.shape[1], dtype=torch.float64), c, z)
    made.add(x)
    return made.projector()


def closed(x: Tensor, z: float) -> Tensor:
    made = Closed(torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64), z)
    made.add(x)
    return made.projector()


@pytest.mark.parametrize(
    ("c", "z", "q"),
    [
        (1.0, 1e-15, [[0.64, -0.48], [-0.48, 0.36]]),
        (1.0, 1.0, [[0.653846, -0.461538], [-0.461538, 0.384615]]),
        (0.5, 1e-15, [[0.82, -0.24], [-0.24, 0.68]]),
    ],
)
def test_one_sample(c: float, z: float, q: list[list[float]]) -> None:
    x = f64([[3.0, 4.0]])
    torch.testing.assert_close(
        torch.eye(2).double() - recursion(x, c, z), f64(q), atol=1e-6, rtol=0
    )
    if c == 1:
        torch.testing.assert_close(closed(x, z), recursion(x, c, z), atol=1e-9, rtol=0)


def test_recursion_equals_the_closed_form_without_damping() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    z = 0.0251189
    textbook = x.T @ torch.linalg.inv(x @ x.T + z * torch.eye(3).double()) @ x
    torch.testing.assert_close(recursion(x, 1.0, z), textbook, atol=1e-12, rtol=0)
    torch.testing.assert_close(closed(x, z), textbook, atol=1e-12, rtol=0)
    damped = torch.linalg.eigvalsh(torch.eye(5).double() - recursion(x, 0.5, z))
    assert (damped[:3] > 0.2).all()
    torch.testing.assert_close(damped[3:], torch.ones(2).double(), atol=1e-12, rtol=0)


def test_singular_and_empty_inputs_give_defined_projectors() -> None:
    x = f64([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    for p in (recursion(x, 1.0, 0.1), closed(x, 0.1)):
        assert torch.isfinite(p).all()
        torch.testing.assert_close(p, f64([[1.0, 1.0], [1.0, 1.0]]) * 2 / 4.1, atol=1e-9, rtol=0)
    assert torch.equal(closed(torch.zeros(2, 3), 0.1), torch.zeros(3, 3).double())


@pytest.mark.parametrize(
    ("bound", "alpha", "d"),
    [(1.0, (0.8, 0.2), (1.6, 0.8)), (0.6, (0.6, 0.4), (1.2, 1.6)), (0.5, (0.5, 0.5), (1.0, 2.0))],
)
def test_qp(bound: float, alpha: tuple[float, float], d: tuple[float, float]) -> None:
    g = np.array([[-2.0, 0.0], [0.0, -4.0]])  # g_i = 2 P_i (w - w_i)
    found = min_norm(g @ g.T, bound)
    np.testing.assert_allclose(found, alpha, atol=1e-6)
    np.testing.assert_allclose(-found @ g, d, atol=1e-5)
    seen = torch.tensor(g / 2, dtype=torch.float32)[:, None]
    np.testing.assert_allclose(MAEcho(weighting="qp", bound=bound).alphas(seen), alpha, atol=1e-6)


def test_common_descent_direction() -> None:
    g = np.array([[-2.0, 0.0], [0.0, -4.0]])
    d = -min_norm(g @ g.T, 1.0) @ g
    np.testing.assert_allclose(g @ d, [-3.2, -3.2], atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_qp_of_two_is_the_closed_form(seed: int) -> None:
    g = np.random.default_rng(seed).normal(size=(2, 3)) + 1
    gram, bound = g @ g.T, 0.7
    expected = np.clip(
        (gram[1, 1] - gram[0, 1]) / (gram[0, 0] + gram[1, 1] - 2 * gram[0, 1]), 1 - bound, bound
    )
    assert min_norm(gram, bound)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("n", [3, 20, 50])
def test_qp_meets_the_optimality_conditions(n: int) -> None:
    x = np.random.default_rng(n).normal(size=(n, 200)) + 0.3
    gram, bound = x @ x.T, 2.0 / n
    a = min_norm(gram, bound)
    gradient = gram @ a / np.trace(gram)
    free = (a > 1e-6) & (a < bound - 1e-6)
    level = gradient[free].mean()
    assert a.sum() == pytest.approx(1)
    assert np.abs(gradient[free] - level).max() < 1e-6
    assert (gradient[a <= 1e-6] >= level - 1e-6).all()
    assert (gradient[a >= bound - 1e-6] <= level + 1e-6).all()


def test_qp_of_equal_models_is_uniform() -> None:
    assert min_norm(np.zeros((4, 4)), 1.0).tolist() == [0.25] * 4
    np.testing.assert_allclose(min_norm(np.ones((4, 4)), 1.0), [0.25] * 4)


W1, W2 = [[1.0, 0.0]], [[0.0, 1.0]]
P = [torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 1.0]])]


def iterate(method: MAEcho) -> list[list[float]]:
    clients = torch.tensor([W1, W2])
    result: list[list[float]] = method.harmonise(clients.mean(0), clients, P).tolist()
    return result


def test_common_optimum_in_the_papers_form() -> None:
    assert iterate(MAEcho(form="paper", step=1.0, iterations=1)) == [[1.0, 1.0]]


def test_common_optimum_is_every_clients_in_the_papers_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Tensor] = []

    def spy(differences: Tensor, projectors: Any) -> Tensor:
        seen.append(differences)
        return project(differences, projectors)

    monkeypatch.setattr(ma_echo, "project", spy)
    assert iterate(MAEcho(form="paper", step=1.0, iterations=2)) == [[1.0, 1.0]]
    assert seen[2].tolist() == [[[0.0, 0.0]]] * 2, "W - V_i, as the second iteration begins"


@pytest.mark.parametrize(("iterations", "value"), [(1, 0.875), (2, 0.9375), (3, 0.96875)])
def test_common_optimum_in_the_released_form(iterations: int, value: float) -> None:
    assert iterate(MAEcho(step=1.0, iterations=iterations)) == [[value, value]]


def test_factors_of_different_ranks_give_what_their_projectors_give() -> None:
    draw = torch.Generator().manual_seed(5)
    clients = torch.randn(3, 4, 9, generator=draw)
    factors = [torch.linalg.qr(torch.randn(9, k, generator=draw))[0] for k in (1, 2, 4)]
    factors[1] = 0.7 * factors[1]  # damped, as by the recursion: no projection
    method = MAEcho(iterations=20)
    whole = method.harmonise(clients[0], clients, [f @ f.T for f in factors])
    torch.testing.assert_close(
        method.harmonise(clients[0], clients, factors), whole, rtol=1e-5, atol=1e-5
    )
    changed = MAEcho(iterations=20, normalise=True).harmonise(clients[0], clients, factors)
    assert not torch.allclose(changed, whole, atol=1e-2)


def test_half_steps() -> None:
    fields: dict[str, Any] = {"form": "paper", "step": 0.5}
    assert iterate(MAEcho(iterations=1, **fields)) == [[0.75, 0.75]]
    assert iterate(MAEcho(iterations=2, **fields)) == [[0.8125, 0.8125]]
    # V_1 after two iterations shows in the third W, halfway between the second W and it in the
    # first coordinate.
    expected = (0.8125 + 0.84375) / 2
    assert iterate(MAEcho(iterations=3, **fields)) == [[expected, expected]]


@pytest.mark.parametrize(("mu", "kept"), [(1.0, 0.5), (200.0, 0.0049751)])
def test_relaxation_on_the_range_of_the_projector(mu: float, kept: float) -> None:
    # One client, W = 2, W_1 = 1, P = 1, η = ¼: W goes to 1.5, V to 1 + ½/(1 + μ), W to the middle
    # of the two.
    method = MAEcho(form="paper", step=0.25, iterations=2, mu=mu)
    result = method.harmonise(torch.tensor([[2.0]]), torch.tensor([[[1.0]]]), [torch.eye(1)])
    assert float(result) == pytest.approx((1.5 + 1.0 + kept * 0.5) / 2, abs=1e-6)


@pytest.mark.parametrize(
    ("ranks", "count"), [("5", 7420), ("5,5,5,5", 7420), ("2", 2968), ("", 824656)]
)
def test_numbers_sent_per_client(ranks: str, count: int) -> None:
    widths = [784, 400, 200, 100, 10]
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    layout = Network(nn.Sequential(*layers)).layout
    # The note counts all four layers' inputs, 784 to 100; the classifier's own needs none.
    last = 100 * (int(ranks[-1]) if ranks else 100)
    method = MAEcho(ranks=ranks if len(ranks.split(",")) < 4 else "5,5,5")
    assert method.payload(layout) == 4 * (count - last) + 10


def test_compressed_projectors() -> None:
    x = torch.randn(4, 7, dtype=torch.float64)
    p = closed(x, 0.01)
    factor = compress(p, 4)
    assert factor.shape == (7, 4)
    torch.testing.assert_close(factor @ factor.T, p)
    assert compress(p, 7) is p
    d = torch.randn(2, 3, 7, dtype=torch.float64)
    torch.testing.assert_close(project(d, [p, factor]), d @ p)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projectors_of_low_rank_are_factorised(dtype: torch.dtype) -> None:
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = recursion(torch.cat([x, x[:4] * 0.01]), 0.5, 0.02).to(dtype)
    factor = thin(p)
    assert factor.shape == (40, 9)
    torch.testing.assert_close(factor @ factor.T, p, atol=1e-6, rtol=1e-5)
    assert thin(torch.zeros(7, 7)).shape == (7, 0)
    for whole in (torch.eye(40), closed(torch.randn(14, 40), 0.1), torch.ones(1, 1)):
        assert thin(whole) is whole
    d = torch.randn(2, 3, 7)
    assert torch.equal(project(d, [thin(torch.zeros(7, 7))] * 2), torch.zeros(2, 3, 7))


def test_projectors_under_a_permutation_that_is_not_symmetric() -> None:
    t = f64([[0, 1, 0], [0, 0, 1], [1, 0, 0]])  # rows W -> T W, so inputs of the next layer -> x Tᵀ
    x = torch.randn(2, 3, dtype=torch.float64)
    layer = Network(nn.Linear(3, 2, bias=False)).layout.head
    p, permuted = closed(x, 0.1), closed(x @ t.T, 0.1)
    torch.testing.assert_close(carried(p, t.T, layer), permuted)
    torch.testing.assert_close(t @ p @ t.T, permuted)
    assert (t.T @ p @ t - permuted).abs().max() > 0.05
    factor = carried(compress(p, 2), t.T, layer)
    torch.testing.assert_close(factor @ factor.T, permuted)


def seen_inputs(module: nn.Module, x: Tensor, closed: bool) -> list[Tensor]:
    layout = Network(module).layout
    return projectors(module.eval(), layout.dense, [(x, torch.zeros(len(x)))], closed=closed)


@torch.no_grad()
def test_a_step_in_the_null_space_keeps_the_outputs() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(12, 4))
    x = torch.randn(2, 2, 4, 4)
    network = Network(module)
    found = projectors(module.eval(), network.layout.dense, [(x, torch.zeros(2))], closed=True)
    for layer, p in zip(network.layout.dense, found, strict=True):
        before, start = module(x), layer.matrix(network.params)
        change = torch.randn(layer.width, layer.inputs)
        moved = []
        for matrix in (change, change @ (torch.eye(layer.inputs) - p.float())):
            assert matrix.norm() > 0.1
            layer.put(network.params, start + matrix)
            moved.append(float((module(x) - before).norm()))
        assert moved[1] < 0.02 * moved[0]
        layer.put(network.params, start)


def test_released_inputs_are_batch_means_and_sparse_patches() -> None:
    x = torch.arange(2 * 5 * 5, dtype=torch.float32).view(2, 1, 5, 5)
    conv = nn.Conv2d(1, 1, 3, padding=1)
    patches = layer_inputs(conv, x, mean=True)
    assert patches.shape == (4, 9)
    assert torch.equal(patches[1].view(3, 3), x.mean(0)[0, 0:3, 2:5])
    assert layer_inputs(conv, x, mean=False).shape == (50, 9)
    small = layer_inputs(conv, x[:, :, :2, :2], mean=True)
    assert small.shape[1] == 9
    assert torch.equal(
        layer_inputs(nn.Linear(5, 1), x[0, 0], mean=True), x[0, 0].mean(0, keepdim=True)
    )


@pytest.mark.parametrize(("side", "updates"), [(32, 225), (16, 49), (8, 9)])
def test_updates_of_a_convolution(side: int, updates: int) -> None:
    assert (
        len(layer_inputs(nn.Conv2d(1, 1, 3, padding=1), torch.zeros(3, 1, side, side), mean=True))
        == updates
    )


def test_biases_are_one_more_input() -> None:
    module = nn.Linear(2, 3)
    (p,) = seen_inputs(module, torch.tensor([[3.0, 4.0]]), True)
    assert p.shape == (3, 3)
    r = f64([[3.0, 4.0, 1.0]])
    torch.testing.assert_close(p, r.T @ r / (26 + 0.01**0.8))


def test_unit_rows_skip_zeros_and_rounding() -> None:
    change = torch.tensor([[3.0, 4.0], [0.0, 0.0], [3.0, 4.0]])
    move = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-7, 0.0]])
    torch.testing.assert_close(
        unit_rows(move, change), torch.tensor([[0.6, 0.8], [0.0, 0.0], [0.0, 0.0]])
    )


def contribution(network: Network, seed: int = 0) -> Contribution:
    generator = torch.Generator().manual_seed(seed)
    found = [
        torch.rand(layer.inputs, 2, generator=generator) / 10 for layer in network.layout.dense[:-1]
    ]
    owns = torch.ones(network.layout.classes, dtype=torch.bool)
    return Contribution(network.weights(), [f @ f.T for f in found], owns)


FORMS: list[dict[str, Any]] = [
    {},
    {"form": "paper", "step": 0.5},
    {"weighting": "qp"},
    {"normalise": True},
    {"combine_heads": "mean"},
    {"origin": "first"},
]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("clients", [1, 3])
def test_identical_models_give_that_model(fields: dict[str, Any], clients: int) -> None:
    network = Network(Tiny())
    result = MAEcho(**fields).aggregate(
        [contribution(network, i) for i in range(clients)], network.layout
    )
    assert torch.equal(result.params, network.params)
    assert torch.equal(result.buffers, network.buffers)


@pytest.mark.parametrize("origin", ["mean", "first"])
def test_without_projectors_the_released_form_pulls_to_the_start(origin: Any) -> None:
    # P = 0: nothing is seen, so W stays and all V_i move to it.
    networks = [
        Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))) for _ in range(3)
    ]
    sent = [contribution(n)._replace(projectors=[torch.zeros(4, 4)]) for n in networks]
    result = MAEcho(step=1.0, combine_heads="mean", origin=origin).aggregate(
        sent, networks[0].layout
    )
    average = mean([n.weights() for n in networks])
    layer = networks[0].layout.dense[0]
    wanted = average if origin == "mean" else networks[0].weights()
    torch.testing.assert_close(layer.matrix(result.params), layer.matrix(wanted.params))


def test_full_projectors_pull_the_papers_w_to_the_mean() -> None:
    networks = [
        Network(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))) for _ in range(3)
    ]
    sent = [contribution(n)._replace(projectors=[torch.eye(4)]) for n in networks]
    result = MAEcho(form="paper", step=0.5, combine_heads="mean", origin="first").aggregate(
        sent, networks[0].layout
    )
    layer = networks[0].layout.dense[0]
    expected = layer.matrix(mean([n.weights() for n in networks]).params)
    torch.testing.assert_close(layer.matrix(result.params), expected, atol=1e-3, rtol=0)


def test_alignment_undoes_a_permutation_of_model_and_projectors() -> None:
    module = catalogue.build("mlp", (12,), 3).eval()
    x = torch.randn(40, 12)
    a, b = Network(module), Network(shuffled(module))
    ours, theirs = (
        Contribution(
            n.weights(),
            [p.float() for p in projectors(n.module, n.layout.dense[:-1], [(x, x)], closed=False)],
            torch.ones(3, dtype=torch.bool),
        )
        for n in (a, b)
    )
    found = aligned(theirs, a.weights(), a.layout)
    assert torch.equal(found.model.params, a.params)
    for p, q in zip(found.projectors, ours.projectors, strict=True):
        torch.testing.assert_close(p, q, atol=1e-4, rtol=0)


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


VARIANTS: list[dict[str, Any]] = [
    {"ranks": "2"},
    {"align": True, "init": "different"},
    {"form": "paper", "step": 0.5, "weighting": "qp", "projector": "closed"},
    {"origin": "random", "normalise": True},
    {"rounds": 3},
]


@pytest.mark.parametrize("fields", VARIANTS, ids=str)
def test_every_variant_runs_and_declares_its_bytes(
    blobs: FederatedData, fields: dict[str, Any]
) -> None:
    method = MAEcho(epochs=3, iterations=5, **fields)
    result = run(method, blobs, Tiny, **settings())
    network = Network(Tiny())
    size = 4 * (len(network.params) + len(network.buffers)) + 8
    assert result.weights is not None
    assert result.weights.is_finite()
    assert result.bytes == method.cost(4, Size.of(network))
    rank = 2 if "ranks" in fields else 5
    rounds = method.rounds
    assert result.bytes == 4 * ((2 * rounds - 1) * size + rounds * (3 + 4 * 5 * rank))


PEERS: list[dict[str, Any]] = [
    {},
    {"rounds": 2, "ranks": "2"},
    {"align": True, "init": "different"},
    {"origin": "random", "form": "paper", "step": 0.5, "weighting": "qp"},
]


@pytest.mark.parametrize("fields", PEERS, ids=str)
def test_every_client_to_every_other(blobs: FederatedData, fields: dict[str, Any]) -> None:
    method = MAEcho(epochs=2, iterations=5, **fields)
    peers = replace(method, decentralised=True)
    central, result = (run(m, blobs, Tiny, **settings()) for m in (method, peers))
    assert central.weights is not None
    assert result.weights is None
    assert len(result.personal) == 4
    for model in result.personal:
        assert torch.equal(model.params, central.weights.params)
        assert torch.equal(model.buffers, central.weights.buffers)
    assert result.accuracy == central.accuracy
    names = {c.name for c in blobs.clients}
    assert {r.source for r in result.ledger} == {r.target for r in result.ledger} == names, (
        "the server reads nothing"
    )
    assert {r.task for r in result.ledger} == {"gather"}
    size = Size.of(Network(Tiny()))
    each = size + peers.payload(size.layout)
    assert result.bytes == peers.cost(4, size) == peers.rounds * 4 * 3 * each


def test_the_decentralised_form_between_processes_and_silos(
    blobs: FederatedData, tmp_path: Path
) -> None:
    method = MAEcho(epochs=1, iterations=2, rounds=2, decentralised=True)
    here, there = (run(method, blobs, Tiny, processes=p, **settings()) for p in (False, True))
    assert all(
        torch.equal(a.params, b.params) for a, b in zip(here.personal, there.personal, strict=True)
    )
    assert here.ledger == there.ledger
    once = replace(method, rounds=1, ranks="3")
    silos = nodes_in(tmp_path, '[limits]\nmethods = ["maecho"]\n')
    assert_equal(far(once, silos, tmp_path / "run"), in_one_process(once))


def test_alone_there_is_nobody_to_send_to(blobs: FederatedData) -> None:
    alone = FederatedData(blobs.dataset, blobs.clients[:1])
    result = run(
        MAEcho(epochs=1, decentralised=True, combine_heads="mean"), alone, Tiny, **settings()
    )
    assert result.bytes == 0
    trained = run(Average(epochs=1), alone, Tiny, **settings()).weights
    assert trained is not None
    assert torch.equal(result.personal[0].params, trained.params)


def test_some_clients_a_round(blobs: FederatedData) -> None:
    method = MAEcho(epochs=1, iterations=2, rounds=3, participation=0.5)
    result = run(method, blobs, Tiny, **settings())
    assert result.bytes == method.cost(4, Size.of(Network(Tiny())))
    assert [
        len({r.source for r in result.ledger if r.step == t and r.task == "get"}) for t in range(3)
    ] == [2, 2, 2]
    with pytest.raises(UserError, match=r"1/N = 0\.5"):
        run(replace(method, weighting="qp", bound=0.4), blobs, Tiny, **settings())


def images(side: int) -> FederatedData:
    x = torch.rand(16, 3, side, side, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16) % 3
    return federate([(x[:8], y[:8]), (x[8:], y[8:])], test=(x, y))


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("mlp", 6),
        ("mlp_ma_echo", 6),
        ("lenet", 16),
        ("cnn", 18),
        ("cnn_tiny", 8),
        ("cnn_ma_echo", 8),
        ("cnn_ua_pdfl", 8),
    ],
)
def test_any_network(name: str, side: int) -> None:
    result = run(MAEcho(epochs=1, iterations=2), images(side), name, **settings())
    assert result.weights is not None
    assert result.weights.is_finite()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), [("resnet18", 8), ("resnet18_gn", 8), ("vgg11", 32)])
def test_any_deep_network(name: str, side: int, caplog: pytest.LogCaptureFixture) -> None:
    training = Training(lr=1e-3, batch_size=16)  # VGG diverges at 0.01
    result = run(
        MAEcho(epochs=1, iterations=2), images(side), name, **settings() | {"training": training}
    )
    assert result.weights is not None
    assert result.weights.is_finite()
    assert ("norm1" in caplog.text) == name.startswith("resnet")


def test_layers_that_never_run_are_averaged(blobs: FederatedData) -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.idle, self.head = nn.Linear(2, 2), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)  # type: ignore[no-any-return]

    method = MAEcho(epochs=1, init="different")
    result, average = (
        run(m, blobs, Idle, **settings()) for m in (method, Average(epochs=1, init="different"))
    )
    assert result.weights is not None
    assert average.weights is not None
    torch.testing.assert_close(result.weights.params[:6], average.weights.params[:6])


def test_a_network_without_linear_and_convolutional_layers_is_refused(blobs: FederatedData) -> None:
    module = nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())
    with pytest.raises(UserError, match="classifier"):
        run(MAEcho(), blobs, module, **settings())


@pytest.mark.filterwarnings("ignore:silo .* shares no class")
def test_beats_the_average_on_disjoint_classes() -> None:
    """Two linearly separable halves of a problem, a pair of classes at each client."""
    generator = torch.Generator().manual_seed(1)
    centres = 3 * torch.eye(4)

    def draw(classes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        y = torch.tensor(classes)[torch.randint(len(classes), (200,), generator=generator)]
        return centres[y] + 0.3 * torch.randn(200, 4, generator=generator), y

    data = federate([draw((0, 1)), draw((2, 3))], test=draw((0, 1, 2, 3)))

    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        )

    plain, echo = (
        run(m, data, make, **settings())
        for m in (Average(epochs=20, combine_heads="class-wise"), MAEcho(epochs=20))
    )
    assert echo.accuracy > plain.accuracy


def test_layers_that_are_averaged_are_named(
    blobs: FederatedData, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ekiden"):
        run(MAEcho(epochs=1), blobs, Tiny, **settings())
    assert "features.1" in caplog.text


@pytest.mark.parametrize(
    "fields",
    [
        {"form": "paper", "step": 1.2},
        {"ranks": "5,x"},
        {"ranks": "0"},
        {"decentralised": True, "participation": 0.5},
    ],
    ids=str,
)
def test_refuses_settings_that_do_not_fit(fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=list(fields)[-1]):
        MAEcho(**fields)


def test_refuses_a_bound_below_one_nth_and_ranks_of_other_layers(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match=r"1/N = 0\.25"):
        run(MAEcho(weighting="qp", bound=0.2), blobs, Tiny, **settings())
    run(MAEcho(epochs=1, weighting="qp", bound=0.25), blobs, Tiny, **settings())
    with pytest.raises(UserError, match="2 layers"):
        run(MAEcho(ranks="2,2"), blobs, Tiny, **settings())


def test_models_of_different_shape_are_refused() -> None:
    a, b = Network(Tiny()), Network(nn.Linear(4, 3))
    with pytest.raises(UserError, match="different shape"):
        MAEcho().aggregate([contribution(a), contribution(b)], a.layout)


SHIPPED: list[dict[int, int]] = [
    {3: 5199},
    {5: 5421, 9: 5949},
    {2: 5958, 4: 5842, 8: 5851},
    {0: 5923, 1: 6742},
    {3: 932, 6: 5918, 7: 6265},
]


@pytest.mark.slow
@pytest.mark.parametrize("init", ["same", "different"])
def test_class_counts_of_the_authors_log(data_home: object, init: Any) -> None:
    """Their log has 81.90 % (different initial models) where the plain average has 19.09 %.

    Seeds differ by several points: seven gave 76.6 to 84.8 (same) and 80.4 to 83.9 (different), 82
    on average."""
    dataset = replace(load("mnist"), mean=(0.1307,), std=(0.3081,))  # as in their code
    taken, clients = dict.fromkeys(range(10), 0), []
    none = Subset(dataset.train, torch.empty(0, dtype=torch.int64))
    everything = torch.arange(len(dataset.test))
    for i, counts in enumerate(SHIPPED):
        rows = []
        for label, n in counts.items():
            rows.append(
                (dataset.train.y == label).nonzero().flatten()[taken[label] : taken[label] + n]
            )
            taken[label] += n
        own = Subset(dataset.test, everything[i :: len(SHIPPED)])
        clients.append(ClientData(f"c{i}", Subset(dataset.train, torch.cat(rows)), none, own))
    data = FederatedData(dataset, tuple(clients))

    def accuracy(method: Method, seed: int) -> float:
        training = Training(
            "sgd", lr=0.01, momentum=0.5, weight_decay=0, batch_size=64, select="last"
        )
        return run(
            method, data, "mlp_ma_echo", training=training, hardware=Hardware(threads=1), seed=seed
        ).accuracy

    echo = [accuracy(MAEcho(init=init), seed) for seed in range(3)]
    plain = accuracy(Average(epochs=10, combine_heads="class-wise", init=init), 0)
    print(f"{init}: MA-Echo {echo}, class-wise average {plain:.4f}")
    assert fmean(echo) == pytest.approx(0.819, abs=0.03)
    assert min(echo) > 0.75
    assert plain < 0.4
