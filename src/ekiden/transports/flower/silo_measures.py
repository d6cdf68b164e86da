"""Measure models on a silo's own test samples."""

from ekiden.base.errors import UserError
from ekiden.engine import wire
from ekiden.engine.evaluation import Built
from ekiden.engine.networks import initial_weights, model_bytes
from ekiden.engine.wire import SERVER
from ekiden.training import fit as fitting
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights
from ekiden.transports.flower import custody, measured, policy
from ekiden.transports.flower.contents import check
from ekiden.transports.flower.custody import Tally
from ekiden.transports.flower.parcel import Answer, Ask, Count, pack
from ekiden.transports.flower.taking_part import Agreed


def evaluate(run: Agreed, ask: Ask, body: memoryview) -> bytes:
    """Answer how each model does on this silo's test samples; if only silos may read models, only for the result."""
    run.check_length(body)
    models = wire.decode(run.sealer.open(body, ask.lock, SERVER, "models", ask.step).data, list[Weights])
    setup = run.worker.setup
    changed, clients = setup.method.changes_network, len(run.terms.clients)
    if ask.clients != clients:
        raise UserError(f"a result of {ask.clients} clients in a run of {clients}: refused")
    if changed and clients * model_bytes(setup) > run.most_bytes:  # before it is built: it has a network per client
        raise UserError(f"a result of {clients} clients may be larger than {run.file.name} takes: refused")
    plan = run.plan_without(ask.absent)
    once = run.terms.sealed and plan is not None
    digests = [custody.digest(wire.chunks(model)) for model in models]
    if once and plan is not None:
        initial = custody.digest(wire.chunks(initial_weights(setup)))
        policy.check_result(run.terms, plan, initial, digests, ask.records)
    found, digest = measured.Measured(run.admission.folder), custody.digest([repr((ask.results, digests)).encode()])
    counts = found.find(digest)
    if counts is None:
        policy.check_measured(run.file, found.models, len(models), once=once)
        counts = _measure(run, models, ask.results)
        found.put(digest, counts)
    said = f"models measured: {len(models)}, {found.models} of this run so far"
    run.note(f", after step {ask.step}: {said}")
    record = ""
    if run.terms.keys:
        place, result = (run.file.name, ask.step, ask.results), (tuple(digests), tuple(counts))
        tally = Tally(run.terms.run, run.terms.digest, *place, *result, run.data)
        record = custody.measured(tally, run.sign).line()
    return pack(Answer(run.file.name, record=record), wire.chunks(list(counts)))


def _measure(run: Agreed, models: list[Weights], results: int) -> tuple[Count, ...]:
    """Measure models, of which the first `results` are the run's and not a client's own."""
    worker, setup = run.worker, run.worker.setup
    build = Built(setup.method, setup.build, len(run.terms.clients))
    counts = []
    for i, model in enumerate(models):
        bench = worker.bench("evaluation")
        if setup.method.changes_network and i < results:
            bench.network = Network(adapted(build(), model), setup.hardware.device)
        check(model, bench.network, whole=True)
        bench.network.load(model)
        scores = fitting.evaluate(bench, run.client.test)
        counts.append(measured.coarse(scores, run.file.limits.min_samples))
    return tuple(counts)
