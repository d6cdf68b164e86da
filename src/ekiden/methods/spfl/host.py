"""The parallel methods that SPFL plugs into, and how `--host` names one with its settings."""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ekiden.base.errors import UserError, unknown
from ekiden.methods.blocks.parallel import Anchor, ParallelMethod
from ekiden.methods.fedavg import FedAvg
from ekiden.methods.feddc import FedDC
from ekiden.methods.feddisco import FedDisco
from ekiden.methods.feddyn import FedDyn
from ekiden.methods.fednova import FedNova
from ekiden.methods.fedprox import FedProx
from ekiden.methods.moon import MOON
from ekiden.methods.scaffold import SCAFFOLD

HOSTS: tuple[type[ParallelMethod], ...] = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, MOON, FedDisco)


@dataclass(frozen=True)
class Host:
    """A parallel method plugged into SPFL.

    Attributes:
        method: the method; its rounds, epochs, participation and server's rates are not used.
        anchor: where its proximal term is anchored.
    """

    method: ParallelMethod
    anchor: Anchor

    @property
    def needs_start(self) -> bool:
        """Return whether the local loss refers to w^r."""
        return self.method.needs_start(self.anchor)


def host_named(text: str) -> Host:
    """Return the host that `text` describes: a name, and after a colon settings, as in "moon:mu=5,temperature=0.5"."""
    name, _, given = text.partition(":")
    known = {kind.title(): kind for kind in HOSTS}
    if name not in known:
        raise unknown("host", name, known)
    kind, values = known[name], dict[str, Any]()
    hints = {setting: hint for setting, hint in get_type_hints(kind).items() if setting in kind.host_settings}
    if kind.host_anchor is not None:
        hints["anchor"] = Anchor
    for part in filter(None, given.split(",")):
        setting, _, value = part.partition("=")
        if setting not in hints:
            raise unknown(f"setting of host {name}", setting, hints)
        values[setting] = _value(setting, hints[setting], value)
    anchor = values.pop("anchor", kind.host_anchor or "global")
    try:
        return Host(kind(**values), anchor)
    except UserError as error:
        raise UserError(f"--host {text}: {str(error).removeprefix('--')}") from None


def _value(setting: str, hint: Any, text: str) -> float | str:
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"host {setting} must be a number, not {text!r}: write {setting}=0.1") from None
    if text not in get_args(hint):
        raise unknown(f"value of host {setting}", text, get_args(hint))
    return text
