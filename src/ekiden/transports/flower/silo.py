"""A silo: executes what the coordinator asks, if the silo's own file allows it, and nothing twice."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ekiden import api
from ekiden._version import __version__
from ekiden.core import wire
from ekiden.core.method import EVERYONE, Ref
from ekiden.core.store import FolderJournal
from ekiden.core.worker import Job, Worker, payload_types, task_of
from ekiden.data import ClientData, Dataset
from ekiden.errors import UserError
from ekiden.evaluation import Built
from ekiden.learning import fit as fitting
from ekiden.learning.elastic import adapted
from ekiden.learning.network import Network
from ekiden.learning.weights import Weights
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import keys
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.parcel import Answer, Ask, Count, Hello, pack, signed_text, unpack
from ekiden.transports.flower.shelf import Done, Shelf, drop_old_runs
from ekiden.transports.flower.silo_file import SiloFile

log = logging.getLogger("ekiden")
_MOST_CLIENTS = 1000
Held = tuple[Dataset, ClientData]
_ARGUMENT_BYTES = 64
"""Arguments may hold so many times the largest model: a gossip task gets its neighbours' models."""


class Silo:
    """Answers requests."""

    def __init__(self, file: SiloFile, held: Held | None = None) -> None:
        """Answer for the silo of `file`; `held` are its data if they are loaded already."""
        self._file = file
        self._data = held
        self._worker: tuple[str, Worker] | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a request; whatever is wrong with the request is said in it, on one line."""
        try:
            ask, body = unpack(data, Ask)
            if ask.kind == "hello":
                return self._hello(ask)
            agreed = agreements.parse(ask.agreement)
            worker = self._agreed(agreed)
            shelf = Shelf(self._runs / agreed.run, worker.setup.method.private)
            with shelf.held():
                shelf.settle(ask.settled, lambda key: key in ask.keep)
                if ask.kind == "task":
                    return self._task(worker, shelf, ask, body)
                if ask.kind == "value":
                    done, value = shelf.value(ask.key)
                    return pack(Answer(self._file.name, size=done.size), (value,))
                if ask.kind == "evaluate":
                    return self._evaluate(worker, ask, body)
            raise UserError(f"no silo can do {ask.kind[:40]!r}")
        except UserError as error:
            reason = str(error).replace("\n", " ")
            log.warning("refused: %s", reason)
        except Exception as error:  # of torch or of the user's own data function
            log.exception("a request failed")
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return pack(Answer(self._file.name, error=reason))

    @property
    def _runs(self) -> Path:
        return self._file.folder / "runs"

    def _held(self) -> Held:
        if self._data is None:
            self._data = self._file.load()
        return self._data

    def _hello(self, ask: Ask) -> bytes:
        """Who this silo is and what it holds, in numbers."""
        drop_old_runs(self._runs)
        dataset, client = self._held()
        file = self._file
        signature = keys.sign(file.beside(file.link.key), signed_text(ask.nonce, file.name)) if file.link.key else ""
        hello = Hello(
            file.name,
            __version__,
            dataset.name if not file.data.path else Path(file.data.path).stem,
            dataset.shape,
            dataset.classes,
            tuple(map(float, dataset.mean)),
            tuple(map(float, dataset.std)),
            (dataset.augment.crop, dataset.augment.flip, float(dataset.augment.rotation)),
            (len(client.train), len(client.val), len(client.test)),
            signature,
        )
        return pack(Answer(file.name), wire.chunks(hello))

    def _agreed(self, agreed: Agreement) -> Worker:
        """What executes tasks of this run here.

        Raises:
            UserError: the silo does not agree to it.
        """
        if self._worker is not None and self._worker[0] == agreed.text():
            return self._worker[1]
        file = self._file
        if agreed.method not in file.limits.methods:
            raise UserError(
                f"{file.name} does not allow {agreed.method[:40]!r}, only {', '.join(file.limits.methods)} "
                "(limits.methods in its silo.toml)"
            )
        dataset, client = self._held()
        for what, here, there in (
            ("samples of shape", dataset.shape, agreed.shape),
            ("the classes", dataset.classes, agreed.classes),
        ):
            if here != there:
                raise UserError(f"{file.name} holds {what} {here}, the run is for {there}")
        dataset = replace(dataset, mean=agreed.mean, std=agreed.std, augment=type(dataset.augment)(**agreed.augment))
        setup = agreed.setup(dataset, file.hardware)
        size = _model_bytes(agreed)
        if size > file.limits.model_bytes:
            raise UserError(
                f"the model has {size} bytes, {file.name} allows {file.limits.model_bytes} "
                "(limits.model_bytes in its silo.toml)"
            )
        setup = replace(setup, hardware=api.resolve(file.hardware, 1, setup.build))

        def watch(name: str, epoch: int, epochs: int) -> None:
            log.info("%s: epoch %d/%d", name, epoch, epochs)

        worker = Worker(setup, {file.name: client}, watch, most_epochs=file.limits.epochs)
        self._worker = (agreed.text(), worker)
        return worker

    def _task(self, worker: Worker, shelf: Shelf, ask: Ask, body: bytes) -> bytes:
        """Do a task, or find what it gave before."""
        place = (ask.step, ask.call)
        if min(place) < 0:
            raise UserError("a task needs a step and a number: refused")
        task_of(worker.setup.method, ask.task)
        self._check_length(body)
        private = shelf.private(place)
        digest = _digest(body, ask, private)
        found = shelf.find(place, ask.task, digest)
        if found is None:
            args = self._arguments(worker, shelf, ask, body)
            shelf.discard(place)
            job = Job(ask.step, ask.call, self._file.name, ask.task, args, private)
            outcome = worker.execute(job, FolderJournal(shelf.journal), digest[:16])
            done = Done(digest, wire.size(outcome.value), outcome.work.forward, outcome.work.backward)
            changed = outcome.private is not private
            shelf.put(place, ask.task, done, outcome.value, outcome.private, changed=changed)
            log.info("step %d: %s done", ask.step + 1, ask.task)
            value = wire.encode(outcome.value) if ask.eager else b""
        else:
            done, value = found
            log.info("step %d: %s was done before", ask.step + 1, ask.task)
        answer = Answer(self._file.name, "", done.size, done.forward, done.backward)
        return pack(answer, (value,) if ask.eager else ())

    def _arguments(self, worker: Worker, shelf: Shelf, ask: Ask, body: bytes) -> tuple[Any, ...]:
        """The task's arguments: from the message, from this silo's own values, and the initial model.

        Raises:
            UserError: they are not what the task takes.
        """
        method = worker.setup.method
        given: dict[tuple[str, str], bytes] = {}
        offset = ask.length
        for part in ask.parts:
            if part.length < 0 or not 0 <= offset <= len(body) - part.length:
                raise wire.WireError("message shorter than it says: refused")
            given[part.owner, part.key] = body[offset : offset + part.length]
            offset += part.length
        if offset != len(body) or ask.length < 0:
            raise wire.WireError("message longer than it says: refused")

        def fetch(ref: Ref[Any]) -> Any:
            if ref.owner == EVERYONE:
                return api.initial_weights(worker.setup)
            task = ref.key.split("-", 2)[-1]
            _, kind = payload_types(method, task)
            data = shelf.value(ref.key)[1] if ref.owner == self._file.name else given.get((ref.owner, ref.key))
            if data is None:
                raise wire.WireError(f"message lacks the value {ref.key[:80]!r}: refused")
            return wire.decode(data, kind)

        kinds, _ = payload_types(method, ask.task)
        args = wire.decode(body[: ask.length], tuple[tuple(kinds)], fetch) if kinds else ()  # type: ignore[misc]
        _check(args, worker.network, whole=False)
        return tuple(args)

    def _evaluate(self, worker: Worker, ask: Ask, body: bytes) -> bytes:
        """Count right answers of each model on this silo's test samples."""
        self._check_length(body)
        models = wire.decode(body, list[Weights])
        setup = worker.setup
        changed = setup.method.changes_network
        if changed and not 0 < ask.clients <= _MOST_CLIENTS:
            raise UserError(f"a run of {ask.clients} clients: refused")
        build = Built(setup.method, setup.build, ask.clients)
        _, client = self._held()
        counts = []
        for i, model in enumerate(models):
            bench = worker.bench("evaluation")
            if changed and i < ask.results:
                bench.network = Network(adapted(build(), model), setup.hardware.device)
            _check(model, bench.network, whole=True)
            bench.network.load(model)
            right, loss = fitting.evaluate(bench, client.test)
            counts.append(Count(int(right.sum()), float(loss.double().sum()), len(client.test)))
        return pack(Answer(self._file.name), wire.chunks(counts))

    def _check_length(self, body: bytes) -> None:
        most = _ARGUMENT_BYTES * self._file.limits.model_bytes
        if len(body) > most:
            raise UserError(f"a message of {len(body)} bytes: {self._file.name} takes {most} (64 largest models)")


def _check(value: Any, network: Network, *, whole: bool) -> None:
    """Refuse models that do not fit and numbers that are not finite, before anything is executed.

    Args:
        value: what came.
        network: what models must fit.
        whole: whether parts of a model, such as the extractor alone, are no models either.

    Raises:
        WireError: says which.
    """
    own = (network.params, network.buffers, network.counters)
    for part in _records(value):
        if isinstance(part, Weights):
            for here, there in zip(own, (part.params, part.buffers, part.counters), strict=True):
                size = there.numel()
                fits = size == here.numel() if whole else size <= here.numel()
                if there.dtype != here.dtype or there.ndim != 1 or not fits:
                    raise wire.WireError("message holds a model of another shape or type than this run's: refused")
        elif isinstance(part, Tensor) and part.is_floating_point() and not bool(torch.isfinite(part).all()):
            raise wire.WireError("message holds NaN or infinity: refused")


def _records(value: Any) -> Iterator[Any]:
    """Every value within `value`, itself included."""
    yield value
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _records(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _records(part)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            yield from _records(getattr(value, f.name))


def _model_bytes(agreed: Agreement) -> int:
    """Size of the model on the wire, found without allocating it."""
    with torch.device("meta"):
        module = agreed.builder(agreed.build_method())()
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


def _digest(body: bytes, ask: Ask, private: Any) -> str:
    """Names what was asked and from which private state."""
    digest = hashlib.blake2b(repr((ask.task, ask.length, ask.parts)).encode(), digest_size=16)
    digest.update(body)
    for chunk in wire.chunks(private):
        digest.update(chunk)
    return digest.hexdigest()
