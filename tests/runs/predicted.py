"""What a run reported."""

from pathlib import Path

from ekiden.core.engine.folder import read_lines


def reported(folder: Path) -> float:
    return float(read_lines(folder / "metrics.jsonl")[-1]["accuracy"])
