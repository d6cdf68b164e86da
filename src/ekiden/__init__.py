"""Ekiden: federated learning with few communications."""

from ekiden._version import __version__
from ekiden.api import Result, run, steps
from ekiden.data import Dataset, FederatedData, federate, load, split
from ekiden.errors import DivergenceWarning, UserError
from ekiden.learning.augment import Augment
from ekiden.learning.training import Hardware, Training
from ekiden.loading import LoadedModel, load_model

__all__ = [
    "Augment",
    "Dataset",
    "DivergenceWarning",
    "FederatedData",
    "Hardware",
    "LoadedModel",
    "Result",
    "Training",
    "UserError",
    "__version__",
    "federate",
    "load",
    "load_model",
    "run",
    "split",
    "steps",
]
