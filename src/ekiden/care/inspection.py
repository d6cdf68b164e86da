"""What readers ask of this wing; the functions of `ekiden.readers.inspector.Inspector`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ekiden.care import copies, features, labels, silos
from ekiden.care.comparison import compare_sums, with_check
from ekiden.care.seen import FEATURES, SeenData, rows_of_several
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
from ekiden.core.data.samples import Dataset
from ekiden.readers.columns import Reading
from ekiden.readers.inspector import Spelling
from ekiden.readers.moments import ColumnSums
from ekiden.readers.undecoded import Raw

names = spelled
classes = check_classes
_RULES = (*features.RULES, *labels.RULES, *copies.RULES, *silos.RULES)


def data(
    made: Dataset, raws: Sequence[Raw], reading: Reading, *, unscaled: bool, given: bool
) -> None:
    """Say what each rule finds in a data set."""
    found = SeenData(made, raws, reading, unscaled=unscaled, given=given)
    for rule in _RULES:
        _tell(rule(found))


def sums(told: Sequence[ColumnSums], spelling: Spelling | None) -> list[ColumnSums]:
    """Say what differs between what silos report, and return it with one spelling of each name."""
    if spelling is None:
        _tell(compare_sums(told))
        return list(told)
    found = _spelled(told, spelling)
    if spelling != "keep":
        held = {one.silo: one.classes for one in found}
        strange = nothing_in_common(held), shortened(held)
        _tell(with_check(strange, "check that a class means the same everywhere"))
    _tell(compare_sums(found))
    _compare_rows(found)
    return found


def _tell(lines: Iterable[str]) -> None:
    for line in lines:
        tell(line)


def _spelled(told: Sequence[ColumnSums], spelling: Spelling) -> list[ColumnSums]:
    """Return the sums with one spelling of each name."""
    label = Names("the label", {one.silo: one.classes for one in told})
    columns = dict[str, Names]()
    for column in told[0].categories:
        held = {one.silo: one.categories[column] for one in told}
        columns[column] = Names(f"column {column!r}", held)
    if not spelling:
        refuse_spellings((label, *columns.values()))
    if spelling != "keep" and (line := numbered_from_two(label.held)):
        raise UserError(f"{line}: number them alike, or take them as they are by --spelling=keep")
    if spelling != "merge":
        return list(told)
    merged = list[ColumnSums]()
    for one in told:
        categories = dict[str, Mapping[str, int]]()
        for column, names in columns.items():
            categories[column] = names.merged(one.categories[column])
        merged.append(replace(one, categories=categories, classes=label.merged(one.classes)))
    return merged


def _compare_rows(told: Sequence[ColumnSums]) -> None:
    """Say how many rows several silos hold, and which silos do not tell."""
    tells = dict[str, Sequence[str]]()
    secrets = set[str]()
    silent = list[str]()
    for one in told:
        if one.rows:
            tells[one.silo] = one.rows
            secrets.add(one.secret)
        else:
            silent.append(one.silo)
    if len(tells) > 1 and len(told[0].missing) + len(told[0].categories) >= FEATURES:
        _tell(rows_of_several(tells))
    if len(secrets) > 1:
        tell(
            f"rows of {listed(tells)} are not compared: write the same secret into [data] "
            "fingerprints at all silos"
        )
    if tells and silent:
        tell(f"rows of {', '.join(silent)} are not compared: it told no fingerprints of them")
