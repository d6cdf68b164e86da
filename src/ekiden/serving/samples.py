"""Choose samples to try a model on."""

from pathlib import Path

import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data.inputs import Images, Tokens
from ekiden.engine.folder import read_config
from ekiden.experiments.plan import plan_in
from ekiden.results.model import LoadedModel

_TRIED = 64


def samples_of(folder: Path, model: LoadedModel) -> tuple[Tensor, bool]:
    """Return raw samples (b, ...) for the model of a run, and whether they are of its own test data.

    If the run's data are not available (made in Python, or the files are gone), samples are made up from a fixed seed.
    """
    try:
        test = plan_in(read_config(folder), folder).federation().dataset.test
    except UserError:
        return _made_up(model), False
    spread = torch.linspace(0, len(test) - 1, min(_TRIED, len(test))).long()
    return test.x[spread], True


def _made_up(model: LoadedModel) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    match model.inputs:
        case Images():
            return torch.randint(0, 256, (_TRIED, *model.shape), generator=generator, dtype=torch.uint8)
        case Tokens(vocabulary=vocabulary):
            return torch.randint(0, vocabulary, (_TRIED, *model.shape), generator=generator)
        case _:
            return torch.randn(_TRIED, *model.shape, generator=generator)
