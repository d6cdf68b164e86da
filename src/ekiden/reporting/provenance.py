"""List the command and the machine of each run."""

import shlex
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.engine.folder import read_lines
from ekiden.engine.method import Method
from ekiden.reporting.runs import Found
from ekiden.reporting.tables import PlainTable
from ekiden.runs.plan import Plan, stored
from ekiden.runs.summary import Summary, duration


def commands(found: Found) -> PlainTable:
    """Return one row per run: the command that repeats it, and the command that was typed."""
    rows = []
    for group in found.groups:
        for run in group.runs:
            typed = dict.fromkeys(_typed(row.get("command")) for row in _lines(run.folder / "attempts.jsonl"))
            cells = [group.name, str(run.config["seed"]), str(run.folder), _repeat(run), "; ".join(typed)]
            rows.append([*cells, duration(run.seconds)])
    note = "The command that repeats a run alone, bit for bit on the same kind of machine; and what was typed."
    header = ["method", "seed", "folder", "repeat it by", "typed", "time"]
    return PlainTable("commands", "Commands", note, header, rows, texts=frozenset({2, 3, 4}))


def environments(found: Found) -> PlainTable:
    """Return one row for each kind of machine and software, with the runs made there."""
    made: dict[tuple[str, ...], list[str]] = {}
    for group in found.groups:
        for run in group.runs:
            made.setdefault(_environment(run), []).append(f"{group.name} (seed {run.config['seed']})")
    rows = [[*environment, ", ".join(runs)] for environment, runs in made.items()]
    header = ["Ekiden", "Python", "torch", "platform", "cores", "GPU", "runs"]
    return PlainTable(
        "environments", "Environments", "What the runs were made on.", header, rows, texts=frozenset({3, 5, 6})
    )


def command(plan: Plan[Method]) -> str:
    """Return `ekiden run ...` with every flag that differs from its default."""
    words = ["ekiden", "run", plan.method.title()]
    parts: tuple[Any, ...] = (plan, plan.method, plan.training, plan.hardware)
    for part in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if field.name not in ("method", "training", "hardware") and value != _default(field):
                words += _flag(field.name.replace("_", "-"), value)
    return shlex.join(words)


def _repeat(run: Summary) -> str:
    try:
        return command(stored(run.folder))
    except UserError:
        return "between machines" if run.config.get("on") else "from Python, with data of its own"


def _typed(argv: Any) -> str:
    """Return the command that was typed, without the path of the installed program."""
    if not isinstance(argv, list) or not argv:
        return ""
    program, *rest = map(str, argv)
    name = Path(program).name
    return shlex.join(["ekiden" if name == "cli.py" else name, *rest])


def _lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, or nothing if it is damaged."""
    try:
        return [row for row in read_lines(file) if isinstance(row, dict)]
    except UserError:
        return []


def _environment(run: Summary) -> tuple[str, ...]:
    values = (run.environment.get(key) for key in ("python", "torch", "platform", "cores", "gpu"))
    return (str(run.config.get("ekiden", "")), *("–" if value is None else str(value) for value in values))


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else MISSING


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, (tuple, list)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]
