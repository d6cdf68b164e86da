"""The methods: one file per published method, one frozen dataclass in it."""

from ekiden.core.method import Method
from ekiden.errors import unknown
from ekiden.methods.average import Average
from ekiden.methods.centralized import Centralized
from ekiden.methods.dense import DENSE
from ekiden.methods.ensemble import Ensemble
from ekiden.methods.fedelmy import FedELMY
from ekiden.methods.fedseq import FedSeq
from ekiden.methods.local import Local
from ekiden.methods.ma_echo import MAEcho
from ekiden.methods.ot_fusion import OTFusion

METHODS: tuple[type[Method], ...] = (FedELMY, FedSeq, Average, Ensemble, OTFusion, MAEcho, DENSE, Local, Centralized)
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
    "DENSE",
    "METHODS",
    "Average",
    "Centralized",
    "Ensemble",
    "FedELMY",
    "FedSeq",
    "Local",
    "MAEcho",
    "OTFusion",
    "method_named",
]
