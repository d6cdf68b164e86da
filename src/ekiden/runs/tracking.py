"""What shows a run while it computes: bars in Python, and trackers, programs that draw its metrics.

Trackers get each row, and cannot end a run.
"""

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError, first_line, unknown
from ekiden.core.base.files import is_held, path_of, write
from ekiden.core.data.samples import said_in
from ekiden.core.engine.drive import Row
from ekiden.core.engine.folder import read_config, read_lines
from ekiden.core.tasks import Metric
from ekiden.runs.config import flat

# (text, done): what is shown behind the bar, and how many parts are done
Advance = Callable[[str, int], None]
log = logging.getLogger("ekiden")
Config = Mapping[str, Any]
# seconds between two lines of progress where no bar can be drawn
BETWEEN_LINES = 30.0


def bars(console: Console, *, transient: bool = False) -> Progress:
    """Return a display of bars with a name, a count, the time, and a text."""
    return Progress(
        # paths may hold square brackets
        TextColumn("{task.fields[name]}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim", markup=False),
        console=console,
        transient=transient,
    )


@contextmanager
def bar(name: str, total: int, *, quiet: bool) -> Iterator[Advance]:
    """Show one bar on the standard error stream while the block runs; where none can be drawn, a
    line now and then.
    """
    console = Console(stderr=True)
    if quiet:
        yield lambda text, done: None
        return
    if not (console.is_terminal or console.is_jupyter):
        told = monotonic()

        def line(text: str, done: int) -> None:
            nonlocal told
            if monotonic() - told >= BETWEEN_LINES:
                told = monotonic()
                console.print(f"{name}: {done} of {total}, {text}", markup=False, soft_wrap=True)

        yield line
        return
    with bars(console, transient=True) as progress:
        task = progress.add_task("", total=total, name=name, text="")
        yield lambda text, done: progress.update(task, text=text, completed=done)


def measured(metric: Metric, row: Row) -> str:
    """Return the headline metric of a row as text, empty if it was not measured."""
    value = row.get(metric.name)
    if value is None:
        return ""
    return metric.said(value)


@dataclass(frozen=True)
class Tracked:
    """A run as a tracker draws it."""

    folder: Path
    config: Config
    id: str  # what the tracker called it when it began; empty for a run that it does not know
    known: int  # the last step that it has

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run, by name."""
        said = said_in(self.config)
        recipe = self.config["recipe"]
        chosen: dict[str, Any] = {key: recipe[key] for key in ("method", "model", "seed")}
        chosen |= {key: self.config[key] for key in ("dataset", "steps", "model_bytes")}
        plan = {k: said[k] for k in ("partition", "size", "val_fraction") if k in said}
        chosen["clients"] = len(self.config["clients"])
        return {**chosen, **recipe["hyperparameters"], **recipe["training"], **plan}


class Tracker(Protocol):
    """A program that draws a run. `begin` is called first, `end` last."""

    at_once: bool  # whether a step has arrived when `step` returns

    def begin(self, run: Tracked) -> str:
        """Start or continue a run, and return its id."""
        ...

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record what was measured after a step."""
        ...

    def end(self, finished: bool) -> None:
        """Record that the run stopped."""
        ...


class TensorBoard:
    """Event files in the run folder, in `tensorboard/`: `tensorboard --logdir runs`."""

    at_once = True

    def begin(self, run: Tracked) -> str:
        # an extra
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.known + 1)
        rows = "\n".join(f"| {name} | {value} |" for name, value in run.settings().items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        return ""

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, finished: bool) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow, as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say; resumed runs continue
    theirs.
    """

    at_once = True

    def begin(self, run: Tracked) -> str:
        # an extra
        from mlflow import MlflowClient

        self._client = MlflowClient()
        if run.id:
            self._client.update_run(run.id, status="RUNNING")
            self._run = run.id
            return run.id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ekiden")
        found = self._client.get_experiment_by_name(name)
        place = found.experiment_id if found else self._client.create_experiment(name)
        self._run = str(self._client.create_run(place, run_name=run.folder.name).info.run_id)
        for setting, value in run.settings().items():
            # the longest value that all servers take
            self._client.log_param(self._run, setting, str(value)[:500])
        self._client.set_tag(self._run, "run_folder", str(run.folder.absolute()))
        return self._run

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, _allowed(name), value, step=step)

    def end(self, finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if finished else "KILLED")


@dataclass
class WandbLike:
    """A run of Weights & Biases or a program like it (`init`, `log`, `finish`); resumed runs
    continue theirs.
    """

    package: str  # its module, `wandb`, or `trackio`, which keeps all on this machine
    # rows are sent from a thread, which a kill ends too: only after `finish` they have arrived
    at_once = False

    def begin(self, run: Tracked) -> str:
        self._module = import_module(self.package)
        called = run.id or uuid4().hex[:12]
        own = {"id": called, "dir": str(run.folder)} if self.package == "wandb" else {}
        self._module.init(
            project=os.environ.get("WANDB_PROJECT", "ekiden"),
            name=run.folder.name,
            config=run.settings() | {"run_folder": str(run.folder.absolute())},
            resume="allow",
            **own,
        )
        return called

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)

    def end(self, finished: bool) -> None:
        self._module.finish()


TRACKERS: Mapping[str, tuple[Callable[[], Tracker], str]] = {
    "tensorboard": (TensorBoard, "tensorboard"),
    "mlflow": (MLflow, "mlflow"),
    "wandb": (partial(WandbLike, "wandb"), "wandb"),
    "trackio": (partial(WandbLike, "trackio"), "trackio"),
}
"""For each name: what makes the tracker, and the package that it needs, which is also the extra's
name."""


def check(names: Sequence[str], folder: Path | None) -> None:
    """Refuse trackers that cannot work, before anything is written."""
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        package = TRACKERS[name][1]
        if find_spec(package) is None:
            raise UserError(f'tracker {name} needs an extra: pip install "ekiden[{package}]"')
    if names and folder is None:
        raise UserError("trackers follow a run that is kept: give folder=")


def check_names(trackers: Sequence[str], clients: Iterable[str]) -> None:
    """Refuse clients whose metrics MLflow would write under one name."""
    known: dict[str, str] = {}
    if "mlflow" not in trackers:
        return
    for name in clients:
        if (other := known.setdefault(_allowed(name), name)) != name:
            raise UserError(
                f"mlflow writes {other!r} and {name!r} as one name: give clients names that differ "
                "in letters and digits"
            )


@contextmanager
def following(
    names: Sequence[str], folder: Path | None, steps: int
) -> Iterator[Callable[[Row], None]]:
    """Give a callable that tells trackers of each row once it is saved in `folder`."""
    followers = [_Follower(name, folder, steps) for name in names if folder]

    def tell(row: Row) -> None:
        for follower in followers:
            follower(row)

    try:
        yield tell
    finally:
        for follower in followers:
            follower.close()


@contextmanager
def watching(names: Sequence[str], folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Give a callable that tells trackers what another process has written into `folder`."""
    with following(names, folder, steps) as tell:

        def catch_up() -> None:
            if names and (folder / "metrics.jsonl").is_file():
                for row in read_lines(folder / "metrics.jsonl", "step"):
                    tell(row)

        try:
            yield catch_up
        finally:
            catch_up()


@checked("folder")
def follow(folder: str | os.PathLike[str], *, wait: bool = True) -> Iterator[Row]:
    """Yield the rows of metrics of a run, those of steps to come too, until the run ends or stops.

    Args:
        folder: the run folder; it may be of a run in another process.
        wait: whether to wait for steps to come.

    Raises:
        UserError: it is not a run folder, or is damaged.
    """
    path = path_of(folder)
    last = 0
    read_config(path)
    while True:
        # asked first: rows that come until the end are read below
        works = wait and is_held(path / "lock")
        for row in read_lines(path / "metrics.jsonl", "step"):
            if row["step"] > last:
                last = row["step"]
                yield row
        if not works:
            return
        # seconds between two looks at a run that computes
        sleep(0.5)


class _Follower:
    """A tracker that may fail: then one line says so, and the run continues without it.

    A file in the run folder keeps what the tracker calls the run, and the last step that arrived.
    """

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self._name = name
        self._folder = folder
        self._steps = steps
        self._note = folder / f"{name}.json"
        self._tracker: Tracker | None = None
        self._failed = False
        self._last = 0

    def __call__(self, row: Row) -> None:
        if self._failed or row["step"] <= self._last:
            return
        with self._guarded():
            tracker = self._tracker
            rows = [row]
            if tracker is None:
                tracker = self._begun()
                written = read_lines(self._folder / "metrics.jsonl", "step")
                rows = [each for each in written if self._last < each["step"] <= row["step"]]
            for each in rows:
                tracker.step(each["step"], flat(each, self._clients))
            self._last = row["step"]
            if tracker.at_once:
                self._keep()

    def close(self) -> None:
        with self._guarded():
            if self._tracker is not None and not self._failed:
                self._tracker.end(self._last >= self._steps)
                self._keep()

    def _begun(self) -> Tracker:
        """Start the tracker where it stopped."""
        config = read_config(self._folder)
        noted: dict[str, Any] = {"id": "", "step": 0}
        if self._note.exists():
            noted = json.loads(self._note.read_text(encoding="utf-8"))
        self._clients = tuple(config["clients"])
        self._last = int(noted["step"])
        config.setdefault("steps", self._steps)
        self._tracker = TRACKERS[self._name][0]()
        run = Tracked(self._folder, config, str(noted["id"]), self._last)
        self._id = self._tracker.begin(run)
        self._keep()
        return self._tracker

    def _keep(self) -> None:
        write(self._note, [json.dumps({"id": self._id, "step": self._last}).encode()])

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        # errors of any kind, from another program, its disk or its network
        try:
            yield
        except Exception as error:
            self._failed = True
            log.warning(
                "tracker %s failed and is left out; the run continues: %s",
                self._name,
                first_line(error),
            )


def _allowed(name: str) -> str:
    """Return a name in the form that MLflow accepts."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
