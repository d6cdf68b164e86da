"""Clients on a Ray cluster: `ekiden.run(..., transport=OnRay())`, `ekiden run METHOD --on ray`.

Long-lived actors, the homes, each execute the tasks of many clients, one at a time, and keep these
clients' values. A value that another home needs goes there directly, as bytes of our wire format,
in Ray's object store. What has to survive is in the run folder, never in the object store. If a
home or its node dies, the step is repeated from there.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional, TypeVar
from uuid import uuid4

from ekiden.core.base.errors import UserError
from ekiden.core.base.outside import require_extra
from ekiden.core.engine import wire
from ekiden.core.engine.local import Start, by_owner, journal_of
from ekiden.core.engine.method import INITIAL, payload_types
from ekiden.core.engine.setup import core_count
from ekiden.core.engine.store import Store
from ekiden.core.engine.transport import Interrupted, Request, Transport, live_refs, refs
from ekiden.core.engine.wire import EVERYONE, Ref
from ekiden.core.engine.worker import Job, Worker
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights

Keys = Mapping[str, set[str]]  # keys of values, by the client that holds them
T = TypeVar("T")
_TRIES = 3
# characters of an error of Ray that a message has
_SHOWN = 200
# types of arguments that nobody changes after a call
_FIXED = (
    Weights,
    bool,
    int,
    float,
    str,
    type(None),
)


class TaskDone(NamedTuple):
    """What a home says about a task. The value stays there."""

    forward: int  # samples that went forward
    backward: int  # samples that went backward
    size: int  # bytes of content of the value
    # the model that the task trained last, encoded, if the run measures it; otherwise None, encoded
    trained: bytes


class Home:
    """An actor in which tasks of many clients run."""

    def begin(self, start: Start, mark: Path | None) -> None:
        """Forget the run before, and continue from `start`; the driver has just written the file
        `mark`.
        """
        if mark is not None and not mark.exists():
            raise UserError(
                f"a node of the Ray cluster does not see {mark.parent}: put the run folder on a "
                "file system that all "
                "nodes share"
            )
        self._start = start
        self._worker = Worker(start.setup, start.clients)
        self._stores: dict[str, Store] = {}
        self._initial: Weights | None = None

    def task(
        self,
        step: int,
        call: int,
        client: str,
        task: str,
        args: bytes,
        foreign: list[Ref[Any]],
        *values: bytes,
    ) -> TaskDone:
        """Do a task."""
        method = self._start.setup.method
        store = self._store(client)
        kinds, _ = payload_types(method, task)
        given = dict(zip(foreign, values, strict=True))

        def fetch(ref: Ref[Any]) -> Any:
            if ref in given:
                return wire.decode(given[ref], self._kind(ref.key))
            if ref != INITIAL:
                return self._store(ref.owner).get(ref.key)
            self._initial = self._initial or self._start.initial()
            return self._initial

        found: Any = ()
        if kinds:
            found = wire.decode(args, tuple[tuple(kinds)], fetch)  # type: ignore[misc]
        job = Job(step, call, client, task, found, store.private)
        journal = None
        if folder := self._start.place(client):
            journal = folder / "journal"
        done = self._worker.execute(job, journal_of(job, journal))
        store.put(f"{step}-{call}-{task}", done.value, done.private)
        return TaskDone(
            done.work.forward, done.work.backward, wire.size(done.value), wire.encode(done.trained)
        )

    def value(self, client: str, key: str) -> bytes:
        """Return a value, encoded."""
        return wire.encode(self._store(client).get(key))

    def drop(self, client: str, key: str) -> None:
        """Forget a value."""
        self._store(client).drop(key)

    def size(self, client: str, key: str) -> int:
        """Return the bytes of content of a value."""
        return wire.size(self._store(client).get(key))

    def commit(self, step: int, keys: Keys) -> dict[str, int]:
        """Write what the state after `step` steps needs of these clients; return when private
        states were written.
        """
        written = {}
        for client, wanted in keys.items():
            store = self._store(client)
            store.commit(step, wanted)
            store.sync(wanted)
            if store.written:
                written[client] = store.written
        return written

    def settle(self, keys: Keys) -> None:
        """Delete what only the state before needed."""
        for client, wanted in keys.items():
            self._store(client).settle(wanted)

    def _store(self, client: str) -> Store:
        if client not in self._stores:
            self._stores[client] = self._start.store(client)
        return self._stores[client]

    def _kind(self, key: str) -> Any:
        return payload_types(self._start.setup.method, key.split("-", 2)[2])[1]


class OnRay:
    """Makes transports whose clients are on a Ray cluster, with the same homes for all runs that
    use it.

    `ekiden.run(method, data, transport=OnRay())`. Homes end with this object, or with the process
    that made it.
    """

    def __init__(self, address: str = "", homes: int = 0, **options: Any) -> None:
        """Say where.

        Args:
            address: of the cluster, as `ray.init` takes it; by default the one that this process is
                connected to, or one on this machine.
            homes: number of actors; by default the number of the cluster's CPUs, as far as its GPUs
                suffice, and never more than there are clients.
            options: of these actors, as Ray names them, for example `num_gpus=0.25`.
        """
        require_extra("ray", "a run on Ray", "ray")
        if homes < 0:
            raise UserError(
                f"homes is {homes}: give 1 or more, or leave it out for one for each CPU of the "
                "cluster"
            )
        self._address = address
        self._count = homes
        self._joined = False
        self._options: dict[str, Any] = {
            "num_cpus": 0,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
            "max_task_retries": 0,
            **options,
        }
        self._homes: list[Any] = []

    def __call__(self, start: Start) -> Transport:
        """Make the transport that continues from `start`."""
        import ray

        if not ray.is_initialized():
            self._join()
        elif not self._joined:
            at = ray.get_runtime_context().gcs_address
            if self._address not in ("", "auto", at):
                raise UserError(
                    f"this process is connected to the Ray cluster at {at}: leave out {self._address}"
                )
        have = ray.cluster_resources()
        share = float(self._options.get("num_gpus", 0))
        count = min(self._count or max(1, int(have.get("CPU", 1))), len(start.clients))
        if share:
            fit = int(have.get("GPU", 0) // share)
            # a home is on one GPU
            if share < 1:
                fit = int(have.get("GPU", 0) * int(1 / share))
            # these homes would wait for ever
            if count > fit and (self._count or not fit):
                raise UserError(
                    f"num_gpus={share:g} fits {fit} homes here, not {count}: use fewer or smaller "
                    "ones"
                )
            count = min(count, fit)
        return _Ray(start, self._begun(start, count))

    def _join(self) -> None:
        """Connect this process to the cluster, or start one here."""
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"num_cpus": core_count(), "include_dashboard": False}
        if self._address:
            options = {"address": self._address}
        try:
            ray.init(log_to_driver=False, **options)
        # of many kinds; a node that starts too slowly gives a bare Exception
        except Exception as error:
            line = " ".join(str(error).split())[:_SHOWN]
            why = f"Ray does not start here ({line}): try again, or leave Ray out"
            if self._address:
                why = (
                    f"no Ray cluster at {self._address} ({line}): start it; set "
                    "RAY_AUTH_MODE=token if it wants one"
                )
            raise UserError(why) from None
        # Ray may call the same address by another name
        self._joined = True

    def _begun(self, start: Start, count: int) -> list[Any]:
        """Return so many homes that have begun the run, with new ones in place of those that
        died.
        """
        import ray

        mark = None
        if start.folder is not None:
            start.folder.mkdir(parents=True, exist_ok=True)
            mark = start.folder / f".{uuid4().hex}.tmp"
            mark.touch()
        try:
            about = ray.put(start)
            make = ray.remote(Home).options(**self._options).remote
            for _ in range(_TRIES):
                while len(self._homes) < count:
                    self._homes.append(make())
                began = [(home, home.begin.remote(about, mark)) for home in self._homes[:count]]
                dead = []
                why = ""
                for home, beginning in began:
                    if death := _death(beginning):
                        dead.append(home)
                        why = why or death
                if not dead:
                    return self._homes[:count]
                self._homes = [home for home in self._homes if home not in dead]
        finally:
            if mark is not None:
                mark.unlink()
        raise UserError(
            f"actors of the Ray cluster die as soon as they begin ({why}): install the same on all "
            "nodes, or use fewer "
            "homes if memory is short"
        )


class _Ray(Transport):
    """A transport whose clients are in homes."""

    def __init__(self, start: Start, homes: list[Any]) -> None:
        self._start = start
        self._homes = homes
        self._places = {client: i % len(homes) for i, client in enumerate(start.clients)}
        # tasks of this step
        self._running: dict[Ref[Any], Any] = {}
        self._done: dict[Ref[Any], TaskDone] = {}
        # values in the object store, of this step
        self._moved: dict[Ref[Any], Any] = {}
        # arguments of this step, and where they are encoded
        self._given: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._live = by_owner(live_refs(start.state))
        folder = start.folder
        self._touched: set[str] = set()
        # A process that died between writing the state and `settle` left values behind at any
        # client.
        if folder is not None and folder.exists():
            self._touched |= {path.name for path in folder.iterdir()}
        self._written = dict(start.written or {})
        if start.written is None:
            self._written = {client: str(start.store(client).written) for client in self._touched}

    def submit(self, request: Request) -> None:
        """Start a task at its home."""
        here = self._places[request.client]
        foreign = [r for r in dict.fromkeys(refs(request.args)) if r.owner != EVERYONE]
        foreign = [r for r in foreign if self._places[r.owner] != here]
        self._running[Ref(request.client, request.key)] = self._homes[here].task.remote(
            request.step,
            request.call,
            request.client,
            request.task,
            self._arguments(request.args),
            foreign,
            # as arguments of their own, so that they go straight there
            *map(self._object, foreign),
        )
        self._touched.add(request.client)

    def value(self, ref: Ref[Any]) -> Any:
        """Bring a value here."""
        if ref == INITIAL:
            return self._start.initial()
        self._finish(ref)
        kind = payload_types(self._start.setup.method, ref.key.split("-", 2)[2])[1]
        return wire.decode(_got(self._object(ref)), kind)

    def size(self, ref: Ref[Any]) -> int:
        """Return the size of a value, which stays where it is."""
        if ref == INITIAL:
            return super().size(ref)
        self._finish(ref)
        if ref in self._done:
            return self._done[ref].size
        return int(_got(self._home(ref.owner).size.remote(ref.owner, ref.key)))

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Mapping[Ref[Any], Work]:
        """Wait for all tasks, and write what the state after `step` steps needs."""
        for ref in list(self._running):
            self._finish(ref)
        keys = by_owner(live)
        asked = self._touched | set(keys)
        for written in self._each(asked, keys, lambda home, its: home.commit.remote(step, its)):
            self._written |= {client: str(when) for client, when in written.items()}
        self._touched = asked | set(self._live)
        self._live = keys
        return {ref: Work(done.forward, done.backward) for ref, done in self._done.items()}

    def drop(self, ref: Ref[Any]) -> None:
        """Forget a value, here and at its home."""
        self._moved.pop(ref, None)
        self._home(ref.owner).drop.remote(ref.owner, ref.key)

    def written(self) -> Mapping[str, str]:
        return self._written

    def trained(self) -> Mapping[str, Weights]:
        """Return the model that each client trained last in this step, if the run measures it."""
        found = {}
        for ref, done in self._done.items():
            model = wire.decode(done.trained, Optional[Weights])  # noqa: UP045
            if model is not None:
                found[ref.owner] = model
        return found

    def settle(self) -> None:
        self._each(self._touched, self._live, lambda home, its: home.settle.remote(its))
        self._touched = set()
        self._done = {}
        self._moved = {}
        self._given = {}

    def _each(
        self, clients: Iterable[str], keys: Keys, ask: Callable[[Any, Keys], Any]
    ) -> list[Any]:
        """Ask each home once, about those of `clients` that it has, and wait for all."""
        parts: dict[int, dict[str, set[str]]] = defaultdict(dict)
        for client in clients:
            parts[self._places[client]][client] = keys.get(client, set())
        # all are asked before the first is waited for
        asked = [ask(self._homes[i], part) for i, part in parts.items()]
        return list(map(_got, asked))

    def _arguments(self, args: tuple[Any, ...]) -> Any:
        """Return arguments, encoded. What never changes goes to each node once for all clients of a
        step.
        """
        import ray

        models = any(isinstance(arg, Weights) for arg in args)
        if not models or not all(isinstance(arg, _FIXED) for arg in args):
            return wire.encode(list(args))
        # the objects are kept as long as these numbers
        same = tuple(map(id, args))
        if same not in self._given:
            self._given[same] = args, ray.put(wire.encode(list(args)))
        return self._given[same][1]

    def _home(self, client: str) -> Any:
        return self._homes[self._places[client]]

    def _object(self, ref: Ref[Any]) -> Any:
        """Return Ray's reference to an encoded value; the bytes go to where it is used."""
        if ref not in self._moved:
            self._moved[ref] = self._home(ref.owner).value.remote(ref.owner, ref.key)
        return self._moved[ref]

    def _finish(self, ref: Ref[Any]) -> None:
        """Wait for the task behind `ref`, if it runs."""
        if ref in self._running:
            self._done[ref] = _got(self._running.pop(ref))


def _death(beginning: Any) -> str:
    """Wait until a home has begun; return why it died, or nothing if it lives."""
    try:
        _got(beginning)
    except Interrupted as death:
        said = list(filter(str.strip, str(death.__cause__).splitlines())) or [str(death)]
        # the last line with an error, or else the first
        errors = [line for line in said if "Error" in line]
        return [said[0], *errors][-1].strip()[:_SHOWN]
    return ""


def _got(asked: Any) -> Any:
    """Wait for what a home returns.

    Raises:
        Interrupted: a home or a node died.
    """
    import ray

    try:
        return ray.get(asked)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ray.exceptions.RayError):
            raise _interrupted(error.cause) from error.cause
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise _interrupted(error) from error


def _interrupted(error: Exception) -> Interrupted:
    return Interrupted(f"a process of the Ray cluster died ({type(error).__name__})")
