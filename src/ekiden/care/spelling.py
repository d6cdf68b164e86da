"""Find names that silos write in several ways. If the user says so, names become one.

Names are alike if they differ in case, blanks, hyphens, quotation marks or characters that nobody
sees only; or if all names of a column mean yes or no: yes, Y, true and 1 are one. They are alike also
if their numbers differ in leading zeros, as 001 and 1 or P-01 and P1, unless a silo has both.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base.errors import UserError, listed, tell
from ekiden.readers.cells import garbled, is_text
from ekiden.readers.inspector import Spelling
from ekiden.readers.kinds import Inputs, Table
from ekiden.readers.moments import counted_together
from ekiden.readers.undecoded import Raw, natural

_YES, _NO = (
    ("yes", "y", "true", "t", "1", "ja", "j", "oui", "si"),
    ("no", "n", "false", "f", "0", "nein", "non"),
)
_TRUTH = dict.fromkeys(_YES, "yes") | dict.fromkeys(_NO, "no")
# different texts in a column; more are hardly names of categories
_MANY = 1000
_SIGNS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u02bc\u00b4`\u2032", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
)
"""quotation marks and dashes that programs set in place of plain ones"""
# letters of an abbreviation
_SHORT = 4
_AGREED = "agreed"
ALIKE = "names that differ in case, blanks, signs or leading zeros only, or mean the same"


def fold(name: str) -> str:
    """Return a name without differences in case, blanks, hyphens, quotation marks and the form of
    characters.
    """
    plain = (name if name.isascii() else garbled(name) or name).translate(_SIGNS)
    seen = "".join(
        c for c in unicodedata.normalize("NFKC", plain) if unicodedata.category(c) != "Cf"
    )
    return " ".join(re.sub(r"(?<=\w)[-_](?=\w)", " ", seen.casefold()).split())


def folded(names: Iterable[str]) -> dict[str, str]:
    """Return what each name of a column is without differences of spelling."""
    found = {name: fold(name) for name in names}
    return {k: _TRUTH[f] for k, f in found.items()} if set(found.values()) <= set(_TRUTH) else found


def bare_id(name: str) -> str:
    """Return a name without differences of spelling, leading zeros, and blanks except those between
    numbers.
    """
    return re.sub(r"(?<![\d.,])0+(?=\d)|(?<!\d) | (?!\d)", "", fold(name))


def _keys(silos: Mapping[str, Iterable[str]], zeros: bool) -> dict[str, str]:
    """Return what each name is without differences of spelling, and without leading zeros if no
    silo has both.
    """
    found = folded(dict.fromkeys(name for each in silos.values() for name in each))
    bare = {name: bare_id(key) for name, key in found.items()}
    both = any(
        len({bare[name] for name in each}) < len({found[name] for name in each})
        for each in silos.values()
    )
    return bare if zeros and not both else found


def spellings(
    names: Mapping[str, Mapping[str, int]], zeros: bool = False
) -> list[list[tuple[str, list[str]]]]:
    """Return for each name that is written in several ways the spellings, the commonest first, each
    with its silos.

    `names` says for each silo how many rows have each name, and `zeros` that leading zeros may be a
    difference: silos have files of their own.
    """
    rows, silos = counted_together([*names.values()]), dict[str, list[str]]()
    for silo, found in names.items():
        for name in found:
            silos.setdefault(name, []).append(silo)
    alike: dict[str, list[str]] = {}
    for name, key in _keys(names, zeros).items():
        alike.setdefault(key, []).append(name)
    return [
        [(name, silos[name]) for name in sorted(each, key=lambda n: (-rows[n], natural(n)))]
        for each in alike.values()
        if len(each) > 1
    ]


def refuse_spellings(
    names: Mapping[str, Mapping[str, Mapping[str, int]]], apart: Collection[str] = ()
) -> None:
    """Refuse names that are alike, given how many rows have each, for each column and silo.

    In columns that are `apart`, 01 is not 1.
    """
    if pairs := _pairs(names, apart):
        raise UserError(
            f"{pairs}: {ALIKE}. Take them as one by --spelling=merge (spelling in silo.toml), or "
            "as different by --spelling=keep"
        )


def _pairs(names: Mapping[str, Mapping[str, Mapping[str, int]]], apart: Collection[str]) -> str:
    """Return in words which names are alike; empty if none are."""
    found = [
        (column, ways)
        for column, each in names.items()
        for ways in spellings(each, column not in apart)
    ]
    written = [
        (column, " and ".join(f"{name!r} ({listed(silos)})" for name, silos in ways))
        for column, ways in found
    ]
    return listed((f"{column} has {names}" for column, names in written), sign="; ")


def merging(
    names: Mapping[str, Mapping[str, int]], known: Sequence[str] = (), zeros: bool = False
) -> dict[str, str]:
    """Return the spelling to use for each name that is written in another way: a known one, or else
    the commonest.
    """
    rows = counted_together([*names.values()])
    keys = _keys({**names, _AGREED: known}, zeros)
    wanted = {keys[name]: name for name in reversed(known)}
    for name in sorted(rows, key=lambda n: (-rows[n], natural(n))):
        wanted.setdefault(keys[name], name)
    return {
        name: wanted[keys[name]]
        for name in rows
        if wanted[keys[name]] != name and name not in known
    }


_OWNERS: tuple[Literal["group", "domain", "subject"], ...] = ("group", "domain", "subject")


def spelled(
    raws: Sequence[Raw],
    silos: Sequence[str],
    how: Spelling,
    classes: Sequence[str],
    known: Inputs | None,
) -> list[Raw]:
    """Return all parts of a data set with one spelling of each class, category, group, domain and
    subject.

    Args:
        raws: the parts.
        silos: name of the silo that holds each part; "" if the part's groups are the silos, or
            there are none.
        how: merge or keep names that are alike; "" refuses them.
        classes: names of the classes, if they are known.
        known: what samples become, if that is known: the categories of tables.
    """
    if how == "keep":
        return list(raws)
    label = f"the label {raws[0].targets[0] if raws[0].targets else 'label'!r}"
    texts = {f"column {name!r}": name for name in _texts(raws)}
    owners = {
        f"the {what} column": what
        for what in _OWNERS
        if all(_named(getattr(raw, what)) for raw in raws)
    }
    found: dict[str, Mapping[str, Mapping[str, int]]] = {}
    if any(_named(raw.label) for raw in raws) and all(
        raw.label.ndim == 1 and not raw.classes for raw in raws
    ):
        found[label] = _by_silo([raw.label.astype(np.str_).tolist() for raw in raws], raws, silos)
    for what, column in texts.items():
        found[what] = _by_silo([raw.images[column].to_pylist() for raw in raws], raws, silos)
    for what, part in owners.items():
        found[what] = {raw.source: _counted(getattr(raw, part)) for raw in raws}
    agreed: dict[str, Sequence[str]] = {label: classes}
    table = Table.of(known)
    agreed |= {
        f"column {c!r}": v for c, v in zip(table.categorical, table.vocabularies, strict=False)
    }
    # one file writes a code in one way
    apart = () if any(silos) else {*found} - {"the subject column"}
    if not how:
        written = {
            what: {_AGREED: dict.fromkeys(agreed.get(what, ()), 0), **each}
            for what, each in found.items()
        }
        if not raws[0].given or any(silos):
            refuse_spellings(written, apart)
        elif pairs := _pairs(written, apart):  # arrays of one owner, whose names are not read
            tell(f"{pairs}: {ALIKE}")
        return list(raws)
    instead = {
        what: merging(each, agreed.get(what, ()), what not in apart) for what, each in found.items()
    }
    columns = {column: instead[what] for what, column in texts.items()}
    parts = {part: instead[what] for what, part in owners.items()} | {
        "label": instead.get(label, {})
    }
    return [_renamed(raw, columns, parts) for raw in raws]


def _named(values: NDArray[Any] | None) -> bool:
    return values is not None and values.dtype.kind == "U"


def _counted(values: NDArray[Any]) -> dict[str, int]:
    return dict(
        zip(*(each.tolist() for each in np.unique(values, return_counts=True)), strict=True)
    )


def check_classes(raws: Sequence[Raw], silos: Sequence[str], how: Spelling) -> None:
    """Refuse classes that some silos write in another way than the others; of arrays only say so.

    They are numbered from 0 and from 1, or a silo of several classes shares none with the others.
    The arguments are those of `spelled`.
    """
    if how == "keep" or any(raw.label.ndim > 1 or raw.label.dtype.kind == "f" for raw in raws):
        return
    held: dict[str, set[str]] = {}
    for raw, silo in zip(raws, silos, strict=True):
        labels = (
            np.array(raw.classes)[raw.label]
            if raw.classes and raw.label.dtype.kind == "i"
            else raw.label
        )
        owners = (
            np.full(len(raw), silo or raw.source)
            if silo or raw.group is None
            else raw.group.astype(np.str_)
        )
        for owner in np.unique(owners):
            held.setdefault(str(owner), set()).update(map(str, np.unique(labels[owners == owner])))
    if short := shortened(held):
        tell(f"{short}: write classes alike")
    line = numbered_from_two(held) or nothing_in_common(held)
    if not line:
        return
    if not raws[0].given:
        raise UserError(f"{line}: write classes alike, or take them as they are by --spelling=keep")
    tell(f"{line}: check that a class means the same everywhere")


def shortened(held: Mapping[str, Collection[str]]) -> str:
    """Name an abbreviation, and the name that only silos without it have, as M and malignant; "" if
    there is none.
    """
    owners = {
        name: {s for s, own in held.items() if name in own} for name in set().union(*held.values())
    }
    short = [name for name in owners if name.isalpha() and len(name) <= _SHORT]
    pairs = [
        f"{name!r} (at {listed(sorted(owners[name]))}) may be {long!r} (at "
        f"{listed(sorted(owners[long]))})"
        for name, long in product(sorted(short), sorted(owners))
        if len(long) > len(name) + 1
        and fold(long).startswith(fold(name))
        and not owners[name] & owners[long]
    ]
    return listed(pairs) if len(owners) <= _MANY else ""


def nothing_in_common(held: Mapping[str, Collection[str]], what: str = "class") -> str:
    """Name a silo of several classes (`what`) that shares none with the others; "" if there is
    none.
    """
    owners = Counter(label for own in held.values() for label in own)
    for name, own in held.items():
        if 1 < len(own) < len(owners) and all(owners[label] == 1 for label in own):
            here, there = (
                listed(map(repr, sorted(each, key=natural)))
                for each in (own, set(owners) - set(own))
            )
            return f"silo {name} shares no {what} with others (it has {here}; others have {there})"
    return ""


def numbered_from_two(held: Mapping[str, Iterable[str]], what: str = "classes are") -> str:
    """Say that some silos number their classes (`what`) from 0, and others as many from 1, or two
    classes -1 and 1; "" if they do not.

    Nothing is said unless all labels that silos hold are whole numbers.
    """
    names = {silo: set(own) for silo, own in held.items()}
    if not all(re.fullmatch(r"-?\d{1,18}", name) for name in set().union(*names.values())):
        return ""
    numbers = {silo: set(map(int, own)) for silo, own in names.items()}
    every = set().union(*numbers.values())
    high = max(every, default=0)
    one, other = every - {high}, every - {0}
    if every == {-1, 0, 1}:
        one, other = other, every - {-1}
    # labels may be codes of 16 digits
    elif high < 2 or min(every) or len(every) != high + 1:
        return ""
    first = [silo for silo, own in numbers.items() if one - other <= own]
    second = [silo for silo, own in numbers.items() if other - one <= own]
    both = one in numbers.values() and other in numbers.values()
    if not both or {*first} & {*second}:
        return ""
    return (
        f"{what} {min(one)} to {max(one)} at {listed(first)}, but {min(other)} to {max(other)} at "
        f"{listed(second)}"
    )


def _texts(raws: Sequence[Raw]) -> list[str]:
    """Return the columns of text that all tables have, with few enough different values to be
    names.
    """
    import pyarrow.compute as pc

    if not raws[0].kind.agreed:
        return []

    def names(column: str) -> bool:
        parts = [raw.images[column] for raw in raws if column in raw.images.column_names]
        text = len(parts) == len(raws) and all(is_text(p.type) for p in parts)
        return text and all(pc.count_distinct(part).as_py() <= _MANY for part in parts)

    return [column for column in raws[0].images.column_names if names(column)]


def _by_silo(
    values: Sequence[Sequence[str | None]], raws: Sequence[Raw], silos: Sequence[str]
) -> dict[str, Counter[str]]:
    """Count names by the silo that writes them."""
    found: dict[str, Counter[str]] = {}
    for names, raw, silo in zip(values, raws, silos, strict=True):
        owners: Iterable[str] = (
            [silo or raw.source] * len(raw) if silo or raw.group is None else map(str, raw.group)
        )
        for owner, name in zip(owners, names, strict=True):
            if name is not None:
                found.setdefault(owner, Counter())[name] += 1
    return found


def _renamed(
    raw: Raw, columns: Mapping[str, Mapping[str, str]], parts: Mapping[str, Mapping[str, str]]
) -> Raw:
    """Return a part with other names of categories, and of labels and owners (`parts`)."""
    import pyarrow as pa

    table = raw.images
    for column, other in columns.items():
        if other:
            place = table.column_names.index(column)
            named = pa.array(
                [other.get(name, name) for name in table[column].to_pylist()], pa.string()
            )
            table = table.set_column(
                place, table.schema.field(column).with_type(pa.string()), named
            )
    changed: dict[str, Any] = {
        part: np.array(
            [other.get(name, name) for name in getattr(raw, part).astype(np.str_).tolist()]
        )
        for part, other in parts.items()
        if other
    }
    return replace(raw, images=table, **changed)
