"""Each sample is clipped alone, by any network that gives its own gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import DP, Training, UserError
from ekiden.core.data.samples import FederatedData
from ekiden.core.training.network import Network
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.private.gradients import Mechanism, check_samples, clipped_sum
from ekiden.core.training.private.noise import Noise
from ekiden.methods import FedSeq
from tests.core.training.private.small import run

KEY = bytes(range(32))


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


def test_training_with_noise_learns(few: FederatedData) -> None:
    assert run(few, DP(50.0, 1e-3), method=FedSeq(epochs=10)).accuracy > 0.9


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
