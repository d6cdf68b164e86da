"""Read samples for a trained model, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.readers import frames, holdings
from ekiden.readers.kinds import Inputs, Table, arrays
from ekiden.readers.kinds.images import Notes
from ekiden.readers.raster import split
from ekiden.readers.undecoded import Raw

# What messages call a frame, which has no file
FRAME = "the frame given"


@dataclass(frozen=True)
class Batch:
    """Some samples."""

    files: list[str]  # (b,) the file of each sample
    rows: list[int | None]  # (b,) its row in the file; None if the file is one sample
    x: Tensor  # (b, ...) samples as the model takes them


@dataclass(frozen=True)
class SampleReader:
    """Reads samples that a model takes."""

    inputs: Inputs  # kind of the samples, and how they become tensors
    shape: tuple[int, ...]  # shape of one sample
    # the column of tables with the images, texts or arrays; "" means `image`, `text` or `x`
    column: str = ""
    batch: int = 256  # number of samples at a time

    def found(self, paths: Sequence[Path]) -> list[Path]:
        """Return the files that the paths name, including those in folders."""
        if not paths:
            raise UserError(f"name the files to predict: {self._wanted}")
        return [*chain.from_iterable(map(self._in, paths))]

    def holds_many(self, file: Path) -> bool:
        """Return whether a file has rows, each of which is a sample."""
        return file.suffix.lower() in self._many

    def read(self, files: Sequence[Path]) -> Iterator[Batch]:
        """Yield batches of samples from files that `found` returned, in their order.

        Warns:
            DataWarning: at the end, what should be known about how images were read.
        """
        notes = Notes()
        for many, group in groupby(files, self.holds_many):
            if many:
                for file in group:
                    yield from self._batches(self._rows_of(file), notes)
            else:
                single = self._part("the files given", list(group))
                yield from self._batches(single, notes, single=True)
        notes.warn("the files given")

    def read_frame(self, frame: Any) -> Iterator[Batch]:
        """Yield batches of the rows of a frame or a dict of columns. Their file is `FRAME`.

        Warns:
            DataWarning: at the end, what should be known about how images were read.
        """
        notes = Notes()
        yield from self._batches(self._table(frame, FRAME), notes)
        notes.warn(FRAME)

    @property
    def _many(self) -> tuple[str, ...]:
        """Suffixes of files that hold many samples."""
        return (*frames.SUFFIXES, *arrays.SUFFIXES) if self.inputs.arrays else frames.SUFFIXES

    @property
    def _wanted(self) -> str:
        """The files that the model takes, in words."""
        single = "images, folders of images, " if self.inputs.sized else ""
        if self.inputs.suffixes:
            single = f"{self.inputs.words} ({', '.join(self.inputs.suffixes)}), "
        return f"{single}tables ({', '.join(self._many)})"

    def _takes(self, file: Path) -> bool:
        return self.inputs.is_file(file) or self.holds_many(file)

    def _in(self, path: Path) -> list[Path]:
        if path.is_dir():
            below = [file for file in holdings.files_below(path) if self._takes(file)]
            if not below:
                why = f" ({holdings.no_image(path)})" if self.inputs.sized else ""
                raise UserError(
                    f"{path} holds nothing to predict{why}: this model takes {self._wanted}"
                )
            return below
        # of a file with several slices one may be named, as in scan.nii#3
        if not split(path)[0].exists():
            raise UserError(f"there is no file or folder {path}: name {self._wanted}")
        if not self._takes(path):
            raise UserError(f"{path} is not a file that this model takes: name {self._wanted}")
        return [path]

    def _part(self, source: str, samples: Any) -> Raw:
        """Return samples without labels."""
        return Raw(source, samples, np.zeros(len(samples)), kind=type(self.inputs))

    def _rows_of(self, file: Path) -> Raw:
        """Return the samples in a file of arrays, or in the rows of a table."""
        if file.suffix.lower() not in arrays.SUFFIXES:
            return self._table(file, str(file))
        found = arrays.read(file)
        name = self.column or "x"
        if name not in found:
            raise UserError(
                f"{file} has no array {name!r}, only {', '.join(found)}: name one of these by "
                "--column"
            )
        x = arrays.samples(found[name], str(file))
        return Raw(str(file), x.numpy(), np.zeros(len(x)), kind=arrays.Arrays)

    def _table(self, source: Any, name: str) -> Raw:
        """Return the rows of a table."""
        table = frames.arrow(source, name)
        if isinstance(self.inputs, Table):
            return self.inputs.read(table, name)
        if column := self.column or self.inputs.column:
            if column not in table.column_names:
                raise UserError(
                    f"{name} has no column {column!r}, it has {', '.join(table.column_names)}: "
                    "name it by --column"
                )
            table = table.select([column])
        return self._part(name, self.inputs.of_cells(table, name))

    def _batches(self, whole: Raw, notes: Notes, *, single: bool = False) -> Iterator[Batch]:
        """Yield a part in batches; `single`: each sample is a file of its own."""
        for start in range(0, len(whole), self.batch):
            rows = list(range(start, min(start + self.batch, len(whole))))
            part = whole.taken(np.array(rows))
            x = self._fitting(part, self._encoded(part, notes))
            if single:
                yield Batch(list(map(str, part.images)), [None] * len(x), x)
            else:
                yield Batch([whole.source] * len(x), [*rows], x)

    def _encoded(self, part: Raw, notes: Notes) -> Tensor:
        """Return samples as tensors; if one cannot be encoded, the error names it."""
        if part.kind is arrays.Arrays:
            return torch.as_tensor(part.images)
        return self.inputs.encode_part(part, self.shape, notes)

    def _fitting(self, part: Raw, x: Tensor) -> Tensor:
        fits = self.inputs.ragged or tuple(x.shape[1:]) == self.shape
        if x.dtype != self.inputs.dtype or not fits:
            raise UserError(
                f"{part.where(0)}: the model takes {_form(self.inputs.dtype, self.shape)}, not "
                f"{_form(x.dtype, x.shape[1:])}"
            )
        return x


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"
