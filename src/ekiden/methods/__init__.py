"""The methods, in families: one file or folder per published method, one frozen dataclass in it.

A method is loaded when it is used, because a command about one run needs one of them.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pkgutil import resolve_name
from statistics import median
from typing import TYPE_CHECKING, Any

from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError, counted, tell, unknown
from ekiden.core.base.outside import installed, is_file, known_as, load
from ekiden.core.base.settings import Training
from ekiden.core.data.samples import Dataset
from ekiden.core.engine.method import Method

if TYPE_CHECKING:
    from ekiden.methods.chain.fedelmy import FedELMY as FedELMY
    from ekiden.methods.chain.fedelmy_parallel import FedELMYParallel as FedELMYParallel
    from ekiden.methods.chain.fedseq import FedSeq as FedSeq
    from ekiden.methods.chain.fedtasuki import FedTasuki as FedTasuki
    from ekiden.methods.chain.sfedkd import SFedKD as SFedKD
    from ekiden.methods.exact.fedcof import FedCOF as FedCOF
    from ekiden.methods.exact.fedgram import FedGram as FedGram
    from ekiden.methods.exact.fedkrylov import FedKrylov as FedKrylov
    from ekiden.methods.exact.fedran import FedRAN as FedRAN
    from ekiden.methods.exact.slot_align import SLOTAlign as SLOTAlign
    from ekiden.methods.exact.trees import Trees as Trees
    from ekiden.methods.gossip.criticalfl import CriticalFL as CriticalFL
    from ekiden.methods.gossip.criticalfl_server import CriticalFLServer as CriticalFLServer
    from ekiden.methods.gossip.dfedavgm import DFedAvgM as DFedAvgM
    from ekiden.methods.gossip.dfedsam import DFedSAM as DFedSAM
    from ekiden.methods.gossip.dispfl import DisPFL as DisPFL
    from ekiden.methods.gossip.fedper import FedPer as FedPer
    from ekiden.methods.gossip.metafed import MetaFed as MetaFed
    from ekiden.methods.gossip.ua_pdfl import UAPDFL as UAPDFL
    from ekiden.methods.one_shot.average import Average as Average
    from ekiden.methods.one_shot.co_boosting import CoBoosting as CoBoosting
    from ekiden.methods.one_shot.deepafl import DeepAFL as DeepAFL
    from ekiden.methods.one_shot.dense import DENSE as DENSE
    from ekiden.methods.one_shot.ensemble import Ensemble as Ensemble
    from ekiden.methods.one_shot.fafi import FAFI as FAFI
    from ekiden.methods.one_shot.fedfisher import FedFisher as FedFisher
    from ekiden.methods.one_shot.fedlpa import FedLPA as FedLPA
    from ekiden.methods.one_shot.fedma import FedMA as FedMA
    from ekiden.methods.one_shot.fedov import FedOV as FedOV
    from ekiden.methods.one_shot.fedpft import FedPFT as FedPFT
    from ekiden.methods.one_shot.fens import FENS as FENS
    from ekiden.methods.one_shot.fisher_merging import FisherMerging as FisherMerging
    from ekiden.methods.one_shot.fusefl import FuseFL as FuseFL
    from ekiden.methods.one_shot.ma_echo import MAEcho as MAEcho
    from ekiden.methods.one_shot.ot_fusion import OTFusion as OTFusion
    from ekiden.methods.one_shot.pfnm import PFNM as PFNM
    from ekiden.methods.one_shot.regmean import RegMean as RegMean
    from ekiden.methods.rounds.fedavg import FedAvg as FedAvg
    from ekiden.methods.rounds.feddc import FedDC as FedDC
    from ekiden.methods.rounds.feddisco import FedDisco as FedDisco
    from ekiden.methods.rounds.feddyn import FedDyn as FedDyn
    from ekiden.methods.rounds.fednova import FedNova as FedNova
    from ekiden.methods.rounds.fedprox import FedProx as FedProx
    from ekiden.methods.rounds.lss import LSS as LSS
    from ekiden.methods.rounds.moon import MOON as MOON
    from ekiden.methods.rounds.scaffold import SCAFFOLD as SCAFFOLD
    from ekiden.methods.rounds.spfl import SPFL as SPFL
    from ekiden.methods.statistics.glm import GLM as GLM
    from ekiden.methods.yardsticks.centralized import Centralized as Centralized
    from ekiden.methods.yardsticks.local import Local as Local

SORTS: dict[str, tuple[str, ...]] = {
    "chains: one model, handed from client to client": (
        "chain.fedelmy:FedELMY",
        "chain.fedseq:FedSeq",
        "chain.fedtasuki:FedTasuki",
        "chain.sfedkd:SFedKD",
    ),
    "exact sums: the classifier of fixed features, from sums that clients hand on": (
        "exact.fedgram:FedGram",
        "exact.fedkrylov:FedKrylov",
        "exact.fedran:FedRAN",
        "exact.fedcof:FedCOF",
        "exact.slot_align:SLOTAlign",
    ),
    "regression and trees: of pooled data, from sums that clients hand on": (
        "statistics.glm:GLM",
        "exact.trees:Trees",
    ),
    "one round: each client trains once, the server combines": (
        "chain.fedelmy_parallel:FedELMYParallel",
        "one_shot.average:Average",
        "one_shot.ensemble:Ensemble",
        "one_shot.ot_fusion:OTFusion",
        "one_shot.pfnm:PFNM",
        "one_shot.fedma:FedMA",
        "one_shot.ma_echo:MAEcho",
        "one_shot.fisher_merging:FisherMerging",
        "one_shot.regmean:RegMean",
        "one_shot.fedfisher:FedFisher",
        "one_shot.fedlpa:FedLPA",
        "one_shot.dense:DENSE",
        "one_shot.co_boosting:CoBoosting",
        "one_shot.fedov:FedOV",
        "one_shot.fafi:FAFI",
        "one_shot.fedpft:FedPFT",
        "one_shot.fusefl:FuseFL",
        "one_shot.deepafl:DeepAFL",
        "one_shot.fens:FENS",
    ),
    "rounds of parallel training": (
        "rounds.spfl:SPFL",
        "rounds.fedavg:FedAvg",
        "rounds.fedprox:FedProx",
        "rounds.lss:LSS",
        "rounds.scaffold:SCAFFOLD",
        "rounds.fednova:FedNova",
        "rounds.feddyn:FedDyn",
        "rounds.feddc:FedDC",
        "rounds.moon:MOON",
        "rounds.feddisco:FedDisco",
        "gossip.criticalfl_server:CriticalFLServer",
    ),
    "a model for each client": (
        "gossip.metafed:MetaFed",
        "gossip.dfedavgm:DFedAvgM",
        "gossip.dfedsam:DFedSAM",
        "gossip.fedper:FedPer",
        "gossip.criticalfl:CriticalFL",
        "gossip.dispfl:DisPFL",
        "gossip.ua_pdfl:UAPDFL",
    ),
    "yardsticks: each client alone, all data in one place": (
        "yardsticks.local:Local",
        "yardsticks.centralized:Centralized",
    ),
}
"""All methods of the library by kind, in the order of `ekiden run --help`."""

PLACES = {
    place.partition(":")[2]: f"{__name__}.{place}" for sort in SORTS.values() for place in sort
}
"""The same by the names of the classes, in the order of `ekiden list`."""
LAP = "+lap"
"""end of the name of a method with a closing lap"""
METHODS: tuple[type[Method], ...]
"""The classes. Reading this loads them all."""


def __getattr__(name: str) -> Any:
    """Return the class of a method, or all of them."""
    if name == "METHODS":
        return tuple(map(resolve_name, PLACES.values()))
    if name == "__all__":
        return [*PLACES]
    if name in PLACES:
        return resolve_name(PLACES[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *PLACES, "METHODS"]


def titles() -> list[str]:
    """Return the names of all methods on the command line."""
    return list(map(str.lower, PLACES))


def method_named(name: str) -> type[Method]:
    """Return the method called `name` on the command line.

    Args:
        name: one of `titles`, the name of an entry point in the group "ekiden.methods", or
            PATH.py:CLASS; behind it `+lap` for a closing lap.

    Raises:
        UserError: there is none, and the message names the nearest; or `name` is something else
            than a method.
    """
    if name.lower().endswith(LAP):
        from ekiden.methods.exact.closing import lapped

        return lapped(method_named(name[: -len(LAP)]))
    # fedelmy-parallel, as in the documents, is fedelmyparallel
    plain = name.lower().replace("-", "").replace("_", "")
    for kind, place in PLACES.items():
        if kind.lower() == plain:
            found: type[Method] = resolve_name(place)
            return found
    others = installed("ekiden.methods")
    if name.endswith(".py"):
        raise UserError(f"{name} may hold several classes: name one, {name}:CLASS")
    if name not in others and not is_file(name):
        raise unknown("method", name, (*titles(), *others))
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
    # only methods with a closing lap have one below
    if lapped := getattr(kind, "lapped", None):
        return name_of(lapped) + LAP
    if PLACES.get(kind.__name__) == f"{kind.__module__}:{kind.__name__}":
        return kind.title()
    return known_as(kind, "ekiden.methods") or kind.title()


def between_machines(kind: type[Method]) -> Method:
    """Return the method with its defaults for runs between machines.

    No party chooses the features that are summed, and sums are whole numbers, which can be masked.
    Features, and groups of samples, are of 10 samples at least.
    """
    from ekiden.methods.exact.blocks.fixed_features import FixedFeatures
    from ekiden.methods.exact.fedkrylov import FedKrylov
    from ekiden.methods.exact.trees import Trees

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
    from ekiden.methods.exact.trees import Trees
    from ekiden.methods.statistics.glm import GLM

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
    others = ", ".join(kind.title() for kind in __getattr__("METHODS") if kind().needs <= offers)
    raise UserError(f"{what}: use one of {others}")


def note_few_steps(method: Method, samples: Sequence[int], training: Training) -> None:
    """Say that FedTasuki has too few steps; `samples` are the clients' numbers of training
    samples.
    """
    from ekiden.methods.chain.fedtasuki import FedTasuki

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
