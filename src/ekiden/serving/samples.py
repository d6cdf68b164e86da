"""Choose raw samples to try a model on."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.outside import pa
from ekiden.data.kinds import Images, Table, Tokens
from ekiden.engine.folder import read_config
from ekiden.results.model import LoadedModel
from ekiden.runs.plan import plan_in

_TRIED = 64


def samples_of(folder: Path, model: LoadedModel) -> tuple[Any, int]:
    """Return raw samples for the model of a run, and how many of them are of its own test data.

    For a table these are rows of an Arrow table, for other models a tensor (b, ...). If the run's data are not
    available (made in Python, at silos, or the files are gone), samples are made up from a fixed seed. Rows with
    missing numbers and unknown categories are always among them.
    """
    try:
        test = plan_in(read_config(folder), folder).federation().dataset.test
    except UserError:
        return _made_up(model), 0
    x = test.x[torch.linspace(0, len(test) - 1, min(_TRIED, len(test))).long()]
    if not isinstance(model.inputs, Table):
        return x, len(x)
    return pa.concat_tables([raw_rows(x, model.inputs), _made_up(model)]), len(x)


def raw_rows(x: Tensor, table: Table) -> Any:
    """Return an Arrow table of raw rows that are encoded as `x`, (n, d).

    A missing number that the encoding does not tell from the mean is the mean, and an unknown category is missing or,
    if that is known, another text.
    """
    numbers = x[:, : len(table.numeric)].double().numpy() * np.array(table.scale) + np.array(table.centre)
    for k, name in enumerate(table.gaps):
        numbers[x[:, len(table.numeric) + k].numpy() > 0, table.numeric.index(name)] = np.nan
    names = []
    for k, known in enumerate(table.vocabularies):
        all_of_them = np.array([_unknown(known), *known], dtype=np.str_)
        names.append(all_of_them[x[:, table.numbers + k].long().numpy()])
    return _arrow(table, numbers, names)


def _unknown(known: tuple[str, ...]) -> str:
    """Return a text that is not a known category."""
    return next(text for text in ("", *(f"other {k}" for k in range(len(known) + 1))) if text not in known)


def _arrow(table: Table, numbers: Any, names: Any) -> Any:
    columns = {
        name: pa.array(numbers[:, k], pa.float64(), mask=np.isnan(numbers[:, k]))
        for k, name in enumerate(table.numeric)
    }
    return pa.table(columns | {name: pa.array(names[k], pa.string()) for k, name in enumerate(table.categorical)})


def _made_up(model: LoadedModel) -> Any:
    generator = torch.Generator().manual_seed(0)
    match model.inputs:
        case Images():
            return torch.randint(0, 256, (_TRIED, *model.shape), generator=generator, dtype=torch.uint8)
        case Tokens(vocabulary=vocabulary):
            return torch.randint(0, vocabulary, (_TRIED, *model.shape), generator=generator)
        case Table() as table:
            numbers = torch.randn(_TRIED, len(table.numeric), generator=generator, dtype=torch.float64).numpy()
            numbers = numbers * np.array(table.scale) + np.array(table.centre)
            numbers[torch.rand(numbers.shape, generator=generator).numpy() < 0.2] = np.nan
            names = []
            for known in table.vocabularies:
                each = np.array(["", _unknown(known), *known], dtype=np.str_)
                names.append(each[torch.randint(0, len(each), (_TRIED,), generator=generator).numpy()])
            return _arrow(table, numbers, names)
        case _:
            return torch.randn(_TRIED, *model.shape, generator=generator)
