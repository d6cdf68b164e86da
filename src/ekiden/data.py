"""Load data sets and divide them among clients."""

from ekiden.data.assemble import from_tensors
from ekiden.data.columns import Reading
from ekiden.data.describe import Description, description, draw, table
from ekiden.data.kinds import Inputs
from ekiden.data.partition import (
    Dirichlet,
    Domains,
    Iid,
    Natural,
    Partition,
    Pathological,
    parse,
    split,
)
from ekiden.data.samples import ClientData, Dataset, FederatedData, Samples, Subset
from ekiden.data.sources import NAMED, Named, federate, join, load, located, silos

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
