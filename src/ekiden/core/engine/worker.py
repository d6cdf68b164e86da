"""Execute tasks at a client: the one place for it, in simulation and in real silos."""

import ctypes
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware, Training, derive
from ekiden.core.data.samples import ClientData, Dataset
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client, SumMasks
from ekiden.core.engine.method import Method, task_of
from ekiden.core.training.feed import feed_for
from ekiden.core.training.fit import Bench, Journal, Work
from ekiden.core.training.network import Network
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.private.promise import DP, Keeper, planned
from ekiden.core.training.private.sums import planned_sums
from ekiden.core.training.private.task import Privacy
from ekiden.core.training.weights import Weights

Watch = Callable[[str, int, int], None]  # (client, epoch, epochs): called after each epoch of a fit


@dataclass(frozen=True)
class Setup:
    """Everything that the parties of a run agree on before it starts."""

    method: Method  # what is run
    # makes the network; its values are the initial model, the same at every call
    build: Callable[[], nn.Module]
    dataset: Dataset  # the sample tensors and how to feed them
    training: Training = field(default_factory=Training)  # how clients train
    hardware: Hardware = field(default_factory=Hardware)  # what they compute on
    seed: int = 0  # of everything random
    # whether an outcome has the model that its task trained last, so that it can be measured
    show_trained: bool = False
    dp: DP | None = None  # the promise that clients keep when they train

    def planned(self, client: str, samples: int) -> Spent | None:
        """Return what a client with so many training samples tells in the whole run; None without a
        promise.
        """
        fits = self.method.fits()
        if self.dp is not None and self.method.traits.releases:
            return planned_sums(self.dp, samples, client)
        if self.dp is None or fits is None:
            return None
        return planned(self.dp, fits, self.training, samples, client)

    def privacy(self, data: ClientData, keeper: Keeper) -> Privacy | None:
        """Return what a task of a client may reveal about its samples; None without a promise."""
        plan = self.planned(data.name, len(data.train))
        if self.dp is None or plan is None:
            return None
        return Privacy(self.dp, plan, keeper, self.method.traits.releases, data.name)

    def told(self, samples: Mapping[str, int]) -> dict[str, Any]:
        """Return what a run folder says about privacy: ε of each client with its training samples,
        and of the run.
        """
        if self.dp is None:
            return {}
        clients = {}
        for client, count in samples.items():
            if spent := self.planned(client, count):
                clients[client] = {**vars(spent), "epsilon": spent.epsilon(self.dp.delta)}
        worst = max((one["epsilon"] for one in clients.values()), default=0.0)
        return {
            "privacy": {
                **vars(self.dp),
                "epsilon": worst,
                "promised": self.dp.epsilon,
                "clients": clients,
            }
        }


@dataclass(frozen=True)
class SeededNoise:
    """Noise of simulated clients: the same for the same seed of the task."""

    seed: int

    def key(self, fit: int, spent: Spent, *, note: bool = True) -> bytes:
        """Return the key of the noise of a fit."""
        return derive(self.seed, "noise", fit).to_bytes(32, "little")


@dataclass(frozen=True)
class Job:
    """One task for one client, with its arguments as values."""

    step: int  # the step of the run
    call: int  # number of earlier calls of this client in this step
    client: str  # its name
    task: str  # name of the method's function
    args: tuple[Any, ...]  # the function's arguments after the client
    private: Any = None  # the client's state before the task


@dataclass(frozen=True)
class Outcome:
    """The result of a job."""

    value: Any  # what the task returned
    private: Any  # the client's state after the task
    work: Work  # the compute it took
    # the model that the task trained last, if the run measures it; the task does not send it
    trained: Weights | None = None


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one, instead of giving it back to the system.

    Otherwise page faults take a quarter of the time of a small CNN.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: models of more than 32 MB still go back
        libc.mallopt(-3, 1 << 25)
        # M_TRIM_THRESHOLD: of what lies free at the end, 256 MB stay
        libc.mallopt(-1, 1 << 28)


class Worker:
    """Executes the tasks of one run for the clients whose data it has."""

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
            setup: what the parties agreed on.
            clients: those whose data are here.
            watch: called after each epoch of training.
            most_epochs: largest number of epochs that one task may train for.
            module: the run's network, with any values; made here if None.
        """
        torch.set_num_threads(setup.hardware.threads)
        # in every process that computes
        keep_freed_memory()
        device = torch.device(setup.hardware.device)
        if device.type == "cuda":
            if device.index:
                torch.cuda.set_device(device)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
        self.setup = setup
        self.clients = clients
        self._watch = watch
        self._most_epochs = most_epochs
        self._remembered: dict[tuple[str, str], Tensor] = {}
        self.network = Network(setup.build() if module is None else module, setup.hardware.device)
        dataset = setup.dataset.fed(setup.training)
        self._feed = feed_for(dataset, setup.hardware, self.network.module)

    def execute(
        self,
        job: Job,
        journal: Journal | None = None,
        masks: SumMasks | None = None,
        keeper: Keeper | None = None,
    ) -> Outcome:
        """Do one task. This is a pure function of `job`: the same job gives the same bits every
        time, in any process.

        Args:
            job: what to do.
            journal: where the task saves its progress, so that it can continue after a crash.
            masks: masks of what the task adds to sums; None: they are not masked.
            keeper: has the noise of the client, and counts what is spent; None: noise follows from
                the seed.

        Raises:
            UserError: the task is not one that clients run, or it failed for a reason the user can
                fix.
        """
        task = task_of(self.setup.method, job.task)
        bench = self.bench(f"step {job.step + 1}, client {job.client}")
        bench.journal = journal
        if self._watch:
            bench.watch = partial(self._watch, job.client)
        seed = derive(self.setup.seed, job.step, job.client, job.call)
        # Arguments from the server, another process or a file are on the CPU.
        private = wire.placed(job.private, self._feed.device)
        data = self.clients[job.client]
        key = f"{job.step}-{job.call}"
        privacy = self.setup.privacy(data, keeper or SeededNoise(seed))
        client = Client(
            bench, data, private, seed, key, self._most_epochs, self._remembered, masks, privacy
        )
        try:
            value = task(client, *wire.placed(job.args, self._feed.device))
        except torch.OutOfMemoryError:
            raise UserError(
                f"{bench.where}: the memory of {self._feed.device} is full: lower --batch-size, "
                "use fewer --workers, or try --precision bf16"
            ) from None
        if privacy:
            privacy.note()
        shown = wire.placed(client.last_trained) if self.setup.show_trained else None
        return Outcome(wire.placed(value), wire.placed(client.state), bench.work, shown)

    def bench(self, where: str) -> Bench:
        """Return what to train or evaluate on. All clients share one network, one task at a
        time.
        """
        return Bench(self.network, self._feed, self.setup.training, self.setup.hardware, where)
