"""Ekiden: federated learning with few communications."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ekiden._version import __version__

if TYPE_CHECKING:
    from ekiden.api import run, steps
    from ekiden.base.errors import DataWarning, DivergenceWarning, UserError
    from ekiden.base.settings import Hardware, Training
    from ekiden.commands import (
        audit,
        available,
        card,
        compare,
        describe,
        evaluate,
        export,
        follow,
        predict,
        report,
        resume,
        show,
        sweep,
        sweep_results,
        topology,
        verify,
    )
    from ekiden.conformance import check
    from ekiden.data import Dataset, FederatedData, federate, load, split
    from ekiden.data.augment import Augment
    from ekiden.methods import *  # noqa: F403
    from ekiden.results.clock import Devices
    from ekiden.results.result import LoadedModel, Result
    from ekiden.serving.loading import load_model, open_run
    from ekiden.serving.reruns import forget, join
    from ekiden.studies import Study, study
    from ekiden.training.private import DP

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
"""Public names and their modules. A module is loaded when its name is used: `ekiden --version` needs no PyTorch.

The methods are public too (`from ekiden import FedSeq`); they come from `ekiden.methods`."""

__all__ = [
    "DP",
    "Augment",
    "DataWarning",
    "Dataset",
    "Devices",
    "DivergenceWarning",
    "FederatedData",
    "Hardware",
    "LoadedModel",
    "Result",
    "Study",
    "Training",
    "UserError",
    "__version__",
    "audit",
    "available",
    "card",
    "check",
    "compare",
    "describe",
    "evaluate",
    "export",
    "federate",
    "follow",
    "forget",
    "join",
    "load",
    "load_model",
    "open_run",
    "predict",
    "report",
    "resume",
    "run",
    "show",
    "split",
    "steps",
    "study",
    "sweep",
    "sweep_results",
    "topology",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name in _WHERE:
        return getattr(import_module(f"ekiden.{_WHERE[name]}"), name)
    if name in ("data", "methods"):  # `ekiden.data.Samples` after `import ekiden`
        return import_module(f"ekiden.{name}")
    if not name[:1].isupper() or name not in (methods := _methods()):
        raise AttributeError(f"module 'ekiden' has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    return methods[name]


def __dir__() -> list[str]:
    return [*globals(), *__all__, *_methods()]


def _methods() -> dict[str, Any]:
    """Return the classes of the methods by their names."""
    return {kind.__name__: kind for kind in import_module("ekiden.methods").METHODS}
