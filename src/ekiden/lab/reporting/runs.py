"""Find the runs of a report, read them, and group those that differ only in the seed."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import FederatedData, said_in
from ekiden.core.engine.evaluation import TestSet
from ekiden.core.engine.folder import settings_in
from ekiden.core.engine.setup import check_same_data
from ekiden.core.tasks import Metric
from ekiden.core.training.weights import Weights
from ekiden.lab.tables import verdicts
from ekiden.lab.tables.sweep import MARK, OWN, Sweep, cell_of, opened, refuse_records, runs_in
from ekiden.lab.tables.verdicts import CellResult
from ekiden.methods import known
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.loading import open_models
from ekiden.runs.result import Result
from ekiden.runs.summary import (
    Summary,
    conditions,
    going_on,
    headline,
    metric_of,
    partition,
    revised,
    summarise,
    value_of,
)


@dataclass(frozen=True, eq=False)
class Group:
    """Finished runs that differ only in the seed."""

    name: str  # the name in tables and figures, unique within its setting
    setting: str  # data, partition, clients, network
    runs: tuple[Summary, ...]  # in the order of their seeds
    place: int = 0  # number of the name, which decides its colour

    @property
    def first(self) -> Summary:
        """The run that is drawn where a figure shows one run."""
        return self.runs[0]

    @property
    def yardstick(self) -> bool:
        """Whether this is a yardstick, trained on pooled data, and not a federated method."""
        return _pools_data(self.first.config)

    @property
    def metric(self) -> str:
        """Name of the metric that is compared."""
        return str(cell_of(self.first.config).get("metric", headline(self.first).name))

    @property
    def shown(self) -> Metric:
        """The metric with its name, unit and scale."""
        return metric_of(self.first, self.metric)

    def values(self, key: str, scale: float = 1.0) -> list[float]:
        """Return the last value of a metric, for each run that has it."""
        return [scale * value for run in self.runs if (value := value_of(run, key)) is not None]


@dataclass(frozen=True)
class Found:
    """The contents of the given folders."""

    groups: tuple[Group, ...]  # finished runs
    # each with the finished runs of its cells
    sweeps: tuple[tuple[Sweep, tuple[CellResult, ...]], ...]
    loose: tuple[Group, ...]  # groups of runs that belong to none of the sweeps
    left_out: tuple[tuple[Path, str], ...]  # folders that are in no table or figure, and why

    @property
    def runs(self) -> list[tuple[Group, Summary]]:
        """The finished runs, each with its group."""
        return [(group, run) for group in self.groups for run in group.runs]

    def by_setting(self) -> dict[str, list[Group]]:
        """Return the groups of each setting."""
        settings: dict[str, list[Group]] = defaultdict(list)
        for group in self.groups:
            settings[group.setting].append(group)
        return settings


def collect(paths: Sequence[Path]) -> Found:
    """Read all runs and sweeps in the given folders and in folders below them."""
    # a pattern such as runs/sweep/* also matches these files
    paths = [path for path in paths if path.name not in OWN]
    if not paths:
        raise UserError("name the run folders and sweep folders to report on")
    left_out: list[tuple[Path, str]] = []
    alike, twins = _finished(paths, left_out)
    if not alike:
        folder, why = left_out[0]
        more = ""
        if len(left_out) > 1:
            more = f"; {len(left_out) - 1} more are left out too"
        raise UserError(f"no finished run to report: {folder}: {why}{more}")
    sweeps = _swept_in(paths, left_out)
    # runs of sweeps come first, in the order of their tables
    places: dict[Path, int] = {}
    for _, results in sweeps:
        for run in verdicts.runs_of(results):
            places.setdefault(run.folder.resolve(), len(places))
    for run, twin in twins:
        if run.folder.resolve() not in places:
            left_out.append((run.folder, f"the same run as {twin.folder}"))
    seeded = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in alike]
    seeded.sort(key=lambda runs: places.get(runs[0].folder.resolve(), len(places)))
    columns = {swept.experiment.name for swept, _ in sweeps if not swept.experiment.methods_in_rows}
    groups = _named(seeded, columns)
    loose = tuple(g for g in groups if any(run.folder.resolve() not in places for run in g.runs))
    return Found(groups, tuple(sweeps), loose, tuple(left_out))


def _finished(
    paths: Sequence[Path], left_out: list[tuple[Path, str]]
) -> tuple[list[dict[int, Summary]], list[tuple[Summary, Summary]]]:
    """Return the finished runs that differ only in the seed, by their seeds, and runs that were
    there before; add to `left_out` what cannot be read.
    """
    alike: dict[str, dict[int, Summary]] = defaultdict(dict)
    twins: list[tuple[Summary, Summary]] = []
    for folder in _distinct(folder for path in paths for folder in find(path)):
        try:
            run = _read(folder)
            key, seed = _alike(run.config), run.recipe["seed"]
        except UserError as error:
            left_out.append((folder, str(error)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            why = f"cannot be read ({type(error).__name__}: {error}): the run folder is damaged"
            left_out.append((folder, why))
        else:
            first = alike[key].setdefault(seed, run)
            if first is not run:
                twins.append((run, first))
    return list(alike.values()), twins


def _swept_in(
    paths: Sequence[Path], left_out: list[tuple[Path, str]]
) -> list[tuple[Sweep, tuple[CellResult, ...]]]:
    """Return the sweeps with the results of their cells; add to `left_out` what cannot be read."""
    sweeps = []
    for folder in _distinct(file.parent for path in paths for file in sorted(path.rglob(MARK))):
        try:
            swept = opened(folder)
            results = verdicts.collect(swept)
        except UserError as error:
            left_out.append((folder, f"its table is missing: {error}"))
            continue
        for result in results:
            left_out += [(folder, line) for line in result.left_out]
        sweeps.append((swept, results))
    return sweeps


def _distinct(folders: Iterable[Path]) -> Iterable[Path]:
    """Leave out folders that were given before under another path."""
    named: dict[Path, Path] = {}
    for folder in folders:
        named.setdefault(folder.resolve(), folder)
    return named.values()


def find(path: Path) -> list[Path]:
    """Return the run folders at or below a path, in the order of their names."""
    refuse_records(path)
    if not path.is_dir():
        what = "does not exist"
        if path.exists():
            what = "is a file"
        raise UserError(f"{path} {what}: give run folders, or a folder that holds them")
    found = runs_in(path)
    if not found:
        raise UserError(
            f"{path} holds no run (no config.json in or below it): give the path that the run "
            "printed"
        )
    return found


def _read(folder: Path) -> Summary:
    """Read a finished run."""
    run = summarise(folder)
    if not run.finished:
        raise UserError(f"stopped after step {run.last.get('step', 0)}: {going_on(run)}")
    metrics = ("accuracy", str(cell_of(run.config).get("metric", "accuracy")))
    if any(value_of(run, metric) is None for metric in metrics):
        raise UserError("its test data were not measured")
    return run


def _alike(config: Mapping[str, Any]) -> str:
    """Return everything that identifies a run, except the seed and what does not change its
    result.
    """
    named = ("data", "silos", "reading", "task", "size", "val_fraction")
    plan = {k: v for k, v in said_in(config).items() if k in named}
    plan["tune"] = bool(said_in(config).get("tune"))
    recipe = ("method", "hyperparameters", "training", "model", "evaluate_on")
    fields = [
        config["dataset"],
        *(config["recipe"][k] for k in recipe),
        config["recipe"].get("dp"),
        _machine(config),
    ]
    cell = [cell_of(config).get(k) for k in ("experiment", "row", "column")]
    who = [list(config["clients"]), revised(config)]
    return json.dumps([fields, plan, partition(config), *who, cell], sort_keys=True)


def _machine(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the parts of the hardware settings that change results by more than rounding."""
    _, hardware = settings_in(config)
    return {"device": hardware.device.partition(":")[0], "precision": hardware.precision}


def _pools_data(config: Mapping[str, Any]) -> bool:
    """Return whether a run is a yardstick; False if its method is not available."""
    kind = known(config["recipe"]["method"])
    return kind is not None and kind.traits.pools_data


def _setting(run: Summary, dataset: str) -> str:
    config = run.config
    clients = config["clients"]
    # one client holds all training data; the test data are still those of all clients
    if _pools_data(config):
        clients = run.last.get("clients") or clients
    return " · ".join(conditions(config, dataset, len(clients)))


def _named(groups: Iterable[tuple[Summary, ...]], columns: set[str]) -> tuple[Group, ...]:
    """Name each group so that it can be told from the others of its setting."""
    groups = tuple(groups)
    paths = dict.fromkeys(str(runs[0].config["dataset"]) for runs in groups)
    # which are enough if no two are equal
    files = [Path(path).name for path in paths]
    short = dict(zip(paths, files, strict=True))
    bare = []
    for runs in groups:
        data = str(runs[0].config["dataset"])
        if files.count(short[data]) == 1:
            data = short[data]
        bare.append(Group("", _setting(runs[0], data), runs))
    named: list[Group] = []
    places: dict[str, int] = {}
    for setting in dict.fromkeys(group.setting for group in bare):
        peers = [group for group in bare if group.setting == setting]
        names = [_name(group, peers, columns) for group in peers]
        for i, (group, name) in enumerate(zip(peers, names, strict=True)):
            told = f"{name} [{names[: i + 1].count(name)}]" if names.count(name) > 1 else name
            named.append(replace(group, name=told, place=places.setdefault(told, len(places))))
    return tuple(named)


def _name(group: Group, peers: Sequence[Group], columns: set[str]) -> str:
    """Return its label in a sweep's table, or its method with the settings that differ between runs
    of that method.
    """
    swept = cell_of(group.first.config)
    labels = [str(swept[k]) for k in ("row", "column") if swept.get(k)]
    if len(labels) == 2:
        if swept.get("experiment") in columns:
            labels.reverse()
        twins = [cell_of(p.first.config) for p in peers if p is not group]
        if any(labels[0] in (t.get("row"), t.get("column")) for t in twins):
            return " · ".join(labels)
        return labels[0]
    mine = _settings(group)
    others = [
        _settings(p) for p in peers if p.first.recipe["method"] == group.first.recipe["method"]
    ]
    differing = {k: v for k, v in mine.items() if any(other.get(k) != v for other in others)}
    kind = known(group.first.recipe["method"])
    title = kind.__name__ if kind else outside.short(group.first.recipe["method"])
    if differing:
        title += f" ({', '.join(f'{k}={v}' for k, v in differing.items())})"
    return title


def _settings(group: Group) -> dict[str, Any]:
    config = group.first.config
    recipe = config["recipe"]
    return {
        **recipe["hyperparameters"],
        **recipe["training"],
        "dp": recipe.get("dp", ""),
        **_machine(config),
    }


@dataclass(frozen=True)
class Opened:
    """A finished run with its data and models."""

    run: Summary  # its numbers
    data: FederatedData  # who holds what
    test: TestSet  # measures models
    models: tuple[Weights, ...]  # the global model, or else the personal models
    personal: bool  # whether these are personal models


@dataclass(frozen=True)
class Opener:
    """Reads the data and models of a run."""

    data: FederatedData | None = None  # the data of runs that were given them in Python
    network: ModelSource | None = None  # their network, if it is not in the library

    def __call__(self, run: Summary) -> Opened:
        """Open a finished run."""
        result = open_models(run.folder, network=self.network)
        data = self._of(run, result)
        test = result.judge(data)
        personal = bool(result.personal)
        models = result.personal if personal or result.weights is None else (result.weights,)
        return Opened(run, data, test, models, personal)

    def _of(self, run: Summary, result: Result) -> FederatedData:
        if "plan" in run.config or self.data is None:
            return result.data()
        check_same_data(run.config, result.build.method, self.data, run.folder)
        return self.data


def accuracies(opened: Opened) -> dict[str, Mapping[str, tuple[int, float]]]:
    """Return test samples and headline metric by class, and by domain if there are any; of personal
    models the mean.
    """
    scores = [opened.test.scores(model, personal=opened.personal) for model in opened.models]
    kinds = {"class": opened.test.by_class, "domain": opened.test.by_domain}
    found: dict[str, Mapping[str, tuple[int, float]]] = {}
    for kind, measure in kinds.items():
        each = [measure(s) for s in scores]
        means = {}
        for group, (n, _) in each[0].items():
            means[group] = n, float(np.mean([one[group][1] for one in each]))
        found[kind] = means
    return found
