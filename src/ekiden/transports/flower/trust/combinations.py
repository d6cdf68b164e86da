"""What sums show that are added and subtracted: little of one party, if nearly everything in them cancels."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

Members = np.ndarray[Any, np.dtype[np.uint64]]
"""(n,) numbers that name what is in a sum; what is in it twice is there twice"""
_KINDS = 16


def nearly_cancelled(now: Members, before: Sequence[Members], least: int) -> Iterator[tuple[tuple[int, ...], Members]]:
    """Yield which earlier sums, at most three, combined with a new one leave few members; single ones come first.

    Args:
        now: members of the new sum.
        before: members of earlier sums, each added or subtracted.
        least: how many members must be left, if any are.

    Yields:
        places of the earlier sums, and the members that are left.
    """
    kinds = [np.bincount((one % np.uint64(_KINDS)).astype(np.int64), minlength=_KINDS) for one in (now, *before)]
    signed = np.stack(
        [np.zeros_like(kinds[0]), *kinds[1:], *(-each for each in kinds[1:])]
    )  # the first stands for none
    sizes, k = signed.sum(1), len(before)
    same = [place for place, one in enumerate(before, 1) if np.array_equal(np.sort(now), np.sort(one))]
    for a in range(2 * k + 1):
        # Few combinations leave few in all, and fewer leave few of each kind.
        b, c = np.nonzero(np.triu(np.abs(len(now) + sizes[a] + sizes[a:, None] + sizes[a:]) < least))
        near = np.abs(kinds[0] + signed[a] + signed[b + a] + signed[c + a]).sum(1) < least
        for found in np.stack([np.full_like(b, a), b + a, c + a], 1)[near].tolist():
            used = [place for place in found if place]
            if {place - k for place in used} & {*used, *same}:
                continue  # one is added and subtracted
            sums = [now, *(before[(place - 1) % k] for place in used)]
            signs = [1, *(1 if place <= k else -1 for place in used)]
            members, which = np.unique(np.concatenate(sums), return_inverse=True)
            rest = np.abs(np.bincount(which, np.repeat(signs, [*map(len, sums)]), len(members))).astype(np.int64)
            if 0 < rest.sum() < least:
                yield tuple((place - 1) % k for place in used), np.repeat(members, rest)
