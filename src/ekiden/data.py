"""Load data sets and divide them among clients."""

from ekiden.core.data.samples import ClientData, Dataset, FederatedData, Samples, Subset
from ekiden.lab.describe import Description, description, table
from ekiden.lab.picture import draw
from ekiden.readers.assemble import from_tensors
from ekiden.readers.columns import Reading
from ekiden.readers.kinds import Inputs
from ekiden.readers.partition import (
    Dirichlet,
    Domains,
    Iid,
    Natural,
    Partition,
    Pathological,
    parse,
    split,
)
from ekiden.readers.sources import NAMED, Named, federate, join, load, located, silos

__all__ = [
    "NAMED",
    "ClientData",
    "Dataset",
    "Description",
    "Dirichlet",
    "Domains",
    "FederatedData",
    "Iid",
    "Inputs",
    "Named",
    "Natural",
    "Partition",
    "Pathological",
    "Reading",
    "Samples",
    "Subset",
    "description",
    "draw",
    "federate",
    "from_tensors",
    "join",
    "load",
    "located",
    "parse",
    "silos",
    "split",
    "table",
]
