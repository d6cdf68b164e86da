"""Sweeps: the runs of an experiment file, each in its own folder, so that a sweep can be stopped
and continued.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import read_regular, write
from ekiden.core.engine.method import Method
from ekiden.lab.launch import LaunchedRun, RunEnd
from ekiden.lab.tables import experiment, records
from ekiden.lab.tables.experiment import PAPER, Cell, Experiment
from ekiden.lab.tables.records import Records, portable
from ekiden.readers.sources import located
from ekiden.runs.plan import Plan, plan_in, stored
from ekiden.runs.summary import Summary, summarise


@dataclass(frozen=True)
class Standing:
    """The state of a run of a sweep; all fields are empty before the run has begun."""

    result: Summary | None = None  # the run's numbers, if it is finished and counts
    changed: tuple[str, ...] = ()  # settings that differ from those in the file, as text
    damage: str = ""  # why it cannot be read; empty if it can

    @property
    def why(self) -> str:
        """Say why an existing run does not count; empty if it counts, or may count once it is
        finished.
        """
        if self.changed:
            return f"its settings have changed: {'; '.join(self.changed[:3])}"
        return self.damage


def standing(read: Callable[[], Summary], wanted: Plan[Method]) -> Standing:
    """Return the state of a run, as far as it can be read."""
    try:
        run = read()
        if changed := _differ(written(run), wanted):
            return Standing(changed=changed)
        return Standing(run if run.finished else None)
    except UserError as error:
        return Standing(damage=str(error))


def written(run: Summary) -> Plan[Method]:
    """Return the plan of a run, with the data as its experiment file names them: a path there may
    be relative.
    """
    plan = plan_in(run.config, run.folder)
    named = cell_of(run.config).get("data")
    if not isinstance(named, str):
        return plan
    return replace(plan, data=named)


def cell_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the cell that a run was made for, as its sweep noted it; nothing for other runs."""
    noted = config.get("sweep")
    if not isinstance(noted, dict):
        return {}
    return noted


def _differ(found: Plan[Method], wanted: Plan[Method]) -> tuple[str, ...]:
    """Return the settings that differ, as text; of the hardware only those that change results
    beyond rounding.
    """
    if found == wanted:
        return ()
    there = flat(found)
    here = flat(wanted)
    told = []
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            told.append(f"{name} is {there.get(name)} there, {here.get(name)} in the file")
    return tuple(told)


def flat(plan: Plan[Method]) -> dict[str, Any]:
    """Return what decides the results of a plan, by setting. Paths are reduced to names, see
    `portable`.
    """
    values: dict[str, Any] = portable(plan.to_json())
    values |= values.pop("recipe")
    model = values["model"]
    # without its folder, a path looks like a hub's name
    if model.startswith("hf:"):
        values["model"] = f"hf:{model.removeprefix('hf:').rpartition('/')[2]}"
    values["precision"] = values.pop("hardware")["precision"]
    values |= values.pop("training")
    return values | dict(values.pop("hyperparameters"))


def select(found: Experiment, only: Sequence[str], without: Sequence[str] = ()) -> tuple[Cell, ...]:
    """Return the cells that `only` names (all if it is empty), except those that `without` names.

    Each is ROW, COLUMN or ROW/COLUMN, where ROW and COLUMN are labels or parts of labels.
    """
    labels = {*found.rows, *found.columns}

    def named(texts: Sequence[str]) -> set[str]:
        slugs = set[str]()
        for text in map(str.strip, texts):
            row, slash, column = text.partition("/")
            if slash and text not in labels:
                rows = _meant(row, found.rows)
                columns = _meant(column, found.columns)
                here = {c.slug for c in found.cells if c.row in rows and c.column in columns}
            else:
                meant = _meant(text, labels)
                here = {c.slug for c in found.cells if meant & {c.row, c.column}}
            if not here:
                raise unknown("cell", text, labels)
            slugs |= here
        return slugs

    kept = {cell.slug for cell in found.cells}
    if only:
        kept = named(only)
    kept -= named(without)
    if not kept:
        raise UserError("--without leaves no cell: name fewer")
    return tuple(cell for cell in found.cells if cell.slug in kept)


def _meant(text: str, labels: Collection[str]) -> Set[str]:
    """Return the labels that are meant: an exact match wins over whole words, and whole words over
    parts of words.
    """
    text = text.strip()
    if text in labels:
        return {text}
    part = re.escape(text)
    for pattern in (rf"(?<!\w){part}(?!\w)", part):
        if found := {one for one in labels if re.search(pattern, one, re.IGNORECASE)}:
            return found
    return set()


FORMAT = 1
MARK = "sweep.json"
COPY = "experiment.toml"
"""Other files in a sweep folder: the experiment file's name and budget, and a copy of the file."""
OWN = (MARK, COPY)


@dataclass(frozen=True)
class SweepRun:
    """One cell with one seed."""

    cell: Cell
    seed: int
    folder: Path  # the run folder
    record: Summary | None = None  # the recorded result, if there is one

    @property
    def plan(self) -> Plan[Method]:
        """What to run."""
        assert self.cell.plan is not None
        return replace(self.cell.plan, recipe=replace(self.cell.plan.recipe, seed=self.seed))

    @property
    def begun(self) -> bool:
        """Whether the folder holds a run."""
        return (self.folder / "config.json").exists()

    @property
    def state(self) -> Standing:
        """The state of the run, from its folder or else from its record."""
        found = Standing()
        if self.begun:
            found = standing(lambda: summarise(self.folder), self.plan)
        if (record := self.record) and not found.result:
            kept = standing(lambda: record, self.plan)
            # what is wrong with the folder is said first
            if kept.result or not self.begun:
                return kept
        return found

    @property
    def result(self) -> Summary | None:
        """The result; None before the run is finished, or if it does not count."""
        return self.state.result

    @property
    def finished(self) -> bool:
        """Whether this run has a result that counts."""
        return self.result is not None


@dataclass(frozen=True)
class Sweep:
    """An experiment and the folder of its runs."""

    experiment: Experiment  # the experiment, at one of its budgets
    # the folder of its runs; for a file of records that file, so that there are no run folders
    folder: Path
    file: str  # path of the experiment file, as given
    # results of finished runs whose folders may be gone, by the names of these folders
    records: Mapping[str, Summary] = field(default_factory=dict)

    def runs(self, cells: Iterable[Cell] | None = None) -> tuple[SweepRun, ...]:
        """Return all runs that can be made, or those of some cells: every cell with one seed, then
        with the next.
        """
        found = []
        for seed, cell in product(self.experiment.seeds, cells or self.experiment.cells):
            if cell.plan is not None:
                name = f"{cell.slug}--seed{seed}"
                found.append(SweepRun(cell, seed, self.folder / name, self.records.get(name)))
        return tuple(found)

    @property
    def command(self) -> str:
        """The command that runs the sweep."""
        words = ["ekiden", "sweep", self.file]
        if self.experiment.budget != PAPER:
            words += ["--budget", self.experiment.budget]
        return shlex.join(words)


def plan_sweep(
    file: Path,
    budget: str,
    out: Path | None,
    recorded: Path | None = None,
    reuse: Sequence[Path] = (),
) -> Sweep:
    """Make the sweep over a file; nothing is written."""
    found = experiment.read(file, budget)
    name = file.stem
    if budget != PAPER:
        name += f"-{budget}"
    known = _known(recorded, file.stem, budget)
    sweep = Sweep(found, out or Path("runs") / name, _short(file), known.runs if known else {})
    if (sweep.folder / MARK).exists():
        mark = _mark(sweep.folder)
        if (Path(mark["file"]).stem, mark["budget"]) != (file.stem, budget):
            raise UserError(
                f"{sweep.folder} holds {mark['file']} at budget {mark['budget']}: give another "
                "folder by --out"
            )
    elif sweep.folder.exists() and (not sweep.folder.is_dir() or any(sweep.folder.iterdir())):
        raise UserError(
            f"{sweep.folder} is not empty and not a sweep folder: choose another one by --out"
        )
    if not reuse:
        return sweep
    return replace(sweep, records={**_reused(sweep, reuse), **sweep.records})


def _reused(sweep: Sweep, paths: Sequence[Path]) -> dict[str, Summary]:
    """Return finished runs of other experiments that this one would repeat bit for bit, by this
    one's folder names.
    """
    found = {}
    for done in summaries(paths):
        if done.finished:
            found[json.dumps(flat(written(done)), sort_keys=True)] = done
    reused = {}
    for run in sweep.runs():
        if same := found.get(json.dumps(flat(run.plan), sort_keys=True)):
            made_for = cell_of(same.config)
            about = _about(sweep, run)
            about["of"] = str(made_for.get("of") or made_for.get("experiment", ""))
            config = same.config | {"sweep": about}
            reused[run.folder.name] = replace(same, config=config, recorded=True)
    return reused


def opened(folder: Path) -> Sweep:
    """Read the sweep in a folder or a file of records, from the copy of its experiment file
    there.
    """
    if _is_records(folder):
        kept = records.read(folder)
        found = experiment.parsed(kept.experiment, Path(kept.file).stem, kept.budget, str(folder))
        return Sweep(found, folder, kept.file, kept.runs)
    if not (folder / MARK).exists():
        raise UserError(
            f"{folder} is not a sweep folder (it has no {MARK}): give a folder that `ekiden sweep` "
            "made"
        )
    mark = _mark(folder)
    copy = folder / COPY
    name = Path(mark["file"]).stem
    found = experiment.parsed(_content(copy), name, mark["budget"], str(copy))
    return Sweep(found, folder, mark["file"])


def jobs(sweep: Sweep, runs: Sequence[SweepRun], device: str = "") -> list[LaunchedRun]:
    """Return the runs that are left to do and can be read. Runs that have begun keep their
    settings.
    """
    changed = []
    left = []
    for run in runs:
        state = run.state
        if state.changed:
            changed.append((run, state.changed))
        elif not state.result and not state.damage:
            left.append(run)
    if changed:
        run, different = changed[0]
        more = ""
        if len(changed) > 1:
            more = f" (and {len(changed) - 1} other runs)"
        where = f"{run.folder} was run"
        hint = "that folder to run it again, or give another one for the sweep by --out"
        if not run.begun:
            where = f"{run.folder.name} was recorded"
            hint = "its line in the records to run it again, or give another file by --records"
        raise UserError(
            f"{sweep.file} has changed since {where}{more}: {'; '.join(different[:3])}. Delete "
            f"{hint}"
        )
    return [_job(sweep, run, device) for run in left]


def damaged(runs: Iterable[SweepRun]) -> list[tuple[SweepRun, str]]:
    """Return the runs that cannot be read, and so cannot be run, with the reasons."""
    return [(run, why) for run in runs if (why := run.state.damage)]


def begin(sweep: Sweep, content: str) -> None:
    """Make the sweep folder, with a copy of the file in it."""
    mark = {"format": FORMAT, "file": sweep.file, "budget": sweep.experiment.budget}
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot make {sweep.folder} ({error.strerror}): give another folder by --out"
        ) from None
    # first, because it marks the folder as a sweep's
    write(sweep.folder / MARK, [json.dumps(mark).encode()])
    write(sweep.folder / COPY, [content.encode()])


def keep_records(sweep: Sweep, content: str | None, path: Path, runs: Iterable[SweepRun]) -> int:
    """Add finished runs to a file of records, to which other sweeps may also add.

    Args:
        sweep: the sweep of the runs.
        content: text of the experiment file when the sweep begins; None later, which keeps the text
            in the file, since another sweep may have begun with a longer one.
        path: the file of records.
        runs: the runs to add.

    Returns:
        The number of runs in the file.
    """
    now = {}
    for run in runs:
        if run.begun and (found := run.result):
            now[run.folder.name] = found
    with records.held(path):
        there = _known(path, Path(sweep.file).stem, sweep.experiment.budget)
        kept = dict(sweep.records)
        if there:
            kept |= there.runs
            content = content or there.experiment
        content = content or _content(sweep.folder / COPY)
        records.keep(path, Records(sweep.file, sweep.experiment.budget, content, kept | now))
    return len(kept | now)


class SweepOutcomes:
    """Keeps how the runs of a sweep end: why they failed, and records of those that are
    finished.
    """

    def __init__(self, sweep: Sweep, content: str, file: Path | None) -> None:
        """Make the sweep folder, and record the runs that are finished."""
        # why runs failed, by the names of their folders
        self.failed: dict[str, str] = {}
        # runs on which another process is working
        self.elsewhere: list[SweepRun] = []
        self._sweep = sweep
        self._file = file
        self._unkept = list(sweep.runs())
        if file:
            records.prepare(file)
        begin(sweep, content)
        self._keep(content)

    def add(self, run: SweepRun, outcome: RunEnd) -> None:
        """Save how a run ended. If this fails, the other runs go on, and `end` tries again."""
        if outcome.elsewhere:
            self.elsewhere.append(run)
            return
        if outcome.error:
            self.failed[run.folder.name] = outcome.error
        self._unkept.append(run)
        with contextlib.suppress(UserError):
            self._keep()

    def end(self) -> None:
        """Save what could not be saved before."""
        if self._unkept:
            self._keep()

    def _keep(self, content: str | None = None) -> None:
        if self._file:
            keep_records(self._sweep, content, self._file, self._unkept)
        self._unkept.clear()


def expand(paths: Iterable[Path]) -> list[Path]:
    """Return run folders, from run folders, sweep folders and folders that hold them."""
    found: list[Path] = []
    for path in paths:
        refuse_records(path)
        if (path / MARK).exists():
            found += [run.folder for run in opened(path).runs() if run.begun]
        elif path.name not in OWN:  # a pattern such as runs/sweep/* also matches these files
            found += runs_in(path) or [path]
    return found


def runs_in(path: Path) -> list[Path]:
    """Return the run folders at or below a path, in the order of their names; not what lies in a
    run folder.
    """
    if (path / "config.json").exists():
        return [path]
    found: list[Path] = []
    for folder in sorted(file.parent for file in path.rglob("config.json")):
        if not found or found[-1] not in folder.parents:
            found.append(folder)
    return found


def summaries(paths: Iterable[Path]) -> list[Summary]:
    """Return the summaries of run folders, sweep folders, folders that hold them, and files of
    records.
    """
    found: list[Summary] = []
    for path in paths:
        if _is_records(path):
            found += filter(None, (run.result for run in opened(path).runs()))
        else:
            found += map(summarise, expand([path]))
    return found


def refuse_records(path: Path) -> None:
    """Refuse a file of records if run folders are needed, and say what such a file is for."""
    if _is_records(path) and path.exists():
        raise UserError(
            f"{path} holds records, not steps or models: give the folders of the runs, or use "
            f"`ekiden results {path}`"
        )


def _job(sweep: Sweep, run: SweepRun, device: str) -> LaunchedRun:
    about = {"sweep": _about(sweep, run)}
    data = located(run.plan.data)
    if run.begun:
        return LaunchedRun(stored(run.folder), run.folder, about, data=data)
    plan = replace(run.plan, data=data)
    if device:
        plan = replace(plan, hardware=replace(plan.hardware, device=device))
    return LaunchedRun(plan, run.folder, about)


def _about(sweep: Sweep, run: SweepRun) -> dict[str, Any]:
    """Return the table that a run is made for."""
    return {
        "experiment": sweep.experiment.name,
        "row": run.cell.row,
        "column": run.cell.column,
        "metric": run.cell.metric,
        "budget": sweep.experiment.budget,
        "scaled": list(map(asdict, run.cell.scaled)),
        "data": run.plan.data,
    }


def _mark(folder: Path) -> dict[str, str]:
    try:
        mark = json.loads(read_regular(folder / MARK))
        if mark["format"] == FORMAT:
            return {"file": str(mark["file"]), "budget": str(mark["budget"])}
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UserError(
        f"{folder / MARK} is damaged or of another version: run the sweep again with another --out"
    )


def _is_records(path: Path) -> bool:
    return path.suffix == records.SUFFIX and not path.is_dir()


def _known(path: Path | None, name: str, budget: str) -> Records | None:
    """Return the records in a file, None if it does not exist yet."""
    if path is None:
        return None
    if path.suffix != records.SUFFIX:
        raise UserError(f"--records {path} must end in {records.SUFFIX}")
    if not path.exists():
        return None
    kept = records.read(path)
    if (Path(kept.file).stem, kept.budget) != (name, budget):
        raise UserError(
            f"{path} keeps {kept.file} at budget {kept.budget}: give another file by --records"
        )
    return kept


def _short(file: Path) -> str:
    """Return a path relative to the current folder, if it is below that."""
    whole = file.absolute()
    here = Path.cwd()
    if whole.is_relative_to(here):
        return str(whole.relative_to(here))
    return str(file)


def _content(path: Path) -> str:
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read {path} ({error}): run the sweep again, which rewrites it"
        ) from None
