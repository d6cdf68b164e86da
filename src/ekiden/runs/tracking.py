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
from time import monotonic
from typing import Any, Protocol
from uuid import uuid4

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import write
from ekiden.core.data.samples import said_in
from ekiden.core.engine.drive import Row
from ekiden.core.engine.folder import read_config, read_lines
from ekiden.core.tasks import Metric
from ekiden.runs.result import flat

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
    return f"{metric.name} {100 * value:.1f} %" if metric.share else f"{metric.name} {value:.4g}"


class Tracker(Protocol):
    """A program that draws a run. `begin` is called first, `end` last."""

    def begin(self, folder: Path, config: Config) -> int:
        """Start or continue the run in `folder`, and return the last step that is known already."""
        ...

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        """Record what was measured after a step."""
        ...

    def end(self, model: Path | None) -> None:
        """Record that the run stopped; `model` is the file of its model, if there is one."""
        ...


class TensorBoard:
    """Event files in the run folder, in `tensorboard/`: `tensorboard --logdir runs`."""

    def begin(self, folder: Path, config: Config) -> int:
        # an extra
        from torch.utils.tensorboard import SummaryWriter

        # Rows that an earlier process wrote are written again, because its last rows may be
        # missing.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=0)
        rows = "\n".join(f"| {name} | {value} |" for name, value in settings(config).items())
        self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0)
        return 0

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def end(self, model: Path | None) -> None:
        if model is not None:
            self._writer.add_text("model", str(model), 0)
        self._writer.close()


class MLflow:
    """A run of MLflow, as MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say; resumed runs continue
    theirs.
    """

    _KEPT = "mlflow.json"

    def begin(self, folder: Path, config: Config) -> int:
        # an extra
        from mlflow import MlflowClient

        self._client = MlflowClient()
        kept = folder / self._KEPT
        if kept.exists():
            self._run = json.loads(kept.read_text(encoding="utf-8"))["run_id"]
            self._client.update_run(self._run, status="RUNNING")
            return max(
                (point.step for point in self._client.get_metric_history(self._run, "bytes")),
                default=0,
            )
        made = self._client.create_run(self._experiment(), run_name=folder.name)
        self._run = made.info.run_id
        write(kept, [json.dumps({"run_id": self._run}).encode()])
        for name, value in settings(config).items():
            self._client.log_param(self._run, name, str(value)[:500])
        self._client.set_tag(self._run, "run_folder", str(folder.absolute()))
        return 0

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, _allowed(name), value, step=step)

    def end(self, model: Path | None) -> None:
        if model is not None:
            self._client.set_tag(self._run, "model", str(model.absolute()))
        self._client.set_terminated(self._run, "KILLED" if model is None else "FINISHED")

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "ekiden")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))


@dataclass
class WandbLike:
    """A run of Weights & Biases or a program like it (`init`, `log`, `finish`); resumed runs
    continue theirs.
    """

    package: str  # its module, `wandb`, or `trackio`, which keeps all on this machine

    def begin(self, folder: Path, config: Config) -> int:
        self._module = import_module(self.package)
        self._kept = folder / f"{self.package}.json"
        if not self._kept.exists():
            self._id = uuid4().hex[:12]
            self._note(0)
        noted = json.loads(self._kept.read_text(encoding="utf-8"))
        self._id, self._last = str(noted["id"]), int(noted["step"])
        own = {"id": self._id, "dir": str(folder)} if self.package == "wandb" else {}
        self._module.init(
            project=os.environ.get("WANDB_PROJECT", "ekiden"),
            name=folder.name,
            config=settings(config) | {"run_folder": str(folder.absolute())},
            resume="allow",
            **own,
        )
        return self._last

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log(dict(numbers), step=step)
        self._last = step

    def end(self, model: Path | None) -> None:
        self._module.finish()
        # Only now it is known that the rows arrived: they are sent from a thread, which a kill ends
        # too.
        self._note(self._last)

    def _note(self, step: int) -> None:
        write(self._kept, [json.dumps({"id": self._id, "step": step}).encode()])


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
    for name in clients if "mlflow" in trackers else ():
        if (other := known.setdefault(_allowed(name), name)) != name:
            raise UserError(
                f"mlflow writes {other!r} and {name!r} as one name: give clients names that differ "
                "in letters and digits"
            )


@contextmanager
def following(
    names: Sequence[str], folder: Path | None, config: Config, on_step: Callable[[Row], None]
) -> Iterator[Callable[[Row], None]]:
    """Give a callable that gets each row once it is saved: it calls `on_step`, then the
    trackers.
    """
    if not names or folder is None:
        yield on_step
        return
    followers = [_Follower(name, folder, config) for name in names]

    def seen(row: Row) -> None:
        on_step(row)
        for follower in followers:
            follower(row)

    try:
        yield seen
    finally:
        for follower in followers:
            follower.close()


@contextmanager
def watching(names: Sequence[str], folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Give a callable that tells the trackers what another process has written into `folder` since
    the last call.
    """
    followers: list[_Follower] = []
    last = 0

    def look() -> None:
        nonlocal last
        if not names or not (folder / "metrics.jsonl").is_file():
            return
        if not followers:
            config = {"steps": steps, **read_config(folder)}
            followers.extend(_Follower(name, folder, config) for name in names)
        for row in read_lines(folder / "metrics.jsonl", "step"):
            if row["step"] > last:
                last = row["step"]
                for follower in followers:
                    follower(row)

    try:
        yield look
    finally:
        look()
        for follower in followers:
            follower.close()


class _Follower:
    """A tracker that may fail: then one line says so, and the run continues without it."""

    def __init__(self, name: str, folder: Path, config: Config) -> None:
        self._name, self._folder, self._config = name, folder, config
        self._tracker: Tracker | None = None
        self._failed = False
        self._last = 0

    def __call__(self, row: Row) -> None:
        if self._failed:
            return
        with self._guarded():
            rows = [row]
            if self._tracker is None:
                self._tracker = TRACKERS[self._name][0]()
                known = self._tracker.begin(self._folder, self._config)
                written = read_lines(self._folder / "metrics.jsonl", "step")
                rows = [each for each in written if known < each["step"] <= row["step"]]
            for each in rows:
                self._tracker.step(each["step"], flat(each, tuple(self._config["clients"])))
            self._last = row["step"]

    def close(self) -> None:
        with self._guarded():
            if self._tracker is not None and not self._failed:
                files = [self._folder / "model.safetensors", self._folder / "personal"]
                done = self._last >= self._config["steps"]
                self._tracker.end(
                    next((file for file in files if file.exists()), None) if done else None
                )

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        # errors of any kind, from another program, its disk or its network
        try:
            yield
        except Exception as error:
            self._failed = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning(
                "tracker %s failed and is left out; the run continues: %s", self._name, reason
            )


def settings(config: Config) -> dict[str, Any]:
    """Return the settings of a run, by name."""
    plan = {k: v for k, v in said_in(config).items() if k in ("partition", "size", "val_fraction")}
    recipe = config["recipe"]
    chosen = {key: recipe[key] for key in ("method", "model", "seed")}
    chosen |= {key: config[key] for key in ("dataset", "steps", "model_bytes")}
    return {
        **chosen,
        "clients": len(config["clients"]),
        **recipe["hyperparameters"],
        **recipe["training"],
        **plan,
    }


def _allowed(name: str) -> str:
    """Return a name in the form that MLflow accepts."""
    return "".join(c if c.isalnum() or c in "_-./ " else "_" for c in name)
