"""What happens at a client: the one place where tasks are executed, in simulation and in real silos alike."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn

from ekiden.core.method import Method
from ekiden.core.seeds import derive
from ekiden.data.samples import ClientData, Dataset, Subset
from ekiden.errors import UserError
from ekiden.learning import fit as fitting
from ekiden.learning.feed import Feed
from ekiden.learning.fit import Bench, Journal, Objective, Penalty, Work
from ekiden.learning.network import Network
from ekiden.learning.training import Hardware, Training
from ekiden.learning.weights import Part, Weights

Watch = Callable[[str, int, int], None]
"""(client, epoch, epochs): called after each epoch of a fit."""


@dataclass(frozen=True)
class Setup:
    """All that the parties of a run agree on before it starts.

    Attributes:
        method: what is run.
        build: makes the network; its values are the initial model, the same at every call.
        dataset: the sample tensors and how to feed them.
        training: how clients train.
        hardware: on what.
        seed: of everything random.
    """

    method: Method
    build: Callable[[], nn.Module]
    dataset: Dataset
    training: Training = field(default_factory=Training)
    hardware: Hardware = field(default_factory=Hardware)
    seed: int = 0


@dataclass(frozen=True)
class Job:
    """One task for one client, with its arguments as values.

    Attributes:
        step: the step of the run.
        call: how many calls this client had before in this step.
        client: its name.
        task: name of the method's function.
        args: what the function gets after the client.
        private: the client's state before the task.
    """

    step: int
    call: int
    client: str
    task: str
    args: tuple[Any, ...]
    private: Any = None


@dataclass(frozen=True)
class Outcome:
    """What a task gave: its value, the client's state after it, and the compute it took."""

    value: Any
    private: Any
    work: Work


class Client:
    """A client as a task sees it: its data, its state, and how to train on them.

    Attributes:
        name: unique in the run.
        data: its training, validation and test samples.
        classes: number of classes.
        state: private; a task may replace it, and finds it again in a later step.
        training: how this client trains unless `fit` is told otherwise.
    """

    def __init__(self, bench: Bench, data: ClientData, state: Any, seed: int, journal_key: str) -> None:
        self.name = data.name
        self.data = data
        self.classes = len(bench.feed.dataset.classes)
        self.state = state
        self.training = bench.training
        self._bench = bench
        self._seed = seed
        self._key = journal_key
        self._fits = 0

    @property
    def n(self) -> int:
        """n_i, the number of training samples."""
        return len(self.data.train)

    @property
    def head(self) -> Part:
        """The entries of the classifier; see `Network.head`."""
        return self._bench.network.head

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the trainable tensors; see `Network.shapes`."""
        return self._bench.network.shapes
