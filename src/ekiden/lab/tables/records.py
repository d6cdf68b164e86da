"""Records: one small file that keeps the results of a sweep's finished runs when their folders are
gone.

The first line names the experiment file and the budget and has the file's text. Each further line
is a finished run.
"""

import contextlib
import glob
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, locked, read_text, write
from ekiden.core.engine.folder import check_config
from ekiden.runs.summary import COUNTED, Summary

_PATHS = frozenset({"data", "dataset", "silos", "model", "network", "pretrained", "tokenizer"})
"""settings and entries of `config.json` that may be paths"""


def portable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values in which absolute paths of data and networks are the names of their files
    or folders.
    """
    return {name: _portable(name, value) for name, value in values.items()}


def _portable(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return portable(value)
    if name in _PATHS and isinstance(value, list | tuple):
        return type(value)(_portable(name, each) for each in value)
    if name not in _PATHS or not isinstance(value, str):
        return value
    path = PurePath(value.removeprefix("hf:"))
    # the class of a network in a file keeps its path
    if not path.is_absolute() or ".py:" in value:
        return value
    if value.startswith("hf:"):
        return f"hf:{path.name}"
    return path.name


FORMAT = 2
SUFFIX = ".jsonl"
_HINT = "give a file that `ekiden sweep --records` made"
# only what the ledger prints about the machine
_ENVIRONMENT = ("python", "torch", "gpu")
_HEAD = {"file": str, "budget": str, "experiment": str}
_ROW = {"run": str, "config": dict, "environment": dict, "seconds": (int, float), "result": dict}
_RESULT = dict.fromkeys(("step", *COUNTED), (int, float))


@dataclass(frozen=True)
class Records:
    """The contents of a file of records."""

    file: str  # path of the experiment file, as given when the runs were made
    budget: str  # budget of all runs
    experiment: str  # text of the experiment file
    # the finished runs, by the names of their folders
    runs: Mapping[str, Summary] = field(default_factory=dict)


def read(path: Path) -> Records:
    """Read a file of records."""
    try:
        head, *lines = read_text(path).splitlines() or [""]
    except OSError as error:
        raise UserError(f"cannot read {path} ({error}): {_HINT}") from None
    about = _parsed(path, 1, head)
    if about.get("format", FORMAT) != FORMAT:
        wrote = "use the version of Ekiden that wrote it"
        raise UserError(
            f"{path} has format {about['format']}, but this version reads {FORMAT}: {wrote}"
        )
    _require(about, {"format": int, **_HEAD}, path, 1)
    runs = {}
    for number, line in enumerate(lines, 2):
        row = _parsed(path, number, line)
        _require(row, _ROW, path, number)
        _require(row["result"], _RESULT, path, number)
        try:
            config = check_config(row["config"], path)
        except UserError:
            raise _damaged(path, number) from None
        runs[row["run"]] = Summary(
            path, config, [row["result"]], row["seconds"], row["environment"], recorded=True
        )
    return Records(about["file"], about["budget"], about["experiment"], runs)


def prepare(path: Path) -> None:
    """Make the folder for a file of records."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK) or path.is_dir():
            raise UserError(f"cannot write {path}: give another file by --records")
    except OSError as error:
        raise disk_error(error, path) from None


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep others from adding to a file of records, so that what was read is still true when the
    file is written.
    """
    prepare(path)
    with locked(path.parent / ".lock"):
        with contextlib.suppress(OSError):
            # left by a process that was killed
            for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
                left.unlink(missing_ok=True)
        yield


def keep(path: Path, records: Records) -> None:
    """Write the records to a file, completely or not at all."""
    head = {
        "format": FORMAT,
        "file": records.file,
        "budget": records.budget,
        "experiment": records.experiment,
    }
    lines = [head, *(_line(name, records.runs[name]) for name in sorted(records.runs))]
    write(path, [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines])


def _line(name: str, run: Summary) -> dict[str, Any]:
    environment = {k: run.environment.get(k) for k in _ENVIRONMENT}
    given = {"run": name, "config": portable(run.config), "environment": environment}
    return given | {"seconds": run.seconds, "result": run.last}


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object in a line."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _damaged(path, number)
    return found


def _require(row: Mapping[str, Any], kinds: Mapping[str, Any], path: Path, number: int) -> None:
    """Refuse a line that lacks an entry or has one of another type."""
    if not all(isinstance(row.get(key), kind) for key, kind in kinds.items()):
        raise _damaged(path, number)


def _damaged(path: Path, number: int) -> UserError:
    return UserError(f"{path}, line {number} is damaged: {_HINT}")
