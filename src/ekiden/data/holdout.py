"""Hold out a test part of data that come without one."""

from math import ceil, floor

import numpy as np
import torch
from torch import Tensor

FRACTION = 0.2  # of each stratum


def divided(strata: Tensor, domain: Tensor | None, group: Tensor | None) -> tuple[Tensor, Tensor]:
    """Split rows 80/20 within every (domain, group, stratum of labels).

    If that would hold out less than a tenth, because most of these have one row, rows are split within every group.

    Args:
        strata: (n,) int64, such as classes.
        domain: (n,) int64, or None.
        group: (n,) int64, or None.

    Returns:
        Training rows and test rows, int64, each in ascending order.
    """
    train, test = hold_out(domain, group, strata)
    return hold_out(group) if group is not None and len(test) < FRACTION / 2 * len(strata) else (train, test)


def hold_out(*keys: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Split rows 80/20 so that every stratum is split 80/20.

    A stratum is the set of rows that agree in all keys, such as (domain, class). The next stratum makes up for the
    rounding of the one before, so all rows together are also split 80/20. Each keeps at least one training row.

    Args:
        keys: (n,) int64 each; a key that is None is ignored.
        seed: seed of the shuffle within the strata.

    Returns:
        Training rows and test rows, int64, each in ascending order.
    """
    table = np.stack([k.cpu().numpy() for k in keys if k is not None], axis=1)
    _, stratum = np.unique(table, axis=0, return_inverse=True)
    rng = np.random.default_rng(seed)
    rows = rng.permutation(len(table))
    rows = rows[np.argsort(stratum[rows], kind="stable")]
    held = np.zeros(len(table), dtype=bool)
    seen = taken = 0
    for part in np.split(rows, np.cumsum(np.bincount(stratum))[:-1]):
        seen += len(part)
        exact = FRACTION * len(part)
        share = min(max(round(FRACTION * seen) - taken, floor(exact)), ceil(exact), len(part) - 1)
        held[part[:share]] = True
        taken += share
    return torch.from_numpy(np.flatnonzero(~held)), torch.from_numpy(np.flatnonzero(held))
