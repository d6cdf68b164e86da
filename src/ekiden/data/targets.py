"""Find out what the labels of files mean: the task, and its targets as tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.raw import Raw, class_codes, codes
from ekiden.data.samples import Dataset
from ekiden.data.tasks import Classification, LanguageModelling, MultiLabel, Regression, Task, named

_MANY = 50  # different whole numbers in a label; more are hardly classes

KINDS = {"images": "images", "table": "a table", "tokens": "texts", "arrays": "arrays"}


def targets(raws: Sequence[Raw], task: str, like: Dataset | None) -> tuple[list[Tensor], tuple[str, ...], Task]:
    """Return the labels of each part, the names of the outputs, and the task."""
    source = raws[0].source
    parts = [raw.label for raw in raws]
    chosen = like.task if like is not None else named(task) if task else _guess(raws)
    if not isinstance(chosen, LanguageModelling) and raws[0].kind == "tokens" and not raws[0].targets:
        raise UserError(
            f"{source} has no column 'label': say which one holds the labels (--label-column, label_column=), "
            "or learn the texts themselves by --task language-modelling"
        )
    match chosen:
        case LanguageModelling():
            if raws[0].kind != "tokens":
                raise UserError(
                    f"language modelling needs texts, but {source} holds {KINDS[raws[0].kind]}: name a --text-column"
                )
            return [torch.zeros(len(p), dtype=torch.int64) for p in parts], (), chosen
        case Classification():
            if any(part.ndim > 1 for part in parts):
                raise UserError(
                    "classification has one label per sample: name one --label-column, or use --task multi-label"
                )
            whole = [_whole(part, raw) for part, raw in zip(parts, raws, strict=True)]
            names = like.classes if like is not None else raws[0].classes
            if (names or raws[0].kind == "images") and (like is None or any(p.dtype.kind != "i" for p in whole)):
                return *class_codes(whole, names, source), chosen
            y, classes = codes([p.astype(np.str_) for p in whole], names, "label", source)
            if len(classes) < 2:
                raise UserError(f"all labels in {source} are {classes[0]!r}: classification needs two classes or more")
            return y, classes, chosen
        case MultiLabel() | Regression():
            numbers = [_numbers(part, raw, chosen.kind) for part, raw in zip(parts, raws, strict=True)]
            y = [chosen.labels(torch.from_numpy(p), len(p), raw.source) for p, raw in zip(numbers, raws, strict=True)]
            columns = raws[0].targets
            width = 1 if y[0].ndim == 1 else y[0].shape[1]
            if len(columns) != width:
                columns = tuple(f"{columns[0] if columns else 'y'}-{k}" for k in range(width))
            return y, columns if like is None else like.classes, chosen
    raise UserError(f"{chosen.kind} cannot be read from files: give a function that makes the data, FILE.py:NAME")


def _guess(raws: Sequence[Raw]) -> Task:
    """Infer the task from the labels."""
    parts = [raw.label for raw in raws]
    if parts[0].ndim > 1:
        binary = all(np.isin(part, (0, 1)).all() for part in parts)
        return MultiLabel() if binary else Regression()
    if all(part.dtype.kind == "f" for part in parts) and any((part != np.floor(part)).any() for part in parts):
        return Regression()
    different = {value for part in parts for value in np.unique(part).tolist()}
    if all(part.dtype.kind in "if" for part in parts) and len(different) > _MANY and not raws[0].classes:
        shown = raws[0].targets[0] if raws[0].targets else "label"
        raise UserError(
            f"the label {shown!r} of {raws[0].source} has {len(different)} different whole numbers: use "
            "--task regression if they are numbers to predict, or --task classification if they are classes"
        )
    return Classification()


def _whole(part: NDArray[Any], raw: Raw) -> NDArray[Any]:
    """Return the labels of classes: names or integers."""
    if part.dtype.kind != "f":
        return part
    if (part != np.floor(part)).any():
        row = int(np.flatnonzero(part != np.floor(part))[0])
        raise UserError(f"the label in {raw.where(row)} is {part[row]}, not a class: use --task regression")
    return part.astype(np.int64)


def _numbers(part: NDArray[Any], raw: Raw, kind: str) -> NDArray[np.float64]:
    if part.dtype.kind == "U" and kind == "multi-label" and set(np.unique(part)) <= {"true", "false"}:
        part = part == "true"
    if part.dtype.kind == "U":
        raise UserError(
            f"the label {raw.targets[0] if raw.targets else 'label'!r} of {raw.source} holds text ({str(part[0])!r}): "
            f"{kind} needs numbers"
        )
    if kind == "multi-label" and part.ndim == 1:
        part = part[:, None]
    return part.astype(np.float64)


def provisional(task: Regression, y: Tensor) -> Regression:
    """Return the task with the scale of these targets."""
    columns = (y[:, None] if y.ndim == 1 else y).double()
    std = columns.std(0, correction=0)
    return replace(task, mean=tuple(columns.mean(0).tolist()), std=tuple(torch.where(std > 0, std, 1.0).tolist()))
