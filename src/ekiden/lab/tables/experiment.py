"""Experiment files: a published table as a grid of runs, with the printed values
(docs/experiments.md).
"""

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from ekiden.core.base.checks import Count, CountOrZero, made
from ekiden.core.base.errors import UserError, at, unknown
from ekiden.core.base.files import read_text
from ekiden.core.engine.method import Method
from ekiden.core.tasks import KINDS
from ekiden.methods import LAP, method_named, titles
from ekiden.readers.sources import NAMED
from ekiden.runs.plan import Plan, common_settings, plan_of, settings_of

Entry = dict[str, Any]


@cache
def known_anywhere() -> frozenset[str]:
    """Return the names of all settings of all methods."""
    kinds = map(method_named, titles())
    return frozenset(common_settings()).union(*map(settings_of, kinds))


def is_grid(name: str, value: object) -> bool:
    """Return whether the value is a list of values for a setting, and not one value that is a
    list.
    """
    if not isinstance(value, list):
        return False
    one_is_a_list = _origin(common_settings().get(name)) is tuple
    return not one_is_a_list or any(isinstance(v, list) for v in value)


def _origin(hint: Any) -> Any:
    """Return the type behind `X | None`, without its parameters."""
    if get_origin(hint) in (Union, UnionType):
        hint = next(h for h in get_args(hint) if h is not type(None))
    return get_origin(hint) or hint


def table(value: object, name: str) -> Entry:
    """Return a value that must be a table."""
    if not isinstance(value, dict):
        raise UserError(f"{name} must be a table, [{name}]")
    return value


def text(values: Mapping[str, Any], key: str) -> str:
    """Return the text of an entry in one line, empty if there is no such entry."""
    value = values.get(key, "")
    if not isinstance(value, str):
        raise UserError(f"{key} must be text, not {value!r}")
    return " ".join(value.split())


PAPER = "paper"  # Name of the budget that reduces nothing; every file has it


@dataclass(frozen=True)
class Scaled:
    """A hyperparameter that a budget changed, with the file's value and the value that is run."""

    name: str
    full: int
    used: int

    def __str__(self) -> str:
        return f"{self.name} {self.used} of {self.full}"


@dataclass(frozen=True)
class Budget:
    """How much of an experiment is run."""

    name: str = PAPER  # name on the command line
    # factors of whole-numbered hyperparameters, by name
    factors: Mapping[str, float] = field(default_factory=dict)
    seeds: int | None = None  # number of the file's seeds that are run; None for all

    def scale(self, plan: Plan[Method]) -> tuple[Plan[Method], tuple[Scaled, ...]]:
        """Return the plan with fewer epochs, rounds and so on, and what was changed. No value falls
        below 1.
        """
        scaled = []
        changes = dict[str, Any]()
        method = plan.recipe.method
        for name, factor in self.factors.items():
            full = getattr(method, name, 0)
            used = max(1, round(full * factor))
            if full > used:
                scaled.append(Scaled(name, full, used))
                changes[name] = used
        recipe = replace(plan.recipe, method=replace(method, **changes))
        return replace(plan, recipe=recipe), tuple(scaled)


def budgets(values: Entry, kinds: Iterable[type[Method]]) -> dict[str, Budget]:
    """Return the budgets of a file with these methods, by name."""
    scalable = set()
    for kind in kinds:
        scalable |= {name for name, hint in settings_of(kind).items() if hint is int}
    found = {PAPER: Budget()}
    for name, entry in values.items():
        with at(f"budget.{name}"):
            given = dict(table(entry, f"budget.{name}"))
            seeds = given.pop("seeds", None)
            if seeds is not None and (type(seeds) is not int or seeds < 1):
                raise UserError(
                    f"seeds must be the number of seeds to run, 1 or more, not {seeds!r}"
                )
            for key, factor in given.items():
                if key not in scalable:
                    raise unknown("hyperparameter to scale", key, scalable)
                if type(factor) is not float or not 0 < factor < 1:
                    raise UserError(f"{key} must be a factor above 0 and below 1, not {factor!r}")
            if name == PAPER and entry:
                raise UserError(f"the budget {PAPER!r} scales nothing: give this one another name")
            found[name] = Budget(name, given, seeds)
    return found


METRICS = ("accuracy", "client_mean", "client_mean_trained", "global_accuracy")
_OF_TASKS = {metric.name: metric for kind in KINDS.values() for metric in kind.metrics}
OWN_DATA = ("client_mean", "client_mean_trained")
"""Metrics on each client's own test data, before and after averaging. Only values of one kind are
compared."""
_OWN = ("label", "method", "metric", "note", "differs", "skip")
_ROW = (*_OWN, "printed", "at")
_TITLES = tuple(titles())
# most bytes of a cell's file name; file systems allow 255
_LONGEST = 180


@dataclass(frozen=True)
class _Content:
    """The entries of a file; see docs/experiments.md."""

    row: tuple[Entry, ...]
    column: tuple[Entry, ...] = ()
    title: str = ""
    source: str = ""
    link: str = ""
    note: str = ""
    differs: str = ""
    seeds: tuple[CountOrZero, ...] = (0,)
    printed_seeds: Count | None = None
    paired: tuple[str, ...] = ()
    settings: Entry = field(default_factory=dict)
    budget: Entry = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """A printed value, in per cent."""

    mean: float  # the value
    std: float | None = None  # standard deviation over the runs, None if it is not printed
    runs: int | None = None  # number of runs behind the mean, None if that is not known


@dataclass(frozen=True)
class Cell:
    """One cell of a table."""

    row: str  # label of its row
    column: str  # label of its column
    plan: Plan[Method] | None  # what to run, with seed 0; None if it cannot be run
    published: Published | None = None  # what the paper prints, if anything
    metric: str = "accuracy"  # the entry of the last row of metrics that is compared
    skip: str = ""  # why it cannot be run; empty if it can
    differs: str = ""  # why the values cannot be compared with the paper; empty if they can
    note: str = ""  # a remark for the reader
    scaled: tuple[Scaled, ...] = ()  # what the budget changed

    @property
    def label(self) -> str:
        """Row and column."""
        return f"{self.row} / {self.column}"

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^\w.=+-]+", "-", f"{self.row}--{self.column}").strip("-")

    @property
    def method(self) -> Method:
        """The method of a cell that can be run."""
        assert self.plan is not None
        return self.plan.recipe.method

    @property
    def measured(self) -> str:
        """What the metric was measured on. Only values with the same answer are compared."""
        if self.metric in OWN_DATA:
            return self.metric
        if self.plan and self.plan.recipe.evaluate_on == "own":
            return "own"
        return "union"


@dataclass(frozen=True)
class Experiment:
    """A table: its cells, row by row, and where it was published."""

    name: str  # the file's name without its suffix
    title: str  # what the table shows
    source: str  # paper and table; empty if nothing was published
    link: str  # address of the paper
    note: str  # which of the paper's settings are not known or cannot be expressed
    differs: str  # why none of its values can be compared; empty if they can
    seeds: tuple[int, ...]  # seeds; each cell is run once with each
    all_seeds: int  # number of seeds in the file; a budget can use fewer
    budget: str  # name of the budget
    rows: tuple[str, ...]  # labels of the rows
    columns: tuple[str, ...]  # labels of the columns
    cells: tuple[Cell, ...]  # one for each row and column
    methods_in_rows: bool  # whether rows are compared with each other; otherwise columns are
    # labels of methods whose differences to all others are shown, seed by seed
    paired: tuple[str, ...] = ()


def read(path: Path, budget: str = PAPER) -> Experiment:
    """Read the experiment in a file, at one of its budgets."""
    return parsed(_content(path), path.stem, budget, str(path))


def parsed(content: str, name: str, budget: str, where: str) -> Experiment:
    """Read the experiment in the text of a file."""
    with at(where):
        try:
            values = tomllib.loads(content)
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"it is not valid TOML: {error}") from None
        entries = made(_Content, values)
        if not entries.row:
            raise UserError("give at least one [[row]]")
        default = entries.settings
        seeds = entries.seeds
        if not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"seeds must differ from each other, and be one at least, not {seeds}")
        rows = _entries(entries.row, "row", _ROW)
        columns = _entries(entries.column, "column", _OWN)
        if not columns:
            columns = [{"label": _measured(default, rows)}]
        kinds = set()
        for entry in (*columns, *rows):
            if "method" in entry and "skip" not in entry:
                kinds.add(method_named(text(entry, "method")))
        known = budgets(entries.budget, kinds)
        if budget not in known:
            raise unknown("budget", budget, known)
        chosen = known[budget]
        cells = []
        for row, number in product(rows, range(len(columns))):
            cells.append(_cell(default, columns, number, row, chosen, entries.printed_seeds))
        _check_folders(cells)
        of_rows = _labels(rows)
        of_columns = _labels(columns)
        in_rows = any("method" in row for row in rows)
        methods = of_columns
        if in_rows:
            methods = of_rows
        for label in entries.paired:
            if label not in methods:
                raise unknown("method in paired", label, methods)
        return Experiment(
            name=name,
            title=text(values, "title") or name,
            source=text(values, "source"),
            link=text(values, "link"),
            note=text(values, "note"),
            differs=text(values, "differs"),
            seeds=seeds[: chosen.seeds],
            all_seeds=len(seeds),
            budget=budget,
            rows=of_rows,
            columns=of_columns,
            cells=tuple(cells),
            methods_in_rows=in_rows,
            paired=tuple(dict.fromkeys(entries.paired)),
        )


def _content(path: Path) -> str:
    try:
        return read_text(path)
    except OSError as error:
        others = list(map(str, path.parent.glob("*.toml")))
        near = get_close_matches(str(path), others, n=1)
        hint = "give the path of an experiment file (docs/experiments.md)"
        if near:
            hint = f"did you mean {near[0]}?"
        raise UserError(f"cannot read {path} ({error.strerror}): {hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def _entries(given: Sequence[Entry], kind: str, own: Sequence[str]) -> list[Entry]:
    """Return rows or columns. An entry with a list of values for a setting stands for one entry per
    value.
    """
    found: list[Entry] = []
    for entry in given:
        found += _each(entry, kind, own)
    return found


def _labels(entries: Sequence[Entry]) -> tuple[str, ...]:
    return tuple(entry["label"] for entry in entries)


def _each(entry: Entry, kind: str, own: Sequence[str]) -> Iterator[Entry]:
    label = entry.get("label")
    if not isinstance(label, str) or not label.strip():
        raise UserError(f"every [[{kind}]] needs a label (text), one has {label!r}")
    label = text(entry, "label")
    with at(f"{kind} {label!r}"):
        grid = {}
        for name, values in entry.items():
            if name not in own and is_grid(name, values):
                if not values:
                    raise UserError(f"{name} is a list without values: give at least one")
                grid[name] = values
        if grid and "printed" in entry:
            raise UserError(
                "write a row of its own for each printed value, without lists of settings"
            )
        for values in product(*grid.values()):
            one = entry | dict(zip(grid, values, strict=True)) | {"label": label}
            try:
                if grid:
                    one["label"] = label.format_map(one)
            except (LookupError, ValueError, AttributeError, TypeError) as error:
                raise UserError(f"the label must name settings as {{clients}}: {error}") from None
            yield one


def _check_folders(cells: Sequence[Cell]) -> None:
    """Refuse cells whose run folders would have the same name, or a name too long for a file
    system.
    """
    seen: dict[str, Cell] = {}
    for cell in cells:
        if len(cell.slug.encode()) > _LONGEST:
            raise UserError(
                f"the labels of {cell.label[:30]!r}... are too long to name a run folder: shorten "
                "them"
            )
        if other := seen.get(cell.slug):
            raise UserError(
                f"{other.label!r} and {cell.label!r} would share a run folder: let their labels "
                "differ in letters "
                "or digits (in a grid by the settings, as {clients})"
            )
        seen[cell.slug] = cell


def _cell(
    default: Entry,
    columns: Sequence[Entry],
    number: int,
    row: Entry,
    budget: Budget,
    printed_runs: int | None,
) -> Cell:
    """Return one cell; settings of later layers win over earlier ones."""
    column = columns[number]
    with at(f"row {row['label']!r}, column {column['label']!r}"):
        special = table(row.get("at", {}), "at")
        labels = _labels(columns)
        for label in special.keys() - labels:
            raise unknown("column in at", label, labels)
        given = (default, column, row, table(special.get(column["label"], {}), "at"))
        method = _last(given, "method")
        layers: list[Entry] = []
        for layer in given:
            layers += _parts(layer, method)
        note, differs = ("; ".join(_texts(layers, key)) for key in ("note", "differs"))
        printed = _printed(row.get("printed"), number, len(columns), printed_runs)
        metric = _last(layers, "metric") or METRICS[0]
        skip = _last(layers, "skip")
        if metric not in (*METRICS, *_OF_TASKS):
            raise unknown("metric", metric, (*METRICS, *_OF_TASKS))
        cell = Cell(row["label"], column["label"], None, printed, metric, skip, differs, note)
        if skip:
            return cell
        if not method:
            raise UserError("neither row nor column names a method")
        plan, scaled = budget.scale(
            plan_of(method, {"threads": 1} | _merged(method_named(method), layers))
        )
        # it is measured only if the file asks for it
        if metric not in METRICS:
            plan = replace(plan, recipe=replace(plan.recipe, metric=metric))
        if metric == "client_mean_trained" and plan.recipe.evaluate_on != "own":
            raise UserError(f'metric {metric} is not measured: add evaluate_on = "own"')
        return replace(cell, plan=plan, scaled=scaled)


def _measured(default: Entry, rows: Sequence[Entry]) -> str:
    """Return the label of the only column of a file without columns: the metric, if all rows have
    the same.
    """
    found = set()
    for row in rows:
        method = _last((default, row), "method")
        layers = (*_parts(default, method), *_parts(row, method))
        name, task, data = (_last(layers, key) for key in ("metric", "task", "data"))
        # accuracy, or what the task has in its place
        if name not in _OF_TASKS or name == METRICS[0]:
            name = METRICS[0]
            if task in KINDS:
                name = KINDS[task].metrics[0].name
            elif data and data not in NAMED:
                name = "headline metric"
        if name in _OF_TASKS:
            name += _OF_TASKS[name].unit
        found.add(name)
    if len(found) > 1:
        return "headline metric"
    return found.pop()


def _texts(layers: Sequence[Entry], key: str) -> list[str]:
    """Return the texts of all layers that have one."""
    return list(filter(None, (text(layer, key) for layer in layers)))


def _last(layers: Sequence[Entry], key: str) -> str:
    """Return the text of the last layer that has one."""
    return ["", *_texts(layers, key)][-1]


def _parts(layer: Entry, method: str) -> tuple[Entry, Entry]:
    """Return a layer's entries for one method: its own, and those in the table of the method's
    name.
    """
    shared = {}
    for name, value in layer.items():
        if not isinstance(value, dict):
            shared[name] = value
        elif name != "at" and name not in _TITLES:
            raise unknown("method", name, _TITLES)
        # "average" is a hyperparameter too
        if name in _TITLES and name not in known_anywhere():
            table(value, name)
    own = layer.get(method.removesuffix(LAP))
    # "average" is a hyperparameter, too, and then no table
    if not isinstance(own, dict):
        own = {}
    return shared, {"method": method} | own


def _merged(kind: type[Method], layers: Sequence[Entry]) -> dict[str, Any]:
    """Return the settings of a method. A layer that is not the method's may also hold other
    methods' settings.
    """
    merged: dict[str, Any] = {}
    known = common_settings() | settings_of(kind)
    for layer in layers:
        for name, value in layer.items():
            # `_cell` reads that
            if name in known and name != "metric":
                merged[name] = value
            elif name not in _ROW and ("method" in layer or name not in known_anywhere()):
                raise unknown(f"setting of {kind.title()}", name, known)
    return merged


def _printed(values: object, number: int, columns: int, runs: int | None) -> Published | None:
    """Return the printed value in a row: a number, or text such as "47.74 ± 1.68"; "-" means
    none.
    """
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != columns:
        raise UserError(
            f"printed must be a list of one value for each of the {columns} columns, not {values}"
        )
    value = values[number]
    if value == "-":
        return None
    # neither NaN nor more than a float can be
    if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e308:
        return Published(float(value), runs=runs)
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ± (\d+(?:\.\d+)?)", str(value))
    if match:
        return Published(float(match[1]), float(match[2]), runs)
    raise UserError(f'a printed value must be a number, "mean ± std" or "-", not {value!r}')
