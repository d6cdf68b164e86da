"""The hyperparameters of FedELMY's authors per data set: of their paper, or of their code."""

from collections.abc import Callable
from dataclasses import replace

from ekiden.base.errors import UserError, unknown
from ekiden.base.settings import Training
from ekiden.engine.method import Method
from ekiden.experiments.plan import Plan
from ekiden.methods import FedELMY, FedSeq

PRESETS = ("paper", "released-cnn")
"""paper: ResNet-18 with the paper's settings, as in its Table 1; released-cnn: for its Table 7, the small CNN, learning
rate 1e-3 and E_w = 20 of the authors' code, where the paper's appendix has 5e-5 for all data sets but Office-Caltech-10
and E_w = 30 for CIFAR-10; the rest as in the paper."""
_OLD_NAMES = {"paper-cnn": "released-cnn"}


def preset(name: str, method: type[Method], data: str) -> Plan[Method]:
    """The plan with which FedELMY's authors ran `method` on `data`, according to their paper or their code.

    Raises:
        UserError: there is no such preset, or the paper has no such run.
    """
    name = _OLD_NAMES.get(name, name)
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    if data not in _DATA:
        raise UserError(
            f"preset {name!r} knows the data sets {', '.join(_DATA)}: choose one with --data, or set the flags"
        )
    if method not in _METHODS:
        known = ", ".join(m.title() for m in _METHODS)
        raise UserError(f"preset {name!r} knows the methods {known}: set the flags of {method.title()} yourself")
    settings = _DATA[data]
    plan = _METHODS[method](settings)
    small = name == "released-cnn"
    return replace(
        plan,
        data=data,
        partition=settings.partition,
        clients=settings.clients,
        model=settings.cnn if small else "resnet18",
        training=Training(lr=1e-3 if small else settings.lr),
        method=replace(plan.method, warmup=20) if small and isinstance(plan.method, FedELMY) else plan.method,
    )


class _Settings:
    """What the paper sets for one data set; networks other than ResNet-18 are those of the authors' code."""

    def __init__(self, elmy: FedELMY, lr: float, cnn: str, partition: str, clients: int) -> None:
        self.elmy, self.lr, self.cnn, self.partition, self.clients = elmy, lr, cnn, partition, clients


_SKEW = "dirichlet:0.5"
_PACS = "domains:photo,art_painting,cartoon,sketch"
_OFFICE = "domains:amazon,caltech10,dslr,webcam"
_DATA = {
    "cifar10": _Settings(FedELMY(5, 200, 30, 0.06, 1.0), 5e-5, "cnn", _SKEW, 10),
    "tiny_imagenet": _Settings(FedELMY(3, 200, 20, 1.0, 1.0), 5e-5, "cnn_tiny", _SKEW, 10),
    "pacs": _Settings(FedELMY(10, 200, 20, 1.0, 1.0), 5e-5, "lenet", _PACS, 4),
    "office_caltech10": _Settings(FedELMY(10, 200, 20, 0.001, 0.001), 1e-3, "lenet", _OFFICE, 4),
}
_METHODS: dict[type[Method], Callable[[_Settings], Plan[Method]]] = {
    FedELMY: lambda settings: Plan(settings.elmy),
    FedSeq: lambda settings: Plan(FedSeq(epochs=200)),
}
