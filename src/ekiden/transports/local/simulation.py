"""All clients on one machine: the common part of the transports in one process and in several."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ekiden.engine import wire
from ekiden.engine.method import INITIAL
from ekiden.engine.store import Store
from ekiden.engine.transport import ClientMissing, Request, Transport, live_refs, resolve
from ekiden.engine.wire import Ref
from ekiden.engine.worker import Job, Outcome
from ekiden.training.objective import Work
from ekiden.training.weights import Weights
from ekiden.transports.base import Start


class Executor(Protocol):
    """Where jobs are executed."""

    def submit(self, job: Job, journal: Path | None, digest: str) -> Future[Outcome]:
        """Start a job; `journal` is the folder for its progress."""

    def close(self) -> None:
        """Release what it holds."""


class Simulation(Transport):
    """A transport whose clients share a machine: values move by reference, nothing is serialised for them."""

    def __init__(
        self, executor: Executor, start: Start, absent: Callable[[int, str], bool] = lambda step, client: False
    ) -> None:
        """Continue from `start`.

        Args:
            executor: where tasks run; closed with the transport.
            start: where the run is.
            absent: which clients do not answer in which step, to try a method with.
        """
        self._executor = executor
        self._start = start
        self._absent = absent
        self._stores: dict[str, Store] = {}
        self._running: dict[Ref[Any], Future[Outcome] | None] = {}
        self._last: dict[str, Ref[Any]] = {}
        self._live = _by_owner(live_refs(start.state))
        # A process that died between writing the state and `settle` left values behind at any client.
        folder = start.folder
        self._touched = {path.name for path in folder.iterdir()} if folder is not None and folder.exists() else set()
        self._written = dict(start.written or {})
        if start.written is None:
            self._written = {client: str(self._store(client).written) for client in self._touched}
        self._work = Work()
        self._trained: dict[str, Weights] = {}

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
        digest = _digest(*args, store.private) if journal else ""
        self._running[ref] = self._executor.submit(job, journal / "journal" if journal else None, digest)
        self._last[request.client] = ref

    def value(self, ref: Ref[Any]) -> Any:
        """Return the value behind `ref`."""
        if ref == INITIAL:
            return self._start.initial()
        self._finish(ref)
        return self._store(ref.owner).get(ref.key)

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Work:
        """Write what the state after `step` steps needs."""
        for ref in live:
            self._finish(ref)
        for ref in list(self._running):
            if self._running[ref] is not None:
                self._finish(ref)
        keys = _by_owner(live)
        for client in self._touched | set(keys):
            store = self._store(client)
            store.commit(step, keys.get(client, set()))
            if store.written:
                self._written[client] = str(store.written)
        self._touched |= set(self._live) | set(keys)
        self._live, self._running, self._last = keys, {}, {}
        work, self._work = self._work, Work()
        return work

    def written(self) -> Mapping[str, str]:
        """Return after how many steps each client's private state was last written."""
        return self._written

    def trained(self) -> Mapping[str, Weights]:
        """Return the model that each client trained last in this step, if the run measures it."""
        return self._trained

    def settle(self) -> None:
        """Delete what only the state before needed."""
        for client in self._touched:
            self._store(client).settle(self._live.get(client, set()))
        self._touched = set()
        self._trained = {}

    def close(self) -> None:
        """Close the executor."""
        self._executor.close()

    def _finish(self, ref: Ref[Any]) -> None:
        """Wait for the task behind `ref`, if it runs, and keep what it gave."""
        if ref not in self._running:
            return
        future = self._running[ref]
        if future is None:
            raise ClientMissing(f"client {ref.owner} did not answer")
        outcome = future.result()
        del self._running[ref]
        self._store(ref.owner).put(ref.key, outcome.value, outcome.private)
        self._touched.add(ref.owner)
        self._work.add(outcome.work)
        if outcome.trained is not None:
            self._trained[ref.owner] = outcome.trained

    def _store(self, client: str) -> Store:
        if client not in self._stores:
            self._stores[client] = self._start.store(client)
        return self._stores[client]


def _by_owner(refs: Iterable[Ref[Any]]) -> dict[str, set[str]]:
    keys: dict[str, set[str]] = {}
    for ref in refs:
        keys.setdefault(ref.owner, set()).add(ref.key)
    return keys


def _digest(*payload: Any) -> str:
    """Return a name for the arguments of a task, so that progress made with other arguments is not used."""
    return hashlib.blake2b(b"".join(map(_name, payload)), digest_size=8).hexdigest()


def _name(part: Any) -> bytes:
    """Return a digest of one argument. Weights never change, so a model sent to many clients is read once."""
    if isinstance(part, Weights) and part in _named:
        return _named[part]
    digest = hashlib.blake2b(digest_size=16)
    for chunk in wire.chunks(part):
        digest.update(chunk)
    if isinstance(part, Weights):
        _named[part] = digest.digest()
    return digest.digest()


_named: WeakKeyDictionary[Weights, bytes] = WeakKeyDictionary()
