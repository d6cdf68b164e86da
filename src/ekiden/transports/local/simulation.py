"""All clients on one machine: what the in-process and the processes transport share."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ekiden.base.refs import Ref
from ekiden.engine import wire
from ekiden.engine.federation import ClientMissing, Request, live_refs, resolve
from ekiden.engine.method import INITIAL, Method, State
from ekiden.engine.store import Store
from ekiden.engine.worker import Job, Outcome, payload_types
from ekiden.training.fit import Work
from ekiden.training.weights import Weights


class Executor(Protocol):
    """Where jobs are executed."""

    def submit(self, job: Job, journal: Path | None, digest: str) -> Future[Outcome]:
        """Start a job; `journal` is the folder for its progress."""

    def close(self) -> None:
        """Release what it holds."""


class Simulation:
    """A transport whose clients share a machine: values move by reference, nothing is serialised for them.

    Attributes:
        trained: the model that each client trained last in this step, if the run measures it.
    """

    def __init__(
        self,
        executor: Executor,
        method: Method,
        initial: Callable[[], Weights],
        *,
        folder: Path | None = None,
        state: State,
        absent: Callable[[int, str], bool] = lambda step, client: False,
        written: Mapping[str, str] | None = None,
    ) -> None:
        """Go on from `state`.

        Args:
            executor: where tasks run.
            method: whose tasks.
            initial: makes the model behind `INITIAL`.
            folder: where clients keep what must survive, one folder each; None for in memory only.
            state: the state to go on from; the values that it needs are in `folder`.
            absent: which clients do not answer in which step, to try a method with.
            written: after how many steps each client's private state was last written, as text; None where the folder
                is of an older version, which does not say.
        """
        self._executor = executor
        self._method = method
        self._initial = initial
        self._folder = folder
        self._step = state.step
        self._absent = absent
        self._stores: dict[str, Store] = {}
        self._running: dict[Ref[Any], Future[Outcome] | None] = {}
        self._last: dict[str, Ref[Any]] = {}
        self._live = _by_owner(live_refs(state))
        # A process that died between writing the state and `settle` left values behind at any client.
        left = folder.iterdir() if folder is not None and folder.exists() else ()
        self._touched: set[str] = {path.name for path in left}
        self._written = dict(written or {})
        if written is None:
            for client in self._touched:
                self._written[client] = str(self._open(client, None).written)
        self._work = Work()
        self.trained: dict[str, Weights] = {}

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
        journal = self._client_folder(request.client)
        digest = _digest(*args, store.private) if journal else ""
        self._running[ref] = self._executor.submit(job, journal / "journal" if journal else None, digest)
        self._last[request.client] = ref

    def value(self, ref: Ref[Any]) -> Any:
        """The value behind `ref`."""
        if ref == INITIAL:
            return self._initial()
        self._finish(ref)
        return self._store(ref.owner).get(ref.key)

    def size(self, ref: Ref[Any]) -> int:
        """Its content in bytes."""
        return wire.size(self.value(ref))

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
        """After how many steps each client's private state was last written."""
        return self._written

    def settle(self) -> None:
        """Drop what only the state before needed."""
        for client in self._touched:
            self._store(client).settle(self._live.get(client, set()))
        self._touched = set()
        self.trained = {}

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
            self.trained[ref.owner] = outcome.trained

    def _store(self, client: str) -> Store:
        if client not in self._stores:
            self._stores[client] = self._open(client, int(self._written.get(client, 0)))
        return self._stores[client]

    def _open(self, client: str, written: int | None) -> Store:
        return Store(self._client_folder(client), self._type_of, self._method.private, self._step, written)

    def _client_folder(self, client: str) -> Path | None:
        return self._folder / client if self._folder is not None else None

    def _type_of(self, task: str) -> Any:
        return payload_types(self._method, task)[1]


def _by_owner(refs: Iterable[Ref[Any]]) -> dict[str, set[str]]:
    keys: dict[str, set[str]] = {}
    for ref in refs:
        keys.setdefault(ref.owner, set()).add(ref.key)
    return keys


def _digest(*payload: Any) -> str:
    """A name for the arguments of a task, so that progress made with others is not taken up."""
    return hashlib.blake2b(b"".join(map(_name, payload)), digest_size=8).hexdigest()


def _name(part: Any) -> bytes:
    """A digest of one argument. Weights never change, so that a model sent to many clients is read once."""
    if isinstance(part, Weights) and part in _named:
        return _named[part]
    digest = hashlib.blake2b(digest_size=16)
    for chunk in wire.chunks(part):
        digest.update(chunk)
    if isinstance(part, Weights):
        _named[part] = digest.digest()
    return digest.digest()


_named: WeakKeyDictionary[Weights, bytes] = WeakKeyDictionary()
