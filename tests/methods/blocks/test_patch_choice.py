"""Chosen groups of features: against a search by brute force, and one that labels depend on."""

import numpy as np
import torch

from ekiden.methods.exact.blocks.patches import chosen


def explained(z: np.ndarray, y: np.ndarray) -> float:
    """What ridge regression of y on z explains, tr(Bᵀ(C + 0.3 I)⁻¹B), per sample."""
    c, b = z.T @ z / len(z), z.T @ y / len(z)
    return float(np.trace(b.T @ np.linalg.solve(c + 0.3 * np.eye(len(c)), b)))


def test_each_group_is_the_best_next_to_those_before() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(80, 9, 3, generator=draw)
    x += 2 * torch.randn(80, 1, 3, generator=draw)  # so that groups explain each other
    x[:, 4, 1] = 7.0  # never changes
    y = torch.nn.functional.one_hot(torch.randint(4, (80,), generator=draw), 4).float()
    z = x.double().numpy()
    z = z - z.mean(0)
    z /= np.where(z.std(0) > 0, z.std(0), 1)
    targets = y.double().numpy() - y.double().numpy().mean(0)
    wanted: list[int] = []
    for _ in range(6):
        free = [g for g in range(9) if g not in wanted]
        wanted.append(
            max(free, key=lambda g: explained(z[:, [*wanted, g]].reshape(80, -1), targets))
        )
    assert chosen(x, y, 6).tolist() == wanted
    assert sorted(chosen(x, y, 9).tolist()) == list(range(9))


def test_the_group_that_decides_comes_first() -> None:
    x = torch.randn(200, 5, 2, generator=torch.Generator().manual_seed(1))
    y = torch.nn.functional.one_hot((x[:, 3].sum(1) > 0).long(), 2)
    assert chosen(x, y, 2)[0] == 3
    copies = torch.cat([x[:, 3:4], x[:, 3:4] * 5 - 1, x[:, :1]], 1)
    both = torch.stack([y[:, 0] + x[:, 0, 0], y[:, 1]], 1)
    assert sorted(chosen(copies, both, 2).tolist())[1] == 2, "a copy says nothing more"
