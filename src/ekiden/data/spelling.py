"""Find names of classes and categories that differ in case or blanks only, and take them as one if the user says so."""

import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ekiden.base.errors import DataWarning, UserError
from ekiden.base.outside import pa, pc
from ekiden.data.cells import is_text
from ekiden.data.kinds import Inputs, Table
from ekiden.data.undecoded import Raw, natural

Spelling = Literal["", "merge", "keep"]
_SHOWN = 5
_MANY = 1000  # different texts in a column; more are hardly names of categories
_AGREED = "agreed"


def fold(name: str) -> str:
    """Return a name without differences in case, blanks and the form of characters."""
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


def spellings(names: Mapping[str, Mapping[str, int]]) -> list[list[tuple[str, list[str]]]]:
    """Return the names that are equal up to case and blanks.

    Args:
        names: for each silo, its names and how many rows have each.

    Returns:
        For each name that is written in several ways, the spellings, the commonest first, each with its silos.
    """
    rows: Counter[str] = Counter()
    silos: dict[str, list[str]] = {}
    for silo, found in names.items():
        rows.update(found)
        for name in found:
            silos.setdefault(name, []).append(silo)
    alike: dict[str, list[str]] = {}
    for name in silos:
        alike.setdefault(fold(name), []).append(name)
    return [
        [(name, silos[name]) for name in sorted(each, key=lambda n: (-rows[n], natural(n)))]
        for each in alike.values()
        if len(each) > 1
    ]


def refuse_spellings(names: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
    """Refuse names that are equal up to case and blanks.

    Args:
        names: for each column, and each silo, its names and how many rows have each.
    """
    if pairs := _pairs(names):
        raise UserError(
            f"{pairs}: names that differ in case or blanks only. Take them as one by --spelling=merge (spelling in "
            "silo.toml), or as different by --spelling=keep"
        )


def _pairs(names: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Return in words which names are equal up to case and blanks; empty if none are."""
    found = [(column, ways) for column, each in names.items() for ways in spellings(each)]
    shown = []
    for column, ways in found[:_SHOWN]:
        written = " and ".join(f"{name!r} ({_silos(silos)})" for name, silos in ways)
        shown.append(f"{column} has {written}")
    return "; ".join(shown) + (f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")


def merging(names: Mapping[str, Mapping[str, int]], known: Sequence[str] = ()) -> dict[str, str]:
    """Return the spelling to use for each name that is written in another way: a known one, or else the commonest."""
    wanted = {fold(name): name for name in reversed(known)}
    rows: Counter[str] = Counter()
    for found in names.values():
        rows.update(found)
    for name in sorted(rows, key=lambda n: (-rows[n], natural(n))):
        wanted.setdefault(fold(name), name)
    return {name: wanted[fold(name)] for name in rows if wanted[fold(name)] != name and name not in known}


def _silos(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def spelled(
    raws: Sequence[Raw], silos: Sequence[str], how: Spelling, classes: Sequence[str], known: Inputs | None
) -> list[Raw]:
    """Return all parts of a data set with one spelling of each class and category.

    Args:
        raws: the parts.
        silos: name of the silo that holds each part; "" if the part's groups are the silos, or there are none.
        how: merge or keep names that differ in case or blanks only; "" refuses them.
        classes: names of the classes, if they are known.
        known: what samples become, if that is known: the categories of tables.
    """
    if how == "keep":
        return list(raws)
    label = f"the label {raws[0].targets[0] if raws[0].targets else 'label'!r}"
    texts = {f"column {name!r}": name for name in _texts(raws)}
    found: dict[str, dict[str, Counter[str]]] = {}
    if all(raw.label.dtype.kind == "U" and raw.label.ndim == 1 and not raw.classes for raw in raws):
        found[label] = _by_silo([raw.label.tolist() for raw in raws], raws, silos)
    for what, column in texts.items():
        found[what] = _by_silo([raw.images[column].to_pylist() for raw in raws], raws, silos)
    agreed: dict[str, Sequence[str]] = {label: classes}
    if isinstance(known, Table) and known.vocabularies:
        agreed |= {f"column {c!r}": v for c, v in zip(known.categorical, known.vocabularies, strict=True)}
    if not how:
        written = {what: {_AGREED: dict.fromkeys(agreed.get(what, ()), 0), **each} for what, each in found.items()}
        if not raws[0].given or any(silos):
            refuse_spellings(written)
        elif pairs := _pairs(written):  # arrays of one owner, whose names are not read
            warnings.warn(f"{pairs}: names that differ in case or blanks only", DataWarning, stacklevel=3)
        return list(raws)
    instead = {what: merging(each, agreed.get(what, ())) for what, each in found.items()}
    columns = {column: instead[what] for what, column in texts.items()}
    return [_renamed(raw, instead.get(label, {}), columns) for raw in raws]


def check_numbering(raws: Sequence[Raw], silos: Sequence[str], how: Spelling) -> None:
    """Refuse labels that some silos number from 0 and others from 1; of arrays only say so.

    Args:
        raws: as in `spelled`.
        silos: as in `spelled`.
        how: keep takes the numbers as they are.
    """
    whole = all(raw.label.ndim == 1 and raw.label.dtype.kind in "iu" and not raw.classes for raw in raws)
    if how == "keep" or not whole:
        return
    held: dict[str, set[int]] = {}
    for raw, silo in zip(raws, silos, strict=True):
        owners = np.full(len(raw), silo) if silo or raw.group is None else raw.group.astype(np.str_)
        names, place = np.unique(owners, return_inverse=True)
        for owner, label in np.unique(np.stack([place, raw.label]), axis=1).T.tolist():
            held.setdefault(str(names[owner]), set()).add(label)
    if not (line := numbered_from_two(held)):
        return
    if not raws[0].given:
        raise UserError(f"{line}: number them alike, or take them as they are by --spelling=keep")
    warnings.warn(f"{line}: check that a number means the same everywhere", DataWarning, stacklevel=3)


def numbered_from_two(held: Mapping[str, set[int]]) -> str:
    """Say that some silos number their classes from 0, and others as many from 1; "" if they do not.

    Args:
        held: for each silo, its labels.
    """
    every = set().union(*held.values()) if held else set()
    high = max(every, default=0)
    zero = [silo for silo, labels in held.items() if 0 in labels]
    one = [silo for silo, labels in held.items() if high in labels]
    shifted = any(held[s] == every - {high} for s in zero) and any(held[s] == every - {0} for s in one)
    counted = min(every, default=0) == 0 and len(every) == high + 1  # labels may be codes of 16 digits
    if high < 2 or not counted or set(zero) & set(one) or not shifted:
        return ""
    return f"classes are 0 to {high - 1} at {_silos(zero)}, but 1 to {high} at {_silos(one)}"


def _texts(raws: Sequence[Raw]) -> list[str]:
    """Return the columns of text that all tables have, with few enough different values to be names."""
    if not raws[0].kind.agreed:
        return []

    def names(column: str) -> bool:
        parts = [raw.images[column] for raw in raws if column in raw.images.column_names]
        text = len(parts) == len(raws) and all(is_text(p.type) for p in parts)
        return text and all(pc.count_distinct(part).as_py() <= _MANY for part in parts)

    return [column for column in raws[0].images.column_names if names(column)]


def _by_silo(
    values: Sequence[np.typing.NDArray[np.generic]], raws: Sequence[Raw], silos: Sequence[str]
) -> dict[str, Counter[str]]:
    """Count names by the silo that writes them."""
    found: dict[str, Counter[str]] = {}
    for names, raw, silo in zip(values, raws, silos, strict=True):
        owners: Iterable[str] = [silo or raw.source] * len(raw) if silo or raw.group is None else map(str, raw.group)
        for owner, name in zip(owners, names, strict=True):
            if name is not None:
                found.setdefault(owner, Counter())[name] += 1
    return found


def _renamed(raw: Raw, labels: Mapping[str, str], columns: Mapping[str, Mapping[str, str]]) -> Raw:
    """Return a part with other names of classes and categories."""
    table = raw.images
    for column, other in columns.items():
        if other:
            place = table.column_names.index(column)
            named = pa.array([other.get(name, name) for name in table[column].to_pylist()], pa.string())
            table = table.set_column(place, table.schema.field(column).with_type(pa.string()), named)
    label = np.array([labels.get(name, name) for name in raw.label.tolist()]) if labels else raw.label
    return replace(raw, images=table, label=label)
