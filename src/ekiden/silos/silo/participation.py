"""A run that a silo agreed to take part in: its terms, its limits, its log, and all that its tasks
need here.
"""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from ekiden.core.base.errors import UserError, visible
from ekiden.core.base.files import lock_file, locked, write, write_once
from ekiden.core.data.samples import ClientData, FederatedData
from ekiden.core.engine.drive import Outline
from ekiden.core.engine.setup import check_model, resolved_hardware
from ekiden.core.engine.worker import Worker
from ekiden.core.training.frozen import Copies
from ekiden.core.training.network import blank
from ekiden.silos.logs import numbers_in
from ekiden.silos.silo import policy, told
from ekiden.silos.silo.silo_file import Held, SiloFile
from ekiden.silos.trust import custody, keys, sealing
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.custody import Entry
from ekiden.silos.trust.parcel import Absence
from ekiden.silos.trust.sealing import Party

# file in the silo's folder
FILE = "requests.log"
_SIZES = "requests.json"
_RUN = 2_000_000
_STRANGERS = 1_000_000
# bytes of a line
_LONGEST = 4096
log = logging.getLogger("ekiden")
# file in a run's folder with the terms to which the run is bound
TERMS = "terms.json"
_COUNT = "requests"
_DATA = "data"
# Largest size of arguments, in largest models: a gossip task gets its neighbours' models
_ARGUMENT_BYTES = 64


def log_request(folder: Path, line: str, run: str = "") -> None:
    """Append a line with the time; text from other parties cannot break the line."""
    file = folder / FILE
    now = datetime.now(UTC)
    safe = visible(f"{now:%Y-%m-%dT%H:%M:%SZ} {line}")[: _LONGEST // 4]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(lock_file(file)):
            today = f"{now:%Y-%m-%d}"
            peer = today
            most = _STRANGERS
            who = "requests of no run today"
            if run:
                peer = run
                most = _RUN
                who = f"run {run}"
            # bytes that each run, and strangers today, have written
            written = numbers_in(folder / _SIZES)
            size = written.get(peer, 0) + len(safe.encode()) + 1
            if size > most:
                if written.get(peer, 0) > most:
                    return
                safe = f"{now:%Y-%m-%dT%H:%M:%SZ} {who}: too many lines, further ones are left out"
                size = most + 1
            with open(
                os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8"
            ) as out:
                out.write(f"{safe}\n")
            days = {
                name: size for name, size in written.items() if "-" not in name or name == today
            }
            write(folder / _SIZES, [json.dumps({**days, peer: size}).encode()], sync=False)
    # a full disk must not keep the silo from reporting it
    except OSError as error:
        log.warning("cannot write %s: %s", file, error.strerror)


def last_lines(folder: Path) -> list[str]:
    """Return the last lines of the log; the oldest first."""
    try:
        lines = (folder / FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    return lines[-200:]


@dataclass(frozen=True)
class Admission:
    """Admission of one run at a silo, with the run's folder."""

    file: SiloFile
    terms: Agreement

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.file.folder / "runs" / self.terms.run

    def bind(self) -> None:
        """Bind the run to its terms on the disk at first contact; later, refuse any others."""
        if not self.bound:
            self.check_disk()
            self.folder.mkdir(parents=True, exist_ok=True)
            # its age is the age of the folder
            (self.folder / "lock").touch()
            write_once(self.folder / TERMS, self.terms.text().encode())
        self.check()

    @property
    def bound(self) -> bool:
        """Whether the run is bound to terms. A folder alone says nothing: all checks come before
        this.
        """
        return (self.folder / TERMS).exists()

    def check(self) -> None:
        """Refuse terms that differ from those to which the run is bound, if it is; store
        nothing.
        """
        file = self.folder / TERMS
        if self.bound and file.read_bytes() != self.terms.text().encode():
            raise UserError(
                f"run {self.terms.run} has other terms at {self.file.name} ({file}): start a new run"
            )

    def check_data(self, fingerprint: str) -> None:
        """Refuse to continue with other samples or labels than those with which the run began
        here.
        """
        file = self.folder / _DATA
        if write_once(file, fingerprint.encode()) != fingerprint.encode():
            raise UserError(
                f"{self.file.name} holds other samples or labels than when run {self.terms.run} "
                f"began ({file}): put them back, or start a new run"
            )

    def count(self) -> None:
        """Count a request of the run."""
        file = self.folder / _COUNT
        most = self.file.limits.requests
        try:
            before = int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = 0
        if before >= most:
            raise UserError(
                f"run {self.terms.run} has sent {before} requests, {self.file.name} answers {most} "
                "of a run (limits.requests in its silo.toml)"
            )
        write(file, [str(before + 1).encode()], sync=False)

    def show(self, key: str, digest: str) -> None:
        """Note that the server reads a result, before it does. It may read one result for each step
        and task.
        """
        step, _, task = key.split("-", 2)
        if write_once(self.folder / f"shown-{step}-{task}", digest.encode()) != digest.encode():
            raise UserError(
                f"{self.file.name} has shown the server another result of run {self.terms.run}: "
                "refused"
            )

    def check_disk(self) -> None:
        """Refuse to store more than the silo allows."""
        used = sum(sizes(self.folder.parent))
        most = self.file.limits.disk_bytes
        if used >= most:
            raise UserError(
                f"{self.file.name} stores {used} bytes of all runs, {most} at most (limits.disk_bytes "
                f"in its silo.toml): remove old folders in {self.folder.parent}, or raise it"
            )


def folders(runs: Path) -> Iterator[Path]:
    """Return the folders of runs."""
    return (path for path in runs.glob("*") if re.fullmatch("[0-9a-f]{16}", path.name))


def sizes(folder: Path) -> Iterator[int]:
    """Yield the sizes of all files in a folder."""
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield path.stat().st_size


@dataclass(frozen=True)
class Agreed:
    """A run that the silo takes part in."""

    # the silo's own file
    file: SiloFile
    # the silo's samples
    client: ClientData
    # terms of the run
    terms: Agreement
    # executes the run's tasks
    worker: Worker
    # opens and seals for the silo
    sealer: Party
    plan: (
        Outline | None
    )  # what the method will ask for if no client is missing; None if that is not known beforehand
    # limits what the run may ask for
    admission: Admission
    # fingerprint of the silo's samples, the same as when the run began
    data: str

    def plan_without(self, absent: Sequence[Absence]) -> Outline | None:
        """Return what the method asks for without the missing clients."""
        if self.plan is None or not absent:
            return self.plan
        return policy.plan_of(self.file, self.terms, self.worker.setup, absent)

    def note(self, line: str) -> None:
        """Write a line to the silo's log of requests."""
        log_request(self.file.folder, f"run {self.terms.run}{line}", self.terms.run)

    def signed(self, entry: Entry) -> str:
        """Return an entry of the chain of custody with the silo's signature."""
        return custody.signed(entry, partial(sign, self.file))

    @property
    def most_bytes(self) -> int:
        """Largest number of bytes that a message may have."""
        return _ARGUMENT_BYTES * self.file.limits.model_bytes

    def check_length(self, body: memoryview) -> None:
        """Refuse a message that is larger than the silo takes."""
        if len(body) > self.most_bytes:
            raise UserError(
                f"a message of {len(body)} bytes: {self.file.name} takes {self.most_bytes} (64 "
                "largest models)"
            )


def sign(file: SiloFile, kind: str, payload: bytes) -> str:
    """Sign with a silo's key."""
    return keys.sign(file.key, kind, payload)


def take_part(file: SiloFile, held: Held, terms: Agreement) -> Agreed:
    """Prepare to execute tasks of this run. Nothing is stored before all is checked."""
    dataset, client = held
    admission = Admission(file, terms)
    policy.check_data(file, terms, held)
    dataset = replace(
        dataset, mean=terms.mean, std=terms.std, augment=terms.augment, task=terms.labels
    )
    setup = terms.setup(dataset, file.hardware, file.pretrained_folder)
    empty = policy.check_size(file, setup)
    first = not admission.bound
    build = setup.build
    # a message may need several
    setup = replace(setup, build=Copies(build))
    policy.check_values(file, terms, setup)
    plan = policy.plan_of(file, terms, setup)
    # the values are checked the first time; tasks load their own values into a blank one
    network = setup.build() if first or terms.has_values else blank(build, empty)
    setup = replace(setup, hardware=resolved_hardware(file.hardware, 1, lambda: network))

    def watch(name: str, epoch: int, epochs: int) -> None:
        log.info("%s: epoch %d/%d", name, epoch, epochs)

    worker = Worker(setup, {file.name: client}, watch, file.limits.epochs, network)
    if first:
        check_model(worker, FederatedData(dataset, (client,)))
        policy.check_span(file, terms, client, network)
        measured = policy.measured_by(file, terms, client, terms.clients)
        for one in (*policy.told_by(file, terms, client), *measured):
            told.note(file.folder, one, write_down=False)
    admission.bind()
    file.meet(terms.clients)
    data = custody.fingerprint(client, sealing.kept_secret(admission.folder, "fingerprint"))
    admission.check_data(data)
    if first:
        began = f"run {terms.run} begins: {terms.method} among {', '.join(terms.clients)}"
        log_request(file.folder, began, terms.run)
        if revision := terms.revision:
            words = f"run {terms.run} replaces {revision.told()}"
            before = admission.folder.with_name(revision.run)
            if revision.change == "without" and before.exists():
                words += f"; {before} still holds what {revision.client} gave: remove it"
            log_request(file.folder, words, terms.run)
    private = sealing.kept_private(admission.folder)
    sealer = Party(file.name, terms.run, terms.digest, private, terms.silos, partial(sign, file))
    return Agreed(file, client, terms, worker, sealer, plan, admission, data)
