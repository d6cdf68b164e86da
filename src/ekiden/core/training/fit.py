"""Local training: the loop in which all methods train a model at a client, what it minimises, and
its optimisers.

The optimisers' steps are torch's fused ones. Its `Optimizer` classes are not used: the first one
that a process makes loads torch's compiler, which takes a second or two, and every task of a silo
on Flower is a separate process.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import nan
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware, Training, batches, derive
from ekiden.core.data.samples import Samples, Subset
from ekiden.core.tasks import Scores, Task
from ekiden.core.tasks.base import better
from ekiden.core.training.feed import Feed
from ekiden.core.training.gradients import (
    Chain,
    Gradient,
    Pass,
    Shortcut,
    generators,
    is_changed,
    is_recordable,
    record,
)
from ekiden.core.training.network import Network
from ekiden.core.training.private.gradients import Mechanism
from ekiden.core.training.weights import Weights

Forward = Callable[[Tensor], Tensor]
Loss = Callable[[Forward, Tensor, Tensor], Tensor]
"""(network, inputs (b, ...), labels (b, ...)) -> mean loss of the batch, differentiable."""


@dataclass
class Work:
    """Samples that went forward and backward through a network: compute, whatever the machine."""

    forward: int = 0
    backward: int = 0

    def add(self, other: "Work") -> None:
        """Add `other`."""
        self.forward += other.forward
        self.backward += other.backward


class Objective(ABC):
    """The loss that `fit` minimises instead of the task's. A plain function is enough if there are
    no teachers.
    """

    @property
    def teachers(self) -> tuple[Forward, ...]:
        """Frozen networks that the loss compares with; `fit` runs them, counts the passes and hands
        on the outputs.
        """
        return ()

    @property
    def fixed(self) -> bool:
        """Whether it is the same function of the tensors that it is given in each step, and equal
        objectives are the same function. A GPU may then replay it.
        """
        return False

    def asks(self, batch: int) -> int:
        """Return for how many of the `batch` inputs, counted from the first, it needs the teachers'
        outputs.
        """
        return batch

    def further(self, batch: int) -> Work:
        """Return its own passes for a mini-batch of `batch`, in addition to one forward and one
        backward.
        """
        return Work()

    @abstractmethod
    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the mean loss of a batch, differentiable.

        Args:
            forward: the network in training.
            x: inputs (b, ...).
            y: labels (b, ...).
            answers: the outputs of each teacher for the inputs, (b, ...), float32 and without
                gradient.
        """


@dataclass(frozen=True)
class TaskLoss(Objective):
    """The mean loss ℓ of a task: what a client minimises unless its method says otherwise."""

    task: Task

    fixed = True

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        return self.task.mean_loss(forward(x).float(), y)


@dataclass(frozen=True)
class FunctionLoss(Objective):
    """A plain function as an objective."""

    function: Loss

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        return self.function(forward, x, y)


class Penalty(Protocol):
    """A regulariser with a closed-form gradient.

    One that adds something up over the steps keeps it in a dict of tensors called `progress`, which
    survives a crash together with the rest of the fit. One that is the same function of its tensors
    in each step says so by `fixed = True`; a GPU may then replay it.
    """

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add its gradient at `params` (P,) to `grad` (P,) in place; `loss` is the batch's,
        detached.
        """


# of the time one part
_SHARE_OF_SAVING = 100
# batches of texts that are sorted together by length
_WINDOW = 32


@dataclass(eq=False)
class Optimizer:
    """The optimiser that `training` names; steps of SAM are steps of SGD.

    Adam with the usual betas (0.9, 0.999) as `torch.optim.Adam`, AdamW as `torch.optim.AdamW`, SGD
    with momentum as `torch.optim.SGD`.
    """

    params: Tensor  # (P,), changed in place
    grad: Tensor  # (P,), where the gradient stands at each step
    training: Training  # which one, with its settings
    # all that must survive a crash, under torch's names: number of steps and (P,) running moments,
    # or the (P,) buffer of the momentum
    state: dict[str, Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        names = []
        if self.training.adaptive:
            names = ["exp_avg", "exp_avg_sq"]
            self.state["step"] = self.params.new_empty(())
        elif self.training.momentum:
            names = ["momentum_buffer"]
        self.state |= {name: torch.empty_like(self.params) for name in names}
        self.restart()

    def restart(self) -> None:
        """Forget all steps."""
        for value in self.state.values():
            # -0 + g is g also where g is -0, so the first step of SGD needs no case of its own
            value.fill_(-0.0)

    def step(self) -> None:
        """One step along the gradient."""
        if self.training.adaptive:
            self._adam()
        else:
            self._sgd()

    def _adam(self) -> None:
        self.state["step"].add_(1)
        decoupled = self.training.optimizer == "adamw"
        (torch._fused_adamw_ if decoupled else torch._fused_adam_)(
            [self.params],
            [self.grad],
            [self.state["exp_avg"]],
            [self.state["exp_avg_sq"]],
            [],
            [self.state["step"]],
            lr=self.training.lr,
            beta1=0.9,
            beta2=0.999,
            weight_decay=self.training.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    def _sgd(self) -> None:
        torch._fused_sgd_(
            [self.params],
            [self.grad],
            [*self.state.values()],
            weight_decay=self.training.weight_decay,
            momentum=self.training.momentum,
            lr=self.training.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Diverged(UserError):
    """Training produced NaN or infinity."""


class Journal(Protocol):
    """Where a long task saves its progress, so that a crash costs little."""

    def load(self, key: str) -> dict[str, Tensor] | None:
        """Return what was saved under `key`, if anything was."""

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep `tensors` under `key` in place of what was there."""


@dataclass
class Bench:
    """Everything that training at one client needs: network, data, settings, and who is told about
    progress.
    """

    network: Network  # overwritten by every fit
    feed: Feed  # where batches come from
    training: Training  # how to train
    hardware: Hardware  # on what
    where: str = "here"  # what messages call the client
    journal: Journal | None = None  # keeps progress within a fit
    # called after each epoch with (epoch, epochs)
    watch: Callable[[int, int], None] = lambda epoch, epochs: None
    work: Work = field(default_factory=Work)  # counts samples
    private: Mechanism | None = None  # makes a fit differentially private

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self.feed.dataset.task


def gradient_of(bench: Bench, objective: Objective) -> Gradient:
    """Return what makes the gradients of an objective; its shortcuts live as long as the network."""
    network = bench.network
    hardware = bench.hardware
    suits = isinstance(objective, TaskLoss) and hardware.precision == "float32"
    if not suits or bench.feed.dataset.inputs.ragged or is_changed(network.module):
        return Gradient(network, hardware, objective)
    key = (objective, hardware)
    if key not in network.shortcuts:
        chain = Chain.of(network, bench.task)
        network.shortcuts[key] = Shortcut(network, chain.quicker) if chain else None
    return Gradient(network, hardware, objective, network.shortcuts[key])


def steps_of(
    bench: Bench, objective: Objective, penalty: Penalty | None, samples: Samples
) -> tuple[Optimizer, Shortcut | None]:
    """Return the optimiser of a fit, and what a GPU replays its steps by, if it may.

    They are used again where equal arguments say that the steps are the same.
    """
    network = bench.network
    training = bench.training
    optimizer = Optimizer(network.params, network.grad, training)
    if not is_replayed(bench, objective, penalty):
        return optimizer, None
    changing = (network.params, *optimizer.state.values(), *progress_of(penalty).values())
    shortcut = Shortcut(network, record, changing)
    if penalty is not None or objective.teachers:
        return optimizer, shortcut
    # with as many sample sets, recording again costs less than their memory
    if len(network.shortcuts) > 16:
        network.shortcuts.clear()
    key = (objective, training, bench.hardware, bench.feed, samples)
    optimizer, shortcut = network.shortcuts.setdefault(key, (optimizer, shortcut))
    optimizer.restart()
    return optimizer, shortcut


def is_replayed(bench: Bench, objective: Objective, penalty: Penalty | None) -> bool:
    """Return whether a GPU may replay the steps of a fit: whether all do the same."""
    return (
        objective.fixed
        and (penalty is None or getattr(penalty, "fixed", False))
        and bench.private is None
        and bench.training.optimizer != "sam"
        and not bench.feed.dataset.inputs.ragged
        and is_recordable(bench.network)
    )


def progress_of(penalty: Penalty | None) -> dict[str, Tensor]:
    """Return what a penalty adds up."""
    progress: dict[str, Tensor] = getattr(penalty, "progress", {})
    return progress


def kept(grad: Tensor, limit: float) -> Tensor:
    """Return the factor that limits the norm of `grad` (P,)."""
    share: Tensor = limit / grad.norm().clamp(min=1e-12)
    return share.clamp(max=1)


def fit(
    bench: Bench,
    start: Weights,
    train: Subset,
    val: Subset,
    *,
    epochs: int,
    seed: int,
    key: str = "fit",
    penalty: Penalty | None = None,
    objective: Objective | Loss | None = None,
) -> Weights:
    """Train from `start` for `epochs` >= 1 passes over `train`, or the first `training.max_steps`
    mini-batches of them.

    The result is what `training.select` says. Without an `objective`, the loss is that of the
    data's task.

    Teachers of `objective` are run once for all epochs, unless samples are augmented. The same
    arguments give the same bits, even if `bench.journal` holds the first epochs of an interrupted
    fit.

    Raises:
        Diverged: a loss or a weight became NaN or infinite; the message says where.
    """
    training = bench.training
    network = bench.network
    objective = objective or TaskLoss(bench.task)
    if bench.private and not isinstance(objective, TaskLoss):
        raise UserError(
            f"{bench.where}: the method trains on a loss of its own, for which --dp promises "
            "nothing"
        )
    if not isinstance(objective, Objective):
        objective = FunctionLoss(objective)
    network.load(start)
    run = _Run(
        bench,
        train,
        objective,
        penalty,
        gradient_of(bench, objective),
        *steps_of(bench, objective, penalty, train.samples),
        training.steps(len(train), epochs),
        light=network.light and isinstance(objective, TaskLoss),
        lengths=None if bench.private else bench.feed.lengths(train),
    )
    # max_steps may end it earlier
    epochs = -(-run.total // batches(len(train), training.batch_size))
    first = run.restore(key)
    if first < epochs and run.total >= batches(len(train), training.batch_size):
        run.ask(count=first == 0)
    device = bench.feed.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for epoch in range(first, epochs):
            for generator in generators(device):
                generator.manual_seed(
                    bench.private.noise.seed(epoch) if bench.private else derive(seed, epoch)
                )
            run.epoch(epoch)
            if training.select == "best":
                run.keep_best(val)
            bench.watch(epoch + 1, epochs)
            run.save(key, epoch + 1, last=epoch + 1 == epochs)
    bench.work.add(run.work)
    return run.result()


@dataclass(eq=False)
class _Run:
    """One fit in progress; `state` lists all that must survive a crash."""

    bench: Bench
    train: Subset
    objective: Objective
    penalty: Penalty | None
    gradient: Gradient
    optimizer: Optimizer
    shortcut: Shortcut | None
    total: int
    light: bool = False  # whether numbers of samples are enough as inputs
    lengths: Tensor | None = None
    step: int = 0
    score: float = nan  # of the best epoch; higher is better
    chosen: Weights | None = None  # best epoch, or running mean of the tail
    averaged: int = 0
    answers: tuple[Tensor, ...] = ()  # of the teachers, for all samples, if they are kept
    work: Work = field(default_factory=Work)
    saved_at: float = field(default_factory=time.monotonic)
    saving_took: float = 0.0

    def ask(self, *, count: bool) -> None:
        """Keep the teachers' outputs for all samples, if each sample is always the same input."""
        train = self.train
        if not self.objective.teachers or not self.bench.feed.alike:
            return
        parts = torch.split(torch.arange(len(train)), 512)
        each = [self._ask(self.bench.feed.batch(train, rows, train=True)[0]) for rows in parts]
        self.answers = tuple(map(torch.cat, zip(*each, strict=True)))
        if count:
            self.work.forward += len(self.objective.teachers) * len(train)

    def _ask(self, x: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad(), self.bench.hardware.autocast():
            return tuple(teacher(x).float() for teacher in self.objective.teachers)

    def drawn(self) -> list[Tensor]:
        """Draw the batches of an epoch, as positions in `train`, up to the last step of the fit."""
        size = self.bench.training.batch_size
        private = self.bench.private
        left = self.total - self.step
        if private is None:
            return shuffled(len(self.train), size, self.lengths)[:left]
        steps = min(batches(len(self.train), size), left)
        return [private.rows(self.step + i) for i in range(steps)]

    def epoch(self, epoch: int) -> None:
        """Train for one epoch."""
        bench = self.bench
        training = self.bench.training
        feed = self.bench.feed
        # One sample has no batch statistics: such a client trains with the running ones.
        bench.network.module.train(len(self.train) > 1)
        drawn = self.drawn()
        if self.shortcut is None:
            take: Pass = self._step
            inputs: Iterable[tuple[Tensor, ...]] = feed.epoch(self.train, drawn, light=self.light)
        else:
            take = partial(self.shortcut, self._step_from_rows)
            inputs = feed.draw(self.train, drawn)
        losses = []
        for rows, given in zip(drawn, inputs, strict=True):
            known = (answers[rows.to(feed.device)] for answers in self.answers)
            try:
                losses.append(take(*given, *known))
            except ValueError as error:  # BatchNorm, of a mini-batch of one
                raise UserError(f"{bench.where}: {error}: use a larger --batch-size") from None
            self._count(len(rows))
            self.step += 1
            if training.select == "tail" and self.step > self.total * (1 - training.tail):
                self._average()
        self._check(torch.stack(losses), epoch)

    def _count(self, size: int) -> None:
        """Count the work of a step."""
        objective = self.objective
        if self.bench.private is not None:
            # what is drawn varies, and stays unknown
            size = round(self.bench.private.batch)
        for _ in range(2 if self.bench.training.optimizer == "sam" else 1):
            self.work.add(Work(size, size))
            self.work.add(objective.further(size))
        if not self.answers:
            self.work.forward += len(objective.teachers) * objective.asks(size)

    def _step_from_rows(self, rows: Tensor, draws: Tensor, *answers: Tensor) -> Tensor:
        """Take one step on these rows of the samples; see `Feed.draw`."""
        samples = Subset(self.train.samples, rows)
        x, y = self.bench.feed.batch(samples, slice(None), train=True, draws=draws)
        return self._step(x, y, *answers)

    def _step(self, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Take one step, and return the loss ()."""
        bench = self.bench
        network = self.bench.network
        training = self.bench.training
        if not answers and self.objective.teachers:
            answers = self._ask(x[: self.objective.asks(len(x))])
        if bench.private is not None:
            # the loss stays unknown, and so does its size
            loss = torch.full((), nan)
            network.grad.zero_()
            with bench.hardware.autocast():
                bench.private.gradient(network, x, y, bench.task.mean_loss, self.step)
        elif training.optimizer == "sam":
            loss = self._sharp(x, y, *answers)
        else:
            loss = self.gradient(x, y, *answers)
        if self.penalty is not None:
            self.penalty(network.params, network.grad, loss)
        if training.clip_norm:
            network.grad.mul_(kept(network.grad, training.clip_norm))
        with torch.no_grad():
            self.optimizer.step()
        return loss

    def _sharp(self, *batch: Tensor) -> Tensor:
        """Make the gradient at w + ρ g / ‖g‖, with the same dropout as g, and return the loss at w.

        Running statistics stay those of the first pass.
        """
        network = self.bench.network
        draws = generators(self.bench.feed.device)
        states = [draw.get_state() for draw in draws]
        loss = self.gradient(*batch)
        before = network.weights()
        scale = self.bench.training.rho / (network.grad.norm() + 1e-12)
        network.params.add_(network.grad * scale)
        for draw, state in zip(draws, states, strict=True):
            draw.set_state(state)
        self.gradient(*batch)
        network.load(before)
        return loss

    def _average(self) -> None:
        network = self.bench.network
        self.averaged += 1
        if self.chosen is None:
            self.chosen = network.weights()
        self.chosen.params.lerp_(network.params, 1 / self.averaged)

    def _check(self, losses: Tensor, epoch: int) -> None:
        finite = torch.isfinite(losses) | (self.bench.private is not None)
        # A sum is NaN or infinite if any value is; it needs no second vector.
        finite[-1] &= torch.isfinite(self.bench.network.params.sum())
        wrong = (~finite).nonzero()
        if len(wrong):
            raise Diverged(
                f"{self.bench.where}: loss or weights became NaN or infinite in epoch {epoch + 1}, "
                f"batch {int(wrong[0]) + 1}: lower --lr (now {self.bench.training.lr}) or check this "
                "client's data; the last good model is kept"
            )

    def keep_best(self, val: Subset) -> None:
        """Keep the first epoch with the strictly best validation score; the last one if none is
        defined, or without such data.
        """
        network = self.bench.network
        score = self.bench.task.headline.signed(evaluate(self.bench, val).score())
        self.work.forward += len(val)
        if better(score, self.score):
            self.score = score
            self.chosen = network.weights()

    def result(self) -> Weights:
        network = self.bench.network
        select = self.bench.training.select
        if select == "last" or self.chosen is None:
            return network.weights()
        # BatchNorm's statistics are those of the last iterate
        if select == "tail":
            return Weights(self.chosen.params, network.buffers.clone(), network.counters.clone())
        return self.chosen

    def save(self, key: str, epoch: int, *, last: bool) -> None:
        """Save progress, so often that it takes 1 % of the time, or 5 % at the end of a fit."""
        journal = self.bench.journal
        network = self.bench.network
        now = time.monotonic()
        # the first time is a guess
        took = self.saving_took or 2e-3 + 20 * len(network.params) / 1e9
        pause = _SHARE_OF_SAVING * took
        # losing a finished fit costs more
        if last:
            pause /= 5
        if journal is None or now - self.saved_at < pause:
            return
        numbers = [epoch, self.step, self.averaged, self.work.forward, self.work.backward]
        tensors = {
            "numbers": torch.tensor(numbers),
            "accuracy": torch.tensor(self.score, dtype=torch.float64),
        }
        tensors |= {f"penalty.{name}": value for name, value in progress_of(self.penalty).items()}
        if last:
            tensors |= vars(self.result())
        else:
            tensors |= vars(network.weights())
            tensors |= {f"optimizer.{k}": v for k, v in self.optimizer.state.items()}
            if self.chosen is not None:
                tensors |= {f"chosen.{name}": value for name, value in vars(self.chosen).items()}
        journal.save(key, tensors)
        self.saved_at = time.monotonic()
        self.saving_took = self.saved_at - now

    def restore(self, key: str) -> int:
        """Load saved progress, and return the number of epochs already done."""
        saved = self.bench.journal.load(key) if self.bench.journal is not None else None
        if saved is None:
            return 0
        network = self.bench.network
        epoch, self.step, self.averaged, self.work.forward, self.work.backward = saved[
            "numbers"
        ].tolist()
        self.score = saved["accuracy"].item()
        for name, value in progress_of(self.penalty).items():
            value.copy_(saved[f"penalty.{name}"])
        for name, value in self.optimizer.state.items():
            value.copy_(saved.get(f"optimizer.{name}", value))
        if "chosen.params" in saved:
            network.load(_weights(saved, "chosen."))
            self.chosen = network.weights()
        network.load(_weights(saved))
        return int(epoch)


def _weights(saved: dict[str, Tensor], prefix: str = "") -> Weights:
    return Weights(*(saved[prefix + name] for name in ("params", "buffers", "counters")))


def gradient(bench: Bench, model: Weights, subset: Subset) -> Tensor:
    """Return the gradient (P,) of the mean loss of `subset` at `model`, in evaluation mode, without
    masks.
    """
    network = bench.network
    network.load(model)
    network.module.eval()
    x, y = bench.feed.batch(subset, slice(None), train=False)
    Gradient(network, bench.hardware, TaskLoss(bench.task))(x, y)
    bench.work.add(Work(len(y), len(y)))
    return network.grad.clone()


def evaluate(bench: Bench, subset: Subset, batch: int = 512, *, full: bool | None = None) -> Scores:
    """Return the network's outputs for `subset`, and the losses, on the CPU.

    Args:
        bench: has the network, with its weights.
        subset: the samples.
        batch: samples in one pass.
        full: whether the answers are probabilities, if the task has them. None: if the headline
            metric needs them.
    """
    network = bench.network
    module = bench.network.module
    task = bench.task
    full = task.headline.full if full is None else full
    was_training = module.training
    module.eval()
    answers = []
    losses = []

    def forward(x: Tensor) -> Tensor:
        with bench.hardware.autocast():
            return cast(Tensor, module(x).float())

    run: Pass = forward
    if is_recordable(network) and not bench.feed.dataset.inputs.ragged:
        shortcut = Shortcut(network, record)
        run = partial(network.shortcuts.setdefault(bench.hardware, shortcut), forward)
    with torch.inference_mode():
        for start in range(0, len(subset), batch):
            x, y = bench.feed.batch(
                subset, slice(start, start + batch), train=False, light=network.light
            )
            outputs = run(x)
            answers.append(task.answers(outputs, full=full))
            losses.append(task.loss(outputs, y))
    module.train(was_training)
    if not answers:
        return Scores(task, bench.feed.dataset.outputs, subset.y, subset.y, torch.empty(0))
    return Scores(
        task,
        bench.feed.dataset.outputs,
        subset.y,
        _together(answers).cpu(),
        torch.cat(losses).cpu(),
    )


def _together(parts: Sequence[Tensor]) -> Tensor:
    """Join all parts; rows of shorter parts are padded with -1."""
    if len({part.shape[1:] for part in parts}) > 1:
        longest = max(part.shape[-1] for part in parts)
        parts = [F.pad(part, (0, longest - part.shape[-1]), value=-1) for part in parts]
    return torch.cat(list(parts))


def shuffled(n: int, size: int, lengths: Tensor | None = None) -> list[Tensor]:
    """Return the batches of a shuffled pass over n samples. BatchNorm needs two samples, so no
    batch has only one.

    Texts of similar `lengths` (n,) come together: each window of batches is sorted, then the
    batches are shuffled.
    """
    order = torch.randperm(n)
    cuts = [size * i for i in range(1, batches(n, size))]
    if lengths is None:
        return list(torch.tensor_split(order, cuts))
    windows = []
    for window in torch.split(order, _WINDOW * size):
        windows.append(window[lengths[window].argsort(stable=True)])
    order = torch.cat(windows)
    parts = torch.tensor_split(order, cuts)
    return [parts[i] for i in torch.randperm(len(parts))]
