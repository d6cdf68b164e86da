"""Records: one small file that keeps what a sweep's finished runs gave, for when their folders are gone.

The first line names the experiment file and the budget and holds the file's text, each further line a finished run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ekiden.core.files import write
from ekiden.errors import UserError
from ekiden.experiments.summary import Summary

FORMAT = 1
SUFFIX = ".jsonl"
_HINT = "give a file that `ekiden sweep --records` made"
_ENVIRONMENT = ("python", "torch", "gpu")  # of the machine no more than the ledger prints


@dataclass(frozen=True)
class Records:
    """What such a file holds.

    Attributes:
        file: path of the experiment file, as given when the runs were made.
        budget: of all runs.
        experiment: text of the experiment file.
        runs: the finished runs, by the names of their folders.
    """

    file: str
    budget: str
    experiment: str
    runs: Mapping[str, Summary] = field(default_factory=dict)


def read(path: Path) -> Records:
    """The records in a file.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        head, *lines = path.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path} ({error}): {_HINT}") from None
    about = _parsed(path, 1, head, ("format", "file", "budget", "experiment"))
    if about["format"] != FORMAT:
        raise UserError(f"{path} has format {about['format']}, this version reads {FORMAT}: use the Ekiden of it")
    runs = {}
    for number, line in enumerate(lines, 2):
        row = _parsed(path, number, line, ("run", "config", "environment", "seconds", "result"))
        runs[row["run"]] = Summary(
            path, row["config"], [row["result"]], row["seconds"], row["environment"], recorded=True
        )
    return Records(about["file"], about["budget"], about["experiment"], runs)


def keep(path: Path, records: Records) -> None:
    """Write the records to a file, as a whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    head = {"format": FORMAT, "file": records.file, "budget": records.budget, "experiment": records.experiment}
    lines = [head, *(_line(name, records.runs[name]) for name in sorted(records.runs))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines])


def _line(name: str, run: Summary) -> dict[str, Any]:
    environment = {k: run.environment.get(k) for k in _ENVIRONMENT}
    given = {"run": name, "config": run.config, "environment": environment}
    return given | {"seconds": run.seconds, "result": run.last}


def _parsed(path: Path, number: int, line: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """The object in a line, with these keys."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= set(keys):
        raise UserError(f"{path}, line {number} is damaged: {_HINT}")
    return found
