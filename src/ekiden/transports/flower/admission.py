"""Which runs a silo takes part in: under which terms each began, and how much it may still ask for.

The folder of a run id is bound to the terms that the id first came with, before anything else of the run is stored or
answered. The same id under other terms is another run, and is refused.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.base.files import write, write_once
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.silo_file import SiloFile

TERMS = "terms.json"
"""file in a run's folder that holds the terms that it is bound to"""
_COUNT = "requests"
_DATA = "data"


class Admission:
    """The folder of one run at a silo, from outside."""

    def __init__(self, file: SiloFile, terms: Agreement) -> None:
        self._name = file.name
        self._limits = file.limits
        self._runs = file.folder / "runs"
        self._terms = terms
        self.folder = self._runs / terms.run

    def bind(self) -> None:
        """Bind the run to its terms at first contact, on the disk; later, refuse any others.

        Raises:
            UserError: the run has other terms here, or the silo keeps too many runs.
        """
        if not (self.folder / TERMS).exists():
            self._make()
            write_once(self.folder / TERMS, self._terms.text().encode())
        self.check()

    def check(self) -> None:
        """Refuse other terms than those that the run is bound to, if it is; stores nothing.

        Raises:
            UserError: the run has other terms here.
        """
        file = self.folder / TERMS
        if file.exists() and file.read_bytes() != self._terms.text().encode():
            raise UserError(f"run {self._terms.run} has other terms at {self._name} ({file}): start a new run")

    def check_data(self, fingerprint: str) -> None:
        """Refuse to go on with other samples or labels than those that the run began with here.

        Args:
            fingerprint: of the silo's data, `custody.fingerprint`.

        Raises:
            UserError: they are others.
        """
        file = self.folder / _DATA
        if write_once(file, fingerprint.encode()) != fingerprint.encode():
            raise UserError(
                f"{self._name} holds other samples or labels than when run {self._terms.run} began ({file}): put them "
                "back, or start a new run"
            )

    def count(self) -> None:
        """Count a request of the run.

        Raises:
            UserError: it has sent more than the silo answers.
        """
        file, most = self.folder / _COUNT, self._limits.requests
        try:
            before = int(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = 0
        if before >= most:
            raise UserError(
                f"run {self._terms.run} has sent {before} requests, {self._name} answers {most} of a run "
                "(limits.requests in its silo.toml)"
            )
        write(file, [str(before + 1).encode()], sync=False)

    def show(self, key: str, digest: str) -> None:
        """Note that the server reads a result, before it does; it reads only one from this silo's step and task.

        Raises:
            UserError: it has read another one.
        """
        step, _, task = key.split("-", 2)
        if write_once(self.folder / f"shown-{step}-{task}", digest.encode()) != digest.encode():
            raise UserError(f"{self._name} has shown the server another result of run {self._terms.run}: refused")

    def check_disk(self) -> None:
        """Refuse to store more than the silo has place for.

        Raises:
            UserError: says which limit is reached.
        """
        for what, folder, limit in (("run_bytes", self.folder, "this run"), ("disk_bytes", self._runs, "all runs")):
            used, most = sum(_sizes(folder)), getattr(self._limits, what)
            if used >= most:
                raise UserError(
                    f"{self._name} stores {used} bytes of {limit}, {most} at most (limits.{what} in its silo.toml): "
                    f"remove old folders in {self._runs}, or raise it"
                )

    def _make(self) -> None:
        """Make the folder; `lock` says how old it is."""
        if not self.folder.exists():
            kept, most = sum(1 for _ in _folders(self._runs)), self._limits.runs
            if kept >= most:
                raise UserError(
                    f"{self._name} keeps {kept} runs, {most} at most (limits.runs in its silo.toml): remove old "
                    f"folders in {self._runs}, or raise it"
                )
            self.folder.mkdir(parents=True, exist_ok=True)
        elif any(self.folder.glob("*.parcel")):
            raise UserError(f"{self.folder} is of an older Ekiden and names no terms: remove it, and start a new run")
        (self.folder / "lock").touch()


def _folders(runs: Path) -> Iterator[Path]:
    return (path for path in runs.glob("*") if re.fullmatch("[0-9a-f]{16}", path.name))


def _sizes(folder: Path) -> Iterator[int]:
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                yield path.stat().st_size
