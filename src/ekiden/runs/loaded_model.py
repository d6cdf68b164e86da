"""A trained model that takes samples as they are."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.clinic.recalibration import Recalibrated, Recalibration, recalibration_in
from ekiden.clinic.regressions import Baseline
from ekiden.core.base.errors import UserError, listed
from ekiden.core.data.augment import normalise
from ekiden.core.tasks import Task
from ekiden.readers.kinds import Images, Inputs, Table
from ekiden.runs.config import inputs_of, task_in

ModelSource = nn.Module | Callable[[], nn.Module]
"""The module that a run was started with, or a function that makes one; its values do not
matter."""


class LoadedModel(nn.Module):
    """A trained network that takes samples as they are, in evaluation mode.

    Attributes:
        network: the network alone, which takes normalised samples.
        classes: the class names, in the order of the outputs.
        shape: shape of one sample, (C, H, W) for images.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, divided by.
        inputs: the kind of samples, and how raw samples become tensors:
            `model.encoded(model.inputs.encode(files))`.
        task: the meaning of the outputs: `model.task.answers(outputs, full=True)` are
            probabilities, or values.
        recalibration: what was done to the logits of two classes, with the threshold that was
            chosen; None if nothing.
        baseline: of times and events, the hazard from which survival follows; None if the model has
            none.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: tuple[str, ...],
        shape: tuple[int, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        inputs: Inputs,
        task: Task,
        recalibration: Recalibration | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        super().__init__()
        self.baseline = baseline
        self.network = network if recalibration is None else Recalibrated(network, recalibration)
        self.recalibration = recalibration
        self.classes = classes
        self.shape = shape
        self.mean = mean
        self.std = std
        self.inputs = inputs
        self.task = task
        self.eval()

    def forward(self, x: Any) -> Tensor:
        """Return outputs (b, K) for a batch; for classes these are logits.

        Args:
            x: tensor or array (b, *shape). uint8 pixels from 0 to 255, or float pixels in [0, 1];
                or float features, if the run had such data. Mean and standard deviation are applied
                here. Texts are (b, L) int64 tokens. Or what the run's data were made of: rows of a
                table (a frame, or a dict of columns), or a list of texts. Only with tensors, and by
                `encoded`, do the outputs have gradients.

        Raises:
            UserError: samples of another shape, or of another kind than the run's.
        """
        if not isinstance(x, Tensor):
            # whoever has frames and arrays goes on with NumPy
            with torch.no_grad():
                return self.encoded(self._tensor(x))
        if isinstance(self.inputs, Table):
            raise self._nameless("a tensor")
        return self.encoded(x)

    def encoded(self, x: Tensor) -> Tensor:
        """Return the outputs for samples as `model.inputs.encode` gives them: columns of tables are
        scaled.
        """
        tokens = self.inputs.ragged and x.ndim == 2
        if tuple(x.shape[1:]) != self.shape and not tokens:
            one = ""
            if tuple(x.shape) == self.shape:
                one = ", which is one sample: give x[None]"
            raise UserError(
                f"the model takes a batch of samples of shape {self.shape}, not "
                f"{tuple(x.shape)}{one}"
            )
        if (
            isinstance(self.inputs, Images)
            and x.is_floating_point()
            and len(x)
            and (top := float(x.amax())) > 2
        ):
            raise UserError(
                f"float pixels are from 0 to 1, these go up to {top:g}: scale them, or give uint8 "
                "pixels"
            )
        logits: Tensor = self.network(normalise(x, self.mean, self.std))
        return logits

    def _tensor(self, x: Any) -> Tensor:
        """Return what is not a tensor as one; arrays have no names of columns, so they cannot be
        rows of a table.
        """
        if isinstance(self.inputs, Images) and isinstance(x, list) and x and isinstance(x[0], list):
            raise UserError(
                "pixels are a tensor or an array, not a list of lists: give np.array(x)"
            )
        if not isinstance(x, np.ndarray):
            if isinstance(self.inputs, Images):
                return self.inputs.encode(x, self.shape)
            return self.inputs.encode(x)
        if isinstance(self.inputs, Table):
            raise self._nameless("an array")
        if x.dtype.kind not in "biuf":
            raise UserError(
                f"an array of {x.dtype} holds no numbers: give pixels, features or tokens"
            )
        return torch.from_numpy(x).float() if x.dtype.kind == "f" else torch.from_numpy(x)

    def _nameless(self, what: str) -> UserError:
        """Return the refusal of rows of a table without names of columns."""
        table = Table.of(self.inputs)
        columns = listed([*table.numeric, *table.categorical], 10)
        return UserError(
            f"{what} does not say which columns it has: give a frame or a dict with {columns}"
        )


def wrapped(network: nn.Module, about: Mapping[str, Any]) -> LoadedModel:
    """Return a network with the classes and inputs of its run's configuration."""
    given = about["input"]
    shape, mean, std = map(tuple, (given["shape"], given["mean"], given["std"]))
    names = tuple(about["classes"])
    how = recalibration_in(about)
    task = task_in(about)
    baseline = Baseline.of(task, about["recipe"]["hyperparameters"], network.state_dict())
    return LoadedModel(network, names, shape, mean, std, inputs_of(about), task, how, baseline)
