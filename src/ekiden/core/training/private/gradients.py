"""Training with noise: gradients of single samples, clipped, and the noise of their sum."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ekiden.core.base.errors import UserError, first_line
from ekiden.core.models.split import SplitNetwork
from ekiden.core.training import frozen
from ekiden.core.training.network import Network
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.private.noise import Noise

# (outputs (1, ...), labels (1, ...)) -> the loss of a sample
Loss = Callable[[Tensor, Tensor], Tensor]

# gradients are clipped to a little less than C, so that rounding never takes one above it
_BELOW = 1 - 1e-4
# gradients of single samples that are in memory together, in numbers
_CHUNK = 1 << 25


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
