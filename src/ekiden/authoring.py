"""What the file of a method imports, in the package or outside: `from ekiden.authoring import
Method, State, ...`.
"""

from ekiden.core.base.checks import (
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
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Training
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import (
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
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.wire import SERVER, Ref
from ekiden.core.tasks import Task
from ekiden.core.training.fit import Forward, Objective, Penalty, Work
from ekiden.core.training.weights import RunningMean, Weights, mean

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
    "mean",
    "on_client",
    "require",
]
