"""A small private run, and features for noisy sums."""

from typing import Any

import torch
from torch import Tensor, nn

import ekiden
from ekiden import DP, Training
from ekiden.core.data.samples import FederatedData
from ekiden.methods import FedSeq


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


def features(seed: int = 0, rows: int = 60, width: int = 12) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (rows, width), generator=draw).float(), torch.randint(
        3, (rows,), generator=draw
    )


SEEDED: dict[str, Any] = {"dictionary": "seed", "width": 8}
