"""All clients on this machine: in this process, or in a pool of worker processes that share the
samples' memory.
"""

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import current_process, parent_process, set_forkserver_preload
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from multiprocessing.resource_sharer import DupFd
from operator import is_
from pathlib import Path
from pickle import PicklingError
from typing import Any, Optional, Protocol
from weakref import WeakKeyDictionary

import torch.multiprocessing  # noqa: F401  (lets processes share tensors)
from safetensors import safe_open

from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import ClientData
from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL, State, payload_types
from ekiden.core.engine.setup import initial_weights
from ekiden.core.engine.store import FolderJournal, Store
from ekiden.core.engine.transport import ClientMissing, Request, Transport, live_refs, resolve
from ekiden.core.engine.wire import Ref
from ekiden.core.engine.worker import Job, Outcome, Setup, Worker
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights

# Forks of a process that has imported torch start at once. Elsewhere than on Linux, libraries of the
# system do not allow forks.
if sys.platform == "linux":
    from multiprocessing.context import ForkServerContext as WorkerContext
    from multiprocessing.context import ForkServerProcess as WorkerProcess
else:
    from multiprocessing.context import SpawnContext as WorkerContext
    from multiprocessing.context import SpawnProcess as WorkerProcess


@dataclass(frozen=True)
class Start:
    """What a transport is made from when a run begins or resumes.

    Attributes:
        setup: what all parties agree on.
        clients: the data of each client, by its name.
        state: the state to go on from.
        folder: of the run's clients, a folder each, for what must survive; None for a run in
            memory.
        written: what `Transport.written` said when `state` was written; {} for a run that begins,
            None if not known.
    """

    setup: Setup
    clients: Mapping[str, ClientData]
    state: State
    folder: Path | None = None
    written: Mapping[str, str] | None = field(default_factory=dict)

    def initial(self) -> Weights:
        """Make the value behind `INITIAL`: the model that all parties build from the seed."""
        return initial_weights(self.setup)

    def worker(self, client: str) -> Worker:
        """Make the worker that executes tasks of one client and has only that client's data."""
        return Worker(self.setup, {client: self.clients[client]})

    def store(self, client: str) -> Store:
        """Open the store of one client, with its values and private state, from `state` on.

        Where `written` does not say when its private state was written, the newest that is there
        counts. Otherwise it is the number of steps that were done then.
        """
        method = self.setup.method
        written = None if self.written is None else int(self.written.get(client, 0))
        return Store(
            self.place(client), self._kind, method.traits.private, self.state.step, written
        )

    def place(self, client: str) -> Path | None:
        """Return the folder of a client; None in memory."""
        if self.folder is not None:
            return self.folder / client
        return None

    def _kind(self, task: str) -> Any:
        return payload_types(self.setup.method, task)[1]


MakesTransport = Callable[[Start], Transport]
"""Makes the transport of a run; `ekiden.run(..., transport=...)` takes one, such as the class of a
transport."""


_worker: Worker
_NAME = "ekiden-worker"
_RERUN = (
    86  # exit code of a worker process that was made to run the user's script instead of its tasks
)
_UNGUARDED = (
    "a worker process ran the script that started it: put what starts the run under "
    '`if __name__ == "__main__":`, or use workers=1'
)
_UNREADABLE = (
    "worker processes cannot read the network, the data or the method: define their classes and "
    "functions at the top "
    "of a file, not as a lambda, inside a function or under `if __name__`, or use workers=1"
)


Pending = Callable[[], Outcome]  # Waits for a job, or does it; called once


class Executor(Protocol):
    """Where jobs are executed."""

    def submit(self, job: Job, journal: Path | None) -> "Pending":
        """Take a job, and start it if that is of use already; `journal` is the folder for its
        progress.
        """

    def close(self) -> None:
        """Release what it holds."""


class Simulation(Transport):
    """A transport whose clients share a machine: values move by reference, nothing is serialised
    for them.
    """

    def __init__(
        self,
        executor: Executor,
        start: Start,
        absent: Callable[[int, str], bool] = lambda step, client: False,
    ) -> None:
        """Continue from `start`."""
        self._executor = executor
        self._start = start
        self._absent = absent
        self._stores: dict[str, Store] = {}
        self._running: dict[Ref[Any], Pending | None] = {}
        self._last: dict[str, Ref[Any]] = {}
        self._live = by_owner(live_refs(start.state))
        # A process that died between writing the state and `settle` left values behind at any
        # client.
        folder = start.folder
        self._touched: set[str] = set()
        if folder is not None and folder.exists():
            self._touched = {path.name for path in folder.iterdir()}
        self._written = dict(start.written or {})
        if start.written is None:
            self._written = {client: str(self._store(client).written) for client in self._touched}
        self._work: dict[Ref[Any], Work] = {}
        self._trained: dict[str, Weights] = {}
        # whether the state that is written next outlives a power cut
        self._lasting = folder is None

    def submit(self, request: Request) -> None:
        """Start a task at its client, after the client's earlier tasks of this step."""
        if request.client in self._last:
            self._finish(self._last[request.client])
        ref: Ref[Any] = Ref(request.client, request.key)
        if self._absent(request.step, request.client):
            self._running[ref] = None
            return
        args = resolve(request.args, self.value)
        store = self._store(request.client)
        job = Job(request.step, request.call, request.client, request.task, args, store.private)
        journal = self._start.place(request.client)
        self._running[ref] = self._executor.submit(job, journal / "journal" if journal else None)
        self._last[request.client] = ref

    def value(self, ref: Ref[Any]) -> Any:
        """Return the value behind `ref`."""
        if ref == INITIAL:
            return self._start.initial()
        self._finish(ref)
        return self._store(ref.owner).get(ref.key)

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Mapping[Ref[Any], Work]:
        """Write what the state after `step` steps needs."""
        for ref, pending in list(self._running.items()):
            if pending is not None or ref in live:
                self._finish(ref)
        keys = by_owner(live)
        for client in self._touched | set(keys):
            store = self._store(client)
            store.commit(step, keys.get(client, set()))
            if store.written:
                self._written[client] = str(store.written)
        self._touched |= set(self._live) | set(keys)
        self._live = keys
        self._running = {}
        self._last = {}
        work = self._work
        self._work = {}
        return work

    def drop(self, ref: Ref[Any]) -> None:
        self._store(ref.owner).drop(ref.key)

    def written(self) -> Mapping[str, str]:
        return self._written

    def trained(self) -> Mapping[str, Weights]:
        """Return the model that each client trained last in this step, if the run measures it."""
        return self._trained

    @property
    def defers(self) -> bool:
        return True

    def sync(self) -> None:
        for client in self._touched:
            self._store(client).sync(self._live.get(client, set()))
        self._lasting = True

    def settle(self) -> None:
        self._trained = {}
        # after a power cut, the run resumes from an earlier state
        if not self._lasting:
            return
        self._lasting = self._start.folder is None
        for client in self._touched:
            self._store(client).settle(self._live.get(client, set()))
        self._touched = set()

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def _finish(self, ref: Ref[Any]) -> None:
        """Wait for the task behind `ref`, if it runs, and keep what it gave."""
        if ref not in self._running:
            return
        pending = self._running[ref]
        if pending is None:
            raise ClientMissing(f"client {ref.owner} did not answer")
        outcome = pending()
        del self._running[ref]
        self._store(ref.owner).put(ref.key, outcome.value, outcome.private)
        self._touched.add(ref.owner)
        self._work[ref] = outcome.work
        if outcome.trained is not None:
            self._trained[ref.owner] = outcome.trained

    def _store(self, client: str) -> Store:
        if client not in self._stores:
            self._stores[client] = self._start.store(client)
        return self._stores[client]


def by_owner(refs: Iterable[Ref[Any]]) -> dict[str, set[str]]:
    """Return the keys of values by their owners."""
    keys: dict[str, set[str]] = {}
    for ref in refs:
        keys.setdefault(ref.owner, set()).add(ref.key)
    return keys


def journal_of(job: Job, folder: Path | None) -> FolderJournal | None:
    """Return the journal of a job; it does not use progress that was made with other arguments."""
    if folder is None:
        return None
    payload = (*job.args, job.private)
    return FolderJournal(
        folder, lambda: hashlib.blake2b(b"".join(map(_name, payload)), digest_size=8).hexdigest()
    )


def _name(part: Any) -> bytes:
    """Return a digest of one argument. Weights never change, so a model sent to many clients is
    read once.
    """
    if isinstance(part, Weights) and part in _named:
        return _named[part]
    digest = hashlib.blake2b(digest_size=16)
    # a client's neighbours
    if isinstance(part, (list, tuple)) and any(isinstance(one, Weights) for one in part):
        digest.update(b"".join(map(_name, part)))
        return digest.digest()
    for chunk in wire.chunks(part):
        digest.update(chunk)
    if isinstance(part, Weights):
        _named[part] = digest.digest()
    return digest.digest()


_named: WeakKeyDictionary[Weights, bytes] = WeakKeyDictionary()


class InProcess:
    """Executes a job in the caller's thread once its outcome is asked for, so that memory need not
    hold all values.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def submit(self, job: Job, journal: Path | None) -> Pending:
        """Take a job."""
        return lambda: self._worker.execute(job, journal_of(job, journal))

    def close(self) -> None:
        """Nothing to release."""


class _Workers(WorkerContext):
    """Makes the worker processes and keeps a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[WorkerProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> WorkerProcess:  # type: ignore[override]
        """Make one. Its name tells `refuse_within_worker` that it is a worker."""
        self.made.append(WorkerProcess(*args, **(kwargs | {"name": _NAME})))
        return self.made[-1]

    def death(self) -> UserError:
        """Return the message about a process that died."""
        gone = wait([process.sentinel for process in self.made], timeout=1)
        for process in self.made:
            if process.sentinel in gone:
                # its exit code can come a moment later
                process.join(1)
        if any(process.exitcode == _RERUN for process in self.made):
            return UserError(_UNGUARDED)
        # an error, which Python printed, and no kill
        if any(process.exitcode == 1 for process in self.made):
            return UserError(_UNREADABLE)
        return UserError("a worker process died (out of memory?): use fewer --workers, then resume")


class SharedValue:
    """A value in the wire format in memory that other processes of this machine open by its path.

    The memory has no name, and is given back with the last process that holds it, however that
    ends. A system without such memory has none of them.
    """

    def __init__(self, value: Any) -> None:
        self.handle = os.memfd_create("ekiden")
        self.path = Path(f"/proc/{os.getpid()}/fd/{self.handle}")
        with open(self.path, "wb") as file:
            file.writelines(wire.chunks(value))

    def __del__(self) -> None:
        os.close(self.handle)


Answer = tuple[DupFd | bytes, Work]
"""What a process returns: value, state and last model of an `Outcome` in the wire format, and the
compute."""


class Processes:
    """Executes jobs in `workers` processes. Arguments and values travel in the wire format.

    The same arguments for several clients, such as the model of a round, are written once. Values
    come back in shared memory.
    """

    def __init__(self, setup: Setup, clients: Mapping[str, ClientData], workers: int) -> None:
        script = getattr(sys.modules["__main__"], "__file__", None)
        # read from standard input
        if script and not Path(script).exists():
            raise UserError(
                f"worker processes cannot read {script}: put the script into a file, or use "
                "workers=1"
            )
        # of lambdas and of what is defined inside a function
        try:
            ForkingPickler.dumps((setup.build, setup.method))
        except (
            PicklingError,
            AttributeError,
            TypeError,
        ):
            raise UserError(_UNREADABLE) from None
        self._setup = setup
        self._sent: tuple[int, tuple[Any, ...], SharedValue | bytes] = -1, (), b""
        self._processes = _Workers()
        # what this process has loaded, its forks need too
        set_forkserver_preload([name for name in sys.modules if name.startswith("ekiden.")])
        # pickling shares the samples' memory
        started = setup, clients, dict(os.environ)
        self._pool = ProcessPoolExecutor(workers, self._processes, _start, started)

    def submit(self, job: Job, journal: Path | None) -> Pending:
        """Send the job to a free process."""
        given = self._given(job)
        args = given if isinstance(given, bytes) else given.path
        sent = replace(job, args=(), private=None), args, wire.encode(job.private)
        try:
            running = self._pool.submit(_execute, *sent, journal)
        except BrokenProcessPool:
            raise self._processes.death() from None
        done: Future[Outcome] = Future()

        def read(finished: "Future[Answer]", given: Any = given) -> None:
            # until then, `given` keeps the memory
            self._read(job, finished, done)

        running.add_done_callback(read)
        return done.result

    def _given(self, job: Job) -> SharedValue | bytes:
        """Return the arguments of a job: in shared memory if the job before had the same ones."""
        step, args, given = self._sent
        same = step == job.step and len(args) == len(job.args) and all(map(is_, args, job.args))
        if not same:
            given = wire.encode(list(job.args))
        elif isinstance(given, bytes) and hasattr(os, "memfd_create"):
            given = SharedValue(list(job.args))
        self._sent = job.step, job.args, given
        return given

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown(cancel_futures=True)

    def _read(self, job: Job, finished: "Future[Answer]", done: Future[Outcome]) -> None:
        """Pass on a process's result. Errors raised here are lost, so they are given to whoever
        waits for `done`.
        """
        try:
            sent, work = finished.result()
            _, kind = payload_types(self._setup.method, job.task)
            kinds = tuple[kind, _private(self._setup), Optional[Weights]]  # type: ignore[misc,valid-type]  # noqa: UP045
            value, private, trained = _received(sent, kinds)
            done.set_result(Outcome(value, private, work, trained))
        except BrokenProcessPool:
            done.set_exception(self._processes.death())
        except wire.WireError as error:
            task = f"step {job.step + 1}, {job.client}, {job.task} of {self._setup.method.title()}"
            rule = "what a task takes, returns and keeps in client.state must be of the types that the method announces"
            done.set_exception(UserError(f"{task}: {error}; {rule}"))
        except BaseException as error:
            done.set_exception(error)


def refuse_within_worker() -> None:
    """End this process if it is a worker that runs the user's script; a new process does so to find
    its classes.

    What started the run would start it again in there. The parent sees the exit code and says what
    to do.
    """
    if current_process().name == _NAME:
        # an exception would reach the script, and a fork would end with 1
        os._exit(_RERUN)


def end_with_parent() -> None:
    """End this process when its parent ends, even by a kill."""
    parent = parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _start(setup: Setup, clients: Mapping[str, ClientData], environment: Mapping[str, str]) -> None:
    """Prepare a worker process."""
    global _worker  # noqa: PLW0603
    end_with_parent()
    # the process that it is a fork of may have others
    os.environ.clear()
    os.environ.update(environment)
    _worker = Worker(setup, clients)


def _execute(job: Job, args: bytes | Path, private: bytes, journal: Path | None) -> Answer:
    setup = _worker.setup
    kinds, _ = payload_types(setup.method, job.task)
    values = _received(args, tuple[tuple(kinds)]) if kinds else ()  # type: ignore[misc]
    job = replace(job, args=values, private=wire.decode(private, _private(setup)))
    outcome = _worker.execute(job, journal_of(job, journal))
    answer = outcome.value, outcome.private, outcome.trained
    if hasattr(os, "memfd_create"):
        shared = SharedValue(answer)
        return DupFd(shared.handle), outcome.work
    return wire.encode(answer), outcome.work


def _received(sent: DupFd | Path | bytes, kind: Any) -> Any:
    """Return the value of a type that another process sent."""
    if isinstance(sent, bytes):
        return wire.decode(sent, kind)
    if isinstance(sent, Path):
        return _mapped(sent, kind)
    try:
        handle = sent.detach()
    except (OSError, EOFError):
        # the process that held it was killed
        raise BrokenProcessPool from None
    try:
        return _mapped(Path(f"/proc/self/fd/{handle}"), kind)
    finally:
        os.close(handle)


def _mapped(path: Path, kind: Any) -> Any:
    """Return the value in shared memory."""
    # to copy a model takes as long as some steps of training
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        tensors = dict(zip(names, map(file.get_tensor, names), strict=True))
        return wire.assemble(tensors, file.metadata(), kind)


def _private(setup: Setup) -> Any:
    """Return the type of a client's state."""
    kind = setup.method.traits.private
    if kind is None:
        return None
    return Optional[kind]  # noqa: UP045
