"""Load the result of a run: `ekiden.load_model("runs/mine")`, `ekiden.open_run("runs/mine")`."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from torch import nn

from ekiden.clinic.recalibration import Recalibration
from ekiden.core.base import outside
from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError, at, unknown
from ekiden.core.base.files import path_of
from ekiden.core.data.samples import FederatedData, said_in
from ekiden.core.engine.evaluation import Built
from ekiden.core.engine.folder import (
    config_digest,
    read_config,
    read_ledger,
    read_lines,
    read_passes,
    read_state,
    state_file,
)
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import (
    GivenNetwork,
    Made,
    NamedNetwork,
    Prepared,
    as_module,
    of_method,
    read_model,
)
from ekiden.core.engine.transport import Transfer
from ekiden.core.training import frozen
from ekiden.core.training.network import on_meta
from ekiden.core.training.weights import Weights
from ekiden.readers.kinds import from_json
from ekiden.runs.config import task_in
from ekiden.runs.loaded_model import LoadedModel, ModelSource, wrapped
from ekiden.runs.plan import federation_in
from ekiden.runs.recipe import recipe_of
from ekiden.runs.record import Models
from ekiden.runs.result import Result


@checked("folder")
def load_model(
    folder: str | os.PathLike[str], *, client: str = "", network: ModelSource | None = None
) -> LoadedModel:
    """Load the model of a run.

    Args:
        folder: the run folder.
        client: name of a client whose personal model is wanted instead of the global one.
        network: the module that the run was started with, or a function that makes one, if the
            network is not from the library. Only its frozen values matter.

    Returns:
        The model in evaluation mode, on the CPU. It takes raw samples; see `LoadedModel.forward`.

    Raises:
        UserError: there is no such model, or it does not fit the network.
    """
    run = _Opened.of(path_of(folder), network)
    name = f"personal/{client}.safetensors" if client else "model.safetensors"
    _check_there(run, name, client)
    build: Callable[[], nn.Module] = run.build
    about = dict(run.config)
    if client:
        build = run.build.own
        about["recalibration"] = None
    # if the user's own network is needed, this says so before anything is read
    own = build()
    weights = read_model(run.folder, name, lambda: own)
    return wrapped(as_module(build, weights), about)


@checked("folder")
def open_run(folder: str | os.PathLike[str], *, network: ModelSource | None = None) -> Result:
    """Open a run folder and return what `ekiden.run` returned when it finished or stopped.

    Models are read when they are used; only these need `network` if the run had a network of your
    own.

    Args:
        folder: the run folder.
        network: as in `load_model`.

    Raises:
        UserError: it is not a run folder, or is damaged.
    """
    run = _Opened.of(path_of(folder), network)
    state = run.method.start()
    if state_file(run.folder).exists():
        state, _, _ = read_state(run.folder, type(state), config_digest(read_config(run.folder)))
    # Rows of a step that was interrupted by a kill do not count.
    metrics = [
        row for row in read_lines(run.folder / "metrics.jsonl", "step") if row["step"] <= state.step
    ]
    ledger = [Transfer(**row) for row in read_ledger(run.folder) if row["step"] < state.step]
    passes = read_passes(run.folder)
    return Result(
        state,
        tuple(metrics),
        tuple(ledger),
        run.folder,
        run.build,
        run.config,
        run.models,
        run.data,
        passes,
    )


def open_models(folder: Path, *, network: ModelSource | None = None) -> Result:
    """Open a run folder for its models only; rows of metrics and transfers are not read, and may be
    damaged.
    """
    run = _Opened.of(folder, network)
    return Result(run.method.start(), (), (), folder, run.build, run.config, run.models, run.data)


# times and bytes that values in memory may exceed a run's files
_LARGER = 8
_BESIDE = 1 << 26


@dataclass(frozen=True)
class _Opened:
    """A run folder whose configuration was read."""

    folder: Path
    config: Mapping[str, Any]  # its configuration
    method: Method  # the method of the run
    build: Built  # makes networks that the models fit

    @classmethod
    def of(cls, folder: Path, network: ModelSource | None) -> "_Opened":
        config = read_config(folder)
        with at(str(folder)):
            outside.refuse_changed(said_in(config).get("code", {}))
            method = recipe_of(config["recipe"]).method
        shape = tuple(config["input"]["shape"])
        task = task_in(config)
        outputs = task.outputs(config["classes"])
        own = _own(config, shape, outputs, network)
        made = of_method(own, method, shape, outputs, config["recipe"]["seed"], task)
        files = [*folder.glob("*.safetensors"), *folder.glob("personal/*.safetensors")]
        most = _LARGER * max((file.stat().st_size for file in files), default=0) + _BESIDE
        same = _Same(made, config["frozen"].get("digest", ""), most)
        if (how := Recalibration.of(folder)) is not None:
            config["recalibration"] = how
        return cls(folder, config, method, Built(method, same, len(config["clients"])))

    def data(self) -> FederatedData:
        """Read and divide the run's own data again."""
        return federation_in(self.config, self.folder)

    def models(self) -> Models:
        """Return all models in the folder."""
        files = [f"personal/{name}.safetensors" for name in self.config["clients"]]
        personal: tuple[Weights, ...] = ()
        if all((self.folder / name).exists() for name in files):
            personal = tuple(read_model(self.folder, name, self.build.own) for name in files)
        if personal and not (self.folder / "model.safetensors").exists():
            return None, personal
        return read_model(self.folder, "model.safetensors", self.build), personal


@dataclass(frozen=True)
class _Unknown:
    """Takes the place of a user's own network that was not given."""

    model: str

    def __call__(self) -> nn.Module:
        raise UserError(
            f"the run trained its own network ({self.model}): give it by --network, a module or "
            "what "
            "makes it (FILE.py:NAME on the command line)"
        )


def _own(
    config: Mapping[str, Any], shape: tuple[int, ...], outputs: int, given: ModelSource | None
) -> Callable[[], nn.Module]:
    """Return what makes the network that the user chose."""
    seed = config["recipe"]["seed"]
    name = config["network"]
    build: Callable[[], nn.Module]
    if name is not None:
        build = NamedNetwork(name, shape, outputs, seed, from_json(config["inputs"]))
    elif given is None:
        return _Unknown(config["recipe"]["model"])
    else:
        build = GivenNetwork(given) if isinstance(given, nn.Module) else Made(given, seed)
    return Prepared(build, config["recipe"]["pretrained"], config["recipe"]["train"], seed)


@dataclass(frozen=True)
class _Same:
    """Builds the network only if it has the run's frozen part, and if the run's files can hold its
    values.
    """

    build: Callable[[], nn.Module]
    frozen: str
    most: int  # bytes of its values

    def __call__(self) -> nn.Module:
        if _bytes_of(self.build) > self.most:
            raise UserError(
                "the run's config.json describes a network far larger than its files: it was "
                "changed"
            )
        module = self.build()
        if (found := frozen.digest(module)) != self.frozen:
            raise UserError(
                f"the frozen part of the network is not that of the run ({found or 'none'} instead "
                "of "
                f"{self.frozen or 'none'}): give the values that the run began with"
            )
        return module


def _bytes_of(build: Callable[[], nn.Module]) -> float:
    """Return how large a network is without making it; 0 if a user's own network cannot be made
    without values.
    """
    try:
        state = on_meta(build).state_dict()
    except NotImplementedError:
        return 0
    except RuntimeError:  # the size does not fit into 64 bits
        return inf
    return float(sum(values.nbytes for values in state.values()))


def _check_there(run: _Opened, name: str, client: str) -> None:
    """If the wanted model does not exist, name those that do."""
    if (run.folder / name).exists():
        return
    personal = sorted(file.stem for file in run.folder.glob("personal/*.safetensors"))
    if personal:
        both = "no global one"
        if (run.folder / "model.safetensors").exists():
            both = "the global one"
        wanted = (
            f"{run.folder} has models of {', '.join(personal)}, and {both}: choose one by "
            "client=NAME"
        )
        if client:
            wanted = f"there is no model of {client!r}: {wanted}"
        raise UserError(wanted)
    if client:
        if client not in run.config["clients"]:
            raise unknown("client", client, run.config["clients"])
        raise UserError(
            f"{run.config['recipe']['method']} gives no personal models: leave out the client "
            f"{client!r}"
        )
