"""What happens at a client: the one place where tasks are executed, in simulation and in real silos alike."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.base.seeds import derive
from ekiden.base.settings import Hardware, Training
from ekiden.data.samples import ClientData, Dataset, Subset
from ekiden.data.tasks import Scores, Task
from ekiden.engine import wire
from ekiden.engine.method import Method, Size
from ekiden.engine.store import TRAINED
from ekiden.engine.tasks import task_of
from ekiden.training import fit as fitting
from ekiden.training import frozen
from ekiden.training.feed import Feed
from ekiden.training.fit import Bench, Journal
from ekiden.training.layout import Layout
from ekiden.training.network import Network, fresh
from ekiden.training.objective import Loss, Objective, Penalty, TaskLoss, Work
from ekiden.training.weights import Part, Weights

A = TypeVar("A", bound=wire.Addable)
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
        keep_trained: whether each client also keeps the models that its last task trained.
        show_trained: whether an outcome has the model that its task trained last, to measure it.
    """

    method: Method
    build: Callable[[], nn.Module]
    dataset: Dataset
    training: Training = field(default_factory=Training)
    hardware: Hardware = field(default_factory=Hardware)
    seed: int = 0
    keep_trained: bool = False
    show_trained: bool = False


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
    """What a task gave: its value, the client's state after it, and the compute it took.

    Attributes:
        value: what the task returned.
        private: the client's state after the task.
        work: the compute it took.
        trained: the model that the task trained last, if the run measures it; the task does not send it.
    """

    value: Any
    private: Any
    work: Work
    trained: Weights | None = None


class Client:
    """A client as a task sees it: its data, its state, and how to train on them.

    Attributes:
        name: unique in the run.
        data: its training, validation and test samples.
        classes: K, the number of classes, or of the outputs of another task.
        shape: of one input.
        state: private; a task may replace it, and finds it again in a later step.
        training: how this client trains unless `fit` is told otherwise.
        last_trained: what `fit` gave last, of the run's own network; None before.
    """

    def __init__(
        self,
        bench: Bench,
        data: ClientData,
        state: Any,
        seed: int,
        journal_key: str,
        most_epochs: float = float("inf"),
        trained: list[Weights] | None = None,
    ) -> None:
        self.name = data.name
        self.data = data
        self.classes = bench.feed.dataset.outputs
        self.shape = bench.feed.dataset.shape
        self.state = state
        self.training = bench.training
        self._bench = bench
        self._seed = seed
        self._key = journal_key
        self._fits = 0
        self._epochs_left = most_epochs
        self._trained = trained
        self.last_trained: Weights | None = None

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self._bench.task

    @property
    def loss(self) -> Objective:
        """The mean loss ℓ of a batch: cross-entropy in classification."""
        return TaskLoss(self.task)

    @property
    def work(self) -> Work:
        """Samples that went forward and backward in this task; a task adds the passes that it does by itself.

        `fit`, `accuracy`, `probe` with a model, `gradient` and `batches` count theirs.
        """
        return self._bench.work

    @property
    def scaling(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation by which pixels in [0, 1] become inputs: of all channels, or of each."""
        return self._bench.feed.dataset.mean, self._bench.feed.dataset.std

    @property
    def n(self) -> int:
        """n_i, the number of training samples."""
        return len(self.data.train)

    def steps(self, epochs: int) -> int:
        """τ_i, optimiser steps in so many epochs over the training data."""
        return self.training.steps(self.n, epochs)

    @property
    def size(self) -> Size:
        """M, the bytes of a model, which knows the network."""
        return Size.of(self._bench.network, self.shape, self.task)

    @property
    def head(self) -> Part:
        """The entries of the classifier; see `Network.head`."""
        return self._bench.network.head

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the trainable tensors; see `Network.shapes`."""
        return self._bench.network.shapes

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
        """Train from `model` on this client's training data; see `ekiden.training.fit.fit`.

        `network` is what is trained where that is not the run's own: one of other widths, or with frozen layers.
        """
        if epochs <= 0:
            return model
        self._epochs_left -= epochs
        if self._epochs_left < 0:
            raise UserError(f"the task trains for more epochs than {self.name} allows: lower --epochs")
        self._fits += 1
        trained = fitting.fit(
            replace(self._bench, training=training or self.training, network=network or self._bench.network),
            model,
            self.data.train if train is None else train,
            self.data.val,
            epochs=epochs,
            seed=derive(self._seed, "fit", self._fits),
            key=f"{self._key}-fit{self._fits}",
            penalty=penalty,
            objective=objective,
        )
        if self._trained is not None:
            self._trained += [trained] if self._trained else [model, trained]
        if network is None:
            self.last_trained = trained
        return trained

    def accuracy(self, model: Weights, subset: Subset | None = None) -> float:
        """Share of right answers of `model` on `subset`, by default the validation data; NaN where that is empty.

        Of numbers, which are not right or wrong, R² in its place.
        """
        return self._scores(model, subset).goodness()

    def score(self, model: Weights, subset: Subset | None = None) -> float:
        """The headline metric of `model`, turned so that more is better, otherwise as `accuracy`."""
        return self.task.headline.better(self._scores(model, subset).score())

    def _scores(self, model: Weights, subset: Subset | None) -> Scores:
        subset = self.data.val if subset is None else subset
        self._bench.network.load(model)
        self.work.forward += len(subset)
        return fitting.evaluate(self._bench, subset)

    def probe(self, x: Tensor, model: Weights | None = None) -> tuple[Tensor, Tensor]:
        """What enters the head and what leaves it, see `Network.probe`.

        Args:
            x: inputs, as the network takes them.
            model: the weights; None: those in training, inside an objective of `fit`, which counts the pass itself.
        """
        if model is not None:
            self._bench.network.load(model)
            self.work.forward += len(x)
        with self._bench.autocast():
            return self._bench.network.probe(x)

    def unit(self) -> Tensor:
        """(1, ...) ones in the shape of a sample as the network takes it: the same at all clients."""
        return torch.ones(1, *self._bench.feed.dataset.shape, device=self._bench.feed.device)

    def gradient(self, model: Weights) -> Tensor:
        """The gradient (P,) of the loss at `model` on one batch of training data, redrawn by each task."""
        draw = torch.Generator().manual_seed(self.seed("gradient"))
        rows = torch.randperm(self.n, generator=draw)[: self.training.batch_size]
        train = self.data.train
        return fitting.gradient(self._bench, model, Subset(train.samples, train.rows[rows]))

    @property
    def module(self) -> nn.Module:
        """The network itself, for an objective of `fit` that looks inside it."""
        return self._bench.network.module

    def network(self, model: Weights) -> nn.Module:
        """Return a separate network that holds `model`, in evaluation mode.

        Its passes are to be added to `work`, those as a teacher of `fit` excepted.
        """
        network = Network(frozen.copied(self._bench.network.module), self._bench.feed.device)
        network.load(model)
        return network.module.eval().requires_grad_(False)

    @property
    def layout(self) -> Layout:
        """Where each tensor of the network is in flat weights."""
        return self._bench.network.layout

    def class_counts(self) -> Tensor:
        """(K,) number of training samples of each class."""
        return self.data.train.class_counts(self.classes)

    def fresh(self) -> Weights:
        """An initial model of this client's own: the network with newly drawn values."""
        return Network(fresh(self._bench.network.module, self.seed("fresh")), self._bench.feed.device).weights()

    def batches(
        self, subset: Subset | None = None, *, passes: int = 1, shuffle: bool = True
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass over `subset` (default: training data), not augmented: inputs (b, ...) and labels (b,).

        Counted as so many forward `passes`; 0 where what is done with the batches counts itself. Not shuffled, the
        batches are the same in every step.
        """
        subset = self.data.train if subset is None else subset
        draw = torch.Generator().manual_seed(self.seed("batches"))
        order = torch.randperm(len(subset), generator=draw) if shuffle else torch.arange(len(subset))
        for rows in torch.split(order, self.training.batch_size):
            yield self._bench.feed.batch(subset, rows, train=False)
        self.work.forward += passes * len(subset)

    def added(self, before: A | None, own: A) -> A:
        """The sum of what other clients have added up so far, if there is any, and the client's own part."""
        return own if before is None else before.plus(own)

    def seed(self, *parts: str | int) -> int:
        """A seed for this task's own randomness, the same before and after a crash."""
        return derive(self._seed, *parts)


class Worker:
    """Executes tasks of one run for the clients whose data it has."""

    def __init__(
        self,
        setup: Setup,
        clients: Mapping[str, ClientData],
        watch: Watch | None = None,
        most_epochs: float = float("inf"),
        module: nn.Module | None = None,
    ) -> None:
        """Prepare network and samples.

        Args:
            setup: what the run agrees on.
            clients: whose data are here.
            watch: called after each epoch of training.
            most_epochs: that one task may train for.
            module: the run's network, with any values; made here if it is not given.
        """
        torch.set_num_threads(setup.hardware.threads)
        if torch.device(setup.hardware.device).type == "cuda":  # in every process that computes, not only in the first
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        self.setup = setup
        self.clients = clients
        self._watch = watch
        self._most_epochs = most_epochs
        self._feed = Feed(setup.dataset.fed(setup.training), setup.hardware)
        self.network = Network(
            setup.build() if module is None else module, setup.hardware.device, compiled=setup.hardware.compile
        )

    def execute(self, job: Job, journal: Journal | None = None, digest: str = "") -> Outcome:
        """Do one task. A pure function of `job`: the same job gives the same bits, anywhere and again.

        Args:
            job: what to do.
            journal: where the task keeps progress, so that it can go on after a crash.
            digest: distinguishes jobs of other arguments in the journal.

        Raises:
            UserError: the task is not one that clients run, or it failed for a reason the user can fix.
        """
        task = task_of(self.setup.method, job.task)
        bench = self.bench(f"step {job.step + 1}, client {job.client}")
        bench.journal = journal
        if self._watch:
            bench.watch = partial(self._watch, job.client)
        seed = derive(self.setup.seed, job.step, job.client, job.call)
        key = f"{job.step}-{job.call}-{digest}"
        # From the server, another process or a file they come on the CPU.
        private = wire.placed(job.private, self._feed.device)
        trained: list[Weights] | None = [] if self.setup.keep_trained else None
        client = Client(bench, self.clients[job.client], private, seed, key, self._most_epochs, trained)
        value = task(client, *wire.placed(job.args, self._feed.device))
        if trained and journal is not None:
            parts = {f"{i}.{name}": value for i, model in enumerate(trained) for name, value in vars(model).items()}
            journal.save(TRAINED, {"step": torch.tensor(job.step), **parts})
        shown = wire.placed(client.last_trained) if self.setup.show_trained else None
        return Outcome(wire.placed(value), wire.placed(client.state), bench.work, shown)

    def bench(self, where: str) -> Bench:
        """What to train or evaluate on; the network is shared by all, one task at a time."""
        return Bench(self.network, self._feed, self.setup.training, self.setup.hardware, where)
