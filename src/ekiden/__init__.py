"""Ekiden: federated learning with few communications."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ekiden._version import __version__ as __version__

if TYPE_CHECKING:
    from ekiden.api import run as run
    from ekiden.api import steps as steps
    from ekiden.base.errors import DataWarning as DataWarning
    from ekiden.base.errors import DivergenceWarning as DivergenceWarning
    from ekiden.base.errors import UserError as UserError
    from ekiden.base.settings import Hardware as Hardware
    from ekiden.base.settings import Training as Training
    from ekiden.commands import audit as audit
    from ekiden.commands import available as available
    from ekiden.commands import card as card
    from ekiden.commands import compare as compare
    from ekiden.commands import describe as describe
    from ekiden.commands import evaluate as evaluate
    from ekiden.commands import export as export
    from ekiden.commands import follow as follow
    from ekiden.commands import predict as predict
    from ekiden.commands import report as report
    from ekiden.commands import resume as resume
    from ekiden.commands import show as show
    from ekiden.commands import sweep as sweep
    from ekiden.commands import sweep_results as sweep_results
    from ekiden.commands import topology as topology
    from ekiden.commands import verify as verify
    from ekiden.conformance import check as check
    from ekiden.data import Dataset as Dataset
    from ekiden.data import FederatedData as FederatedData
    from ekiden.data import federate as federate
    from ekiden.data import load as load
    from ekiden.data import split as split
    from ekiden.data.augment import Augment as Augment
    from ekiden.methods import *  # noqa: F403
    from ekiden.results.clock import Devices as Devices
    from ekiden.results.result import LoadedModel as LoadedModel
    from ekiden.results.result import Result as Result
    from ekiden.serving.loading import load_model as load_model
    from ekiden.serving.loading import open_run as open_run
    from ekiden.serving.reruns import forget as forget
    from ekiden.serving.reruns import join as join
    from ekiden.studies import Study as Study
    from ekiden.studies import study as study
    from ekiden.training.private import DP as DP

_NAMES = {
    "api": "run steps",
    "base.errors": "DataWarning DivergenceWarning UserError",
    "base.settings": "Hardware Training",
    "commands": "audit available card compare describe evaluate export follow predict report resume show sweep "
    "sweep_results topology verify",
    "conformance": "check",
    "data": "Dataset FederatedData federate load split",
    "data.augment": "Augment",
    "results.clock": "Devices",
    "results.result": "LoadedModel Result",
    "serving.loading": "load_model open_run",
    "serving.reruns": "forget join",
    "studies": "Study study",
    "training.private": "DP",
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
    if not name[:1].isupper() or name not in (methods := _methods()):
        raise AttributeError(
            f"module 'ekiden' has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    return methods[name]


def __dir__() -> list[str]:
    return [*globals(), *__getattr__("__all__")]


def _methods() -> dict[str, Any]:
    """Return the classes of the methods by their names."""
    return {kind.__name__: kind for kind in import_module("ekiden.methods").METHODS}
