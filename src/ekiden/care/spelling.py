"""Find names that silos write in several ways. If the user says so, names become one.

Names are alike if they differ in case, blanks, hyphens, quotation marks or characters that nobody
sees only; or if all names of a column mean yes or no: yes, Y, true and 1 are one. They are alike also
if their numbers differ in leading zeros, as 001 and 1 or P-01 and P1, unless a silo has both.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ekiden.care.seen import WHOLE, shared_columns
from ekiden.core.base.errors import UserError, listed, tell
from ekiden.readers.cells import is_text
from ekiden.readers.inspector import Spelling
from ekiden.readers.kinds import Inputs, Table
from ekiden.readers.moments import counted_together
from ekiden.readers.undecoded import Raw, natural

_YES = "yes y true t 1 ja j oui si"
_NO = "no n false f 0 nein non"
_TRUTH = dict.fromkeys(_YES.split(), "yes") | dict.fromkeys(_NO.split(), "no")
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
    """Return a name without differences of case, blanks, hyphens, quotation marks and the form of
    characters.
    """
    plain = unicodedata.normalize("NFKC", name.translate(_SIGNS))
    seen = "".join(c for c in plain if unicodedata.category(c) != "Cf")
    return " ".join(re.sub(r"(?<=\w)[-_](?=\w)", " ", seen.casefold()).split())


def bare_id(name: str) -> str:
    """Return a name without differences of spelling, leading zeros, and blanks except those between
    numbers.
    """
    return re.sub(r"(?<![\d.,])0+(?=\d)|(?<!\d) | (?!\d)", "", fold(name))


def _keys(silos: Mapping[str, Iterable[str]], zeros: bool) -> dict[str, str]:
    """Return what each name is without differences of spelling, and without leading zeros if no
    silo has both.
    """
    names = dict.fromkeys(chain.from_iterable(silos.values()))
    found = dict(zip(names, map(fold, names), strict=True))
    if _TRUTH.keys() >= set(found.values()):
        found = {name: _TRUTH[key] for name, key in found.items()}
    if not zeros:
        return found
    bare = dict(zip(found, map(bare_id, found.values()), strict=True))
    for own in silos.values():
        if len(set(map(bare.get, own))) < len(set(map(found.get, own))):
            return found
    return bare


@dataclass(frozen=True)
class Names:
    """Names of one kind, some of which may be one name."""

    # in messages
    what: str
    # how many rows have each name, for each silo
    held: Mapping[str, Mapping[str, int]]
    # on which names silos agreed before
    agreed: Sequence[str] = ()
    # whether leading zeros may be a difference of spelling: silos have files of their own
    zeros: bool = True

    def alike(self) -> list[list[str]]:
        """Return the spellings of each name that has several: agreed ones first, then the
        commonest.
        """
        rows = counted_together([*self.held.values()])
        commonest = sorted(rows, key=lambda name: (-rows[name], natural(name)))
        order = dict.fromkeys([*self.agreed, *commonest])
        place = dict(zip(order, range(len(order)), strict=True))
        found = defaultdict[str, list[str]](list)
        for name, key in _keys({**self.held, _AGREED: self.agreed}, self.zeros).items():
            found[key].append(name)
        return [sorted(names, key=place.__getitem__) for names in found.values() if len(names) > 1]

    @cached_property
    def instead(self) -> dict[str, str]:
        """Return the spelling to use for each name that is written in another way; agreed names
        stay.
        """
        found = dict[str, str]()
        for first, *others in self.alike():
            found |= dict.fromkeys(set(others) - set(self.agreed), first)
        return found

    def merged(self, counts: Mapping[str, int]) -> Counter[str]:
        """Return numbers of rows by name, with one spelling of each."""
        found = Counter[str]()
        for name, n in counts.items():
            found[self.instead.get(name, name)] += n
        return found

    def told(self) -> list[str]:
        """Return in words which names are alike."""
        held = {**self.held, _AGREED: self.agreed}
        lines = list[str]()
        for names in self.alike():
            at = list[str]()
            for name in names:
                at.append(f"{name!r} ({listed(_silos_with(held, {name}))})")
            lines.append(f"{self.what} has {' and '.join(at)}")
        return lines


def _silos_with(held: Mapping[str, Collection[Any]], names: Iterable[Any]) -> list[str]:
    """Return the silos that hold all of these names."""
    return [silo for silo, own in held.items() if all(name in own for name in names)]


def refuse_spellings(names: Iterable[Names], *, only_tell: bool = False) -> None:
    """Refuse names that are alike, or only say that they are."""
    pairs = list(chain.from_iterable(map(Names.told, names)))
    if not pairs:
        return
    line = f"{listed(pairs, sign='; ')}: {ALIKE}"
    if not only_tell:
        raise UserError(
            f"{line}. Take them as one by --spelling=merge (spelling in silo.toml), or as "
            "different by --spelling=keep"
        )
    tell(line)


_Place = tuple[str, str]
"""a part of `Raw`, and the column of a table or """ ""


def spelled(
    raws: Sequence[Raw],
    owners: Sequence[str],
    spelling: Spelling,
    known: Sequence[str],
    inputs: Inputs | None,
) -> list[Raw]:
    """Return all parts of a data set with one spelling of each class, category, group, domain and
    subject.

    Args:
        raws: the parts.
        owners: name of the silo that holds each part; "" if the part's groups are the silos, or
            there are none.
        spelling: merge or keep names that are alike; "" refuses them.
        known: names of the classes, if they are known.
        inputs: what samples become, if that is known: the categories of tables.
    """
    if spelling != "keep":
        found = _named_places(raws, owners, known, Table.of(inputs))
        if spelling == "merge":
            return [_renamed(raw, found) for raw in raws]
        # names of arrays of one owner are not read, so they cannot be refused
        refuse_spellings(found.values(), only_tell=raws[0].given and not any(owners))
    return list(raws)


def _named_places(
    raws: Sequence[Raw], silos: Sequence[str], classes: Sequence[str], known: Table
) -> dict[_Place, Names]:
    """Return the names of all places that hold some."""
    # one file writes a code in one way
    zeros = any(silos)
    found = dict[_Place, Names]()
    numbered = any(raw.classes for raw in raws)
    if not numbered and any(_named(raw.label) for raw in raws):
        target = next(iter(raws[0].targets), "label")
        held = _by_silo(raws, silos, map(_class_names, raws))
        found["label", ""] = Names(f"the label {target!r}", held, classes, zeros)
    agreed = dict(zip(known.categorical, known.vocabularies, strict=False))
    for column, parts in shared_columns(raws):
        if _are_names(parts):
            held = _by_silo(raws, silos, [part.to_pylist() for part in parts])
            known_here = agreed.get(column, ())
            found["images", column] = Names(f"column {column!r}", held, known_here, zeros)
    for part in ("group", "domain", "subject"):
        if all(_named(getattr(raw, part)) for raw in raws):
            counts = {raw.source: Counter(getattr(raw, part).tolist()) for raw in raws}
            what = f"the {part} column"
            found[part, ""] = Names(what, counts, zeros=zeros or part == "subject")
    return found


def _named(values: NDArray[Any] | None) -> bool:
    return values is not None and values.dtype.kind == "U"


def check_classes(raws: Sequence[Raw], owners: Sequence[str], spelling: Spelling) -> None:
    """Refuse classes that some silos write in another way than the others; of arrays only say so.

    They are numbered from 0 and from 1, or a silo of several classes shares none with the others.
    The arguments are those of `spelled`.
    """
    if spelling == "keep" or any(raw.label.ndim > 1 or raw.label.dtype.kind == "f" for raw in raws):
        return
    held = _by_silo(raws, owners, map(_class_names, raws))
    if short := shortened(held):
        tell(f"{short}: write classes alike")
    line = numbered_from_two(held) or nothing_in_common(held)
    if not line:
        return
    if not raws[0].given:
        raise UserError(f"{line}: write classes alike, or take them as they are by --spelling=keep")
    tell(f"{line}: check that a class means the same everywhere")


def _class_names(raw: Raw) -> list[str]:
    """Return the name of each sample's class; a number if it has none."""
    own = raw.label
    if raw.classes and own.dtype.kind == "i":
        own = np.array(raw.classes)[own]
    return [*map(str, own.tolist())]


def shortened(held: Mapping[str, Collection[str]]) -> str:
    """Name an abbreviation, and the name that only silos without it have, as M and malignant; "" if
    there is none.
    """
    names = set(chain.from_iterable(held.values()))
    # more are hardly names of classes, and each is compared with each
    if len(names) > _MANY:
        return ""
    pairs = list[str]()
    for name, long in product(sorted(names), repeat=2):
        short = name.isalpha() and len(name) <= _SHORT and len(long) > len(name) + 1
        if short and fold(long).startswith(fold(name)) and not _silos_with(held, {name, long}):
            here = sorted(_silos_with(held, {name}))
            there = sorted(_silos_with(held, {long}))
            pairs.append(f"{name!r} (at {listed(here)}) may be {long!r} (at {listed(there)})")
    return listed(pairs)


def nothing_in_common(held: Mapping[str, Collection[str]], what: str = "class") -> str:
    """Name a silo of several classes (`what`) that shares none with the others; "" if there is
    none.
    """
    owners = Counter(chain.from_iterable(held.values()))
    for name, own in held.items():
        alone = set(map(owners.get, own)) == {1}
        if alone and 1 < len(own) < len(owners):
            here = listed(map(repr, sorted(own, key=natural)))
            there = listed(map(repr, sorted(set(owners) - set(own), key=natural)))
            return f"silo {name} shares no {what} with others (it has {here}; others have {there})"
    return ""


def numbered_from_two(held: Mapping[str, Iterable[str]], what: str = "classes are") -> str:
    """Say that some silos number their classes (`what`) from 0, and others as many from 1, or two
    classes -1 and 1; "" if they do not.

    Nothing is said unless all labels that silos hold are whole numbers.
    """
    if not all(map(WHOLE.fullmatch, chain.from_iterable(held.values()))):
        return ""
    numbers = {silo: set(map(int, own)) for silo, own in held.items()}
    every = set[int]().union(*numbers.values())
    high = max(every, default=0)
    # not by a range: labels may be codes of 16 digits
    without_gaps = high >= 2 and min(every) == 0 and len(every) == high + 1
    if without_gaps:
        one = every - {high}
        other = every - {0}
    elif every == {-1, 0, 1}:
        one = {-1, 1}
        other = {0, 1}
    else:
        return ""
    first = _silos_with(numbers, one - other)
    second = _silos_with(numbers, other - one)
    both = one in numbers.values() and other in numbers.values()
    if not both or {*first} & {*second}:
        return ""
    return (
        f"{what} {min(one)} to {max(one)} at {listed(first)}, but {min(other)} to {max(other)} at "
        f"{listed(second)}"
    )


def _are_names(parts: Sequence[Any]) -> bool:
    """Return whether parts of a column hold texts, with few enough different ones to be names."""
    import pyarrow.compute as pc

    return all(is_text(part.type) and pc.count_distinct(part).as_py() <= _MANY for part in parts)


def _by_silo(
    raws: Sequence[Raw], silos: Sequence[str], values: Iterable[Iterable[str | None]]
) -> dict[str, Counter[str]]:
    """Count names by the silo that writes them."""
    found = defaultdict[str, Counter[str]](Counter)
    for raw, silo, names in zip(raws, silos, values, strict=True):
        owners = [silo or raw.source] * len(raw)
        if not silo and raw.group is not None:
            owners = [*map(str, raw.group)]
        for owner, name in zip(owners, names, strict=True):
            if name is not None:
                found[owner][name] += 1
    return found


def _renamed(raw: Raw, places: Mapping[_Place, Names]) -> Raw:
    """Return a part with one spelling of each name in some places."""
    import pyarrow as pa

    for (part, column), names in places.items():
        instead = names.instead
        if not instead:
            continue
        values = getattr(raw, part)
        held = values[column].to_pylist() if column else values.astype(np.str_).tolist()
        new = [instead.get(name, name) for name in held]
        changed: Any = np.array(new)
        if column:
            place = values.column_names.index(column)
            field = values.schema.field(column).with_type(pa.string())
            changed = values.set_column(place, field, pa.array(new, pa.string()))
        raw = replace(raw, **{part: changed})
    return raw
