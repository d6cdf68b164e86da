"""Differential privacy of gradients and of sums: the noise is exact and as large as promised,
clipping is exact, the accountant agrees, and nothing else leaves a silo."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.stats import chisquare
from torch import Tensor, nn

import ekiden
from ekiden import DP, Training, UserError
from ekiden.authoring import Client, Weights, on_client
from ekiden.core.data.samples import FederatedData
from ekiden.core.training.gram import NoisySums, measure
from ekiden.core.training.network import Network
from ekiden.core.training.private import (
    ROUNDED,
    Draw,
    Mechanism,
    Noise,
    Release,
    Spent,
    bound,
    centred_clipped,
    check_honest,
    check_samples,
    clipped_sum,
    composed,
    epsilon_of_gaussian,
    noise_for,
    planned,
    planned_sums,
    spent_epsilon,
    width_for,
)
from ekiden.methods import METHODS, FedAvg, FedGram, FedSeq
from ekiden.methods.blocks.glam import alignment
from ekiden.methods.exact.blocks import gaussian_heads
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import privacy

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


PROMISE = DP(1.0, 1e-3, clip=0.5)


def release(dp: DP = PROMISE, key: bytes = KEY) -> Release:
    return Release(dp, planned_sums(dp, 100, "a"), Noise(key))


def centre_noise(made: Release, width: int) -> float:
    """The standard deviation of what is added to a sum of features before it is divided,
    measured."""
    drawn: list[int] = []
    gaussian = Draw.gaussian

    def noted(self: Draw, sigma: int, count: int) -> Tensor:
        drawn.append(sigma)
        return gaussian(self, sigma, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draw, "gaussian", noted)
        made.centre([features(width=width)], width)
    return float(drawn[0])


def features(seed: int = 0, rows: int = 60, width: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, width), generator=draw).float(), torch.randint(
        3, (rows,), generator=draw
    )


@pytest.mark.parametrize("sigma", [1, 3])
def test_small_noise_has_the_probabilities_of_a_discrete_gaussian(sigma: int) -> None:
    drawn = Draw(Noise(KEY)).gaussian(sigma, 20_000).numpy()
    inside = np.arange(-2 * sigma, 2 * sigma + 1)
    far = np.arange(-60 * sigma, 60 * sigma + 1)
    weights = np.exp(-(inside**2) / (2 * sigma**2))
    expected = weights / np.exp(-(far**2) / (2 * sigma**2)).sum()
    found = [int((drawn == k).sum()) for k in inside]
    rest = len(drawn) - sum(found)
    assert (
        chisquare(
            [*found, rest], [*(expected * len(drawn)), (1 - expected.sum()) * len(drawn)]
        ).pvalue
        > 1e-3
    )


def test_large_noise_is_as_wide_as_promised_and_nobody_repeats_it_without_the_key() -> None:
    sigma, count = 2**28, 20_000
    drawn = Draw(Noise(KEY)).gaussian(sigma, count)
    share = drawn.double() / sigma
    assert abs(float(share.mean())) < 4 / math.sqrt(count)
    assert abs(float(share.std()) - 1) < 4 / math.sqrt(2 * count)
    assert float((share.abs() > 3).double().mean()) == pytest.approx(0.0027, abs=0.0015)
    assert len(set((drawn % 16).tolist())) == 16  # to the last bit, not a multiple of anything
    assert torch.equal(drawn, Draw(Noise(KEY)).gaussian(sigma, count))
    draw = Draw(Noise(KEY))
    assert not torch.equal(draw.gaussian(5, 50), draw.gaussian(5, 50))
    assert not torch.equal(drawn[:9], Draw(Noise(bytes(32))).gaussian(sigma, 9))
    for wrong in (0, 2**28 + 1):
        with pytest.raises(ValueError, match="is not from"):
            draw.gaussian(wrong, 1)


@pytest.mark.parametrize("clip", [0.01, 0.1, 0.5, 1.0, 4.0])
def test_no_row_is_longer_than_the_bound(clip: float) -> None:
    square = bound(DP(1.0, 1e-3, clip=clip), 12)
    spikes = torch.cat(
        [127 * torch.eye(12), -127 * torch.eye(12), torch.zeros(1, 12), torch.full((1, 12), 127.0)]
    )
    for phi in (features()[0], features(1)[0] * 0.1 // 1, spikes, spikes + 127 * torch.eye(12)[0]):
        u = centred_clipped(phi, square)
        assert torch.equal(u, u.round())
        assert int(u.square().sum(1).max()) <= square
        assert float(u.abs().max()) <= 127


@pytest.mark.parametrize("clip", [0.1, 0.5, 4.0])
def test_one_sample_more_moves_the_sums_by_no_more_than_the_noise_was_made_for(clip: float) -> None:
    """Σ Δ²/(σ² - 3) over all numbers of the sums and the mean is at most 1/σ², for samples made to
    move them most."""
    made = release(DP(1.0, 1e-3, clip=clip))
    square = bound(made.dp, 12)
    spikes = torch.cat(
        [127 * torch.eye(12)[:1], torch.tensor([[127.0] * 6 + [-127.0] * 6]), features()[0]]
    )
    worst, of_the_mean = 0.0, bound(DP(1.0, 1e-3), 12) / (centre_noise(made, 12) ** 2 - ROUNDED)
    for row in centred_clipped(spikes, square):
        one = measure([(row[None], torch.tensor([1]))], 3, 12)
        assert isinstance(one.gram, Tensor)
        parts = zip((one.gram, one.classes, one.counts), made.deviations(12), strict=True)
        moved = sum(
            float(part.double().square().sum()) / (sigma**2 - ROUNDED) for part, sigma in parts
        )
        worst = max(worst, moved + of_the_mean)
    assert worst <= made.spent.noise**-2
    assert (
        worst > 0.5 * made.spent.noise**-2 or clip == 0.1
    )  # rounding costs most where little is left
    assert Spent(made.spent.noise, 1.0, 1).epsilon(1e-3) <= 1.0


def test_the_noise_in_a_release_is_what_it_says_and_silos_share_it() -> None:
    x, y = features(width=40)
    for honest in (1, 4):
        made = release(DP(1.0, 1e-3, clip=0.5, honest=honest))
        told = made.sums([(x, y)], 3, 40, torch.device("cpu"))
        exact = measure([(centred_clipped(x, bound(made.dp, 40)), y)], 3, 40)
        assert isinstance(told.gram, Tensor)
        assert isinstance(exact.gram, Tensor)
        noise = (told.gram - exact.gram).double() / told.gram_noise
        assert float(noise.std()) == pytest.approx(1, abs=0.1)
        assert told.noise == made.deviations(40)
    alone, shared = (release(DP(1.0, 1e-3, clip=0.5, honest=h)).deviations(40) for h in (1, 4))
    # if all but four silos leave theirs out, four shares are as much as one silo alone adds
    assert all(4 * share**2 >= one**2 for one, share in zip(alone, shared, strict=True))
    assert all(
        4 * share**2 < 1.1 * max(one, 32) ** 2 for one, share in zip(alone, shared, strict=True)
    )


def test_noisy_sums_add_up_and_mix_with_nothing_else() -> None:
    x, y = features()
    parts = [
        release(key=bytes([i]) * 32).sums([(x, y)], 3, 12, torch.device("cpu")) for i in range(2)
    ]
    total = parts[0].plus(parts[1])
    assert isinstance(total, NoisySums)
    assert total.parts == 2
    other = release(DP(2.0, 1e-3, clip=0.5)).sums([(x, y)], 3, 12, torch.device("cpu"))
    exact = measure([(x, y)], 3, 12)
    for wrong in (other, exact):
        with pytest.raises(UserError, match="different noise"):
            parts[0].plus(wrong)
    with pytest.raises(UserError, match="cannot be combined"):
        exact.plus(parts[0])


def test_the_penalty_follows_from_the_noise_alone() -> None:
    made = release()
    totals = [made.sums([features(seed)], 3, 12, torch.device("cpu")) for seed in (0, 1)]
    rules = [m.rule * m.n for m in map(gaussian_heads.moments, totals)]
    assert rules[0] == pytest.approx(rules[1])
    assert rules[0] == pytest.approx(made.deviations(12)[0] * math.sqrt(12))
    head = gaussian_heads.ridge(gaussian_heads.moments(totals[0]))
    assert head.penalty * gaussian_heads.moments(totals[0]).n == pytest.approx(rules[0])
    rows = gaussian_heads.moments(totals[0]).rows(head)[:, :-1]
    assert torch.allclose(
        rows.sum(1), torch.zeros(3, dtype=torch.float64), atol=1e-12
    )  # as features were centred


def test_more_samples_and_a_larger_epsilon_leave_room_for_more_features() -> None:
    widths = [
        width_for(DP(e, 1e-5), n)
        for e, n in ((1.0, 5_000), (1.0, 50_000), (3.0, 50_000), (8.0, 50_000))
    ]
    assert widths == sorted(set(widths))
    assert width_for(DP(1.0, 1e-5), 1) == 16
    resolved = Recipe(FedGram(dictionary="seed", samples=50_000), dp="epsilon=3").method
    assert isinstance(resolved, FedGram)
    assert resolved.width == widths[2]
    of_network = Recipe(FedGram(dictionary="seed", features="network"), dp="epsilon=3").method
    assert isinstance(of_network, FedGram)
    assert (of_network.width, of_network.bytes) == (0, "own")


def test_a_mean_with_noise_is_near_the_mean_of_many_samples_and_nothing_for_few() -> None:
    x, _ = features(rows=5000, width=40)
    x = (x / 8 + torch.linspace(-60, 60, 40)).round()
    made = release(DP(8.0, 1e-3))
    exact = centred_clipped(x, bound(made.dp, 40)).mean(0)

    def told(rows: int) -> Tensor:
        return made.centre([(x[:rows], torch.zeros(rows))], 40).double()

    error = centre_noise(made, 40) / 5000
    assert 0.5 * error < float((told(5000) - exact).std()) < 2 * error + 0.5
    assert not told(20).any()
    assert not told(0).any()


def test_scores_of_features_are_those_of_features_minus_the_mean() -> None:
    x, y = features(width=40, rows=400)
    x, centre = x / 4 + 50, torch.randint(-40, 90, (40,)).to(torch.int8)
    x = x.round()
    sums = release(DP(8.0, 1e-3)).sums([(x - centre, y)], 3, 40, torch.device("cpu"))
    m = gaussian_heads.moments(sums)
    head = gaussian_heads.ridge(m)
    before, after = (each.rows(head) for each in (m, m.around(centre)))

    def scores(phi: Tensor, rows: Tensor) -> Tensor:
        return phi.double() @ rows[:, :-1].T + rows[:, -1]

    assert torch.allclose(scores(x - centre, before), scores(x, after))
    assert not torch.allclose(before, after)


@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DivergenceWarning")
@pytest.mark.parametrize("topology", ["chain", "star"])
def test_what_all_features_share_is_taken_away_by_the_mean_that_one_client_tells(
    topology: Any,
) -> None:
    draw = torch.Generator().manual_seed(0)
    y = torch.randint(3, (6000,), generator=draw)
    x = (
        torch.tensor([1.0, -1.0] * 8)
        + 0.7 * torch.eye(16)[y]
        + 0.3 * torch.randn(6000, 16, generator=draw)
    )
    data = ekiden.federate(
        [(x[i::3], y[i::3]) for i in range(3)], classes=["a", "b", "c"], val_fraction=0.0
    )
    method = FedGram(dictionary="seed", width=40, features="random", topology=topology)
    dp = DP(3.0, 1e-5, clip=0.3, honest=3)
    subtracted = ekiden.run(method, data, dp=dp, quiet=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Release, "centre", lambda self, blocks, width: torch.zeros(width, dtype=torch.int8)
        )
        left = ekiden.run(method, data, dp=dp, quiet=True)
    assert subtracted.accuracy > 0.85
    assert left.accuracy < 0.75


SEEDED: dict[str, Any] = {"dictionary": "seed", "width": 8}


@pytest.mark.parametrize(
    ("method", "dp", "reason"),
    [
        (FedGram(width=8), "epsilon=1", "dictionary auto would show more: give dictionary seed"),
        (FedGram(**SEEDED, head="lda"), "epsilon=1", "head lda would show more"),
        (FedGram(**SEEDED, personal=True), "epsilon=1", "personal would show more"),
        (FedGram(dictionary="seed", bits=16, samples=99), "epsilon=1", "bits 16 would show more"),
        (FedGram(dictionary="seed"), "epsilon=1", "dp needs samples"),
        (FedAvg(), "epsilon=1,honest=2", "shares the noise of sums, fedavg has none"),
        (FedGram(**SEEDED), "epsilon=1,honest=0", "honest"),
        (FedGram(**SEEDED), "epsilon=1,honest=1.5", "it must be a whole number"),
        (with_lap(FedSeq()), "epsilon=1", "is not supported with dp"),
    ],
)
def test_what_would_show_more_than_one_noisy_sum_is_refused(
    method: Any, dp: str, reason: str
) -> None:
    with pytest.raises(UserError, match=reason):
        Recipe(method, dp=dp)


def test_noise_is_not_shared_by_more_silos_than_there_are() -> None:
    check_honest(DP(1.0, honest=3), "abc")
    with pytest.raises(UserError, match="honest=4 needs so many silos, and there are 3"):
        check_honest(DP(1.0, honest=4), "abc")


def test_too_little_room_for_the_noise_is_refused() -> None:
    with pytest.raises(UserError, match="needs too much noise"):
        release(DP(0.01, 1e-3, clip=4.0)).deviations(50_000)


def test_a_task_that_reads_samples_without_giving_noisy_sums_is_stopped() -> None:
    class Peeks(FedGram):
        def settled_by(self, client: Any, model: Any) -> Any:
            client.class_counts()
            return super().settled_by(client, model)

    x, y = features(rows=40)
    data = ekiden.federate(
        [(x, y), (x, y)], tests=[(x, y)] * 2, classes=["a", "b", "c"], val_fraction=0.0
    )
    dp = DP(1.0, 1e-3)
    result = ekiden.run(FedGram(**SEEDED), data, dp=replace(dp, honest=2), quiet=True)
    assert "if 2 silos add their noise" in privacy(result.config)
    with pytest.raises(UserError, match="reads samples other than by training"):
        ekiden.run(Peeks(**SEEDED), data, dp=dp, quiet=True)
