"""Weights and modules: the initial model of a run, a module that holds weights, and the files of the results."""

from collections.abc import Callable, Sequence

from torch import nn

from ekiden.engine import wire
from ekiden.engine.folder import RunFolder
from ekiden.engine.worker import Setup
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights


def initial_weights(setup: Setup) -> Weights:
    """The model that all parties build from the seed."""
    return Network(setup.build(), setup.hardware.device).weights()


def model_bytes(setup: Setup) -> int:
    """M, the content in bytes of one model on the wire."""
    return wire.size(initial_weights(setup))


def as_module(build: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """A module that holds `weights`, in evaluation mode."""
    network = Network(adapted(build(), weights))
    network.load(weights)
    return network.module.eval()


def write_models(
    folder: RunFolder,
    own: Callable[[], nn.Module],
    build: Callable[[], nn.Module],
    clients: Sequence[str],
    model: Weights | None,
    personal: Sequence[Weights],
) -> None:
    """Write results as named state dicts; the global model last, so that where it is, all are."""
    for name, weights in zip(clients, personal, strict=False):
        folder.write_model(f"personal/{name}.safetensors", dict(as_module(own, weights).state_dict()))
    if model is not None:
        folder.write_model("model.safetensors", dict(as_module(build, model).state_dict()))
