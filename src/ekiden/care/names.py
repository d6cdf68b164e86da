"""Rules about names and texts: slips, marks of missing values, and what programs left behind."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, permutations

import numpy as np
import torch

from ekiden.care.seen import SeenData
from ekiden.care.spelling import bare_id
from ekiden.core.base.errors import listed
from ekiden.core.tasks import Classification, MultiLabel
from ekiden.readers.cells import garbled, short
from ekiden.readers.kinds import Tokens
from ekiden.readers.undecoded import Raw

_TOTALS = {"total", "subtotal", "grand total", "sum", "summe", "gesamt"}
"""rows below a table"""
_UNKNOWN = {"unknown", "unk", "missing", "undefined", "n.d.", "n.a.", "tbd", "-", "--"}
_UNKNOWN |= {"not available", "not known"}
_WHOLE = re.compile(r"-?\d{1,18}")
_MARK = re.compile(r"-?(7{2,}|8{2,}|9+)|-[78]|-100")
_WORD = re.compile(r"\w+")
_HTML = re.compile(
    r"&(#\d+|[a-z]+);|</?(p|br|div|span|em|strong|li|[ou]l|t[drh]|table|html|body|font)\b[^<>]*>",
    re.I,
)
_ESCAPES = re.compile(r"\\(u[0-9a-f]{4}|x[0-9a-f]{2}|[nrt](?![a-z]))|(%[0-9A-F]{2}){2}|\w%20\w")
_LEFT_IN_TEXTS: Mapping[str, Callable[[str], object]] = {
    "hold a character that was lost in another encoding": lambda text: "\ufffd" in text,
    "were read in another encoding": lambda text: (
        not text.isascii() and any(map(garbled, text.split()))
    ),
    "hold marks of HTML": _HTML.search,
    "say only that there is none": re.compile(r"\s*(nan|none|null|na|n/a|<na>)\s*", re.I).fullmatch,
    "are numbers without a word": re.compile(r"[\s\d.,;:+-]*\d[\s\d.,;:+-]*").fullmatch,
    "hold escapes of a program": _ESCAPES.search,
    "are values as Python or JSON writes them": re.compile(
        r"\s*(b(['\"]).*\2|\[(['\"\d{]).*\]|\{['\"].*\})\s*", re.S
    ).fullmatch,
}


def single_classes(seen: SeenData) -> Iterator[str]:
    """Name a class that all samples have, and classes of one sample."""
    data = seen.data
    if not isinstance(data.task, Classification):
        return
    y = torch.cat([data.train.y, data.test.y])
    if bool((y == y[0]).all()):
        yield (
            f"all labels of {seen.source} are {data.classes[int(y[0])]!r}: a model learns nothing "
            "from one class; if other silos hold others, train together with them"
        )
    counts = torch.bincount(y, minlength=len(data.classes))
    single = [repr(data.classes[k]) for k in (counts == 1).nonzero()[:, 0].tolist()]
    # small data have small classes
    if single and len(y) >= 30:
        yield (
            f"class {listed(single)} of {seen.source} has one sample, which is in training or in "
            "the test, never in both: correct it if it is a slip"
        )


def constant_labels(seen: SeenData) -> Iterator[str]:
    """Name labels that all rows have or none has, and labels that exclude each other."""
    data = seen.data
    if not isinstance(data.task, MultiLabel):
        return
    y = torch.cat([data.train.y, data.test.y])
    same = (y == y[0]).all(0).tolist()
    flat = [repr(name) for name, constant in zip(data.classes, same, strict=True) if constant]
    if flat:
        yield f"the label {listed(flat)} of {seen.source} is the same in all rows: leave it out"
    if bool((y.sum(1) == 1).all()):
        yield (
            f"each row of {seen.source} has exactly one of the labels "
            f"{listed(map(repr, data.classes))}: if they exclude each other they are classes, so "
            "write their names into one column"
        )


def classes_in_test_only(seen: SeenData) -> Iterator[str]:
    """Say how many test rows are of classes that no training row has."""
    train, test = seen.data.train, seen.data.test
    strange = ~torch.isin(test.y, train.y)
    if isinstance(seen.data.task, Classification) and strange.any():
        names = [repr(seen.data.classes[k]) for k in np.unique(test.y[strange].cpu())]
        yield (
            f"{int(strange.sum()):,} of {len(test):,} test rows are of classes without a training "
            f"row ({listed(names)}), which a model cannot learn: check the names of classes in both"
        )


def marks_of_missing(seen: SeenData) -> Iterator[str]:
    """Name classes, categories, groups, domains and subjects that probably mark missing values:
    unknown, -999, 99, a subject with far more rows than any other; or a row of totals.
    """
    known = [raw.subject.astype(np.str_) for raw in seen.raws if raw.subject is not None]
    rows = Counter(chain.from_iterable(known))
    owners = [("group", seen.data.groups), ("domain", seen.data.domains), ("subject", [*rows])]
    for what, names in (*seen.names, *owners):
        # unknown may be a category of its own
        marks = _TOTALS if what.startswith("category") else _UNKNOWN | _TOTALS
        found = [name for name in names if name.strip().casefold() in marks]
        whole = names and all(map(_WHOLE.fullmatch, names))
        if whole and what.startswith(("class", "category")):
            found = _codes_of_missing(names)
        if what == "subject" and len(rows) >= 10:
            (one, most), (_, second) = rows.most_common(2)
            # hardly a patient has as many rows more than any other
            if most >= 20 and most > 5 * second and one not in found:
                found.append(one)
        if found:
            yield (
                f"{what} {listed(map(repr, map(str, found)))} of {seen.raws[0].source} seems to "
                "mark missing values or a row of totals: leave such rows out, or say so with "
                "--missing"
            )


def _codes_of_missing(names: Sequence[str]) -> list[str]:
    """Return which of some whole numbers lie apart from the others, as codes of missing values
    do.
    """
    rest = [int(name) for name in names if not _MARK.fullmatch(name)] or [0]
    least, most = min(rest) - 1, max(rest) + 1
    apart = [name for name in names if not least <= int(name) <= most]
    found = [name for name in apart if str(int(name) - 1) not in names]
    # below the codes 0, 1, 2 it marks a missing value; next to -2 it is a value itself
    if {"-1", "0", "1", "2"} <= {*names} and "-2" not in names:
        found.append("-1")
    return found


def slips(seen: SeenData) -> Iterator[str]:
    """Name a class that differs from a more common one by one letter, so that it may be a slip."""
    data = seen.data
    # more take seconds, and are hardly names that somebody typed
    if not isinstance(data.task, Classification) or len(data.classes) > 200:
        return
    rows = data.task.counts(torch.cat([data.train.y, data.test.y]), len(data.classes)).tolist()
    pairs = [
        f"{one!r} is nearly {other!r}"
        for (one, few), (other, many) in permutations(zip(data.classes, rows, strict=True), 2)
        if 2 * few <= many and differ_by_one_letter(one, other)
    ]
    if pairs:
        yield f"class {listed(pairs)} in {seen.raws[0].source}: correct it if it is a slip"


def differ_by_one_letter(one: str, other: str) -> bool:
    """Return whether words differ by one letter that is missing, too many, or another; atypical is
    not typical.
    """
    short, long = sorted((one.casefold(), other.casefold()), key=len)
    at = next((k for k, letter in enumerate(short) if letter != long[k]), len(short))
    same = len(short) == len(long)
    # of fewer letters, one makes another word
    if len(short) < 5 or short == long or short[at + same :] != long[at + 1 :]:
        return False
    word = next((m[0] for m in re.finditer(r"[^\W\d_]+", long) if m.start() <= at < m.end()), "")
    # stage II is not stage I
    if len(word) < 2 or re.fullmatch("[ivx]+", word):
        return False
    return short[at].isalpha() if same else at > 0


def joined_names(seen: SeenData) -> Iterator[str]:
    """Name classes and categories that are several others, joined by a sign."""
    for what, names in seen.names:
        for sign in ";|,":
            parts = {name: [part.strip() for part in name.split(sign)] for name in names}
            known = Counter(chain.from_iterable({*each} for each in parts.values()))
            joined = [
                repr(name)
                for name, each in parts.items()
                if len(each) > 1 and all(known[part] > 1 for part in each)
            ]
            if joined:
                yield (
                    f"{what} {listed(joined)} of {seen.raws[0].source} joins others by {sign!r} "
                    "and counts as one of its own: if several hold at once, give each a column of "
                    "0 and 1 (several --label-column, if they are labels)"
                )


def subjects_written_alike(seen: SeenData) -> Iterator[str]:
    """Name subjects of one source that differ in leading zeros or hyphens only."""
    for raw in seen.raws:
        if raw.subject is None:
            continue
        alike: dict[str, list[str]] = {}
        for name in np.unique(raw.subject).astype(np.str_).tolist():
            alike.setdefault(bare_id(name), []).append(repr(name))
        found = [" and ".join(each) for each in alike.values() if len(each) > 1]
        if found:
            yield (
                f"subjects {listed(found)} of {raw.source} differ in leading zeros or hyphens "
                "only, and count as different: write each in one way"
            )
            return


def _texts(seen: SeenData) -> list[Raw]:
    return [raw for raw in seen.raws if raw.kind is Tokens and not raw.given]


def odd_texts(seen: SeenData) -> Iterator[str]:
    """Say how many texts hold what another program left in them."""
    texts = [text for raw in _texts(seen) for text in raw.images]
    for what, test in _LEFT_IN_TEXTS.items():
        odd = [text for text in texts if test(text)]
        # a few texts may be about HTML
        if odd and len(odd) >= 0.01 * len(texts):
            yield (
                f"{len(odd):,} of {len(texts):,} texts of {seen.source} {what} ({short(odd[0])}): "
                "correct them, or models learn where they come from"
            )


def words_that_tell(seen: SeenData) -> Iterator[str]:
    """Name a word that is in nearly all texts of one class of a source and in hardly any other: its
    label, perhaps.
    """
    from sklearn.feature_extraction.text import CountVectorizer

    if not isinstance(seen.data.task, Classification):
        return
    for raw in _texts(seen):
        # so many tell enough
        step = len(raw) // 2000 + 1
        counter = CountVectorizer(binary=True, token_pattern=r"\w+")
        has = counter.fit_transform([*raw.images[::step], "a"])[:-1]
        words = counter.get_feature_names_out()
        labels = raw.label[::step]
        everywhere = np.asarray(has.sum(0))[0]
        for label in dict.fromkeys(labels.tolist()):
            rows = int((labels == label).sum())
            own = np.asarray(has[labels == label].sum(0))[0]
            # slips are in the others
            telling = own >= 0.95 * np.maximum(rows, everywhere)
            # of fewer texts, one word may be in all by chance
            if 10 <= rows < len(labels) and telling.any():
                word = telling.argmax()
                yield (
                    f"the word {words[word]!r} is in {own[word]:,} of {rows:,} texts of one class "
                    f"of {raw.source} and in hardly any of the {len(labels) - rows:,} others: if "
                    "texts hold their label, take it out"
                )
                break


RULES = (
    single_classes,
    constant_labels,
    classes_in_test_only,
    marks_of_missing,
    slips,
    joined_names,
    subjects_written_alike,
    odd_texts,
    words_that_tell,
)
"""each yields a line for what it finds"""
