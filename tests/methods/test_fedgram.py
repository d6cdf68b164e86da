"""FedGram: equal to pooled data bit for bit, against numpy, bytes, and what it refuses."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, UserError, federate, load_model, run
from ekiden.core.engine import wire
from ekiden.core.engine.method import Size
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.models.catalogue import build
from ekiden.core.models.split import as_split
from ekiden.core.tasks import Classification
from ekiden.core.training.gram import Rounded, Rounding, measure, size
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.whole_features import PatchFeatures, RandomReLU
from ekiden.methods.exact.fedgram import Handoff
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from tests.methods.gram_runs import Samples, inside, network, points, silos

METHOD = FedGram(width=24)


def go(data: FederatedData, method: FedGram = METHOD, **options: Any) -> Result:
    return run(method, data, Tiny, hardware=Hardware(threads=1), seed=3, **options)


def bits(result: Result) -> list[list[float]]:
    assert result.weights is not None
    return [part.tolist() for part in vars(result.weights).values()]


@pytest.fixture(scope="module")
def pooled() -> Result:
    """One client that holds the points after the first 60, behind the first client."""
    return go(silos([torch.arange(60, 300)]))


@pytest.mark.parametrize("seed", range(20))
def test_the_same_bits_in_any_order_and_division(seed: int, pooled: Result) -> None:
    """Other clients of any number, size and skew, in any order, in a chain or a star."""
    draw = torch.Generator().manual_seed(seed)
    y = points()[1]
    rows = 60 + torch.randperm(240, generator=draw)
    if seed % 2:
        rows = rows[y[rows].argsort(stable=True)]  # clients of one or two classes
    cuts = torch.randperm(238, generator=draw)[: 1 + seed % 7].sort().values + 1
    parts = [part for part in torch.tensor_split(rows, cuts.tolist()) if len(part)]
    names = [f"client-{i}" for i in range(len(parts) + 1)]
    others = [names[1 + i] for i in torch.randperm(len(parts), generator=draw).tolist()]
    method = replace(
        METHOD, order=",".join(["client-0", *others]), topology="star" if seed % 3 == 0 else "chain"
    )
    assert bits(go(silos(parts), method)) == bits(pooled)


@pytest.mark.slow
def test_the_same_bits_in_other_processes(pooled: Result) -> None:
    parts = torch.split(torch.arange(60, 300), 50)
    assert bits(go(silos(parts), processes=True)) == bits(pooled)


def test_who_is_away_is_as_if_never_there(tmp_path: Path) -> None:
    parts, names = (
        torch.split(torch.arange(60, 300), 60),
        ["client-0", "client-1", "client-3", "client-4"],
    )
    without = go(silos([parts[0], parts[2], parts[3]], names))
    away = go(silos(parts), absent=lambda step, client: client == "client-2")
    assert bits(away) == bits(without)
    star = replace(METHOD, topology="star")
    assert bits(go(silos(parts), star, absent=lambda step, client: client == "client-2")) == bits(
        without
    )


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_who_is_away_first_does_not_settle(shape: Any) -> None:
    parts = torch.split(torch.arange(60, 300), 60)
    result = go(
        silos(parts),
        replace(METHOD, topology=shape),
        absent=lambda step, client: client == "client-0",
    )
    assert result.accuracy > 0.6
    assert sum(row.missing for row in result.ledger) == (1 if shape == "chain" else 2)


def test_a_run_does_not_end_without_a_model(tmp_path: Path) -> None:
    data = silos(torch.split(torch.arange(60, 300), 60))

    def away(step: int, client: str) -> bool:
        return step == 5  # all, when it is time to solve

    with pytest.raises(ClientMissing, match="client-4 did not answer"):
        go(data, absent=away, folder=tmp_path / "run")
    assert bits(go(data, folder=tmp_path / "run")) == bits(go(data))
    with pytest.raises(UserError, match="no client answered"):
        go(data, absent=lambda step, client: step < 5)


def as_of(result: Result, weights: Weights) -> Result:
    """The result with these weights as its model."""
    return replace(result, models=lambda: (weights, ()))


def test_it_is_ridge_regression_on_all_samples(pooled: Result) -> None:
    """By numpy: standardise, add a constant, leave-one-out's penalty by the hat matrix, solve."""
    x, y = points()
    features, found = inside(pooled, x)
    a, labels = features.double().numpy(), np.eye(3)[y.numpy()]
    spread = a.std(0)
    z = (a - a.mean(0))[:, spread > 0] / spread[spread > 0]
    one, n = np.hstack([z, np.ones((len(z), 1))]), len(z)

    def fitted(share: float) -> tuple[float, Any]:
        hat = one @ np.linalg.solve(one.T @ one + np.diag([share * n] * z.shape[1] + [0.0]), one.T)
        rest = float(np.square(labels - hat @ labels).sum())
        return n * rest / (n - np.trace(hat)) ** 2, hat @ labels

    scores = min((fitted(share) for share in heads.GRID), key=lambda pair: pair[0])[1]
    factor = float((found.double().numpy() * scores).sum() / np.square(scores).sum())
    assert factor > 1
    assert np.allclose(found.numpy(), factor * scores, atol=1e-4 * factor)


@pytest.mark.parametrize("head", ["lda", "cgs", "bayes", "ncm"])
def test_other_heads_come_from_the_same_sums(head: Any, pooled: Result) -> None:
    x, y = points()
    result = go(silos([torch.arange(60, 300)]), replace(METHOD, head=head))
    features, found = inside(result, x)
    assert torch.equal(features, inside(pooled, x)[0])
    m = heads.moments(measure([(features, y)], 3, 24))
    rows = m.rows(heads.calibrated(heads.fitted(head, m, 0.05), m))
    assert torch.allclose(
        found.double(), features.double() @ rows[:, :-1].T + rows[:, -1], atol=1e-4
    )


@pytest.mark.parametrize(
    ("text", "budget"), [("M", 404), ("50%", 202), ("3kB", 3000), ("0.01MB", 10000), ("600", 600)]
)
def test_bytes_decide_how_many_features(text: str, budget: int) -> None:
    """`Tiny` has 4·(32 + 8 + 16 + 24 + 3) + 4·16 + 8 = 404 bytes: parameters, running statistics, a
    counter."""
    method = FedGram(bytes=text)
    width = cast(nn.Linear, network(method).module.head).in_features

    def handed(d: int) -> int:
        return size(3, d) + 4 * d + 8 * 4

    assert handed(width) <= budget < handed(width + 1)


@pytest.mark.parametrize("shape", ["chain", "star"])
@pytest.mark.parametrize("features", ["random", "network"])
def test_bytes_are_those_of_the_formula(shape: Any, features: Any) -> None:
    data, method = (
        silos(torch.split(torch.arange(60, 300), 80)),
        FedGram(features=features, topology=shape, width=20),
    )
    inputs, units = (
        (8, 12) if features == "network" else (4, 16)
    )  # in addition to the inputs themselves
    settled = 8 * inputs + 4 * units
    sums = 2 * 20 * 21 + 4 * 3 * 20 + 8 * 3
    hops = 3 if shape == "chain" else 4
    result = run(method, data, Tiny, hardware=Hardware(threads=1))
    assert result.bytes == hops * (settled + sums)
    assert method.cost(4, Size.of(network(method), (4,))) == result.bytes


def test_a_run_is_loaded_as_any_other(tmp_path: Path, pooled: Result) -> None:
    x, _ = points()
    data = silos([torch.arange(60, 300)])
    go(data, folder=tmp_path / "run")
    loaded = load_model(tmp_path / "run", network=Tiny)
    with torch.no_grad():
        assert torch.equal(loaded(x), pooled.model(x))


def pictures() -> FederatedData:
    """Three silos of stripes in three directions under noise, of two classes each."""
    draw = torch.Generator().manual_seed(6)
    stripes = torch.stack([i * torch.ones(16, 16) for i in (0, 0, 0)])
    stripes[0, ::4], stripes[1, :, ::4] = 120, 120
    stripes[2] = 120 * torch.eye(4).repeat(4, 4)

    def some(n: int, classes: tuple[int, ...]) -> Samples:
        y = torch.tensor(classes)[torch.randint(len(classes), (n,), generator=draw)]
        noise = torch.randint(120, (n, 3, 16, 16), generator=draw)
        return (noise + stripes[y][:, None]).to(torch.uint8), y

    return federate(
        [some(30, (0, 1)), some(20, (1, 2)), some(40, (0, 2))], test=some(60, (0, 1, 2))
    )


def test_patches_of_the_first_client_serve_all(tmp_path: Path) -> None:
    method, options = (
        FedGram(width=32, dictionary="first"),
        {"model": "lenet", "hardware": Hardware(threads=1), "seed": 3},
    )
    whole = run(method, pictures(), folder=tmp_path / "whole", **options)  # type: ignore[arg-type]
    assert whole.accuracy > 0.9
    run(method, pictures(), folder=tmp_path / "stopped", stop_after=2, **options)  # type: ignore[arg-type]
    again = run(method, pictures(), folder=tmp_path / "stopped", **options)  # type: ignore[arg-type]
    star = run(
        replace(method, topology="star", order="client-0,client-2,client-1"),
        pictures(),
        **options,  # type: ignore[arg-type]
    )
    assert bits(whole) == bits(again) == bits(star)
    settled = 4 * (3 * 36 + 4) + 8 * 3 + 4 * 32
    assert whole.bytes == 2 * (settled + 2 * 32 * 33 + 4 * 3 * 32 + 8 * 3)
    size_of = Size.of(
        network(method, lambda: build("lenet", (3, 16, 16), 3), (3, 16, 16)), (3, 16, 16)
    )
    assert method.cost(3, size_of) == whole.bytes
    x = pictures().dataset.test.x
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "whole")(x), whole.model(x.float() / 255))


def passes(result: Result) -> int:
    return int(result.metrics[-1]["forward"])


def test_overlapping_parts_are_for_patches() -> None:
    with pytest.raises(UserError, match="bilinear is for patches of images"):
        go(silos([torch.arange(60, 300)]), replace(METHOD, bilinear=True))


@pytest.mark.parametrize(
    ("mirror", "channels", "expected"),
    [("colour", 3, True), ("colour", 1, False), ("always", 1, True), ("never", 3, False)],
)
def test_images_are_mirrored_where_wished(mirror: Any, channels: int, expected: bool) -> None:
    made = FedGram(width=16, mirror=mirror).own_network(
        Tiny(), (channels, 16, 16), 3, Classification()
    )
    assert cast(PatchFeatures, as_split(made).features).patches.how.mirror == expected


def test_images_too_small_for_patches_get_random_units() -> None:
    for shape, kind in (
        ((3, 16, 16), PatchFeatures),
        ((1, 15, 28), RandomReLU),
        ((16,), RandomReLU),
    ):
        made = FedGram(width=16).own_network(Tiny(), shape, 3, Classification())
        assert isinstance(as_split(made).features, kind)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bytes": "many"},
            r"bytes 'many' is not a size: write M, a share as in 5%, or a size as in 250kB",
        ),
        ({"bytes": "-1kB"}, "is not a size"),
        ({"bytes": "1e3"}, "is not a size"),
        ({"width": -1}, "width -1 is out of range"),
        ({"shrink": 1.0}, "shrink 1.0 is out of range"),
        ({"ridge": float("nan")}, "ridge"),
        ({"patch": ""}, r"patch '' is not a size of patches: write 6, or several as in 5,8"),
        ({"patch": "6,"}, "is not a size of patches"),
        ({"bytes": "own"}, "bytes own is for the features of a given network"),
        ({"head": "qda"}, "head 'qda' is unknown"),
    ],
)
def test_refuses_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        FedGram(**settings)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(
        UserError, match=r"bytes 75B \(75 bytes\) has no room for a feature: give 76B or more"
    ):
        network(FedGram(bytes="75B"))
    assert cast(nn.Linear, network(FedGram(bytes="76B")).module.head).in_features == 1
    with pytest.raises(
        UserError, match="8 features, and width leaves room for 5: give width 8 or bytes 328B"
    ):
        network(FedGram(features="network", width=5))
    with pytest.raises(UserError, match="has 8 features, and bytes leaves room for 7"):
        network(FedGram(features="network", bytes="327B"))
    assert (
        cast(nn.Linear, network(FedGram(features="network", bytes="328B")).module.head).in_features
        == 8
    )
    assert (
        cast(nn.Linear, network(FedGram(features="network", bytes="own")).module.head).in_features
        == 8
    )
    assert (
        cast(
            nn.Linear, network(FedGram(features="network", bytes="own", width=9)).module.head
        ).in_features
        == 9
    )
    with pytest.raises(UserError, match="name each of the 2 clients once"):
        go(silos([torch.arange(60, 300)]), replace(METHOD, order="client-0"))


def test_personal_heads_are_ridge_regression_towards_the_head_of_all() -> None:
    """By numpy: the ridge regression of own residuals with the least leave-one-out error by the hat
    matrix."""
    x, y = points()
    rows = torch.split(y.argsort(stable=True), [120, 110, 70])
    data = federate([(x[r], y[r]) for r in rows], val_fraction=0.0, classes=["a", "b", "c"])
    result = go(data, replace(METHOD, personal=True))
    assert result.state.step == METHOD.steps(3) + 1
    assert bits(result) == bits(go(data))
    pooled, _ = inside(result, torch.cat([client.train.x for client in data.clients]))
    mean, spread = pooled.double().numpy().mean(0), pooled.double().numpy().std(0)
    spread = np.where(spread > 0, spread, np.inf)
    everyone = torch.cat([client.train.y for client in data.clients])
    of_all = heads.ridge(heads.moments(measure([(pooled, everyone)], 3, 24)))
    chosen = []
    for client, weights in zip(data.clients, result.personal, strict=True):
        features, found = inside(as_of(result, weights), client.train.x)
        z, labels = (features.double().numpy() - mean) / spread, np.eye(3)[client.train.y.numpy()]
        start, n = z @ of_all.weight.numpy().T, len(z)
        one = np.hstack([z, np.ones((n, 1))])

        def fitted(
            share: float, one: Any = one, gap: Any = labels - start, n: int = n
        ) -> tuple[float, Any]:
            hat = one @ np.linalg.solve(
                one.T @ one + np.diag([share * n] * (one.shape[1] - 1) + [0.0]), one.T
            )
            if np.trace(hat) > n / 2:
                return np.inf, None
            return n * float(np.square(gap - hat @ gap).sum()) / (n - np.trace(hat)) ** 2, hat @ gap

        error, change = min(
            (fitted(10 ** (power / 4)) for power in range(-24, 17)), key=lambda pair: pair[0]
        )
        scores = start + change
        factor = float((found.double().numpy() * scores).sum() / np.square(scores).sum())
        assert factor > 1
        assert np.allclose(found.numpy(), factor * scores, atol=2e-4 * factor)
        chosen.append(error)
    assert len(set(chosen)) == 3


@pytest.mark.filterwarnings(
    "ignore:what tells .* the other way round at:ekiden.core.base.errors.DataWarning"
)
def test_personal_heads_serve_their_clients_better(tmp_path: Path) -> None:
    """Two clients that name the same clusters differently: no common head can serve both."""
    x, y = points()
    held = [(x[:150], y[:150]), (x[150:], (y[150:] + 1) % 3)]
    data = federate(held, val_fraction=0.0, classes=["a", "b", "c"])
    for shape in ("chain", "star"):
        rows = go(
            data, replace(METHOD, personal=True, topology=shape), folder=tmp_path / shape
        ).metrics
        assert rows[-1]["client_mean"] > rows[-2]["client_mean"] + 0.1


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_personal_heads_are_counted(shape: Any) -> None:
    data, method = (
        silos(torch.split(torch.arange(60, 300), 80)),
        FedGram(personal=True, topology=shape, width=20),
    )
    result = run(method, data, Tiny, hardware=Hardware(threads=1))
    common = 8 * 4 + 4 * 16 + 4 * (2 * 20 + 3 * 20 + 3)
    sums = 8 * 4 + 4 * 16 + size(3, 20)
    assert result.bytes == (3 if shape == "chain" else 4) * (sums + common)
    assert method.cost(4, Size.of(network(method), (4,))) == result.bytes


ROUNDED = replace(METHOD, bits=16, samples=300)


@pytest.mark.parametrize("seed", range(5))
def test_rounded_sums_of_the_same_clients_give_the_same_bits(seed: int) -> None:
    """In any order behind the first, in a chain and in a star."""
    parts = torch.split(torch.arange(60, 300), [30, 100, 10, 100])
    others = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
    order = ",".join(["client-0", *(f"client-{1 + i}" for i in others)])
    given = go(silos(parts), ROUNDED)
    assert bits(
        go(silos(parts), replace(ROUNDED, order=order, topology="star" if seed % 2 else "chain"))
    ) == bits(given)
    assert given.bytes == ROUNDED.cost(5, Size.of(network(ROUNDED), (4,)))


def test_rounded_sums_are_close_to_exact_ones_and_the_same_in_units_of_1(pooled: Result) -> None:
    parts = torch.split(torch.arange(60, 300), 60)
    assert bits(go(silos(parts), replace(METHOD, bits=31, samples=300))) == bits(pooled)
    rounded, exact = go(silos(parts), replace(ROUNDED, bits=20)), go(silos(parts))
    assert bits(rounded) != bits(exact) == bits(pooled)
    x = points()[0]
    ours, theirs = (inside(result, x)[1].softmax(1) for result in (rounded, exact))
    assert float((ours - theirs).abs().max()) < 0.02
    assert exact.bytes - rounded.bytes == 4 * (2 * 24 * 25 - (20 * 24 * 23 // 16 + 4 * 24 + 24))


def test_with_rounded_sums_the_penalty_is_not_below_their_noise() -> None:
    """12 bits for 100,000 samples: errors as large as the sums, so that only the strongest penalty
    helps."""
    coarse = go(silos([torch.arange(60, 300)]), replace(METHOD, bits=12, samples=100_000))
    x = points()[0]
    probabilities = inside(coarse, x)[1].softmax(1)
    assert bool(torch.isfinite(probabilities).all())
    given = go(
        silos([torch.arange(60, 300)]), replace(METHOD, bits=12, samples=100_000, ridge=1e-6)
    )
    assert coarse.accuracy > given.accuracy


def test_bits_and_samples_go_together() -> None:
    with pytest.raises(
        UserError, match="bits 16 needs samples, the expected number of training samples"
    ):
        FedGram(bits=16)
    with pytest.raises(UserError, match="rounded sums are for ridge regression: leave out head"):
        Recipe(FedGram(samples=300, head="lda"))
    for head in ("lda", "cgs", "bayes", "ncm"):
        with pytest.raises(
            UserError, match=f"rounded sums are for ridge regression: leave out head {head}"
        ):
            FedGram(bits=16, samples=300, head=head)
    with pytest.raises(UserError, match="samples"):
        FedGram(bits=16, samples=10**9 + 1)
    for wrong in (8, 33):
        with pytest.raises(UserError, match="bits"):
            FedGram(bits=wrong, samples=300)
    with pytest.raises(
        UserError, match=r"do not fit into 16 bits: start a new run with samples 300 or more"
    ):
        go(silos([torch.arange(60, 300)]), replace(ROUNDED, samples=3))


def test_rounded_sums_travel_and_are_checked_on_arrival() -> None:
    y = torch.arange(50) % 3
    sums = measure(
        [(torch.arange(50 * 9).view(50, 9) % 128.0, y)],
        3,
        9,
        rounding=Rounding.within(16, 50, 2**14),
    )
    sent = wire.encode(Handoff((torch.zeros(1),), sums))
    assert torch.equal(wire.decode(sent, Handoff).sums.matrix(), sums.matrix())
    assert wire.size(sums) == size(3, 9, bits=16)
    for change in ({"unit": 0}, {"bits": 32}, {"bits": 17}, {"parts": -1}):
        with pytest.raises(wire.WireError, match="impossible Rounded"):
            wire.decode(wire.encode(Forged(**{**vars(sums.gram), **change})), Rounded)


@dataclass(frozen=True)
class Forged:
    """What a malicious silo may send in place of rounded sums, under their name."""

    squares: Tensor
    products: Tensor
    bits: int
    unit: int
    parts: int


Forged.__name__ = "Rounded"
