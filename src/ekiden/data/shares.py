"""Give rows to clients: test rows in proportion to training rows, and validation rows."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import apart
from ekiden.data.samples import ClientData, Dataset, FederatedData, Samples, Subset
from ekiden.data.tabular import agreed

Rows = NDArray[np.int64]


def numpy(values: Tensor) -> Rows:
    """Return (n,) int64 on the CPU."""
    return values.cpu().numpy().astype(np.int64, copy=False)


def divide(train_keys: Tensor, rows: Sequence[Rows], test_keys: Tensor) -> list[Rows]:
    """Divide the test rows of each key in proportion to each client's number of training rows of that key.

    The largest remainders round proportions to whole rows; among equal remainders the client with the fewest test
    rows so far comes first. Rows of keys that no client holds are dealt round robin.

    Args:
        train_keys: (n,) int64, such as labels.
        rows: training rows of each client.
        test_keys: (m,) int64.

    Returns:
        Test rows of each client in ascending order; every row is in exactly one.
    """
    keys, codes = np.unique(np.concatenate([numpy(train_keys), numpy(test_keys)]), return_inverse=True)
    train, test = np.split(codes, [len(train_keys)])
    held = np.stack([np.bincount(train[r], minlength=len(keys)) for r in rows], axis=1)  # (keys, clients)
    given: list[list[Rows]] = [[] for _ in rows]
    sizes = np.zeros(len(rows), dtype=np.int64)
    orphans = []
    for key, counts in enumerate(held):
        found = np.flatnonzero(test == key)
        if not counts.any():
            orphans.append(found)
            continue
        shares = _shares(len(found), counts, sizes)
        for client in np.flatnonzero(shares):
            start = shares[:client].sum()
            given[client].append(found[start : start + shares[client]])
        sizes += shares
    for i, row in enumerate(np.concatenate([*orphans, np.empty(0, dtype=np.int64)])):
        given[i % len(rows)].append(np.array([row]))
    return [np.sort(np.concatenate([*g, np.empty(0, dtype=np.int64)])) for g in given]


def _shares(total: int, weights: Rows, sizes: Rows) -> Rows:
    """Divide `total` into whole shares proportional to `weights`, in exact integer arithmetic."""
    shares, remainder = np.divmod(total * weights, weights.sum())
    first = np.lexsort((sizes, -remainder))[: total - shares.sum()]
    shares[first] += 1
    return shares


def share_out(
    dataset: Dataset,
    names: Sequence[str],
    rows: Sequence[Rows],
    test_rows: Sequence[Rows],
    val_fraction: float,
) -> FederatedData:
    """Make clients that hold the given rows, the first `int(val_fraction * n)` of n training rows for validation.

    If samples have subjects or times, whole subjects or the most recent rows are for validation instead (`apart`).
    Clients agree on one scaling of tables and targets.
    """
    if not 0 <= val_fraction < 1:
        raise UserError(f"val_fraction is the share for validation, from 0 to below 1; it is {val_fraction}.")
    empty = [name for name, r in zip(names, rows, strict=True) if not len(r)]
    if empty:
        raise UserError(f"client {empty[0]!r} would hold no training samples: take fewer clients or another partition.")
    validation = _validation(dataset.train, rows, val_fraction)
    held = FederatedData(
        dataset,
        tuple(
            ClientData(
                name,
                _subset(dataset.train, r[~val]),
                _subset(dataset.train, r[val]),
                _subset(dataset.test, t),
            )
            for name, r, t, val in zip(names, rows, test_rows, validation, strict=True)
        ),
    )
    return agreed(held)


def _validation(train: Samples, rows: Sequence[Rows], share: float) -> list[NDArray[np.bool_]]:
    """Return for each client which of its rows are for validation."""
    if not share or (train.subject is None and train.time is None):
        return [np.arange(len(r)) < int(share * len(r)) for r in rows]
    every = np.concatenate(rows)
    client = np.repeat(np.arange(len(rows)), [len(r) for r in rows])
    subject, time = (None if of is None else of.cpu().numpy()[every] for of in (train.subject, train.time))
    held = apart.held_out(share, client, subject=subject, time=time)
    return np.split(held, np.cumsum([len(r) for r in rows])[:-1])


def _subset(samples: Samples, rows: Rows) -> Subset:
    return Subset(samples, torch.from_numpy(np.ascontiguousarray(rows)))
