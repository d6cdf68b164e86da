"""The methods, in families: one file or folder per published method, one frozen dataclass in it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError, counted, tell, unknown
from ekiden.core.base.outside import installed, is_file, known_as, load
from ekiden.core.base.settings import Training
from ekiden.core.data.samples import Dataset
from ekiden.core.engine.method import Method
from ekiden.methods.chain.fedelmy import FedELMY
from ekiden.methods.chain.fedelmy_parallel import FedELMYParallel
from ekiden.methods.chain.fedseq import FedSeq
from ekiden.methods.chain.fedtasuki import FedTasuki
from ekiden.methods.chain.sfedkd import SFedKD
from ekiden.methods.exact.blocks.fixed_features import FixedFeatures
from ekiden.methods.exact.closing import LAP, ClosingLap, lapped, with_lap
from ekiden.methods.exact.fedcof import FedCOF
from ekiden.methods.exact.fedgram import FedGram
from ekiden.methods.exact.fedkrylov import FedKrylov
from ekiden.methods.exact.fedran import FedRAN
from ekiden.methods.exact.slot_align import SLOTAlign
from ekiden.methods.exact.trees import Trees
from ekiden.methods.gossip.criticalfl import CriticalFL
from ekiden.methods.gossip.criticalfl_server import CriticalFLServer
from ekiden.methods.gossip.dfedavgm import DFedAvgM
from ekiden.methods.gossip.dfedsam import DFedSAM
from ekiden.methods.gossip.dispfl import DisPFL
from ekiden.methods.gossip.fedper import FedPer
from ekiden.methods.gossip.metafed import MetaFed
from ekiden.methods.gossip.ua_pdfl import UAPDFL
from ekiden.methods.one_shot.average import Average
from ekiden.methods.one_shot.co_boosting import CoBoosting
from ekiden.methods.one_shot.deepafl import DeepAFL
from ekiden.methods.one_shot.dense import DENSE
from ekiden.methods.one_shot.ensemble import Ensemble
from ekiden.methods.one_shot.fafi import FAFI
from ekiden.methods.one_shot.fedfisher import FedFisher
from ekiden.methods.one_shot.fedlpa import FedLPA
from ekiden.methods.one_shot.fedma import FedMA
from ekiden.methods.one_shot.fedov import FedOV
from ekiden.methods.one_shot.fedpft import FedPFT
from ekiden.methods.one_shot.fens import FENS
from ekiden.methods.one_shot.fisher_merging import FisherMerging
from ekiden.methods.one_shot.fusefl import FuseFL
from ekiden.methods.one_shot.ma_echo import MAEcho
from ekiden.methods.one_shot.ot_fusion import OTFusion
from ekiden.methods.one_shot.pfnm import PFNM
from ekiden.methods.one_shot.regmean import RegMean
from ekiden.methods.rounds.fedavg import FedAvg
from ekiden.methods.rounds.feddc import FedDC
from ekiden.methods.rounds.feddisco import FedDisco
from ekiden.methods.rounds.feddyn import FedDyn
from ekiden.methods.rounds.fednova import FedNova
from ekiden.methods.rounds.fedprox import FedProx
from ekiden.methods.rounds.lss import LSS
from ekiden.methods.rounds.moon import MOON
from ekiden.methods.rounds.scaffold import SCAFFOLD
from ekiden.methods.rounds.spfl import SPFL
from ekiden.methods.statistics.glm import GLM
from ekiden.methods.yardsticks.centralized import Centralized
from ekiden.methods.yardsticks.local import Local

SORTS: dict[str, tuple[type[Method], ...]] = {
    "chains: one model, handed from client to client": (FedELMY, FedSeq, FedTasuki, SFedKD),
    "exact sums: the classifier of fixed features, from sums that clients hand on": (
        FedGram,
        FedKrylov,
        FedRAN,
        FedCOF,
        SLOTAlign,
    ),
    "regression and trees: of pooled data, from sums that clients hand on": (GLM, Trees),
    "one round: each client trains once, the server combines": (
        FedELMYParallel,
        Average,
        Ensemble,
        OTFusion,
        PFNM,
        FedMA,
        MAEcho,
        FisherMerging,
        RegMean,
        FedFisher,
        FedLPA,
        DENSE,
        CoBoosting,
        FedOV,
        FAFI,
        FedPFT,
        FuseFL,
        DeepAFL,
        FENS,
    ),
    "rounds of parallel training": (
        SPFL,
        FedAvg,
        FedProx,
        LSS,
        SCAFFOLD,
        FedNova,
        FedDyn,
        FedDC,
        MOON,
        FedDisco,
        CriticalFLServer,
    ),
    "a model for each client": (MetaFed, DFedAvgM, DFedSAM, FedPer, CriticalFL, DisPFL, UAPDFL),
    "yardsticks: each client alone, all data in one place": (Local, Centralized),
}
"""All methods of the library by kind, in the order of `ekiden run --help`."""

# The same, in the order of `ekiden list`
METHODS = tuple(method for sort in SORTS.values() for method in sort)


def method_named(name: str) -> type[Method]:
    """Return the method called `name` on the command line.

    Args:
        name: a title in `METHODS`, the name of an entry point in the group "ekiden.methods", or
            PATH.py:CLASS; behind it `+lap` for a closing lap.

    Raises:
        UserError: there is none, and the message names the nearest; or `name` is something else
            than a method.
    """
    if name.lower().endswith(LAP):
        return lapped(method_named(name[: -len(LAP)]))
    # fedelmy-parallel, as in the documents, is fedelmyparallel
    plain = name.lower().replace("-", "").replace("_", "")
    for method in METHODS:
        if method.title() == plain:
            return method
    others = installed("ekiden.methods")
    if name.endswith(".py"):
        raise UserError(f"{name} may hold several classes: name one, {name}:CLASS")
    if name not in others and not is_file(name):
        raise unknown("method", name, (*(m.title() for m in METHODS), *others))
    kind = others[name].load() if name in others else load(name)
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise UserError(f"{name} is not a method: give a class that derives from Method")
    return kind


def known(name: str) -> type[Method] | None:
    """Return the method called `name` in a run folder; None if it, or its file, is not
    available.
    """
    try:
        return method_named(name)
    except UserError:
        return None


def name_of(kind: type[Method]) -> str:
    """Return the name by which `method_named` finds `kind`, if it does: its title, or
    PATH.py:CLASS.
    """
    if issubclass(kind, ClosingLap):
        return name_of(kind.lapped) + LAP
    if kind in METHODS:
        return kind.title()
    return known_as(kind, "ekiden.methods") or kind.title()


def between_machines(kind: type[Method]) -> Method:
    """Return the method with its defaults for runs between machines.

    No party chooses the features that are summed, and sums are whole numbers, which can be masked.
    Features, and groups of samples, are of 10 samples at least.
    """
    method = kind()
    if isinstance(method, FedKrylov):
        method = replace(method, sums="whole")
    if isinstance(method, Trees):
        return replace(method, min_active=10)
    if isinstance(method, FixedFeatures):
        return replace(method, dictionary="seed", min_active=10)
    return method


def among(method: Method, clients: Sequence[str]) -> Method:
    """Return a method whose order names other clients as one for `clients`: who is new to it comes
    last.
    """
    order = plain(method).get("order")
    if not isinstance(order, str) or order in ("given", "reversed", "random"):
        return method
    named = [name for name in order.split(",") if name in clients]
    return replace(
        method, **{"order": ",".join([*named, *(name for name in clients if name not in named)])}
    )


def check_needs(method: Method, dataset: Dataset) -> None:
    """Refuse a method that needs what the data do not offer."""
    offers = dataset.offers
    task = dataset.task.kind
    missing = method.needs - offers
    if isinstance(method, Trees) and dataset.inputs.kind == "images":
        tell(
            "each pixel is a column of the trees, which know nothing of its place: compare with "
            "fedgram, which sees patches of the images"
        )
    if not missing:
        return
    if isinstance(method, GLM) and task in ("survival", "regression"):
        family = "cox" if task == "survival" else "linear"
        raise UserError(
            f"logistic regression explains classes, the task is {task}: add --family={family}"
        )
    if "classes" in missing:
        what = f"{method.title()} needs one class for each sample, the task is {task}"
    elif "vectors" in missing:
        what = f"{method.title()} needs one vector of outputs for each sample, the task is {task}"
    elif "numbers" in missing:
        what = f"{method.title()} makes or mixes inputs, which tokens do not allow"
    else:
        what = f"{method.title()} puts the numbers of a sample into another order, which categories do not allow"
    if (plain := _plain(type(method))) is not None and plain.needs <= offers:
        raise UserError(f"{what}: leave out the options that need this; the defaults do not")
    others = ", ".join(kind.title() for kind in METHODS if kind().needs <= offers)
    raise UserError(f"{what}: use one of {others}")


def note_few_steps(method: Method, samples: Sequence[int], training: Training) -> None:
    """Say that FedTasuki has too few steps; `samples` are the clients' numbers of training
    samples.
    """
    if not isinstance(method, FedTasuki):
        return
    steps = round(median(training.steps(n, method.epochs) for n in samples))
    # 21 steps ended at chance on grey CIFAR-10, where 85 were ahead of FedSeq
    if steps < 50:
        logging.getLogger("ekiden").warning(
            "half of the clients make at most %s: FedTasuki holds each model near the one before "
            "it, also if that has learned nothing yet; give more --epochs or a smaller "
            "--batch-size",
            counted(steps, "step"),
        )


def _plain(kind: type[Method]) -> Method | None:
    """Return the method with its defaults, if all fields have one."""
    try:
        return kind()
    except TypeError:
        return None


__all__ = [
    "DENSE",
    "FAFI",
    "FENS",
    "GLM",
    "LAP",
    "LSS",
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
    "DeepAFL",
    "DisPFL",
    "Ensemble",
    "FedAvg",
    "FedCOF",
    "FedDC",
    "FedDisco",
    "FedDyn",
    "FedELMY",
    "FedELMYParallel",
    "FedFisher",
    "FedGram",
    "FedKrylov",
    "FedLPA",
    "FedMA",
    "FedNova",
    "FedOV",
    "FedPFT",
    "FedPer",
    "FedProx",
    "FedRAN",
    "FedSeq",
    "FedTasuki",
    "FisherMerging",
    "FuseFL",
    "Local",
    "MAEcho",
    "MetaFed",
    "OTFusion",
    "RegMean",
    "SFedKD",
    "SLOTAlign",
    "Trees",
    "among",
    "between_machines",
    "check_needs",
    "known",
    "method_named",
    "name_of",
    "note_few_steps",
    "with_lap",
]
