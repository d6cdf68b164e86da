"""Read files for a trained model, in batches that fit into memory, and write its predictions: a
table or masks.
"""

import colorsys
import csv
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.clinic.regressions import Baseline, baseline_of
from ekiden.core.base.errors import UserError, row_text
from ekiden.core.base.files import csv_cell, disk_error, for_csv
from ekiden.core.data.samples import said_in
from ekiden.core.engine.folder import read_config
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    ScaledTask,
    Segmentation,
)
from ekiden.core.tasks.base import IGNORED
from ekiden.readers import frames, holdings
from ekiden.readers.dates import DAY
from ekiden.readers.kinds import Images, Inputs, Table, Tokens, arrays, texts
from ekiden.readers.kinds.images import Notes
from ekiden.readers.raster import split
from ekiden.readers.sources import NAMED
from ekiden.runs.plan import plan_in
from ekiden.runs.result import LoadedModel

_TRIED = 64
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
    column: str = (
        ""  # the column of tables with the images, texts or arrays; "" means `image`, `text` or `x`
    )
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
            below = [
                f
                for f in below
                if not any(part.startswith(".") for part in f.relative_to(path).parts)
            ]
            if not below:
                why = f" ({holdings.no_image(path)})" if self.inputs.sized else ""
                raise UserError(
                    f"{path} holds nothing to predict{why}: this model takes {self._wanted}"
                )
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
            kind, each = (
                "uint8" if wanted is np.uint8 else "floats",
                ", ".join(map(str, self.shape)),
            )
            raise UserError(
                f"{file} holds {array.dtype} of shape {array.shape}: give {kind} of shape (n, "
                f"{each})"
            )
        for start in range(0, len(array), self.batch):
            x = torch.from_numpy(np.array(array[start : start + self.batch]))
            x = self._fitting(
                x if x.dtype == torch.uint8 else x.float(), [f"{row_text(start)} of {file}"]
            )
            yield Batch([str(file)] * len(x), list(range(start, start + len(x))), x)

    def _channels_first(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return images (n, H, W) or (n, H, W, C) as the model takes them; another array
        unchanged.
        """
        if array.ndim == 3:
            return array[:, None]
        fits = (
            array.ndim == 4
            and array.shape[1:] != self.shape
            and array.shape[3:] + array.shape[1:3] == self.shape
        )
        return np.moveaxis(array, 3, 1) if fits else array

    def _opened(self, file: Path) -> NDArray[Any]:
        """Return the array of samples in a file; that of .npy is mapped, not read."""
        if file.suffix.lower() != ".npy":
            found, name = arrays.read(file), self.column or "x"
            if name not in found:
                raise UserError(
                    f"{file} has no array {name!r}, only {', '.join(found)}: name one of these by "
                    "--column"
                )
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
        # all rows together say how numbers and dates are written
        if isinstance(self.inputs, Table):
            table = frames.arrow(source, file)
            _check_columns(
                table.column_names, [*self.inputs.numeric, *self.inputs.categorical], file
            )
            whole = self.inputs.read(table, file)
            for rows in np.split(np.arange(len(whole)), range(self.batch, len(whole), self.batch)):
                x = self.inputs.encode(whole.taken(rows))
                yield Batch([file] * len(x), rows.tolist(), x)
            return
        for part in _parts(
            source, file, self.batch, tuple(filter(None, [self.column or self.inputs.column]))
        ):
            names = [f"{row_text(start + i)} of {file}" for i in range(part.num_rows)]
            if self.inputs.ragged and (lost := part.column(0).is_null().to_pylist()) and any(lost):
                raise UserError(
                    f"{names[lost.index(True)]} has no text in column {part.column_names[0]!r}: "
                    "give it one"
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
                    # the message already names it
                    if isinstance(item, Path):
                        raise
                    raise UserError(f"{name} cannot be used: {error}") from None
            raise

    def _fitting(self, x: Tensor, names: Sequence[str]) -> Tensor:
        if tuple(x.shape[1:]) != self.shape and not self.inputs.ragged:
            where = names[0] if len(names) == 1 else f"{names[0]} and following"
            raise UserError(
                f"{where}: the model takes samples of shape {self.shape}, not {tuple(x.shape[1:])}"
            )
        return x


def _parts(source: Any, file: str, batch: int, columns: Sequence[str]) -> Iterator[Any]:
    """Yield some rows of a table at a time, with these columns. Only Parquet is read in parts;
    other files at once.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

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
        raise UserError(
            f"{file} cannot be read as Parquet, copy or write it again ({frames.first(error)})"
        ) from None


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
    """Return the column with images, texts or arrays in the run's own tables; "" if the run's plan
    does not name it.
    """
    reading = said_in(config).get("reading", {})
    named = [reading.get(f"{kind}_column") for kind in ("image", "text", "array")]
    if reading.get("sample_kind") and len(features := reading.get("feature_columns", ())) == 1:
        named = list(features)
    usual = NAMED[config["dataset"]].columns.image if config["dataset"] in NAMED else ""
    return next(filter(None, named), "" if usual == Images.column else usual)


def samples_of(folder: Path, model: LoadedModel) -> tuple[Any, int]:
    """Return raw samples for the model of a run, and how many of them are of its own test data.

    For a table these are rows of an Arrow table, for other models a tensor (b, ...). If the run's
    data are not available (made in Python, at silos, or the files are gone), samples are made up
    from a fixed seed. Rows with missing numbers and unknown categories are always among them.
    """
    import pyarrow as pa

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

    A missing number that the encoding does not tell from the mean is the mean, and an unknown
    category is missing or, if that is known, another text.
    """
    numbers = x[:, : len(table.numeric)].double().numpy() * np.array(table.scale) + np.array(
        table.centre
    )
    for k, name in enumerate(table.gaps):
        numbers[x[:, len(table.numeric) + k].numpy() > 0, table.numeric.index(name)] = np.nan
    names = []
    for k, known in enumerate(table.vocabularies):
        all_of_them = np.array([_unknown(known), *known], dtype=np.str_)
        names.append(all_of_them[x[:, table.numbers + k].long().numpy()])
    return _arrow(table, numbers, names)


def _unknown(known: tuple[str, ...]) -> str:
    """Return a text that is not a known category."""
    return next(
        text for text in ("", *(f"other {k}" for k in range(len(known) + 1))) if text not in known
    )


def _arrow(table: Table, numbers: Any, names: Any) -> Any:
    import pyarrow as pa

    columns = {}
    for k, name in enumerate(table.numeric):
        column = numbers[:, k]
        lost = np.isnan(column)
        if name in table.dates:
            column = np.where(lost, 0, np.rint(column * DAY)).astype("datetime64[us]")
        columns[name] = pa.array(column, mask=lost)
    return pa.table(
        columns
        | {name: pa.array(names[k], pa.string()) for k, name in enumerate(table.categorical)}
    )


def _made_up(model: LoadedModel) -> Any:
    generator = torch.Generator().manual_seed(0)
    match model.inputs:
        case Images():
            return torch.randint(
                0, 256, (_TRIED, *model.shape), generator=generator, dtype=torch.uint8
            )
        case Tokens(vocabulary=vocabulary):
            return torch.randint(0, vocabulary, (_TRIED, *model.shape), generator=generator)
        case Table() as table:
            numbers = torch.randn(
                _TRIED, len(table.numeric), generator=generator, dtype=torch.float64
            ).numpy()
            numbers = numbers * np.array(table.scale) + np.array(table.centre)
            numbers[torch.rand(numbers.shape, generator=generator).numpy() < 0.2] = np.nan
            names = []
            for known in table.vocabularies:
                each = np.array(["", _unknown(known), *known], dtype=np.str_)
                names.append(
                    each[torch.randint(0, len(each), (_TRIED,), generator=generator).numpy()]
                )
            return _arrow(table, numbers, names)
        case _:
            return torch.randn(_TRIED, *model.shape, generator=generator)


TABLE = "masks.csv"
# most classes of a PNG with a palette
_MOST = 256
STDOUT = "-"
_FORMATS = (".parquet", ".csv")
# samples per batch, because their outputs are large
_AT_ONCE = {
    LanguageModelling: 8,
    Segmentation: 16,
}


@dataclass(frozen=True)
class Answers:
    """Run a model and name its outputs."""

    model: LoadedModel
    threshold: float | None = (
        None  # of two classes, the probability from which on a sample is of the second one
    )
    times: Sequence[float] = ()  # of times and events, at which survival is told
    baseline: Baseline | None = None  # the hazard from which it follows

    def __post_init__(self) -> None:
        if self.times:
            # refuse other times
            baseline_of(self.baseline, self.model.task).survival(torch.zeros(1, 1), self.times)
        if self.threshold is None:
            return
        if not isinstance(self.model.task, Classification) or len(self.model.classes) != 2:
            raise UserError("a threshold is for two classes: leave out --threshold")
        if not 0 <= self.threshold <= 1:
            raise UserError(
                f"--threshold {self.threshold:g} is not a share: give a number from 0 to 1"
            )

    def __call__(self, x: Tensor) -> dict[str, Any]:
        """Return columns for samples (b, ...).

        classification: `prediction`, the class by name (the most probable one, or by the
        threshold), and `probability_NAME` of each. multi-label: `prediction`, the labels with a
        probability of 1/2 or more, separated by semicolons, and `probability_NAME` of each.
        regression: `prediction`, in the unit of the targets, or `prediction_NAME` of each of
        several. survival: `prediction`, the logarithm of the relative hazard, and `survival_TIME`,
        the share that has not had the event at each of the times. language-modelling: see
        `_of_texts`.
        """
        with torch.inference_mode():
            outputs = self.model.encoded(x).float()
            if isinstance(self.model.task, LanguageModelling):
                return self._of_texts(x, outputs)
            answers = self.model.task.answers(outputs, full=True)
        names = self.model.classes
        if isinstance(self.model.task, ScaledTask):
            called = ["prediction"] if len(names) == 1 else [f"prediction_{name}" for name in names]
            columns = {name: answers[:, k].numpy() for k, name in enumerate(called)}
            if self.times and self.baseline is not None:
                shares = self.baseline.survival(answers, self.times).numpy()
                columns |= {f"survival_{time:g}": shares[:, k] for k, time in enumerate(self.times)}
            return columns
        columns = {f"probability_{name}": answers[:, k].numpy() for k, name in enumerate(names)}
        if isinstance(self.model.task, MultiLabel):
            there = (answers >= 0.5).tolist()
            return {
                "prediction": [
                    ";".join(n for n, yes in zip(names, row, strict=True) if yes) for row in there
                ]
            } | columns
        chosen = answers.argmax(1)
        if self.threshold is not None:
            chosen = (answers[:, 1] >= self.threshold).long()
        return {"prediction": np.array(names, dtype=object)[chosen.numpy()].tolist(), **columns}

    def _of_texts(self, x: Tensor, outputs: Tensor) -> dict[str, Any]:
        """Return how well the model predicts texts (b, L), given its outputs (b, L, K).

        `tokens` is the number of predicted tokens, all except the first; `loss` is the mean over
        them of -ln p; `perplexity` is exp of that. A text of one token has neither loss nor
        perplexity. `prediction` is the most probable next token, if the tokenizer can name it.
        """
        tokens, task = self.model.inputs, self.model.task
        assert isinstance(tokens, Tokens)
        y = x.masked_fill(x == tokens.pad, IGNORED)
        counted = task.units(y)
        assert counted is not None
        loss = task.loss(outputs, y).masked_fill(counted == 0, torch.nan)
        last = (tokens.lengths(x) - 1).clamp(min=0)
        following = texts.decode(outputs[torch.arange(len(x)), last].argmax(-1).tolist(), tokens)
        columns: dict[str, Any] = {
            "tokens": counted.numpy(),
            "loss": _gaps(loss),
            "perplexity": _gaps(loss.exp()),
        }
        if following is not None:
            columns["prediction"] = following
        return columns


def _gaps(values: Tensor) -> list[float | None]:
    """Return the numbers; None for NaN."""
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124  (NaN)


def check_mask_folder(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    folder = Path(out)
    if out == "-" or folder.suffix:
        raise UserError(
            "a segmentation gives a mask for each image: name a folder for them by -o FOLDER"
        )
    ours = _is_ours(folder)
    if folder.exists() and not (overwrite and ours):
        raise UserError(
            f"{folder} exists: choose another name{', or add --overwrite' if ours else ''}"
        )
    if not folder.absolute().parent.is_dir():
        raise UserError(f"cannot write {folder}: there is no folder {folder.parent}")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds only what `write` made."""
    try:
        with (folder / TABLE).open(newline="", encoding="utf-8") as file:
            listed = {row["mask"].removeprefix("'") for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return False
    return {path.name for path in folder.iterdir()} == {*listed, TABLE}


def write_masks(model: LoadedModel, batches: Iterable[Batch], out: Path) -> int:
    """Write a PNG for each image, with the numbers of the classes as pixels, and `masks.csv`;
    return how many.

    Masks have the size at which the model sees images. The table has `file`, `row`, `mask` (the
    name of the PNG), and `share_NAME`, the share of the pixels that belong to each class. The
    folder appears only when everything is done.
    """
    if len(model.classes) > _MOST:
        raise UserError(
            f"a mask as PNG has at most {_MOST} classes, but the model has {len(model.classes)}"
        )
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise disk_error(error, out) from None
    try:
        count = _write(model, batches, unfinished)
        if not count:
            raise UserError("these files hold no sample: nothing to predict")
        unfinished.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        unfinished.rename(out)
    except OSError as error:
        raise disk_error(error, out) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return count


def _write(model: LoadedModel, batches: Iterable[Batch], folder: Path) -> int:
    palette = _palette(len(model.classes))
    taken: dict[str, int] = {}
    count = 0
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(
            map(csv_cell, ["file", "row", "mask", *(f"share_{name}" for name in model.classes)])
        )
        for batch in batches:
            with torch.inference_mode():
                answers = model.task.answers(model.encoded(batch.x).float(), full=True)
            for name, row, answer in zip(batch.files, batch.rows, answers, strict=True):
                stem = Path(name).stem if row is None else f"{Path(name).stem}-{row}"
                taken[stem] = taken.get(stem, 0) + 1
                mask = f"{stem}.png" if taken[stem] == 1 else f"{stem}~{taken[stem]}.png"
                image = Image.fromarray(answer.to(torch.uint8).numpy(), "L")
                image.putpalette(palette)
                image.save(folder / mask)
                table.writerow(
                    map(csv_cell, [name, row, mask, *_shares(answer, len(model.classes))])
                )
                count += 1
    return count


def _shares(answer: Tensor, classes: int) -> list[float]:
    """Return the share of the pixels (H, W) of each class."""
    return (torch.bincount(answer.flatten(), minlength=classes) / answer.numel()).tolist()


def _palette(classes: int) -> list[int]:
    """Return red, green and blue of each class: black first, then colours around the colour
    circle.
    """
    colours = [colorsys.hsv_to_rgb(k / max(classes - 1, 1), 0.8, 1.0) for k in range(classes - 1)]
    return [0, 0, 0, *(round(255 * part) for colour in colours for part in colour)]


def predict(
    model: LoadedModel,
    source: Any,
    out: str = STDOUT,
    *,
    column: str = "",
    overwrite: bool = False,
    threshold: float | None = None,
    at: Sequence[float] = (),
    baseline: Baseline | None = None,
) -> int:
    """Write the model's prediction for each sample, and return their number; see
    `ekiden.predict`.
    """
    answers = _answers(model, threshold, at, baseline)
    if isinstance(model.task, Segmentation):
        check_mask_folder(out, overwrite)
        batches, _ = _batches(model, source, column)
        return write_masks(model, batches, Path(out))
    check_out(out, overwrite)
    batches, named = _batches(model, source, column)
    with written_whole(out) as write:
        return sum(write(_table(batch, answers, named)) for batch in batches)


def rows(
    model: LoadedModel,
    source: Any,
    *,
    column: str = "",
    threshold: float | None = None,
    at: Sequence[float] = (),
    baseline: Baseline | None = None,
) -> list[dict[str, Any]]:
    """Return the model's prediction for each sample, with the columns that `predict` writes;
    arguments as there.
    """
    if isinstance(model.task, Segmentation):
        raise UserError("a segmentation gives a mask for each image: name a folder for them, --out")
    answers = _answers(model, threshold, at, baseline)
    batches, named = _batches(model, source, column)
    return [row for batch in batches for row in _table(batch, answers, named).to_pylist()]


def _answers(
    model: LoadedModel,
    threshold: float | None,
    at: Sequence[float],
    baseline: Baseline | None = None,
) -> Answers:
    if threshold is None and model.recalibration:
        threshold = model.recalibration.threshold
    return Answers(model, threshold, at, baseline or model.baseline)


def is_frame(source: Any) -> bool:
    """Return whether samples are given as a frame or a dict of columns, and not as files."""
    return isinstance(source, dict) or frames.is_frame(source)


def _batches(
    model: LoadedModel, source: Any, column: str
) -> tuple[Iterator[Batch], tuple[str, ...]]:
    """Return the samples, and which columns name them."""
    reader = SampleReader(model.inputs, model.shape, column, _AT_ONCE.get(type(model.task), 256))
    if is_frame(source):
        return reader.read_frame(source), ("row",)
    found = reader.found(list(source))
    return reader.read(found), ("file", "row") if any(map(reader.holds_many, found)) else ("file",)


def check_out(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    if out == STDOUT:
        return
    file = Path(out)
    if file.suffix not in _FORMATS:
        raise UserError(
            f"{out} must end in .parquet or .csv, or be - for CSV to the standard output"
        )
    check_free(file, overwrite)


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse to write where something exists, or where nothing can be written."""
    if path.is_dir():
        raise UserError(f"{path} is a folder: choose another name")
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: choose another name, or add --overwrite")
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: {path.parent} is not writable")


def _table(batch: Batch, answers: Answers, named: Sequence[str]) -> Any:
    # `import ekiden` stays light
    import pyarrow as pa

    names = {"file": pa.array(batch.files, pa.string()), "row": pa.array(batch.rows, pa.int64())}
    return pa.table({name: names[name] for name in named} | answers(batch.x))


@contextmanager
def written_whole(out: str) -> Iterator[Callable[[Any], int]]:
    """Open a file for tables that are written one after the other. The file appears only when all
    are written.
    """
    folder = Path(tempfile.gettempdir()) if out == STDOUT else Path(out).parent
    unfinished = folder / f".{Path(out).name}.{os.getpid()}.tmp"
    writer: Any = None

    def write(table: Any) -> int:
        nonlocal writer
        import pyarrow.csv
        import pyarrow.parquet

        if not out.endswith(".parquet"):
            table = for_csv(table)
        if writer is None:
            kind = (
                pyarrow.parquet.ParquetWriter if out.endswith(".parquet") else pyarrow.csv.CSVWriter
            )
            writer = kind(str(unfinished), table.schema)
        writer.write_table(table)
        return int(table.num_rows)

    try:
        yield write
        if writer is None:
            raise UserError("these files hold no sample: nothing to predict")
        writer.close()
        if out == STDOUT:
            with open(unfinished, encoding="utf-8") as file:
                shutil.copyfileobj(file, sys.stdout)
        else:
            os.replace(unfinished, out)
    except OSError as error:
        if out == STDOUT:
            raise
        raise disk_error(error, Path(out)) from None
    finally:
        unfinished.unlink(missing_ok=True)
