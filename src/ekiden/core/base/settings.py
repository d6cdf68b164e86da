"""How clients train, on what hardware and from what seeds, for all methods.

Seeds are derived from names and numbers, so nothing depends on a global random state.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from ekiden.core.base.checks import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Positive,
)
from ekiden.core.base.errors import UserError

Loop: TypeAlias = Callable[[Any, Any], Any]
"""(network, loader of inputs and labels) -> trained network."""


@dataclass(frozen=True)
class Training(Checked):
    """How a client trains.

    The defaults are those with which the code of FedELMY's authors trains its small CNNs. Adam and
    the weight decay are also in the paper. The learning rate and the batch size are not: the
    paper's appendix has 5e-5 for CIFAR-10, PACS and Tiny-ImageNet and 1e-3 only for
    Office-Caltech-10, without an exception for the CNN.
    """

    optimizer: Literal["adam", "adamw", "sgd", "sam"] = "adam"
    """Adam and SGD with L2 weight decay in the gradient, AdamW with decoupled weight decay; SAM is
    SGD on the sharpness-aware gradient."""
    lr: Positive = 1e-3
    """η, learning rate"""
    weight_decay: NonNegative = 1e-4
    """factor of the weights that is added to the gradient; with adamw, subtracted from the weights,
    times η"""
    momentum: BelowOne = 0.0
    """momentum of sgd and sam"""
    rho: NonNegative = 0.05
    """ρ, radius of sam's ascent step"""
    clip_norm: NonNegative = 0.0
    """largest norm of the gradient, 0 for no limit"""
    batch_size: Count = 128
    """B, samples per mini-batch"""
    max_steps: CountOrZero = 0
    """largest number of mini-batches in one training of a client, so that an epoch may end early; 0
    for no limit"""
    select: Literal["best", "last", "tail"] = "best"
    """what training returns: the epoch with the best validation accuracy (the last one where a
    client has no validation data), the last epoch, or the mean of the iterates over the last part
    of the steps"""
    tail: Fraction = 0.5
    """share of the steps, at the end, that select = tail averages"""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: the loss of a sample is multiplied by n / (K·n_k), with n training samples of all
    clients in K classes and n_k in its own, so that rare classes count as much as common ones.
    Between machines n_k is what the silos agreed on (`ekiden silo sums`)"""
    augment: bool = True
    """augment training batches as the data set defines (crop, flip, rotation)"""
    mean: tuple[float, ...] = ()
    """subtracted from pixels in [0, 1], per channel or one for all; by default the data set's"""
    std: tuple[Positive, ...] = ()
    """divides the pixels after that, per channel or one for all; by default the data set's"""
    loop: str | Loop = ""
    """FILE.py:NAME of a function (model, loader) -> model that trains instead, marked by
    @ekiden.train; in Python also the function. That function then decides about
    everything else in training"""

    @property
    def adaptive(self) -> bool:
        """Return whether each coordinate has its own step size; η and momentum then do not give a
        step's length.
        """
        return self.optimizer in ("adam", "adamw")

    @property
    def l2(self) -> float:
        """Return the weight decay that is part of the gradient: all of it, or 0 with AdamW."""
        if self.optimizer == "adamw":
            return 0.0
        return self.weight_decay

    def steps(self, samples: int, epochs: int) -> int:
        """Return the optimiser steps of a client with this number of samples in this number of
        epochs.
        """
        steps = epochs * batches(samples, self.batch_size)
        return min(steps, self.max_steps or steps)


@dataclass(frozen=True)
class Hardware(Checked):
    """What a run computes on. With equal values, results are bit-identical."""

    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""
    threads: CountOrZero = 0
    """CPU threads of one task; 0: one for networks of less than a million parameters, because more
    slow these down; otherwise all cores, divided among the workers"""
    precision: Literal["float32", "bf16"] = "float32"
    """bf16: autocast of the forward pass; faster on GPUs, and on CPUs with AMX (see
    docs/benchmarks.md)"""
    channels_last: bool = True
    """feed images in channels-last layout where it is faster: on a GPU always, on a CPU with networks
    of less than a million weights in convolutions"""

    def __post_init__(self) -> None:
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise UserError(
                f"there is no device {self.device!r}: choose cpu or cuda, which is a GPU"
            ) from error

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context that sets the precision of forward passes."""
        # Entering an autocast that does nothing takes 1 % of a small step.
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(torch.device(self.device).type, torch.bfloat16)


def batches(n: int, size: int) -> int:
    """Return the number of mini-batches of `size` in a pass over n samples; one sample alone joins
    the batch before.
    """
    return max(1, n // size if n % size == 1 else -(-n // size))


def derive(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on all `parts` and on nothing else."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let what draws from PyTorch's global generators draw from `seed`; the CPU's draws outside
    stay what they were.
    """
    with torch.random.fork_rng(devices=[]):
        if torch.cuda.is_available() or torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:
            # the same, but torch.manual_seed takes a traceback for each kind of device that may
            # come later
            torch.default_generator.manual_seed(seed)
        yield
