"""What a kind of samples can do: images, rows of a table, texts, arrays, or the user's own."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, plain
from ekiden.core.base.errors import UserError

Part: TypeAlias = Any
"""a part of a data set as its files hold it, a `Raw` of `ekiden.readers.undecoded`"""


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
                f"({', '.join(table.column_names)}): name one by --feature-columns"
            )
        return table[table.column_names[0]].to_pylist()

    @classmethod
    def taken(cls, samples: Any, rows: NDArray[np.int64]) -> Any:
        """Return some undecoded samples."""
        if isinstance(samples, list | tuple):
            return [samples[row] for row in rows]
        return samples[rows]

    @classmethod
    def assembled(
        cls,
        sides: Sequence[Sequence[Part]],
        wanted: Encoding,
    ) -> tuple[list[Tensor], "Inputs | None"]:
        """Return the samples of the training side and of the test side, and what they are; None if
        their type says it.

        Args:
            sides: what the sources hold for training, and for the test.
            wanted: what they become.
        """
        made = wanted.known or cls()
        return joined(sides, [list(map(made.encode_part, side)) for side in sides]), made

    def encode_part(self, raw: Part, shape: tuple[int, ...] = (), notes: Any = None) -> Tensor:
        """Return the encoded samples of a part; the error names the one that cannot be encoded.

        Args:
            raw: the samples as their source holds them.
            shape: shape of the samples that a trained model takes; () without one.
            notes: collects what the user should know, such as `ekiden.readers.kinds.images.Notes`.
        """
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
                f"finite: {type(self).__name__}.encode must return {len(raw)} finite samples of "
                f"{self.dtype}"
            )
        return x

    def compared(self, x: Tensor) -> NDArray[Any]:
        """Return samples (n, ...) as rows (n, d) that are equal for equal samples, at all silos."""
        return x.reshape(len(x), -1).cpu().numpy()

    def lengths(self, x: Tensor) -> Tensor | None:
        """Return (n,) lengths of samples (n, ...); None if all have one."""
        return None

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


def joined(sides: Sequence[Sequence[Part]], parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the encoded parts of each side in one tensor; they need one shape and type."""
    wanted = _form(parts[0][0])
    first = sides[0][0].source
    for raws, tensors in zip(sides, parts, strict=True):
        for raw, x in zip(raws, tensors, strict=True):
            if _form(x) != wanted:
                raise UserError(
                    f"samples of {raw.source} are {_form(x)}, those of {first} {wanted}: give all "
                    "samples one shape and type"
                )
    return [torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0] for tensors in parts]


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
