"""From weights to modules and back: the initial model of a run, and the files of the results."""

from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from ekiden.base.errors import UserError
from ekiden.base.files import Damaged
from ekiden.engine import wire
from ekiden.engine.folder import RunFolder
from ekiden.engine.store import load as load_tensors
from ekiden.engine.worker import Setup
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights


def initial_weights(setup: Setup) -> Weights:
    """Return the model that all parties build from the seed."""
    return Network(setup.build(), setup.hardware.device).weights()


def model_bytes(setup: Setup) -> int:
    """Return M, the bytes of content of one model on the wire."""
    return wire.size(initial_weights(setup))


def as_module(build: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """Return a module that holds `weights`, in evaluation mode."""
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
    """Write results as named state dicts. The global model is written last: if it exists, all do."""
    for name, weights in zip(clients, personal, strict=False):
        folder.write_model(f"personal/{name}.safetensors", dict(as_module(own, weights).state_dict()))
    if model is not None:
        folder.write_model("model.safetensors", dict(as_module(build, model).state_dict()))


def read_model(folder: Path, name: str, build: Callable[[], nn.Module]) -> Weights:
    """Return a model that a run wrote."""
    file = folder / name
    module = build()
    state = module.state_dict()  # has versions of layers; without, BatchNorm expects counters
    try:
        found = load_tensors(file)
        state.clear()
        state.update(found)
        module.load_state_dict(state)
    except FileNotFoundError:
        models = (*folder.glob("model.safetensors"), *folder.glob("personal/*.safetensors"))
        present = sorted(str(p.relative_to(folder)) for p in models)
        hint = f"it has {', '.join(present)}" if present else "run `ekiden resume` first"
        hint += ": choose one by --client NAME" if any("personal" in file for file in present) else ""
        raise UserError(f"{folder} has no {name}: {hint}") from None
    except (SafetensorError, OSError, ValueError, Damaged) as error:
        raise UserError(f"{file} is damaged or not a safetensors file ({error}): run it again") from None
    except RuntimeError:
        raise UserError(f"{file} holds another network than the run's: was it replaced?") from None
    return Network(module).weights()
