"""Independent tasks on several cores: a pool of worker processes that share the samples' memory."""

import os
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from pickle import PicklingError
from typing import Any, Optional

import torch.multiprocessing  # noqa: F401  (lets processes share tensors)

from ekiden.base.errors import UserError
from ekiden.data.mapped import place
from ekiden.data.samples import ClientData
from ekiden.engine import wire
from ekiden.engine.method import payload_types
from ekiden.engine.store import FolderJournal
from ekiden.engine.worker import Job, Outcome, Setup, Worker
from ekiden.training.objective import Work
from ekiden.training.weights import Weights

_worker: Worker
_NAME = "ekiden-worker"
_RERUN = 86
"""exit code of a worker process that was made to run the user's script instead of its tasks"""
_UNGUARDED = (
    "a worker process ran the script that started it: put what starts the run under "
    '`if __name__ == "__main__":`, or use workers=1'
)


_UNREADABLE = (
    "worker processes cannot read the network, the data or the method: define their classes and functions at the top "
    "of a file, not as a lambda, inside a function or under `if __name__`, or use workers=1"
)


class _Workers(SpawnContext):
    """Makes the worker processes and keeps a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> SpawnProcess:  # type: ignore[override]
        """Make one. Its name tells `refuse_within_worker` that it is a worker."""
        self.made.append(SpawnProcess(*args, **(kwargs | {"name": _NAME})))
        return self.made[-1]

    def death(self) -> UserError:
        """Return the message about a process that died."""
        gone = wait([process.sentinel for process in self.made], timeout=1)
        for process in self.made:
            if process.sentinel in gone:
                process.join(1)  # its exit code can come a moment later
        if any(process.exitcode == _RERUN for process in self.made):
            return UserError(_UNGUARDED)
        if any(process.exitcode == 1 for process in self.made):  # an error, which Python printed, and no kill
            return UserError(_UNREADABLE)
        return UserError("a worker process died (out of memory?): use fewer --workers, then resume")


class Processes:
    """Executes jobs in `workers` processes. Arguments and values travel in the wire format."""

    def __init__(self, setup: Setup, clients: Mapping[str, ClientData], workers: int) -> None:
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script and not Path(script).exists():  # read from standard input
            raise UserError(f"worker processes cannot read {script}: put the script into a file, or use workers=1")
        try:
            ForkingPickler.dumps((setup.build, setup.method))
        except (PicklingError, AttributeError, TypeError):  # of lambdas and of what is defined inside a function
            raise UserError(_UNREADABLE) from None
        for samples in {id(c.train.samples): c.train.samples for c in clients.values()}.values():
            if not place(samples.x):
                samples.x.share_memory_()  # type: ignore[no-untyped-call]
            samples.y.share_memory_()  # type: ignore[no-untyped-call]
        self._setup = setup
        self._processes = _Workers()
        self._pool = ProcessPoolExecutor(workers, self._processes, _start, (setup, dict(clients)))

    def submit(self, job: Job, journal: Path | None, digest: str) -> Future[Outcome]:
        """Send the job to a free process."""
        call = (
            job.step,
            job.call,
            job.client,
            job.task,
            wire.encode(list(job.args)),
            wire.encode(job.private),
        )
        try:
            running = self._pool.submit(_execute, *call, journal, digest)
        except BrokenProcessPool:
            raise self._processes.death() from None
        done: Future[Outcome] = Future()
        running.add_done_callback(lambda finished: self._read(job, finished, done))
        return done

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, job: Job, finished: "Future[tuple[bytes, bytes, Work, bytes]]", done: Future[Outcome]) -> None:
        """Pass on a process's result. Errors raised here are lost, so they are given to whoever waits for `done`."""
        try:
            value, private, work, trained = finished.result()
            _, kind = payload_types(self._setup.method, job.task)
            last = wire.decode(trained, Optional[Weights])  # noqa: UP045
            done.set_result(Outcome(wire.decode(value, kind), _private(self._setup, private), work, last))
        except BrokenProcessPool:
            done.set_exception(self._processes.death())
        except wire.WireError as error:
            task = f"step {job.step + 1}, {job.client}, {job.task} of {self._setup.method.title()}"
            rule = "what a task takes, returns and keeps in client.state must be of the types that the method announces"
            done.set_exception(UserError(f"{task}: {error}; {rule}"))
        except BaseException as error:
            done.set_exception(error)


def refuse_within_worker() -> None:
    """End this process if it is a worker that runs the user's script; a new process does so to find its classes.

    What started the run would start it again in there. The parent sees the exit code and says what to do.
    """
    if current_process().name == _NAME:
        sys.exit(_RERUN)


def end_with_parent() -> None:
    """End this process when its parent ends, even by a kill."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _start(setup: Setup, clients: dict[str, ClientData]) -> None:
    """Prepare a worker process."""
    global _worker  # noqa: PLW0603
    end_with_parent()
    _worker = Worker(setup, clients)


def _execute(
    step: int,
    call: int,
    client: str,
    task: str,
    args: bytes,
    private: bytes,
    journal: Path | None,
    digest: str,
) -> tuple[bytes, bytes, Work, bytes]:
    setup = _worker.setup
    kinds, _ = payload_types(setup.method, task)
    values = wire.decode(args, tuple[tuple(kinds)]) if kinds else ()  # type: ignore[misc]
    job = Job(step, call, client, task, values, _private(setup, private))
    outcome = _worker.execute(job, FolderJournal(journal) if journal else None, digest)
    return wire.encode(outcome.value), wire.encode(outcome.private), outcome.work, wire.encode(outcome.trained)


def _private(setup: Setup, data: bytes) -> Any:
    kind = setup.method.traits.private
    return wire.decode(data, Optional[kind] if kind is not None else None)  # noqa: UP045
