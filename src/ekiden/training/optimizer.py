"""Adam, AdamW and SGD over one flat vector.

The steps are torch's fused ones. Its `Optimizer` classes are not used: the first one that a process makes loads torch's
compiler, which takes a second or two, and every task of a silo on Flower is a separate process.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from ekiden.base.settings import Training


class Optimizer(Protocol):
    """Changes parameters in place; `state` is all that must survive a crash, under torch's names."""

    state: dict[str, Tensor]

    def step(self) -> None:
        """One step along the gradient."""


@dataclass(eq=False)
class Adam:
    """Adam with the usual betas (0.9, 0.999) and weight decay as a part of the gradient, as `torch.optim.Adam`.

    With `optimizer="adamw"` the weights decay apart from the gradient, as in `torch.optim.AdamW`.

    Attributes:
        params: (P,), changed in place.
        grad: (P,), where the gradient stands at each step.
        training: learning rate and weight decay.
        state: number of steps and (P,) running moments.
    """

    params: Tensor
    grad: Tensor
    training: Training
    state: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.state = {
            "step": torch.zeros((), dtype=torch.float32, device=self.params.device),
            "exp_avg": torch.zeros_like(self.params),
            "exp_avg_sq": torch.zeros_like(self.params),
        }

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradient."""
        adam(
            [self.params],
            [self.grad],
            [self.state["exp_avg"]],
            [self.state["exp_avg_sq"]],
            [],
            [self.state["step"]],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.training.lr,
            weight_decay=self.training.weight_decay,
            eps=1e-8,
            maximize=False,
            decoupled_weight_decay=self.training.optimizer == "adamw",
        )


@dataclass(eq=False)
class SGD:
    """SGD with momentum and weight decay, as `torch.optim.SGD`.

    Attributes:
        params: (P,), changed in place.
        grad: (P,), where the gradient stands at each step.
        training: learning rate, momentum and weight decay.
        state: the (P,) buffer of the momentum, from the first step on.
    """

    params: Tensor
    grad: Tensor
    training: Training
    state: dict[str, Tensor] = field(init=False, default_factory=dict)

    @torch.no_grad()
    def step(self) -> None:
        """One step along the gradient."""
        buffers = [self.state.get("momentum_buffer")]
        sgd(
            [self.params],
            [self.grad],
            buffers,
            fused=True,
            weight_decay=self.training.weight_decay,
            momentum=self.training.momentum,
            lr=self.training.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        if buffers[0] is not None:
            self.state["momentum_buffer"] = buffers[0]


def optimizer(params: Tensor, grad: Tensor, training: Training) -> Optimizer:
    """Return the optimiser that `training` names; steps of SAM are steps of SGD."""
    return (Adam if training.adaptive else SGD)(params, grad, training)
