"""Write a trained model's predictions for files: a table with a row per sample, for segmentation a folder of masks."""

import colorsys
import csv
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.files import disk_error
from ekiden.data import frames
from ekiden.data.kinds import Tokens, texts
from ekiden.data.tasks import Classification, LanguageModelling, MultiLabel, ScaledTask, Segmentation
from ekiden.data.tasks.base import IGNORED
from ekiden.results.regressions import Baseline, baseline_of
from ekiden.results.result import LoadedModel
from ekiden.serving.reading import Batch, SampleReader

TABLE = "masks.csv"
_MOST = 256  # most classes of a PNG with a palette
STDOUT = "-"
_FORMATS = (".parquet", ".csv")
_AT_ONCE = {LanguageModelling: 8, Segmentation: 16}  # samples per batch, because their outputs are large


@dataclass(frozen=True)
class Answers:
    """Run a model and name its outputs."""

    model: LoadedModel
    threshold: float | None = None  # of two classes, the probability from which on a sample is of the second one
    times: Sequence[float] = ()  # of times and events, at which survival is told
    baseline: Baseline | None = None  # the hazard from which it follows

    def __post_init__(self) -> None:
        if self.times:
            baseline_of(self.baseline, self.model.task).survival(torch.zeros(1, 1), self.times)  # refuse other times
        if self.threshold is None:
            return
        if not isinstance(self.model.task, Classification) or len(self.model.classes) != 2:
            raise UserError("a threshold is for two classes: leave out --threshold")
        if not 0 <= self.threshold <= 1:
            raise UserError(f"--threshold {self.threshold:g} is not a share: give a number from 0 to 1")

    def __call__(self, x: Tensor) -> dict[str, Any]:
        """Return columns for samples (b, ...).

        classification: `prediction`, the class by name (the most probable one, or by the threshold), and
        `probability_NAME` of each. multi-label: `prediction`, the
        labels with a probability of 1/2 or more, separated by semicolons, and `probability_NAME` of each. regression:
        `prediction`, in the unit of the targets, or `prediction_NAME` of each of several. survival: `prediction`, the
        logarithm of the relative hazard, and `survival_TIME`, the share that has not had the event at each of the
        times. language-modelling: see `_of_texts`.
        """
        with torch.inference_mode():
            outputs = self.model(x).float()
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
                "prediction": [";".join(n for n, yes in zip(names, row, strict=True) if yes) for row in there]
            } | columns
        chosen = answers.argmax(1) if self.threshold is None else (answers[:, 1] >= self.threshold).long()
        return {"prediction": np.array(names, dtype=object)[chosen.numpy()].tolist(), **columns}

    def _of_texts(self, x: Tensor, outputs: Tensor) -> dict[str, Any]:
        """Return how well the model predicts texts (b, L), given its outputs (b, L, K).

        `tokens` is the number of predicted tokens, all except the first; `loss` is the mean over them of -ln p;
        `perplexity` is exp of that. A text of one token has neither loss nor perplexity. `prediction` is the most
        probable next token, if the tokenizer can name it.
        """
        tokens, task = self.model.inputs, self.model.task
        assert isinstance(tokens, Tokens)
        y = x.masked_fill(x == tokens.pad, IGNORED)
        counted = task.units(y)
        assert counted is not None
        loss = task.loss(outputs, y).masked_fill(counted == 0, torch.nan)
        last = (tokens.lengths(x) - 1).clamp(min=0)
        following = texts.decode(outputs[torch.arange(len(x)), last].argmax(-1).tolist(), tokens)
        columns: dict[str, Any] = {"tokens": counted.numpy(), "loss": _gaps(loss), "perplexity": _gaps(loss.exp())}
        return columns | ({} if following is None else {"prediction": following})


def _gaps(values: Tensor) -> list[float | None]:
    """Return the numbers; None for NaN."""
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124  (NaN)


def check_mask_folder(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    folder = Path(out)
    if out == "-" or folder.suffix:
        raise UserError("a segmentation gives a mask for each image: name a folder for them by -o FOLDER")
    ours = _is_ours(folder)
    if folder.exists() and not (overwrite and ours):
        raise UserError(f"{folder} exists: choose another name{', or add --overwrite' if ours else ''}")
    if not folder.absolute().parent.is_dir():
        raise UserError(f"cannot write {folder}: there is no folder {folder.parent}")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds only what `write` made."""
    try:
        with (folder / TABLE).open(newline="", encoding="utf-8") as file:
            listed = {row["mask"] for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return False
    return {path.name for path in folder.iterdir()} == {*listed, TABLE}


def write_masks(model: LoadedModel, batches: Iterable[Batch], out: Path) -> int:
    """Write a PNG for each image, with the numbers of the classes as pixels, and `masks.csv`; return how many.

    Masks have the size at which the model sees images. The table has `file`, `row`, `mask` (the name of the PNG), and
    `share_NAME`, the share of the pixels that belong to each class. The folder appears only when everything is done.
    """
    if len(model.classes) > _MOST:
        raise UserError(f"a mask as PNG has at most {_MOST} classes, but the model has {len(model.classes)}")
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
        table.writerow(["file", "row", "mask", *(f"share_{name}" for name in model.classes)])
        for batch in batches:
            with torch.inference_mode():
                answers = model.task.answers(model(batch.x).float(), full=True)
            for name, row, answer in zip(batch.files, batch.rows, answers, strict=True):
                stem = Path(name).stem if row is None else f"{Path(name).stem}-{row}"
                taken[stem] = taken.get(stem, 0) + 1
                mask = f"{stem}.png" if taken[stem] == 1 else f"{stem}~{taken[stem]}.png"
                image = Image.fromarray(answer.to(torch.uint8).numpy(), "L")
                image.putpalette(palette)
                image.save(folder / mask)
                table.writerow([name, "" if row is None else row, mask, *_shares(answer, len(model.classes))])
                count += 1
    return count


def _shares(answer: Tensor, classes: int) -> list[float]:
    """Return the share of the pixels (H, W) of each class."""
    return (torch.bincount(answer.flatten(), minlength=classes) / answer.numel()).tolist()


def _palette(classes: int) -> list[int]:
    """Return red, green and blue of each class: black first, then colours around the colour circle."""
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
    """Write the model's prediction for each sample, and return their number; see `ekiden.predict`."""
    answers = _answers(model, threshold, at, baseline)
    if isinstance(model.task, Segmentation):
        check_mask_folder(out, overwrite)
        batches, _ = _batches(model, source, column)
        return write_masks(model, batches, Path(out))
    check_out(out, overwrite)
    batches, named = _batches(model, source, column)
    with _writer(out) as write:
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
    """Return the model's prediction for each sample, with the columns that `predict` writes; arguments as there."""
    if isinstance(model.task, Segmentation):
        raise UserError("a segmentation gives a mask for each image: name a folder for them, --out")
    answers = _answers(model, threshold, at, baseline)
    batches, named = _batches(model, source, column)
    return [row for batch in batches for row in _table(batch, answers, named).to_pylist()]


def _answers(
    model: LoadedModel, threshold: float | None, at: Sequence[float], baseline: Baseline | None = None
) -> Answers:
    chosen = model.recalibration.threshold if model.recalibration else None
    return Answers(model, chosen if threshold is None else threshold, at, baseline or model.baseline)


def is_frame(source: Any) -> bool:
    """Return whether samples are given as a frame or a dict of columns, and not as files."""
    return isinstance(source, dict) or frames.is_frame(source)


def _batches(model: LoadedModel, source: Any, column: str) -> tuple[Iterator[Batch], tuple[str, ...]]:
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
        raise UserError(f"{out} must end in .parquet or .csv, or be - for CSV to the standard output")
    check_free(file, overwrite)


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse to write where something exists, or where nothing can be written."""
    if path.exists() and (not overwrite or path.is_dir()):
        what = "is a folder" if path.is_dir() else "exists"
        raise UserError(f"{path} {what}: choose another name" + ("" if path.is_dir() else ", or add --overwrite"))
    if not path.parent.is_dir():
        raise UserError(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"cannot write {path}: {path.parent} is not writable")


def _table(batch: Batch, answers: Answers, named: Sequence[str]) -> Any:
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)

    names = {"file": pa.array(batch.files, pa.string()), "row": pa.array(batch.rows, pa.int64())}
    return pa.table({name: names[name] for name in named} | answers(batch.x))


@contextmanager
def _writer(out: str) -> Iterator[Any]:
    """Open a file for tables that are written one after the other. The file appears only when all are written."""
    folder = Path(tempfile.gettempdir()) if out == STDOUT else Path(out).parent
    unfinished = folder / f".{Path(out).name}.{os.getpid()}.tmp"
    writer: Any = None

    def write(table: Any) -> int:
        nonlocal writer
        import pyarrow.csv  # noqa: PLC0415
        import pyarrow.parquet  # noqa: PLC0415

        if writer is None:
            kind = pyarrow.parquet.ParquetWriter if out.endswith(".parquet") else pyarrow.csv.CSVWriter
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
