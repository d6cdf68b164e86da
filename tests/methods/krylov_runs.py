"""Sums that honest silos send."""

import torch

from ekiden.methods.exact.blocks.fixed_features import ShortColumns
from ekiden.methods.exact.blocks.krylov import (
    HeldAnswers,
    Labels,
    Multiplied,
    OpeningSums,
)


def honest() -> tuple[OpeningSums, Multiplied]:
    """Sums over twelve samples of three classes and six held-out ones, with five features and two
    directions."""
    draw = torch.Generator().manual_seed(2)
    phi = torch.randint(-100, 100, (18, 5), generator=draw).double()
    y = torch.eye(3).double()[torch.arange(18) % 3]
    u = torch.randint(-127, 128, (5, 2), generator=draw).double()
    x, f = phi[:12], phi[12:] @ u
    columns = torch.cat([x.T @ y[:12], x.sum(0)[:, None], x.square().sum(0)[:, None]], 1)
    opening = OpeningSums(ShortColumns.of(columns), Labels.of(y[:12]), Labels.of(y[12:]))
    held = HeldAnswers(f.T @ f, f.T @ y[12:], f.sum(0))
    return opening, Multiplied(ShortColumns.of(x.T @ (x @ u)), held)
