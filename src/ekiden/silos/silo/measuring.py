"""Measures models on a silo's test samples, at the steps and of the models that the plan names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ekiden.clinic.counting import Care
from ekiden.clinic.noisy import Exact, Noisy
from ekiden.clinic.subgroups import divisions
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import Damaged, marked, verified, write, write_once
from ekiden.core.base.sums import Masked
from ekiden.core.engine import wire
from ekiden.core.engine.evaluation import Built
from ekiden.core.engine.setup import initial_weights, model_bytes
from ekiden.core.engine.wire import SERVER
from ekiden.core.tasks import Scores
from ekiden.core.training import fit as fitting
from ekiden.core.training.network import Network, adapted
from ekiden.core.training.private.noise import Draw
from ekiden.core.training.weights import Weights
from ekiden.silos.silo import budget, policy, told
from ekiden.silos.silo.participation import Agreed
from ekiden.silos.silo.tasks import masks_of
from ekiden.silos.trust import custody
from ekiden.silos.trust import report as reports
from ekiden.silos.trust.custody import Tally
from ekiden.silos.trust.parcel import Answer, Ask, check, pack, unpack
from ekiden.silos.trust.report import Reported, SiloReport


@dataclass(frozen=True)
class Measurement:
    """Models that a silo is asked to measure."""

    run: Agreed
    ask: Ask
    # of which the first `ask.results` are the run's, not a client's own
    models: list[Weights]

    @cached_property
    def digests(self) -> tuple[str, ...]:
        """Digest of each model."""
        return tuple(custody.digest(wire.chunks(model)) for model in self.models)

    @cached_property
    def digest(self) -> str:
        """Digest of what is asked."""
        about = (self.ask.results, [*self.digests], self.ends)
        return custody.digest([repr(about).encode()])

    @property
    def ends(self) -> bool:
        """Whether the run ends with these models."""
        return self.run.terms.ends_with(self.ask.step)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.admission.folder


def check_numbers(m: Measurement) -> None:
    """Refuse another number of models than a run has: the report would not fit."""
    clients = len(m.run.terms.clients)
    if not custody.is_number_of_models(len(m.models), m.ask.results, clients):
        raise UserError(f"{len(m.models)} models to measure in a run of {clients} silos: refused")


def check_room(m: Measurement) -> None:
    """Refuse a result with a network for each client that is larger than a message, before it is
    built.
    """
    setup = m.run.worker.setup
    clients = len(m.run.terms.clients)
    if setup.method.changes_network and clients * model_bytes(setup) > m.run.most_bytes:
        raise UserError(
            f"a result of {clients} clients may be larger than {m.run.file.name} takes: refused"
        )


def check_step(m: Measurement) -> None:
    """Refuse steps that the plan does not name, and a part of the silos: each report tells more."""
    policy.check_measured(m.run.file, m.run.terms, m.ask)


def check_named(m: Measurement) -> None:
    """Refuse another model than the one that the operator approved, in a run that only measures."""
    named = m.run.terms.measures
    if named and (m.digests != (named,) or m.ask.results != 1):
        raise UserError("silos measure only the model that the terms name: refused")


def check_result(m: Measurement) -> None:
    """Refuse a made-up model where silos alone read models: their owners sign which are results."""
    terms = m.run.terms
    plan = m.run.plan_without(m.ask.absent)
    if plan is not None and not terms.measures:
        initial = custody.digest(wire.chunks(initial_weights(m.run.worker.setup)))
        policy.check_result(terms, plan, initial, m.digests, m.ask.records)


def check_once(m: Measurement) -> None:
    """Refuse other models after a step than those that were measured then: each costs noise."""
    digest = m.digest.encode()
    first = write_once(m.folder / f"measured-after-{m.ask.step}", digest)
    if first != digest:
        raise UserError(
            f"{m.run.file.name} has measured the models after step {m.ask.step} of this run, and "
            "measures no others: refused"
        )


CHECKS: tuple[Callable[[Measurement], None], ...] = (
    check_numbers,
    # builds the network, so numbers come first
    check_room,
    check_step,
    check_named,
    check_result,
    # writes down what is measured, so it comes last
    check_once,
)


def evaluate(run: Agreed, ask: Ask, body: memoryview) -> bytes:
    """Answer how each model does on this silo's test samples."""
    run.check_length(body)
    data = run.sealer.open(body, ask.lock, SERVER, "models", ask.step).data
    asked = Measurement(run, ask, wire.decode(data, list[Weights]))
    for refuse in CHECKS:
        refuse(asked)
    found = _report(asked)
    run.note(f", after step {ask.step}: models measured: {len(asked.models)}")
    given = wire.encode(_given(asked, found))
    place = (run.terms.run, run.terms.digest, run.file.name, ask.step, run.data)
    tally = Tally(*place, ask.results, asked.digests, custody.text_of(given))
    return pack(Answer(run.file.name, record=run.signed(tally)), (given,))


def _report(m: Measurement) -> SiloReport:
    """Return what is reported about exactly these models, the same again after a crash."""
    file = m.folder / f"measured-{m.digest[:32]}.parcel"
    if not file.exists():
        found = _measure(m)
        write(file, marked([pack(found)]))
        return found
    try:
        return unpack(verified(file.read_bytes()), SiloReport)[0]
    except (OSError, Damaged, wire.WireError) as error:
        raise UserError(
            f"{file} is damaged ({error}): the run cannot measure more models here"
        ) from None


def _given(m: Measurement, found: SiloReport) -> Reported:
    """Return a report as it leaves the silo: under masks."""
    run = m.run
    dp = m.run.terms.measured_dp
    masks = masks_of(run, m.ask, f"measured-{m.digest[:32]}", dp)
    members = [member.name for member in m.ask.members]
    for one in policy.measured_by(run.file, run.terms, run.client, members):
        told.note(run.file.folder, one)
    masked = masks.added(None, found, None)
    # the run is of this silo alone
    if not isinstance(masked, Masked):
        return Reported(shown=found)
    shows = run.file.limits.own_figures and (dp is None or dp.honest == 1)
    return Reported(masked, found if shows else None)


def _measure(m: Measurement) -> SiloReport:
    """Measure the models."""
    run = m.run
    ask = m.ask
    setup = m.run.worker.setup
    clients = run.terms.clients
    samples = run.client.test
    if run.terms.validation:
        samples = run.client.val
    build = Built(setup.method, setup.build, len(clients))
    telling = reports.telling(run.terms, len(m.models), last=m.ends)
    answers: list[Scores] = []
    for i, model in enumerate(m.models):
        bench = run.worker.bench("evaluation")
        if setup.method.changes_network and i < ask.results:
            bench.network = Network(adapted(build(), model), setup.hardware.device)
        check(model, bench.network, whole=True)
        bench.network.load(model)
        answers.append(fitting.evaluate(bench, samples, full=telling.counting.full))
    mine = 0
    if len(m.models) > ask.results and run.file.name in clients:
        mine = ask.results + clients.index(run.file.name)
    parts = list(answers)
    inputs = setup.dataset.inputs
    for one in divisions(run.terms.by):
        places = one.places(samples.x, inputs)
        for group in range(len(one.names(inputs))):
            parts.append(answers[0].at((places == group).nonzero().flatten()))
    count = _counted(m, telling)
    return reports.report(telling, torch.stack([*map(count, parts)]), mine, len(clients))


def _counted(m: Measurement, telling: Exact) -> Callable[[Scores], Tensor]:
    """Return what counts answers, with noise once it is written down that the run tells something."""
    file = m.run.file
    terms = m.run.terms
    limits = file.limits
    if isinstance(telling, Noisy):
        draw = Draw(budget.measured_noise(file, terms, m.folder, m.digest))
        return lambda scores: telling.release(scores, draw, limits.min_samples)
    care = Care(limits.min_samples, limits.min_positives)
    train = None if file.data.part else m.run.client.train.y
    return lambda scores: telling.counting.count(scores, care, train)
