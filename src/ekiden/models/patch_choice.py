"""Which filters say most about the targets of some samples."""

import torch
from torch import Tensor

_PENALTY = 0.3  # λ/n, of features of variance 1: chosen on validation data


def chosen(features: Tensor, targets: Tensor, count: int) -> Tensor:
    """(count,) the groups of features that say most about the targets, chosen one after the other.

    Each is the group with which ridge regression of the targets on all groups chosen so far explains most, B being the
    products with the targets and C those among the features: it makes tr Bᵀ(C + λI)⁻¹B largest.

    Args:
        features: (n, G, m), G groups of m features.
        targets: (n, K).
        count: how many groups, at most G.
    """
    n, groups, each = features.shape
    z = features.double()
    z = z - z.mean(0)
    spread = z.square().mean(0).sqrt()
    z = z / torch.where(spread > 0, spread, 1.0) / n**0.5
    y = targets.double()
    cross = torch.einsum("ngi,nk->gik", z, (y - y.mean(0)) / n**0.5)
    # What follows is Cholesky's decomposition of C + λI, by blocks, as far as it is needed.
    own = torch.einsum("ngi,ngj->gij", z, z) + _PENALTY * torch.eye(each, dtype=torch.float64)
    past = z.new_empty(count * each, groups, each)  # rows P: C + λI less PᵀP is what the chosen ones leave of it
    free = torch.ones(groups, dtype=torch.bool)
    found = []
    for step in range(count):
        gain = (cross * torch.linalg.solve(own, cross)).sum((1, 2))
        best = int(torch.where(free, gain, -1.0).argmax())
        found.append(best)
        free[best] = False
        before = past[: step * each]
        rows = torch.einsum("ni,ngj->igj", z[:, best], z) - torch.einsum("pi,pgj->igj", before[:, best], before)
        root = torch.linalg.cholesky(own[best])
        rows = torch.linalg.solve_triangular(root, rows.flatten(1), upper=False).view(each, groups, each)
        past[step * each : (step + 1) * each] = rows
        cross -= torch.einsum("pgi,pk->gik", rows, torch.linalg.solve_triangular(root, cross[best], upper=False))
        own -= torch.einsum("pgi,pgj->gij", rows, rows)
    return torch.tensor(found)
