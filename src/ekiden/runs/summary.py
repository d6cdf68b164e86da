"""What run folders hold: as tables in the terminal, and as one tidy table for pandas and Polars."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import isfinite
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

from ekiden.clinic.regressions import Coefficient
from ekiden.core.base import outside
from ekiden.core.base.checks import all_but, plain
from ekiden.core.base.errors import UserError, at, counted
from ekiden.core.base.files import Damaged, read_regular, read_tensors
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.samples import said_in
from ekiden.core.engine import evaluation
from ekiden.core.engine.drive import told
from ekiden.core.engine.folder import (
    read_config,
    read_ledger,
    read_lines,
    read_passes,
    settings_in,
    why_ended,
)
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import SERVER
from ekiden.core.tasks import Metric, Scores
from ekiden.core.training.private.promise import condition, spent_epsilon
from ekiden.methods import known
from ekiden.readers.sources import NAMED
from ekiden.runs.clock import Devices, Timed, timed
from ekiden.runs.config import coefficients_in, data_name, flat, last_measured, task_in
from ekiden.runs.plan import in_memory
from ekiden.runs.recipe import recipe_of

if TYPE_CHECKING:
    import pyarrow as pa

_STEPS_TOLD = 20
_CHANGES = {"forgot": "forgotten", "joined": "joined"}
COUNTED = ("bytes", "forward", "backward")  # The numbers that every row of metrics has


@dataclass(frozen=True)
class Summary:
    """One run in numbers."""

    folder: Path  # its folder, or the file of records
    config: dict[str, Any]  # its config.json
    metrics: list[dict[str, Any]]  # its rows, one per step; a record has only the last
    seconds: float  # time of all steps
    # its environment.json; empty if that cannot be read
    environment: Mapping[str, Any] = field(default_factory=dict)
    recorded: bool = False  # whether this is the record of a finished run

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Its recipe, as plain values."""
        found: Mapping[str, Any] = self.config["recipe"]
        return found

    @property
    def finished(self) -> bool:
        """Whether all steps are done and there is a result."""
        if self.recorded:
            return True
        done = self.last.get("step", 0) == self.config["steps"]
        personal = len(list(self.folder.glob("personal/*.safetensors")))
        return done and (
            (self.folder / "model.safetensors").exists() or personal >= len(self.config["clients"])
        )

    @property
    def last(self) -> dict[str, Any]:
        """The last row of metrics."""
        return next(reversed(self.metrics), {})


def summarise(folder: Path) -> Summary:
    """Read a run folder."""
    config = read_config(folder)
    with at(str(folder)):
        _method(config)
    times = _lines_of_numbers(folder / "times.jsonl", "seconds")
    metrics = _lines_of_numbers(folder / "metrics.jsonl", "step", *COUNTED)
    seconds = sum(row["seconds"] for row in times)
    return Summary(folder, config, metrics, seconds, _environment(folder))


def _lines_of_numbers(path: Path, *names: str) -> list[dict[str, Any]]:
    """Return the lines of a file, each with these numbers."""
    rows = read_lines(path, *names)
    for row in rows:
        if not {type(row[name]) for name in names} <= {int, float}:
            raise UserError(
                f"{path} lacks a number that every line has: the run folder is damaged, start a "
                "new run"
            )
    return rows


def _environment(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_regular(folder / "environment.json", 1 << 20))
    except (OSError, ValueError, UserError):
        return {}
    return found if isinstance(found, dict) else {}


def simulated(run: Summary, devices: Devices | None) -> Timed | None:
    """Return how long a run would have taken on these devices; None without devices, or of a
    record.
    """
    if devices is None or run.recorded:
        return None
    ledger = [Transfer(**row) for row in read_ledger(run.folder)]
    with at(str(run.folder)):
        return timed(
            devices, list(run.config["clients"]), len(run.metrics), ledger, read_passes(run.folder)
        )


def as_record(run: Summary, devices: Devices | None = None) -> dict[str, Any]:
    """Return a run as plain values, for `--json`."""
    config = run.config
    metric = headline(run)
    clock = simulated(run, devices)
    record = {
        "folder": str(run.folder),
        "method": config["recipe"]["method"],
        "settings": label(config),
        "data": config["dataset"],
        "clients": config["clients"],
        "seed": config["recipe"]["seed"],
        "finished": run.finished,
        "step": run.last.get("step", 0),
        "steps": config["steps"],
        "metric": metric.name,
        "value": value_of(run, metric.name),
        **{name: run.last.get(name, 0) for name in COUNTED},
        "seconds": run.seconds,
    }
    if clock:
        record["simulated"] = clock._asdict()
    record["metrics"] = run.metrics
    if found := coefficients_of(run):
        record["coefficients"] = [one.to_json() for one in found]
    return record


def compared(summaries: Iterable[Summary], devices: Devices | None = None) -> list[dict[str, Any]]:
    """Return the rows of `comparison` as plain values: shares as numbers from 0 to 1, means over
    finished runs.
    """
    rows = []
    for group in grouped(summaries).values():
        done = [run for run in group.values() if run.finished]
        one = next(iter(group.values()))
        metric = headline(next(iter(done), one))
        seeds = list[int]()
        values = list[float]()
        diverged = 0
        numbers = defaultdict[str, list[float | None]](list)
        for run in done:
            seeds.append(run.recipe["seed"])
            if (value := value_of(run, metric.name)) is not None:
                values.append(value)
            diverged += bool(run.last.get("diverged"))
            for name in COUNTED:
                numbers[name].append(run.last[name])
            numbers["seconds"].append(run.seconds)
            if clock := simulated(run, devices):
                numbers["simulated"].append(clock.seconds[-1])
                numbers["computing"].append(clock.computing)
        names = [*COUNTED, "seconds"]
        if devices:
            names += ["simulated", "computing"]
        rows.append(
            {
                "method": label(one.config),
                "data": _data(one.config),
                "seeds": seeds,
                "unfinished": len(group) - len(done),
                "metric": metric.name,
                "higher": metric.higher,
                "values": values,
                "mean": _mean(values),
                "std": deviation(values),
                **{name: _mean(numbers[name]) for name in names},
                "diverged": diverged,
                "folders": [str(run.folder) for run in group.values()],
            }
        )
    return rows


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there are none."""
    if numbers := [value for value in values if value is not None]:
        return mean(numbers)
    return None


def grouped(summaries: Iterable[Summary]) -> dict[str, dict[int, Summary]]:
    """Return the runs that differ only in the seed, by their seeds."""
    groups: dict[str, dict[int, Summary]] = defaultdict(dict)
    # if two runs have the same seed, take a finished one; both are equal
    for summary in summaries:
        group = groups[_all_but_the_seed(summary.config)]
        if not (twin := group.get(summary.recipe["seed"])) or not twin.finished:
            group[summary.recipe["seed"]] = summary
    return groups


def majority(runs: Sequence[Summary]) -> str:
    """Return what always giving the commonest training label scores, in per cent; a dash if it is
    not known.
    """
    found = _mean(run.last.get("majority") for run in runs)
    if found is None:
        return "-"
    return f"{100 * found:.2f}"


def divergence(run: Summary) -> str:
    """Return one line about a run whose training diverged; empty for other runs."""
    if not run.last.get("diverged"):
        return ""
    task = task_in(run.config)
    guess = task.guess(task.outputs(run.config["classes"]))
    lr = recipe_of(run.recipe).step_size if _method(run.config) else run.recipe["training"]["lr"]
    if line := evaluation.divergence(run.last, guess, lr):
        line = f"{run.folder}: {line}"
    return line


def partition(config: Mapping[str, Any]) -> str:
    """Return how the data were divided. For `auto` this is what it stood for, if that is known."""
    plan = said_in(config)
    given = str(plan.get("partition", ""))
    if given != "auto":
        return given
    named = NAMED.get(plan.get("data", ""))
    if named and named.domains:
        return "domains"
    if plan.get("silos") or plan.get("reading", {}).get("group_column"):
        return "natural"
    # owners in the data have names
    if not all(name.removeprefix("client-").isdigit() for name in config["clients"]):
        return "natural"
    if named:
        return "dirichlet:0.5"
    return given


def imbalance(run: Summary) -> str:
    """Return one line about a run whose accuracy says little; empty for other runs."""
    return evaluation.of_imbalanced(run.last, task_in(run.config), run.config["classes"])


def headline(run: Summary) -> Metric:
    """Return the headline metric of a run, by the last row that was measured."""
    row = last_measured(run.metrics)
    return metric_named(run.config, str(row.get("metric", "accuracy")))


def metric_named(config: Mapping[str, Any], name: str) -> Metric:
    """Return a metric of a run's task. A metric of the user's own is known only by its name and
    direction.
    """
    higher = bool(config["task"].get("higher", True))
    return task_in(config).by_name().get(name) or Metric(
        name, _unmeasurable, higher=higher, share=False
    )


def _unmeasurable(scores: Scores) -> float:
    """Replace a metric of the user's own, whose values are only read from files."""
    raise NotImplementedError


def value_of(run: Summary, key: str) -> float | None:
    """Return a number of the last row, or a metric among all that were measured; None if there is
    none.

    If the task has no accuracy, `accuracy` is the headline metric.
    """
    row = run.last
    if key == "accuracy" and row.get(key) is None:
        key = row.get("metric", key)
    found = row.get(key, row.get("metrics", {}).get(key))
    return None if found is None else float(found)


def thresholds_in(run: Summary) -> dict[str, float]:
    """Return the thresholds of two classes that were measured last, by their rules."""
    row: Mapping[str, Any] = next((row for row in reversed(run.metrics) if "figures" in row), {})
    return {
        one["rule"]: float(one["threshold"]) for one in row.get("figures", {}).get("thresholds", ())
    }


def metric_of(run: Summary, key: str) -> Metric:
    """Return the metric that `value_of` gives for a key; means over clients are of the headline
    metric.
    """
    if key in task_in(run.config).by_name():
        return metric_named(run.config, key)
    return headline(run)


def about(run: Summary) -> str:
    """Describe data, training and result in a few lines."""
    training = ", ".join(f"{k} {v}" for k, v in trained(run.config, run.last).items() if v != [])
    state = "finished"
    if not run.finished:
        state = f"stopped after step {run.last.get('step', 0)}: {going_on(run)}"
    commonest = ""
    if "majority" in run.last:
        commonest = f"always giving the commonest class: {majority([run])} % accuracy"
    lines = (
        f"{_data(run.config)}; seed {run.recipe['seed']}; model of "
        f"{size(run.config['model_bytes'])}",
        training,
        f"{state}; {size(run.last.get('bytes', 0))} moved, {duration(run.seconds)}",
        commonest,
        imbalance(run),
        divergence(run),
    )
    return "\n".join(filter(None, lines))


def going_on(run: Summary) -> str:
    """Say why a run ended early, if that is known, and how to continue it."""
    if run.config.get("on") or not (why := in_memory(run.config)):
        return "; ".join(filter(None, [why_ended(run.folder), f"`ekiden resume {run.folder}`"]))
    given = {"its data": "silos", "its network": "network=...", "its metric": "metric=..."}
    what = next(argument for words, argument in given.items() if why.startswith(words))
    return f"{why}, so continue it there: `ekiden.resume({str(run.folder)!r}, {what})`"


def coefficients_of(run: Summary) -> tuple[Coefficient, ...]:
    """Return the coefficients of a finished regression; nothing for other runs."""
    if run.recorded or "family" not in run.recipe["hyperparameters"]:
        return ()
    try:
        return coefficients_in(run.config, read_tensors(run.folder / "model.safetensors")[0])
    except (OSError, ValueError, Damaged, UserError):
        # not finished
        return ()


def network(run: Summary) -> str:
    """Say what crossed the network, who could read it, and who was away; empty for a run on one
    machine.
    """
    if run.config.get("on") != "flower":
        return ""
    rows = read_lines(run.folder / "network.jsonl", "kind", "client", "sent", "received", "waited")
    crossed = measuring = sealed = served = 0
    absent = list[str]()
    away = list[str]()
    for row in rows:
        moved = int(row["sent"] + row["received"])
        crossed += moved
        if row["kind"] == "evaluate":
            measuring += moved
        if row["waited"] > 0:
            away.append(f"{row['client']} was away for {duration(row['waited'])}")
    for row in read_ledger(run.folder):
        if SERVER in (row["source"], row["target"]):
            served += row["bytes"]
        else:
            sealed += row["bytes"]
        if row["missing"]:
            absent.append(f"step {row['step'] + 1}: {row['source']} was absent")
    lines = (
        f"crossed the network: {size(crossed)} in {len(rows)} messages and answers, "
        f"{size(measuring)} of it to measure models; Flower's own bytes are not counted",
        f"sealed from silo to silo: {size(sealed)}; read by the server: {size(served)} and the "
        "result",
    )
    return "\n".join((*lines, *absent, *away))


def sums(run: Summary) -> str:
    """Say whether the sums of clients were masked; empty if the run's method has none that
    transports can mask.
    """
    method = _method(run.config)
    if method is None or not method.gives_sums:
        return ""
    if run.config.get("on") != "flower":
        return "sums: not masked (all clients were on one machine)"
    return "sums: masked; only totals over all silos could be read"


def privacy(config: Mapping[str, Any]) -> str:
    """Say what is promised about single training samples; empty without --dp."""
    if not (found := config.get("privacy")):
        return ""
    lines = [
        f"differential privacy of each training sample: epsilon {spent_epsilon(found['epsilon'])} at delta "
        f"{found['delta']:g}, for each silo and the whole run{condition(found)}; see docs/privacy.md for what is not "
        "promised"
    ]
    for client, one in found["clients"].items():
        lines.append(
            f"{client}: epsilon {spent_epsilon(one['epsilon'])}; noise {one['noise']:.3g} x clip "
            f"{found['clip']:g}, "
            f"{one['steps']} steps, each with {one['rate']:.2%} of the samples"
        )
    return "\n".join(lines)


def notes(run: Summary) -> str:
    """Return what the method noted, one line per step; of more than 20 steps only the last 20."""
    lines = [
        f"step {row['step']}: {told(row['notes'])}"
        for row in run.metrics
        if isinstance(row.get("notes"), dict)
    ]
    return "\n".join(lines[-_STEPS_TOLD:])


def label(config: dict[str, Any]) -> str:
    """Name the method, its settings that differ from the default and change the result, and what a
    budget reduced.
    """
    recipe = config["recipe"]
    training, hardware = settings_in(config)
    usual = plain(Training()) | plain(Hardware())
    if kind := known(recipe["method"]):
        usual = plain(kind()) | usual
    given = recipe["hyperparameters"] | plain(training)
    given |= {"device": hardware.device, "precision": hardware.precision}
    dp = recipe.get("dp")
    # if privacy or the method decides it
    if dp or config["selection"] != given["select"]:
        del given["select"]
    told = [f"{name}={value}" for name, value in given.items() if usual.get(name) != value]
    if dp:
        told.append(f"dp={dp}")
    text = outside.short(recipe["method"])
    if told:
        text += f" ({', '.join(told)})"
    text += _budget(config)
    for change, who in revised(config):
        text += f", {who} {_CHANGES[change]}"
    return text


def revised(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the changes of the clients since the original run, in order: what happened, and to
    which client.

    Runs that differ only in the seed have equal changes, whatever folders and totals they started
    from.
    """
    made = list[tuple[str, str]]()
    for revision in config.get("revisions", []):
        for change, who in revision.items():
            if change in _CHANGES:
                made.append((change, who))
    return made


def trained(config: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, Any]:
    """Return how clients trained, as the method decided it; nothing if they did not train up to the
    last row.
    """
    if last.get("backward") == 0:
        return {}
    # the method may decide what training returns
    return {**config["recipe"]["training"], "select": config["selection"]}


def _method(config: Mapping[str, Any]) -> Method | None:
    """Return the method of a run; None if it was made in Python, or in a file that is gone or has
    changed.
    """
    settings_in(config)
    return recipe_of(config["recipe"]).method if known(config["recipe"]["method"]) else None


def _budget(config: dict[str, Any]) -> str:
    """Say what a sweep's budget reduced for this run, if anything."""
    scaled = config.get("sweep", {}).get("scaled", [])
    if not scaled:
        return ""
    less = ", ".join(f"{s['name']} {s['used']} of {s['full']}" for s in scaled)
    return f", budget {config['sweep']['budget']}: {less}"


def _all_but_the_seed(config: dict[str, Any]) -> str:
    shared = [
        all_but(config["recipe"], "seed"),
        config.get("plan"),
        config["hardware"],
        config["dataset"],
        list(config["clients"]),
        revised(config),
    ]
    return json.dumps(shared, sort_keys=True)


def spread(values: Sequence[float], metric: Metric | None = None) -> str:
    """Return mean ± standard deviation, shares in per cent. Without a deviation it is the mean
    alone; without values, nothing.
    """
    digits = ".2f" if metric is None or metric.share else ".4g"
    if not values:
        return ""
    shown = f"{mean(values):{digits}}"
    std = deviation(values)
    if std is not None:
        shown += f" ± {std:{digits}}"
    return shown


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation of a sample; None of a single value, or if one is not finite."""
    if len(values) < 2 or not all(map(isfinite, values)):
        return None
    return stdev(values)


def size(number: float) -> str:
    """Return a number of bytes as readable text."""
    for unit in ("B", "kB", "MB", "GB"):
        shown = f"{number:.0f}" if unit == "B" else f"{number:.2f}"
        if float(shown) < 1000:
            return f"{shown} {unit}"
        number /= 1000
    return f"{number:.2f} TB"


def duration(seconds: float) -> str:
    """Return a number of seconds as readable text."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _data(config: Mapping[str, Any]) -> str:
    labels = said_in(config).get("reading", {}).get("label_column", ())
    dataset = ", ".join([data_name(config), *labels])
    return ", ".join(conditions(config, dataset, len(config["clients"])))


def conditions(config: Mapping[str, Any], dataset: str, clients: int) -> list[str]:
    """Return what compared runs share: data, how they were divided, clients, network."""
    parts = [dataset, partition(config), counted(clients, "client")]
    if (model := chosen_model(config)) != "auto":
        parts.append(outside.short(model))
    plan = said_in(config)
    if side := plan.get("size"):
        parts.append(f"{side} pixels")
    if plan.get("tune"):
        parts.append("on validation data")
    if config["recipe"]["evaluate_on"] == "own":
        parts.append("personal models on own data")
    return list(filter(None, parts))


def chosen_model(config: Mapping[str, Any]) -> str:
    """Return the network that the user chose; "auto" if nobody did, or the method has one of its
    own.
    """
    model: str = config["recipe"]["model"]
    method = _method(config)
    return "auto" if method and method.with_source("auto", "")[1] == model else model


def table(runs: Sequence[Summary]) -> "pa.Table":
    """Make a table with a row for each run and step: columns that identify the run, then its
    metrics, empty if missing.

    Each element of a list gets its own column; for clients this is client_accuracy_NAME.
    """
    # `ekiden show` does without it
    import pyarrow as pa

    rows = list[dict[str, Any]]()
    for run in runs:
        same = _identity(run)
        for row in run.metrics:
            rows.append(same | flat(row, run.config["clients"]))
    if not rows:
        raise UserError("no finished step there: give other folders, or let the runs do one first")
    # Arrow takes the columns from the first row
    rows[0] = dict.fromkeys(chain.from_iterable(rows)) | rows[0]
    return pa.Table.from_pylist(rows)


def write(runs: Sequence[Summary], file: Path) -> int:
    """Write the table as Parquet or CSV, depending on the file's suffix, and return the number of
    rows.
    """
    # it needs PyTorch, which `ekiden show` does without
    from ekiden.runs.predictions import TABLES, written_whole

    if file.suffix not in TABLES:
        raise UserError(f"{file} must end in {' or '.join(TABLES)}")
    with written_whole(str(file)) as write_part:
        return write_part(table(runs))


def _identity(run: Summary) -> dict[str, Any]:
    """Return the columns that identify a run."""
    config = run.config
    plan = said_in(config)
    swept = config.get("sweep", {})
    return {
        "run": str(run.folder),
        "method": config["recipe"]["method"],
        "data": config["dataset"],
        "partition": plan.get("partition"),
        "clients": len(config["clients"]),
        "model": config["recipe"]["model"],
        "seed": config["recipe"]["seed"],
        "settings": label(config),
        "row": swept.get("row"),
        "column": swept.get("column"),
        "budget": swept.get("budget"),
        "finished": run.finished,
    }
