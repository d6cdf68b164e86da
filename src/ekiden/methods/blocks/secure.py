"""Add up models in fixed point, so that masks between machines hide all but the sum."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ekiden.authoring import Size, UserError, Weights
from ekiden.base.modular import FRACTION, fixed, real
from ekiden.methods.blocks.combining import Rule
from ekiden.methods.blocks.rounds import ParallelMethod


class SecureMethod(ParallelMethod):
    """A method of rounds whose server can do with sums of what clients send."""

    secure: bool  # whether it gets no more than that: fixed point, so that masks between machines hide all but the sums
    # whether a run may leave a missing silo out of one sum and not of the next one. The parts of two sums must then
    # differ, as those of silos that train in between do.
    regroups: ClassVar[bool] = True

    @property
    def gives_sums(self) -> bool:
        """Whether masks hide what clients send."""
        return self.secure


@dataclass(frozen=True, eq=False)
class ModelSums:
    """What clients of a round add up, in fixed point."""

    params: Tensor  # (P,) int64, Σ p_i θ_i
    buffers: Tensor  # (B,) int64, Σ p_i b_i of running statistics b_i
    counters: Tensor  # (C,) int64, sums of counters; whole numbers, not in fixed point
    others: tuple[Tensor, ...]  # int64, sums of further vectors
    weight: int  # Σ p_i in units of 2^-28
    clients: int  # number of clients

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        tensors = (self.params, self.buffers, self.counters, *self.others)
        if any(t.dtype != torch.int64 or t.ndim != 1 for t in tensors) or self.clients < 1:
            raise UserError("a sum of models is not as it must be: use the same version of Ekiden everywhere")

    @classmethod
    def of(cls, clients: int, model: Weights, weight: float, *others: Tensor) -> Self:
        """Return one client's part.

        Args:
            clients: how many clients give a part.
            model: θ_i with running statistics.
            weight: p_i.
            others: further vectors, to which no weight applies.
        """
        name = "values of the model, times the client's weight,"
        params, buffers = (fixed(t.double() * weight, clients, name) for t in (model.params, model.buffers))
        more = tuple(fixed(t, clients, "what goes with the model") for t in others)
        share = int(fixed(torch.tensor(weight, dtype=torch.float64), clients, "weights"))
        return cls(params, buffers, model.counters, more, share, 1)

    def plus(self, other: "ModelSums") -> "ModelSums":
        """Return the sums over the clients of both."""
        if [len(t) for t in self._tensors()] != [len(t) for t in other._tensors()]:
            raise UserError("models of different shape cannot be added up: use the same network at every client")
        params, buffers, counters, *others = (a + b for a, b in zip(self._tensors(), other._tensors(), strict=True))
        weight, clients = self.weight + other.weight, self.clients + other.clients
        return ModelSums(params, buffers, counters, tuple(others), weight, clients)

    @property
    def total(self) -> float:
        """Σ p_i."""
        return self.weight / 2.0**FRACTION

    def mean(self, like: Weights) -> Weights:
        """Return Σ p_i θ_i / Σ p_i. Counters are the rounded mean, since sums do not show the largest.

        Args:
            like: a model of the run, whose shape the sums must have.
        """
        if self.weight <= 0:
            raise UserError("the weights of all clients add up to 0: there is nothing to average")
        params, buffers = ((t.double() / self.weight).float() for t in (self.params, self.buffers))
        found = Weights(params, buffers, self.counters // self.clients)
        if found.shapes != like.shapes:
            raise UserError("a sum of models does not fit the network: use the same network at every client")
        return found

    def other(self, place: int, like: Tensor | None = None) -> Tensor:
        """Return a further vector's sum, in float32; if it must have the length of another, an error if not."""
        found = real(self.others[place]).float() if place < len(self.others) else torch.zeros(0)
        if like is not None and found.shape != like.shape:
            raise UserError("a sum of vectors does not fit the network: use the same network at every client")
        return found

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.params, self.buffers, self.counters, *self.others)


def trainable(model: Size) -> int:
    """Return P, the number of the model's trainable values."""
    return len(model.network.weights().params)


def secure_size(model: Size, *others: int) -> int:
    """Return the bytes of `ModelSums`: 8 for each value of the model and of `others`, and for two numbers."""
    values = model.network.weights()
    return 8 * (len(values.params) + len(values.buffers) + len(values.counters) + sum(others) + 2)


def refuse_single(secure: bool, rule: Rule, longest: float) -> None:
    """Refuse what the server does with single models, if it gets their sum alone."""
    if secure and (rule != "mean" or longest):
        what = f"--combine {rule}" if rule != "mean" else "--clip-update"
        raise UserError(f"{what} needs single models, --secure shows the server only their sum: leave out one of them")
