"""Does the tasks of a run at a silo, each once."""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.method import payload_types
from ekiden.core.engine.setup import initial_weights
from ekiden.core.engine.store import FolderJournal
from ekiden.core.engine.wire import EVERYONE, SERVER, Encoded, Ref
from ekiden.core.engine.worker import Job, Outcome, Worker
from ekiden.core.training.private.promise import DP
from ekiden.core.training.weights import Weights
from ekiden.silos.silo import policy, told
from ekiden.silos.silo.budget import LedgerKeeper
from ekiden.silos.silo.participation import Agreed
from ekiden.silos.silo.shelf import Asked, Done, LostValue, Place, Shelf, place_of, text_of
from ekiden.silos.trust import custody
from ekiden.silos.trust.custody import Hop, Taken
from ekiden.silos.trust.masking import PartMasks
from ekiden.silos.trust.parcel import (
    Answer,
    Ask,
    Contents,
    check,
    models_in,
    opened,
    pack,
    unpack,
    value_key,
)

log = logging.getLogger("ekiden")


@dataclass(frozen=True)
class GivenArguments:
    """The arguments that a task gets."""

    # the arguments
    args: tuple[Any, ...]
    # the values among them
    taken: tuple[Taken, ...]
    # this silo's own values among them, encoded, by their keys
    own: Mapping[str, Encoded]


def gather(
    worker: Worker,
    silo: str,
    task: str,
    contents: Contents,
    kept: Callable[[str], Encoded],
    own: Mapping[str, Encoded],
) -> GivenArguments:
    """Gather a task's arguments, each checked and with its digest."""
    method = worker.setup.method
    taken: dict[Taken, None] = {}
    mine = dict(own)
    # the initial model, and what this silo made itself
    own_models: list[Weights] = []

    def fetch(ref: Ref[Any]) -> Any:
        if ref.owner == EVERYONE:
            value = initial_weights(worker.setup)
            digest = custody.digest(wire.chunks(value))
        else:
            _, kind = payload_types(method, ref.key.split("-", 2)[-1])
            if ref.owner == silo:
                if ref.key not in mine:
                    mine[ref.key] = kept(ref.key)
                data, digest = mine[ref.key]
            elif (name := (ref.owner, ref.key)) in contents.values:
                data, digest = contents.values[name]
            else:
                raise wire.WireError(f"message lacks the value {ref.key[:80]!r}: refused")
            try:
                value = wire.decode(data, kind)
                check(value, worker.network, whole=False)
            except wire.WireError as error:
                place = f"value {ref.key[:80]!r} of {ref.owner[:80]}"
                raise wire.WireError(f"{place}: {error}") from None
        if ref.owner in (EVERYONE, silo):
            own_models.extend(models_in(value))
        taken[Taken(ref.owner, ref.key, digest, wire.size(value))] = None
        return value

    kinds, _ = payload_types(method, task)
    args = wire.decode(contents.arguments.data, tuple[tuple(kinds)], fetch) if kinds else ()  # type: ignore[misc]
    check(args, worker.network, whole=False)
    if method.chosen_by == "nobody":
        known = {id(model) for model in own_models}
        if any(id(model) not in known for model in models_in(args)):
            raise UserError(
                f"{method.title()} says that nobody chooses its model, and somebody sent one: "
                "refused"
            )
    return GivenArguments(tuple(args), tuple(taken), mine)


@dataclass(frozen=True)
class TaskRequest:
    """A request for a task, opened and checked."""

    ask: Ask
    # digest of the server's arguments
    arguments: str
    # all arguments
    given: GivenArguments
    # the silo's state before the task
    private: Any
    # digest of all that the task gets
    digest: str
    # the complete request
    data: bytes

    @property
    def place(self) -> Place:
        """Where the task stands in the run."""
        return self.ask.step, self.ask.call


@dataclass(frozen=True)
class SiloTasks:
    """Does the tasks of a run."""

    # the run that the silo agreed to
    run: Agreed
    # holds what its tasks returned
    shelf: Shelf

    def do(self, ask: Ask, body: memoryview, data: bytes) -> bytes:
        """Do a task, or find its earlier outcome; `data` is the complete request.

        The order matters. Nothing is forgotten before all is opened and checked: a refused message
        must not make the silo forget anything. The private state is found before that, as a lost
        one is made again from values that are then dropped. The answer goes out when the outcome is
        on the disk.
        """
        self._refuse(ask)
        self.run.check_length(body)
        name = self.run.file.name
        plan = self.run.plan_without(ask.absent)
        contents = self._opened(ask, body)
        policy.check_request(name, self.run.terms, plan, ask, contents.arguments.data)
        given = self._arguments(ask.task, contents, {})
        void = []
        if self.run.terms.skips:
            void = [step for step, client in ask.absent if client == name]
        request = self._request(ask, contents, given, self._private(ask, void), data)
        self.shelf.settle(ask.settled, policy.kept(name, plan, ask).__contains__, void)
        found = self.shelf.find(request.place, ask.task, request.digest)
        if found is not None:
            log.info("step %d: %s was done before", ask.step + 1, ask.task)
            return self._answer(ask, *found)
        self.run.admission.check_disk()
        self.shelf.discard(request.place)
        done, value = self._execute(request)
        log.info("step %d: %s done", ask.step + 1, ask.task)
        self.run.note(f", step {ask.step + 1}: {ask.task} done")
        # writes while the value is sealed
        with ThreadPoolExecutor(1) as disk:
            kept = disk.submit(self._keep, request, done, value)
            answer = self._answer(ask, done, value)
            kept.result()
        return answer

    def show(self, ask: Ask) -> bytes:
        """Return a value that a task returned here."""
        done, value = self._value(ask.key)
        return self._give(ask, ask.key, done, value)

    def _refuse(self, ask: Ask) -> None:
        """Refuse what no run asks for, before anything is opened."""
        if min(ask.step, ask.call) < 0:
            raise UserError("a task needs a step and a number: refused")
        settled = max(ask.settled, self.shelf.settled)
        if ask.step < settled:
            raise UserError(
                f"step {ask.step + 1} of the run is over, {settled} are done for good: refused"
            )
        policy.check_task(self.run.worker.setup.method, ask.task)

    def _opened(self, ask: Ask, body: memoryview) -> Contents:
        """Open all that came with a request; seals are bound to absences where a plan is known."""
        absent = ask.absent if self.run.plan_without(ask.absent) else ()
        return opened(ask, body, self.run.sealer, absent)

    def _arguments(
        self, task: str, contents: Contents, own: Mapping[str, Encoded]
    ) -> GivenArguments:
        """Return the task's arguments; `own` are values of this silo that are already loaded."""
        name = self.run.file.name
        return gather(self.run.worker, name, task, contents, lambda key: self._value(key)[1], own)

    def _request(
        self, ask: Ask, contents: Contents, given: GivenArguments, private: Any, data: bytes
    ) -> TaskRequest:
        digest = contents.digest(self.run.terms.digest, ask, private)
        return TaskRequest(ask, contents.arguments.digest, given, private, digest, data)

    def _execute(self, request: TaskRequest, given: str = "") -> tuple[Done, Encoded]:
        """Do a task; return how it ended and its value, which nobody can ask for before `_keep`.

        Raises:
            LostValue: the value does not have the digest `given` that it had before.
        """
        run = self.run
        ask = request.ask
        digest = request.digest
        for one in policy.told_by(run.file, run.terms, run.client):
            told.note(run.file.folder, one)
        if ask.members and policy.binds_members(run.file, run.terms):
            policy.check_members(run.file, run.terms, [member.name for member in ask.members])
        job = Job(*request.place, run.file.name, ask.task, request.given.args, request.private)
        masks = masks_of(run, ask, f"{ask.step}-{ask.task}", DP.parse(run.terms.recipe.dp))
        place = f"{ask.step}-{ask.call} {digest}"
        keeper = LedgerKeeper(run.file, run.terms, run.admission.folder, place)
        journal = FolderJournal(self.shelf.journal, lambda: digest)
        outcome = run.worker.execute(job, journal, masks, keeper)
        self._count_numbers(place, ask.task, outcome.value)
        value = Encoded.of(wire.encode(outcome.value))
        if given and value.digest != given:
            raise LostValue("it is another one now")
        if outcome.private is not request.private:
            self.shelf.put_private(request.place, outcome.private)
        record = self._record(request, outcome, value.digest)
        return Done(digest, record), value

    def _count_numbers(self, place: str, task: str, value: Any) -> None:
        """Refuse to tell more numbers about the silo's samples alone than one for k of theirs, in all
        runs that get these samples.

        They are counted before the value is stored, so none leaves that was not counted.
        """
        file = self.run.file
        part = self.run.client.train
        least = self.run.file.limits.min_active
        numbers = policy.numbers_told(file, self.run.terms, task, value)
        if not least or not numbers:
            return
        most = policy.most_numbers(part, least)
        kind = f"numbers about {part.digest.hex()[:32]}"
        if (found := told.count(file.folder, kind, place, numbers, most)) > most:
            raise UserError(
                f"{found} numbers would be told in all runs about the samples of {file.name} alone, "
                f"which allows {most}, one for {least} of its own: ask for fewer or smaller "
                "statistics, give --dp, or let its owner lower limits.min_active"
            )

    def _record(self, request: TaskRequest, outcome: Outcome, given: str) -> str:
        """Return the signed record for the chain of custody; `given` is the digest of the value."""
        run = self.run
        ask = request.ask
        samples = len(run.client.train), len(run.client.val), len(run.client.test)
        return run.signed(
            Hop(
                run.terms.run,
                run.terms.digest,
                run.file.name,
                ask.step,
                run.data,
                samples,
                ask.call,
                ask.task,
                request.arguments,
                request.given.taken,
                given,
                wire.size(outcome.value),
                custody.model_digest(outcome.value, given),
                outcome.work.forward,
                outcome.work.backward,
            )
        )

    def _keep(self, request: TaskRequest, done: Done, value: Encoded) -> None:
        """Store what a task returned, with the request from which it can be made again."""
        mine = request.given.own
        own = tuple((key, len(v.data)) for key, v in mine.items())
        asked = Asked(done.digest, value.digest, len(request.data), own)
        parts = [request.data, *(v.data for v in mine.values())]
        self.shelf.put(request.place, request.ask.task, done, value, asked, parts)

    def _value(self, key: str) -> tuple[Done, Encoded]:
        """Return a value that a task returned here; make it again if its file is missing or
        damaged.
        """
        try:
            return self.shelf.value(key)
        except LostValue as lost:
            return self._again(key, lost, f"value {key}")

    def _private(self, ask: Ask, void: Sequence[int] = ()) -> Any:
        """Return this silo's state before a task; make it again if its file is missing or
        damaged.
        """
        place = (ask.step, ask.call)
        made = self.shelf.last(place, void)
        known = place_of(ask.state) if ask.state else None
        later = known is not None and (known >= place or known[0] in void)
        if later or (made is not None and (known is None or known < made)):
            raise UserError(
                f"the coordinator names another private state ({ask.state or 'none'}) than "
                f"{self.run.file.name} has before step {ask.step + 1} ({text_of(made) or 'none'}): "
                "refused"
            )
        # If `known` is newer than `made`, the silo has lost that state.
        try:
            return self.shelf.private(known)
        except LostValue as lost:
            assert known is not None
            state = f"its private state after step {known[0] + 1}"
            self._again(self.shelf.made_at(known), lost, state, void)
        return self.shelf.private(known)

    def _again(
        self, key: str, lost: LostValue, what: str, void: Sequence[int] = ()
    ) -> tuple[Done, Encoded]:
        """Do the task that gave the value `key` once more: the same arguments and private state
        give the same bits.
        """
        hopeless = UserError(
            f"{self.run.file.name} does not have {what} of run {self.run.terms.run}: {lost}, and "
            "what it was made from is not here either: restore the file from a backup, or start a "
            "new run"
        )
        found = self.shelf.request(key) if key else None
        if found is None:
            raise hopeless
        asked, data, own = found
        try:
            ask, body = unpack(data, Ask)
            contents = self._opened(ask, body)
            given = self._arguments(ask.task, contents, own)
        except wire.WireError:
            raise hopeless from None
        request = self._request(ask, contents, given, self._private(ask, void), data)
        if request.digest != asked.digest:
            raise hopeless
        self.run.admission.check_disk()
        try:
            done, value = self._execute(request, asked.given)
        except LostValue:
            raise hopeless from None
        self._keep(request, done, value)
        log.warning("%s: the task is done again, with the same result", lost)
        self.run.note(f", step {ask.step + 1}: {ask.task} done again, because {lost}")
        return done, value

    def _answer(self, ask: Ask, done: Done, value: Encoded) -> bytes:
        """Return how a task ended, with its value if it is asked for now."""
        state = text_of(self.shelf.last((ask.step, ask.call + 1)))
        key = f"{ask.step}-{ask.call}-{ask.task}"
        return self._give(ask, key, done, value, state)

    def _give(self, ask: Ask, key: str, done: Done, value: Encoded, state: str = "") -> bytes:
        """Return how a task ended, with its value sealed for its readers."""
        run = self.run
        answer = Answer(run.file.name, record=done.record, state=state)
        if not ask.readers:
            return pack(answer)
        plan = run.plan_without(ask.absent)
        policy.check_readers(run.file, run.terms, run.plan, plan, key, ask.readers)
        if plan and any(reader.name == SERVER for reader in ask.readers):
            run.admission.show(key, value.digest)
        name = value_key(key, ask.absent if plan else ())
        data, locks = run.sealer.seal(value, name, ask.readers)
        run.note(f": value {key} sealed for {', '.join(one.name for one in ask.readers)}")
        return pack(replace(answer, locks=locks), (data,))


def masks_of(run: Agreed, ask: Ask, name: str, dp: DP | None) -> PartMasks:
    """Return the masks of what this silo adds to a sum."""
    least = run.file.least_clients(measured=bool(run.terms.measures))
    # fewer parts have too little of a shared noise
    fewest = max(least, dp.honest if dp else 1)
    return PartMasks(run.sealer, ask.members, fewest, name, run.admission.folder)
