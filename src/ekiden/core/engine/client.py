"""A client as a task sees it: its samples, its state, training, sums, and its network."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Training, derive
from ekiden.core.base.sums import Masked
from ekiden.core.data.samples import ClientData, Subset
from ekiden.core.engine import wire
from ekiden.core.engine.method import Size
from ekiden.core.tasks import Scores, Task
from ekiden.core.training import fit as fitting
from ekiden.core.training import frozen
from ekiden.core.training import loop as own_loop
from ekiden.core.training.fit import Bench, Loss, Objective, Penalty, TaskLoss, Work
from ekiden.core.training.network import Network, fresh
from ekiden.core.training.private.sums import Release
from ekiden.core.training.private.task import Privacy
from ekiden.core.training.weights import Layout, Part, Weights

A = TypeVar("A", bound=wire.Addable)
REMEMBERED = 8 * 10**9  # most bytes that `Client.remember` keeps in a process


class SumMasks(Protocol):
    """Masks for the parts that one task gives to sums."""

    def added(self, before: Any, own: Any, about: Any) -> Any:
        """Return the sum `before`, or nothing, with the client's `own` part under its mask; if
        complete, the total.

        Masks cancel if `about` is the same at all clients.
        """


class ClientNetwork:
    """The network of a client, as a task reads it: its parts, its inner values, and copies.

    Attributes:
        classes: K, the number of classes, or of outputs if the task is not a classification.
        shape: of one input.
    """

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        self._seed = seed
        self.classes = bench.feed.dataset.outputs
        self.shape = bench.feed.dataset.shape

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self._bench.task

    @property
    def work(self) -> Work:
        """Samples that went forward and backward in this task. A task adds the passes that it makes
        itself.

        `fit`, `accuracy`, `probe` with a model, `gradient` and `batches` count theirs.
        """
        return self._bench.work

    @property
    def scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation that scale pixels in [0, 1] to inputs: for all channels, or
        one for each.
        """
        return self._bench.feed.dataset.mean, self._bench.feed.dataset.std

    @property
    def size(self) -> Size:
        """M, the bytes of a model; it knows the network."""
        return Size.of(self._bench.network, self.shape, self.task)

    @property
    def head(self) -> Part:
        """The entries of the classifier; see `Network.head`."""
        return self._bench.network.head

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the trainable tensors; see `Network.shapes`."""
        return self._bench.network.shapes

    def probe(self, x: Tensor, model: Weights | None = None) -> tuple[Tensor, Tensor]:
        """Return what enters the head and what leaves it; see `Network.probe`.

        Args:
            x: inputs, as the network takes them.
            model: the weights. None inside an objective of `fit`, for the weights in training;
                `fit` counts that pass.
        """
        if model is not None:
            self._bench.network.load(model)
            self.work.forward += len(x)
        with self._bench.hardware.autocast():
            return self._bench.network.probe(x)

    def unit(self) -> Tensor:
        """Return (1, ...) ones in the shape of the network's input, the same at all clients."""
        return torch.ones(1, *self._bench.feed.dataset.shape, device=self._bench.feed.device)

    @property
    def module(self) -> nn.Module:
        """The network itself, for an objective of `fit` that reads its inner values."""
        return self._bench.network.module

    def network(self, model: Weights) -> nn.Module:
        """Return a separate network that holds `model`, in evaluation mode.

        Add its passes to `work`, except those that it makes as a teacher of `fit`.
        """
        network = Network(frozen.copied(self._bench.network.module), self._bench.feed.device)
        network.load(model)
        return network.module.eval().requires_grad_(False)

    @property
    def layout(self) -> Layout:
        """Where each tensor of the network is in flat weights."""
        return self._bench.network.layout

    def fresh(self) -> Weights:
        """Return an initial model of the client's own: the network with newly drawn values."""
        return Network(
            fresh(self._bench.network.module, self.seed("fresh")), self._bench.feed.device
        ).weights()

    def seed(self, *parts: str | int) -> int:
        """Return a seed for this task's own randomness, the same before and after a crash."""
        return derive(self._seed, *parts)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator, on the CPU, for this task's own randomness."""
        return torch.Generator().manual_seed(self.seed(purpose))


class Client(ClientNetwork):
    """A client as a task sees it: its data, its state, and training.

    Attributes:
        name: unique in the run.
        state: private; a task may replace it, and finds it again in a later step.
        training: how this client trains unless `fit` is told otherwise.
        last_trained: the last result of `fit` for the run's own network; None before the first.
    """

    def __init__(
        self,
        bench: Bench,
        data: ClientData,
        state: Any,
        seed: int,
        journal_key: str,
        most_epochs: float = float("inf"),
        remembered: dict[tuple[str, str], Tensor] | None = None,
        masks: SumMasks | None = None,
        privacy: Privacy | None = None,
    ) -> None:
        super().__init__(bench, seed)
        self.name = data.name
        self._data = data
        self._privacy = privacy
        self.state = state
        self.training = bench.training
        self._key = journal_key
        self._fits = 0
        self._epochs_left = most_epochs
        self._remembered = {} if remembered is None else remembered
        self._masks = masks
        self.last_trained: Weights | None = None

    @property
    def data(self) -> ClientData:
        """The client's training, validation and test samples."""
        if self._privacy is not None:
            self._privacy.refuse_reading()
        return self._data

    @property
    def loss(self) -> Objective:
        """The mean loss ℓ of a batch: cross-entropy in classification."""
        return TaskLoss(self.task)

    @property
    def n(self) -> int:
        """n_i, the number of training samples."""
        return len(self._data.train)

    def steps(self, epochs: int) -> int:
        """Return τ_i, the optimiser steps in this number of epochs over the training data."""
        return self.training.steps(self.n, epochs)

    def fit(
        self,
        model: Weights,
        *,
        epochs: int,
        penalty: Penalty | None = None,
        objective: Objective | Loss | None = None,
        training: Training | None = None,
        train: Subset | None = None,
        network: Network | None = None,
    ) -> Weights:
        """Train from `model` on this client's training data; see `ekiden.core.training.fit.fit`.

        `network` is trained instead of the run's own, for example one with other widths or with
        frozen layers.
        """
        if epochs <= 0:
            return model
        self._epochs_left -= epochs
        if self._epochs_left < 0:
            raise UserError(
                f"the task trains for more epochs than {self.name} allows: lower --epochs"
            )
        self._fits += 1
        training = training or self.training
        if training.loop:
            self._check_loop(training, penalty or objective or train or network)
            self.last_trained = own_loop.fit(
                self._bench,
                model,
                self._data.train,
                epochs=epochs,
                seed=derive(self._seed, "fit", self._fits),
            )
            return self.last_trained
        private = None
        if self._privacy is not None:
            whole = train is None and network is None
            steps = training.steps(self.n, epochs)
            private = self._privacy.mechanism(self._fits, steps, self.n, whole=whole)
        trained = fitting.fit(
            replace(
                self._bench,
                training=training,
                network=network or self._bench.network,
                private=private,
            ),
            model,
            self._data.train if train is None else train,
            self._data.val,
            epochs=epochs,
            seed=derive(self._seed, "fit", self._fits),
            key=f"{self._key}-fit{self._fits}",
            penalty=penalty,
            objective=objective,
        )
        if network is None:
            self.last_trained = trained
        return trained

    def _check_loop(self, training: Training, further: object) -> None:
        """Refuse what a loop of the user's own cannot keep."""
        asked = replace(training, select=self.training.select)
        if further is not None or asked != self.training:
            raise UserError(
                f"the method adds to the loss of {self.name}, or changes its data, network or step "
                f"size, of which {own_loop.name_of(training.loop)} knows nothing: leave out --loop, "
                "or choose a method whose clients only train, such as fedavg or fedseq"
            )

    def release(self, *, centre: bool = False) -> Release | None:
        """Return what adds noise to sums over the client's samples, or to the mean of its features;
        None without dp.

        With it the task can read samples, and gives nothing that depends on them but these sums, or
        this mean.
        """
        if self._privacy is None:
            return None
        return self._privacy.release(centre=centre)

    def accuracy(self, model: Weights, subset: Subset | None = None) -> float:
        """Return the share of right answers of `model` on `subset`, by default the validation data;
        NaN if it is empty.

        For answers that are numbers, it is R².
        """
        return self._scores(model, subset).goodness()

    def score(self, model: Weights, subset: Subset | None = None) -> float:
        """Return the headline metric of `model`, with its sign turned if less is better; otherwise
        like `accuracy`.
        """
        return self.task.headline.signed(self._scores(model, subset).score())

    def _scores(self, model: Weights, subset: Subset | None) -> Scores:
        subset = self.data.val if subset is None else subset
        self._bench.network.load(model)
        self.work.forward += len(subset)
        return fitting.evaluate(self._bench, subset)

    def gradient(self, model: Weights) -> Tensor:
        """Return the gradient (P,) of the loss at `model` on one batch of training data, which each
        task draws.
        """
        draw = self.generator("gradient")
        rows = torch.randperm(self.n, generator=draw)[: self.training.batch_size]
        train = self.data.train
        return fitting.gradient(self._bench, model, Subset(train.samples, train.rows[rows]))

    def class_counts(self) -> Tensor:
        """Return the number of training samples of each class (K,)."""
        return self.data.train.class_counts(self.classes)

    def batches(
        self, subset: Subset | None = None, *, passes: int = 1, shuffle: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs (b, ...) and labels (b,) of `subset` (default: training data) once, without
        augmentation.

        Each sample counts as this number of forward `passes`: 0 if the caller counts what it does
        with the batches. Unless they are shuffled, the batches are the same in every step.
        """
        subset = self.data.train if subset is None else subset
        draw = self.generator("batches")
        order = (
            torch.randperm(len(subset), generator=draw) if shuffle else torch.arange(len(subset))
        )
        for rows in torch.split(order, self.training.batch_size):
            yield self._bench.feed.batch(subset, rows, train=False)
        self.work.forward += passes * len(subset)

    def added(
        self, before: A | None, own: A, about: Any, checked: Callable[[A], A] = lambda sums: sums
    ) -> A:
        """Return the client's `own` part added to the sum of the clients before it, if there is
        one.

        Between machines it is masked: until all clients of the sum have given their parts, nobody
        can read any of it. So a task does nothing else with `before`.

        Args:
            before: the sum so far.
            own: the client's part.
            about: everything on which `own` depends that others chose, also in earlier tasks:
                models, features, numbers; None if there is nothing. A party that sends something
                else to one client than to the others, so that only that client's part tells
                anything, cannot open the sum.
            checked: returns a sum that others gave if it is possible, and raises an error
                otherwise. It is called with what can be read: `before`, or the total of masked
                parts.

        Raises:
            UserError: the parts do not fit together, or the client does not give its part.
        """
        if self._masks is not None:
            # Or a `Masked` in its place, with which the task does nothing.
            total: A = self._masks.added(before, own, about)
            if isinstance(total, Masked):
                return total
            return checked(total)
        if isinstance(before, Masked):
            raise UserError(
                f"{self.name} received a masked sum, and nothing is masked here: refused"
            )
        if before is None:
            return own
        return checked(before).plus(own)

    def remember(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Return `make()`, from memory if this client made it before in the same process.

        Use it for what several steps compute from the client's samples and from values that never
        change in a run, for example frozen features: `make` must give the same bits each time.
        Nothing is written to the disk. All clients of a process may keep 8 GB together; what does
        not fit is made each time.

        Args:
            name: says what it is and what it depends on, for example by a digest.
            make: makes it.
        """
        key = (self.name, name)
        if (kept := self._remembered.get(key)) is not None:
            return kept
        made = make()
        if sum(t.nbytes for t in self._remembered.values()) + made.nbytes <= REMEMBERED:
            self._remembered[key] = made
        return made
