"""How clients train, and on what hardware: the fields that all methods share."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ekiden.base.checks import BelowOne, Checked, Count, CountOrZero, Fraction, NonNegative, Positive


@dataclass(frozen=True)
class Training(Checked):
    """How a client trains.

    The defaults are those with which the code of FedELMY's authors trains its small CNNs. Adam and the weight decay are
    in the paper too. The learning rate and the batch size are not: the paper's appendix has 5e-5 for CIFAR-10, PACS and
    Tiny-ImageNet, 1e-3 for Office-Caltech-10 alone, and names no exception for the CNN.
    """

    optimizer: Literal["adam", "adamw", "sgd", "sam"] = "adam"
    """Adam and SGD with L2 weight decay in the gradient, AdamW with decoupled weight decay; SAM is SGD on the
    sharpness-aware gradient."""
    lr: Positive = 1e-3
    """η, learning rate"""
    weight_decay: NonNegative = 1e-4
    """factor of the weights that is added to the gradient; with adamw, subtracted from the weights, times η"""
    momentum: BelowOne = 0.0
    """momentum of sgd and sam"""
    rho: NonNegative = 0.05
    """ρ, radius of sam's ascent step"""
    clip_norm: NonNegative = 0.0
    """largest norm of the gradient, 0 for no limit"""
    batch_size: Count = 128
    """B, samples per mini-batch"""
    max_steps: CountOrZero = 0
    """most mini-batches that a client trains at a stretch, so that an epoch may end early; 0 for no limit"""
    select: Literal["best", "last", "tail"] = "best"
    """what training returns: the epoch with the best validation accuracy (the last one where a client has no
    validation data), the last epoch, or the mean of the iterates over the last part of the steps"""
    tail: Fraction = 0.5
    """the part of the steps that select = tail averages"""
    augment: bool = True
    """let training batches undergo what the data set defines (crop, flip, rotation)"""
    mean: tuple[float, ...] = ()
    """per channel (or one for all), subtracted from pixels in [0, 1]; by default the data set's"""
    std: tuple[Positive, ...] = ()
    """per channel (or one for all), divided by; by default the data set's"""

    @property
    def adaptive(self) -> bool:
        """Whether each coordinate has a step size of its own, so that momentum and η do not say how far steps go."""
        return self.optimizer in ("adam", "adamw")

    @property
    def l2(self) -> float:
        """The part of the weight decay that is in the gradient: all of it, but with AdamW nothing."""
        return 0.0 if self.optimizer == "adamw" else self.weight_decay

    def steps(self, samples: int, epochs: int) -> int:
        """Optimiser steps of a client with so many samples in so many epochs."""
        steps = epochs * batches(samples, self.batch_size)
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class Hardware(Checked):
    """What a run computes on. Results are bit-identical for equal values of these."""

    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    threads: CountOrZero = 0
    """CPU threads of one task; 0: one for networks of less than a million parameters, which more threads only slow
    down, else all cores, divided among the workers"""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: autocast of the forward pass; faster on GPUs, and on CPUs with AMX (see docs/benchmarks.md)"""
    compile: bool = False
    """compile the network with torch.compile"""
    channels_last: bool = True
    """feed images in channels-last layout: on a CPU the small CNNs and ResNet-18 train faster by it, VGG-11 slower (see
    docs/benchmarks.md)"""

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        # Entering a context that does nothing costs one part in a hundred of a small step.
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


def batches(n: int, size: int) -> int:
    """Number of mini-batches of `size` in one pass over n samples: a last batch of one joins the one before it."""
    return max(1, n // size if n % size == 1 else -(-n // size))
