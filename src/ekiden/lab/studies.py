"""A study: several methods over the same silos and seeds, as one object that makes tables and
figures.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from itertools import product
from math import isnan, nan
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Never

import numpy as np
from torch import nn

from ekiden.core.base.checks import CountOrZero, checked
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.outside import require_extra
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine.method import Method
from ekiden.core.tasks.base import better
from ekiden.lab.drawing import latex, table_of
from ekiden.lab.tables.verdicts import Difference
from ekiden.runs.api import as_federation, as_method, no_argument, run
from ekiden.runs.config import flat, task_in
from ekiden.runs.result import Result
from ekiden.runs.summary import spread
from ekiden.runs.tracking import Advance, bar

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Network = str | nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class _Candidate:
    """A method with settings of the grid."""

    settings: Mapping[str, Any]  # from the grid; each belongs to the method or to the training
    method: Method
    training: Training


@dataclass(frozen=True)
class Study(Mapping[str, tuple[Result, ...]]):
    """Finished runs: `study["fedseq"]` are the results of a method, one a seed, and
    `study["fedseq"][0]` is the first.

    Attributes:
        runs: results by the methods' labels, in the order of `seeds`.
        seeds: the seeds.
        chosen: settings that validation data chose, by the methods' labels; empty without a grid.
        folder: holds the run folders; None if the runs are in memory only.
    """

    runs: Mapping[str, tuple[Result, ...]]
    seeds: tuple[int, ...]
    chosen: Mapping[str, Mapping[str, Any]]
    folder: Path | None

    def __getitem__(self, label: str) -> tuple[Result, ...]:
        if label not in self.runs:
            raise unknown("method of the study", label, self.runs)
        return self.runs[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.runs)

    def __len__(self) -> int:
        return len(self.runs)

    def table(self, against: str = "") -> "pandas.DataFrame":
        """Return a frame with a row for each method, as text: mean ± standard deviation over the
        seeds.

        Args:
            against: label of a method that the others are compared with, seed by seed; by default
                the first. The column of differences has mean ± standard error.

        Raises:
            UserError: there is no such method, or pandas is not installed.
        """
        against = against or next(iter(self))
        other = self[against]
        rows = []
        for label, results in self.items():
            metric = task_in(results[0].config).headline
            scores = []
            gaps = []
            guesses = []
            sent = []
            for result, rival in zip(results, other, strict=True):
                scores.append(metric.scale * result.score)
                gaps.append(metric.scale * (result.score - rival.score))
                sent.append(result.bytes)
                if result.majority is not None:
                    guesses.append(result.majority)
            row = {"method": label, f"{metric.name}{metric.unit}": spread(scores, metric)}
            row[f"minus {against}"] = ""
            if results is not other:
                gap = Difference(tuple(gaps), against, whole=True, bound=False)
                row[f"minus {against}"] = str(gap)
            if guesses:
                row["majority guess %"] = f"{100 * mean(guesses):.2f}"
            row["bytes"] = f"{mean(sent):,.0f}"
            if self.chosen:
                row["chosen"] = ", ".join(_named(self.chosen[label]))
            rows.append(row)
        return _pandas().DataFrame(rows).fillna("").set_index("method")

    def frame(self) -> "pandas.DataFrame":
        """Return all metrics as a tidy frame: a row for each method, seed and step.

        Raises:
            UserError: pandas is not installed.
        """
        rows = []
        for label, results in self.items():
            for seed, result in zip(self.seeds, results, strict=True):
                for row in result.metrics:
                    rows.append({"method": label, "seed": seed, **flat(row, result.clients)})
        return _pandas().DataFrame(rows)

    def plot(self, x: str = "bytes", metric: str = "", ax: "Axes | None" = None) -> "Axes":
        """Draw a metric of all methods against what was spent: mean over the seeds, with a band of
        one deviation.

        Args:
            x: "bytes", "step", "forward", "backward", or another number of `frame`.
            metric: by default the headline metric.
            ax: where to draw; by default new axes.

        Returns:
            The axes.

        Raises:
            UserError: no step has such a number, or matplotlib is not installed.
        """
        require_extra("report", "plot", "matplotlib")
        # seconds
        from matplotlib import pyplot

        axes = ax or pyplot.subplots()[1]
        metric = metric or next(iter(self.values()))[0].headline
        frame = self.frame()
        for name in (x, metric):
            if name not in frame:
                raise unknown("number", name, frame.columns)
        for label, rows in frame.dropna(subset=[metric]).groupby("method", sort=False):
            steps = rows.groupby("step")
            across = steps[x].mean()
            middle = steps[metric].mean()
            width = steps[metric].std().fillna(0)
            (line,) = axes.plot(across, middle, label=label)
            colour = line.get_color()
            # which has no band
            if len(across) == 1:
                line.set_marker("o")
                axes.errorbar(across, middle, width, color=colour, capsize=3)
            ends = middle - width, middle + width
            axes.fill_between(across, *ends, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(x.replace("_", " "))
        axes.set_ylabel(metric.replace("_", " "))
        axes.legend()
        return axes

    def report(self, folder: str | os.PathLike[str]) -> Path:
        """Write the page of `ekiden report` on the study's runs, and return its file.

        Raises:
            UserError: the runs are in memory only, or the extra `report` is not installed.
        """
        if self.folder is None:
            raise UserError(
                "a report is made of run folders: give the study a folder, study(..., folder=...)"
            )
        require_extra("report", "report", "matplotlib", "jinja2")
        # it needs an extra
        from ekiden.lab.reporting import report

        runs = [result.folder for results in self.values() for result in results if result.folder]
        report(runs, Path(folder), 0)
        return Path(folder) / "index.html"

    def to_latex(self) -> str:
        """Return `table` as LaTeX, for the package booktabs.

        Raises:
            UserError: pandas is not installed.
        """
        frame = self.table().reset_index()
        table = table_of(*frame.columns)
        for row in frame.itertuples(index=False):
            table.add_row(*row)
        return latex(table)

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return str(self.table().to_html())


@checked("methods", "data", "grid", "seeds", "others")
def study(  # noqa: D417  (there are no others)
    methods: Sequence[Method | type[Method] | str],
    data: Any,
    *,
    seeds: Sequence[int] = (0,),
    folder: str | os.PathLike[str] | None = None,
    model: Network = "auto",
    grid: Mapping[str, Sequence[Any]] | None = None,
    training: Training | None = None,
    hardware: Hardware | None = None,
    metric: str = "",
    workers: CountOrZero = 1,
    evaluate_every: CountOrZero = 1,
    quiet: bool = False,
    **others: Never,
) -> Study:
    """Run several methods over the same silos, once with each seed.

    A study in a folder goes on where it was stopped: finished runs are read, an interrupted one
    continues.

    Args:
        methods: methods with their settings, classes, or names; two of one kind get labels with
            what differs.
        data: who holds what, as in `ekiden.run`; or a function of the seed that returns it, so that
            each seed divides the data in its own way, as in `lambda seed: ekiden.split(digits,
            "dirichlet:0.5", 10, seed=seed)`.
        seeds: seeds of the initial model and of training. Methods are compared seed by seed.
        folder: gets a run folder for each method and seed; None keeps all in memory.
        model: the network, as in `ekiden.run`.
        grid: values to try, by the name of a hyperparameter or of a field of `Training`, as in
            `{"epochs": [5, 20], "lr": [0.01, 0.001]}`. Each method tries those that it has. The
            best mean score on the clients' validation data decides; test data are not used for
            that.
        training: how clients train.
        hardware: what the runs compute on.
        metric: the headline metric, which also chooses in the grid.
        workers: processes for the independent tasks of a run.
        evaluate_every: steps between evaluations.
        quiet: show no progress.

    Raises:
        UserError: something that the caller can fix; nothing was run if it is about the arguments.
    """
    if isinstance(methods, str) or not isinstance(methods, Sequence) or not methods:
        raise UserError(
            "study takes a list of methods: study([FedSeq(epochs=10), 'fedgram'], silos)"
        )
    for name in others:
        raise no_argument(name, list(signature(study).parameters.keys() - {"others"}), methods[0])
    whole = _checked_seeds(seeds)
    grid = grid or {}
    training = training or Training()
    base = [as_method(method, data) for method in methods]
    _check_grid(grid, [*base, training])
    tried = {}
    for label, method in zip(_labels(base), base, strict=True):
        tried[label] = _grid(method, training, grid)
    divided = {seed: as_federation(_of_seed(data, seed)) for seed in whole}
    place = None if folder is None else Path(folder)
    options = {"model": model, "hardware": hardware, "metric": metric, "workers": workers}
    options |= {"evaluate_every": evaluate_every, "quiet": True}
    with bar("study", len(whole) * sum(map(_times, tried.values())), quiet=quiet) as advance:
        results = _Results(divided, place, options, advance)
        best = {label: results.best(label, candidates) for label, candidates in tried.items()}
        runs = {label: results(label, one) for label, one in best.items()}
    chosen = {label: one.settings for label, one in best.items() if grid}
    return Study(runs, whole, chosen, place)


def _times(choices: Sequence[_Candidate]) -> int:
    """Return how often a method is run with a seed: with each choice, and then with the best."""
    if len(choices) == 1:
        return 1
    return len(choices) + 1


def _checked_seeds(seeds: Any) -> tuple[int, ...]:
    """Return different whole numbers, or refuse others."""
    given = seeds
    if isinstance(seeds, np.ndarray):
        given = seeds.tolist()
    whole: tuple[Any, ...] = ()
    if isinstance(given, Sequence):
        whole = tuple(given)
    unfit = any(type(seed) is not int or seed < 0 for seed in whole)
    if not whole or unfit or len(set(whole)) < len(whole):
        raise UserError(
            f"seeds must be different whole numbers, 0 or more, as in range(3), not {given!r}"
        )
    return whole


def _check_grid(grid: Any, base: Sequence[Method | Training]) -> None:
    """Refuse a setting that neither training nor any of the methods has, and one without values."""
    if not isinstance(grid, Mapping):
        raise UserError(f"grid is a dict of lists, as in {{'epochs': [5, 10]}}, not {grid!r}")
    known = set[str]().union(*map(_names, base))
    for name, values in grid.items():
        if name not in known:
            raise unknown("setting in grid", name, known)
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise UserError(f"grid needs a list of values for {name}, not {values!r}")


def _names(settings: Method | Training) -> list[str]:
    return [field.name for field in fields(settings)]


def _of_seed(data: Any, seed: int) -> Any:
    """Return the data for a seed."""
    if not callable(data):
        return data
    try:
        signature(data).bind(seed)
    except TypeError:
        raise UserError(
            "a function that gives the data takes one argument, the seed: lambda seed: ..."
        ) from None
    return data(seed)


@dataclass
class _Results:
    """Runs candidates over all seeds."""

    divided: Mapping[int, FederatedData]  # the silos by seed
    place: Path | None  # the study's folder, if there is one
    options: Mapping[str, Any]  # further arguments of `ekiden.run`
    advance: Advance  # shows how far the study is
    done: int = 0  # number of finished runs

    def __call__(self, name: str, one: _Candidate, *, tune: bool = False) -> tuple[Result, ...]:
        """Return the results of a candidate, one a seed; `tune` measures on validation data."""
        found = []
        for seed, silos in self.divided.items():
            self.advance(f"{name}, seed {seed}", self.done)
            folder = None
            given = silos
            if self.place is not None:
                named = re.sub(r"[^\w.=+/-]+", "-", name)
                folder = self.place / f"{named}-seed{seed}"
            if tune:
                given = silos.for_tuning()
            options = {**self.options, "training": one.training, "seed": seed, "folder": folder}
            found.append(run(one.method, given, **options))
            self.done += 1
        return tuple(found)

    def best(self, label: str, candidates: Sequence[_Candidate]) -> _Candidate:
        """Return the candidate with the best mean score on validation data."""
        # nothing to choose
        if len(candidates) == 1:
            return candidates[0]
        chosen = candidates[0]
        best = nan
        for one in candidates:
            results = self(f"tuning/{label}-{','.join(_named(one.settings))}", one, tune=True)
            metric = task_in(results[0].config).headline
            values = []
            for result in results:
                value = result.metrics[-1].get(metric.name)
                if value is None:
                    value = nan
                values.append(value)
            score = metric.signed(mean(values))
            if better(score, best):
                chosen = one
                best = score
        if isnan(best):
            raise UserError(
                f"{label}: no setting of the grid has a defined {metric.name} on validation data: "
                "choose another metric, or larger validation data"
            )
        return chosen


def _grid(
    method: Method, training: Training, grid: Mapping[str, Sequence[Any]]
) -> list[_Candidate]:
    """Return a method with all settings of a grid that it or its training has."""
    known = [*_names(method), *_names(training)]
    own = {name: values for name, values in grid.items() if name in known}
    choices = []
    for values in product(*own.values()):
        settings = dict(zip(own, values, strict=True))
        hyper = {}
        rest = dict(settings)
        for name in settings.keys() & _names(method):
            hyper[name] = rest.pop(name)
        one = _Candidate(settings, replace(method, **hyper), replace(training, **rest))
        choices.append(one)
    return choices


def _labels(methods: Sequence[Method]) -> list[str]:
    """Return a label for each method: its name, with the settings in which several of this name
    differ.
    """
    labels: list[str] = []
    for method in methods:
        twins = [other for other in methods if type(other) is type(method)]
        unlike = {}
        for name in _names(method):
            values = [getattr(other, name) for other in twins]
            if any(value != values[0] for value in values):
                unlike[name] = getattr(method, name)
        label = f"{method.title()} {','.join(_named(unlike))}".strip()
        if label in labels:
            raise UserError(f"{label} is in the study twice with the same settings: leave one out")
        labels.append(label)
    return labels


def _named(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in settings.items()]


def _pandas() -> Any:
    require_extra("pandas", "a table", "pandas")
    # an extra
    import pandas

    return pandas
