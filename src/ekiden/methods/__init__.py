"""The methods: one file per published method, one frozen dataclass in it."""

from ekiden.core.method import Method
from ekiden.errors import unknown
from ekiden.methods.average import Average
from ekiden.methods.centralized import Centralized
from ekiden.methods.co_boosting import CoBoosting
from ekiden.methods.criticalfl import CriticalFL
from ekiden.methods.criticalfl_server import CriticalFLServer
from ekiden.methods.dense import DENSE
from ekiden.methods.dfedavgm import DFedAvgM
from ekiden.methods.dfedsam import DFedSAM
from ekiden.methods.dispfl import DisPFL
from ekiden.methods.ensemble import Ensemble
from ekiden.methods.fedavg import FedAvg
from ekiden.methods.feddc import FedDC
from ekiden.methods.feddisco import FedDisco
from ekiden.methods.feddyn import FedDyn
from ekiden.methods.fedelmy import FedELMY
from ekiden.methods.fedelmy_parallel import FedELMYParallel
from ekiden.methods.fedma import FedMA
from ekiden.methods.fednova import FedNova
from ekiden.methods.fedov import FedOV
from ekiden.methods.fedper import FedPer
from ekiden.methods.fedprox import FedProx
from ekiden.methods.fedseq import FedSeq
from ekiden.methods.fedtasuki import FedTasuki
from ekiden.methods.fens import FENS
from ekiden.methods.local import Local
from ekiden.methods.ma_echo import MAEcho
from ekiden.methods.metafed import MetaFed
from ekiden.methods.moon import MOON
from ekiden.methods.ot_fusion import OTFusion
from ekiden.methods.pfnm import PFNM
from ekiden.methods.scaffold import SCAFFOLD
from ekiden.methods.spfl import SPFL
from ekiden.methods.ua_pdfl import UAPDFL

METHODS: tuple[type[Method], ...] = (
    FedELMY,
    FedELMYParallel,
    FedSeq,
    FedTasuki,
    MetaFed,
    SPFL,
    Average,
    Ensemble,
    OTFusion,
    PFNM,
    FedMA,
    MAEcho,
    DENSE,
    CoBoosting,
    FedOV,
    FENS,
    FedAvg,
    FedProx,
    SCAFFOLD,
    FedNova,
    FedDyn,
    FedDC,
    MOON,
    FedDisco,
    CriticalFLServer,
    DFedAvgM,
    DFedSAM,
    FedPer,
    CriticalFL,
    DisPFL,
    UAPDFL,
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
    "DENSE",
    "FENS",
    "METHODS",
    "MOON",
    "PFNM",
    "SCAFFOLD",
    "SPFL",
    "UAPDFL",
    "Average",
    "Centralized",
    "CoBoosting",
    "CriticalFL",
    "CriticalFLServer",
    "DFedAvgM",
    "DFedSAM",
    "DisPFL",
    "Ensemble",
    "FedAvg",
    "FedDC",
    "FedDisco",
    "FedDyn",
    "FedELMY",
    "FedELMYParallel",
    "FedMA",
    "FedNova",
    "FedOV",
    "FedPer",
    "FedProx",
    "FedSeq",
    "FedTasuki",
    "Local",
    "MAEcho",
    "MetaFed",
    "OTFusion",
    "method_named",
]
