"""The eight parallel methods that SPFL plugs into, each as its loss, its memory and its server's step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
from torch import Tensor

from ekiden.base.checks import NonNegative, Positive
from ekiden.base.errors import UserError, unknown
from ekiden.engine.method import CLASSES
from ekiden.methods import feddc, feddisco, feddyn, fedprox, moon
from ekiden.methods.blocks.rounds import Corrected, Proximal, Reply, accumulation
from ekiden.methods.fednova import Progress, normalised
from ekiden.methods.spfl.host import After, Closing, Host, Local, Round, Vectors
from ekiden.models.split import as_split
from ekiden.training.fit import Objective, Penalty
from ekiden.training.weights import Weights, mean

Anchor = Literal["received", "global"]
"""Where a proximal term is anchored: at the model that a visit starts from, or at the global one of the round."""


@dataclass(frozen=True)
class FedAvg(Host):
    """Plain loss, mean of the ends."""


@dataclass(frozen=True)
class FedProx(Host):
    """(μ/2)‖w - w^r‖²: the anchor is the round's, which damps the chain."""

    mu: NonNegative = fedprox.FedProx.mu  # μ

    @property
    def needs_start(self) -> bool:
        """The anchor."""
        return self.mu > 0

    def penalty(self, local: Local, model: Weights) -> Penalty | None:
        """The proximal term."""
        return Proximal(self.mu, local.origin.params) if self.mu else None


@dataclass(frozen=True)
class SCAFFOLD(Host):
    """Gradient + c - c_i; c_i becomes the mean gradient over all steps of all visits of the round."""

    keeps: ClassVar[bool] = True
    sent: ClassVar[int] = 1
    changes: ClassVar[int] = 1

    def penalty(self, local: Local, model: Weights) -> Penalty:
        """The correction."""
        slope = local.sent[0].params - local.kept(0)
        return Corrected(slope, local.training.l2, local.training.clip_norm)

    def learned(self, local: Local, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """The mean gradient."""
        assert isinstance(penalty, Corrected)
        return (model.with_params(penalty.mean()),)

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """c_i⁺ and its change."""
        return learned, Closing((learned[0].with_params(learned[0].params - local.kept(0)),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """The control variate c."""
        return (start.with_params(memory[0] if memory else torch.zeros_like(start.params)),)

    def merge(self, r: Round) -> After:
        """The control variate c changes by 1/N of what clients send."""
        control = r.kept(0)
        for closing in r.closings.values():
            control = control + closing.changes[0].params / r.clients
        return After(r.middle, r.middle, (control,))


@dataclass(frozen=True)
class FedNova(Host):
    """Plain loss; a chain's change is divided by the sum of the a_i along it. Full chains: FedAvg."""

    numbers: ClassVar[int] = 1

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """a_i."""
        momentum = 0.0 if local.training.adaptive else local.training.momentum
        return (), Closing((), (accumulation(local.client.steps(local.epochs), momentum),))

    def merge(self, r: Round) -> After:
        """w^r + τ_eff Σ p_j (end_j - w^r) / a_j over the chains j, p_j all the same."""
        a = {client: closing.numbers[0] for client, closing in r.closings.items()}
        along = [len(chain) * known_mean(a, chain) for chain in r.chains]
        new = normalised(r.start, [Progress(Reply(end, 1.0), s) for end, s in zip(r.ends, along, strict=True) if s])
        return After(new, new)


@dataclass(frozen=True)
class FedDyn(Host):
    """-⟨λ_i, w⟩ + (α/2)‖w - anchor‖²; λ_i and the server's h change once a round."""

    alpha: Positive = feddyn.FedDyn.alpha  # α
    anchor: Anchor = "received"
    keeps: ClassVar[bool] = True

    @property
    def needs_start(self) -> bool:
        """With the anchor there."""
        return self.anchor == "global"

    def penalty(self, local: Local, model: Weights) -> Penalty:
        """The regulariser."""
        centre = local.origin if self.anchor == "global" else model
        return Proximal(self.alpha, centre.params, -local.memory[0].params if local.memory else None)

    def learned(self, local: Local, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """w_out - w_in."""
        return (displacement(model, trained),)

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """λ_i ← λ_i - α · mean displacement."""
        return (learned[0].with_params(local.kept(0) - self.alpha * learned[0].params),), Closing()

    def merge(self, r: Round) -> After:
        """The memory h, from the mean displacement of the ends."""
        h = r.kept(0) - self.alpha * r.answered * (r.middle.params - r.start.params)
        return After(r.middle, r.middle.with_params(r.middle.params - h / self.alpha), (h,))


@dataclass(frozen=True)
class FedDC(Host):
    """(α_i/2)‖w + h_i - anchor‖² + ⟨g/ω_i - g_i, w⟩; broadcast is the mean of the ends + the mean of all h_i."""

    alpha: NonNegative = feddc.FedDC.alpha  # α
    anchor: Anchor = "global"
    counts: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    sent: ClassVar[int] = 1
    changes: ClassVar[int] = 1

    @property
    def needs_start(self) -> bool:
        """With the anchor there."""
        return self.anchor == "global"

    def penalty(self, local: Local, model: Weights) -> Penalty:
        """The pull to the anchor less the drift, and the correction."""
        relative = local.client.n / local.size
        centre = local.origin if self.anchor == "global" else model
        pull = Proximal(self.alpha / relative, centre.params - local.kept(0))
        slope = local.sent[0].params / relative - local.kept(1)
        return Corrected(slope, local.training.l2, local.training.clip_norm, pull)

    def learned(self, local: Local, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """w_out - w_in and the mean gradient."""
        assert isinstance(penalty, Corrected)
        return displacement(model, trained), model.with_params(penalty.mean())

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """h_i grows by the mean displacement, g_i is the mean gradient; its change travels."""
        moved, gradient = learned
        change = local.client.n / local.size * (gradient.params - local.kept(1))
        memory = (moved.with_params(local.kept(0) + moved.params), gradient)
        return memory, Closing((gradient.with_params(change),))

    def opening(self, start: Weights, memory: tuple[Tensor, ...]) -> Vectors:
        """The gradient memory g."""
        return (start.with_params(memory[1] if memory else torch.zeros_like(start.params)),)

    def merge(self, r: Round) -> After:
        """The mean of all h_i grows by that of the mean visits: 1/L of how far the chains went.

        That is exact where all clients have equally many visits, in chains that come back; else an estimate.
        """
        middle, gradient = r.middle, r.kept(1)
        for closing in r.closings.values():
            gradient = gradient + closing.changes[0].params / r.clients
        drift = r.kept(0) + r.answered / len(r.chains[0]) * (middle.params - r.start.params)
        return After(middle, middle.with_params(middle.params + drift), (drift, gradient))


@dataclass(frozen=True)
class MOON(Host):
    """ℓ + μ ℓ_con, near the representations of w^r, away from those of the mean of the last round's own visits."""

    mu: Positive = moon.MOON.mu  # μ
    temperature: Positive = moon.MOON.temperature  # τ
    keeps: ClassVar[bool] = True

    @property
    def needs_start(self) -> bool:
        """The positive."""
        return True

    def objective(self, local: Local, base: Objective) -> Objective:
        """The contrast, from the second round on."""
        if not local.memory:
            return base
        frozen = [as_split(local.client.network(m)) for m in (local.origin, *local.memory)]
        return moon.Contrast(frozen[0], frozen[1:], self.mu, self.temperature, base)

    def learned(self, local: Local, model: Weights, trained: Weights, penalty: Penalty | None) -> Vectors:
        """The model."""
        return (trained,)

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """It is what the next round is held away from."""
        return learned, Closing()


@dataclass(frozen=True)
class FedDisco(Host):
    """Plain loss; a chain weighs as much as its clients do on average. Full chains: FedAvg."""

    a: NonNegative = feddisco.FedDisco.a  # a
    b: float = feddisco.FedDisco.b  # b
    measure: feddisco.Measure = feddisco.FedDisco.measure  # d_k
    numbers: ClassVar[int] = 2
    needs = CLASSES

    def close(self, local: Local, learned: Vectors) -> tuple[Vectors, Closing]:
        """n_k and d_k."""
        return (), Closing((), (float(local.client.n), feddisco.discrepancy(local.client.class_counts(), self.measure)))

    def merge(self, r: Round) -> After:
        """The ends, weighted."""
        n, d = zip(*(closing.numbers for closing in r.closings.values()), strict=True)
        weights = feddisco.disco_weights(n, feddisco.normalised(d, self.measure), self.a, self.b)
        p = dict(zip(r.closings, weights, strict=True))
        along = [known_mean(p, chain) for chain in r.chains]
        middle = mean(r.ends, along if any(along) else None)
        return After(middle, middle)


def known_mean(values: Mapping[str, float], chain: Sequence[str]) -> float:
    """Mean over those of a chain who closed the round, standing for who trained and was gone at its end; 0 for none."""
    known = [values[client] for client in chain if client in values]
    return sum(known) / len(known) if known else 0.0


def displacement(model: Weights, trained: Weights) -> Weights:
    """w_out - w_in."""
    return trained.with_params(trained.params - model.params)


HOSTS: tuple[type[Host], ...] = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, MOON, FedDisco)


def host_named(text: str) -> Host:
    """The host that `text` describes: a name, and after a colon settings, as in "moon:mu=5,temperature=0.5".

    Raises:
        UserError: there is no such host or setting, or its value cannot be.
    """
    name, _, given = text.partition(":")
    known = {kind.__name__.lower(): kind for kind in HOSTS}
    if name not in known:
        raise unknown("host", name, known)
    kind, values = known[name], {}
    hints = get_type_hints(kind)
    for part in filter(None, given.split(",")):
        setting, _, value = part.partition("=")
        if setting not in {f.name for f in fields(kind)}:
            raise unknown(f"setting of host {name}", setting, (f.name for f in fields(kind)))
        values[setting] = _value(setting, hints[setting], value)
    return kind(**values)


def _value(setting: str, hint: Any, text: str) -> float | str:
    if hint is float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"host {setting} must be a number, not {text!r}: write {setting}=0.1") from None
    if text not in get_args(hint):
        raise unknown(f"value of host {setting}", text, get_args(hint))
    return text
