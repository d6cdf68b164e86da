"""Ekiden: federated learning with few communications."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ekiden._version import __version__ as __version__

if TYPE_CHECKING:
    from ekiden.commands import audit as audit
    from ekiden.commands import available as available
    from ekiden.commands import card as card
    from ekiden.commands import compare as compare
    from ekiden.commands import describe as describe
    from ekiden.commands import evaluate as evaluate
    from ekiden.commands import export as export
    from ekiden.commands import predict as predict
    from ekiden.commands import report as report
    from ekiden.commands import resume as resume
    from ekiden.commands import show as show
    from ekiden.commands import sweep as sweep
    from ekiden.commands import sweep_results as sweep_results
    from ekiden.commands import topology as topology
    from ekiden.commands import verify as verify
    from ekiden.core.base.errors import DataWarning as DataWarning
    from ekiden.core.base.errors import DivergenceWarning as DivergenceWarning
    from ekiden.core.base.errors import UserError as UserError
    from ekiden.core.base.settings import Hardware as Hardware
    from ekiden.core.base.settings import Training as Training
    from ekiden.core.data.augment import Augment as Augment
    from ekiden.core.data.samples import Dataset as Dataset
    from ekiden.core.data.samples import FederatedData as FederatedData
    from ekiden.core.training.loop import train as train
    from ekiden.core.training.private.promise import DP as DP
    from ekiden.lab.conformance import check as check
    from ekiden.lab.estimator import FederatedClassifier as FederatedClassifier
    from ekiden.lab.studies import Study as Study
    from ekiden.lab.studies import study as study
    from ekiden.methods import *  # noqa: F403
    from ekiden.readers.partition import split as split
    from ekiden.readers.sources import federate as federate
    from ekiden.readers.sources import load as load
    from ekiden.runs.api import run as run
    from ekiden.runs.api import steps as steps
    from ekiden.runs.clock import Devices as Devices
    from ekiden.runs.loaded_model import LoadedModel as LoadedModel
    from ekiden.runs.loading import load_model as load_model
    from ekiden.runs.loading import open_run as open_run
    from ekiden.runs.reruns import forget as forget
    from ekiden.runs.reruns import join as join
    from ekiden.runs.result import Result as Result
    from ekiden.runs.tracking import follow as follow

_NAMES = {
    "commands": "audit available card compare describe evaluate export predict report resume show sweep "
    "sweep_results topology verify",
    "core.base.errors": "DataWarning DivergenceWarning UserError",
    "core.base.settings": "Hardware Training",
    "core.data.augment": "Augment",
    "core.data.samples": "Dataset FederatedData",
    "core.training.loop": "train",
    "core.training.private.promise": "DP",
    "lab.conformance": "check",
    "lab.estimator": "FederatedClassifier",
    "lab.studies": "Study study",
    "readers.partition": "split",
    "readers.sources": "federate load",
    "runs.api": "run steps",
    "runs.clock": "Devices",
    "runs.loaded_model": "LoadedModel",
    "runs.loading": "load_model open_run",
    "runs.reruns": "forget join",
    "runs.result": "Result",
    "runs.tracking": "follow",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}
"""Public names and their modules. A module is loaded when its name is used: `ekiden --version`
needs no PyTorch.

The methods are public too (`from ekiden import FedSeq`); they come from `ekiden.methods`."""


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name in _WHERE:
        return getattr(import_module(f"ekiden.{_WHERE[name]}"), name)
    if name in ("data", "methods"):  # `ekiden.data.Samples` after `import ekiden`
        return import_module(f"ekiden.{name}")
    if name == "__all__":
        return ["__version__", *_WHERE, *_methods()]
    if not name[:1].isupper() or name not in _methods():
        raise AttributeError(
            f"module 'ekiden' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return getattr(import_module("ekiden.methods"), name)


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


def _methods() -> dict[str, str]:
    """Return where the methods are, by the names of their classes."""
    places: dict[str, str] = import_module("ekiden.methods").PLACES
    return places
