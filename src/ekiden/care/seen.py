"""What doubts look at: a data set, its parts as they were read, and which equal samples are copies,
not chance.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import chain, combinations
from math import exp, log, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ekiden.core.base.errors import counted, listed
from ekiden.core.data.samples import Dataset, Samples
from ekiden.readers.columns import Reading
from ekiden.readers.kinds import Inputs
from ekiden.readers.undecoded import Raw

WHOLE = re.compile(r"-?\d{1,18}")
FEATURES = 2
"""of a sample that is compared; rows of a single number are equal by chance"""
_IMPROBABLE = 0.01
_NEVER = 1e-18
LARGE = 1 << 28
"""bytes of samples that are not compared"""
ROWS = 20
MOST_SILOS = 200
"""rows from which a silo is compared with others, and how many silos are"""
LOOKED_AT = 8000
_OF_EACH = 100
"""samples of all silos that are compared, and the least of each: every silo is compared with all
others"""
# samples that are not compared: their prints would need a gigabyte
_CROWD = 2_000_000


def chance(x: Tensor) -> float:
    """Return how probable it is that two samples (n, ...) are equal, if their values do not depend
    on each other.

    It is 0 for samples that are not rows: images and signals are copies if they are equal.
    """
    if x.ndim != 2 or len(x) < 2:
        return 0.0
    found = 1.0
    for column in x.cpu().numpy().T:
        _, counts = np.unique(column, return_counts=True)
        found *= float((counts * (counts - 1.0)).sum()) / (len(x) * (len(x) - 1.0))
        if found < _NEVER:
            break
    return found


def repeated(counts: Counter[Any], times: int = 1) -> Counter[Any]:
    """Return what is counted more than so many times."""
    return Counter({what: n for what, n in counts.items() if n > times})


def twice(*parts: Counter[Any]) -> float:
    """Return the share of equal rows among all pairs of rows within parts."""
    equal = every = 0
    for rows in parts:
        every += rows.total() * (rows.total() - 1)
        equal += sum(n * (n - 1) for n in rows.values())
    return equal / max(every, 1)


def improbable(found: int, expected: float, pairs: int = 1) -> bool:
    """Return whether so many equal rows are hardly chance, by Chernoff's bound for a Poisson
    variable.
    """
    if found <= expected:
        return False
    return pairs * exp(found - expected + found * log(max(expected, _NEVER) / found)) < _IMPROBABLE


def beyond_chance(
    here: Counter[Any], there: Counter[Any], chance: float = 0.0, pairs: int = 1
) -> bool:
    """Return whether two parts hold more equal rows than they would by chance.

    Silos that differ share fewer rows than there are equal ones within them. So at least twice as
    many pairs as these lead one to expect, and improbably many, are copies.

    Args:
        here: how often each row is in a part.
        there: and in the other.
        chance: how probable it is that two rows are equal, as far as their values tell.
        pairs: of parts that are compared.
    """
    here = here.copy()
    there = there.copy()
    # a row that is common in a part would hide all others
    for row in (*repeated(here, 2), *repeated(there, 2)):
        del here[row], there[row]
    equal = sum(n * there[row] for row, n in here.items())
    # by Cauchy and Schwarz, the mean of both is a bound; that of few rows is unsure
    within = max(twice(here, there), sqrt(twice(here) * twice(there)), chance)
    expected = here.total() * there.total() * within
    return equal >= 2 * expected and improbable(equal, expected, pairs)


def rows_of_several(
    held: Mapping[str, Sequence[bytes | str]], chance: float | None = None
) -> Iterator[str]:
    """Say how many rows several silos hold, by their fingerprints, unless so many are equal by
    chance.

    `chance` says how probable it is that two rows are equal; None if only fingerprints are known.
    """
    counts = dict[str, Counter[bytes | str]]()
    owners = defaultdict[bytes | str, list[str]](list)
    for name, rows in held.items():
        counts[name] = Counter(rows)
        for row in counts[name]:
            owners[row].append(name)
    found = Counter[tuple[str, str]]()
    for names in owners.values():
        found.update(combinations(names, 2))
    shown = list[str]()
    most = 0
    for (a, b), n in found.most_common():
        if beyond_chance(counts[a], counts[b], chance or 0.0, len(found)):
            shown.append(
                f"{a} and {b} {counted(n, 'row')} of {len(held[a]):,} and {len(held[b]):,}"
            )
            most = max(most, n)
    if not shown:
        return
    few = ""
    # of fingerprints it is open how coarse the values are
    if chance is None and most < 10:
        few = ". Few may be equal by chance, if values are coarse"
    yield (
        f"silos hold equal rows: {listed(shown)}. A row that one silo trains on may be another's test: "
        f"take out what is twice{few}"
    )


def fingerprints(x: Tensor, inputs: Inputs, salt: bytes) -> list[bytes]:
    """Return 8 bytes for each sample (n, ...), equal for equal samples and salts."""
    rows = np.ascontiguousarray(inputs.compared(x))
    if rows.dtype.kind == "f":
        # one NaN, one zero
        rows = np.where(np.isnan(rows), np.nan, rows + 0.0)
    return [blake2b(row.tobytes(), digest_size=8, key=salt[:64]).digest() for row in rows]


def are_pictures(x: Tensor) -> bool:
    """Return whether samples (n, ...) are pictures."""
    return x.ndim == 4 and x.dtype == torch.uint8


def thumbnails(pictures: Tensor) -> Tensor:
    """Return pictures (n, C, H, W) as (n, C, 8, 8)."""
    return F.adaptive_avg_pool2d(pictures.double(), 8)


def shared_columns(raws: Sequence[Raw]) -> Iterator[tuple[str, list[Any]]]:
    """Yield the columns that all parts of a table have, each with its values in every part."""
    if not raws[0].kind.agreed:
        return
    for name in raws[0].images.column_names:
        columns = [raw.images[name] for raw in raws if name in raw.images.column_names]
        if len(columns) == len(raws):
            yield name, columns


@dataclass(frozen=True)
class SeenData:
    """Data in which there may be something wrong."""

    # the data set
    data: Dataset
    # its parts, undecoded
    raws: Sequence[Raw]
    # what columns mean
    reading: Reading
    # whether silos have not agreed on what samples become
    unscaled: bool
    # whether the test part was given. Otherwise it was drawn at random from all rows.
    given: bool

    @property
    def source(self) -> str:
        """Return where the samples come from, in words."""
        return "all silos" if self.data.groups else self.raws[0].source

    def classes(self, numbers: Iterable[int]) -> str:
        """Return the names of some classes, for messages."""
        return listed(repr(self.data.classes[k]) for k in numbers)

    @property
    def both(self) -> dict[str, Samples]:
        """Return the training part and the test part, by what messages call them."""
        return {"the training part": self.data.train, "the test part": self.data.test}

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Return which training rows each natural owner holds; none without owners."""
        group = self.data.train.group
        if group is None:
            return {}
        return {owner: (group == k).nonzero()[:, 0] for k, owner in enumerate(self.data.groups)}

    @cached_property
    def compared(self) -> dict[str, Tensor]:
        """Return rows of each silo with enough of them; none if there is nothing to compare."""
        rows = {owner: at for owner, at in self.rows.items() if len(at) >= ROWS}
        if not 1 < len(rows) <= MOST_SILOS:
            return {}
        most = max(_OF_EACH, LOOKED_AT // len(rows))
        for owner, at in rows.items():
            rows[owner] = at[:: max(1, len(at) // most)]
        return rows

    @cached_property
    def prints(self) -> tuple[list[bytes], list[bytes]] | None:
        """Return fingerprints of all training and test samples; None if there are too many, or rows
        of one number.
        """
        x = self.data.train.x
        test = self.data.test.x
        inputs = self.data.inputs
        many = x.nbytes + test.nbytes > LARGE or len(x) + len(test) > _CROWD
        if many or x[0].numel() < FEATURES:
            return None
        return fingerprints(x, inputs, b""), fingerprints(test, inputs, b"")

    @property
    def owned(self) -> dict[str, list[bytes]]:
        """Return the fingerprints of each natural owner, or of the source; none if there are too
        many.
        """
        if self.prints is None:
            return {}
        if not self.data.groups:
            return {self.source: [*chain(*self.prints)]}
        found: dict[str, list[bytes]] = {name: [] for name in self.data.groups}
        for prints, part in zip(self.prints, (self.data.train, self.data.test), strict=True):
            if part.group is not None:
                for owner, print_ in zip(part.group.tolist(), prints, strict=True):
                    found[self.data.groups[owner]].append(print_)
        return found
