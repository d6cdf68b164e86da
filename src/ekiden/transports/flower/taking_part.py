"""A run that a silo agreed to take part in, and all that its tasks need here."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.data.samples import ClientData, FederatedData, Subset
from ekiden.data.spelling import merging
from ekiden.data.targets import in_order
from ekiden.data.tasks import Classification
from ekiden.engine.drive import Outline
from ekiden.engine.setup import check_model, resolved_hardware
from ekiden.engine.worker import Worker
from ekiden.training.frozen import Copies
from ekiden.training.network import blank
from ekiden.transports.flower import custody, keys, policy, request_log, sealing
from ekiden.transports.flower.admission import Admission
from ekiden.transports.flower.agreement import Agreement, Revision
from ekiden.transports.flower.contents import Absence
from ekiden.transports.flower.sealing import Party, Plain, Sealer
from ekiden.transports.flower.silo_file import Held, SiloFile

log = logging.getLogger("ekiden")
_ARGUMENT_BYTES = 64
"""Largest size of arguments, in largest models: a gossip task gets its neighbours' models."""
_SEALING_KEY = "sealing.key"


@dataclass(frozen=True)
class Agreed:
    """A run that the silo takes part in.

    Attributes:
        file: the silo's own file.
        client: the silo's samples.
        terms: terms of the run.
        worker: executes the run's tasks.
        sealer: opens and seals for the silo.
        plan: what the method will ask for if no client is missing; None if that is not known beforehand.
        admission: limits what the run may ask for.
        data: fingerprint of the silo's samples, the same as when the run began.
    """

    file: SiloFile
    client: ClientData
    terms: Agreement
    worker: Worker
    sealer: Sealer
    plan: Outline | None
    admission: Admission
    data: str

    def plan_without(self, absent: Sequence[Absence]) -> Outline | None:
        """Return what the method asks for without the missing clients."""
        if self.plan is None or not absent:
            return self.plan
        return policy.plan_of(self.file, self.terms, self.worker.setup, absent)

    def note(self, line: str) -> None:
        """Write a line to the silo's log of requests."""
        request_log.note(self.file.folder, f"run {self.terms.run}{line}", self.terms.run)

    def sign(self, text: bytes) -> str:
        """Sign with the silo's key."""
        return sign(self.file, text)

    @property
    def most_bytes(self) -> int:
        """Largest number of bytes that a message may have."""
        return _ARGUMENT_BYTES * self.file.limits.model_bytes

    def check_length(self, body: memoryview) -> None:
        """Refuse a message that is larger than the silo takes."""
        if len(body) > self.most_bytes:
            raise UserError(
                f"a message of {len(body)} bytes: {self.file.name} takes {self.most_bytes} (64 largest models)"
            )


def sign(file: SiloFile, text: bytes) -> str:
    """Sign with a silo's key."""
    return keys.sign(file.beside(file.link.key), text)


def take_part(file: SiloFile, held: Held, terms: Agreement) -> Agreed:
    """Prepare to execute tasks of this run. Nothing is stored before all is checked."""
    held = _spelled(held, terms)
    dataset, client = held
    admission = Admission(file, terms)
    policy.check_data(file, terms, held)
    dataset = replace(dataset, mean=terms.mean, std=terms.std, augment=terms.augment)
    setup = terms.setup(dataset, file.hardware, file.pretrained_folder)
    empty = policy.check_size(file, setup)
    first = not admission.folder.exists()
    module = None if first or terms.has_values else blank(setup.build, empty)  # the values are checked the first time
    setup = replace(setup, build=Copies(setup.build))  # a message may need several
    policy.check_values(file, terms, setup)
    plan = policy.plan_of(file, terms, setup)
    network = setup.build() if module is None else module  # tasks load their own values into it
    setup = replace(setup, hardware=resolved_hardware(file.hardware, 1, lambda: network))

    def watch(name: str, epoch: int, epochs: int) -> None:
        log.info("%s: epoch %d/%d", name, epoch, epochs)

    worker = Worker(setup, {file.name: client}, watch, file.limits.epochs, network)
    if first:
        check_model(worker, FederatedData(dataset, (client,)))
    admission.bind()
    data = custody.fingerprint(client, custody.kept_salt(admission.folder))
    admission.check_data(data)
    if first:
        began = f"run {terms.run} begins: {terms.method} among {', '.join(terms.clients)}"
        request_log.note(file.folder, began, terms.run)
        if revision := terms.revision:
            told = _told(revision, admission.folder.with_name(revision.run))
            request_log.note(file.folder, f"run {terms.run} {told}", terms.run)
    sealer: Sealer = Plain()
    if terms.sealed:
        private = sealing.kept_private(admission.folder / _SEALING_KEY)
        sealer = Party(file.name, terms.run, terms.digest, private, terms.silos, partial(sign, file))
    return Agreed(file, client, terms, worker, sealer, plan, admission, data)


def _spelled(held: Held, terms: Agreement) -> Held:
    """Return the silo's data with the names of classes that the run has, if its own differ in case or blanks only."""
    dataset, client = held
    if not terms.spelling or dataset.classes == terms.classes or not isinstance(dataset.task, Classification):
        return held
    own = {"": dict.fromkeys(dataset.classes, 1)}
    instead = merging(own, terms.classes) if terms.spelling == "merge" else {}
    names = tuple(instead.get(name, name) for name in dataset.classes)
    if not set(names) <= set(terms.classes):
        return held  # other classes, which are refused
    log.info("classes %s count as %s", ", ".join(dataset.classes), ", ".join(names))
    after = in_order(replace(dataset, classes=names), terms.classes)

    def moved(part: Subset) -> Subset:
        return Subset(after.train if part.samples is dataset.train else after.test, part.rows)

    return after, replace(client, train=moved(client.train), val=moved(client.val), test=moved(client.test))


def _told(revision: Revision, before: Path) -> str:
    """Return what the silo's owner should know about a run that replaces the one in the folder `before`."""
    left = revision.change == "without" and before.exists()
    more = f"; {before} still holds what {revision.client} gave: remove it" if left else ""
    return f"replaces {revision.told()}{more}"
