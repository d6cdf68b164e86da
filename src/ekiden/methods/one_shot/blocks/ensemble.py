"""Clients' networks as one whose answers are combined, and samples made at the server to distil
such a network.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim.adam import adam

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    Method,
    State,
    UserError,
    Weights,
    Work,
    on_client,
)
from ekiden.core.base.settings import seeded
from ekiden.core.engine import wire
from ekiden.core.training import frozen
from ekiden.core.training.network import Network

Rule = Literal["logits", "probabilities", "majority", "class-wise", "counts"]


class EnsembleModel(nn.Module):
    """N networks whose answers are combined by a rule. Its weights are those of all members, one
    after the other.
    """

    # (N, K) class counts, or 1 for owned classes and 0 for others; unused by the first three rules
    counts: Tensor

    def __init__(self, members: Sequence[nn.Module], classes: int, rule: Rule) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)  # the networks
        self.rule = rule
        self.register_buffer("counts", torch.ones(len(members), classes))

    def scores(self, x: Tensor) -> Tensor:
        """Return (b, K) scores of inputs (b, ...); only a running sum of them is in memory.

        logits: mean of the logits; probabilities: mean of the softmax; majority: share of the
        votes; class-wise: logits of owned classes, divided by the number of owners (0 without
        owners); counts: softmax, weighted by the member's share of the class's samples.
        """
        parts = (
            self._part(member(x).float(), counts)
            for member, counts in zip(self.members, self.counts, strict=True)
        )
        total = reduce(torch.add, parts)
        match self.rule:
            case "class-wise":
                return total / self.counts.sum(0).clamp(min=1)
            case "counts":
                return total / (self.counts.sum(0) + 1e-6)
        return total / len(self.members)

    def _part(self, logits: Tensor, counts: Tensor) -> Tensor:
        match self.rule:
            case "logits":
                return logits
            case "majority":
                return F.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
            case "class-wise":
                return torch.where(counts > 0, logits, 0.0)
            case "counts":
                return logits.softmax(1) * counts
        return logits.softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K): the scores if these are logits, otherwise their logarithms."""
        scores = self.scores(x)
        if self.rule in ("logits", "class-wise"):
            return scores
        return scores.clamp(min=1e-12).log()


def join(module: nn.Module, models: Sequence[Weights], rule: Rule, counts: Tensor) -> Weights:
    """Return the weights of the ensemble of `models`, all of which are weights of `module`."""
    ensemble = EnsembleModel(copies(module, models), counts.shape[1], rule)
    ensemble.counts.copy_(counts)
    return Network(ensemble).weights()


def copies(module: nn.Module, models: Sequence[Weights]) -> list[nn.Module]:
    """Return a copy of `module` with the values of each of `models`."""
    members = []
    for model in models:
        network = Network(frozen.copied(module))
        network.load(model)
        members.append(network.module)
    return members


class SampleGenerator(nn.Module):
    """Noise (b, z) → samples: images (b, C, H, W) with values in [0, 1], or features (b, d) without
    bounds.

    Images grow from a quarter of their side by two nearest-neighbour steps; sides that are not a
    multiple of 4 are cut.
    """

    def __init__(
        self, shape: tuple[int, ...], noise: int, width: int, generator: Generator
    ) -> None:
        super().__init__()
        self._shape = shape
        leaky = nn.LeakyReLU(0.2)

        def doubled(gives: int) -> list[nn.Module]:
            convolution = nn.Conv2d(2 * width, gives, 3, padding=1, bias=False)
            return [nn.Upsample(scale_factor=2), convolution, nn.BatchNorm2d(gives), leaky]

        if len(shape) == 3:
            self._start = (2 * width, -(-shape[1] // 4), -(-shape[2] // 4))
            self.first = nn.Linear(noise, math.prod(self._start))
            self.rest = nn.Sequential(
                nn.BatchNorm2d(2 * width),
                *doubled(2 * width),
                *doubled(width),
                nn.Conv2d(width, shape[0], 3, padding=1),
                nn.Sigmoid(),
            )
        else:
            self.first = nn.Linear(noise, 2 * width)
            size = int(torch.Size(shape).numel())
            self.rest = nn.Sequential(nn.BatchNorm1d(2 * width), leaky, nn.Linear(2 * width, size))
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(part.weight, 0.0, 0.02, generator=generator)
            elif isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.normal_(part.weight, 1.0, 0.02, generator=generator)
        for name, values in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(values)
        self.rest.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # on a CPU 1.6 times as fast

    def forward(self, z: Tensor) -> Tensor:
        """Return samples (b, *shape)."""
        x = self.first(z)
        if len(self._shape) == 3:
            x = x.view(len(z), *self._start).contiguous(memory_format=torch.channels_last)
            return self.rest(x)[:, :, : self._shape[1], : self._shape[2]]  # type: ignore[no-any-return]
        return self.rest(x).view(len(z), *self._shape)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Distilled(State):
    """Where the server stands."""

    teachers: tuple[Weights, ...] = ()  # the clients' models
    pool: Tensor | None = None  # all synthetic samples so far: images as bytes, others as they are
    labels: Tensor | None = None  # (n,) int64, the classes that they were made for, if it matters
    weights: Tensor | None = None  # (N,) of the teachers, if they have any
    momentum: Tensor | None = None  # (P,) of the student's optimiser


class DistillingMethod(Method):
    """A method whose clients send models once; then the server makes samples with them, and trains
    a student on these.
    """

    epochs: int
    distill_epochs: int
    steps_per_batch: int
    distill_batch_size: int
    noise: int
    generator_width: int

    def run(self, fed: Fed, s: Distilled) -> Iterator[State]:
        """Yield the state when all models have arrived, then after each epoch of synthesis and
        distillation.
        """
        if s.step == 0:
            teachers = tuple(fed.get(fed.call_all(self.train, INITIAL)))
            student: Weights = fed.get(INITIAL)
            s = s.next(teachers=teachers, model=student, momentum=torch.zeros_like(student.params))
            yield s
        members = [fed.network(t).requires_grad_(False) for t in s.teachers]
        while s.step <= self.distill_epochs:
            assert isinstance(s.model, Weights)
            assert s.momentum is not None
            module = fed.network(s.model)
            network = Network(module, next(module.parameters()).device)
            momentum = s.momentum.to(network.params.device, copy=True)
            s = self.epoch(fed, s, members, network, momentum)
            # each sample also passes through the generator and the student
            made = self.steps_per_batch * self.distill_batch_size * (len(members) + 2)
            fed.work.add(Work(made, made))
            model, momentum = wire.placed((network.weights(), momentum), torch.device("cpu"))
            s = s.next(model=model, momentum=momentum)
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Weights:
        """Train on the plain loss."""
        return client.fit(model, epochs=self.epochs)

    @abstractmethod
    def epoch(
        self,
        fed: Fed,
        s: Distilled,
        members: Sequence[nn.Module],
        student: Network,
        momentum: Tensor,
    ) -> Distilled:
        """Make samples with the teachers' networks and train the student, whose values and momentum
        change in place; return the state with the pool.
        """

    def limit(self, student: Network) -> None:
        """Change the student's gradient before its step, if the method does."""

    def distil(
        self,
        fed: Fed,
        student: Network,
        momentum: Tensor,
        pool: Tensor,
        lr: float,
        loss_of: Callable[[Tensor, Generator], Tensor],
    ) -> None:
        """Train the student in one pass over the pool, by SGD with momentum 0.9."""
        draw = fed.generator("distillation")
        student.module.train()
        # the student may draw for its dropout
        with seeded(int(torch.randint(1 << 62, (), generator=draw))):
            for rows in batches(len(pool), self.distill_batch_size, draw):
                loss = loss_of(fed.feed(as_made(pool, rows), draw), draw)
                student.grad.zero_()
                loss.backward()  # type: ignore[no-untyped-call]
                self.limit(student)
                momentum.mul_(0.9).add_(student.grad)
                student.params.add_(momentum, alpha=-lr)
        student.module.eval()

    def drawn(self, fed: Fed, student: nn.Module) -> tuple[Generator, SampleGenerator, Tensor]:
        """Return what draws, a new generator, and its input z (b, noise), which learns too; from
        now on the student is in evaluation mode.
        """
        student.eval()
        draw = fed.generator("synthesis")
        device = next(student.parameters()).device
        made = SampleGenerator(fed.shape, self.noise, self.generator_width, draw).to(device)
        z = torch.randn(self.distill_batch_size, self.noise, generator=draw)
        return draw, made, z.to(device).requires_grad_()

    def steps(self, clients: int) -> int:
        """Return one step for the models and one for each epoch of distillation."""
        return 1 + self.distill_epochs

    def cost(self, clients: int, model: int) -> int:
        """N·M: each client sends its model."""
        return clients * model


def synthesise(
    fed: Fed,
    generator: SampleGenerator,
    z: Tensor,
    steps: int,
    lr: float,
    loss_of: Callable[[Tensor], Tensor],
    clip: float = math.inf,
) -> Tensor:
    """Train the generator and its input with Adam, and return the samples with the smallest loss.

    Args:
        fed: for the precision of the passes.
        generator: changed in place.
        z: (b, noise) its input, a leaf that learns too.
        steps: of Adam.
        lr: its learning rate.
        loss_of: the loss of samples (b, ...) as the generator makes them, images with values in [0,
            1].
        clip: largest norm of the gradient of the generator.

    Returns:
        (b, ...) on the CPU, images as bytes.
    """
    leaves = [*generator.parameters(), z]
    first = list(map(torch.zeros_like, leaves))
    second = list(map(torch.zeros_like, leaves))
    counts = [torch.zeros(()) for _ in leaves]
    # The first `torch.optim.Adam` of a process would import PyTorch's compiler, which takes
    # seconds.
    update = partial(
        adam,
        lr=lr,
        beta1=0.5,
        beta2=0.999,
        eps=1e-8,
        weight_decay=0.0,
        amsgrad=False,
        maximize=False,
    )
    best = torch.empty(0)
    least = math.inf
    for _ in range(steps):
        with fed.autocast():
            raw = generator(z).float()
        loss = loss_of(raw)
        if float(loss.detach()) < least:
            best = raw.detach().clone()
            least = float(loss.detach())
        for leaf in leaves:
            leaf.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        if clip < math.inf:
            torch.nn.utils.clip_grad_norm_(generator.parameters(), clip, foreach=False)
        with torch.no_grad():
            update(
                leaves,
                [leaf.grad for leaf in leaves if leaf.grad is not None],
                first,
                second,
                [],
                counts,
            )
    if least == math.inf:
        raise UserError("the generator's loss is not finite: lower --generator-lr")
    best = best.cpu().contiguous()
    if len(fed.shape) == 3:
        best = (best * 255).round().to(torch.uint8)
    return best


def as_made(pool: Tensor, rows: Tensor) -> Tensor:
    """Return samples of the pool, as the generator made them."""
    if pool.dtype == torch.uint8:
        return pool[rows].float() / 255
    return pool[rows]


def softened(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """L_KD = T²·KL(softmax(t/T) ‖ softmax(s/T)), mean of the batch."""
    t = (teacher / temperature).log_softmax(1)
    s = (student / temperature).log_softmax(1)
    return F.kl_div(s, t, reduction="batchmean", log_target=True) * temperature**2


def batches(n: int, size: int, generator: Generator) -> Sequence[Tensor]:
    """Return the batches of a shuffled pass over n samples.

    Because of BatchNorm, a last batch of one sample joins the one before.
    """
    parts = list(torch.split(torch.randperm(n, generator=generator), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
