"""The methods: one file per published method, one frozen dataclass in it."""

from ekiden.core.method import Method
from ekiden.errors import unknown
from ekiden.methods.centralized import Centralized
from ekiden.methods.criticalfl import CriticalFL
from ekiden.methods.dfedavgm import DFedAvgM
from ekiden.methods.dfedsam import DFedSAM
from ekiden.methods.dispfl import DisPFL
from ekiden.methods.fedelmy import FedELMY
from ekiden.methods.fedelmy_parallel import FedELMYParallel
from ekiden.methods.fedper import FedPer
from ekiden.methods.fedseq import FedSeq
from ekiden.methods.local import Local
from ekiden.methods.ua_pdfl import UAPDFL

METHODS: tuple[type[Method], ...] = (
    FedELMY,
    FedELMYParallel,
    FedSeq,
    DFedAvgM,
    DFedSAM,
    FedPer,
    DisPFL,
    UAPDFL,
    CriticalFL,
    Local,
    Centralized,
)
"""All methods of the library, in the order of `ekiden list`."""


def method_named(name: str) -> type[Method]:
    """The method called `name` on the command line.

    Raises:
        UserError: there is none; names the nearest.
    """
    for method in METHODS:
        if method.title() == name.lower():
            return method
    raise unknown("method", name, (m.title() for m in METHODS))


__all__ = [
    "METHODS",
    "UAPDFL",
    "Centralized",
    "CriticalFL",
    "DFedAvgM",
    "DFedSAM",
    "DisPFL",
    "FedELMY",
    "FedELMYParallel",
    "FedPer",
    "FedSeq",
    "Local",
    "method_named",
]
