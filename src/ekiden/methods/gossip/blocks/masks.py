"""Masks of sparse models: the density of each tensor, where weights are active, how masks change and travel."""

from collections.abc import Sequence
from math import ceil, prod

import torch
from torch import Generator, Tensor


def densities(shapes: Sequence[tuple[int, ...]], density: float, erk: bool) -> list[float]:
    """Return the density of each tensor, so that all together have `density`.

    Erdős–Rényi kernel: in proportion to (sum of dimensions) / (product of dimensions). Densities above 1 become 1, and
    the rest is distributed again.
    """
    sizes = [prod(shape) for shape in shapes]
    raw = [sum(shape) / max(1, prod(shape)) if erk else 1.0 for shape in shapes]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [i for i in range(len(shapes)) if i not in dense]
        budget = density * sum(sizes) - sum(sizes[i] for i in dense)
        scale = budget / sum(sizes[i] * raw[i] for i in sparse)
        over = {i for i in sparse if scale * raw[i] > 1}
        if not over:
            return [1.0 if i in dense else scale * raw[i] for i in range(len(shapes))]
        dense |= over
    return [1.0] * len(shapes)


def random_mask(shapes: Sequence[tuple[int, ...]], active: Sequence[int], draw: Generator) -> Tensor:
    """Return (P,) bool with this many active weights in each tensor."""
    parts = []
    for shape, count in zip(shapes, active, strict=True):
        part = torch.zeros(prod(shape), dtype=torch.bool)
        part[torch.randperm(prod(shape), generator=draw)[:count]] = True
        parts.append(part)
    return torch.cat(parts)


def move(
    mask: Tensor, params: Tensor, shapes: Sequence[tuple[int, ...]], share: float, where: Tensor | None, seed: int
) -> Tensor:
    """In each tensor prune the smallest `share` of active weights and regrow as many among the inactive ones.

    Args:
        mask: (P,) bool.
        params: (P,) whose size decides what is pruned.
        shapes: shapes of the tensors.
        share: α_t.
        where: (P,) regrow where its absolute value is largest; at random if None.
        seed: seed of the random places.
    """
    moved, start, draw = mask.clone(), 0, Generator().manual_seed(seed)
    for shape in shapes:
        part = moved[start : start + prod(shape)]  # a view
        count = ceil(share * int(part.sum()))
        sizes = params[start : start + prod(shape)].abs().masked_fill(~part, float("inf"))
        part[sizes.argsort(stable=True)[:count]] = False
        score = torch.rand(prod(shape), generator=draw) if where is None else where[start : start + prod(shape)].abs()
        score = score.to(part.device).masked_fill(part, -1.0)  # below all others: active weights do not regrow
        part[score.argsort(descending=True, stable=True)[:count]] = True
        start += prod(shape)
    return moved


def pack(mask: Tensor) -> Tensor:
    """Pack a (P,) bool mask, eight entries in each byte."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -len(mask) % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Return the mask of `size` entries."""
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
    return bits.flatten()[:size].bool()
