"""Find the runs of a report, read them, and group those that differ only in the seed."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
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


def by_setting(groups: Iterable[Group]) -> dict[str, list[Group]]:
    """Return the groups of each setting."""
    settings: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        settings[group.setting].append(group)
    return settings


def collect(paths: Sequence[Path]) -> Found:
    """Read all runs and sweeps in the given folders and in folders below them."""
    # a pattern such as runs/sweep/* also matches these files
    paths = [path for path in paths if path.name not in OWN]
    if not paths:
        raise UserError("name the run folders and sweep folders to report on")
    left_out: list[tuple[Path, str]] = []
    seeded, twins = _finished(paths, left_out)
    if not seeded:
        folder, why = left_out[0]
        more = ""
        if len(left_out) > 1:
            more = f"; {len(left_out) - 1} more are left out too"
        raise UserError(f"no finished run to report: {folder}: {why}{more}")
    sweeps = _swept_in(paths, left_out)
    # runs of sweeps come first, in the order of their tables
    places: dict[Path, int] = {}
    columns = set[str]()
    for swept, results in sweeps:
        if not swept.experiment.methods_in_rows:
            columns.add(swept.experiment.name)
        for run in verdicts.runs_of(results):
            places.setdefault(run.folder.resolve(), len(places))

    def place_of(run: Summary) -> int:
        return places.get(run.folder.resolve(), len(places))

    for run, twin in twins:
        if place_of(run) == len(places):
            left_out.append((run.folder, f"the same run as {twin.folder}"))
    seeded.sort(key=lambda runs: place_of(runs[0]))
    groups = _named(seeded, columns)
    loose = [group for group in groups if max(map(place_of, group.runs)) == len(places)]
    return Found(groups, tuple(sweeps), tuple(loose), tuple(left_out))


def _finished(
    paths: Sequence[Path], left_out: list[tuple[Path, str]]
) -> tuple[list[tuple[Summary, ...]], list[tuple[Summary, Summary]]]:
    """Return the finished runs that differ only in the seed, in the order of their seeds, and runs
    that were there before; add to `left_out` what cannot be read.
    """
    alike: dict[str, dict[int, Summary]] = defaultdict(dict)
    twins: list[tuple[Summary, Summary]] = []
    for folder in _distinct(chain.from_iterable(map(find, paths))):
        try:
            run = _read(folder)
            key = _alike(run.config)
            seed = run.recipe["seed"]
        except UserError as error:
            left_out.append((folder, str(error)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            why = f"cannot be read ({type(error).__name__}: {error}): the run folder is damaged"
            left_out.append((folder, why))
        else:
            first = alike[key].setdefault(seed, run)
            if first is not run:
                twins.append((run, first))
    seeded = []
    for seeds in alike.values():
        seeded.append(tuple(dict(sorted(seeds.items())).values()))
    return seeded, twins


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
            for line in result.left_out:
                left_out.append((folder, line))
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
        raise UserError("its test data were not measured, or its metric is not defined for them")
    return run


def _alike(config: Mapping[str, Any]) -> str:
    """Return everything that identifies a run, except the seed and what does not change its
    result.
    """
    said = said_in(config)
    recipe = config["recipe"]
    cell = cell_of(config)
    plan = list(map(said.get, ("data", "silos", "reading", "task", "size", "val_fraction")))
    parts = itemgetter("method", "hyperparameters", "training", "model", "evaluate_on")(recipe)
    made_for = list(map(cell.get, ("experiment", "row", "column")))
    who = [config["dataset"], partition(config), list(config["clients"]), revised(config)]
    more = [recipe.get("dp"), _machine(config), bool(said.get("tune"))]
    return json.dumps([plan, parts, made_for, who, more], sort_keys=True)


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


def _named(groups: Sequence[tuple[Summary, ...]], columns: set[str]) -> tuple[Group, ...]:
    """Name each group so that it can be told from the others of its setting."""
    named_so: dict[str, set[str]] = defaultdict(set)
    for runs in groups:
        data = str(runs[0].config["dataset"])
        named_so[Path(data).name].add(data)
    bare = []
    for runs in groups:
        data = str(runs[0].config["dataset"])
        # without its folder, if no other data have this name
        if len(named_so[Path(data).name]) == 1:
            data = Path(data).name
        bare.append(Group("", _setting(runs[0], data), runs))
    named: list[Group] = []
    places: dict[str, int] = {}
    for peers in by_setting(bare).values():
        names = [_name(group, peers, columns) for group in peers]
        before = Counter[str]()
        for group, name in zip(peers, names, strict=True):
            before[name] += 1
            told = name
            if names.count(name) > 1:
                told = f"{name} [{before[name]}]"
            named.append(replace(group, name=told, place=places.setdefault(told, len(places))))
    return tuple(named)


def _name(group: Group, peers: Sequence[Group], columns: set[str]) -> str:
    """Return its label in a sweep's table, or its method with the settings that differ between runs
    of that method.
    """
    swept = cell_of(group.first.config)
    method = group.first.recipe["method"]
    if swept.get("row") and swept.get("column"):
        label = str(swept["row"])
        other = str(swept["column"])
        if swept.get("experiment") in columns:
            label, other = other, label
        for peer in peers:
            cell = cell_of(peer.first.config)
            if peer is not group and label in (cell.get("row"), cell.get("column")):
                return f"{label} · {other}"
        return label
    others = [_settings(peer) for peer in peers if peer.first.recipe["method"] == method]
    differing = []
    for name, value in _settings(group).items():
        if any(other.get(name) != value for other in others):
            differing.append(f"{name}={value}")
    title = outside.short(method)
    kind = known(method)
    if kind:
        title = kind.__name__
    if differing:
        title += f" ({', '.join(differing)})"
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

    data: FederatedData  # who holds what
    test: TestSet  # measures models
    models: tuple[Weights, ...]  # the global model, or else the personal models
    personal: bool  # whether these are personal models


def open_models_of(
    run: Summary, given: FederatedData | None = None, network: ModelSource | None = None
) -> Opened:
    """Open a finished run.

    Args:
        run: its numbers.
        given: the data of runs that were given them in Python.
        network: their network, if it is not in the library.
    """
    result = open_models(run.folder, network=network)
    if "plan" in run.config or given is None:
        data = result.data()
    else:
        check_same_data(run.config, result.build.method, given, run.folder)
        data = given
    models = result.personal
    personal = bool(result.personal)
    if result.weights is not None and not personal:
        models = (result.weights,)
    return Opened(data, result.judge(data), models, personal)


def accuracies(opened: Opened) -> dict[str, Mapping[str, tuple[int, float]]]:
    """Return test samples and headline metric by class, and by domain if there are any; of personal
    models the mean.
    """
    scores = [opened.test.scores(model, personal=opened.personal) for model in opened.models]
    kinds = {"class": opened.test.by_class, "domain": opened.test.by_domain}
    found: dict[str, Mapping[str, tuple[int, float]]] = {}
    for kind, measure in kinds.items():
        each = list(map(measure, scores))
        means = {}
        for group, (n, _) in each[0].items():
            means[group] = n, float(np.mean([one[group][1] for one in each]))
        found[kind] = means
    return found
