"""FedOV: one-shot learning by a vote of models that know what they do not know."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ekiden.authoring import (
    CLASSES,
    CONTINUOUS,
    Client,
    Count,
    CountOrZero,
    Fed,
    Forward,
    NonNegative,
    Objective,
    Traits,
    Weights,
    Work,
    on_client,
)
from ekiden.core.training.network import Network
from ekiden.methods.blocks.combining import Init, OneShot, first_model
from ekiden.methods.one_shot.blocks.ensemble import copies


def destroy(x: Tensor) -> Tensor:
    """(b, ...) samples, each corrupted once, by draws of torch's default CPU generator.

    Images (b, C, H, W): cut or rotate with probability 2/7 each, crop, blur or erase with 1/7 each.
    Samples of another shape, or of fewer than 4 pixels a side, get their numbers in random order.
    """
    if x.ndim != 4 or min(x.shape[2:]) < 4:
        numbers = x.reshape(len(x), -1)
        order = torch.rand(numbers.shape).argsort(1)
        return numbers.gather(1, order.to(x.device)).view(x.shape)
    result = x.clone()
    kinds = torch.randint(7, (len(x),)).to(x.device)
    # in 16 bits pixels would be rounded, and their places lost
    with torch.autocast(x.device.type, enabled=False):
        for kind, operation in enumerate((crop, blur, erase, cut, rotate)):
            chosen = kinds == kind
            if operation in (cut, rotate):
                chosen |= kinds == kind + 2
            if chosen.any():
                result[chosen] = operation(x[chosen])
    return result


def crop(x: Tensor) -> Tensor:
    """Crop a rectangle of 0.1 to 0.33 of the area, sides 3:4 to 4:3, and resize it to full size."""
    height, width = x.shape[2:]
    area, aspect, *at = torch.rand(4, len(x), device="cpu")
    h, w = _rectangle(0.1 + 0.23 * area, (3 / 4) ** (1 - 2 * aspect), height, width)
    theta = torch.zeros(len(x), 2, 3)
    # affine grids count places from -1 to 1
    theta[:, 0, 0] = w
    theta[:, 1, 1] = h
    theta[:, 0, 2] = (2 * at[0] - 1) * (1 - w)
    theta[:, 1, 2] = (2 * at[1] - 1) * (1 - h)
    grid = F.affine_grid(theta.to(x), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def blur(x: Tensor) -> Tensor:
    """Blur with a Gaussian kernel of 3, 5, 7 or 9 by 1, 3 or 5 pixels or the reverse, deviation 10
    to 100 pixels.
    """
    n, channels, height, width = x.shape
    long = 3 + 2 * torch.randint(4, (n,))
    short = 1 + 2 * torch.randint(3, (n,))
    turned = torch.rand(n) < 0.5
    sigma = 10 + 90 * torch.rand(n)
    offsets = torch.arange(-4, 5)
    kernels = []
    for size in (torch.where(turned, short, long), torch.where(turned, long, short)):
        kernel = torch.exp(-((offsets / sigma[:, None]) ** 2) / 2) * (
            offsets.abs() <= size[:, None] // 2
        )
        kernel = kernel / kernel.sum(1, keepdim=True)
        kernels.append(kernel.repeat_interleave(channels, 0).to(x)[:, None])
    padded = F.pad(x, (4, 4, 4, 4), mode="replicate")
    rows = padded.reshape(1, n * channels, height + 8, width + 8)
    rows = F.conv2d(rows, kernels[0][..., None], groups=n * channels)
    return F.conv2d(rows, kernels[1][:, :, None], groups=n * channels).reshape(x.shape)


def erase(x: Tensor) -> Tensor:
    """Set a rectangle of 0.33 to 0.5 of the area to 0, sides 3:10 to 10:3 if that fits."""
    height, width = x.shape[2:]
    area, aspect, *at = torch.rand(4, len(x))
    h, w = _rectangle(0.33 + 0.17 * area, 0.3 ** (1 - 2 * aspect), height, width)
    ends = []
    for share, place, size in ((h, at[0], height), (w, at[1], width)):
        length = (share * size).round()
        start = (place * (size - length + 1)).floor()
        ends += [start.long().tolist(), (start + length).long().tolist()]
    result = x.clone()
    for image, top, bottom, left, right in zip(result, *ends, strict=True):
        image[:, top:bottom, left:right] = 0.0
    return result


def cut(x: Tensor) -> Tensor:
    """Along either axis, swap the halves (1 in 3), or overwrite half the image by another half (2
    in 3).
    """
    across = torch.rand(len(x)) < 0.5
    swapped = torch.rand(len(x)) < 1 / 3
    result = x.clone()
    for axis, chosen in ((2, across), (3, ~across)):
        for change, which in ((swap_halves, chosen & swapped), (overwrite, chosen & ~swapped)):
            if which.any():
                where = which.to(x.device)
                result[where] = change(x[where], axis)
    return result


def swap_halves(x: Tensor, axis: int) -> Tensor:
    """Swap the two halves along an axis; a middle line stays."""
    size = x.shape[axis]
    first, middle, last = torch.split(x, [size // 2, size % 2, size // 2], axis)
    return torch.cat([last, middle, first], axis)


def overwrite(x: Tensor, axis: int) -> Tensor:
    """Overwrite a band of half the size along an axis by another one that starts at least half a
    band away.
    """
    size = x.shape[axis]
    half = size // 2
    starts = torch.arange(size - half + 1)
    to = torch.randint(len(starts), (len(x),))
    far = (starts - to[:, None]).abs() >= half / 2
    source = torch.where(far, torch.rand(far.shape), -1.0).argmax(1)
    result = x.clone()
    for image, new, start, end in zip(x, result, source.tolist(), to.tolist(), strict=True):
        new.narrow(axis - 1, end, half).copy_(image.narrow(axis - 1, start, half))
    return result


def rotate(x: Tensor) -> Tensor:
    """Rotate squares of half a side, at the left and right of a band of rows, by 90, 180 or 270
    degrees.
    """
    side = min(x.shape[2:]) // 2
    start = torch.randint(x.shape[2] - side + 1, (len(x),))
    return turn(x, start, torch.randint(1, 4, (len(x),)))


def turn(x: Tensor, start: Tensor, turns: Tensor) -> Tensor:
    """Do this with rows from `start` (b,), counter-clockwise by `turns` (b,) times 90 degrees."""
    side = min(x.shape[2:]) // 2
    result = x.clone()
    for image, first, quarter in zip(result, start.tolist(), turns.tolist(), strict=True):
        band = image[:, first : first + side]
        for square in (band[..., :side], band[..., -side:]):
            square.copy_(square.rot90(quarter, (1, 2)))
    return result


def _rectangle(area: Tensor, aspect: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return height and width, as shares of the image, of rectangles with a share of its area; all
    of them fit in.
    """
    h = (area * aspect * width / height).sqrt()
    h = torch.maximum(torch.minimum(h, torch.ones(())), area)
    return h, area / h


@dataclass(frozen=True)
class FedOV(OneShot):
    """Clients learn to answer "unknown" to classes that they do not have; the more certain models
    vote on each sample.

    Yiqun Diao, Qinbin Li, Bingsheng He: Towards Addressing Label Skews in One-Shot Federated
    Learning. ICLR 2023. https://openreview.net/forum?id=rzrqh85f4Sc.

    The network has one more output, u. A client trains it on its samples and on outliers made from
    them: corrupted samples, and samples moved by PGD to where the network takes them for known. The
    result contains all models. It adds up the probabilities of the k models that least consider the
    sample unknown.

    Departures from the paper: where paper and code may differ, the authors' code is followed, for
    any number of classes (the code has the number 10 written into it). The corruptions are those of
    the code (an overwritten band may begin one line further). The k that the paper reports is not
    known; the default is all. Networks with BatchNorm learn from samples and corrupted samples in
    one pass, without the other terms, as in the code. The distillation of the vote into one model
    needs data that the server does not have and is left out. Samples that are not images are
    corrupted by permuting their numbers. As in the code, local training ends with its last epoch,
    whatever --select says; FedELMY's tables state the epoch of best validation accuracy for all
    methods.
    """

    traits = Traits(joins_models=True, extra_outputs=1, needs=CLASSES | CONTINUOUS, weighs=False)

    epochs: Count = 200
    """E, epochs at each client"""
    attack_steps: CountOrZero = 5
    """steps of PGD that make outliers harder"""
    attack_step: NonNegative = 0.002
    """length of a PGD step"""
    attack_radius: NonNegative = 0.5
    """how far PGD may move an outlier, in each number"""
    mix: NonNegative = 0.01
    """weight of the term on mixed representations of two classes"""
    voters: CountOrZero = 0
    """k, how many models vote on a sample; 0: all"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    def selection(self, select: str) -> str:
        """Return the last epoch: validation data have no outliers, so on them the first epochs look
        best.
        """
        return "last"

    def joined(self, fed: Fed, sent: Sequence[Weights]) -> Weights:
        """Join the models into one network."""
        members = copies(fed.network(sent[0]), sent)
        return Network(Vote(members, self.voters)).weights()

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Weights:
        """Train on the open-set loss, to the last epoch."""
        model = first_model(client, model, self.init)
        terms = OpenSet(client.module, client.classes, self)
        training = replace(client.training, select="last")
        return client.fit(model, epochs=self.epochs, objective=terms, training=training)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return one network that contains N networks."""
        return Vote([copy.deepcopy(network) for _ in range(clients)], self.voters)

    def cost(self, clients: int, model: int) -> int:
        """N·M, where M is the size of the network with K + 1 outputs."""
        return clients * model


@dataclass(frozen=True)
class OpenSet(Objective):
    """The loss of a mini-batch."""

    module: nn.Module  # the network in training
    unknown: int  # u = K, the index of the additional output
    method: FedOV  # the method with its weights and settings

    @property
    def normed(self) -> bool:
        """Whether the network has BatchNorm, whose statistics would be wrong after separate
        passes.
        """
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())

    def further(self, batch: int) -> Work:
        """Count the passes of corrupted and harder samples, and of PGD, which takes a gradient in
        each step.
        """
        samples = batch
        if not self.normed:
            samples *= 2 + self.method.attack_steps
        return Work(samples, samples)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the sum of the terms for inputs (b, ...) and labels (b,)."""
        spoiled = destroy(x)
        u = torch.full_like(y, self.unknown)
        if self.normed:
            logits = forward(torch.cat([x, spoiled])).float()
            return F.cross_entropy(logits, torch.cat([y, u]))
        harder = attack(self.module, spoiled, u, self.method)
        # mixed representations of two samples are outliers if their classes differ
        pairs = torch.randperm(len(y)).to(y.device)
        share = float(torch.rand(()))
        with mixing(self.module, pairs, share):
            logits = self.module(torch.cat([x, spoiled, harder])).float()
        known, corrupted, adversarial, mixed = logits.split(len(y))
        loss = F.cross_entropy(known, y) + F.cross_entropy(without(known, y), u)
        loss = loss + F.cross_entropy(corrupted, u) + F.cross_entropy(adversarial, u)
        differ = y != y[pairs]
        if differ.any():
            loss = loss + self.method.mix * F.cross_entropy(mixed[differ], u[differ])
        return loss


def without(logits: Tensor, y: Tensor) -> Tensor:
    """Return logits (b, K + 1) in which the true class cannot win."""
    lower = logits.new_full((len(y), 1), -1e4)
    return logits.scatter_add(1, y[:, None], lower)


def attack(module: nn.Module, x: Tensor, u: Tensor, method: FedOV) -> Tensor:
    """Move outliers by PGD, in evaluation mode, within `attack_radius` of x, to where the answer is
    less "unknown".
    """
    was_training = module.training
    module.eval()
    moved = x.clone()
    for _ in range(method.attack_steps):
        moved.requires_grad_()
        loss = F.cross_entropy(module(moved).float(), u)
        (slope,) = torch.autograd.grad(loss, moved)
        moved = moved.detach() + method.attack_step * slope.sign()
        moved = torch.clamp(moved, x - method.attack_radius, x + method.attack_radius)
    module.train(was_training)
    return moved


def mixing(module: nn.Module, pairs: Tensor, share: float) -> RemovableHandle:
    """Let one forward pass of 3b samples give 3b + b rows, until the context of the handle ends.

    The last b come of share·h + (1 - share)·h[pairs], h being what the second linear layer (or the
    only one) reads of the first b samples: what the first hidden linear layer gives.
    """

    def add(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own = args[0][: len(pairs)]
        return (torch.cat([args[0], share * own + (1 - share) * own[pairs]]),)

    linear = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return linear[:2][-1].register_forward_pre_hook(add)


class Vote(nn.Module):
    """N networks of K + 1 outputs that vote. Its weights are those of all members, one after the
    other.
    """

    def __init__(self, members: Sequence[nn.Module], voters: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.voters = min(voters or len(members), len(members))

    def scores(self, x: Tensor) -> Tensor:
        """Return (b, K): summed probabilities of the k members with the least "unknown"; ties in
        the members' order.
        """
        return self(x).exp()  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K): logarithms of the scores, exact also if all members are sure of
        "unknown".
        """
        answers = torch.stack([member(x).float() for member in self.members])
        # log-odds of "unknown", which unlike its probability do not saturate at 1
        unknown = answers[:, :, -1] - answers[:, :, :-1].logsumexp(2)
        order = unknown.sort(stable=True, dim=0).indices[: self.voters]
        chosen = answers.log_softmax(2).take_along_dim(order[..., None], 0)
        return chosen.logsumexp(0)[:, :-1]
