"""Measure the models of a run on its own test data or on others."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ekiden.clinic.answers import further, subgroups_of
from ekiden.clinic.regressions import Baseline, baseline_of
from ekiden.clinic.subgroups import check_divisions, divisions
from ekiden.core.base.checks import made
from ekiden.core.base.errors import UserError, listed
from ekiden.core.data.samples import Dataset, FederatedData, Samples, said_in
from ekiden.core.engine.drive import Row
from ekiden.core.engine.evaluation import Built, TestSet
from ekiden.core.engine.folder import settings_in
from ekiden.core.engine.setup import check_model, resolved_hardware, why_unusable
from ekiden.core.engine.worker import Setup, Worker
from ekiden.runs.config import inputs_of, task_in
from ekiden.runs.record import RunRecord

Part = Literal["all", "test"]


def evaluate(
    result: RunRecord,
    data: Any,
    client: str,
    by: str | Sequence[str],
    part: Part,
    columns: Mapping[str, Any],
) -> Row:
    """Measure the models of a run; see `Result.evaluate`."""
    if columns and not _has_columns(data):
        raise UserError(
            f"unknown argument {next(iter(columns))!r}: only a file or a frame has columns to name"
        )
    silos_by = said_in(result.config).get("reading", {}).get("group_column", "")
    divided = divisions((by,) if isinstance(by, str) else by, silos_by)
    if divided and (client or result.weights is None):
        raise UserError("by is for a run's global model: leave it out, or measure another run")
    silos = result.data() if data is None else silos_in(data, result.config, columns, part)
    test = judge(result, silos)
    if divided:
        check_divisions(divided, silos.dataset)
    if not client:
        row = test(result.weights, result.personal, last=True)
        if divided and result.weights is not None:
            found = subgroups_of(test, test.scores(result.weights, full=True), divided)
            row |= found | {"groups": row.get("groups", {}) | found["groups"]}
        return row
    scores = test.scores(result.personal_model(client), personal=True)
    return {
        test.task.headline.name: scores.score(),
        "loss": scores.mean_loss(),
        "samples": len(scores),
    }


def judge(result: RunRecord, silos: FederatedData) -> TestSet:
    """Return what measures the run's models on the test samples of `silos`, prepared as in
    training.
    """
    _check_like(silos.dataset, result.config)
    if result.personal and len(silos.clients) != len(result.clients):
        raise UserError(
            f"there is a model for each of {len(result.clients)} clients, but the data have "
            f"{len(silos.clients)}: "
            "give the clients' silos, or use load_model(client=NAME)"
        )
    worker = Worker(_setup(result.build, result.config, silos.dataset), {})
    silos = replace(silos, dataset=worker.setup.dataset)
    check_model(worker, silos)
    return TestSet(
        worker, silos, len(result.clients), result.config["recipe"]["evaluate_on"], further
    )


def baseline(
    result: RunRecord, data: Any, times: Sequence[float], columns: Mapping[str, Any]
) -> Baseline:
    """Return the baseline hazard of other rows; see `Result.baseline`."""
    dataset = silos_in(data, result.config, columns).dataset
    _check_like(dataset, result.config)
    model = result.load_model()
    parts = [dataset.test]
    if dataset.train is not dataset.test:
        parts.append(dataset.train)
    baseline_of(Baseline(mean=1.0), model.task)
    risks = list[Tensor]()
    with torch.inference_mode():
        for part in parts:
            for x in torch.split(part.x, 4096):
                risks.append(model.encoded(x)[:, 0].double())
    y = torch.cat([part.y for part in parts])
    return Baseline.fitted(y.numpy(), torch.cat(risks).numpy(), times)


def _setup(build: Built, config: Mapping[str, Any], dataset: Dataset) -> Setup:
    """Return what measures a run's models on the test samples of `dataset`, prepared as in
    training.
    """
    given = config["input"]
    fed = replace(dataset, mean=tuple(given["mean"]), std=tuple(given["std"]), task=task_in(config))
    training, hardware = settings_in(config)
    if why_unusable(hardware.device):
        hardware = replace(hardware, device="cpu")
    # silos do not tell what they have
    hardware = resolved_hardware(hardware, 1, build.own)
    return Setup(build.method, build.own, fed, training, hardware, config["recipe"]["seed"])


def _has_columns(data: Any) -> bool:
    """Return whether data are a file, a folder or a frame."""
    # `import ekiden` stays light
    from ekiden.readers import frames

    return isinstance(data, str | os.PathLike) or frames.is_frame(data) or type(data) is dict


def silos_in(
    data: Any, config: Mapping[str, Any], columns: Mapping[str, Any], part: Part = "all"
) -> FederatedData:
    """Return the silos that `data` means; data that are not divided are one silo.

    Files and frames are read and scaled as the run's data were; `columns` say otherwise. Without a
    test part, all their samples are test samples, or with `part` "test" those that are held out.

    Raises:
        UserError: the run was trained on these files, so that all samples would flatter it.
    """
    # `import ekiden` stays light
    from ekiden.readers.assemble import from_tensors
    from ekiden.readers.columns import Reading
    from ekiden.readers.partition import Iid, split
    from ekiden.readers.sources import NAMED, load

    if isinstance(data, FederatedData):
        return data
    if _has_columns(data):
        inputs = inputs_of(config)
        said = made(Reading, said_in(config).get("reading", {}))
        chosen = {**said.with_schema().for_model(config["recipe"]["model"]).chosen(), **columns}
        # which other data need not have
        for column in (
            "schema",
            "group_column",
            "subject_column",
            "time_column",
        ):
            if column not in columns:
                chosen.pop(column, None)
        size = config["input"]["shape"][-1] if inputs.sized else None
        # whose test part is well known
        known = isinstance(data, str) and data in NAMED
        named = known and inputs.sized and not chosen
        like = None if named else _like(config)
        source = data
        data = load(data, size=size, like=like, whole=part == "all" and not known, **chosen)
        if data.train is data.test and _trained_on(source, config):
            raise UserError(
                f"the run was trained on {source}: leave it out to measure the run's test part"
            )
    if not isinstance(data, Dataset):
        data = from_tensors(data, data, classes=config["classes"])
    return split(data, Iid(), 1, seed=0, val_fraction=0)


def _trained_on(source: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a path is of data that the run was trained on."""
    if not isinstance(source, str | os.PathLike):
        return False
    said = said_in(config)
    path = Path(source).expanduser().absolute()
    known = [said.get("data", "")]
    for silo in said.get("silos", ()):
        known.append(silo.partition("=")[2])
    # an empty name would be this folder
    return any(path in (Path(one), *Path(one).parents) for one in filter(None, known))


def _like(config: Mapping[str, Any]) -> Dataset:
    """Return a data set without samples that has the run's classes, scaling and task."""
    given = config["input"]
    nothing = Samples(torch.zeros(0, *given["shape"]), torch.zeros(0, dtype=torch.int64))
    mean, std, classes = map(tuple, (given["mean"], given["std"], config["classes"]))
    return Dataset(
        "",
        nothing,
        nothing,
        classes,
        mean=mean,
        std=std,
        task=task_in(config),
        inputs=inputs_of(config),
    )


def _check_like(dataset: Dataset, config: Mapping[str, Any]) -> None:
    """Refuse data that would be measured with another meaning."""
    classes = tuple(config["classes"])
    own = inputs_of(config)
    if dataset.classes != classes:
        raise UserError(
            f"the model gives {listed(classes, 10)}; the labels of these data are "
            f"{listed(dataset.classes, 10)}: evaluate on data with the same labels"
        )
    if own.agreed and dataset.inputs != own:
        raise UserError(
            "these data are scaled differently from the run's: give their path or frame to "
            "evaluate, which then "
            "reads them as the run did"
        )
