"""What the file of a method imports, in the package or outside: `from ekiden.authoring import Method, State, ...`."""

from ekiden.checks import Checked, Count, CountOrZero, Fraction, NonNegative, Positive, Range
from ekiden.core.federation import ClientMissing, Fed
from ekiden.core.method import CLASSES, INITIAL, NUMBERS, VECTORS, Method, Size, State, on_client
from ekiden.core.refs import SERVER, Ref
from ekiden.core.worker import Client
from ekiden.data.tasks import Task
from ekiden.errors import UserError
from ekiden.learning.fit import Objective, Penalty, Work, cross_entropy
from ekiden.learning.training import Training
from ekiden.learning.weights import Weights, mean

__all__ = [
    "CLASSES",
    "INITIAL",
    "NUMBERS",
    "SERVER",
    "VECTORS",
    "Checked",
    "Client",
    "ClientMissing",
    "Count",
    "CountOrZero",
    "Fed",
    "Fraction",
    "Method",
    "NonNegative",
    "Objective",
    "Penalty",
    "Positive",
    "Range",
    "Ref",
    "Size",
    "State",
    "Task",
    "Training",
    "UserError",
    "Weights",
    "Work",
    "cross_entropy",
    "mean",
    "on_client",
]
