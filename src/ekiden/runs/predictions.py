"""Read files for a trained model, in batches, and write its predictions: a table or masks."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.clinic.regressions import Baseline, baseline_of
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, for_csv
from ekiden.core.data.samples import said_in
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    ScaledTask,
    Segmentation,
)
from ekiden.core.tasks.base import IGNORED
from ekiden.readers import frames
from ekiden.readers.kinds import Images, Tokens, texts
from ekiden.readers.sources import NAMED
from ekiden.runs.batches import Batch, SampleReader
from ekiden.runs.loaded_model import LoadedModel
from ekiden.runs.masks import check_mask_folder, write_masks


def column_in(config: Mapping[str, Any]) -> str:
    """Return the column with images, texts or arrays in the run's own tables; "" if the run's plan
    does not name it.
    """
    reading = said_in(config).get("reading", {})
    known = NAMED.get(config["dataset"])
    features = reading.get("feature_columns", ())
    if reading.get("sample_kind") and len(features) == 1:
        return str(features[0])
    for kind in ("image", "text", "array"):
        if column := reading.get(f"{kind}_column"):
            return str(column)
    if known and known.columns.image != Images.column:
        return known.columns.image
    return ""


STDOUT = "-"


def _parquet_writer(file: str, schema: Any) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetWriter(file, schema)


def _csv_writer(file: str, schema: Any) -> Any:
    import pyarrow.csv

    return pyarrow.csv.CSVWriter(file, schema)


TABLES = {".parquet": _parquet_writer, ".csv": _csv_writer}
"""what writes tables of a schema into a file, by the file's suffix"""
# samples per batch, because their outputs are large
_AT_ONCE = {LanguageModelling: 8, Segmentation: 16}


@dataclass(frozen=True)
class Answers:
    """Run a model and name its outputs."""

    model: LoadedModel
    # of two classes, the probability from which on a sample is of the second one; by default that
    # of the model's recalibration
    threshold: float | None = None
    times: Sequence[float] = ()  # of times and events, at which survival is told
    # the hazard from which it follows; by default the model's own
    baseline: Baseline | None = None

    def __post_init__(self) -> None:
        """Take the model's own threshold and hazard, and refuse what its task has not."""
        if self.threshold is None and self.model.recalibration:
            object.__setattr__(self, "threshold", self.model.recalibration.threshold)
        object.__setattr__(self, "baseline", self.baseline or self.model.baseline)
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
            form = "prediction_{}"
            if len(names) == 1:
                form = "prediction"
            columns = _columns(form, names, answers)
            if self.times and self.baseline is not None:
                shares = self.baseline.survival(answers, self.times)
                columns |= _columns("survival_{:g}", self.times, shares)
            return columns
        columns = _columns("probability_{}", names, answers)
        if isinstance(self.model.task, MultiLabel):
            there = [";".join(compress(names, row)) for row in (answers >= 0.5).tolist()]
            return {"prediction": there, **columns}
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
        tokens = self.model.inputs
        task = self.model.task
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


def _columns(form: str, names: Sequence[object], values: Tensor) -> dict[str, Any]:
    """Return values (b, K) as columns with names of this form."""
    return dict(zip(map(form.format, names), values.T.numpy(), strict=True))


def _gaps(values: Tensor) -> list[float | None]:
    """Return the numbers; None for NaN."""
    return [None if value != value else value for value in values.tolist()]  # noqa: PLR0124  (NaN)


def predict(
    answers: Answers, source: Any, out: str = STDOUT, *, column: str = "", overwrite: bool = False
) -> int:
    """Write a model's answers for each sample, and return their number; see `ekiden.predict`."""
    model = answers.model
    if isinstance(model.task, Segmentation):
        check_mask_folder(out, overwrite)
        batches, _ = _batches(model, source, column)
        return write_masks(model, batches, Path(out))
    check_out(out, overwrite)
    with written_whole(out) as write:
        return sum(map(write, _tables(answers, source, column)))


def rows(answers: Answers, source: Any, *, column: str = "") -> list[dict[str, Any]]:
    """Return a model's answer for each sample, with the columns that `predict` writes."""
    if isinstance(answers.model.task, Segmentation):
        raise UserError("a segmentation gives a mask for each image: name a folder for them, --out")
    found = list[dict[str, Any]]()
    for table in _tables(answers, source, column):
        found += table.to_pylist()
    return found


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
    if any(map(reader.holds_many, found)):
        return reader.read(found), ("file", "row")
    return reader.read(found), ("file",)


def _tables(answers: Answers, source: Any, column: str) -> Iterator[Any]:
    """Yield the answers as Arrow tables, one for each batch."""
    # `import ekiden` stays light
    import pyarrow as pa

    batches, named = _batches(answers.model, source, column)
    for batch in batches:
        names = {
            "file": pa.array(batch.files, pa.string()),
            "row": pa.array(batch.rows, pa.int64()),
        }
        yield pa.table({name: names[name] for name in named} | answers(batch.x))


def check_out(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    if out == STDOUT:
        return
    file = Path(out)
    if file.suffix not in TABLES:
        raise UserError(
            f"{out} must end in {' or '.join(TABLES)}, or be - for CSV to the standard output"
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


@contextmanager
def written_whole(out: str) -> Iterator[Callable[[Any], int]]:
    """Open a file for tables that are written one after the other. The file appears only when all
    are written.
    """
    folder = tempfile.gettempdir() if out == STDOUT else Path(out).parent
    suffix = ".csv" if out == STDOUT else Path(out).suffix
    writer: Any = None

    def write(table: Any) -> int:
        nonlocal writer
        if suffix == ".csv":
            table = for_csv(table)
        if writer is None:
            writer = TABLES[suffix](str(unfinished), table.schema)
        writer.write_table(table)
        return int(table.num_rows)

    try:
        with tempfile.TemporaryDirectory(prefix=".ekiden-", dir=folder) as place:
            unfinished = Path(place) / "table"
            yield write
            writer.close()
            if out != STDOUT:
                os.replace(unfinished, out)
                return
            with open(unfinished, encoding="utf-8") as file:
                shutil.copyfileobj(file, sys.stdout)
    except OSError as error:
        if out == STDOUT:
            raise
        raise disk_error(error, Path(out)) from None
