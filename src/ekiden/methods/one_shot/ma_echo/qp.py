"""The quadratic programme behind common descent directions."""

from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def min_norm(gram: Matrix, bound: float) -> Matrix:
    """Return the minimum of ½αᵀGα with Σα = 1 and 0 <= α <= bound: weights of the shortest combination of vectors.

    Args:
        gram: G (N, N), inner products of the vectors; may be singular.
        bound: at least 1/N.

    Returns:
        α (N,), to about 1e-10; uniform where all are equally good.
    """
    import clarabel  # noqa: PLC0415  takes a while, and few need it
    from scipy import sparse  # noqa: PLC0415

    n, scale = len(gram), float(np.trace(gram)) / len(gram)
    if bound * n <= 1 + 1e-9 or scale <= 0:
        return np.full(n, 1 / n)
    limits = sparse.csc_matrix(np.vstack([np.ones(n), -np.eye(n), np.eye(n)]))  # rows · α + slack = right
    right = np.concatenate([[1.0], np.zeros(n), np.full(n, bound)])
    slack = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(2 * n)]
    settings = clarabel.DefaultSettings()
    settings.verbose, settings.max_threads = False, 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    upper = sparse.csc_matrix(np.triu(gram / scale))
    found = clarabel.DefaultSolver(upper, np.zeros(n), limits, right, slack, settings).solve()
    solution: Matrix = np.clip(found.x, 0, bound)
    solution /= solution.sum()
    return solution
