"""Read files for a trained model, in batches, so that any number of them fits into memory; and samples to try it on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError, row_text
from ekiden.base.outside import pa, pq
from ekiden.data import frames, holdings
from ekiden.data.kinds import Images, Inputs, Table, Tokens, arrays
from ekiden.data.kinds.images import Notes
from ekiden.data.raster import split
from ekiden.data.samples import said_in
from ekiden.data.sources import NAMED
from ekiden.engine.folder import read_config
from ekiden.results.result import LoadedModel
from ekiden.runs.plan import plan_in

_TRIED = 64
FRAME = "the frame given"  # What messages call a frame, which has no file


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
    column: str = ""  # the column of tables with the images, texts or arrays; "" means `image`, `text` or `x`
    batch: int = 256  # number of samples at a time

    def found(self, paths: Sequence[Path]) -> list[Path]:
        """Return the files that the paths name, including those in folders."""
        if not paths:
            raise UserError(f"name the files to predict: {self._wanted}")
        return [file for path in paths for file in self._in(path)]

    def holds_many(self, file: Path) -> bool:
        """Return whether a file has rows, each of which is a sample."""
        return file.suffix.lower() in self._many

    def read(self, files: Sequence[Path]) -> Iterator[Batch]:
        """Yield batches of samples from files that `found` returned, in their order.

        Warns:
            DataWarning: at the end, what should be known about how images were read.
        """
        notes = Notes()
        single: list[Path] = []
        for file in files:
            if not self.holds_many(file):
                single.append(file)
            if self.holds_many(file) or len(single) == self.batch:
                yield from self._alone(single, notes)
                single = []
            if self.holds_many(file):
                many = file.suffix.lower() in arrays.SUFFIXES
                yield from self._array(file) if many else self._table(file, str(file), notes)
        yield from self._alone(single, notes)
        notes.warn("the files given")

    def read_frame(self, frame: Any) -> Iterator[Batch]:
        """Yield batches of the rows of a frame or a dict of columns. Their file is `FRAME`.

        Warns:
            DataWarning: at the end, what should be known about how images were read.
        """
        notes = Notes()
        yield from self._table(frame, FRAME, notes)
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
        if not split(path)[0].exists() and not path.exists():
            raise UserError(f"there is no file or folder {path}: name {self._wanted}")
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if self._takes(file) and file.is_file())
            below = [f for f in below if not any(part.startswith(".") for part in f.relative_to(path).parts)]
            if not below:
                why = f" ({holdings.no_image(path)})" if self.inputs.sized else ""
                raise UserError(f"{path} holds nothing to predict{why}: this model takes {self._wanted}")
            return below
        if not self._takes(path):
            raise UserError(f"{path} is not a file that this model takes: name {self._wanted}")
        return [path]

    def _alone(self, files: Sequence[Path], notes: Notes) -> Iterator[Batch]:
        """Yield batches of files that are one sample each."""
        if not files:
            return
        raw: list[Any] = list(files)
        if isinstance(self.inputs, Tokens):
            raw = [_text(file) for file in files]
        x = self._encoded(raw, [str(file) for file in files], notes)
        yield Batch([str(file) for file in files], [None] * len(files), x)

    def _array(self, file: Path) -> Iterator[Batch]:
        """Yield the samples in a file of arrays, (n, ...) each."""
        array = self._opened(file)
        if self.inputs.sized:
            array = self._channels_first(array)
        wanted = np.uint8 if self.inputs.dtype == torch.uint8 else np.floating
        if array.ndim < 2 or not np.issubdtype(array.dtype, wanted):
            kind, each = "uint8" if wanted is np.uint8 else "floats", ", ".join(map(str, self.shape))
            raise UserError(f"{file} holds {array.dtype} of shape {array.shape}: give {kind} of shape (n, {each})")
        for start in range(0, len(array), self.batch):
            x = torch.from_numpy(np.array(array[start : start + self.batch]))
            x = self._fitting(x if x.dtype == torch.uint8 else x.float(), [f"{row_text(start)} of {file}"])
            yield Batch([str(file)] * len(x), list(range(start, start + len(x))), x)

    def _channels_first(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return images (n, H, W) or (n, H, W, C) as the model takes them; another array unchanged."""
        if array.ndim == 3:
            return array[:, None]
        fits = array.ndim == 4 and array.shape[1:] != self.shape and array.shape[3:] + array.shape[1:3] == self.shape
        return np.moveaxis(array, 3, 1) if fits else array

    def _opened(self, file: Path) -> NDArray[Any]:
        """Return the array of samples in a file; that of .npy is mapped, not read."""
        if file.suffix.lower() != ".npy":
            found, name = arrays.read(file), self.column or "x"
            if name not in found:
                raise UserError(f"{file} has no array {name!r}, only {', '.join(found)}: name one of these by --column")
            return found[name]
        try:
            return np.load(file, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
        except (ValueError, OSError, EOFError) as error:
            raise UserError(
                f"{file} cannot be read as an array ({frames.first(error)}): save it by numpy.save"
            ) from None

    def _table(self, source: Any, file: str, notes: Notes) -> Iterator[Batch]:
        """Yield the rows of a Parquet or CSV file, or of a frame."""
        start = 0
        if isinstance(self.inputs, Table):  # all rows together say how numbers and dates are written
            table = frames.arrow(source, file)
            _check_columns(table.column_names, [*self.inputs.numeric, *self.inputs.categorical], file)
            whole = self.inputs.read(table, file)
            for rows in np.split(np.arange(len(whole)), range(self.batch, len(whole), self.batch)):
                x = self.inputs.encode(whole.taken(rows))
                yield Batch([file] * len(x), rows.tolist(), x)
            return
        for part in _parts(source, file, self.batch, tuple(filter(None, [self.column or self.inputs.column]))):
            names = [f"{row_text(start + i)} of {file}" for i in range(part.num_rows)]
            if self.inputs.ragged and (lost := part.column(0).is_null().to_pylist()) and any(lost):
                raise UserError(
                    f"{names[lost.index(True)]} has no text in column {part.column_names[0]!r}: give it one"
                )
            raw = self.inputs.of_cells(part, file)
            x = self._encoded(raw, names, notes)
            yield Batch([file] * len(x), list(range(start, start + len(x))), x)
            start += part.num_rows

    def _encoded(self, raw: Any, names: Sequence[str], notes: Notes) -> Tensor:
        """Return samples as tensors; if one cannot be encoded, the error names it."""
        try:
            return self._fitting(self.inputs.for_model(raw, self.shape, notes), names)
        except UserError:
            if not isinstance(raw, list):
                raise
            for item, name in zip(raw, names, strict=True):
                try:
                    self._fitting(self.inputs.for_model([item], self.shape, Notes()), [name])
                except UserError as error:
                    if isinstance(item, Path):  # the message already names it
                        raise
                    raise UserError(f"{name} cannot be used: {error}") from None
            raise

    def _fitting(self, x: Tensor, names: Sequence[str]) -> Tensor:
        if tuple(x.shape[1:]) != self.shape and not self.inputs.ragged:
            where = names[0] if len(names) == 1 else f"{names[0]} and following"
            raise UserError(f"{where}: the model takes samples of shape {self.shape}, not {tuple(x.shape[1:])}")
        return x


def _parts(source: Any, file: str, batch: int, columns: Sequence[str]) -> Iterator[Any]:
    """Yield some rows of a table at a time, with these columns. Only Parquet is read in parts; other files at once."""
    if not isinstance(source, Path) or source.suffix.lower() != ".parquet":
        table = frames.arrow(source, file)
        _check_columns(table.column_names, columns, file)
        table = table.select(list(columns)) if columns else table
        yield from (table.slice(start, batch) for start in range(0, len(table), batch))
        return
    try:
        with pq.ParquetFile(file) as opened:
            _check_columns(opened.schema_arrow.names, columns, file)
            for part in opened.iter_batches(batch, columns=list(columns) or None):
                yield pa.Table.from_batches([part])
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file} cannot be read as Parquet, copy or write it again ({frames.first(error)})") from None


def _check_columns(has: Sequence[str], wanted: Sequence[str], file: str) -> None:
    if lacking := [name for name in wanted if name not in has]:
        hint = "name it by --column" if len(wanted) == 1 else "add it"
        raise UserError(f"{file} has no column {lacking[0]!r}, it has {', '.join(has)}: {hint}")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not UTF-8 text: convert or remove it") from None


def column_in(config: Mapping[str, Any]) -> str:
    """Return the column with images, texts or arrays in the run's own tables; "" if the run's plan does not name it."""
    reading = said_in(config).get("reading", {})
    named = [reading.get(f"{kind}_column") for kind in ("image", "text", "array")]
    if reading.get("sample_kind") and len(features := reading.get("feature_columns", ())) == 1:
        named = list(features)
    usual = NAMED[config["dataset"]].columns.image if config["dataset"] in NAMED else ""
    return next(filter(None, named), "" if usual == Images.column else usual)


def samples_of(folder: Path, model: LoadedModel) -> tuple[Any, int]:
    """Return raw samples for the model of a run, and how many of them are of its own test data.

    For a table these are rows of an Arrow table, for other models a tensor (b, ...). If the run's data are not
    available (made in Python, at silos, or the files are gone), samples are made up from a fixed seed. Rows with
    missing numbers and unknown categories are always among them.
    """
    try:
        test = plan_in(read_config(folder), folder).federation().dataset.test
    except UserError:
        return _made_up(model), 0
    x = test.x[torch.linspace(0, len(test) - 1, min(_TRIED, len(test))).long()]
    if not isinstance(model.inputs, Table):
        return x, len(x)
    return pa.concat_tables([raw_rows(x, model.inputs), _made_up(model)]), len(x)


def raw_rows(x: Tensor, table: Table) -> Any:
    """Return an Arrow table of raw rows that are encoded as `x`, (n, d).

    A missing number that the encoding does not tell from the mean is the mean, and an unknown category is missing or,
    if that is known, another text.
    """
    numbers = x[:, : len(table.numeric)].double().numpy() * np.array(table.scale) + np.array(table.centre)
    for k, name in enumerate(table.gaps):
        numbers[x[:, len(table.numeric) + k].numpy() > 0, table.numeric.index(name)] = np.nan
    names = []
    for k, known in enumerate(table.vocabularies):
        all_of_them = np.array([_unknown(known), *known], dtype=np.str_)
        names.append(all_of_them[x[:, table.numbers + k].long().numpy()])
    return _arrow(table, numbers, names)


def _unknown(known: tuple[str, ...]) -> str:
    """Return a text that is not a known category."""
    return next(text for text in ("", *(f"other {k}" for k in range(len(known) + 1))) if text not in known)


def _arrow(table: Table, numbers: Any, names: Any) -> Any:
    columns = {
        name: pa.array(numbers[:, k], pa.float64(), mask=np.isnan(numbers[:, k]))
        for k, name in enumerate(table.numeric)
    }
    return pa.table(columns | {name: pa.array(names[k], pa.string()) for k, name in enumerate(table.categorical)})


def _made_up(model: LoadedModel) -> Any:
    generator = torch.Generator().manual_seed(0)
    match model.inputs:
        case Images():
            return torch.randint(0, 256, (_TRIED, *model.shape), generator=generator, dtype=torch.uint8)
        case Tokens(vocabulary=vocabulary):
            return torch.randint(0, vocabulary, (_TRIED, *model.shape), generator=generator)
        case Table() as table:
            numbers = torch.randn(_TRIED, len(table.numeric), generator=generator, dtype=torch.float64).numpy()
            numbers = numbers * np.array(table.scale) + np.array(table.centre)
            numbers[torch.rand(numbers.shape, generator=generator).numpy() < 0.2] = np.nan
            names = []
            for known in table.vocabularies:
                each = np.array(["", _unknown(known), *known], dtype=np.str_)
                names.append(each[torch.randint(0, len(each), (_TRIED,), generator=generator).numpy()])
            return _arrow(table, numbers, names)
        case _:
            return torch.randn(_TRIED, *model.shape, generator=generator)
