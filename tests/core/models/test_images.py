"""The network of segmentations learns, and its export answers the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, federate, load_model, run
from ekiden.core.tasks import Segmentation
from ekiden.methods import FedAvg
from ekiden.runs.exporting import export


def discs(n: int, seed: int, side: int = 14) -> tuple[Tensor, Tensor]:
    """Return noisy pictures (n, 1, side, side) with a bright and a dark disc, and the class of each
    pixel."""
    draw = torch.Generator().manual_seed(seed)
    grid = torch.arange(side, dtype=torch.float32)
    x, y = torch.full((n, side, side), 120.0), torch.zeros(n, side, side, dtype=torch.int64)
    for label, change in ((1, 70.0), (2, -70.0)):
        middle = torch.rand(n, 2, generator=draw) * (side - 8) + 4
        inside = (grid[:, None] - middle[:, :1, None]) ** 2 + (
            grid[None] - middle[:, 1:, None]
        ) ** 2 < 12
        x[inside], y[inside] = 120 + change, label
    noise = torch.randn(n, side, side, generator=draw) * 20
    return (x + noise).clamp(0, 255).byte()[:, None], y


@pytest.fixture(scope="module")
def silos() -> FederatedData:
    return federate([discs(24, 1), discs(24, 2)], test=discs(20, 3), mean=(0.5,), std=(0.25,))


@pytest.mark.slow
def test_without_a_choice_a_segmentation_is_learned_by_the_u_net(
    silos: FederatedData, tmp_path: Path
) -> None:
    assert isinstance(silos.dataset.task, Segmentation)
    training = Training(lr=1e-2, batch_size=4)
    result = run(
        FedAvg(rounds=3, epochs=3),
        silos,
        training=training,
        hardware=Hardware(threads=1),
        folder=tmp_path / "run",
    )
    assert result.score > 0.8  # mean intersection over union; all background has 0.3
    model = load_model(tmp_path / "run")
    x, y = discs(10, 4)
    assert (model(x).argmax(1) == y).float().mean() > 0.95
    export(tmp_path / "run", "pt2", tmp_path / "model.pt2")
