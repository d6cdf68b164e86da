"""A trained network that takes samples as they are."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.data.augment import normalise
from ekiden.data.kinds import Inputs, Table, Tokens, from_json
from ekiden.data.tasks import Task, task_of

ModelSource = nn.Module | Callable[[], nn.Module]
"""The module that a run was started with, or a function that makes one; its values do not matter."""


class LoadedModel(nn.Module):
    """A trained network that takes samples as they are, in evaluation mode.

    Attributes:
        network: the network alone, which takes normalised samples.
        classes: the class names, in the order of the outputs.
        shape: shape of one sample, (C, H, W) for images.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, divided by.
        inputs: the kind of samples, and how raw samples become tensors: `model(model.inputs.encode(files))`.
        task: the meaning of the outputs: `model.task.answers(outputs, full=True)` are probabilities, or values.
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
    ) -> None:
        super().__init__()
        self.network = network
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
            x: tensor or array (b, *shape). uint8 pixels from 0 to 255, or float pixels in [0, 1]; or float features, if
                the run had such data. Mean and standard deviation are applied here. Texts are (b, L) int64 tokens. Or
                what the run's data were made of: rows of a table (a frame, or a dict of columns), or a list of texts.

        Raises:
            UserError: samples of another shape, or of another kind than the run's.
        """
        if not isinstance(x, Tensor):
            x = self._tensor(x)
        tokens = self.inputs.ragged and x.ndim == 2
        if tuple(x.shape[1:]) != self.shape and not tokens:
            raise UserError(f"the model takes a batch of samples of shape {self.shape}, not {tuple(x.shape)}")
        logits: Tensor = self.network(normalise(x, self.mean, self.std))
        return logits

    def _tensor(self, x: Any) -> Tensor:
        """Return what is not a tensor as one; arrays have no names of columns, so they cannot be rows of a table."""
        if not isinstance(x, np.ndarray):
            return self.inputs.for_model(x, self.shape)
        if isinstance(self.inputs, Table):
            columns = ", ".join((*self.inputs.numeric, *self.inputs.categorical)[:10])
            raise UserError(f"an array does not say which columns it has: give a frame or a dict with {columns}")
        if x.dtype.kind not in "biuf":
            raise UserError(f"an array of {x.dtype} holds no numbers: give pixels, features or tokens")
        return torch.from_numpy(x).float() if x.dtype.kind == "f" else torch.from_numpy(x)


def wrapped(network: nn.Module, about: Mapping[str, Any]) -> LoadedModel:
    """Return a network with the classes and inputs of its run's configuration."""
    given = about["input"]
    shape, mean, std = (tuple(given[key]) for key in ("shape", "mean", "std"))
    return LoadedModel(network, tuple(about["classes"]), shape, mean, std, inputs_of(about), task_in(about))


def inputs_of(about: Mapping[str, Any]) -> Inputs:
    """Return the kind of a run's samples."""
    inputs, network = from_json(about["inputs"]), str(about["network"])
    if isinstance(inputs, Tokens) and inputs.tokenizer == "model" and network.startswith("hf:"):
        return replace(inputs, tokenizer=network.removeprefix("hf:"))  # as each silo has its own
    return inputs


def task_in(about: Mapping[str, Any]) -> Task:
    """Return what a run's labels mean."""
    return task_of(about["task"])


def not_finished(config: Mapping[str, Any], step: int) -> str:
    """Return a line about a run that stopped before its end; empty for other runs."""
    if step >= config["steps"]:
        return ""
    return f"the run stopped after step {step} of {config['steps']}: this is its model so far"
