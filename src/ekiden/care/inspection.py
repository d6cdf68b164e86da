"""What readers ask of this wing; see `ekiden.readers.inspector`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ekiden.care import copies, features, labels, seen, silos
from ekiden.care.comparison import compare_sums
from ekiden.care.spelling import (
    Names,
    check_classes,
    nothing_in_common,
    numbered_from_two,
    refuse_spellings,
    shortened,
    spelled,
)
from ekiden.core.base.errors import UserError, listed, tell
from ekiden.core.data.inputs import Inputs
from ekiden.core.data.samples import Dataset
from ekiden.readers.columns import Reading
from ekiden.readers.inspector import Inspector, Spelling
from ekiden.readers.moments import ColumnSums
from ekiden.readers.undecoded import Raw


@dataclass(frozen=True)
class DataInspector(Inspector):
    """Looks for all that this wing knows of."""

    def names(
        self,
        raws: Sequence[Raw],
        owners: Sequence[str],
        spelling: Spelling,
        known: Sequence[str],
        inputs: Inputs | None,
    ) -> list[Raw]:
        return spelled(raws, owners, spelling, known, inputs)

    def classes(self, raws: Sequence[Raw], owners: Sequence[str], spelling: Spelling) -> None:
        check_classes(raws, owners, spelling)

    def data(
        self, made: Dataset, raws: Sequence[Raw], reading: Reading, *, unscaled: bool, given: bool
    ) -> None:
        found = seen.SeenData(made, raws, reading, unscaled=unscaled, given=given)
        for rule in _RULES:
            _tell(rule(found))

    def sums(self, told: Sequence[ColumnSums], spelling: Spelling | None) -> list[ColumnSums]:
        if spelling is None:
            _tell(compare_sums(told))
            return list(told)
        told = _spelled(told, spelling)
        _compare_classes({one.silo: one.classes for one in told}, spelling)
        _tell(compare_sums(told))
        _compare_rows(told)
        return told


_RULES = (*features.RULES, *labels.RULES, *copies.RULES, *silos.RULES)


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        tell(line)


def _compare_classes(classes: Mapping[str, Mapping[str, int]], spelling: Spelling) -> None:
    """Say whether a silo shares no class with the others, or shortens their names."""
    if spelling == "keep":
        return
    if strange := [*filter(None, (nothing_in_common(classes), shortened(classes)))]:
        tell(f"{listed(strange, sign='; ')}: check that a class means the same everywhere")


def _spelled(told: Sequence[ColumnSums], spelling: Spelling) -> list[ColumnSums]:
    """Return the sums with one spelling of each name."""
    label = Names("the label", {one.silo: one.classes for one in told})
    columns = {
        column: Names(f"column {column!r}", {one.silo: one.categories[column] for one in told})
        for column in told[0].categories
    }
    if not spelling:
        refuse_spellings((label, *columns.values()))
    if spelling != "keep" and (line := numbered_from_two(label.held)):
        raise UserError(f"{line}: number them alike, or take them as they are by --spelling=keep")
    if spelling != "merge":
        return list(told)
    classes = label.instead()
    instead = {column: names.instead() for column, names in columns.items()}
    return [
        replace(
            one,
            categories={c: _renamed(n, instead[c]) for c, n in one.categories.items()},
            classes=_renamed(one.classes, classes),
        )
        for one in told
    ]


def _renamed(counts: Mapping[str, int], other: Mapping[str, str]) -> Mapping[str, int]:
    found = Counter[str]()
    for name, n in counts.items():
        found[other.get(name, name)] += n
    return found


def _compare_rows(told: Sequence[ColumnSums]) -> None:
    """Say how many rows several silos hold, and which silos do not tell."""
    tells = {one.silo: one.rows for one in told if one.rows}
    if len(tells) > 1 and len(told[0].missing) + len(told[0].categories) >= seen.FEATURES:
        for line in seen.rows_of_several(tells):
            tell(line)
    if len({one.secret for one in told if one.rows}) > 1:
        tell(
            f"rows of {listed(tells)} are not compared: write the same secret into [data] "
            "fingerprints at all silos"
        )
    if tells and (silent := [one.silo for one in told if not one.rows]):
        tell(f"rows of {', '.join(silent)} are not compared: it told no fingerprints of them")
