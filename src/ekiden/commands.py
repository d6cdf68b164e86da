"""The commands of the command line as functions: what `ekiden resume`, `evaluate`, `report`, ...
do, from Python.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, overload

import torch
from torch import Tensor

from ekiden.clinic.answers import figures_of
from ekiden.clinic.recalibration import Recalibration, keep_subgroups, model_in
from ekiden.clinic.regressions import Baseline
from ekiden.core.base.checks import Count, CountOrZero, Fraction, Range, checked, plain
from ekiden.core.base.errors import UserError, counted, unknown
from ekiden.core.base.files import path_of, read_text
from ekiden.core.base.outside import require_extra, summary_of
from ekiden.core.data.samples import Dataset, FederatedData, coming_from
from ekiden.core.engine.drive import Row
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.setup import check_same_data
from ekiden.core.models import catalogue
from ekiden.core.tasks import Metric
from ekiden.lab import drawing, launch
from ekiden.lab.describe import Description, description
from ekiden.lab.tables import sweep as sweeps
from ekiden.lab.tables import verdicts
from ekiden.lab.tables.experiment import PAPER
from ekiden.lab.tables.sweep import expand, summaries
from ekiden.methods import method_named, titles
from ekiden.methods.gossip import topology as graphs
from ekiden.readers import frames
from ekiden.readers.partition import Iid, split
from ekiden.readers.sources import NAMED, load
from ekiden.runs import audit as audits
from ekiden.runs import card as cards
from ekiden.runs import exporting, predictions, summary
from ekiden.runs.api import How, as_federation, with_metric
from ekiden.runs.clock import Devices, devices_of
from ekiden.runs.config import not_finished
from ekiden.runs.loaded_model import LoadedModel, ModelSource
from ekiden.runs.loading import load_model, open_run
from ekiden.runs.measuring import Part
from ekiden.runs.plan import federation_in, go_on_with, in_memory, plan_in, refuse_lost, rerun
from ekiden.runs.predictions import TABLES, column_in
from ekiden.runs.recipe import recipe_of
from ekiden.runs.result import Result

Folder = str | os.PathLike[str]


@checked("folder", "data", "metric")
def resume(
    folder: Folder,
    data: Any = None,
    *,
    network: ModelSource | None = None,
    metric: str | Metric | Callable[[Tensor, Tensor], Any] = "",
    laps: Count | None = None,
    track: str | Sequence[str] = (),
    quiet: bool = False,
) -> Result:
    """Go on with an interrupted run; it ends as if nothing had happened.

    Args:
        folder: the run folder.
        data: who holds what, as in `ekiden.run`, if the run was given data in Python; or the path
            to which its file or folder was moved. They must be the same.
        network: the module that the run was started with, or a function that makes one, if the
            network is not in the library.
        metric: the headline metric, if that was a function.
        laps: how many a regression may make that has not converged within its limit.
        track: as in `ekiden.run`.
        quiet: as in `ekiden.run`.

    Raises:
        UserError: the data or the network are others, or the run is between machines.
    """
    path = path_of(folder)
    config = read_config(path)
    trackers = (track,) if isinstance(track, str) else tuple(track)
    if config.get("on") == "flower":
        raise UserError(
            f"{path} is a run between machines: use `ekiden resume {path}` at its coordinator"
        )
    moved = (os.fspath(data),) if isinstance(data, str | os.PathLike) else ()
    if moved or laps:
        go_on_with(path, moved, laps)
        config, data = read_config(path), None if moved else data
    if data is None and network is None and not metric:
        plan = plan_in(config, path)
        refuse_lost(plan, path)
        return plan.run(path, plan.federation(), how=How(track=trackers, quiet=quiet))
    held = federation_in(config, path) if data is None else as_federation(data)
    if network is None and config["network"] is None:
        raise UserError(f"{in_memory(config)}: give it as network")
    held = coming_from(with_metric(held, metric or config["task"].get("metric", "")), held.origin)
    how = How(folder=path, track=trackers, quiet=quiet)
    return rerun(config, recipe_of(config["recipe"]), held, network, how)


@checked("folder", "data")
def evaluate(
    folder: Folder,
    data: Any = None,
    *,
    client: str = "",
    by: str | Sequence[str] = (),
    part: Part = "all",
    calibrate: Literal["platt", "temperature"] | None = None,
    threshold: Fraction | None = None,
    network: ModelSource | None = None,
    **columns: Any,
) -> Row:
    """Measure the models of a run on its own test data or on others.

    Args:
        folder: the run folder.
        data: the run's silos, as they were given to `ekiden.run`: a digest of their samples must
            agree. Or other test data: a data set, its name or path, a frame, or (x, y). None means
            the run's own data, read again from their files.
        client: name of a client whose personal model is measured instead of all models.
        by: as in `Result.evaluate`. Of the run's own data the table is kept in the run folder, and
            reports show it.
        part: as in `Result.evaluate`.
        calibrate: of two classes: measure the validation samples instead, fit a recalibration to
            the counts, and keep it in the run folder with a threshold. `load_model`, `predict`,
            `export` and `card` then use both.
        threshold: with `calibrate`: the threshold of recalibrated probabilities; by default
            Youden's.
        network: as in `resume`.
        **columns: as in `Result.evaluate`.

    Returns:
        A row of metrics like those of a step; see `ekiden.core.engine.evaluation.TestSet`. With
        `calibrate` it has `recalibration`, too.

    Raises:
        UserError: the silos are not those of the run, or the data do not fit the models.
    """
    (path,) = _paths(folder)
    result = open_run(path, network=network)
    if is_silos(data):
        data = as_federation(data)
        check_same_data(
            result.config, recipe_of(result.config["recipe"]).method, data, path_of(folder)
        )
    own = data is None or isinstance(data, FederatedData)
    if calibrate:
        if client or by or not own:
            raise UserError(
                "calibrate is for the global model and the run's own silos: leave out the rest"
            )
        return _calibrated(
            result, path, calibrate, threshold, result.data() if data is None else data
        )
    if threshold is not None:
        raise UserError("threshold is for calibrate: give both, or none")
    row = result.evaluate(data, client=client, by=by, part=part, **columns)
    if own and "subgroups" in row:
        keep_subgroups(path, row["subgroups"])
    return row


def _calibrated(
    result: Result,
    path: Path,
    form: Literal["platt", "temperature"],
    threshold: float | None,
    silos: FederatedData,
) -> Row:
    """Fit a recalibration of a run's model on validation samples, and keep it."""
    task, classes = silos.dataset.task, silos.dataset.classes
    if task.kind != "classification" or len(classes) != 2 or result.weights is None:
        raise UserError("calibrate is for a global model of two classes: leave it out")
    test = result.judge(silos.for_tuning())
    found = figures_of(test, test.scores(result.weights, full=True))
    how = Recalibration.fitted(form, found, threshold, model_in(path))
    how.write(path)
    return {**test(result.weights, (), last=True), "recalibration": plain(how)}


@checked("folder")
def show(folder: Folder, *, devices: Folder | Devices = "") -> str:
    """Return what `ekiden show` prints: what was run, every step, what moved.

    Args:
        folder: the run folder.
        devices: as in `compare`.

    Raises:
        UserError: it is not a run folder, or is damaged.
    """
    return drawing.as_text(drawing.shown(path_of(folder), devices_of(devices)))


@checked("folders", "data")
def report(
    folders: Folder | Sequence[Folder],
    out: Folder = "report",
    *,
    data: Any = None,
    network: ModelSource | None = None,
    details: CountOrZero = 8,
    devices: Folder | Devices = "",
) -> Path:
    """Write the page of `ekiden report`, and return its file.

    Args:
        folders: run folders, sweep folders, or folders that hold them.
        out: folder that gets index.html, figures/ and data/.
        data: the silos of runs that were given data in Python; runs whose digests differ get no
            figures of them.
        network: their network, if it is not in the library.
        details: number of methods with figures of their own; with 0 no data are read.
        devices: as in `compare`; then there is also a figure over simulated time.

    Raises:
        UserError: there is no finished run, or the extra `report` is not installed.
    """
    require_extra("report", "report", "matplotlib", "jinja2")
    from ekiden.lab.reporting import report as write  # it needs an extra

    given = devices_of(devices)
    held = None if data is None else as_federation(data)
    write(_paths(folders), Path(out), details, data=held, network=network, devices=given)
    return Path(out) / "index.html"


@checked("folders")
def compare(
    folders: Folder | Sequence[Folder], *, devices: Folder | Devices = ""
) -> list[dict[str, Any]]:
    """Return what `ekiden compare` shows: a row for all runs that differ only in the seed.

    Args:
        folders: run folders, sweep folders, folders that hold them, and files of records.
        devices: on which the simulated time is computed, as in `Result.simulated`; by default there
            is none.

    Returns:
        Rows with the entries that `ekiden compare --help` lists; `pandas.DataFrame(ekiden.compare(folders))`
        is a table.

    Raises:
        UserError: there is no run.
    """
    given = devices_of(devices)
    runs = summaries(_paths(folders))
    if not runs:
        raise UserError("there is no run to compare: give run folders or sweep folders")
    return summary.compared(runs, given)


def describe(data: Any) -> Description:
    """Return what was understood of data, as `ekiden data` prints it: six lines, and who holds
    what.

    Args:
        data: silos as in `ekiden.run`, or one data set: what `ekiden.load` takes or returns.

    Raises:
        UserError: they cannot be read.
    """
    if is_silos(data):
        return description(as_federation(data))
    return description(
        split(data if isinstance(data, Dataset) else load(data), Iid(), 1, val_fraction=0)
    )


def available() -> dict[str, Any]:
    """Return what `ekiden list` prints: methods with a line on each, names of networks and of data
    sets.
    """
    home = os.environ.get("EKIDEN_DATA")
    local = {p.parent.name for p in Path(home).glob("*/train.parquet")} if home else set()
    return {
        "methods": {title: summary_of(method_named(title)) for title in titles()},
        "networks": list(catalogue.names()),
        "pretrained": list(catalogue.pretrained_names()),
        "data": sorted(set(NAMED) | local),
        "local": sorted(local),
    }


@checked()
def topology(
    name: str = "ring", clients: Annotated[int, Range(least=2, most=1000)] = 10
) -> dict[str, Any]:
    """Return what `ekiden topology` prints about a graph of clients.

    Args:
        name: complete, ring, torus, star, exponential, erdos_renyi:P[:SEED], peers:K, matching or
            one_peer.
        clients: N, number of clients.

    Returns:
        `neighbours` of each client, `sent` models in a round, `symmetric`, `columns_sum_to_1`,
        `connected`, `drawn` (whether each round has another graph), `spectral_gap`, `left` (what a
        round leaves of the distance between clients) and the mixing `matrix`, (N, N).

    Raises:
        UserError: there is no such graph of so many clients.
    """
    graphs.check(name, clients)
    matrix = graphs.mixing(name, clients, generator=torch.Generator().manual_seed(0))
    drawn, linked = graphs.is_drawn(name), (matrix > 0) | (matrix > 0).T
    degree = (matrix > 0).sum(1) - (matrix.diagonal() > 0).long()
    left = graphs.contraction(name, clients, 100 if drawn else 1)
    return {
        "neighbours": degree.tolist(),
        "sent": int(degree.sum()),
        "drawn": drawn,
        "symmetric": torch.allclose(matrix, matrix.T),
        "columns_sum_to_1": torch.allclose(matrix.sum(0), torch.ones(clients, dtype=matrix.dtype)),
        "connected": len(graphs.components(linked)) == 1,
        "spectral_gap": 1 - left,
        "left": left,
        "matrix": matrix.tolist(),
    }


@overload
def predict(
    run: Folder | LoadedModel,
    source: Any,
    out: None = None,
    *,
    client: str = ...,
    column: str = ...,
    threshold: float | None = ...,
    at: Sequence[float] = ...,
    baseline: Baseline | None = ...,
    network: ModelSource | None = ...,
) -> list[dict[str, Any]]: ...


@overload
def predict(
    run: Folder | LoadedModel,
    source: Any,
    out: Folder,
    *,
    client: str = ...,
    column: str = ...,
    threshold: float | None = ...,
    at: Sequence[float] = ...,
    baseline: Baseline | None = ...,
    network: ModelSource | None = ...,
    overwrite: bool = ...,
) -> int: ...


@checked("run", "source")
def predict(
    run: Folder | LoadedModel,
    source: Any,
    out: Folder | None = None,
    *,
    client: str = "",
    column: str = "",
    threshold: float | None = None,
    at: Sequence[float] = (),
    baseline: Baseline | None = None,
    network: ModelSource | None = None,
    overwrite: bool = False,
) -> list[dict[str, Any]] | int:
    """Return the predictions of a run's model, a row for each sample; or write them, and return how
    many they are.

    The columns are `file` (not of a frame); `row`, if a file holds several samples; `prediction`,
    the name of the class, and `probability_NAME` for each class.
    `ekiden.runs.predictions.Answers` describes those of other tasks. If a sample cannot be read,
    nothing is written.

    Args:
        run: the run folder, or its model.
        source: what the model takes: a path or a list of paths (images and folders of them, tables,
            texts, arrays), a frame, or a dict of columns.
        out: file to write, .parquet or .csv; for segmentation a folder of masks. None returns the
            rows instead.
        client: name of a client whose personal model is used.
        column: column of tables that holds the samples; by default that of the run's own data.
        threshold: of two classes, the probability from which on a sample is of the second one; by
            default the one that `ekiden evaluate --calibrate` chose, or 1/2.
        at: of times and events: times at which survival is told, in columns `survival_TIME`.
        baseline: the hazard from which it follows; by default the model's own. `Result.baseline`
            makes one from rows.
        network: as in `ekiden.load_model`.
        overwrite: whether a file that is there is replaced.

    Raises:
        UserError: a file is broken or does not fit the model, or the output cannot be written.
    """
    model = run
    if not isinstance(model, LoadedModel):
        column = column or column_in(read_config(path_of(model)))
        model = load_model(model, client=client, network=network)
    given = source if predictions.is_frame(source) else _paths(source)
    answers = predictions.Answers(model, threshold, at, baseline)
    if out is None:
        return predictions.rows(answers, given, column=column)
    return predictions.predict(answers, given, os.fspath(out), column=column, overwrite=overwrite)


@checked("folders")
def export(
    folders: Folder | Sequence[Folder],
    out: Folder,
    to: str = "",
    *,
    client: str = "",
    network: ModelSource | None = None,
    overwrite: bool = False,
) -> Path:
    """Write the model of a run for other software, or the metrics of runs as one table; return what
    was written.

    The exported model takes any number of raw samples at a time and scales them itself: pixels,
    tokens, arrays, or the columns of a table with its missing numbers and categories. It gives
    logits, or the numbers of a regression in their unit. Its outputs must equal those of
    `ekiden.load_model` on made-up raw samples to 1e-4 plus 0.1 %; otherwise nothing is written.
    Numbers of a regression are compared in standard deviations. The files contain no samples.

    Args:
        folders: the run folder; for metrics run folders and sweep folders.
        out: file or folder to write.
        to: of the model onnx (a file with class names in its metadata), pt2 (a program of
            `torch.export`) or hf (a folder with config.json,
            model.safetensors, model.pt2 and a model card). Of metrics parquet or csv. By default
            what the suffix of `out` says.
        client: name of a client whose personal model is written.
        network: as in `ekiden.load_model`.
        overwrite: whether a model that is there is replaced.

    Raises:
        UserError: the format is not known, the model cannot be written in it or then gives other
            outputs.
    """
    exported(folders, out, to, client, network, overwrite)
    return Path(out)


def exported(
    folders: Folder | Sequence[Folder],
    out: Folder,
    to: str,
    client: str,
    network: ModelSource | None,
    overwrite: bool,
) -> list[str]:
    """Do what `export` does, and return in lines what was written."""
    form, paths, place = to or Path(out).suffix.removeprefix("."), _paths(folders), Path(out)
    tables = [suffix.removeprefix(".") for suffix in TABLES]
    if form in tables:
        if client or network:
            raise UserError("a client and a network are for models: give to onnx, pt2 or hf")
        if place.suffix != f".{form}":
            raise UserError(f"{place} must end in .{form}")
        runs = [summary.summarise(folder) for folder in expand(paths)]
        rows = counted(summary.write(runs, place), "row")
        return [f"{rows} of {counted(len(runs), 'run')} written to {place}"]
    if form not in exporting.FORMATS:
        raise unknown("format", form, (*exporting.FORMATS, *tables))
    if len(paths) != 1:
        raise UserError("a model is of one run: give one run folder")
    done = exporting.export(
        paths[0], form, place, client=client, network=network, overwrite=overwrite
    )
    run = open_run(paths[0])
    lines = [
        f"written to {place}: gives the run's outputs on {done.samples} made-up samples (largest "
        f"difference {done.difference:.1e})",
        f"takes {done.takes}",
        not_finished(run.config, run.state.step),
    ]
    return list(filter(None, lines))


@checked("run", "data")
def audit(
    run: Folder | Result, data: Any = None, *, network: ModelSource | None = None, shadows: int = 0
) -> audits.Audit:
    """Attack the models of a run on one machine, and say who got what, as `ekiden audit` does.

    Args:
        run: the run folder, or its result.
        data: the run's silos, if they were given in Python; a digest of their samples must agree.
        network: as in `resume`.
        shadows: models that the attacker of LiRA trains, at least 4; each takes as long as the run.
            0: no such attack.

    Raises:
        UserError: the run's data are not here, or there are too few samples.
    """
    result = run if isinstance(run, Result) else open_run(*_paths(run), network=network)
    silos = None if data is None else as_federation(data)
    if silos is not None:
        check_same_data(
            result.config, recipe_of(result.config["recipe"]).method, silos, result.folder or Path()
        )
    return audits.audit(result, silos, shadows)


def card(folder: Folder) -> str:
    """Return a model card in Markdown, as `ekiden card` prints it: of the data only counts, shapes
    and names.

    Raises:
        UserError: it is not a run folder.
    """
    return cards.card(open_run(folder))


@checked("file")
def sweep(
    file: Folder,
    *,
    budget: str = PAPER,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    out: Folder | None = None,
    records: Folder | None = None,
    cores: int | None = None,
    device: str = "",
    on: str = "here",
    queue: Mapping[str, str | int] | None = None,
) -> list[dict[str, Any]]:
    """Run the table of an experiment file; the same call goes on after a kill or a failure.

    Args:
        file: the experiment file.
        budget: how much of it: paper, or a budget that the file defines.
        only: cells to run, as ROW, COLUMN or ROW/COLUMN.
        without: cells to leave out.
        out: the sweep folder; by default runs/FILE, or runs/FILE-BUDGET.
        records: file that keeps the results of finished runs.
        cores: runs at a time, if not one for each core.
        device: cpu, cuda, ... instead of the file's.
        on: where the runs are executed: here, as jobs of "slurm", or as jobs of this machine
            ("local-cluster").
        queue: with `on`, what submitit should ask for: {"slurm_partition": "gpu", "timeout_min":
            600}.

    Returns:
        A row for each cell, with the entries that `ekiden compare --help` lists.

    Raises:
        UserError: the file cannot be read, or runs failed; finished runs are kept.
    """
    launch.check_place(on)
    if queue and on == "here":
        raise UserError('queue is for on="slurm": add that, or leave it out')
    path, kept = path_of(file), None if records is None else Path(records)
    swept = sweeps.plan_sweep(path, budget, None if out is None else Path(out), kept)
    cells = sweeps.select(swept.experiment, only, without)
    runs = {run.folder: run for run in swept.runs(cells)}
    jobs = sweeps.jobs(swept, list(runs.values()), device)
    outcomes = sweeps.SweepOutcomes(swept, read_text(path), kept)

    def note(event: launch.Event | launch.RunEnd) -> None:
        if isinstance(event, launch.RunEnd):
            outcomes.add(runs[event.folder], event)

    if jobs and on == "here":
        launch.execute(jobs, note, cores, apart=True)
    elif jobs:
        launch.submit(jobs, path, budget, device, on, queue or {}, note)
    outcomes.end()
    if failed := outcomes.failed:
        name, why = next(iter(failed.items()))
        raise UserError(
            f"{counted(len(failed), 'run')} failed, such as {name}: {why}: fix the cause and call "
            "it again"
        )
    return verdicts.as_rows(swept, cells)


def sweep_results(folder: Folder) -> list[dict[str, Any]]:
    """Return the results of a sweep so far next to the printed values: a row for each cell, as
    `sweep` does.

    Args:
        folder: a sweep folder, or a file of records.

    Raises:
        UserError: it is neither.
    """
    return verdicts.as_rows(sweeps.opened(path_of(folder)))


@checked("folder")
def verify(folder: Folder, keys: Folder | None = None) -> dict[str, Any]:
    """Compare a run folder with what the silos signed, as `ekiden verify` does.

    Args:
        folder: folder of a run between machines.
        keys: folder with the public key NAME.pub of every silo, as you know it; by default the keys
            that the run had.

    Returns:
        The signed tasks (`hops`), and what they do not prove (`unproven`).

    Raises:
        UserError: the folder is not what the silos signed.
    """
    require_extra("flower", "verify", "flwr")
    from ekiden.silos import commands as flower  # it needs an extra
    from ekiden.silos.coordinator.verify import terms
    from ekiden.silos.coordinator.verify import verify as custody_of

    names = terms(path_of(folder)).clients
    found = custody_of(path_of(folder), flower.read_keys(Path(keys), names) if keys else None)
    if found.wrong:
        raise UserError(f"{folder} is not what the silos signed: {found.wrong[0]}")
    return {
        "hops": [asdict(hop) for hop in found.hops],
        "unproven": list(found.unproven),
        "result": bool(found.result),
    }


def _paths(given: Folder | Sequence[Folder]) -> list[Path]:
    if hasattr(given, "__array__"):
        raise UserError(
            "predict reads files and frames: for an array call the model, "
            "ekiden.load_model(folder)(x)"
        )
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [path_of(one) for one in given]
    return [path_of(given)]


def is_silos(data: Any) -> bool:
    """Return whether data are silos, as `ekiden.run` takes them, and not one data set."""
    if isinstance(data, Mapping):  # of silos, or of columns
        kinds = (tuple, str, os.PathLike)
        return all(
            isinstance(one, kinds) or frames.is_frame(one) or hasattr(one, "train")
            for one in data.values()
        )
    return isinstance(data, FederatedData | list)
