"""The command line for what comes after a run: `ekiden predict`, `export`, `card`, `audit`."""

import sys
from dataclasses import dataclass
from math import floor
from pathlib import Path
from typing import Annotated

from torch import nn

from ekiden.cli.console import console, print_json, say
from ekiden.clinic.regressions import Baseline
from ekiden.commands import exported
from ekiden.core.base import outside
from ekiden.core.base.checks import Alias, CountOrZero, Positional, Positive
from ekiden.core.base.errors import UserError, counted, unknown
from ekiden.core.base.files import write
from ekiden.core.training.private.promise import spent_epsilon
from ekiden.lab.drawing import table_of
from ekiden.runs import audit as audits
from ekiden.runs import card as cards
from ekiden.runs import predictions
from ekiden.runs.config import not_finished
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.loading import load_model, open_run
from ekiden.runs.predictions import column_in
from ekiden.runs.summary import summarise, thresholds_in

_Out = Annotated[str, Alias("-o")]


@dataclass(frozen=True)
class PredictOptions:
    """Predict for files with the model of a run: a class and its probability for each, as a
    table.
    """

    run: Positional[Path]
    """run folder"""
    files: Positional[tuple[Path, ...]] = ()
    """what the model takes: images of any size and folders of them, DICOM and NIfTI files, Parquet
    or CSV files, texts, arrays (.npy, .npz, .safetensors)"""
    out: _Out = predictions.STDOUT
    """file to write, .parquet or .csv; -: CSV to the standard output; for segmentation a folder of
    masks"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    column: str = ""
    """column of tables that holds the images, texts or arrays, or the array in a .npz file; by
    default that of the run's own data"""
    threshold: str = ""
    """of two classes: the probability from which on a sample is of the second one; a number, or a
    rule by which the run measured one at its end: youden, sensitivity. By default the one chosen by
    `ekiden evaluate --calibrate`, or 0.5"""
    at: tuple[Positive, ...] = ()
    """of times and events: also predict the share that has not had the event at each of these
    times"""
    baseline: Path | None = None
    """table with the times and events of a hospital whose hazard --at uses, instead of that of all
    silos"""
    label_column: tuple[str, ...] = ()
    """columns of that table with the time and the event; by default those of the run's own data"""
    network: str = ""
    """FILE.py:NAME, the network of a run that was started from Python with a module of its own"""
    overwrite: bool = False
    """replace the file if it is there"""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run for other software, or the metrics of runs as one table."""

    paths: Positional[tuple[Path, ...]]
    """the run folder; for metrics run folders and sweep folders"""
    to: str = ""
    """the model: onnx (needs the extra ekiden[onnx]), pt2 (a program of torch.export), hf (a folder:
    config.json, model.safetensors, model.pt2, README.md); the metrics: parquet, csv; by default what
    the name of the output says"""
    out: Annotated[Path | None, Alias("-o")] = None
    """file or folder to write"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    network: str = ""
    """FILE.py:NAME, the network of a run that was started from Python with a module of its own"""
    overwrite: bool = False
    """replace the model that is there; metrics are always replaced"""


@dataclass(frozen=True)
class CardOptions:
    """Write a model card in Markdown: what was trained, on how many samples, how, how good it is,
    what is not known.
    """

    run: Positional[Path]
    """run folder"""
    out: _Out = predictions.STDOUT
    """file to write; -: the standard output"""
    overwrite: bool = False
    """replace the file if it is there"""


@dataclass(frozen=True)
class AuditOptions:
    """Attack the models of a run on this machine: does their loss tell training samples from
    others?
    """

    run: Positional[Path]
    """run folder"""
    network: str = ""
    """FILE.py:NAME, the network of a run that was started from Python with a module of its own"""
    shadows: CountOrZero = 0
    """also attack with this number of models that the attacker trains (LiRA), 4 or more; each takes
    as long as the run"""
    json: bool = False
    """print JSON: `attacks` (`model`, `members`, `others`, `auc`, `tpr_1`, `tpr_01`,
    `advantage`, `epsilon`), the ε that was `promised` or null, and who got what (`shown`)"""


def predict(options: PredictOptions) -> None:
    """`ekiden predict RUN FILES... [-o OUT]`."""
    model = load_model(
        options.run, client=options.client, network=own_network(options.network, options.run)
    )
    opened = open_run(options.run)
    if line := not_finished(opened.config, opened.state.step):
        print(line, file=sys.stderr)
    column = options.column or column_in(opened.config)
    threshold = None
    if options.threshold:
        if model.recalibration and not _is_number(options.threshold):
            raise UserError(
                "the run measured thresholds before it was recalibrated: give --threshold a number, "
                "or none"
            )
        threshold = _threshold(options.threshold, options.run)
    answers = predictions.Answers(model, threshold, options.at, _baseline(options))
    count = predictions.predict(
        answers, options.files, options.out, column=column, overwrite=options.overwrite
    )
    if options.at and answers.baseline is model.baseline and model.baseline and model.baseline.mean:
        print(
            "survival is that of a constant hazard, as the network was trained with it",
            file=sys.stderr,
        )
    if answers.threshold is not None:
        line = f"{model.classes[1]} from a probability of {answers.threshold:.6g} on"
        print(line, file=sys.stderr)
    if options.out != predictions.STDOUT:
        say(f"{counted(count, 'prediction')} written to {options.out}")


def _baseline(options: PredictOptions) -> Baseline | None:
    """Return the hazard of the rows that the user names, if any."""
    if options.baseline is None:
        if options.label_column:
            raise UserError(
                "--label-column names columns of the table that --baseline names: give both"
            )
        return None
    if not options.at or options.client:
        raise UserError(
            "--baseline is for survival by the global model: give --at, and leave out --client"
        )
    columns = {}
    if options.label_column:
        columns["label_column"] = list(options.label_column)
    run = open_run(options.run, network=own_network(options.network, options.run))
    return run.baseline(options.baseline, options.at, **columns)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _threshold(text: str, run: Path) -> float:
    """Return a threshold: a number, or what the run measured at its end by a rule."""
    if _is_number(text):
        return float(text)
    found = {rule.split()[0].lower(): at for rule, at in thresholds_in(summarise(run)).items()}
    if not found:
        raise UserError(
            "the run measured no threshold: give --threshold a number, or run it with --metric "
            "auroc"
        )
    if text not in found:
        raise unknown("threshold", text, tuple(found))
    return found[text]


def export(options: ExportOptions) -> None:
    """`ekiden export RUN... -o OUT [--to FORMAT]`."""
    if options.out is None:
        raise UserError("say what to write: -o OUT.parquet, OUT.onnx, ..., or FOLDER and --to hf")
    network = own_network(options.network, options.paths[0])
    chosen = (options.to, options.client, network, options.overwrite)
    for line in exported(options.paths, options.out, *chosen):
        say(line)


def audit(options: AuditOptions) -> None:
    """`ekiden audit RUN`."""
    found = audits.audit(
        open_run(options.run, network=own_network(options.network, options.run)),
        None,
        options.shadows,
    )
    if options.json:
        return print_json(found.to_json())
    numbers = (
        "training",
        "others",
        "AUC",
        "TPR at 1 %",
        "TPR at 0.1 %",
        "advantage",
        "epsilon at least",
    )
    table = table_of("model", *numbers, right=numbers)
    for one in found.attacks:
        rare = "-" if one.tpr_01 is None else f"{one.tpr_01:.2%}"
        rates = (
            f"{one.auc:.3f}",
            f"{one.tpr_1:.2%}",
            rare,
            f"{one.advantage:.3f}",
            # a bound from below
            f"{floor(100 * one.epsilon) / 100:.2f}",
        )
        table.add_row(one.model, str(one.members), str(one.others), *rates)
    console.print(table)
    promised = "no epsilon was promised"
    if found.promised is not None:
        promised = f"epsilon {spent_epsilon(found.promised)} was promised"
    for line in (f"{promised}; a loss below a threshold is a weak attack", *found.shown):
        say(line)


def card(options: CardOptions) -> None:
    """`ekiden card RUN [-o FILE]`."""
    if options.out != predictions.STDOUT:
        predictions.check_free(Path(options.out), options.overwrite)
    text = cards.card(open_run(options.run))
    if options.out == predictions.STDOUT:
        print(text, end="")
        return
    write(Path(options.out), [text.encode()])
    say(f"model card written to {options.out}")


def own_network(name: str, run: Path) -> ModelSource | None:
    """Return what `--network` names: a module, or a function that makes one from shape and
    classes.
    """
    if not name:
        return None
    if not outside.is_file(name):
        raise UserError(f"--network {name!r} names no file: give FILE.py:NAME")
    found = outside.load(name)
    if isinstance(found, nn.Module):
        return found
    config = open_run(run).config

    def make() -> nn.Module:
        made = outside.call(
            name, "ekiden.models", tuple(config["input"]["shape"]), len(config["classes"])
        )
        if not isinstance(made, nn.Module):
            raise UserError(f"{name} gives {type(made).__name__}, not a torch.nn.Module")
        return made

    return make
