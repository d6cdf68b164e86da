"""Admit runs at a silo: keep the terms under which each began, and limit its requests.

Before anything else of a run is stored or answered, the folder of its id is bound to the terms of the first request.
The same id under other terms is another run, and is refused.
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
"""file in a run's folder with the terms to which the run is bound"""
_COUNT = "requests"
_DATA = "data"


class Admission:
    """Admission of one run at a silo, with the run's folder."""

    def __init__(self, file: SiloFile, terms: Agreement) -> None:
        self._name = file.name
        self._limits = file.limits
        self._runs = file.folder / "runs"
        self._terms = terms
        self.folder = self._runs / terms.run

    def bind(self) -> None:
        """Bind the run to its terms on the disk at first contact; later, refuse any others."""
        if not (self.folder / TERMS).exists():
            self._make()
            write_once(self.folder / TERMS, self._terms.text().encode())
        self.check()

    def check(self) -> None:
        """Refuse terms that differ from those to which the run is bound, if it is; store nothing."""
        file = self.folder / TERMS
        if file.exists() and file.read_bytes() != self._terms.text().encode():
            raise UserError(f"run {self._terms.run} has other terms at {self._name} ({file}): start a new run")

    def check_data(self, fingerprint: str) -> None:
        """Refuse to continue with other samples or labels than those with which the run began here.

        Args:
            fingerprint: fingerprint of the silo's data, see `custody.fingerprint`.
        """
        file = self.folder / _DATA
        if write_once(file, fingerprint.encode()) != fingerprint.encode():
            raise UserError(
                f"{self._name} holds other samples or labels than when run {self._terms.run} began ({file}): put them "
                "back, or start a new run"
            )

    def count(self) -> None:
        """Count a request of the run."""
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
        """Note that the server reads a result, before it does. It may read one result for each step and task."""
        step, _, task = key.split("-", 2)
        if write_once(self.folder / f"shown-{step}-{task}", digest.encode()) != digest.encode():
            raise UserError(f"{self._name} has shown the server another result of run {self._terms.run}: refused")

    def check_disk(self) -> None:
        """Refuse to store more than the silo allows."""
        for what, folder, limit in (("run_bytes", self.folder, "this run"), ("disk_bytes", self._runs, "all runs")):
            used, most = sum(_sizes(folder)), getattr(self._limits, what)
            if used >= most:
                raise UserError(
                    f"{self._name} stores {used} bytes of {limit}, {most} at most (limits.{what} in its silo.toml): "
                    f"remove old folders in {self._runs}, or raise it"
                )

    def _make(self) -> None:
        """Make the folder; the age of `lock` is its age."""
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
