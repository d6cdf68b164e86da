"""What methods share that make samples with a generator at the server and distil the clients' models on them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from ekiden.authoring import Fed, State, UserError, Weights
from ekiden.methods.one_shot.blocks.generator import SampleGenerator


@dataclass(frozen=True)
class Distilled(State):
    """Where the server stands.

    Attributes:
        teachers: the clients' models.
        pool: all synthetic samples so far: images as bytes, others as they are.
        momentum: (P,) of the student's optimiser.
    """

    teachers: tuple[Weights, ...] = ()
    pool: Tensor | None = None
    momentum: Tensor | None = None


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
        loss_of: the loss of samples (b, ...) as the generator makes them, images with values in [0, 1].
        clip: largest norm of the gradient of the generator.

    Returns:
        (b, ...) on the CPU, images as bytes.
    """
    optimizer = torch.optim.Adam([*generator.parameters(), z], lr, betas=(0.5, 0.999))
    best, least = torch.empty(0), math.inf
    for _ in range(steps):
        with fed.autocast():
            raw = generator(z).float()
        loss = loss_of(raw)
        if float(loss.detach()) < least:
            best, least = raw.detach().clone(), float(loss.detach())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip < math.inf:
            torch.nn.utils.clip_grad_norm_(generator.parameters(), clip, foreach=False)
        optimizer.step()
    if least == math.inf:
        raise UserError("the generator's loss is not finite: lower --generator-lr")
    best = best.cpu().contiguous()
    return (best * 255).round().to(torch.uint8) if len(fed.shape) == 3 else best


def as_made(pool: Tensor, rows: Tensor) -> Tensor:
    """Return samples of the pool, as the generator made them."""
    return pool[rows].float() / 255 if pool.dtype == torch.uint8 else pool[rows]


def softened(teacher: Tensor, student: Tensor, temperature: float) -> Tensor:
    """L_KD = T²·KL(softmax(t/T) ‖ softmax(s/T)), mean of the batch."""
    t, s = ((logits / temperature).log_softmax(1) for logits in (teacher, student))
    return F.kl_div(s, t, reduction="batchmean", log_target=True) * temperature**2


def batches(n: int, size: int, generator: Generator) -> Sequence[Tensor]:
    """Yield a shuffled pass over n samples; a last batch of one joins the one before, because of BatchNorm."""
    parts = list(torch.split(torch.randperm(n, generator=generator), size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts
