"""Say in one line what may be wrong with data that can be read: ids among the features, and samples
that are twice.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from ekiden.care.seen import LARGE, ROWS_DIFFER, SeenData, chance, copied, improbable, twice
from ekiden.care.spelling import bare_id, fold
from ekiden.care.unlike import MORE_DOUBTS
from ekiden.core.base.errors import counted, listed, tell
from ekiden.core.tasks import Classification, MultiLabel, Regression, ScaledTask
from ekiden.readers.cells import DATE, garbled, is_text, short
from ekiden.readers.kinds import Tokens
from ekiden.readers.raster import split
from ekiden.readers.undecoded import PARTS

_ID = re.compile(
    r"(^|[\W_])((id|ids|uid|uuid|guid|mrn|ssn|pid|patient|person|subject|participant|index|row|record|encounter|admission"
    r"|accession|specimen|barcode|seqn)([\W_]?(id|no|nr|num|number|code|key))?"
    r"|(pat|case|visit|study|sample|stay|fall)[\W_]?(id|no|nr|num|number|nummer|key)|patienten[\W_]?(id|nr|nummer))$"
)
_TIME = re.compile(r"time|days|weeks|months|years|follow|surviv|duration|^(os|pfs|dfs|ttd|tte)$")
_EVENT = re.compile(r"event|status|died|death|dead|deceased|cens|relapse|recur")
_FEW = 10  # different values that may be a category, whatever the name of the column
_MANY = 30  # rows from which nearly as many different values mean something
_NEARLY = 0.95
_SMALL = 20  # rows of a group that may be a patient, hardly a hospital
_CROWDED = 5  # times as many rows as any other subject has
_SEVERAL = 0.01  # share of test rows that equal a training row
_COPIED = 20  # rows from which a column that equals the label is hardly chance
_AGREES = 0.995  # share of rows in which a feature tells the label
_RECORDS = re.compile(
    r"visit|encounter|stay|admission|sample|specimen|scan|image|file|slice|row|record|exam|study|series"
)
_MOST_NAMES = 200  # classes whose names are compared
_SHORTEST = 5  # letters of a name that may hold a slip
_MOST = 0.8  # share of files with names that begin alike
_TOTALS = {"total", "subtotal", "grand total", "sum", "summe", "gesamt"}  # rows below a table
_SPLIT = re.compile(r"(is_?)?(train|test|val|valid|validation|split|fold|partition)")
_WEIGHT = re.compile(
    r"(^|[\W_])((sample|survey|sampling|case|row|instance|propensity|frequency)[\W_]?(weights?|wgt|wt)"
    r"|iptw|ipw|ipcw|[pfa]weight)$"
)
_PART = re.compile(
    r"^$|\d|train|test|val|dev|hold|^(true|false|yes|no|none|nan)$"
)  # not arms that one folds
_UNKNOWN = {
    "unknown",
    "unk",
    "missing",
    "not available",
    "not known",
    "undefined",
    "n.d.",
    "n.a.",
    "tbd",
    "-",
    "--",
}
_MARK = re.compile(r"-?(7{2,}|8{2,}|9+)|-[78]|-100")
_AGAIN = re.compile(
    r"(?<=.)([.]\d+|_duplicated_\d+|\.{3}\d+|( - )? ?\(?(copy|kopie)\)?( ?\(?\d+\)?)?| "
    r"\(\d+\))$|^copy of ",
    re.I,
)
_HTML = re.compile(
    r"&(#\d+|[a-z]+);|</?(p|br|div|span|em|strong|li|[ou]l|t[drh]|table|html|body|font)\b[^<>]*>",
    re.I,
)
_LEFT_IN_TEXTS: Mapping[str, Callable[[str], object]] = {
    "hold a character that was lost in another encoding": lambda text: "\ufffd" in text,
    "were read in another encoding": lambda text: (
        not text.isascii() and any(map(garbled, text.split()))
    ),
    "hold marks of HTML": _HTML.search,
    "say only that there is none": re.compile(r"\s*(nan|none|null|na|n/a|<na>)\s*", re.I).fullmatch,
    "are numbers without a word": re.compile(r"[\s\d.,;:+-]*\d[\s\d.,;:+-]*").fullmatch,
    "hold escapes of a program": re.compile(
        r"\\(u[0-9a-f]{4}|x[0-9a-f]{2}|[nrt](?![a-z]))|(%[0-9A-F]{2}){2}|\w%20\w"
    ).search,
    "are values as Python or JSON writes them": re.compile(
        r"\s*(b(['\"]).*\2|\[(['\"\d{]).*\]|\{['\"].*\})\s*", re.S
    ).fullmatch,
}
_PEEK = 512  # rows that are looked at first
_WORD = re.compile(r"\w+")
_VALUES = 1 << 24  # that are looked at
_COLUMNS, _FINE = 3, 20  # columns with so many different values: otherwise equal rows may be chance
_ROWS = 20_000  # images with which others are compared
_SIDE = 8  # pixels of their thumbnails
_LEVELS, _NEARER = (
    3.0,
    4.0,
)  # grey levels between copies, and how many times nearer they are than others


def look(seen: SeenData) -> None:
    """Say what may be wrong, in a line for each doubt."""
    for doubt in _DOUBTS:
        for line in doubt(seen):
            tell(line)


def _ids(seen: SeenData) -> Iterator[str]:
    """Name the columns of tables that look like ids: by name, or since nearly every row has its own
    text or number.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    raws = seen.raws
    if not raws[0].kind.agreed or not seen.unscaled or seen.reading.feature_columns:
        return
    found, numbers = list[str](), list[str]()
    for field in raws[0].images.schema:
        name = field.name
        if DATE in (field.metadata or {}) or not all(
            name in raw.images.column_names for raw in raws
        ):
            continue
        columns = [raw.images[name] for raw in raws]
        numbers += [repr(name)] * (_count_rows(columns) and not _named_id(name))
        different = len(
            {value for column in columns for value in pc.unique(column).drop_null().to_pylist()}
        )
        rows = sum(len(column) - column.null_count for column in columns)
        texts = all(is_text(column.type) for column in columns)
        numeric = [c for c in columns if pa.types.is_floating(c.type)]
        whole = all(pc.all(pc.equal(c, pc.floor(c))).as_py() for c in numeric)
        own = texts and rows >= _MANY and different >= _NEARLY * rows
        if different > _FEW and (own or (_named_id(name) and whole)):
            found.append(f"{name!r} ({different:,} different values)")
    if found:
        several, first = len(found) > 1, found[0].split("'")[1]
        yield (
            f"{'columns' if several else 'column'} {listed(found)} of {raws[0].source} "
            f"{'look like ids' if several else 'looks like an id'}, which a model learns by heart: "
            f"leave out ids (--drop-columns={first!r}), and name the column of patients, writers "
            "or devices by --subject-column"
        )
    if numbers:
        yield (
            f"column {listed(numbers)} of {raws[0].source} counts rows, so it tells their order "
            f"and nothing else: leave out row numbers (--drop-columns={numbers[0]})"
        )


def _count_rows(columns: Sequence[Any]) -> bool:
    """Return whether values are 0, 1, 2, ... or 1, 2, 3, ..., in each source or in all together, in
    any order.
    """
    import pyarrow as pa

    if not all(pa.types.is_floating(column.type) for column in columns):
        return False
    values = [column.to_numpy() for column in columns]
    return any(
        all(
            len(v) >= _COPIED
            and v.min() in (0, 1)
            and (np.sort(v) == v.min() + np.arange(len(v))).all()
            for v in parts
        )
        for parts in (values, [np.concatenate(values)])
    )


def _times_without_events(seen: SeenData) -> Iterator[str]:
    """Say that the number to predict may be the time until an event that is among the features."""
    data, labels = seen.data, seen.raws[0].targets
    if not isinstance(data.task, Regression) or not data.inputs.agreed or len(labels) != 1:
        return
    x, names = data.train.x, data.inputs.values_named(data.train.x.shape[1])
    events = [
        n
        for k, n in enumerate(names)
        if _EVENT.search(n.lower()) and len(np.unique(x[:, k].cpu())) == 2
    ]
    if events and _TIME.search(labels[0].lower()):
        yield (
            f"the label {labels[0]!r} of {data.name} may be the time until the event that "
            f"{events[0]} says: then use "
            f"--task=survival --label-column TIME EVENT, because who had no event yet lived longer"
        )


def _named_id(name: str) -> bool:
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return bool(_ID.search(parted.lower()))


def _copied_labels(seen: SeenData) -> Iterator[str]:
    """Name the features that tell the label in all training rows, or in nearly all."""
    dataset, labels = seen.data, seen.raws[0].targets
    x, y = dataset.train.x, dataset.train.y
    numbers = isinstance(dataset.task, ScaledTask)
    wanted = numbers or isinstance(dataset.task, Classification | MultiLabel)
    if (
        not wanted
        or x.ndim != 2
        or not x.is_floating_point()
        or x.nbytes > LARGE
        or len(x) < _COPIED
    ):
        return
    values, names = x.double().cpu().numpy(), dataset.inputs.values_named(x.shape[1])
    gaps = [
        k
        for k in np.flatnonzero(np.isnan(values).any(axis=0))
        if np.isnan(values[:, k]).mean() < _NEARLY
    ]
    names += [f"the gaps of {names[k]}" for k in gaps]
    values = np.nan_to_num(
        np.hstack([values, np.isnan(values[:, gaps])]), nan=np.finfo(np.float64).max
    )
    told = _number_told if numbers else _class_told
    for target, label in enumerate(y.double().cpu().numpy().reshape(len(y), -1).T):
        if len(np.unique(label)) < (_FEW if numbers else 2):
            continue
        order = np.argsort(label, kind="stable")
        shares = {k: told(column, label[order]) for k, column in enumerate(values[order].T)}
        copies = [k for k, share in shares.items() if share == 1]
        copies = [k for k in copies if k < x.shape[1] or gaps[k - x.shape[1]] not in copies]
        near = [
            f"{names[k]} ({100 * share:.2f} %)"
            for k, share in shares.items()
            if 0 < share < 1 and k < x.shape[1]
        ]
        what = f"the label {labels[target]!r}" if target < len(labels) else "the label"
        if near:
            yield (
                f"{listed(near)} of {dataset.name} tells {what} in nearly all training rows: check "
                "that it is known before the label is, or leave it out"
            )
        if copies:
            are, them = ("are", "them") if len(copies) > 1 else ("is", "it")
            drop = " with --drop-columns" if dataset.inputs.agreed else ""
            yield (
                f"{listed(names[k] for k in copies)} of {dataset.name} {are} the same as {what}, "
                f"or a one-to-one function of it, in all {len(x):,} training rows: a model copies "
                f"{them} and learns nothing else; leave {them} out{drop}"
            )


def _number_told(column: NDArray[np.float64], label: NDArray[np.float64]) -> float:
    """Return in which share of rows a column is the number to predict, which ascends; 0 if in few.

    It is 1 also for a function of the number that keeps the order.
    """
    steps = np.diff(column)
    ordered = (steps >= 0).all() or (steps <= 0).all()
    if ordered and len(np.unique(column)) >= _NEARLY * len(np.unique(label)):
        return 1.0
    share = float(
        np.isclose(column, label, rtol=1e-6, atol=0).mean()
    )  # labels may have been float32
    return share if share > _AGREES else 0.0


def _class_told(column: NDArray[np.float64], label: NDArray[np.float64]) -> float:
    """Return in which share of rows a column with few values tells the class; 0 if in few.

    That is at most 99.5 %, or hardly more than the commonest class has.
    """
    kinds, codes = np.unique(label, return_inverse=True)
    if (
        len(np.unique(column[:: len(column) // _PEEK + 1])) > len(kinds) + 1
    ):  # one for a missing value
        return 0.0
    values, places = np.unique(column, return_inverse=True)
    if not 2 <= len(values) <= len(kinds) + 1:
        return 0.0
    pairs, rows = np.unique(places * len(kinds) + codes, return_counts=True)
    best = np.zeros(len(values))
    np.maximum.at(best, pairs // len(kinds), rows)
    share, guess = float(best.sum()) / len(label), np.bincount(codes).max() / len(label)
    return share if share > _AGREES and 1 - share < (1 - guess) / 2 else 0.0


def _equal_columns(seen: SeenData) -> Iterator[str]:
    """Name features that are there twice, as pandas renames the second of two columns with one name
    to a.1.
    """
    x, alike = seen.data.train.x, dict[bytes, list[str]]()
    if not seen.data.inputs.agreed or not seen.unscaled or len(x) < _COPIED:
        return
    for name, values in zip(
        seen.data.inputs.values_named(x.shape[1]), x.T.contiguous(), strict=True
    ):
        if len(values.unique()) > 1:
            alike.setdefault(values.numpy().tobytes(), []).append(name)
    if twice := [" and ".join(names) for names in alike.values() if len(names) > 1]:
        yield f"{listed(twice, sign='; ')} of {seen.data.name} are equal in all rows: leave out all but one"


def _names_alike(seen: SeenData) -> Iterator[str]:
    """Name columns, or classes, whose names differ in case and signs only, or that a program has
    numbered as copies.
    """
    first = seen.raws[0]
    columns = [*first.images.column_names, *first.targets] if first.kind.agreed else []
    for what, names in (
        ("column", columns),
        ("class", [n for w, each in seen.names if w == "class" for n in each]),
    ):
        plain = {name: fold(name).replace(" ", "") for name in names}
        pairs = [
            f"{one!r} and {other!r}"
            for one, other in permutations(names[:_MOST_NAMES], 2)
            if (what == "column" and plain[one] == plain[other] and one < other)
            or _AGAIN.sub("", other) == one != other
        ]
        if pairs:
            yield (
                f"{what} {listed(pairs)} of {first.source} may be one that is there twice: leave "
                "one out, or give them names that tell them apart"
            )


def _rare_labels(seen: SeenData) -> Iterator[str]:
    """Name classes that all samples have, or one, and labels that all have, none, or exactly one
    of.
    """
    data, source = seen.data, seen.source
    y = torch.cat([data.train.y, data.test.y])
    if isinstance(data.task, Classification) and bool((y == y[0]).all()):
        yield (
            f"all labels of {source} are {data.classes[int(y[0])]!r}: a model learns nothing from "
            "one class; if other silos hold others, train together with them"
        )
    if isinstance(data.task, Classification) and len(y) >= _MANY:
        single = (torch.bincount(y, minlength=len(data.classes)) == 1).nonzero()[:, 0].tolist()
        if single:
            yield (
                f"class {listed(repr(data.classes[k]) for k in single)} of {source} has one "
                "sample, which is in "
                "training or in the test, never in both: correct it if it is a slip"
            )
    if isinstance(data.task, MultiLabel):
        flat = [
            name
            for name, column in zip(data.classes, y.T, strict=True)
            if bool((column == column[0]).all())
        ]
        if flat:
            yield f"the label {listed(map(repr, flat))} of {source} is the same in all rows: leave it out"
        if bool((y.sum(1) == 1).all()):
            yield (
                f"each row of {source} has exactly one of the labels "
                f"{listed(map(repr, data.classes))}: if they "
                "exclude each other they are classes, so write their names into one column"
            )


def _repeated_rows(seen: SeenData) -> Iterator[str]:
    """Name a column if many rows differ in it alone, as after a join of a table with its visits."""
    x, y = seen.data.train.x, seen.data.train.y
    table = seen.data.inputs.agreed and seen.unscaled and seen.data.train.subject is None
    if not table or x.shape[1] < _COLUMNS or len(x) < _MANY or x.numel() > _VALUES:
        return
    columns = [*x.double().cpu().numpy().T, *y.double().cpu().numpy().reshape(len(y), -1).T]
    draw = np.random.default_rng(0)
    prints = [
        draw.integers(1 << 62, size=len(x))[np.unique(column, return_inverse=True)[1]]
        for column in columns
    ]
    fine = sum(
        len(np.unique(column)) >= max(_FINE, len(x) / 10) for column in columns[: x.shape[1]]
    )
    whole = np.sum(prints, axis=0)
    same = [len(x) - len(np.unique(whole - print_)) for print_ in prints[: x.shape[1]]]
    name, most = seen.data.inputs.values_named(x.shape[1])[int(np.argmax(same))], max(same)
    rest = chance(x[:, [k for k in range(x.shape[1]) if k != int(np.argmax(same))]])
    if most >= len(x) / 4 and fine >= _COLUMNS and improbable(most, len(x) ** 2 / 2 * rest):
        yield (
            f"{most:,} of {len(x):,} training rows of {seen.source} equal another in all but "
            f"{name}, so such a row may be in training and in the test: if a join repeated them, "
            "keep one; if they are about the same, name whom by --subject-column"
        )


def _splits(seen: SeenData) -> Iterator[str]:
    """Name the features that say which rows are for training and which for the test, or how much a
    row weighs.
    """
    import pyarrow.compute as pc

    first = seen.raws[0]
    if not first.kind.agreed or seen.reading.feature_columns:
        return
    for name in first.images.column_names:
        columns = [raw.images[name] for raw in seen.raws if name in raw.images.column_names]
        values = {
            str(value).strip().lower()
            for column in columns
            for value in pc.unique(column).to_pylist()[:_FEW]
        }
        named = _SPLIT.fullmatch(name.lower()) and all(map(_PART.search, values))
        says, advice = "", "leave it out"
        if named or (len(values) > 1 and values <= {*PARTS}):
            says = "which rows are for training and which for the test"
            advice = "put rows for the test into a file of their own, and leave the column out"
        elif _WEIGHT.search(name.lower()):
            says = "how much each row weighs"
        if says:
            yield (
                f"column {name!r} of {first.source} seems to say {says}, and nothing follows it: "
                f"{advice} (--drop-columns={name!r})"
            )


def _bare_samples(seen: SeenData) -> Iterator[str]:
    """Say how many samples have nothing in them, and where none has anything."""
    both, bare = (seen.data.train, seen.data.test), torch.cat(seen.bare)
    if bare.any():
        owner = [part.group.cpu() for part in both if part.group is not None]
        at = [
            name
            for k, name in enumerate(seen.data.groups)
            if len(owner) == 2 and bare[torch.cat(owner) == k].all()
        ]
        where = f", among them all at {listed(at)}" if at else ""
        yield (
            f"{int(bare.sum()):,} of {len(bare):,} samples of {seen.source} hold nothing (no word, "
            f"no value, or one value only){where}: leave them out, or check how they were read"
        )


def _odd_texts(seen: SeenData) -> Iterator[str]:
    """Say how many texts hold what another program left in them."""
    texts = [
        text for raw in seen.raws if raw.kind is Tokens and not raw.given for text in raw.images
    ]
    for what, test in _LEFT_IN_TEXTS.items():
        odd = [text for text in texts if test(text)]
        if odd and len(odd) >= _SEVERAL * len(texts):
            yield (
                f"{len(odd):,} of {len(texts):,} texts of {seen.source} {what} ({short(odd[0])}): "
                "correct them, or models learn where they come from"
            )


def _told_by_words(seen: SeenData) -> Iterator[str]:
    """Name a word that is in nearly all texts of one class of a source and in hardly any other: its
    label, perhaps.
    """
    for raw in seen.raws if isinstance(seen.data.task, Classification) else ():
        if (
            raw.kind is Tokens
            and not raw.given
            and (found := _telling(raw.images, raw.label.astype(np.str_).tolist()))
        ):
            word, rows, n = found
            yield (
                f"the word {word!r} is in {rows:,} of {n:,} texts of one class of {raw.source} and "
                "in hardly any of "
                f"the {len(raw) - n:,} others: if texts hold their label, take it out"
            )


def _telling(texts: Sequence[str], labels: Sequence[str]) -> tuple[str, int, int] | None:
    """Return a word that tells a label, in how many texts with that label it is, and how many there
    are.
    """
    step = len(texts) // _PEEK + 1
    some = [
        ({*_WORD.findall(text.lower())}, label)
        for text, label in zip(texts[::step], labels[::step], strict=True)
    ]
    everywhere = Counter(chain.from_iterable(words for words, _ in some))
    for label, n in Counter(labels).items():
        own = Counter(chain.from_iterable(words for words, named in some if named == label))
        here = sum(named == label for _, named in some)
        told = [
            word
            for word in sorted(own)
            if min(here, own[word]) >= _NEARLY * max(here, everywhere[word])
        ]
        for word in told[:1] if _FEW <= n < len(texts) else ():
            at = [
                named
                for text, named in zip(texts, labels, strict=True)
                if word in _WORD.findall(text.lower())
            ]
            if (rows := at.count(label)) >= _NEARLY * max(n, len(at)):
                return word, rows, n
    return None


def _same_samples(seen: SeenData) -> Iterator[str]:
    """Say how many samples of an owner are one and the same, which rows of tables may be."""
    x = seen.data.train.x
    for owner, prints in seen.owned.items() if x.ndim > 2 or x.dtype == torch.int64 else ():
        same = max(Counter(prints).values(), default=0)
        if same >= _MANY and same >= len(prints) / 2:
            yield f"{same:,} of {len(prints):,} samples of {owner} are the same: check how they were read"


def _joined_names(seen: SeenData) -> Iterator[str]:
    """Name classes and categories that are several others, joined by a sign."""
    for what, names in seen.names:
        for sign in ";|,":
            parts = {name: [part.strip() for part in name.split(sign)] for name in names}
            known = Counter(chain.from_iterable({*each} for each in parts.values()))
            joined = [
                name
                for name, each in parts.items()
                if len(each) > 1 and all(known[part] > 1 for part in each)
            ]
            if joined:
                yield (
                    f"{what} {listed(map(repr, joined))} of {seen.raws[0].source} joins others by "
                    f"{sign!r} and counts as one of its own: if several hold at once, give each a "
                    "column of 0 and 1 (several --label-column, if they are labels)"
                )


def _subjects_written_alike(seen: SeenData) -> Iterator[str]:
    """Name subjects of one source that differ in leading zeros or hyphens only."""
    for raw in seen.raws:
        names = [] if raw.subject is None else np.unique(raw.subject).astype(np.str_).tolist()
        alike: dict[str, list[str]] = {}
        for name in names:
            alike.setdefault(bare_id(name), []).append(name)
        if found := [" and ".join(map(repr, each)) for each in alike.values() if len(each) > 1]:
            yield (
                f"subjects {listed(found)} of {raw.source} differ in leading zeros or hyphens "
                "only, and count as different: write each in one way"
            )
            return


def _two_labels(seen: SeenData) -> Iterator[str]:
    """Say how many samples are there again with another class, unless such rows are equal by
    chance.
    """
    data = seen.data
    train, test = data.train, data.test
    if (
        seen.prints is None
        or not isinstance(data.task, Classification)
        or train.x.dtype == torch.int64
    ):
        return
    labels: dict[bytes, set[int]] = {}
    for prints, part in zip(seen.prints, (train, test), strict=True):
        for print_, label in zip(prints, part.y.tolist(), strict=True):
            labels.setdefault(print_, set()).add(label)
    several = [sorted(each) for each in labels.values() if len(each) > 1]
    rows = len(train) + len(test)
    again = sum(n > 1 for n in Counter(chain(*seen.prints)).values())
    if train.x.ndim == 2 and again >= 2 * len(several):
        return  # rows are coarse: equal ones are other samples
    if several and improbable(len(several), rows * rows / 2 * chance(train.x)):
        yield (
            f"{counted(len(several), 'sample')} of {seen.raws[0].source} "
            f"{'is' if len(several) == 1 else 'are'} there with several labels "
            f"({listed(map(repr, (data.classes[k] for k in several[0])))}): correct them, unless "
            "they are different samples that look alike"
        )


def _names_of_missing(seen: SeenData) -> Iterator[str]:
    """Name classes, groups, domains and subjects that probably mark missing values: unknown, -999,
    99.
    """
    made, raws = seen.data, seen.raws
    known = [raw.subject for raw in raws if raw.subject is not None]
    subjects = (
        np.unique(np.concatenate(known)).astype(np.str_).tolist() if len(known) == len(raws) else []
    )
    owners = (("group", made.groups), ("domain", made.domains), ("subject", subjects))
    for what, names in (*owners, *seen.names):
        marks = _TOTALS if what.startswith("category") else _UNKNOWN | _TOTALS
        found = [name for name in names if name.strip().casefold() in marks]
        if (
            what not in dict(owners)
            and names
            and all(re.fullmatch(r"-?\d{1,18}", name) for name in names)
        ):
            rest = [int(name) for name in names if not _MARK.fullmatch(name)] or [0]
            least, most = min(rest) - 1, max(rest) + 1
            apart = [name for name in names if not least <= int(name) <= most]
            found = [name for name in apart if str(int(name) - 1) not in names]
            found += ["-1"] * ({"-1", "0", "1", "2"} <= {*names} and "-2" not in names)
        if what == "subject" and len(names) >= _FEW:
            (one, most), (_, second) = Counter(np.concatenate(known).tolist()).most_common(2)
            found += [str(one)] * (
                most >= _SMALL and most > _CROWDED * second and str(one) not in found
            )
        if found:
            yield (
                f"{what} {listed(map(repr, found))} of {raws[0].source} seems to mark missing "
                "values or a row of totals: leave such rows out, or say so with --missing"
            )


def _nearly_alike(seen: SeenData) -> Iterator[str]:
    """Name a class that differs from a more common one by one letter, so that it may be a slip."""
    data = seen.data
    if not isinstance(data.task, Classification) or len(data.classes) > _MOST_NAMES:
        return
    rows = data.task.counts(torch.cat([data.train.y, data.test.y]), len(data.classes)).tolist()
    pairs = [
        (one, other)
        for (one, few), (other, many) in permutations(zip(data.classes, rows, strict=True), 2)
        if 2 * few <= many and _one_letter(one, other)
    ]
    if pairs:
        yield (
            f"class {listed(f'{one!r} is nearly {other!r}' for one, other in pairs)} in "
            f"{seen.raws[0].source}: correct it if it is a slip"
        )


def _one_letter(one: str, other: str) -> bool:
    """Return whether words differ by one letter that is missing, too many, or another; atypical is
    not typical.
    """
    short, long = sorted((one.casefold(), other.casefold()), key=len)
    at = next((k for k, letter in enumerate(short) if letter != long[k]), len(short))
    same = len(short) == len(long)
    if len(short) < _SHORTEST or short == long or short[at + same :] != long[at + 1 :]:
        return False
    word = next((m[0] for m in re.finditer(r"[^\W\d_]+", long) if m.start() <= at < m.end()), "")
    letters = len(word) > 1 and not re.fullmatch("[ivx]+", word)  # stage II is not stage I
    return letters and (short[at].isalpha() if same else at > 0)


def _files_of_patients(seen: SeenData) -> Iterator[str]:
    """Say that samples are slices of the same files, or that most names of files begin like a few
    others'.
    """
    raws = seen.raws
    if any(raw.subject is not None or not isinstance(raw.images, list) for raw in raws):
        return
    files = Counter(split(one)[0] for raw in raws for one in raw.images if isinstance(one, Path))
    if several := {file: n for file, n in files.items() if n > 1}:
        count, name = counted(len(several), "file"), next(iter(several)).name
        yield (
            f"{sum(several.values()):,} images of {raws[0].source} are parts of only {count}, such "
            f"as {name}, so one file may be in training and in the test: name the column of "
            "patients or files by --subject-column"
        )
    stems = [Path(file.name.removesuffix(".gz")).stem for file in files]
    found = Counter(m[1] for stem in stems if (m := re.fullmatch(r"(.*\d.*)[ _.-][^ _.-]*", stem)))
    alike = {name: n for name, n in found.items() if n > 1}
    if len(alike) >= _FEW and sum(alike.values()) >= _MOST * len(stems):
        yield (
            f"{sum(alike.values()):,} images of {raws[0].source} have names that begin in "
            f"{len(alike):,} ways, such as {next(iter(alike))}: if these are patients, list the "
            "files in a table, and name the column of patients by --subject-column, so that none "
            "is in training and in the test"
        )


def _small_groups(seen: SeenData) -> Iterator[str]:
    """Say that a column that makes many silos of few rows may be the column of subjects."""
    column = seen.reading.group_column
    groups = [raw.group.astype(np.str_) for raw in seen.raws if raw.group is not None]
    if not column or not groups:
        return
    _, sizes = np.unique(np.concatenate(groups), return_counts=True)
    middle = int(np.median(sizes))
    if len(sizes) >= _FEW and (middle < _SMALL or _named_id(column)):
        yield (
            f"--group-column {column} makes {len(sizes):,} silos, half of them with {middle:,} "
            "rows or fewer, and each has rows in training and in the test: if it says whom a row "
            "is about (a patient, a device), name it by --subject-column instead, which keeps all "
            "rows of one in one part"
        )


def _given_tests(seen: SeenData) -> Iterator[str]:
    """Say how many rows of a given test part are about subjects of training, or not later than
    training.
    """
    train, test = seen.data.train, seen.data.test
    if seen.given and train.subject is not None and test.subject is not None:
        both = torch.isin(test.subject, train.subject)
        if both.any():
            people = counted(len(np.unique(test.subject[both].cpu())), "subject")
            yield (
                f"{both.sum():,} of {len(test):,} test rows are about {people} of training, so the "
                "test is too easy: take them out of one part, or leave out the test part, and "
                "Ekiden holds out whole subjects"
            )
    if seen.given and train.time is not None and test.time is not None:
        early = int((test.time <= train.time.max()).sum())
        if early:
            yield f"{early:,} of {len(test):,} test rows are not later than the last training row: check the test part"


def _rows_in_both(seen: SeenData) -> Iterator[str]:
    """Say how many test rows equal a training row.

    Of a test part that was drawn from rows, only copies of images, or of rows that a single column
    tells apart, are not chance.
    """
    train, test = seen.data.train, seen.data.test
    if seen.prints is None:
        return
    rows, own = seen.prints
    known = Counter(rows)
    equal = sum(row in known for row in own)
    if not equal or (not seen.given and equal < _SEVERAL * len(own)):
        return
    if seen.given and len(known) < ROWS_DIFFER * len(rows) and copied(known, Counter(own)):
        copies = True
    else:
        fine = seen.given and len(known) >= ROWS_DIFFER * len(rows)
        expected = len(rows) * len(own) * max(chance(train.x), twice(known) if fine else 0.0)
        # equal samples are copies if they are images or signals, or rows that one column tells
        # apart
        x = train.x
        apart = x.ndim > 2 or any(
            len(np.unique(column)) >= _NEARLY * len(known) for column in x.cpu().numpy().T
        )
        copies = (fine or (apart and x.dtype != torch.int64)) and improbable(equal, expected)
    if copies:
        yield (
            f"{equal:,} of {len(test):,} test rows equal a training row, so the test is too easy: "
            "take out rows that are twice"
        )


def _stored_again(seen: SeenData) -> Iterator[str]:
    """Say how many test images are nearly a training image, as if one was stored with losses."""
    train, test = seen.data.train.x, seen.data.test.x
    if train.ndim != 4 or train.dtype != torch.uint8 or seen.prints is None:
        return
    known = {*seen.prints[0]}
    rows = [k for k, print_ in enumerate(seen.prints[1]) if print_ not in known]
    rows = rows[:: len(rows) // _PEEK + 1]
    small, other = (
        F.adaptive_avg_pool2d(part.float(), _SIDE).flatten(1)
        for part in (train[:: len(train) // _ROWS + 1], test[rows])
    )
    if len(small) < _MANY or not rows:
        return
    near = torch.cdist(other, small).topk(2, largest=False).values / small.shape[1] ** 0.5
    found = int(((near[:, 0] <= _LEVELS) & (near[:, 0] * _NEARER <= near[:, 1])).sum())
    if found >= max(2, _SEVERAL * len(rows)):
        yield (
            f"{found:,} of {len(rows):,} test images of {seen.source} that were looked at are "
            "nearly a training image, "
            "as if it was compressed again: take out pictures that are twice"
        )


def _lone_subjects(seen: SeenData) -> Iterator[str]:
    """Say that a column of subjects keeps no rows together, because it names visits or samples."""
    column, named = (
        seen.reading.subject_column,
        [raw.subject for raw in seen.raws if raw.subject is not None],
    )
    rows = sum(map(len, named))
    if (
        rows >= _MANY
        and _RECORDS.search(column.lower())
        and len(np.unique(np.concatenate(named))) == rows
    ):
        yield (
            f"each row of {seen.source} has its own value in --subject-column {column}, so no rows "
            "are kept together: name the column that says whom they are about"
        )


def _classes_in_test_only(seen: SeenData) -> Iterator[str]:
    """Say how many test rows are of classes that no training row has."""
    train, test = seen.data.train, seen.data.test
    strange = ~torch.isin(test.y, train.y)
    if isinstance(seen.data.task, Classification) and strange.any():
        names = [repr(seen.data.classes[k]) for k in np.unique(test.y[strange].cpu())]
        yield (
            f"{int(strange.sum()):,} of {len(test):,} test rows are of classes without a training "
            f"row ({listed(names)}), which a model cannot learn: check the names of classes in both"
        )


_DOUBTS = (
    *(
        _ids,
        _splits,
        _rare_labels,
        _copied_labels,
        _two_labels,
        _equal_columns,
        _times_without_events,
    ),
    *(
        _names_alike,
        _names_of_missing,
        _nearly_alike,
        _files_of_patients,
        _small_groups,
        _given_tests,
        _rows_in_both,
    ),
    *(_classes_in_test_only, _bare_samples, _odd_texts, _told_by_words, _same_samples),
    *(_joined_names, _lone_subjects, _subjects_written_alike, _repeated_rows, _stored_again),
    *MORE_DOUBTS,
)
"""what is looked for; each yields a line for what it finds"""
