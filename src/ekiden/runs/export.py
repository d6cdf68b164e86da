"""Metrics of runs as one tidy table, for pandas and Polars, and as TensorBoard event files."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ekiden.base.errors import UserError
from ekiden.data.origin import said_in
from ekiden.results.result import flat
from ekiden.runs.summary import Summary, label


def table(runs: Sequence[Summary]) -> "pa.Table":
    """Make a table with a row for each run and step: columns that identify the run, then its metrics, empty if missing.

    Each element of a list gets its own column; for clients this is client_accuracy_NAME.
    """
    rows = [_identity(run) | flat(row, run.config["clients"]) for run in runs for row in run.metrics]
    if not rows:
        raise UserError("none of these runs has finished a step: let them run first")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def write(runs: Sequence[Summary], file: Path) -> int:
    """Write the table as Parquet or CSV, depending on the file's suffix, and return the number of rows."""
    if file.suffix not in (".parquet", ".csv"):
        raise UserError(f"{file} must end in .parquet or .csv")
    made = table(runs)
    unfinished = file.with_name(f"{file.name}.tmp")
    try:
        if file.suffix == ".csv":
            pyarrow.csv.write_csv(made, unfinished)
        else:
            pyarrow.parquet.write_table(made, unfinished)
        unfinished.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise UserError(f"cannot write {file} ({error.strerror or error}): choose another place") from None
    return int(made.num_rows)


def tensorboard(runs: Sequence[Summary], folder: Path) -> None:
    """Write the scalars of each run as event files, each run in its own folder."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  (an extra)
    except ImportError:
        raise UserError("event files need an extra: pip install 'ekiden[tensorboard]'") from None
    names = [run.folder.name for run in runs]
    places = [  # two sweeps may give runs of a cell the same name
        folder / name if names.count(name) == 1 else folder / run.folder.resolve().parent.name / name
        for run, name in zip(runs, names, strict=True)
    ]
    for place in places:
        if places.count(place) > 1:
            raise UserError(f"two of these runs would be written to {place}: write them to different folders")
        if any(place.glob("*")):
            raise UserError(f"{place} is not empty: give --tensorboard another folder")
    for run, place in zip(runs, places, strict=True):
        try:
            with SummaryWriter(str(place)) as writer:
                writer.add_text("run", label(run.config), 0)
                for row in run.metrics:
                    for name, value in flat(row, run.config["clients"]).items():
                        if name != "step":
                            writer.add_scalar(name, value, row["step"])
        except OSError as error:
            raise UserError(f"cannot write to {folder} ({error.strerror or error}): choose another place") from None


def _identity(run: Summary) -> dict[str, Any]:
    """Return the columns that identify a run."""
    config = run.config
    plan, swept = said_in(config), config.get("sweep", {})
    return {
        "run": str(run.folder),
        "method": config["method"],
        "data": config["dataset"],
        "partition": plan.get("partition"),
        "clients": len(config["clients"]),
        "model": config["model"],
        "seed": config["seed"],
        "settings": label(config),
        "row": swept.get("row"),
        "column": swept.get("column"),
        "budget": swept.get("budget"),
        "finished": run.finished,
    }
