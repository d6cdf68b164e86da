"""A part of a data set as its files hold it, undecoded, and what a kind of samples can do."""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, plain
from ekiden.core.base.errors import UserError, row_text

PARTS = (
    "train",
    "test",
    "val",
    "valid",
    "validation",
    "dev",
    "eval",
    "training",
    "testing",
    "holdout",
)
"""what parts of a data set are called"""
_UNITS = {
    "days as 20240131": (1.9e7, 2.1e7),
    "seconds since 1970": (9e8, 27e8),
    "milliseconds since 1970": (9e11, 27e11),
    "microseconds since 1970": (9e14, 27e14),
    "nanoseconds since 1970": (9e17, 27e17),
}
"""units of times, and numbers between which times from 1998 to 2055 lie (of days those from 1900 to
2099)"""
_ACCENTS = 0x300  # first character that is written onto the one before


@dataclass(frozen=True)
class Encoding:
    """What the samples of a data set become."""

    reading: Any  # how they were read, a `Reading`
    size: int | None = None  # side of images in pixels
    known: Any = None  # the `Inputs`, if a run or an agreement says them; of the samples' kind
    shape: tuple[int, ...] = ()  # shape of the samples that a trained model takes; () without one


class Inputs(Checked, ABC):
    """A kind of samples: how they are read, how they become tensors, and what they need.

    A kind is one frozen dataclass of plain values, which a run folder keeps. It may come from
    outside the package: name it by `sample_kind`, as FILE.py:NAME or as an entry point of the group
    `ekiden.kinds`. Such a kind needs `kind`, `words`, `suffixes` and `encode`.
    """

    kind: ClassVar[str]
    """its name in `config.json`"""
    words: ClassVar[str]
    """what samples are called in messages: images, texts, a table"""
    suffixes: ClassVar[tuple[str, ...]] = ()
    """suffixes of files that hold one sample each"""
    column: ClassVar[str] = ""
    """the usual name of the column or array with the samples"""
    arrays: ClassVar[bool] = False
    """whether files of arrays hold such samples"""
    positions: ClassVar[bool] = False
    """whether whole numbers among the labels are positions of classes; otherwise they are names"""
    unlabelled: ClassVar[bool] = False
    """whether samples can be learned without labels"""
    kept: ClassVar[bool] = False
    """whether decoded samples are kept in the cache folder"""
    sized: ClassVar[bool] = False
    """whether `--size` says how large samples become"""
    agreed: ClassVar[bool] = False
    """whether silos agree on the encoding before they train"""
    ragged: ClassVar[bool] = False
    """whether samples have different lengths and are padded to one"""
    dtype: ClassVar[torch.dtype] = torch.float32
    """type of encoded samples"""

    @property
    def continuous(self) -> bool:
        """Whether values can be added, mixed and averaged."""
        return True

    def network(self, shape: tuple[int, ...]) -> str:
        """Return the network for samples of a shape if the user names none; "" if the shape alone
        decides.
        """
        return ""

    @abstractmethod
    def encode(self, raw: Any) -> Tensor:
        """Return samples (n, ...) of the type `dtype`, all of one shape.

        Args:
            raw: n files (`pathlib.Path`), or n cells of a column.

        Raises:
            UserError: a sample cannot be encoded.
        """

    def for_model(self, raw: Any, shape: tuple[int, ...], notes: Any = None) -> Tensor:
        """Return samples as a trained model takes them.

        Args:
            raw: as in `encode`.
            shape: shape of the samples that the model takes.
            notes: collects what the user should know, such as `ekiden.readers.kinds.images.Notes`.
        """
        return self.encode(raw)

    def takes(self, shape: Sequence[int]) -> str:
        """Return what a model of these samples takes, in words."""
        return f"{self.words}, as {str(self.dtype).removeprefix('torch.')} of shape {tuple(shape)}."

    @classmethod
    def is_file(cls, file: Path) -> bool:
        """Return whether a file is one sample."""
        return file.suffix.lower() in cls.suffixes

    @classmethod
    def of_cells(cls, table: Any, source: str) -> Any:
        """Return samples from the columns of an Arrow table that have no other meaning."""
        if len(table.column_names) != 1:
            raise UserError(
                f"{source} has several columns that may hold {cls.words} "
                f"({', '.join(table.column_names)}): name one "
                "by --feature-columns"
            )
        return table[table.column_names[0]].to_pylist()

    @classmethod
    def taken(cls, samples: Any, rows: NDArray[np.int64]) -> Any:
        """Return some undecoded samples."""
        return (
            [samples[row] for row in rows] if isinstance(samples, list | tuple) else samples[rows]
        )

    @classmethod
    def assembled(
        cls,
        sides: Sequence[Sequence["Raw"]],
        wanted: "Encoding",
    ) -> tuple[list[Tensor], "Inputs | None"]:
        """Return the samples of the training side and of the test side, and what they are; None if
        their type says it.

        Args:
            sides: what the sources hold for training, and for the test.
            wanted: what they become.
        """
        made = wanted.known or cls()
        return joined(sides, [[made._encoded(raw) for raw in side] for side in sides]), made

    def _encoded(self, raw: "Raw") -> Tensor:
        """Return the encoded samples of a part; the error names the one that cannot be encoded."""
        try:
            x = self.encode(raw.images)
        except UserError:
            for row in range(len(raw)):
                try:
                    self.encode(self.taken(raw.images, np.array([row])))
                except UserError as error:
                    raise UserError(f"{raw.where(row)} cannot be used: {error}") from None
            raise
        if (
            len(x) != len(raw)
            or x.dtype != self.dtype
            or (x.is_floating_point() and not torch.isfinite(x).all())
        ):
            raise UserError(
                f"{self.words} of {raw.source} became {len(x)} samples of {x.dtype}, some not "
                "finite: "
                f"{type(self).__name__}.encode must return {len(raw)} finite samples of "
                f"{self.dtype}"
            )
        return x

    def compared(self, x: Tensor) -> NDArray[Any]:
        """Return samples (n, ...) as rows (n, d) that are equal for equal samples, at all silos."""
        return x.reshape(len(x), -1).cpu().numpy()

    def lengths(self, x: Tensor) -> Tensor | None:
        """Return (n,) lengths of samples (n, ...); None if all have one."""
        return None

    def bare(self, x: Tensor) -> Tensor:
        """Return which samples (n, ...) have nothing in them, (n,) bool."""
        return torch.zeros(len(x), dtype=torch.bool)

    def cut(self, x: Tensor) -> Tensor:
        """Return samples without the padding that all of them have."""
        return x

    def padded(self, x: Tensor) -> Tensor:
        """Return samples padded to the length that all parties use."""
        return x

    def values_named(self, width: int) -> list[str]:
        """Return what the values of a vector are called in messages."""
        return [f"value {k} of the inputs" for k in range(width)]

    def to_json(self) -> dict[str, Any]:
        """Return the inputs as plain values; `ekiden.readers.kinds.from_json` reads them."""
        return {"kind": outside.known_as(type(self), "ekiden.kinds") or self.kind, **plain(self)}

    def terms(self) -> "Inputs":
        """Return what parties must agree on."""
        return self


def joined(sides: Sequence[Sequence["Raw"]], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the encoded parts of each side in one tensor; they need one shape and type."""
    wanted, first = _form(parts[0][0]), sides[0][0].source
    for raws, tensors in zip(sides, parts, strict=True):
        for raw, x in zip(raws, tensors, strict=True):
            if _form(x) != wanted:
                raise UserError(
                    f"samples of {raw.source} are {_form(x)}, those of {first} {wanted}: give all "
                    "samples one shape "
                    "and type"
                )
    return [torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0] for tensors in parts]


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"


@dataclass(frozen=True)
class Raw:
    """A part of a data set (training or test) as its files hold it, undecoded."""

    source: str  # the file or folder, for messages
    # n encoded images, files or opened images; or n texts; or the columns of a table
    # (`pyarrow.Table`); or an array (n,
    # ...)
    images: Any
    label: NDArray[
        Any
    ]  # (n,) integers or names, or float64 numbers; (n, K) float64 for several columns
    domain: NDArray[Any] | None = None  # (n,) integers or names, or None
    group: NDArray[Any] | None = None  # (n,) integers or names, or None
    classes: tuple[
        str, ...
    ] = ()  # class names in the order of the labels; empty if the source has none
    domains: tuple[str, ...] = ()  # names of domains in their order
    kind: type[Inputs] = field(kw_only=True)  # what the samples are
    targets: tuple[str, ...] = ()  # names of the columns of labels; none if there are no labels
    # (n,) names or int64 numbers of whom or what the samples are about, such as patients, or None
    subject: NDArray[Any] | None = None
    time: NDArray[Any] | None = None  # (n,) datetime64[us], or numbers, or None
    given: bool = False  # whether these are arrays that were given in Python
    # (n,) number of each sample in the source; None if these are all samples of the source
    rows: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        if not len(self.images):
            what = "image" if self.kind.sized else "row"
            raise UserError(f"{self.source} is empty: it needs at least one labelled {what}.")
        for part in ("label", "domain", "group", "subject"):
            if (values := getattr(self, part)) is not None:
                object.__setattr__(self, part, _composed(values))
        for part in ("classes", "domains"):
            object.__setattr__(self, part, composed(getattr(self, part)))

    def __len__(self) -> int:
        return len(self.label)

    @property
    def positions(self) -> bool:
        """Whether whole numbers among the labels are positions of classes, from 0 without gaps.

        In a column of a table or an array of a file they are names of classes, so they may be any
        numbers.
        """
        return self.given or self.kind.positions

    def taken(self, rows: NDArray[np.int64]) -> "Raw":
        """Return these rows."""
        rest = {name: getattr(self, name) for name in ("domain", "group", "subject", "time")}
        taken: dict[str, Any] = {
            name: None if part is None else part[rows] for name, part in rest.items()
        }
        origin = rows if self.rows is None else self.rows[rows]
        return replace(
            self,
            images=self.kind.taken(self.images, rows),
            label=self.label[rows],
            rows=origin,
            **taken,
        )

    def where(self, row: int) -> str:
        """Return where the source holds a sample, for messages: its file, or its row before any
        were taken out.

        Args:
            row: its place in this part.
        """
        sample = self.images[row] if isinstance(self.images, list | tuple) else None
        if isinstance(sample, Path):
            return str(sample)
        return f"{self.row(row)} of {self.source}"

    def row(self, row: int) -> str:
        """Return the row of the source that holds a sample, for messages."""
        return row_text(row if self.rows is None else int(self.rows[row]))


def composed(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with one form of each character (NFC): macOS writes an accent in file names as a
    character.
    """
    return tuple(unicodedata.normalize("NFC", name) for name in names)


def _composed(values: NDArray[Any]) -> NDArray[Any]:
    """Return names (n,) as `composed` does; numbers unchanged."""
    if values.dtype.kind != "U" or not values.size or not values.dtype.itemsize:
        return values
    if np.ascontiguousarray(values).view(np.uint32).max() < _ACCENTS:
        return values
    names, places = np.unique(values, return_inverse=True)
    return np.array(list(composed(names.tolist())))[places]


def natural(name: str) -> tuple[bool, int, str]:
    """Return a sort key: numbers by value, before other names."""
    number = name.isascii() and name.removeprefix("-").isdigit()
    return not number, int(name) if number else 0, name


def _given(parts: Sequence[Raw], what: str) -> list[NDArray[Any]] | None:
    """Return these values of each part; None if a part has none."""
    values = [getattr(part, what) for part in parts]
    return None if any(value is None for value in values) else values


def _cut(numbers: NDArray[np.int64], like: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Return numbers of all parts together as numbers of each."""
    return [
        torch.from_numpy(part.copy())
        for part in np.split(numbers, np.cumsum(list(map(len, like)))[:-1])
    ]


def owners(
    what: Literal["domain", "group"], parts: Sequence[Raw], preferred: tuple[str, ...] = ()
) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Return numbers and names of the domains or groups, if all parts have them.

    Args:
        what: domain or group.
        parts: parts of one data set.
        preferred: their names in order; used if the parts have no others and the files do not name
            them.
    """
    if (given := _given(parts, what)) is None:
        return [None] * len(parts), ()
    names = parts[0].domains if what == "domain" else ()
    if not names and set(preferred) >= {str(v) for part in given for v in np.unique(part)}:
        names = preferred
    if names and all(p.dtype.kind == "i" for p in given):
        given = [np.array(names)[p] if p.min() >= 0 and p.max() < len(names) else p for p in given]
    found, inverse = np.unique(
        np.concatenate([p.astype(np.str_) for p in given]), return_inverse=True
    )
    order = names or tuple(sorted(map(str, found), key=natural))
    place = {name: i for i, name in enumerate(order)}
    if strange := next((str(f) for f in found if str(f) not in place), None):
        source = parts[0].source
        raise UserError(
            f"{what} {strange!r} in {source} is not among the {what} names: {', '.join(order)}."
        )
    return _cut(np.array([place[str(f)] for f in found], dtype=np.int64)[inverse], given), order


def subjects(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the number of each sample's subject, the same for the same name in all parts; None
    without subjects.
    """
    if (given := _given(parts, "subject")) is None:
        return [None] * len(parts)
    return [*_cut(np.unique(np.concatenate(given), return_inverse=True)[1].astype(np.int64), given)]


def times(parts: Sequence[Raw]) -> list[Tensor | None]:
    """Return the times of all parts as numbers (n,) that can be compared; None if the parts have no
    times.
    """
    if (given := _given(parts, "time")) is None:
        return [None] * len(parts)
    odd = next((k for k, values in enumerate(given) if values.dtype != given[0].dtype), None)
    if odd is not None:
        what = [
            "dates" if values.dtype.kind == "M" else "numbers" for values in (given[0], given[odd])
        ]
        raise UserError(
            f"the times of {parts[0].source} are {what[0]}, those of {parts[odd].source} "
            f"{what[1]}: write "
            "times everywhere as 2024-01-31, 2024-01-31 10:30:00, or as numbers"
        )
    units = {
        unit: raw.source
        for raw, values in zip(parts, given, strict=True)
        for unit, (low, high) in _UNITS.items()
        if values.dtype.kind == "f" and ((values > low) & (values < high)).any()
    }
    if len(units) > 1:
        shown = " and ".join(f"{unit} in {source}" for unit, source in units.items())
        raise UserError(f"times are {shown}: write all in one unit")
    return [
        torch.from_numpy(values.astype(np.int64) if values.dtype.kind == "M" else values)
        for values in given
    ]
