"""What looks at data that can be read, and says what may be wrong with them: the door to `care`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from ekiden.core.data.inputs import Inputs
from ekiden.core.data.samples import Dataset
from ekiden.readers.undecoded import Raw

if TYPE_CHECKING:
    from ekiden.readers.columns import Reading
    from ekiden.readers.moments import ColumnSums


Spelling = Literal["", "merge", "keep"]
"""what becomes of names that are written in several ways: refused, one, or as they are"""


class Inspector(Protocol):
    """Says in one line each what may be wrong, or refuses it. Data do not change, except for names
    that are written in several ways, where the user asked for one.
    """

    def names(
        self,
        raws: Sequence[Raw],
        owners: Sequence[str],
        spelling: Spelling,
        known: Sequence[str],
        inputs: Inputs | None,
    ) -> list[Raw]:
        """Return the parts of a data set with one spelling of each name.

        Args:
            raws: the parts.
            owners: the silo of each; "" without one.
            spelling: `merge`, `keep`, or "", which refuses names that are alike.
            known: names of classes that were agreed on.
            inputs: what samples become, if that was agreed on.
        """

    def classes(self, raws: Sequence[Raw], owners: Sequence[str], spelling: Spelling) -> None:
        """Look at the classes of silos."""

    def data(
        self, made: Dataset, raws: Sequence[Raw], reading: "Reading", *, unscaled: bool, given: bool
    ) -> None:
        """Look at a data set.

        Args:
            made: the data set.
            raws: its parts, undecoded.
            reading: what columns mean.
            unscaled: whether silos have not agreed on what samples become.
            given: whether the test part was given, not drawn at random from all rows.
        """

    def sums(self, told: Sequence["ColumnSums"], spelling: Spelling | None) -> list["ColumnSums"]:
        """Look at what silos report about their columns, and return it with one spelling of each
        name.

        `spelling` is None where names were compared before, in the rows themselves.
        """


def inspector() -> Inspector:
    """Return what looks at data."""
    # the one place where readers know of care
    from ekiden.care import inspection

    return inspection
