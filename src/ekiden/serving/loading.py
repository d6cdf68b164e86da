"""Load the result of a run: `ekiden.load_model("runs/mine")`."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ekiden.base import outside
from ekiden.base.errors import UserError
from ekiden.data.augment import normalise
from ekiden.engine.evaluation import Built
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.engine.modules import as_module, read_model
from ekiden.engine.networks import Given, Made, Named, builder, of_method
from ekiden.engine.setup import describe_model
from ekiden.engine.worker import Setup
from ekiden.experiments.entries import at
from ekiden.experiments.plan import stored
from ekiden.methods import method_of

ModelSource = nn.Module | Callable[[], nn.Module]


class LoadedModel(nn.Module):
    """A trained network that takes samples as they are, in evaluation mode.

    Attributes:
        network: the network alone, which takes normalised samples.
        classes: the class names, in the order of the outputs.
        shape: of one sample, (C, H, W) for images.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, divided by.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: tuple[str, ...],
        shape: tuple[int, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.network = network
        self.classes = classes
        self.shape = shape
        self.mean = mean
        self.std = std
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K) for a batch.

        Args:
            x: (b, *shape). uint8 pixels from 0 to 255, or float pixels in [0, 1]; or, where the run's data were float
                features, such features. Mean and standard deviation are applied here.

        Raises:
            UserError: samples of another shape.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise UserError(f"the model takes a batch of samples of shape {self.shape}, not {tuple(x.shape)}")
        logits: Tensor = self.network(normalise(x, self.mean, self.std))
        return logits


def load_model(folder: str | os.PathLike[str], *, client: str = "", network: ModelSource | None = None) -> LoadedModel:
    """Load the model that a run gave.

    Args:
        folder: the run folder.
        client: name of a client whose personal model is wanted instead of the global one.
        network: the module that the run was started with, or a function that makes one, where the network is not one
            of the library; its values do not matter.

    Returns:
        The model in evaluation mode, on the CPU. It takes raw samples; see `LoadedModel.forward`.

    Raises:
        UserError: there is no such model, or it does not fit the network.
    """
    path = Path(folder)
    config = read_config(path)
    with at(str(path)):
        outside.refuse_changed(config.get("plan", {}).get("code", {}))
        method = method_in(config)
        about = _about(config, path)
        own = _builder(config, about, method, network)
    name = f"personal/{client}.safetensors" if client else "model.safetensors"
    _check_there(path, name)
    build = own if client else Built(method, own, len(config["clients"]))
    module = as_module(build, read_model(path, name, build))
    given = about["input"]
    shape, mean, std = (tuple(given[key]) for key in ("shape", "mean", "std"))
    return LoadedModel(module, tuple(about["classes"]), shape, mean, std)


def method_in(config: Mapping[str, Any]) -> Method:
    """Return the method in the configuration of a run."""
    try:
        return method_of(config)
    except (TypeError, ValueError) as error:
        raise UserError(f"the hyperparameters cannot be read ({error}): use the Ekiden that wrote it") from None


def _about(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """What the run says of its network and inputs; of an older run, what its data say."""
    if "input" in config:
        return config
    plan = stored(folder)
    data = plan.federation()
    build = builder(plan.model, data, plan.seed, plan.method)
    return describe_model(Setup(plan.method, build, data.dataset, plan.training, seed=plan.seed))


def _builder(
    config: Mapping[str, Any], about: Mapping[str, Any], method: Method, given: ModelSource | None
) -> Callable[[], nn.Module]:
    """What makes the clients' network."""
    seed, name = config["seed"], about["network"]
    shape, classes = tuple(about["input"]["shape"]), len(about["classes"])
    build: Callable[[], nn.Module]
    if name is not None:
        build = Named(name, shape, classes, seed)
    elif given is None:
        raise UserError(
            f"the run trained a network of its own ({config['model']}): give it, "
            "load_model(folder, network=THE_MODULE_OR_WHAT_MAKES_IT)"
        )
    else:
        build = Given(given) if isinstance(given, nn.Module) else Made(given, seed)
    return of_method(build, method, shape, classes, seed)


def _check_there(folder: Path, name: str) -> None:
    """Name the models that are there, if the one wanted is not."""
    personal = sorted(file.stem for file in folder.glob("personal/*.safetensors"))
    if not (folder / name).exists() and personal:
        both = ", and the global one" if (folder / "model.safetensors").exists() else ", and no global one"
        raise UserError(f"{folder} has models of {', '.join(personal)}{both}: choose one by client=NAME")
