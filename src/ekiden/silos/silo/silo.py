"""A silo. It does what the coordinator asks, if the silo's own file allows it, and does nothing
twice.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ekiden.clinic import subgroups
from ekiden.clinic.counting import Care
from ekiden.clinic.noisy import Exact, Noisy
from ekiden.clinic.subgroups import divisions
from ekiden.core.base.errors import PrivateError, UserError
from ekiden.core.base.files import Damaged, is_held, marked, verified, write, write_once
from ekiden.core.base.sums import Masked
from ekiden.core.engine import wire
from ekiden.core.engine.evaluation import Built
from ekiden.core.engine.folder import code_version
from ekiden.core.engine.method import payload_types
from ekiden.core.engine.setup import initial_weights, model_bytes
from ekiden.core.engine.store import FolderJournal
from ekiden.core.engine.wire import EVERYONE, SERVER, Encoded, Ref
from ekiden.core.engine.worker import Job, Outcome, Worker
from ekiden.core.tasks import Scores
from ekiden.core.tasks import terms as task_terms
from ekiden.core.training import fit as fitting
from ekiden.core.training.network import Network, adapted
from ekiden.core.training.private import DP, Draw
from ekiden.core.training.weights import Weights
from ekiden.methods import FedGram
from ekiden.readers.kinds import terms as terms_of
from ekiden.silos.silo import approval, budget, participation, policy, told
from ekiden.silos.silo.budget import LedgerKeeper
from ekiden.silos.silo.participation import Admission, Agreed, sign, take_part
from ekiden.silos.silo.shelf import (
    Asked,
    Done,
    LostValue,
    Place,
    Shelf,
    drop_old_runs,
    place_of,
    text_of,
)
from ekiden.silos.silo.silo_file import Held, SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, sealing
from ekiden.silos.trust import report as reports
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.custody import Hop, Taken, Tally
from ekiden.silos.trust.masking import PartMasks
from ekiden.silos.trust.parcel import (
    HELLO,
    Answer,
    Ask,
    Contents,
    Hello,
    check,
    models_in,
    opened,
    pack,
    signed_text,
    unpack,
    value_key,
)
from ekiden.silos.trust.report import Reported, SiloReport
from ekiden.silos.trust.sealing import KEY, Party

log = logging.getLogger("ekiden")


@dataclass(frozen=True)
class GivenArguments:
    """The arguments that a task gets."""

    args: tuple[Any, ...]  # the arguments
    taken: tuple[Taken, ...]  # the values among them
    own: Mapping[str, Encoded]  # this silo's own values among them, encoded, by their keys


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
    own_models: list[Weights] = []  # the initial model, and what this silo made itself

    def fetch(ref: Ref[Any]) -> Any:
        if ref.owner == EVERYONE:
            initial = initial_weights(worker.setup)
            digest = custody.digest(wire.chunks(initial))
            taken[Taken(ref.owner, ref.key, digest, wire.size(initial))] = None
            own_models.append(initial)
            return initial
        _, kind = payload_types(method, ref.key.split("-", 2)[-1])
        if ref.owner == silo:
            data, digest = mine[ref.key] if ref.key in mine else kept(ref.key)
            mine[ref.key] = Encoded(data, digest)
        elif (name := (ref.owner, ref.key)) in contents.values:
            data, digest = contents.values[name]
        else:
            raise wire.WireError(f"message lacks the value {ref.key[:80]!r}: refused")
        try:
            value = wire.decode(data, kind)
            check(value, worker.network, whole=False)
        except wire.WireError as error:
            raise wire.WireError(f"value {ref.key[:80]!r} of {ref.owner[:80]}: {error}") from None
        own_models.extend(models_in(value) if ref.owner == silo else ())
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
class OpenedRequest:
    """A request for a task, opened and checked."""

    contents: Contents
    given: GivenArguments  # the arguments
    keep: frozenset[str]  # keys of values of final steps that the silo keeps
    void: Sequence[int]  # steps in which the silo was missing, so that what it did does not count


@dataclass(frozen=True)
class SiloTasks:
    """Does the tasks of a run."""

    run: Agreed  # the run that the silo agreed to
    shelf: Shelf  # holds what its tasks returned

    def do(self, ask: Ask, body: memoryview, data: bytes) -> bytes:
        """Do a task, or find its earlier outcome; `data` is the complete request.

        The order of the steps matters. Nothing is forgotten before all is opened and checked: a
        refused message must not make the silo forget anything. The private state is found before
        that, as a lost one is made again from values that are then dropped. The answer goes out
        when the outcome is on the disk.
        """
        self._refuse(ask, body)
        request = self._open(ask, body)
        private = self._private(ask, request.void)
        self.shelf.settle(ask.settled, request.keep.__contains__, request.void)
        digest = request.contents.digest(self.run.terms.digest, ask, private)
        found = self.shelf.find((ask.step, ask.call), ask.task, digest)
        if found is not None:
            log.info("step %d: %s was done before", ask.step + 1, ask.task)
            return self._answer(ask, *found)
        done, value = self._do_once(ask, digest, request, private)
        place = (ask.step, ask.call)
        with ThreadPoolExecutor(1) as disk:  # writes while the value is sealed
            kept = disk.submit(self._keep, place, ask.task, done, value, request.given, data)
            answer = self._answer(ask, done, value)
            kept.result()
        return answer

    def _refuse(self, ask: Ask, body: memoryview) -> None:
        """Refuse what no run asks for, before anything is opened."""
        if min(ask.step, ask.call) < 0:
            raise UserError("a task needs a step and a number: refused")
        settled = max(ask.settled, self.shelf.settled)
        if ask.step < settled:
            raise UserError(
                f"step {ask.step + 1} of the run is over, {settled} are done for good: refused"
            )
        policy.check_task(self.run.worker.setup.method, ask.task)
        self.run.check_length(body)

    def _open(self, ask: Ask, body: memoryview) -> OpenedRequest:
        """Open all that came with a request, and check it."""
        name, plan = self.run.file.name, self.run.plan_without(ask.absent)
        contents = opened(ask, body, self.run.sealer, ask.absent if plan else ())
        policy.check_request(name, self.run.terms, plan, ask, contents.arguments.data)
        given = self._arguments(ask.task, contents)
        void = []
        if self.run.terms.skips:
            void = [step for step, client in ask.absent if client == name]
        return OpenedRequest(contents, given, policy.kept(name, plan, ask), void)

    def _do_once(
        self, ask: Ask, digest: str, request: OpenedRequest, private: Any
    ) -> tuple[Done, Encoded]:
        """Do a task that was not done before, or that is asked for in another way now."""
        place = (ask.step, ask.call)
        self.run.admission.check_disk()
        self.shelf.discard(place)
        outcome, done, value = self._execute(ask, digest, request.contents, request.given, private)
        if outcome.private is not private:
            self.shelf.put_private(place, outcome.private)
        log.info("step %d: %s done", ask.step + 1, ask.task)
        self.run.note(f", step {ask.step + 1}: {ask.task} done")
        return done, value

    def _answer(self, ask: Ask, done: Done, value: Encoded) -> bytes:
        """Return how a task ended, with its value if it is asked for now."""
        state = text_of(self.shelf.last((ask.step, ask.call + 1)))
        key = f"{ask.step}-{ask.call}-{ask.task}"
        return self._give(ask, key, done, value if ask.eager else None, state)

    def show(self, ask: Ask) -> bytes:
        """Return a value that a task returned here."""
        done, value = self._value(ask.key)
        return self._give(ask, ask.key, done, value if ask.eager else None)

    @property
    def _dp(self) -> DP | None:
        return DP.parse(self.run.terms.recipe.dp)

    def _execute(
        self, ask: Ask, digest: str, contents: Contents, given: GivenArguments, private: Any
    ) -> tuple[Outcome, Done, Encoded]:
        """Do a task; return how it ended and its value. Nothing is kept yet."""
        for one in policy.told_by(self.run.file, self.run.terms, self.run.own):
            told.note(self.run.file.folder, one)
        members = [member.name for member in ask.members]
        policy.check_members(self.run.file, self.run.terms, members)
        job = Job(ask.step, ask.call, self.run.file.name, ask.task, given.args, private)
        masks = _masks(self.run, ask, f"{ask.step}-{ask.task}", self._dp)
        place = f"{ask.step}-{ask.call} {digest}"
        keeper = LedgerKeeper(self.run.file, self.run.terms, self.run.admission.folder, place)
        outcome = self.run.worker.execute(
            job, FolderJournal(self.shelf.journal, lambda: digest), masks, keeper
        )
        self._count_numbers(place, ask.task, outcome.value)
        value = Encoded.of(wire.encode(outcome.value))
        record = self._record(job, contents.arguments.digest, given.taken, outcome, value.digest)
        done = Done(
            digest, wire.size(outcome.value), outcome.work.forward, outcome.work.backward, record
        )
        return outcome, done, value

    def _count_numbers(self, place: str, task: str, value: Any) -> None:
        """Refuse to tell more numbers about the silo's samples alone than one for k of theirs."""
        run, least = self.run, self.run.file.limits.min_active
        if least and (numbers := policy.numbers_told(run.file, run.terms, task, value)):
            run.admission.tell(place, numbers, policy.most_numbers(run.client.train, least))

    def _keep(
        self,
        place: Place,
        task: str,
        done: Done,
        value: Encoded,
        given: GivenArguments,
        request: bytes,
    ) -> None:
        """Store what a task returned, with the request from which it can be made again."""
        own = tuple((key, len(v.data)) for key, v in given.own.items())
        asked = Asked(done.digest, value.digest, len(request), own)
        self.shelf.put(
            place, task, done, value, asked, [request, *(v.data for v in given.own.values())]
        )

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
        made = known  # if it is newer than `made`, the silo has lost that state
        try:
            return self.shelf.private(made)
        except LostValue as lost:
            assert made is not None
            self._again(
                self.shelf.made_at(made), lost, f"its private state after step {made[0] + 1}", void
            )
        return self.shelf.private(made)

    def _again(
        self, key: str, lost: LostValue, what: str, void: Sequence[int] = ()
    ) -> tuple[Done, Encoded]:
        """Do the task that gave the value `key` once more: the same arguments and private state
        give the same bits.
        """
        name = self.run.file.name
        hopeless = UserError(
            f"{name} does not have {what} of run {self.run.terms.run}: {lost}, and what it was "
            "made from is not here "
            "either: restore the file from a backup, or start a new run"
        )
        found = self.shelf.request(key) if key else None
        if found is None:
            raise hopeless
        asked, request, own = found
        try:
            ask, body = unpack(request, Ask)
            contents = opened(
                ask, body, self.run.sealer, ask.absent if self.run.plan_without(ask.absent) else ()
            )
            private = self._private(ask, void)
            if contents.digest(self.run.terms.digest, ask, private) != asked.digest:
                raise hopeless
            given = self._arguments(ask.task, contents, own)
        except wire.WireError:
            raise hopeless from None
        self.run.admission.check_disk()
        outcome, done, value = self._execute(ask, asked.digest, contents, given, private)
        if value.digest != asked.given:
            raise hopeless
        if outcome.private is not private:
            self.shelf.put_private((ask.step, ask.call), outcome.private)
        self._keep((ask.step, ask.call), ask.task, done, value, given, request)
        log.warning("%s: the task is done again, with the same result", lost)
        self.run.note(f", step {ask.step + 1}: {ask.task} done again, because {lost}")
        return done, value

    def _give(
        self, ask: Ask, key: str, done: Done, value: Encoded | None, state: str = ""
    ) -> bytes:
        """Return how a task ended, with its value sealed for its readers."""
        answer = Answer(
            self.run.file.name,
            "",
            done.size,
            done.forward,
            done.backward,
            record=done.record,
            state=state,
        )
        if value is None:
            return pack(answer)
        plan = self.run.plan_without(ask.absent)
        if self.run.terms.sealed:
            policy.check_readers(
                self.run.file, self.run.terms, self.run.plan, plan, key, ask.readers
            )
        if self.run.terms.sealed and plan and any(reader.name == SERVER for reader in ask.readers):
            self.run.admission.show(key, value.digest)
        data, locks = self.run.sealer.seal(
            value, value_key(key, ask.absent if plan else ()), ask.readers
        )
        if ask.readers:
            readers = ", ".join(reader.name for reader in ask.readers)
            self.run.note(f": value {key} sealed for {readers}")
        return pack(replace(answer, locks=locks), (data,))

    def _record(
        self, job: Job, arguments: str, taken: tuple[Taken, ...], outcome: Outcome, given: str
    ) -> str:
        """Return the signed record for the chain of custody; `given` is the digest of the value."""
        client, terms = self.run.client, self.run.terms
        hop = Hop(
            terms.run,
            terms.digest,
            job.client,
            job.step,
            self.run.data,
            method=terms.method,
            samples=(len(client.train), len(client.val), len(client.test)),
            call=job.call,
            task=job.task,
            arguments=arguments,
            taken=taken,
            given=given,
            size=wire.size(outcome.value),
            model=custody.model_digest(outcome.value, given),
            forward=outcome.work.forward,
            backward=outcome.work.backward,
        )
        return self.run.signed(hop)

    def _arguments(
        self, task: str, contents: Contents, own: Mapping[str, Encoded] | None = None
    ) -> GivenArguments:
        """Return the task's arguments; `own` are values of this silo that are already loaded."""
        return gather(
            self.run.worker,
            self.run.file.name,
            task,
            contents,
            lambda key: self._value(key)[1],
            own or {},
        )


def _read(path: Path) -> SiloReport:
    try:
        return unpack(verified(path.read_bytes()), SiloReport)[0]
    except (OSError, Damaged, wire.WireError) as error:
        raise UserError(
            f"{path} is damaged ({error}): the run cannot measure more models here"
        ) from None


def evaluate(run: Agreed, ask: Ask, body: memoryview) -> bytes:
    """Answer how each model does on this silo's test samples; if only silos may read models, only
    for the result.
    """
    run.check_length(body)
    models = wire.decode(
        run.sealer.open(body, ask.lock, SERVER, "models", ask.step).data, list[Weights]
    )
    setup = run.worker.setup
    changed, clients = setup.method.changes_network, len(run.terms.clients)
    if ask.clients != clients:
        raise UserError(f"a result of {ask.clients} clients in a run of {clients}: refused")
    if ask.results not in (0, 1) or len(models) - ask.results not in (0, clients) or not models:
        raise UserError(f"{len(models)} models to measure in a run of {clients} silos: refused")
    if (
        changed and clients * model_bytes(setup) > run.most_bytes
    ):  # before it is built: it has a network per client
        raise UserError(
            f"a result of {clients} clients may be larger than {run.file.name} takes: refused"
        )
    policy.check_measured(run.file, run.terms, ask)
    plan = run.plan_without(ask.absent)
    digests = [custody.digest(wire.chunks(model)) for model in models]
    if run.terms.measures and (digests != [run.terms.measures] or ask.results != 1):
        raise UserError("silos measure only the model that the terms name: refused")
    if run.terms.sealed and plan is not None and not run.terms.measures:
        initial = custody.digest(wire.chunks(initial_weights(setup)))
        policy.check_result(run.terms, plan, initial, digests, ask.records)
    digest = custody.digest([repr((ask.results, digests, ask.last)).encode()])
    folder = run.admission.folder
    first = write_once(folder / f"measured-after-{ask.step}", digest.encode())
    if first != digest.encode():
        raise UserError(
            f"{run.file.name} has measured the models after step {ask.step} of this run, and "
            "measures no others: refused"
        )
    file = folder / f"measured-{digest[:32]}.parcel"  # what was reported about exactly these models
    if file.exists():
        found = _read(file)
    else:
        found = _measure(run, models, ask, digest)
        write(file, marked([pack(found)]))
    run.note(f", after step {ask.step}: models measured: {len(models)}")
    given = wire.encode(_given(run, ask, found, digest))
    tally = Tally(
        run.terms.run,
        run.terms.digest,
        run.file.name,
        ask.step,
        run.data,
        results=ask.results,
        models=tuple(digests),
        last=ask.last,
        report=custody.text_of(given),
    )
    return pack(Answer(run.file.name, record=run.signed(tally)), (given,))


def _given(run: Agreed, ask: Ask, found: SiloReport, digest: str) -> Reported:
    """Return a report as it leaves the silo: under masks in a sealed run."""
    dp = run.terms.measured_dp
    masks = _masks(run, ask, f"measured-{digest[:32]}", dp)
    members = [member.name for member in ask.members]
    for one in policy.measured_by(run.file, run.terms, run.own, members):
        told.note(run.file.folder, one)
    masked = masks.added(None, found, None) if masks else found
    if not isinstance(masked, Masked):  # nothing is sealed, or the run is of this silo alone
        return Reported(shown=found)
    shows = run.file.limits.own_figures and (dp is None or dp.honest == 1)
    return Reported(masked, found if shows else None)


def _masks(run: Agreed, ask: Ask, name: str, dp: DP | None) -> PartMasks | None:
    """Return the masks of what this silo adds to a sum; None if the run seals nothing."""
    party = run.sealer
    if not isinstance(party, Party):
        return None
    least = run.file.least_clients(measured=bool(run.terms.measures))
    fewest = max(least, dp.honest if dp else 1)  # fewer parts have too little of a shared noise
    return PartMasks(party, ask.members, fewest, name, run.admission.folder)


def _measure(run: Agreed, models: list[Weights], ask: Ask, digest: str) -> SiloReport:
    """Measure models, of which the first `ask.results` are the run's and not a client's own."""
    worker, setup, clients = run.worker, run.worker.setup, run.terms.clients
    build = Built(setup.method, setup.build, len(clients))
    telling = reports.telling(run.terms, len(models), last=ask.last)
    answers, samples = [], run.client.val if run.terms.validation else run.client.test
    for i, model in enumerate(models):
        bench = worker.bench("evaluation")
        if setup.method.changes_network and i < ask.results:
            bench.network = Network(adapted(build(), model), setup.hardware.device)
        check(model, bench.network, whole=True)
        bench.network.load(model)
        answers.append(fitting.evaluate(bench, samples, full=telling.counting.full))
    personal = len(models) > ask.results
    mine = (
        ask.results + clients.index(run.file.name) if personal and run.file.name in clients else 0
    )
    count = _counted(run, telling, digest)
    numbers = [count(scores) for scores in answers]
    for one in divisions(run.terms.by):
        inputs = setup.dataset.inputs
        every = torch.arange(len(samples))
        for part in subgroups.parts(every, one.places(samples.x, inputs), len(one.names(inputs))):
            numbers.append(count(answers[0].at(part)))
    return reports.report(telling, torch.stack(numbers), mine, len(clients))


def _counted(run: Agreed, telling: Exact, digest: str) -> Callable[[Scores], Tensor]:
    """Return what counts answers, with noise once it is written down that the run tells something."""
    limits = run.file.limits
    if isinstance(telling, Noisy):
        draw = Draw(budget.measured_noise(run.file, run.terms, run.admission.folder, digest))
        return lambda scores: telling.release(scores, draw, limits.min_samples)
    care = Care(limits.min_samples, limits.min_positives)
    train = None if run.file.data.part else run.client.train.y
    return lambda scores: telling.counting.count(scores, care, train)


class Silo:
    """Answers requests."""

    def __init__(
        self, file: SiloFile, held: Held | None = None, named: Mapping[str, Held] | None = None
    ) -> None:
        """Make a silo."""
        self._own = file
        self._file = file
        """with the data set of the request that is answered"""
        self._loaded = {**({"": held} if held else {}), **(named or {})}
        self._name = ""
        self._agreement: Agreed | None = None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a request. If anything is wrong with the request, the answer says so
        on one line.
        """
        what = "a message"
        try:
            ask, body = unpack(data, Ask)
            what = ask.kind[:40]
            if ask.kind == "hello":
                return self._hello(ask)
            terms = agreements.parse(ask.agreement)
            what += f" of run {terms.run}"
            self._choose(terms.data)
            if ask.kind == "status":
                Admission(self._file, terms).check()
                return pack(Answer(self._file.name, busy=is_held(self._runs / terms.run / "lock")))
            run = self._agreed(terms)
            policy.check_lists(self._file.name, terms, ask)
            shelf = Shelf(self._runs / run.terms.run, run.worker.setup.method.traits.private)
            with shelf.held():
                approval.take(self._file, terms)
                run.admission.count()
                if ask.kind in ("task", "value") and terms.measures:
                    raise UserError("the run only measures a model: refused")
                if ask.kind == "task":
                    return SiloTasks(run, shelf).do(ask, body, data)
                if ask.kind == "value":
                    return SiloTasks(run, shelf).show(ask)
                if ask.kind == "evaluate":
                    return evaluate(run, ask, body)
            raise UserError(f"no silo can do {ask.kind[:40]!r}")
        except UserError as error:
            reason = str(error).replace("\n", " ")
            log.warning("refused: %s", reason)
            self._note(f"refused {what}: {reason}")
            if isinstance(error, PrivateError):
                reason = error.told
        except Exception as error:  # from torch or from the user's own data function
            log.exception("a request failed")
            self._note(f"failed at {what}: {type(error).__name__}: {error}")
            # The text may hold a sample's value.
            reason = f"it failed with {type(error).__name__}; its own log says why"
        return pack(Answer(self._file.name, error=reason))

    @property
    def _runs(self) -> Path:
        return self._file.folder / "runs"

    def _choose(self, name: str) -> None:
        """Answer with the data set of this name."""
        self._file, self._name = self._own.holding(name), name

    def _held(self) -> Held:
        if self._name not in self._loaded:
            self._loaded[self._name] = self._file.load()
        return self._loaded[self._name]

    def _note(self, line: str) -> None:
        participation.log_request(self._file.folder, line)

    def _hello(self, ask: Ask) -> bytes:
        """Tell who this silo is and what it holds, in numbers, and whether it agrees to the terms,
        if there are any.
        """
        drop_old_runs(self._runs)
        terms = agreements.parse(ask.agreement) if ask.agreement else None
        self._choose(terms.data if terms else ask.data)
        self._note(f"hello{f' of run {terms.run}, agreed to' if terms else ''}")
        run = self._agreed(terms) if terms else None
        dataset, client = self._held()
        file = self._file
        hello = Hello(
            file.name,
            code_version(),
            dataset.name if not file.data.path else Path(file.data.path).stem,
            dataset.shape,
            dataset.classes,
            tuple(map(float, dataset.mean)),
            tuple(map(float, dataset.std)),
            (dataset.augment.crop, dataset.augment.flip, float(dataset.augment.rotation)),
            (len(client.train), len(client.val), len(client.test)),
            terms_of(dataset.inputs),
            task=task_terms(dataset.task),
            schema=file.schema,
            counts=dict(file.class_counts),
            refuses=self._refusal(ask.plan),
            features=policy.most_features(
                FedGram(min_active=file.limits.min_active),
                client.train,
                dataset.task,
                dataset.outputs,
            ),
        )
        if file.link.key:
            signature = sign(file, HELLO, signed_text(ask.nonce, file.name))
            hello = replace(hello, signature=signature)
        if run and isinstance(run.sealer, Party):
            key = sealing.public_of(run.sealer.private)
            hello = replace(
                hello,
                sealing=key,
                proof=sign(file, KEY, sealing.key_text(run.terms.run, file.name, key)),
            )
        return pack(Answer(file.name), wire.chunks(hello))

    def _refusal(self, plan: str) -> str:
        """Return why this silo's file does not allow what a run plans; empty if it does, or there is no plan."""
        try:
            if plan:
                policy.check_terms(self._file, agreements.parse(plan))
        except UserError as error:
            self._note(f"refused a plan: {error}")
            return error.told if isinstance(error, PrivateError) else str(error)
        return ""

    def _agreed(self, terms: Agreement) -> Agreed:
        """Return the run with these terms."""
        if self._agreement is None or self._agreement.terms != terms:
            policy.check_terms(self._file, terms)
            Admission(
                self._file, terms
            ).check()  # before anything is read or built for terms that are refused
            approval.check(self._file, terms)
            self._agreement = take_part(self._file, self._held(), terms)
        return self._agreement
