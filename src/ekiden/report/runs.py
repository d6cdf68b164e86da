"""Which runs a report is about: found, read, and grouped by all but the seed."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ekiden.data import NAMED
from ekiden.errors import UserError
from ekiden.experiments.summary import Summary, summarise
from ekiden.methods import method_named


@dataclass(frozen=True)
class Cell:
    """The place of a run in a published table.

    Attributes:
        experiment: name of the experiment.
        row: of the table.
        column: of the table.
        published: the printed accuracy in per cent, if there is one.
        published_std: its printed standard deviation.
        source: where it is printed.
        scaled: what was made smaller than in print; empty where nothing was.
    """

    experiment: str
    row: str
    column: str
    published: float | None = None
    published_std: float | None = None
    source: str = ""
    scaled: str = ""


@dataclass(frozen=True, eq=False)
class Group:
    """Finished runs that differ in nothing but the seed.

    Attributes:
        name: what the reader calls it, unique within its setting.
        setting: data, partition, clients, network.
        runs: by seed.
        cell: its place in a published table.
        place: number of its name, which gives its colour.
    """

    name: str
    setting: str
    runs: tuple[Summary, ...]
    cell: Cell | None = None
    place: int = 0

    @property
    def first(self) -> Summary:
        """The run that figures of one run show."""
        return self.runs[0]

    @property
    def yardstick(self) -> bool:
        """Whether it is no federated method."""
        return method_named(self.first.config["method"]).pools_data

    def values(self, key: str, scale: float = 1.0) -> list[float]:
        """The last value of a metric in each run that has it."""
        return [scale * run.last[key] for run in self.runs if run.last.get(key) is not None]


@dataclass(frozen=True)
class Found:
    """What the given folders hold.

    Attributes:
        groups: of finished runs.
        left_out: folders that are in no table or figure, and why.
    """

    groups: tuple[Group, ...]
    left_out: tuple[tuple[Path, str], ...]

    def by_setting(self) -> dict[str, list[Group]]:
        """The groups of each setting."""
        settings: dict[str, list[Group]] = defaultdict(list)
        for group in self.groups:
            settings[group.setting].append(group)
        return settings


def collect(paths: Sequence[Path]) -> Found:
    """Read all runs in or below the given folders.

    Raises:
        UserError: a path holds no run, or no run is finished.
    """
    left_out: list[tuple[Path, str]] = []
    runs: dict[str, dict[int, Summary]] = defaultdict(dict)
    for folder in dict.fromkeys(folder for path in paths for folder in find(path)):
        try:
            run = summarise(folder)
            if not run.finished:
                done = run.last.get("step", 0)
                raise UserError(f"stopped after step {done}: `ekiden resume {folder}` goes on")
            if "accuracy" not in run.last:
                raise UserError("no test data were measured")
            twin = runs[_alike(run.config)].setdefault(run.config["seed"], run)
            if twin is not run:
                raise UserError(f"the same run as {twin.folder}")
        except UserError as error:
            left_out.append((folder, str(error)))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            left_out.append((folder, f"cannot be read ({type(error).__name__}: {error}): the run folder is damaged"))
    if not any(runs.values()):
        folder, why = left_out[0]
        more = f"; {len(left_out) - 1} more are left out too" if len(left_out) > 1 else ""
        raise UserError(f"no finished run to report: {folder}: {why}{more}")
    seeded = [tuple(seeds[s] for s in sorted(seeds)) for seeds in runs.values() if seeds]
    return Found(_named(seeded), tuple(left_out))


def find(path: Path) -> list[Path]:
    """The run folders at or below a path, in the order of their names.

    Raises:
        UserError: there is none.
    """
    if (path / "config.json").exists():
        return [path]
    if not path.is_dir():
        raise UserError(f"{path} does not exist: give run folders, or a folder that holds them")
    found = sorted(file.parent for file in path.rglob("config.json"))
    if not found:
        raise UserError(
            f"{path} holds no run folder (no config.json in or below it): give the path that the run printed"
        )
    return found


def cell_of(config: dict[str, Any]) -> Cell | None:
    """The place in a published table that a sweep wrote into a run, as far as it can be read."""
    given = config.get("cell")
    if not isinstance(given, dict) or not all(isinstance(given.get(k), str) for k in ("experiment", "row", "column")):
        return None
    return Cell(
        given["experiment"],
        given["row"],
        given["column"],
        _number(given.get("published")),
        _number(given.get("published_std")),
        str(given.get("source") or ""),
        str(given.get("scaled") or ""),
    )


def partition(config: dict[str, Any]) -> str:
    """How the data were divided; what `auto` meant, where that is known."""
    plan = config.get("plan", {})
    given = str(plan.get("partition", ""))
    if given == "auto" and plan.get("data") in NAMED:
        return "domains" if NAMED[plan["data"]].domains else "dirichlet:0.5"
    return given


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _alike(config: dict[str, Any]) -> str:
    """All that makes a run, but the seed and what does not change its result."""
    plan = {k: v for k, v in config.get("plan", {}).items() if k in ("data", "size", "val_fraction")}
    fields = {k: config[k] for k in ("method", "hyperparameters", "training", "dataset", "model")}
    return json.dumps([fields, plan, partition(config), list(config["clients"]), config.get("cell")], sort_keys=True)


def _setting(config: dict[str, Any]) -> str:
    parts = [config["dataset"], partition(config), f"{len(config['clients'])} clients"]
    parts += [config["model"]] if config["model"] != "auto" else []
    plan = config.get("plan", {})
    parts += [f"{plan['size']} pixels"] if plan.get("size") else []
    return " · ".join(part for part in parts if part)


def _named(groups: Iterable[tuple[Summary, ...]]) -> tuple[Group, ...]:
    """Give each group a name that says how it differs from the others of its setting."""
    bare = [Group("", _setting(runs[0].config), runs, cell_of(runs[0].config)) for runs in groups]
    named: list[Group] = []
    places: dict[str, int] = {}
    for setting in dict.fromkeys(group.setting for group in bare):
        peers = [group for group in bare if group.setting == setting]
        names = _unique([_name(group, peers) for group in peers])
        for group, name in zip(peers, names, strict=True):
            named.append(replace(group, name=name, place=places.setdefault(name, len(places))))
    return tuple(named)


def _name(group: Group, peers: Sequence[Group]) -> str:
    """Its row in the published table; else its method, with the settings in which others of that method differ."""
    if group.cell:
        return group.cell.row
    mine = _settings(group)
    others = [_settings(p) for p in peers if p.first.config["method"] == group.first.config["method"]]
    differing = {k: v for k, v in mine.items() if any(other.get(k) != v for other in others)}
    title = method_named(group.first.config["method"]).__name__
    return f"{title} ({', '.join(f'{k}={v}' for k, v in differing.items())})" if differing else title


def _settings(group: Group) -> dict[str, Any]:
    config = group.first.config
    return {**config["hyperparameters"], **config["training"]}


def _unique(names: Sequence[str]) -> list[str]:
    return [f"{name} [{names[: i + 1].count(name)}]" if names.count(name) > 1 else name for i, name in enumerate(names)]
