"""What doubts look at: a data set, its parts as they were read, and fingerprints of its samples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from torch import Tensor

from ekiden.data.columns import Reading
from ekiden.data.copies import FEATURES, fingerprints
from ekiden.data.kinds import Table
from ekiden.data.samples import Dataset
from ekiden.data.tasks import Classification
from ekiden.data.undecoded import Raw

LARGE = 1 << 28
"""bytes of samples that are not compared"""
ROWS, MOST_SILOS = 20, 200
"""rows from which a silo is compared with others, and how many silos are"""
LOOKED_AT, _OF_EACH = 8000, 100
"""samples of all silos that are compared, and the least of each: every silo is compared with all others"""
_CROWD = 2_000_000  # samples that are not compared: their prints would need a gigabyte


@dataclass(frozen=True)
class SeenData:
    """Data in which there may be something wrong."""

    data: Dataset  # the data set
    raws: Sequence[Raw]  # its parts, undecoded
    reading: Reading  # what columns mean
    unscaled: bool  # whether silos have not agreed on what samples become
    given: bool  # whether the test part was given. Otherwise it was drawn at random from all rows.

    @property
    def source(self) -> str:
        """Return where the samples come from, in words."""
        return "all silos" if self.data.groups else self.raws[0].source

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Return which training rows each natural owner holds; none without owners."""
        group = self.data.train.group
        return {} if group is None else {o: (group == k).nonzero()[:, 0] for k, o in enumerate(self.data.groups)}

    @cached_property
    def compared(self) -> dict[str, Tensor]:
        """Return rows of each silo with enough of them; none if there is nothing to compare."""
        rows = {o: at for o, at in self.rows.items() if len(at) >= ROWS}
        if not 1 < len(rows) <= MOST_SILOS:
            return {}
        most = max(_OF_EACH, LOOKED_AT // len(rows))
        return {o: at[:: max(1, len(at) // most)] for o, at in rows.items()}

    @property
    def names(self) -> Iterator[tuple[str, Sequence[str]]]:
        """Yield the names of classes and of the categories of each column, each with what they are."""
        table = Table.of(self.data.inputs)
        yield "class", self.data.classes if isinstance(self.data.task, Classification) else ()
        for column, names in zip(table.categorical, table.vocabularies, strict=False):
            yield f"category of column {column!r}", names

    @cached_property
    def bare(self) -> tuple[Tensor, Tensor]:
        """Return which training and test samples (n,) have nothing in them."""
        train, test = (self.data.inputs.bare(part.x).cpu() for part in (self.data.train, self.data.test))
        return train, test

    @cached_property
    def prints(self) -> tuple[list[bytes], list[bytes]] | None:
        """Return fingerprints of all training and test samples; None if there are too many, or rows of one number.

        Those with nothing in them have fingerprints of their own.
        """
        both = (self.data.train.x, self.data.test.x)
        if sum(x.nbytes for x in both) > LARGE or sum(map(len, both)) > _CROWD or both[0][0].numel() < FEATURES:
            return None
        train, test = (
            [
                b"%s %d" % (part, row) if empty else print_
                for row, (print_, empty) in enumerate(zip(prints, bare.tolist(), strict=True))
            ]
            for part, prints, bare in zip(
                (b"train", b"test"), (fingerprints(x, self.data.inputs, b"") for x in both), self.bare, strict=True
            )
        )
        return train, test

    @property
    def owned(self) -> dict[str, list[bytes]]:
        """Return the fingerprints of each natural owner, or of the source; none if there are too many."""
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
