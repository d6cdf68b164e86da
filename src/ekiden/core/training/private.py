"""Differential privacy: the promise that a run makes, the noise that keeps it, and the accountant
that counts it.

Two data sets are neighbours if one has one training sample more. Numbers of samples are not secret.

The noise of sums of features is a discrete Gaussian: Clément Canonne, Gautam Kamath, Thomas
Steinke: The Discrete Gaussian for Differential Privacy. NeurIPS 2020.
https://arxiv.org/abs/2004.00010. It tells no more than a Gaussian with a variance that is smaller
by `ROUNDED` = 3. For if a sum with Gaussian noise of variance s² is rounded at random, to a whole
number at the distance d with a probability in proportion to exp(-d²/6), the result is the sum with
discrete Gaussian noise of variance s² + 3, up to a factor of 1 ± 10^-24 for each number (Chris
Peikert: An Efficient and Parallel Gaussian Sampler for Lattices. CRYPTO 2010, Theorem 3.1). Silos
can share the noise: Peter Kairouz, Ziyu Liu, Thomas Steinke: The Distributed Discrete Gaussian
Mechanism for Federated Learning with Secure Aggregation. ICML 2021.
https://arxiv.org/abs/2102.06387. The sum of h shares is not quite a discrete Gaussian: its
divergence differs by less than exp(-π²σ²) for each number, with the σ of a share. `_LEAST` makes
that less than 10^-1000.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_CEILING, Context
from functools import lru_cache
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ekiden.core.base.checks import Checked, Count, Positive, Range, made
from ekiden.core.base.errors import UserError, at, first_line
from ekiden.core.base.settings import Training
from ekiden.core.models.split import SplitNetwork
from ekiden.core.training import frozen
from ekiden.core.training.gram import LARGEST, NoisySums, measure, noisy
from ekiden.core.training.network import Network

# (outputs (1, ...), labels (1, ...)) -> the loss of a sample
Loss = Callable[[Tensor, Tensor], Tensor]
Values = np.ndarray[Any, np.dtype[np.float64]]
_ORDERS = np.array(
    [
        1.05,
        1.1,
        1.2,
        1.35,
        *(quarters / 4 for quarters in range(6, 32)),
        *range(8, 24),
        *range(24, 64, 4),
        64,
        128,
        256,
        512,
    ]
)
"""α, orders of the Rényi divergence"""
_LEAST_NOISE = 0.2
_MOST_NOISE = 1e5
_FAR = (
    200.0  # standard deviations to which integrals go; orders whose peak lies beyond are left out
)
# gradients are clipped to a little less than C, so that rounding never takes one above it
_BELOW = 1 - 1e-4
# gradients of single samples that are in memory together, in numbers
_CHUNK = 1 << 25


@dataclass(frozen=True)
class DP(Checked):
    """The promise of a run: who sees all that leaves a silo learns little about one training
    sample.

    For neighbouring data sets D, D' and every event, P[D] ≤ exp(ε)·P[D'] + δ.
    """

    epsilon: Positive
    """ε, for each silo and all its steps together"""
    delta: Annotated[float, Range(above=0, below=0.1)] = 1e-5
    """δ, below 1/n of every silo"""
    clip: Positive = 1.0
    """C, the norm to which the gradient of each sample is clipped. For sums, the norm of its
    features, in 127/4·√D"""
    honest: Count = 1
    """h, for sums: the silos whose noise together keeps the promise. The noise of one silo is 1/h
    of it, so the promise holds if h silos of the sum add theirs and keep it secret. With 1, each
    silo adds all of it"""

    @classmethod
    def parse(cls, text: str) -> "DP | None":
        """Return what "epsilon=8,delta=1e-5,clip=1" says; None for an empty text."""
        if not text:
            return None
        try:
            pairs = [part.split("=") for part in text.split(",")]
            given = {name.strip(): _number(value.strip()) for name, value in pairs}
        except ValueError:
            raise UserError(
                f"--dp {text!r} is not a list of settings: write epsilon=8,delta=1e-5,clip=1"
            ) from None
        with at(f"--dp {text!r}"):
            return made(cls, given, what="setting")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return ",".join(
            # exact: never a larger ε than was asked for
            f"{name}={repr(value).removesuffix('.0')}"
            for name, value in vars(self).items()
            if (name, value) != ("honest", 1)
        )


def _number(text: str) -> float:
    if text.isdigit():
        return int(text)
    return float(text)


def spent_epsilon(epsilon: float) -> str:
    """Return an ε that was spent with three digits, rounded up: never less than was spent."""
    found = Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(epsilon))
    return f"{found.normalize():f}"


def condition(told: Mapping[str, Any]) -> str:
    """Return on what the ε that a run folder tells depends, for sentences; empty if on nobody."""
    honest = told.get("honest", 1)
    if honest > 1:
        return f", if {honest} silos add their noise and keep it secret"
    return ""


class Keeper(Protocol):
    """Has the randomness of a task at its client, and counts what is told."""

    def key(self, fit: int, spent: "Spent", *, note: bool = True) -> bytes:
        """Return the key of the noise of a task's fit; the same after a crash.

        Args:
            fit: its number.
            spent: what it tells.
            note: whether it is noted first that this is spent.

        Raises:
            UserError: the promise, or the client's own limit, would be broken.
        """


@dataclass(frozen=True)
class Spent:
    """What training tells: `steps` of Poisson samples at a `rate`, with Gaussian `noise` of that
    many C.
    """

    noise: float
    rate: float
    steps: int

    def epsilon(self, delta: float) -> float:
        """Return ε at δ."""
        return composed([self], delta)


def planned(
    dp: DP, fits: tuple[int, ...], training: Training, samples: int, where: str = "a client"
) -> Spent:
    """Return what one client with so many samples tells in a run, with the least noise that keeps
    the promise.

    Silos hold different samples. So the run as a whole keeps the ε of its worst silo (parallel
    composition): a sample is in the training of its own silo only, and all that others do with the
    model that they receive does not depend on it further. This holds in a chain, too. It does not
    hold for a person with samples in two silos.
    """
    check_delta(dp, samples, where)
    steps = sum(training.steps(samples, epochs) for epochs in fits)
    rate = min(1.0, training.batch_size / samples)
    return Spent(noise_for(dp.epsilon, dp.delta, rate, steps), rate, steps)


def check_delta(dp: DP, samples: int, where: str) -> None:
    """Refuse a δ that allows one of a client's samples to be published."""
    if dp.delta * samples >= 1:
        raise UserError(
            f"--dp delta={dp.delta:g} lets whole samples of {where} ({samples}) go out: give a "
            f"delta far below {1 / samples:.2g}"
        )


def composed(parts: Sequence[Spent], delta: float) -> float:
    """Return ε at δ of all `parts` together, by their Rényi divergences; exactly if all q = 1.

    Ilya Mironov, Kunal Talwar, Li Zhang: Rényi Differential Privacy of the Sampled Gaussian
    Mechanism. 2019. https://arxiv.org/abs/1908.10530. From Rényi to (ε, δ): Clément Canonne, Gautam
    Kamath, Thomas Steinke: The Discrete Gaussian for Differential Privacy. NeurIPS 2020,
    Proposition 12. https://arxiv.org/abs/2004.00010.
    """
    parts = [part for part in parts if part.steps]
    if not parts:
        return 0.0
    if any(part.noise == 0 for part in parts):
        return math.inf
    each = [part.steps * _renyi(part.noise, part.rate) for part in parts]
    bounded = epsilon_of_renyi(np.sum(each, axis=0), delta)
    if any(part.rate < 1 for part in parts):
        return bounded
    return min(
        bounded,
        epsilon_of_gaussian(math.sqrt(sum(part.steps / part.noise**2 for part in parts)), delta),
    )


def epsilon_of_gaussian(ratio: float, delta: float) -> float:
    """Return ε at δ of Gaussian noise, given `ratio` μ = Δ/σ: δ = Φ(μ/2 - ε/μ) - exp(ε)·Φ(-μ/2 -
    ε/μ), rounded up.

    Borja Balle, Yu-Xiang Wang: Improving the Gaussian Mechanism for Differential Privacy. ICML
    2018, Theorem 8. https://arxiv.org/abs/1805.06530. Several releases, each chosen after the
    others, are as one with μ² = Σ μ_i²: Jinshuo Dong, Aaron Roth, Weijie Su: Gaussian Differential
    Privacy. Journal of the Royal Statistical Society B,
    2022. https://arxiv.org/abs/1905.02383.
    """

    def tells_more(epsilon: float) -> bool:
        near, far = torch.special.log_ndtr(
            torch.tensor(
                [ratio / 2 - epsilon / ratio, -ratio / 2 - epsilon / ratio], dtype=torch.float64
            )
        ).tolist()
        rest = min(epsilon + far - near, 0.0)
        return bool(rest < 0 and near + math.log(-math.expm1(rest)) > math.log(delta))

    if not tells_more(0):
        return 0.0
    low = 0.0
    # above it Φ(μ/2 - ε/μ) is less than δ
    high = ratio * (ratio / 2 + math.sqrt(-2 * math.log(delta)))
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if tells_more(middle):
            low = middle
        else:
            high = middle
    return high


def epsilon_of_renyi(renyi: Values, delta: float) -> float:
    """Return ε at δ of a mechanism with this Rényi divergence at each of the orders."""
    a = _ORDERS
    found: Values = renyi + np.log1p(-1 / a) - (math.log(delta) + np.log(a)) / (a - 1)
    return max(0.0, float(found.min()))


def _renyi(noise: float, rate: float) -> Values:
    """Return the Rényi divergence of one step at each order α: log E_z[(1 - q + q·exp((2z -
    1)/2σ²))^α] / (α - 1).

    The expectation over z ~ N(0, σ²) is a sum over a grid, whose error for an analytic integrand is
    below that of floating point.
    """
    if rate == 1:
        gaussian: Values = _ORDERS / (2 * noise**2)
        return gaussian
    found = np.full(len(_ORDERS), np.inf)
    near = _ORDERS / noise < _FAR
    a = _ORDERS[near, None]
    end = 14 + float(a.max(initial=0)) / noise
    # in units of σ; the peaks are at 0 and at α/σ
    z = np.linspace(-14, end, int(6 * (14 + end)))
    ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + z / noise - 0.5 / noise**2)
    logs = a * ratio - z**2 / 2
    top = logs.max(1, keepdims=True)
    moments = top[:, 0] + np.log(np.exp(logs - top).sum(1) * (z[1] - z[0]) / math.sqrt(2 * math.pi))
    found[near] = np.maximum(moments, 0) / (a[:, 0] - 1)
    return found


@lru_cache(maxsize=256)
def noise_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return the least noise multiplier σ with which `steps` keep (ε, δ)."""
    if steps == 0:
        return 0.0
    low = math.log(_LEAST_NOISE)
    high = math.log(_MOST_NOISE)
    if Spent(_MOST_NOISE, rate, steps).epsilon(delta) > epsilon:
        raise UserError(
            f"--dp epsilon={epsilon:g} cannot be kept in {steps} steps: give a larger epsilon"
        )
    while high - low > 1e-3:
        middle = (low + high) / 2
        if Spent(math.exp(middle), rate, steps).epsilon(delta) <= epsilon:
            high = middle
        else:
            low = middle
    return math.exp(high)


@dataclass(frozen=True)
class Noise:
    """A stream of random numbers that nobody can foretell without its key: SHAKE-256 of key,
    purpose and place.

    PyTorch's generators do not suffice: their state follows from a few thousand outputs.
    """

    key: bytes  # 32 bytes

    def words(self, purpose: str, place: int, count: int) -> Values:
        """Return (count,) numbers, uniform on the multiples of 2^-53 in [0, 1)."""
        found: Values = (self.bits(purpose, place, count) >> np.uint64(11)).astype(np.float64)
        return found * 2.0**-53

    def bits(self, purpose: str, place: int, count: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
        """Return (count,) words of 64 random bits."""
        return np.frombuffer(
            hashlib.shake_256(self.key + f"{purpose} {place}".encode()).digest(8 * count), "<u8"
        )

    def normal(self, place: int, count: int) -> Values:
        """Return (count,) standard normal numbers (Box and Muller)."""
        half = -(-count // 2)
        u = self.words("normal", place, 2 * half)
        radius = np.sqrt(-2 * np.log1p(-u[:half]))
        angle = 2 * math.pi * u[half:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]

    def chosen(self, place: int, samples: int, rate: float) -> Tensor:
        """Return the positions of a Poisson sample: each of `samples` with probability `rate`."""
        return torch.from_numpy(np.flatnonzero(self.words("sample", place, samples) < rate))

    def seed(self, place: int) -> int:
        """Return a 63-bit seed for what need not be foretold by nobody alone, such as
        augmentation.
        """
        return int(self.words("seed", place, 1)[0] * 2**53)


@dataclass(frozen=True)
class Mechanism:
    """Poisson sampling, clipping and noise of one fit: Martin Abadi et al.: Deep Learning with
    Differential Privacy.

    CCS 2016. https://arxiv.org/abs/1607.00133 (Algorithm 1). The gradient of a step is
    (Σ_i g_i·min(1, C/‖g_i‖) + σ·C·z) / (q·n), over the samples of the step; z is standard normal.
    """

    clip: float  # C
    spent: Spent  # what the fit tells: σ, q and the number of its steps
    noise: Noise  # the fit's random numbers
    samples: int  # n

    @property
    def batch(self) -> float:
        """Return q·n, the expected number of samples of a step."""
        return self.spent.rate * self.samples

    def rows(self, step: int) -> Tensor:
        """Return the positions of the samples of a step; there may be none."""
        return self.noise.chosen(step, self.samples, self.spent.rate)

    def gradient(self, network: Network, x: Tensor, y: Tensor, loss: Loss, step: int) -> None:
        """Add the noisy gradient of a step to `network.grad`.

        Args:
            network: is trained.
            x: inputs (b, ...).
            y: labels (b, ...).
            loss: of one sample.
            step: number of the step in its fit.
        """
        if len(y):
            clipped_sum(network, x, y, loss, self.clip)
        drawn = torch.from_numpy(self.noise.normal(step, len(network.grad)))
        network.grad.add_((drawn * (self.spent.noise * self.clip)).to(network.grad))
        network.grad.div_(self.batch)


def clipped_sum(network: Network, x: Tensor, y: Tensor, loss: Loss, clip: float) -> None:
    """Add the gradients of the samples, each clipped to the norm `clip`, to `network.grad`.

    A sample whose gradient is not finite adds nothing: it must not show by stopping the run.
    """
    part, x = _trained(network, x)
    if (
        isinstance(part, nn.Linear)
        and x.dim() == 2
        and all(p.requires_grad for p in part.parameters())
    ):
        _clipped_sum_of_linear(part, x, y, loss, clip)
        return
    parameters = dict(part.named_parameters())
    size = max(1, _CHUNK // len(network.grad))
    for some_x, some_y in zip(torch.split(x, size), torch.split(y, size), strict=True):
        gradients = _gradients(part, some_x, some_y, loss)
        norms = torch.linalg.vector_norm(
            torch.stack([_norms(g.flatten(1)) for g in gradients.values()]), dim=0
        )
        shares = _shares(norms, clip).to(network.grad.dtype)
        bad = ~torch.isfinite(norms)
        for name, g in gradients.items():
            into = parameters[name].grad
            assert into is not None
            flat = g.flatten(1)
            if bool(bad.any()):
                flat = flat.masked_fill(bad[:, None], 0.0)
            into.add_((shares @ flat).view_as(into))


def _trained(network: Network, x: Tensor) -> tuple[nn.Module, Tensor]:
    """Return the part that is trained, and its inputs: a frozen part is run once, outside."""
    part: nn.Module = network.module
    if not network.light:
        return part, x
    assert isinstance(part, SplitNetwork)
    with torch.no_grad():
        return part.head, part.features(x)


def _gradients(part: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> dict[str, Tensor]:
    """Return the gradients (b, ...) of samples, by the names of the parameters."""

    def one(values: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        outputs: Tensor = functional_call(part, values, (sample[None],))
        return loss(outputs.float(), label[None])

    # Each sample has the parameters as its own. `torch.func.grad` is as fast, but first loads
    # torch's compiler.
    own = {
        n: p.detach().expand(len(y), *p.shape).requires_grad_()
        for n, p in part.named_parameters()
        if p.requires_grad
    }
    total = vmap(one, randomness="different")(own, x, y).sum()
    found = torch.autograd.grad(total, list(own.values()), materialize_grads=True)
    return dict(zip(own, found, strict=True))


def _clipped_sum_of_linear(layer: nn.Linear, x: Tensor, y: Tensor, loss: Loss, clip: float) -> None:
    """Add what `clipped_sum` adds, for one linear layer: the gradient of a sample is δaᵀ, its norm
    ‖δ‖·‖a‖.
    """

    def one(outputs: Tensor, label: Tensor) -> Tensor:
        return loss(outputs[None].float(), label[None])

    outputs = layer(x).detach().requires_grad_()
    (delta,) = torch.autograd.grad(vmap(one, randomness="different")(outputs, y).sum(), [outputs])
    inputs = torch.cat([x, x.new_ones(len(x), 1)], 1) if layer.bias is not None else x
    norms = _norms(delta) * _norms(inputs)
    finite = torch.isfinite(norms)[:, None]
    delta = torch.where(finite, delta, 0.0) * _shares(norms, clip).to(delta)[:, None]
    found = delta.T @ torch.where(finite, inputs, 0.0)
    for parameter, part in zip(
        layer.parameters(), (found[:, : x.shape[1]], found[:, -1]), strict=False
    ):
        assert parameter.grad is not None
        parameter.grad.add_(part)


def _shares(norms: Tensor, clip: float) -> Tensor:
    """Return the factors (b,) that clip gradients with these norms; 0 where one is not finite."""
    return (clip * _BELOW / norms.clamp(min=clip)).nan_to_num(0.0)


def _norms(rows: Tensor) -> Tensor:
    """Return the norms (b,) of rows (b, d), in double precision above blocks of a length that
    float32 sums well.
    """
    each = [torch.linalg.vector_norm(part, dim=1) for part in torch.split(rows, 1 << 14, dim=1)]
    found: Tensor = torch.linalg.vector_norm(torch.stack(each).double(), dim=0)
    return found


def check_samples(network: Network, x: Tensor, y: Tensor, loss: Loss) -> None:
    """Refuse a network that does not give each sample's own gradient, after trying it on a copy.

    Args:
        network: will be trained.
        x: a few inputs (b, ...).
        y: labels (b, ...).
        loss: of one sample.

    Raises:
        UserError: names the layer: one that fails if samples pass one by one, keeps something of
            them in a buffer, or gets other gradients than from each sample alone.
    """
    part, x = _trained(Network(frozen.copied(network.module), x.device), x)
    layers = {id(layer): name or "the network" for name, layer in part.named_modules()}
    # the layers that were entered and not left
    inside: list[nn.Module] = [part]
    for layer in part.modules():
        layer.register_forward_pre_hook(lambda layer, _: inside.append(layer))
        # None keeps the output
        layer.register_forward_hook(lambda *_: inside.pop() and None)
    before = {name: (value, value.clone()) for name, value in part.named_buffers()}

    def refusal(layer: nn.Module, why: str) -> UserError:
        return UserError(
            f"--dp needs the gradient of each sample alone, and {layers[id(layer)]} "
            f"({type(layer).__name__}) {why}: choose a network without it, such as resnet18_gn, or "
            "freeze that part (--train head)"
        )

    part.train()
    try:
        found = _gradients(part, x, y, loss)
    except (RuntimeError, ValueError, TypeError) as error:
        raise refusal(inside[-1], f"fails on them ({first_line(error)})") from None
    for name, value in part.named_buffers():
        same, kept = before[name]
        if value is not same or not torch.equal(value, kept):
            raise refusal(part.get_submodule(name.rpartition(".")[0]), "remembers samples")
    alone = _alone(part, x, y, loss)
    if any(not torch.equal(a, b) for a, b in zip(alone, _alone(part, x, y, loss), strict=True)):
        # without dropout
        part.eval()
        try:
            found = _gradients(part, x, y, loss)
            alone = _alone(part, x, y, loss)
        except RuntimeError:  # a fused kernel of evaluation, which has no gradient
            return
    for (name, one), other in zip(found.items(), alone, strict=True):
        # far more than rounding, far less than a mistake
        near = 1e-3 * float(other.abs().max())
        if bool(((one - other).abs() > near).any()):
            layer = part.get_submodule(name.rpartition(".")[0])
            raise refusal(layer, "gets other gradients if samples pass together")


def _alone(part: nn.Module, x: Tensor, y: Tensor, loss: Loss) -> list[Tensor]:
    """Return what `_gradients` gives, from one pass for each sample."""
    trained = [p for p in part.parameters() if p.requires_grad]
    each = [
        torch.autograd.grad(loss(part(a[None]).float(), b[None]), trained, materialize_grads=True)
        for a, b in zip(x, y, strict=True)
    ]
    return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def check_training(training: Training) -> None:
    """Refuse optimisers for which --dp promises nothing."""
    if training.class_weights != "none":
        raise UserError(
            "--class-weights tells counts of labels, for which --dp promises nothing: leave it out"
        )
    if training.optimizer == "sam":
        raise UserError(
            "--dp counts one gradient a step, and sam takes two: choose --optimizer sgd or adam"
        )


# parts of 1/σ² that go to products, class sums and counts
_SHARES = (0.68, 0.3, 0.01)
_CENTRE = (
    0.01  # the part of 1/σ² that goes to the mean of one client's features, which all subtract
)
# the largest part of the squared length of this mean that may be noise
_HIDDEN = 0.2
_LEAST = 16
_MOST = 2**28
ROUNDED = 3  # what is taken from a discrete Gaussian's variance to compare it with a Gaussian
# features for which the noise's largest eigenvalue is about as large as a usual one of the sums
_ROOM = 0.5
# of `clip`, for each feature
_UNIT = LARGEST / 4
Whole = np.ndarray[Any, np.dtype[np.int64]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


def planned_sums(dp: DP, samples: int, where: str) -> Spent:
    """Return what one release of a client's sums tells: a Gaussian mechanism of sensitivity 1.

    A sample is in the sums of its own silo only, so the run keeps the ε of one release.
    """
    check_delta(dp, samples, where)
    return Spent(noise_for(dp.epsilon, dp.delta, 1.0, 1), 1.0, 1)


def of_centre(plan: Spent) -> Spent:
    """Return what the mean of a client's features tells, of all that its release may tell."""
    return replace(plan, noise=plan.noise / math.sqrt(_CENTRE))


def of_sums(plan: Spent) -> Spent:
    """Return what the sums tell without the mean."""
    return replace(plan, noise=plan.noise / math.sqrt(1 - _CENTRE))


def check_honest(dp: DP | None, clients: Sequence[object]) -> None:
    """Refuse noise that more clients share than there are."""
    if dp is not None and 0 < len(clients) < dp.honest:
        raise UserError(
            f"--dp honest={dp.honest} needs so many silos, and there are {len(clients)}: give fewer"
        )


def width_for(dp: DP, samples: int) -> int:
    """Return D for so many samples of all clients, from them and from ε alone.

    The noise matrix has a norm of about 2σC²√D, and C²n/D is a usual eigenvalue of the sums.
    """
    return max(16, int((_ROOM * samples / noise_for(dp.epsilon, dp.delta, 1.0, 1)) ** (2 / 3)))


@dataclass(frozen=True)
class Release:
    """One release of a client's sums, and of the mean of its features if no other client gave one
    before.

    The vector that one sample adds is (φφᵀ above and on the diagonal, φ in the row of its class, 1
    in its count). Its parts have norms of at most √((C⁴ + C²·127²)/2), C and 1, where C bounds ‖φ‖.
    Each has noise of its own. The inverse squares of noise by norm, with that of the mean, add up
    to that of `spent`: Gaussians compose so, also if the later one depends on the earlier one, as
    the sums depend on the mean.
    """

    dp: DP  # the promise
    spent: Spent  # what the sums and the mean tell together
    noise: Noise  # the client's random numbers, for the sums or for the mean

    def deviations(self, width: int) -> tuple[int, int, int]:
        """Return the standard deviations of one client's noise for products, class sums and
        counts.
        """
        square = bound(self.dp, width)
        products = math.sqrt(square * (square + min(square, LARGEST**2)) / 2)
        norms = (products, math.sqrt(square), 1.0)
        first, second, third = (
            self._deviation(norm, share, self.dp.honest, width)
            for norm, share in zip(norms, _SHARES, strict=True)
        )
        return first, second, third

    def _deviation(self, norm: float, share: float, honest: int, width: int) -> int:
        """Return σ of one of `honest` clients whose noise together hides a part of this norm with
        its share.
        """
        found = math.ceil(math.sqrt((self.spent.noise**2 * norm**2 / share + ROUNDED) / honest))
        if found > _MOST:
            raise UserError(
                f"--dp epsilon={self.dp.epsilon:g} needs too much noise for {width} features: "
                "lower clip"
            )
        return max(found, _LEAST)

    def centre(self, blocks: Iterable[tuple[Tensor, Tensor]], width: int) -> Tensor:
        """Return (D,) int8, the noisy mean of features (b, D); 0 if much of it is noise, as for few
        samples.

        Features are clipped as with `clip` = 1, so that the mean has its full length. The client
        alone adds all of its noise. Numbers of samples are not secret.
        """
        square = bound(replace(self.dp, clip=1.0), width)
        total = torch.zeros(width, dtype=torch.int64)
        n = 0
        for phi, _ in blocks:
            total += centred_clipped(phi, square).sum(0).long().cpu()
            n += len(phi)
        sigma = self._deviation(math.sqrt(square), _CENTRE, 1, width)
        told = (total + Draw(self.noise).gaussian(sigma, width)).double()
        if width * sigma**2 > _HIDDEN * float(told.square().sum()):
            return torch.zeros(width, dtype=torch.int8)
        return (told / n).round().clamp(-LARGEST, LARGEST).to(torch.int8)

    def sums(
        self,
        blocks: Iterable[tuple[Tensor, Tensor]],
        classes: int,
        width: int,
        device: torch.device,
    ) -> NoisySums:
        """Return noisy sums of centred and clipped features (b, D), which are whole numbers, with
        labels (b,).
        """
        square = bound(self.dp, width)
        clipped: Iterator[tuple[Tensor, Tensor]] = (
            (centred_clipped(phi, square), y) for phi, y in blocks
        )
        draw = Draw(self.noise)
        return noisy(
            measure(clipped, classes, width, device), self.deviations(width), draw.gaussian
        )


@dataclass
class Privacy:
    """What `--dp` lets one task of a client reveal about its samples."""

    dp: DP  # the promise of the run
    plan: Spent  # what the client tells in the whole run
    keeper: Keeper  # has the client's noise, and counts what is spent
    releases: bool  # whether the method gives noisy sums; otherwise it trains
    client: str  # its name in messages
    released: list[Spent] = field(default_factory=list)  # by this task: the mean, then the sums

    def refuse_reading(self) -> None:
        """Refuse a task that reads samples before it has the noise of its sums."""
        if not self.released:
            raise self._error("reads samples other than by training, for which --dp has no noise")

    def mechanism(self, fit: int, steps: int, samples: int, *, whole: bool) -> Mechanism:
        """Return what makes a fit private; `whole`: of the run's network on all training samples."""
        if not whole or self.releases:
            raise self._error("trains on a part of its own, for which --dp promises nothing")
        spent = replace(self.plan, steps=steps)
        return Mechanism(self.dp.clip, spent, Noise(self.keeper.key(fit, spent)), samples)

    def release(self, *, centre: bool) -> Release:
        """Return what adds noise to sums over samples, or to the mean of their features."""
        spent = of_centre(self.plan) if centre else of_sums(self.plan)
        if not self.releases or spent in self.released:
            raise self._error("gives sums for which --dp has no noise")
        self.released.append(spent)
        key = self.keeper.key(int(not centre), spent, note=False)
        return Release(self.dp, self.plan, Noise(key))

    def note(self) -> None:
        """Note that sums with noise are spent, at the end of a task: if it is refused before,
        nothing left.
        """
        for spent in self.released:
            self.keeper.key(int(spent != of_centre(self.plan)), spent)

    def _error(self, why: str) -> UserError:
        return UserError(f"{self.client}: the task {why}")


def bound(dp: DP, width: int) -> int:
    """Return C², the largest square of a norm; a whole number."""
    return max(1, math.floor((dp.clip * _UNIT) ** 2 * width))


def centred_clipped(phi: Tensor, square: int) -> Tensor:
    """Return whole numbers (b, D): each row minus its mean, with a squared norm of at most
    `square`.

    A row that is longer is shortened and rounded; if rounding makes it too long again, it is cut
    off towards 0.
    """
    u = phi.double()
    u = (u - u.mean(1, keepdim=True).round()).clamp(-LARGEST, LARGEST)
    # whole numbers below 2^53
    squares = u.square().sum(1, keepdim=True)
    # rounding adds D/12 to a square
    aim = max(square - phi.shape[1] / 8, square / 2)
    short = u * (aim / squares.clamp(min=1)).sqrt()
    shortened = torch.where(
        short.round().square().sum(1, keepdim=True) <= square, short.round(), short.trunc()
    )
    return torch.where(squares <= square, u, shortened)


@dataclass
class Draw:
    """Exact draws of whole numbers: only whole numbers are computed with, and no random bit is used
    twice.
    """

    noise: Noise  # where the random bits come from
    _place: int = field(default=0)

    def gaussian(self, sigma: int, count: int) -> Tensor:
        """Return (count,) int64 of the discrete Gaussian, σ from 1 to 2^28 (Algorithm 3, with t =
        σ).
        """
        if not 1 <= sigma <= _MOST:
            raise ValueError(f"σ = {sigma} is not from 1 to {_MOST}")
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            y = self._laplace(sigma, 2 * missing + 16)
            whole, rest = np.divmod(np.abs(np.abs(y) - sigma), sigma)
            # γ = (|y| - σ)²/(2σ²), with |y| - σ = whole·σ + rest, as a whole number and a part of
            # 2σ²
            part = (whole**2 % 2) * sigma**2 + (2 * whole * rest % (2 * sigma)) * sigma + rest**2
            ones = whole**2 // 2 + 2 * whole * rest // (2 * sigma) + part // (2 * sigma**2)
            kept.append(y[self._exp(ones, part % (2 * sigma**2), 2 * sigma**2)][:missing])
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *kept]))

    def _laplace(self, scale: int, count: int) -> Whole:
        """Return up to `count` numbers of the discrete Laplace distribution (Algorithm 2, with s =
        1).
        """
        u = self._below(scale, count)
        u = u[self._exp(np.zeros_like(u), u, scale)]
        times = np.zeros_like(u)
        going = np.arange(len(u))
        while len(going):
            more = self._exp(np.ones(len(going), np.int64), np.zeros(len(going), np.int64), 1)
            going = going[more]
            times[going] += 1
        negative = self._below(2, len(u)) == 1
        y: Whole = (u + scale * times) * (1 - 2 * negative)
        found: Whole = y[~(negative & (y == 0))]
        return found

    def _exp(self, ones: Whole, part: Whole, of: int) -> Flags:
        """Return True with probability exp(-(ones + part/of)), for each (Algorithm 1)."""
        found = self._exp_of_part(part, of)
        left = np.where(found, ones, 0)
        while len(going := np.flatnonzero(left)):
            went_on = self._exp_of_part(np.ones(len(going), np.int64), 1)
            found[going] &= went_on
            left[going] = np.where(went_on, left[going] - 1, 0)
        return found

    def _exp_of_part(self, part: Whole, of: int) -> Flags:
        """Return True with probability exp(-part/of), for each; part/of is at most 1."""
        # K, the first of 1, 2, ... whose event of probability γ/K fails
        odd = np.ones(len(part), np.bool_)
        going = np.arange(len(part))
        k = 1
        while len(going):
            goes_on = self._below(of, len(going)) < part[going]
            if k > 1:
                goes_on &= self._below(k, len(going)) == 0
            going = going[goes_on]
            k = k + 1
            odd[going] = k % 2 == 1
        return odd

    def _below(self, limit: int, count: int) -> Whole:
        """Return (count,) uniform numbers from 0 to `limit` - 1."""
        # above it, remainders are not equally likely
        most = np.uint64(2**64 // limit * limit - 1)
        kept: list[Whole] = []
        while (missing := count - sum(map(len, kept))) > 0:
            self._place += 1
            words = self.noise.bits("whole numbers", self._place, missing)
            kept.append((words[words <= most] % np.uint64(limit)).astype(np.int64))
        return np.concatenate([np.zeros(0, np.int64), *kept])
