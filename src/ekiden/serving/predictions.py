"""Write a trained model's predictions for files, one row per sample."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.files import disk_error
from ekiden.data.tasks import LanguageModelling, Segmentation
from ekiden.results.model import LoadedModel
from ekiden.serving import masks
from ekiden.serving.answers import Answers
from ekiden.serving.reading import Batch, SampleReader

STDOUT = "-"
_FORMATS = (".parquet", ".csv")
_AT_ONCE = {LanguageModelling: 8, Segmentation: 16}  # samples per batch, because their outputs are large


def predict(
    model: LoadedModel, files: Iterable[Path], out: str = STDOUT, *, column: str = "", overwrite: bool = False
) -> int:
    """Write the model's prediction for each sample.

    The columns are `file`; `row`, if a file holds several samples; `prediction`, the name of the class, and
    `probability_NAME` for each class. `Answers` describes those of other tasks. Segmentation writes a folder of masks;
    see `masks`. If a sample cannot be read, nothing is written.

    Args:
        model: from `ekiden.load_model`.
        files: images, folders of images, Parquet or CSV files, arrays, as the model takes them.
        out: a .parquet or .csv file; "-" for CSV to the standard output; for segmentation a folder.
        column: the column of tables with the images or texts; in files with several arrays, the array of samples.
        overwrite: whether a file of this name is replaced.

    Returns:
        The number of samples.

    Raises:
        UserError: a file is broken or does not fit the model, or the output cannot be written.
    """
    reader = SampleReader(model.inputs, model.shape, column, _AT_ONCE.get(type(model.task), 256))
    if isinstance(model.task, Segmentation):
        masks.check_out(out, overwrite)
        return masks.write(model, reader.read(reader.found(list(files))), Path(out))
    check_out(out, overwrite)
    found = reader.found(list(files))
    answers = Answers(model)
    numbered = any(reader.holds_many(file) for file in found)
    with _writer(out) as write:
        return sum(write(_table(batch, answers, numbered)) for batch in reader.read(found))


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


def _table(batch: Batch, answers: Answers, numbered: bool) -> Any:
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)

    names = {"file": pa.array(batch.files, pa.string())}
    if numbered:
        names["row"] = pa.array(batch.rows, pa.int64())
    return pa.table(names | answers(batch.x))


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
