"""A silo: executes what the coordinator asks, if the silo's own file allows it, and nothing twice."""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ekiden._version import __version__
from ekiden.base.errors import UserError
from ekiden.base.refs import SERVER
from ekiden.data.inputs import terms as terms_of
from ekiden.data.samples import FederatedData
from ekiden.data.tasks import terms as task_terms
from ekiden.engine import machine, wire
from ekiden.engine.evaluation import Built
from ekiden.engine.modules import initial_weights, model_bytes
from ekiden.engine.outline import Outline
from ekiden.engine.setup import check_model
from ekiden.engine.store import FolderJournal
from ekiden.engine.tasks import task_of
from ekiden.engine.wire import Encoded
from ekiden.engine.worker import Job, Outcome, Worker
from ekiden.training import fit as fitting
from ekiden.training.elastic import adapted
from ekiden.training.frozen import Copies
from ekiden.training.network import Network, blank
from ekiden.training.weights import Weights
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower import arguments, custody, keys, measured, policy, request_log, sealing
from ekiden.transports.flower.admission import Admission
from ekiden.transports.flower.agreement import Agreement, Revision
from ekiden.transports.flower.arguments import GivenArguments
from ekiden.transports.flower.contents import Contents, check, opened, value_key
from ekiden.transports.flower.custody import Hop, Taken, Tally
from ekiden.transports.flower.parcel import Answer, Ask, Count, Hello, pack, signed_text, unpack
from ekiden.transports.flower.sealing import Party, Plain, Sealer
from ekiden.transports.flower.shelf import Asked, Done, LostValue, Place, Shelf, drop_old_runs, place_of, text_of
from ekiden.transports.flower.silo_file import Held, SiloFile

log = logging.getLogger("ekiden")
_ARGUMENT_BYTES = 64
"""Arguments may hold so many times the largest model: a gossip task gets its neighbours' models."""
_SEALING_KEY = "sealing.key"


@dataclass(frozen=True)
class Agreed:
    """A run that the silo takes part in.

    Attributes:
        terms: of the run.
        worker: executes its tasks.
        sealer: opens and seals for the silo.
        plan: what the method will ask for if nobody is missing, where that is known beforehand.
        admission: how much the run may ask for.
        data: the fingerprint of the silo's samples, the same as when the run began.
    """

    terms: Agreement
    worker: Worker
    sealer: Sealer
    plan: Outline | None
    admission: Admission
    data: str


class Silo:
    """Answers requests."""

    def __init__(self, file: SiloFile, held: Held | None = None) -> None:
        """Answer for the silo of `file`; `held` are its data if they are loaded already."""
        self._file = file
        self._data = held
        self._agreement: Agreed | None = None

    def answer(self, data: bytes) -> bytes:
        """The answer to a request; whatever is wrong with the request is said in it, on one line."""
        what = "a message"
        try:
            ask, body = unpack(data, Ask)
            what = ask.kind[:40]
            if ask.kind == "hello":
                return self._hello(ask)
            terms = agreements.parse(ask.agreement)
            what += f" of run {terms.run}"
            if ask.kind == "status":
                Admission(self._file, terms).check()
                return pack(Answer(self._file.name, busy=Shelf(self._runs / terms.run, None).busy()))
            run = self._agreed(terms)
            shelf = Shelf(self._runs / run.terms.run, run.worker.setup.method.private)
            with shelf.held():
                run.admission.count()
                if ask.kind == "task":
                    return self._task(run, shelf, ask, body, data)
                if ask.kind == "value":
                    done, value = self._value(run, shelf, ask.key)
                    return self._give(run, ask, ask.key, done, value if ask.eager else None)
                if ask.kind == "evaluate":
                    return self._evaluate(run, ask, body)
            raise UserError(f"no silo can do {ask.kind[:40]!r}")
        except UserError as error:
            reason = str(error).replace("\n", " ")
            log.warning("refused: %s", reason)
            self._note(f"refused {what}: {reason}")
        except Exception as error:  # of torch or of the user's own data function
            log.exception("a request failed")
            reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            self._note(f"failed at {what}: {reason}")
        return pack(Answer(self._file.name, error=reason))

    @property
    def _runs(self) -> Path:
        return self._file.folder / "runs"

    def _held(self) -> Held:
        if self._data is None:
            self._data = self._file.load()
        return self._data

    def _note(self, line: str) -> None:
        request_log.note(self._file.folder, line)

    def _sign(self, text: bytes) -> str:
        return keys.sign(self._file.beside(self._file.link.key), text)

    def _hello(self, ask: Ask) -> bytes:
        """Who this silo is and what it holds, in numbers; and whether it agrees to the terms, if there are any yet."""
        drop_old_runs(self._runs)
        terms = agreements.parse(ask.agreement) if ask.agreement else None
        run = self._agreed(terms) if terms else None
        dataset, client = self._held()
        file = self._file
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
            file.limits.evaluations,
            inputs=terms_of(dataset.inputs),
            task=task_terms(dataset.task),
        )
        if file.link.key:
            hello = replace(hello, signature=self._sign(signed_text(ask.nonce, file.name)))
        if run and isinstance(run.sealer, Party):
            key = sealing.public_of(run.sealer.private)
            hello = replace(hello, sealing=key, proof=self._sign(sealing.key_text(run.terms.run, file.name, key)))
        return pack(Answer(file.name), wire.chunks(hello))

    def _agreed(self, terms: Agreement) -> Agreed:
        """What executes tasks of this run here. Nothing is stored before all is checked.

        Raises:
            UserError: the silo does not agree to it.
        """
        if self._agreement is not None and self._agreement.terms == terms:
            return self._agreement
        file = self._file
        policy.check_terms(file, terms)
        admission = Admission(file, terms)
        admission.check()  # before anything is built for terms that are refused
        dataset, client = held = self._held()
        policy.check_data(file, terms, held)
        dataset = replace(dataset, mean=terms.mean, std=terms.std, augment=type(dataset.augment)(**terms.augment))
        setup = terms.setup(dataset, file.hardware, file.pretrained_folder)
        empty = policy.check_size(file, setup)
        first = not admission.folder.exists()
        module = None if first or terms.has_values else blank(setup.build, empty)  # the values are checked at first
        setup = replace(setup, build=Copies(setup.build))  # a message may need several
        policy.check_values(file, terms, setup)
        plan = policy.plan_of(file, terms, setup)
        network = setup.build() if module is None else module  # tasks load their own values into it
        setup = replace(setup, hardware=machine.resolve(file.hardware, 1, lambda: network))

        def watch(name: str, epoch: int, epochs: int) -> None:
            log.info("%s: epoch %d/%d", name, epoch, epochs)

        worker = Worker(setup, {file.name: client}, watch, file.limits.epochs, network)
        if first:
            check_model(worker, FederatedData(dataset, (client,)))
        admission.bind()
        data = custody.fingerprint(client, custody.kept_salt(admission.folder))
        admission.check_data(data)
        if first:
            self._note(f"run {terms.run} begins: {terms.method} among {', '.join(terms.clients)}")
            if revision := terms.revision:
                self._note(self._told(terms.run, revision))
        sealer: Sealer = Plain()
        if terms.sealed:
            private = sealing.kept_private(admission.folder / _SEALING_KEY)
            sealer = Party(file.name, terms.run, terms.digest, private, terms.silos, self._sign)
        self._agreement = Agreed(terms, worker, sealer, plan, admission, data)
        return self._agreement

    def _told(self, run: str, revision: Revision) -> str:
        """What the owner of this silo should know of a run that replaces another one."""
        before = self._runs / revision.run
        left = revision.change == "without" and before.exists()
        more = f"; {before} still holds what {revision.client} gave: remove it" if left else ""
        return f"run {run} replaces {revision.told()}{more}"

    def _plan(self, run: Agreed, ask: Ask) -> Outline | None:
        """What the method asks for without those that are missing."""
        if run.plan is None or not ask.absent:
            return run.plan
        return policy.plan_of(self._file, run.terms, run.worker.setup, ask.absent)

    def _task(self, run: Agreed, shelf: Shelf, ask: Ask, body: memoryview, data: bytes) -> bytes:
        """Do a task, or find what it gave before; `data` is the whole request."""
        place = (ask.step, ask.call)
        if min(place) < 0:
            raise UserError("a task needs a step and a number: refused")
        settled = max(ask.settled, shelf.settled)
        if ask.step < settled:
            raise UserError(f"step {ask.step + 1} of the run is over, {settled} are done for good: refused")
        task_of(run.worker.setup.method, ask.task)
        self._check_length(body)
        plan = self._plan(run, ask)
        contents = opened(ask, body, run.sealer, ask.absent if plan else ())
        policy.check_request(self._file.name, run.terms, plan, ask, contents.arguments.data)
        given = self._arguments(run, shelf, ask.task, contents)
        # Not before all is opened and checked: a message that is refused must not make the silo forget anything.
        keep = policy.kept(self._file.name, plan, ask)
        void = [step for step, client in ask.absent if client == self._file.name] if run.terms.skips else []
        private = self._private(run, shelf, ask, void)  # first: what a lost one is made from may not be needed longer
        shelf.settle(ask.settled, keep.__contains__, void)
        digest = contents.digest(run.terms.digest, ask.task, private)
        found = shelf.find(place, ask.task, digest)
        if found is None:
            run.admission.check_disk()
            shelf.discard(place)
            job = Job(ask.step, ask.call, self._file.name, ask.task, given.args, private)
            outcome = run.worker.execute(job, FolderJournal(shelf.journal), digest[:16])
            value = Encoded.of(wire.encode(outcome.value))
            done = self._done(run, job, digest, contents, given, outcome, value)
            if outcome.private is not private:
                shelf.put_private(place, outcome.private)
            log.info("step %d: %s done", ask.step + 1, ask.task)
            self._note(f"run {run.terms.run}, step {ask.step + 1}: {ask.task} done")
        else:
            done, value = found
            log.info("step %d: %s was done before", ask.step + 1, ask.task)
        key, state = f"{ask.step}-{ask.call}-{ask.task}", text_of(shelf.last((ask.step, ask.call + 1)))
        with ThreadPoolExecutor(1) as disk:  # writes while the value is sealed; the answer leaves after both
            kept = disk.submit(self._keep, shelf, place, ask.task, done, value, given, data) if found is None else None
            answer = self._give(run, ask, key, done, value if ask.eager else None, state)
            if kept is not None:
                kept.result()
        return answer

    def _done(
        self,
        run: Agreed,
        job: Job,
        digest: str,
        contents: Contents,
        given: GivenArguments,
        outcome: Outcome,
        value: Encoded,
    ) -> Done:
        """How a task ended."""
        record = self._record(run, job, contents.arguments.digest, given.taken, outcome, value.digest)
        return Done(digest, wire.size(outcome.value), outcome.work.forward, outcome.work.backward, record)

    @staticmethod
    def _keep(
        shelf: Shelf, place: Place, task: str, done: Done, value: Encoded, given: GivenArguments, request: bytes
    ) -> None:
        """Store what a task gave, with the request from which it can be made again."""
        own = tuple((key, len(v.data)) for key, v in given.own.items())
        asked = Asked(done.digest, value.digest, len(request), own)
        shelf.put(place, task, done, value, asked, [request, *(v.data for v in given.own.values())])

    def _value(self, run: Agreed, shelf: Shelf, key: str) -> tuple[Done, Encoded]:
        """A value that a task gave here; made again where its file is gone or damaged.

        Raises:
            UserError: it cannot be made again; names this silo and the file.
        """
        try:
            return shelf.value(key)
        except LostValue as lost:
            return self._again(run, shelf, key, lost, f"value {key}")

    def _private(self, run: Agreed, shelf: Shelf, ask: Ask, void: Sequence[int] = ()) -> Any:
        """This silo's state before a task; made again where its file is gone or damaged.

        Raises:
            UserError: it cannot be made again, or the coordinator names another one.
        """
        place = (ask.step, ask.call)
        made = shelf.last(place, void)
        if ask.state is not None:
            known = place_of(ask.state) if ask.state else None
            later = known is not None and (known >= place or known[0] in void)
            if later or (made is not None and (known is None or known < made)):
                raise UserError(
                    f"the coordinator names another private state ({ask.state or 'none'}) than {self._file.name} has "
                    f"before step {ask.step + 1} ({text_of(made) or 'none'}): refused"
                )
            made = known  # where it is newer, the silo has lost it
        try:
            return shelf.private(made)
        except LostValue as lost:
            assert made is not None
            self._again(run, shelf, shelf.made_at(made), lost, f"its private state after step {made[0] + 1}", void)
        return shelf.private(made)

    def _again(
        self, run: Agreed, shelf: Shelf, key: str, lost: LostValue, what: str, void: Sequence[int] = ()
    ) -> tuple[Done, Encoded]:
        """Do the task that gave the value `key` once more: the same arguments and private state give the same bits.

        Args:
            run: the run.
            shelf: its folder.
            key: of the value; empty where nothing here says how `what` was made.
            lost: why.
            what: is lost.
            void: steps of which nothing counts that was done here.
        """
        name = self._file.name
        hopeless = UserError(
            f"{name} does not have {what} of run {run.terms.run}: {lost}, and what it was made from is not here "
            "either: restore the file from a backup, or start a new run"
        )
        found = shelf.request(key) if key else None
        if found is None:
            raise hopeless
        asked, request, own = found
        try:
            ask, body = unpack(request, Ask)
            contents = opened(ask, body, run.sealer, ask.absent if self._plan(run, ask) else ())
            private = self._private(run, shelf, ask, void)
            if contents.digest(run.terms.digest, ask.task, private) != asked.digest:
                raise hopeless
            given = self._arguments(run, shelf, ask.task, contents, own)
        except wire.WireError:
            raise hopeless from None
        run.admission.check_disk()
        job = Job(ask.step, ask.call, name, ask.task, given.args, private)
        outcome = run.worker.execute(job, FolderJournal(shelf.journal), asked.digest[:16])
        value = Encoded.of(wire.encode(outcome.value))
        if value.digest != asked.given:
            raise hopeless
        done = self._done(run, job, asked.digest, contents, given, outcome, value)
        if outcome.private is not private:
            shelf.put_private((ask.step, ask.call), outcome.private)
        self._keep(shelf, (ask.step, ask.call), ask.task, done, value, given, request)
        log.warning("%s: the task is done again, with the same result", lost)
        self._note(f"run {run.terms.run}, step {ask.step + 1}: {ask.task} done again, because {lost}")
        return done, value

    def _give(
        self,
        run: Agreed,
        ask: Ask,
        key: str,
        done: Done,
        value: Encoded | None,
        state: str = "",
    ) -> bytes:
        """How a task ended, with its value sealed for those who are to read it."""
        answer = Answer(self._file.name, "", done.size, done.forward, done.backward, record=done.record, state=state)
        if value is None:
            return pack(answer)
        plan = self._plan(run, ask)
        if run.terms.sealed:
            policy.check_readers(self._file, run.terms, run.plan, plan, key, ask.readers)
        if run.terms.sealed and plan and any(reader.name == SERVER for reader in ask.readers):
            run.admission.show(key, value.digest)
        data, locks = run.sealer.seal(value, value_key(key, ask.absent if plan else ()), ask.readers)
        if ask.readers:
            readers = ", ".join(reader.name for reader in ask.readers)
            self._note(f"run {run.terms.run}: value {key} sealed for {readers}")
        return pack(replace(answer, locks=locks), (data,))

    def _record(
        self, run: Agreed, job: Job, arguments: str, taken: tuple[Taken, ...], outcome: Outcome, given: str
    ) -> str:
        """What goes into the chain of custody; `given` is the digest of the value."""
        if not run.terms.keys:
            return ""
        _, client = self._held()
        hop = Hop(
            run=run.terms.run,
            terms=run.terms.digest,
            method=run.terms.method,
            client=job.client,
            samples=len(client.train),
            validation=len(client.val),
            test=len(client.test),
            data=run.data,
            step=job.step,
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
        return custody.record(hop, self._sign).line()

    def _arguments(
        self, run: Agreed, shelf: Shelf, task: str, contents: Contents, own: Mapping[str, Encoded] | None = None
    ) -> GivenArguments:
        """The task's arguments; `own` are values of this silo that are here.

        Raises:
            UserError: they are not what the task takes.
        """
        return arguments.gather(
            run.worker, self._file.name, task, contents, lambda key: self._value(run, shelf, key)[1], own or {}
        )

    def _evaluate(self, run: Agreed, ask: Ask, body: memoryview) -> bytes:
        """What each model answers on this silo's test samples: the run's result where only silos read the others."""
        self._check_length(body)
        models = wire.decode(run.sealer.open(body, ask.lock, SERVER, "models", ask.step).data, list[Weights])
        setup = run.worker.setup
        changed, clients = setup.method.changes_network, len(run.terms.clients)
        if ask.clients != clients:
            raise UserError(f"a result of {ask.clients} clients in a run of {clients}: refused")
        if changed and clients * model_bytes(setup) > self._most:  # before it is built: a network for each client
            raise UserError(f"a result of {clients} clients may be larger than {self._file.name} takes: refused")
        plan = self._plan(run, ask)
        once = run.terms.sealed and plan is not None
        digests = [custody.digest(wire.chunks(model)) for model in models]
        if once and plan is not None:
            initial = custody.digest(wire.chunks(initial_weights(setup)))
            policy.check_result(run.terms, plan, initial, digests, ask.records)
        found, digest = measured.Measured(run.admission.folder), custody.digest([repr((ask.results, digests)).encode()])
        counts = found.find(digest)
        if counts is None:
            policy.check_measured(self._file, found.models, len(models), once=once)
            counts = self._measure(run, models, ask.results)
            found.put(digest, counts)
        said = f"models measured: {len(models)}, {found.models} of this run so far"
        self._note(f"run {run.terms.run}, after step {ask.step}: {said}")
        record = ""
        if run.terms.keys:
            place, result = (self._file.name, ask.step, ask.results), (tuple(digests), tuple(counts))
            tally = Tally(run.terms.run, run.terms.digest, *place, *result, run.data)
            record = custody.measured(tally, self._sign).line()
        return pack(Answer(self._file.name, record=record), wire.chunks(list(counts)))

    def _measure(self, run: Agreed, models: list[Weights], results: int) -> tuple[Count, ...]:
        """Measure models, of which the first `results` are the run's and not a client's own."""
        worker, setup = run.worker, run.worker.setup
        build = Built(setup.method, setup.build, len(run.terms.clients))
        _, client = self._held()
        counts = []
        for i, model in enumerate(models):
            bench = worker.bench("evaluation")
            if setup.method.changes_network and i < results:
                bench.network = Network(adapted(build(), model), setup.hardware.device)
            check(model, bench.network, whole=True)
            bench.network.load(model)
            scores = fitting.evaluate(bench, client.test)
            counts.append(measured.coarse(scores, self._file.limits.min_samples))
        return tuple(counts)

    @property
    def _most(self) -> int:
        """Bytes that a message may have."""
        return _ARGUMENT_BYTES * self._file.limits.model_bytes

    def _check_length(self, body: memoryview) -> None:
        if len(body) > self._most:
            raise UserError(f"a message of {len(body)} bytes: {self._file.name} takes {self._most} (64 largest models)")
