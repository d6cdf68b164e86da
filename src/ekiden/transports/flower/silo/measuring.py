"""Measure models on a silo's own test samples: what it reports, and for how many models."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.base.files import Damaged, marked, verified, write
from ekiden.data.tasks import Scores
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
from ekiden.transports.flower.trust import custody
from ekiden.transports.flower.trust.contents import check
from ekiden.transports.flower.trust.custody import Tally
from ekiden.transports.flower.trust.parcel import Answer, Ask, Count, pack, unpack

MOST = 10.0
"""largest loss of a sample that counts in the mean"""


@dataclass(frozen=True)
class _Answer:
    counts: tuple[Count, ...]


def coarse(scores: Scores, least: int) -> Count:
    """Return what is reported about a model: the number of right answers, and a coarse mean loss.

    One sample moves this mean loss by one step at most. A sample with several labels (labels, pixels, tokens) counts
    with the share of its right answers; the sum is rounded to whole samples. Samples without labels that count are left
    out. No sample counts for more than 10 in the mean loss.

    Args:
        scores: scores of the test samples.
        least: smallest number of samples about which anything is reported.
    """
    task = scores.task
    units = task.units(scores.y) if len(scores) else None
    if units is not None:
        scores = scores.at((units > 0).nonzero().flatten())
    samples = len(scores)
    if samples < max(least, 1):
        return Count(0, 0.0, 0)
    mean = float(scores.loss.double().clamp(max=MOST).mean())
    found = task.right(scores.answers, scores.y)
    right = 0 if found is None else round(float(found.double().sum()))
    return Count(right, mean if math.isnan(mean) else _rounded(mean, samples) * samples, samples)


def _rounded(mean: float, samples: int) -> float:
    """Round to two significant digits, or to steps of 10/n, rounded up to one digit, if these are larger."""
    share = MOST / samples
    digit = 10.0 ** math.floor(math.log10(share))
    step = max(math.ceil(share / digit) * digit, 10.0 ** (math.floor(math.log10(mean)) - 1) if mean > 0 else 0.0)
    return round(round(mean / step) * step, 6)


class Measured:
    """The answers of one run, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def models(self) -> int:
        """Number of models measured so far."""
        return sum(len(_read(path)) for path in self._folder.glob("measured-*.parcel"))

    def find(self, digest: str) -> tuple[Count, ...] | None:
        """Return what was reported about exactly these models before."""
        path = self._file(digest)
        return _read(path) if path.exists() else None

    def put(self, digest: str, counts: Sequence[Count]) -> None:
        """Store an answer before it is sent."""
        write(self._file(digest), marked([pack(_Answer(tuple(counts)))]))

    def _file(self, digest: str) -> Path:
        return self._folder / f"measured-{digest[:32]}.parcel"


def _read(path: Path) -> tuple[Count, ...]:
    try:
        return unpack(verified(path.read_bytes()), _Answer)[0].counts
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
    if changed and clients * model_bytes(setup) > run.most_bytes:  # before it is built: it has a network per client
        raise UserError(f"a result of {clients} clients may be larger than {run.file.name} takes: refused")
    plan = run.plan_without(ask.absent)
    once = run.terms.sealed and plan is not None
    digests = [custody.digest(wire.chunks(model)) for model in models]
    if once and plan is not None:
        initial = custody.digest(wire.chunks(initial_weights(setup)))
        policy.check_result(run.terms, plan, initial, digests, ask.records)
    found, digest = Measured(run.admission.folder), custody.digest([repr((ask.results, digests)).encode()])
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
        counts.append(coarse(scores, run.file.limits.min_samples))
    return tuple(counts)
