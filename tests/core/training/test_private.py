"""Differential privacy in training: the noise is as large as promised, clipping is exact, and the
accountant agrees."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ekiden
from ekiden import DP, Training, UserError
from ekiden.authoring import Client, Weights, on_client
from ekiden.core.data.samples import FederatedData
from ekiden.core.training.network import Network
from ekiden.core.training.private import (
    ROUNDED,
    Mechanism,
    Noise,
    Spent,
    check_samples,
    clipped_sum,
    composed,
    epsilon_of_gaussian,
    noise_for,
    planned,
    spent_epsilon,
)
from ekiden.methods import METHODS, FedAvg, FedSeq
from ekiden.methods.blocks.glam import alignment
from ekiden.runs.recipe import Recipe

KEY = bytes(range(32))


# (σ, q, steps, δ, ε): RdpAccountant and PLDAccountant of Google's dp-accounting 0.6.0,
# Poisson-sampled Gaussian
@pytest.mark.parametrize(
    ("noise", "rate", "steps", "delta", "renyi", "exact"),
    [
        (1.1, 0.01, 1000, 1e-5, 1.7118, 1.5154),
        (1.3, 250 / 60000, 14400, 1e-5, 1.9627, 1.7994),
        (4.0, 0.2, 500, 1e-6, 6.1490, 5.7442),
        (1.0, 1.0, 10, 1e-5, 19.0536, 17.8566),
        (0.7, 0.5, 20, 1e-5, 29.0740, 26.5718),
        (0.6, 0.05, 300, 1e-5, 21.1589, 18.7299),
    ],
)
def test_the_accountant_agrees_with_another(
    noise: float, rate: float, steps: int, delta: float, renyi: float, exact: float
) -> None:
    found = Spent(noise, rate, steps).epsilon(delta)
    if rate == 1:
        assert found == pytest.approx(exact, abs=1e-4)
    else:
        assert exact < found < renyi * 1.01
        assert found > renyi * 0.998  # not smaller: that would promise too much


def test_the_accountant_agrees_with_the_library_itself() -> None:
    library = pytest.importorskip(
        "dp_accounting", reason="dp-accounting is not installed: it needs attrs below 24"
    )
    rdp = pytest.importorskip("dp_accounting.rdp")
    for noise, rate, steps, delta in (
        (1.1, 0.01, 1000, 1e-5),
        (0.63, 0.0284, 105, 1e-5),
        (4.0, 1.0, 40, 1e-4),
    ):
        step = library.GaussianDpEvent(noise)
        one = step if rate == 1 else library.PoissonSampledDpEvent(rate, step)
        counted = rdp.RdpAccountant().compose(library.SelfComposedDpEvent(one, steps))
        assert Spent(noise, rate, steps).epsilon(delta) == pytest.approx(
            counted.get_epsilon(delta), rel=0.01
        )


@pytest.mark.parametrize("ratio", [0.01, 0.7, 3.0, 12.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-12])
def test_the_epsilon_of_gaussian_noise_is_exact_and_rounded_up(ratio: float, delta: float) -> None:
    many = pytest.importorskip("mpmath")  # comes with PyTorch

    def exact(epsilon: float) -> Any:
        e, mu = many.mpf(epsilon), many.mpf(ratio)
        above, below = (
            many.erfc(-x / many.sqrt(2)) / 2 for x in (mu / 2 - e / mu, -mu / 2 - e / mu)
        )
        return above - many.exp(e) * below

    with many.workdps(150):
        found = epsilon_of_gaussian(ratio, delta)
        if found:
            assert exact(found) <= delta * (1 + 1e-6)
            assert exact(found * (1 - 1e-7)) > delta * (1 - 1e-6)
        assert found or exact(0) <= delta
        # gradients over full batches, and releases of one silo, compose like one of them
        assert Spent(2 / ratio, 1.0, 4).epsilon(delta) == pytest.approx(found, rel=1e-6)


def test_discrete_noise_tells_no_more_than_gaussian_noise_of_a_variance_that_is_smaller_by_three() -> (
    None
):
    """δ of a discrete Gaussian, as a sum over whole numbers: Canonne, Kamath and Steinke 2020,
    Theorem 7."""
    numbers = np.arange(-600, 601)
    for variance in (16**2, 16**2 + 0.5, 30**2):
        for moved in (1, 5, 16, 40):
            weights = [np.exp(-((numbers - shift) ** 2) / (2 * variance)) for shift in (0, moved)]
            p, q = (each / each.sum() for each in weights)
            for delta in (1e-2, 1e-5, 1e-8):
                epsilon = epsilon_of_gaussian(moved / math.sqrt(variance - ROUNDED), delta)
                assert np.maximum(p - math.exp(epsilon) * q, 0).sum() <= delta


def test_noise_is_the_least_that_keeps_the_promise() -> None:
    noise = noise_for(3.0, 1e-5, 0.05, 400)
    assert 2.98 < Spent(noise, 0.05, 400).epsilon(1e-5) <= 3
    assert Spent(noise * 0.99, 0.05, 400).epsilon(1e-5) > 3
    assert noise_for(3.0, 1e-5, 0.05, 0) == 0


def test_parts_compose_like_all_their_steps() -> None:
    parts = [Spent(1.5, 0.1, 20), Spent(1.5, 0.1, 30)]
    assert composed(parts, 1e-5) == pytest.approx(Spent(1.5, 0.1, 50).epsilon(1e-5))
    assert composed([*parts, Spent(0.0, 0.1, 1)], 1e-5) == math.inf
    assert composed([], 1e-5) == 0


def network() -> tuple[Network, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.ReLU(), nn.Linear(12, 4))
    return Network(module), torch.randn(9, 1, 4, 4), torch.arange(9) % 4


def single(made: Network, x: Tensor, y: Tensor) -> Tensor:
    made.grad.zero_()
    F.cross_entropy(made.module(x[None]), y[None]).backward()  # type: ignore[no-untyped-call]
    return made.grad.clone()


def heads(kind: str) -> tuple[Network, Tensor, Tensor]:
    torch.manual_seed(0)
    return Network(nn.Linear(12, 4, bias=kind == "bias")), torch.randn(9, 12), torch.arange(9) % 4


@pytest.mark.parametrize("kind", ["network", "bias", "no bias"])
def test_each_sample_is_clipped_alone(kind: str) -> None:
    made, x, y = network() if kind == "network" else heads(kind)
    x[0] *= 100
    each = torch.stack([single(made, a, b) for a, b in zip(x, y, strict=True)])
    norms = each.norm(dim=1)
    clip = float(norms.median())
    assert (norms > clip).any()
    assert (norms < clip).any()
    wanted = (each * (clip / norms).clamp(max=1)[:, None]).sum(0)
    made.grad.zero_()
    clipped_sum(made, x, y, F.cross_entropy, clip)
    torch.testing.assert_close(made.grad, wanted, rtol=1e-3, atol=1e-4)
    for a, b in zip(x, y, strict=True):
        made.grad.zero_()
        clipped_sum(made, a[None], b[None], F.cross_entropy, clip)
        assert float(made.grad.double().norm()) <= clip


@pytest.mark.parametrize("kind", ["network", "bias"])
def test_a_sample_without_a_finite_gradient_adds_nothing(kind: str) -> None:
    made, x, y = network() if kind == "network" else heads(kind)
    made.grad.zero_()
    clipped_sum(made, x[1:], y[1:], F.cross_entropy, 1.0)
    wanted = made.grad.clone()
    x[0].view(-1)[0] = torch.inf
    made.grad.zero_()
    clipped_sum(made, x, y, F.cross_entropy, 1.0)
    torch.testing.assert_close(made.grad, wanted)


def test_the_noise_has_the_variance_that_was_counted() -> None:
    made = Network(nn.Linear(200, 100))
    mechanism = Mechanism(
        clip=0.5, spent=Spent(noise=3.0, rate=0.25, steps=2), noise=Noise(KEY), samples=40
    )
    drawn = []
    for step in range(2):
        made.grad.zero_()
        nothing = torch.empty(0, 200), torch.empty(0, dtype=torch.int64)
        mechanism.gradient(made, *nothing, F.cross_entropy, step)
        drawn.append(made.grad * 10 / (3.0 * 0.5))  # (σ·C·z) / (q·n)
    values = torch.cat(drawn).double()
    n = len(values)
    assert abs(float(values.mean())) < 4 / n**0.5
    assert abs(float(values.var()) - 1) < 4 * (2 / n) ** 0.5
    assert abs(float((values**4).mean()) - 3) < 4 * (96 / n) ** 0.5
    assert abs(float((drawn[0] * drawn[1]).mean())) < 4 / (n / 2) ** 0.5  # each step has its own


def test_samples_are_drawn_independently() -> None:
    sizes = np.array([len(Noise(KEY).chosen(step, 500, 0.1)) for step in range(400)])
    assert abs(sizes.mean() - 50) < 4 * (45 / 400) ** 0.5
    assert 0.75 < sizes.var() / 45 < 1.25
    assert len(Noise(KEY).chosen(0, 500, 1.0)) == 500


@pytest.fixture(scope="module")
def few() -> FederatedData:
    torch.manual_seed(0)
    x, y = torch.randn(90, 3), torch.arange(90) % 2
    x[:, 0] += 4 * y
    return ekiden.federate([(x[i::3], y[i::3]) for i in range(3)])


def run(data: FederatedData, dp: Any = DP(8.0, 1e-3), **more: Any) -> ekiden.Result:  # noqa: B008
    method = more.pop("method", FedSeq(epochs=3))
    training = Training(optimizer="sgd", lr=0.5, batch_size=16)
    torch.manual_seed(0)
    return ekiden.run(
        method,
        data,
        nn.Linear(3, 2),
        dp=dp,
        training=training,
        quiet=True,
        evaluate_every=0,
        **more,
    )


def test_the_seed_gives_the_noise_of_a_simulation(few: FederatedData) -> None:
    first, again, other = (run(few, seed=seed).weights for seed in (0, 0, 1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.params, again.params)
    assert not torch.equal(first.params, other.params)


def test_an_interrupted_fit_goes_on_with_the_same_noise(few: FederatedData) -> None:
    from ekiden.core.base.settings import Hardware
    from ekiden.core.training.feed import Feed
    from ekiden.core.training.fit import Bench, fit

    class Stop(Exception):
        pass

    class Memory:
        saved: dict[str, Tensor] | None = None

        def load(self, key: str) -> dict[str, Tensor] | None:
            return self.saved

        def save(self, key: str, tensors: dict[str, Tensor]) -> None:
            self.saved = {name: value.clone() for name, value in tensors.items()}

    client, memory = few.clients[0], Memory()
    training = Training(batch_size=16, select="last")
    mechanism = Mechanism(1.0, Spent(1.0, 0.5, 6), Noise(KEY), len(client.train))
    bench = Bench(
        Network(nn.Linear(3, 2)),
        Feed(few.dataset, Hardware()),
        training,
        Hardware(),
        private=mechanism,
    )
    start = bench.network.weights()

    def trained(watch: Any = lambda epoch, epochs: None) -> Tensor:
        made = replace(bench, journal=memory, watch=watch)
        return fit(made, start, client.train, client.val, epochs=3, seed=0).params

    def stop(epoch: int, epochs: int) -> None:
        if epoch == 3:
            raise Stop

    whole = trained()
    memory.saved = None
    import ekiden.core.training.fit as module

    module._SHARE_OF_SAVING, before = 0, module._SHARE_OF_SAVING
    try:
        with pytest.raises(Stop):
            trained(stop)
        assert memory.saved is not None
        assert torch.equal(trained(), whole)
    finally:
        module._SHARE_OF_SAVING = before


def test_the_folder_says_what_each_client_told(few: FederatedData) -> None:
    told = run(few).config["privacy"]
    assert told["epsilon"] == max(one["epsilon"] for one in told["clients"].values())
    assert 7.9 < told["epsilon"] <= told["promised"] == 8
    assert set(told["clients"]) == {client.name for client in few.clients}
    steps = {one["steps"] for one in told["clients"].values()}
    rounds = run(few, method=FedAvg(rounds=4, epochs=3)).config["privacy"]["clients"]
    assert {one["steps"] for one in rounds.values()} == {4 * step for step in steps}


def test_training_with_noise_learns(few: FederatedData) -> None:
    assert run(few, DP(50.0, 1e-3), method=FedSeq(epochs=10)).accuracy > 0.9


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_methods_that_no_guarantee_fits_are_refused(kind: Any) -> None:
    if kind().fits() is not None:
        assert Recipe(kind(), dp="epsilon=8").training.select != "best"
        return
    reason = "would show more" if kind.traits.releases else "is not supported with dp"
    with pytest.raises(UserError, match=reason):
        Recipe(kind(), dp="epsilon=8")


@pytest.mark.parametrize(
    "kind", [k for k in METHODS if k().fits() is not None], ids=lambda kind: kind.title()
)
def test_methods_with_a_guarantee_read_samples_in_training_only(
    kind: Any, few: FederatedData
) -> None:
    short = {name: 1 for name in ("rounds", "epochs") if name in kind.__dataclass_fields__}
    data = few
    module = nn.Sequential()
    module.add_module("features", nn.Linear(3, 3))
    module.add_module("head", nn.Linear(3, 2))
    assert ekiden.run(
        kind(**short), data, module, dp=DP(8.0, 1e-3), quiet=True, evaluate_every=0
    ).metrics


def test_a_task_that_reads_samples_is_stopped(few: FederatedData) -> None:
    class Reads(FedSeq):
        @on_client(gives="model")
        def train(self, client: Client, model: Weights) -> Weights:
            compares = alignment(client, None, model, 1.0, 0.0)
            return client.fit(model, epochs=self.epochs, objective=compares)

    reads = Reads(epochs=1)
    with pytest.raises(UserError, match="a loss of its own, for which"):
        run(few, method=reads)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("epsilon=8,more=1", "unknown setting .more."),
        ("epsilon=much", "is not a list of settings"),
        ("delta=1e-5", "there is no epsilon"),
        ("epsilon=-1", "must be greater than 0"),
        ("epsilon=nan", "epsilon nan"),
        ("epsilon=8,clip=0", "clip 0 is out of range"),
        ("epsilon=8,delta=0.05", "lets whole samples of .* go out"),
    ],
)
def test_promises_that_cannot_be_are_refused(text: str, reason: str, few: FederatedData) -> None:
    with pytest.raises(UserError, match=reason):
        run(few, text)


class Remembers(nn.Module):
    """Keeps a mean of what passes through."""

    seen: torch.Tensor

    def __init__(self, *, assigns: bool) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))
        self.assigns = assigns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.assigns:
            self.seen = 0.9 * self.seen + 0.1 * x.detach().mean(0)
        elif self.training:
            self.seen.mul_(0.9).add_(x.detach().mean(0))
        return x


class Last(nn.Module):
    """Returns the outputs at the last place, or the mean over places."""

    def forward(self, x: Any) -> torch.Tensor:
        found: torch.Tensor = x[0][:, -1] if isinstance(x, tuple) else x.mean(1)
        return found


@pytest.mark.parametrize(
    ("layers", "shape", "refused"),
    [
        ((nn.Linear(3, 3), nn.BatchNorm1d(3)), (3,), r"1 \(BatchNorm1d\) fails on them"),
        ((nn.BatchNorm1d(3, track_running_stats=False),), (3,), r"0 \(BatchNorm1d\) fails"),
        ((nn.Linear(3, 3), Remembers(assigns=True)), (3,), r"1 \(Remembers\)"),
        ((Remembers(assigns=False),), (3,), r"0 \(Remembers\)"),
        ((nn.LSTM(3, 3, batch_first=True), Last()), (5, 3), r"0 \(LSTM\) fails on them"),
        ((nn.Embedding(4, 3, padding_idx=0), Last()), (5,), r"0 \(Embedding\) gets other grad"),
        ((nn.Embedding(4, 3, padding_idx=0), Last(), nn.Dropout(0.5)), (5,), r"0 \(Embedding\)"),
        ((nn.Embedding(4, 3), Last(), nn.Dropout(0.5)), (5,), ""),
        ((nn.Linear(3, 3), nn.GroupNorm(1, 3), nn.LayerNorm(3), nn.Dropout(0.5)), (3,), ""),
        ((nn.TransformerEncoderLayer(3, 1, 4, batch_first=True), Last()), (5, 3), ""),
    ],
)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_layers_that_give_no_gradient_of_each_sample_are_named(
    layers: tuple[nn.Module, ...], shape: tuple[int, ...], refused: str
) -> None:
    torch.manual_seed(0)
    network = Network(nn.Sequential(*layers, nn.Linear(3, 2)))
    before = {name: value.clone() for name, value in network.module.state_dict().items()}
    x = torch.randn(3, *shape)
    if isinstance(layers[0], nn.Embedding):
        x = x.abs().long()
    if refused:
        with pytest.raises(UserError, match=refused) as refusal:
            check_samples(network, x, torch.tensor([0, 1, 0]), F.cross_entropy)
        assert "\n" not in str(refusal.value)
    else:
        check_samples(network, x, torch.tensor([0, 1, 0]), F.cross_entropy)
    for name, value in network.module.state_dict().items():
        assert torch.equal(value, before[name])


def test_sam_is_refused() -> None:
    with pytest.raises(UserError, match="sam takes two"):
        Recipe(FedSeq(), training=Training(optimizer="sam"), dp="epsilon=8")


def test_a_subject_at_two_silos_is_refused() -> None:
    from ekiden.core.data.samples import ClientData, Subset
    from ekiden.core.engine.setup import check_subjects
    from ekiden.data import Samples

    samples = Samples(
        torch.zeros(4, 1), torch.zeros(4, dtype=torch.int64), subject=torch.tensor([0, 1, 1, 2])
    )
    none = Subset(samples, torch.arange(0))

    def client(name: str, rows: list[int]) -> ClientData:
        return ClientData(name, Subset(samples, torch.tensor(rows)), none, none)

    check_subjects([client("a", [0]), client("b", [1, 2, 3])])
    with pytest.raises(UserError, match="at a and b"):
        check_subjects([client("a", [0, 1]), client("b", [2, 3])])


def test_a_delta_that_admits_whole_samples_is_refused() -> None:
    with pytest.raises(UserError, match="give a delta far below"):
        planned(DP(8.0, 1e-3), (1,), Training(), 1000)


def test_an_epsilon_is_never_told_smaller_than_it_is() -> None:
    """What was spent is rounded up; what is asked for is kept exactly, also in a run's settings."""
    told = {7.994: "8", 7.9951: "8", 8.0: "8", 1.1: "1.1", 0.70001: "0.701", 123.4: "124"}
    assert {epsilon: spent_epsilon(epsilon) for epsilon in told} == told
    for epsilon in (2.9999996, 3.00000049, 0.1, 8.0, 1e-5):
        assert DP.parse(str(DP(epsilon))) == DP(epsilon)
    assert str(DP(8.0)) == "epsilon=8,delta=1e-05,clip=1"
