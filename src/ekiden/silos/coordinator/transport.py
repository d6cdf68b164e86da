"""The transport between machines: it sends tasks, values and evaluations as messages, and checks
what silos report.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from ekiden.clinic.noisy import Exact
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.drive import Outline, outline
from ekiden.core.engine.evaluation import consensus
from ekiden.core.engine.method import INITIAL, State, payload_types
from ekiden.core.engine.setup import initial_weights
from ekiden.core.engine.transport import ClientMissing, Request, Transport, live_refs, refs
from ekiden.core.engine.wire import EVERYONE, SERVER, Encoded, Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.silos.coordinator.courier import Courier, Message
from ekiden.silos.security import Say
from ekiden.silos.silo.shelf import is_place
from ekiden.silos.trust import custody, parcel, sealing
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.custody import Hop, Tally
from ekiden.silos.trust.report import (
    Reported,
    SiloReport,
    fits,
    row_of,
    rows,
    shown_of,
    telling,
    total_of,
)
from ekiden.silos.trust.sealing import Lock, Party, Reader

# a value for a reader in a step; 0 for the server
Slot = tuple[Ref[Any], str, int]


def report_in(body: memoryview, client: str, rows: int, told: Exact) -> Reported:
    """Return what a silo reported about some models."""
    try:
        found: Reported = wire.decode(body, Reported)
    except wire.WireError as error:
        raise unusable(client, "report of its tests", str(error)) from None
    if found.shown is not None and not fits(found.shown, told, rows):
        raise unusable(client, "report of its tests", f"it does not fit {rows} models or subgroups")
    if found.shown is None and found.masked is None:
        raise unusable(client, "report of its tests", "it is empty")
    return found


def unusable(client: str, what: str, why: str) -> UserError:
    """Return the error for something impossible that a silo sent."""
    return UserError(
        f"silo {client} sent a {what} that cannot be used ({why}): fix that silo or run without it"
    )


class Remote(Transport):
    """A transport whose clients are silos on other machines."""

    def __init__(
        self,
        courier: Courier,
        setup: Setup,
        agreed: Agreement,
        state: State,
        note: Say,
        void: Mapping[str, set[int]],
        held: Mapping[str, int],
        written: Mapping[str, str],
    ) -> None:
        """Continue from `state`.

        Args:
            courier: carries messages.
            setup: what the run agrees on, without samples.
            agreed: the same terms, for the silos.
            state: the state to continue from.
            note: stores the records of the chain of custody.
            void: for each client, the steps in which it was missing.
            held: numbers of training samples, as silos reported them; those of other silos are not
                compared.
            written: places of the tasks that left each silo's private state.
        """
        self._courier = courier
        self._setup = setup
        self._agreed = agreed
        self._note = note
        self._held = held
        self._written = written
        # of silos that did a task in this step
        self._states: dict[str, str] = {}
        private = sealing.new_private()
        self._key = sealing.public_of(private)
        self._sealer = Party(SERVER, agreed.run, agreed.digest, private, agreed.silos, None)
        self._void = dict(void)
        self._running: dict[Ref[Any], Message] = {}
        self._last: dict[str, Ref[Any]] = {}
        # of sums under masks
        self._parts: set[Ref[Any]] = set()
        self._values: dict[Slot, tuple[Lock, memoryview]] = {}
        self._asked: dict[Ref[Any], Message] = {}
        self._read_by_server: set[str] = set()
        self._live = live_refs(state)
        self._settled = (state.step, self._live)
        self._step = state.step
        # tasks of this step, in the order in which they ended
        self._done: dict[Ref[Any], None] = {}
        self._before: dict[
            Ref[Any], str | None
        ] = {}  # place of the private state before each task of this step
        # what silos signed about the values that are needed, and the record as it came
        self._accounts: dict[Ref[Any], tuple[Hop, str]] = {}

        @lru_cache(1)
        def plan_without(absent: frozenset[parcel.Absence]) -> Outline | None:
            return outline(setup, agreed.clients, None, lambda *place: place in absent)

        self._plan_without = plan_without
        self._full = self._plan_without(frozenset())

    def submit(self, request: Request) -> None:
        """Send a task with the values that it needs, after the client's earlier tasks of this
        step.
        """
        result: Ref[Any] = Ref(request.client, request.key)
        if request.among and not self.regroups:
            self._parts.add(result)
        try:
            if request.client in self._last:
                self._finish(self._last[request.client])
            self._go_back(result)
            reader = self._reader(request.client, request.step)
            members = self._members_of(request)
        except ClientMissing as missing:
            self._running[result] = Message(request.client, "task", b"", "", answer=missing)
            return
        foreign = [
            r
            for r in dict.fromkeys(refs(request.args))
            if r.owner not in (request.client, EVERYONE)
        ]
        for ref in foreign:
            self._order(ref, reader)
        values = [self._fetch(ref, reader) for ref in foreign]
        parts = tuple(
            parcel.ParcelPart(r.owner, r.key, len(v), lock)
            for r, (lock, v) in zip(foreign, values, strict=True)
        )
        ask = self._ask(
            "task",
            request.client,
            step=request.step,
            call=request.call,
            task=request.task,
            parts=parts,
            members=members,
        )
        arguments, locks = self._sealer.seal(
            Encoded.of(wire.encode(request.args)), parcel.arguments_key(ask), (reader,)
        )
        # no part leaves a silo before all have one
        together = bool(request.among) and self.regroups
        readers = self._readers(
            result, server=request.task in self._read_by_server and not together
        )
        ask = replace(ask, length=len(arguments), lock=locks[0], readers=readers)
        self._running[result] = self._courier.send(
            request.client, ask, (arguments, *(v for _, v in values))
        )
        self._last[request.client] = result

    @property
    def regroups(self) -> bool:
        """Whether sums are formed again without those who are missing."""
        return self._agreed.regroups

    def reachable(self, client: str) -> bool:
        """Return whether a silo is there; if not, it is missing in this step."""
        try:
            self._reader(client, self._step)
        except ClientMissing:
            self._leave_out(client)
            return False
        return True

    def _leave_out(self, client: str) -> None:
        """Let nothing count that a client did in this step."""
        self._void.setdefault(client, set()).add(self._step)
        self._states.pop(client, None)

    def _go_back(self, result: Ref[Any]) -> None:
        """Forget what a task gave, if it is asked for again with another list of members."""
        before = self._before.setdefault(result, self._states.get(result.owner))
        self._accounts.pop(result, None)
        if result in self._done:
            del self._done[result]
            self._states.pop(result.owner, None)
            if before is not None:
                self._states[result.owner] = before

    def value(self, ref: Ref[Any]) -> Any:
        """Fetch the value behind `ref`."""
        if ref == INITIAL:
            return initial_weights(self._setup)
        task = ref.key.split("-", 2)[2]
        if ref in self._running:
            # silos send the next ones with their answers
            self._read_by_server.add(task)
        try:
            lock, data = self._fetch(ref, self._server())
        except ClientMissing as missing:
            self._missed(ref, missing)
            raise
        try:
            name = parcel.value_key(ref.key, self._absences if self._full else ())
            plain = self._sealer.open(data, lock, ref.owner, name, lock.step)
            value = wire.decode(plain.data, payload_types(self._setup.method, task)[1])
            parcel.check(value, self._network, whole=False)
            if ref.owner in self._held:
                parcel.check_claims(value, self._held[ref.owner])
        except wire.WireError as error:
            raise unusable(ref.owner, f"value {ref.key}", str(error)) from None
        if wire.size(value) != self._accounts[ref][0].size:
            raise unusable(ref.owner, f"value {ref.key}", "it has another size than announced")
        return value

    def size(self, ref: Ref[Any]) -> int:
        """Return the size of the value's content in bytes, as its owner reports it."""
        if ref == INITIAL:
            return wire.size(initial_weights(self._setup))
        self._finish(ref)
        if ref not in self._accounts:
            self._order(ref, *self._readers(ref))
            self._receive(ref)
        return self._accounts[ref][0].size

    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Mapping[Ref[Any], Work]:
        """Wait for all tasks. Then their outcomes are on the silos' disks."""
        for ref in list(self._running):
            try:
                self._finish(ref)
            except ClientMissing:
                if ref in live:
                    raise
                del self._running[ref]
        work: dict[Ref[Any], Work] = {}
        for ref in self._done:
            if self._step in self._void.get(ref.owner, ()):
                # as if it had done nothing in this step
                continue
            hop, record = self._accounts[ref]
            work[ref] = Work(hop.forward, hop.backward)
            self._note(record)
        self._done = {}
        self._before = {}
        self._written = {**self._written, **self._states}
        self._states = {}
        self._live = live
        self._last = {}
        self._settled = (
            self._settled[0],
            self._settled[1] | live,
        )  # keep both until the state is written
        self._step = step
        self._values = {slot: value for slot, value in self._values.items() if slot[0] in live}
        self._accounts = {ref: about for ref, about in self._accounts.items() if ref in live}
        return work

    def written(self) -> Mapping[str, str]:
        """Return the places of the tasks that left the private states, for the silos that have
        one.
        """
        return {name: place for name, place in self._written.items() if place}

    def settle(self) -> None:
        """Let silos drop what only the state before needed; the next request tells them."""
        self._settled = (self._step, self._live)

    def evaluate(
        self,
        clients: Sequence[str],
        models: Sequence[Weights],
        results: int,
        told: Exact,
    ) -> tuple[SiloReport | None, dict[str, SiloReport]]:
        """Return what silos report about models on their test samples: the sum, and what some show
        of themselves.

        The ledger does not include this. Silos that may be skipped and do not answer are left out.
        If one drops out after the others gave their parts under masks, there is no sum: nothing can
        be opened.
        """
        readers: dict[str, Reader] = {}
        for client in clients:
            try:
                readers[client] = self._reader(client, self._step)
            except ClientMissing:
                if not self._agreed.skips:
                    raise
        members = tuple(replace(reader, step=0) for reader in readers.values())
        data, locks = self._sealer.seal(
            Encoded.of(wire.encode(list(models))), "models", tuple(readers.values())
        )
        messages = list[Message]()
        for client, lock in zip(readers, locks, strict=True):
            ask = self._ask(
                "evaluate",
                client,
                step=self._step,
                lock=lock,
                records=self._vouched(),
                results=results,
                members=members,
            )
            messages.append(self._courier.send(client, ask, (data,)))
        digests = tuple(custody.digest(wire.chunks(model)) for model in models)
        found = {}
        for message in messages:
            reported = self._reported(message, results, digests, told)
            if reported is not None:
                found[message.client] = reported
        return total_of(found, len(members)), shown_of(found)

    def _reported(
        self, message: Message, results: int, digests: tuple[str, ...], told: Exact
    ) -> Reported | None:
        """Return what a silo reported about models, of which it gives a signed account; None if it
        may be skipped, and does not answer.
        """
        client = message.client
        agreed = self._agreed
        try:
            answer, body = self._courier.wait(message)
        except ClientMissing:
            if not agreed.skips:
                raise
            return None
        found = report_in(body, client, rows(agreed, len(digests)), told)
        signed = custody.opened(answer.record, agreed.silos)
        place = (agreed.run, agreed.digest, client, self._step, signed.data)
        if signed != Tally(*place, results, digests, custody.text_of(bytes(body))):
            raise UserError(
                f"silo {client} gives no account of what it measured that its key signed: refused"
            )
        self._note(answer.record)
        return found

    def _ask(self, kind: str, client: str, **changes: Any) -> parcel.Ask:
        steps, live = self._settled
        keep = tuple(sorted(ref.key for ref in live if ref.owner == client))
        absent = self._absences
        if not self._full:
            absent = frozenset(one for one in absent if one[1] == client)
        state = self._states.get(client, self._written.get(client, ""))
        ask = parcel.Ask(
            kind,
            self._agreed.text(),
            state=state,
            settled=steps,
            keep=keep,
            absent=tuple(sorted(absent)),
        )
        return replace(ask, **changes)

    @property
    def _absences(self) -> frozenset[parcel.Absence]:
        """Return which clients were missing in which step."""
        return frozenset((step, client) for client, steps in self._void.items() for step in steps)

    @property
    def _outline(self) -> Outline | None:
        """Return what the method asks for without the clients missing so far, if that is known."""
        if self._full is None:
            # silos do not know it either
            return None
        return self._plan_without(self._absences)

    def _vouched(self) -> tuple[str, ...]:
        """Return their owners' signed word that models are the run's result; empty if silos measure
        others too.
        """
        plan = self._outline
        if plan is None or self._agreed.measures:
            return ()
        found = []
        for model in plan.models:
            record = ""
            if isinstance(model, Ref) and model in self._accounts:
                _, record = self._accounts[model]
            found.append(record)
        return tuple(found)

    def _server(self) -> Reader:
        return Reader(SERVER, self._step, self._key)

    def _reader(self, client: str, step: int) -> Reader:
        """Return a silo as a reader; wait until it introduces itself."""
        return replace(self._courier.reader(client), step=step)

    def _members_of(self, request: Request) -> tuple[Reader, ...]:
        """Return all who give a part to the sum to which a task adds one, with the keys for their
        masks.
        """
        return tuple(self._reader(client, 0) for client in request.among)

    def _readers(self, ref: Ref[Any], *, server: bool = False) -> tuple[Reader, ...]:
        """Return who is going to use a value, as far as that is known."""
        plan = self._outline
        if plan is None:
            return (self._server(),) if server else ()
        readers = []
        for client, step in plan.users(ref):
            if found := self._courier.post.reader(client):
                readers.append(replace(found, step=step))
        if ref in plan.result:
            readers.append(self._server())
        return tuple(readers)

    def _slot(self, ref: Ref[Any], name: str, step: int) -> Slot:
        return ref, name, 0 if name == SERVER else step

    def _order(self, ref: Ref[Any], *readers: Reader) -> None:
        """Ask for a value without waiting for it, so that several can come at the same time."""
        self._finish(ref)
        if ref in self._asked:
            self._receive(ref)
        if not readers or any(self._slot(ref, r.name, r.step) not in self._values for r in readers):
            ask = self._ask("value", ref.owner, key=ref.key, readers=readers)
            self._asked[ref] = self._courier.send(ref.owner, ask)

    def _fetch(self, ref: Ref[Any], reader: Reader) -> tuple[Lock, memoryview]:
        """Return the value behind `ref` as its owner encoded and sealed it."""
        slot = self._slot(ref, reader.name, reader.step)
        # what was asked for may have been sealed for others
        for _ in range(2):
            if slot not in self._values:
                if ref not in self._asked:
                    self._order(ref, reader)
                self._receive(ref)
        if slot not in self._values:
            raise UserError(
                f"silo {ref.owner} did not send {ref.key} sealed for {reader.name}: refused"
            )
        return self._values[slot]

    def _receive(self, ref: Ref[Any]) -> None:
        """Receive a value that was asked for."""
        if ref in self._asked:
            self._keep(ref, *self._courier.wait(self._asked.pop(ref)))

    def _finish(self, ref: Ref[Any]) -> None:
        """Wait for the task behind `ref` if it is running."""
        message = self._running.get(ref)
        if message is None:
            return
        try:
            answer, value = self._courier.wait(message)
        except ClientMissing as missing:
            self._missed(ref, missing)
            raise
        del self._running[ref]
        self._keep(ref, answer, value)
        self._done[ref] = None
        if self._step not in self._void.get(ref.owner, ()):
            self._states[ref.owner] = answer.state

    def _missed(self, ref: Ref[Any], missing: ClientMissing) -> None:
        """Ignore all that the client did in this step. The ledger records this, and a resumed run
        reads it there.
        """
        client = ref.owner
        if ref in self._parts:
            raise UserError(
                f"{missing} (a sum under masks opens only with the parts of all its silos)"
            )
        last = (client, str(self._step))
        plan = self._agreed.skips and self._full
        if plan and last in ((one.owner, one.key.partition("-")[0]) for one in plan.result):
            raise UserError(
                f"{client} has the last hop, whose model alone the server may read: it cannot be "
                "skipped. Start it, then `ekiden resume`"
            )
        self._leave_out(client)

    def _keep(self, ref: Ref[Any], answer: parcel.Answer, value: memoryview) -> None:
        """Keep what came with an answer."""
        self._accounts[ref] = self._agreed.hop_of(ref, answer.record), answer.record
        if answer.state and not is_place(answer.state):
            raise unusable(ref.owner, f"account of {ref.key}", "it names no place of its state")
        for lock in answer.locks:
            self._values[self._slot(ref, lock.recipient, lock.step)] = lock, value

    @cached_property
    def _network(self) -> Network:
        """The network that the silos' models must fit."""
        return Network(self._setup.build())


@dataclass(frozen=True)
class SiloTests:
    """Measures models on the test samples of all silos; the samples stay at the silos."""

    remote: Remote
    agreed: Agreement

    def __call__(
        self, model: Weights | None, personal: list[Weights], *, last: bool = False
    ) -> dict[str, Any]:
        """Return the row of metrics, as `ekiden.core.engine.evaluation.TestSet` does on one machine."""
        shared = [] if model is None else [model]
        models = shared + personal
        agreed = self.agreed
        if not models or not agreed.measured_steps:
            return {}
        told = telling(agreed, len(models), last=last)
        total, shown = self.remote.evaluate(agreed.clients, models, len(shared), told)
        if total is None:
            return {}
        row = row_of(total, shown, agreed, len(shared), told, last=last)
        if row and personal:
            row["consensus"] = consensus(personal)
        return row
