"""The methods: one file per published method, one frozen dataclass in it."""

from ekiden.core.method import Method
from ekiden.errors import unknown
from ekiden.methods.centralized import Centralized
from ekiden.methods.fedelmy import FedELMY
from ekiden.methods.fedseq import FedSeq
from ekiden.methods.fedtasuki import FedTasuki
from ekiden.methods.local import Local

METHODS: tuple[type[Method], ...] = (FedELMY, FedTasuki, FedSeq, Local, Centralized)
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


__all__ = ["METHODS", "Centralized", "FedELMY", "FedSeq", "FedTasuki", "Local", "method_named"]
