"""Sums with noise: one sample moves them by no more than the noise was made for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ekiden
from ekiden import DP, UserError
from ekiden.core.training.gram import NoisySums, measure
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.private.noise import ROUNDED, Draw, Noise
from ekiden.core.training.private.sums import (
    Release,
    bound,
    centred_clipped,
    planned_sums,
    width_for,
)
from ekiden.methods import FedGram
from ekiden.methods.exact.blocks import gaussian_heads
from ekiden.runs.recipe import Recipe
from tests.core.training.private.small import features

KEY = bytes(range(32))


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


def test_too_little_room_for_the_noise_is_refused() -> None:
    with pytest.raises(UserError, match="needs too much noise"):
        release(DP(0.01, 1e-3, clip=4.0)).deviations(50_000)
