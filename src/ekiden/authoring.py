"""What the file of a method imports, in the package or outside: `from ekiden.authoring import
Method, State, ...`.
"""

from ekiden.base.checks import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
    Range,
    require,
)
from ekiden.base.errors import UserError
from ekiden.base.settings import Training
from ekiden.data.tasks import Task
from ekiden.engine.federation import Fed
from ekiden.engine.method import (
    CLASSES,
    CONTINUOUS,
    INITIAL,
    NUMBERS,
    VECTORS,
    Method,
    Model,
    OwnSamples,
    Size,
    State,
    Traits,
    on_client,
)
from ekiden.engine.transport import ClientMissing
from ekiden.engine.wire import SERVER, Ref
from ekiden.engine.worker import Client
from ekiden.training.fit import Forward, Objective, Penalty, Work, cross_entropy
from ekiden.training.weights import RunningMean, Weights, mean

__all__ = [
    "CLASSES",
    "CONTINUOUS",
    "INITIAL",
    "NUMBERS",
    "SERVER",
    "VECTORS",
    "BelowOne",
    "Checked",
    "Client",
    "ClientMissing",
    "Count",
    "CountOrZero",
    "Fed",
    "Forward",
    "Fraction",
    "Method",
    "Model",
    "NonNegative",
    "Objective",
    "OwnSamples",
    "Penalty",
    "Positive",
    "Range",
    "Ref",
    "RunningMean",
    "Size",
    "State",
    "Task",
    "Training",
    "Traits",
    "UserError",
    "Weights",
    "Work",
    "cross_entropy",
    "mean",
    "on_client",
    "require",
]
