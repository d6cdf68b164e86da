"""Measure models on a silo's own test samples: what it reports, and for how many models."""

from functools import partial
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.base.files import Damaged, marked, verified, write
from ekiden.base.modular import Masked
from ekiden.data.tasks.counting import Care
from ekiden.engine import wire
from ekiden.engine.evaluation import Built
from ekiden.engine.networks import initial_weights, model_bytes
from ekiden.engine.wire import SERVER
from ekiden.training import fit as fitting
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights
from ekiden.transports.flower.silo import policy
from ekiden.transports.flower.silo.participation import Agreed
from ekiden.transports.flower.trust import custody, keys
from ekiden.transports.flower.trust import report as reports
from ekiden.transports.flower.trust.contents import check
from ekiden.transports.flower.trust.custody import Tally
from ekiden.transports.flower.trust.masking import PartMasks, released
from ekiden.transports.flower.trust.parcel import Answer, Ask, pack, unpack
from ekiden.transports.flower.trust.report import Reported, SiloReport
from ekiden.transports.flower.trust.sealing import Party


class Measured:
    """The answers of one run, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def models(self) -> int:
        """Number of models measured so far."""
        return sum(len(_read(path).counts) for path in self._folder.glob("measured-*.parcel"))

    def find(self, digest: str) -> SiloReport | None:
        """Return what was reported about exactly these models before."""
        path = self._file(digest)
        return _read(path) if path.exists() else None

    def put(self, digest: str, found: SiloReport) -> None:
        """Store an answer before it is sent."""
        write(self._file(digest), marked([pack(found)]))

    def _file(self, digest: str) -> Path:
        return self._folder / f"measured-{digest[:32]}.parcel"


def _read(path: Path) -> SiloReport:
    try:
        return unpack(verified(path.read_bytes()), SiloReport)[0]
    except (OSError, Damaged, wire.WireError) as error:
        raise UserError(f"{path} is damaged ({error}): the run cannot measure more models here") from None


def evaluate(run: Agreed, ask: Ask, body: memoryview) -> bytes:
    """Answer how each model does on this silo's test samples; if only silos may read models, only for the result."""
    run.check_length(body)
    models = wire.decode(run.sealer.open(body, ask.lock, SERVER, "models", ask.step).data, list[Weights])
    setup = run.worker.setup
    changed, clients = setup.method.changes_network, len(run.terms.clients)
    if ask.clients != clients:
        raise UserError(f"a result of {ask.clients} clients in a run of {clients}: refused")
    if ask.results not in (0, 1) or len(models) - ask.results not in (0, clients) or not models:
        raise UserError(f"{len(models)} models to measure in a run of {clients} silos: refused")
    if changed and clients * model_bytes(setup) > run.most_bytes:  # before it is built: it has a network per client
        raise UserError(f"a result of {clients} clients may be larger than {run.file.name} takes: refused")
    plan = run.plan_without(ask.absent)
    once = run.terms.sealed and plan is not None and not run.terms.measures
    digests = [custody.digest(wire.chunks(model)) for model in models]
    if run.terms.measures and (digests != [run.terms.measures] or ask.results != 1):
        raise UserError("silos measure only the model that the terms name: refused")
    if once and plan is not None:
        initial = custody.digest(wire.chunks(initial_weights(setup)))
        policy.check_result(run.terms, plan, initial, digests, ask.records)
    kept = Measured(run.admission.folder)
    digest = custody.digest([repr((ask.results, digests, ask.last)).encode()])
    found = kept.find(digest)
    if found is None:
        policy.check_measured(run.file, kept.models, len(models), once=once)
        found = _measure(run, models, ask, once=once)
        kept.put(digest, found)
    said = f"models measured: {len(models)}, {kept.models} of this run so far"
    run.note(f", after step {ask.step}: {said}")
    given = wire.encode(_given(run, ask, found, digest))
    record = ""
    if run.terms.keys:
        place, result = (run.file.name, ask.step, ask.results), (tuple(digests), ask.last, custody.text_of(given))
        tally = Tally(run.terms.run, run.terms.digest, *place, *result, run.data)
        record = custody.measured(tally, run.sign).line()
    return pack(Answer(run.file.name, record=record), (given,))


def _given(run: Agreed, ask: Ask, found: SiloReport, digest: str) -> Reported:
    """Return a report as it leaves the silo: under masks in a sealed run."""
    party, file = run.sealer, run.file
    if not isinstance(party, Party):
        return Reported(shown=found)

    def public(name: str) -> str:
        return keys.read_public(file.beside(file.link.peers) / f"{name}.pub")

    agree = partial(released, run.terms, public)
    about = (f"measured-{digest[:32]}", run.admission.folder, agree, f"tested-{digest[:16]}-")
    masked = PartMasks(party, ask.members, file.limits.min_clients, *about).added(None, found)
    if not isinstance(masked, Masked):  # of a run of this silo alone
        return Reported(shown=found)
    return Reported(masked, found if file.limits.own_figures else None)


def _measure(run: Agreed, models: list[Weights], ask: Ask, *, once: bool) -> SiloReport:
    """Measure models, of which the first `ask.results` are the run's and not a client's own."""
    worker, setup, clients = run.worker, run.worker.setup, run.terms.clients
    build = Built(setup.method, setup.build, len(clients))
    counting = reports.counting(run.terms.labels, run.terms.outputs, len(models), last=ask.last)
    answers = []
    for i, model in enumerate(models):
        bench = worker.bench("evaluation")
        if setup.method.changes_network and i < ask.results:
            bench.network = Network(adapted(build(), model), setup.hardware.device)
        check(model, bench.network, whole=True)
        bench.network.load(model)
        answers.append(fitting.evaluate(bench, run.client.test, full=counting.full))
    limits = run.file.limits
    care = Care(limits.min_samples, limits.min_positives, coarse=not once)
    personal = len(models) > ask.results
    mine = ask.results + clients.index(run.file.name) if personal and run.file.name in clients else 0
    return reports.report(counting, answers, mine, care, run.client.train.y)
