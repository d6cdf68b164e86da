"""A trained network that takes samples as they are."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.data.augment import normalise
from ekiden.data.inputs import Arrays, Images, Inputs, Tokens, from_json
from ekiden.data.tasks import Classification, Task, task_of

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

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (b, K) for a batch; for classes these are logits.

        Args:
            x: (b, *shape). uint8 pixels from 0 to 255, or float pixels in [0, 1]; or float features, if the run had
                such data. Mean and standard deviation are applied here. Texts are (b, L) int64 tokens.

        Raises:
            UserError: samples of another shape.
        """
        tokens = isinstance(self.inputs, Tokens) and x.ndim == 2
        if tuple(x.shape[1:]) != self.shape and not tokens:
            raise UserError(f"the model takes a batch of samples of shape {self.shape}, not {tuple(x.shape)}")
        logits: Tensor = self.network(normalise(x, self.mean, self.std))
        return logits


def wrapped(network: nn.Module, about: Mapping[str, Any]) -> LoadedModel:
    """Return a network with the classes and inputs of its run's configuration."""
    given = about["input"]
    shape, mean, std = (tuple(given[key]) for key in ("shape", "mean", "std"))
    return LoadedModel(network, tuple(about["classes"]), shape, mean, std, inputs_of(about), task_in(about))


def inputs_of(about: Mapping[str, Any]) -> Inputs:
    """Return the kind of a run's samples; older folders do not name it, so it follows from their shape."""
    if "inputs" in about:
        return from_json(about["inputs"])
    shape = about["input"]["shape"]
    pictures = len(shape) == 3 and shape[0] in (1, 3)
    return Images() if about.get("sample_type", "uint8" if pictures else "float32") == "uint8" else Arrays()


def task_in(about: Mapping[str, Any]) -> Task:
    """Return what a run's labels mean."""
    return task_of(about["task"]) if "task" in about else Classification()


def not_finished(config: Mapping[str, Any], step: int) -> str:
    """Return a line about a run that stopped before its end; empty for other runs."""
    if step >= config.get("steps", step):  # runs between machines end with a result, or without
        return ""
    return f"the run stopped after step {step} of {config['steps']}: this is its model so far"
