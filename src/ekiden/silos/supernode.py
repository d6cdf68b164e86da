"""Run the SuperNode of a silo, and start it again when it ends."""

import math
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import leave_no_core, lock_file, locked
from ekiden.silos.commands import flower_programs
from ekiden.silos.logs import Log
from ekiden.silos.metrics import Watched, served
from ekiden.silos.security import certificate_end, certificate_state
from ekiden.silos.silo import approval, budget, connection, participation
from ekiden.silos.silo.approval import PLANS
from ekiden.silos.silo.connection import STARTED
from ekiden.silos.silo.participation import folders, sizes
from ekiden.silos.silo.shelf import drop_old_runs
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.status_page import StatusTable, page

# seconds until a SuperNode that ended is started again; doubled each time
_RESTART = 10.0
_LONGEST = 600.0
# seconds after which it counts as having worked
_LASTING = 60.0
_DAY = 86400.0
_HOUR = 3600.0
# time in seconds for which a silo that cannot take part stays connected to say why
_TELL = 60.0


def command_of(file: SiloFile) -> list[str]:
    """Return the command that connects a silo."""
    command = ["flower-supernode", "--superlink", file.link.address]
    command += ["--auth-supernode-private-key", str(file.key)]
    if file.link.certificate:
        command += ["--root-certificates", str(file.beside(file.link.certificate))]
    with socket.socket() as probe:
        # a free port
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    return [*command, "--port", port, "--node-config", f'silo="{file.path}"']


@contextmanager
def alone(file: SiloFile) -> Iterator[None]:
    """Prevent a second `ekiden silo start` on this machine from serving the same silo, or using the
    same key.
    """
    keep_private(file)
    from filelock import Timeout

    started = file.folder / STARTED
    key = file.key
    with ExitStack() as held:
        for path, lock in ((started, started), (key, lock_file(key))):
            try:
                held.enter_context(locked(lock, wait=False))
            except Timeout:
                raise UserError(
                    f"another `ekiden silo start` is using {path}: stop that one first, or give "
                    "each silo its own key"
                ) from None
        yield


def keep_private(file: SiloFile) -> None:
    """Let only the user of this process read the silo's folder, and what this process and its
    children write.
    """
    os.umask(0o077)
    leave_no_core()
    file.folder.mkdir(parents=True, exist_ok=True)
    for found in (file.folder, *file.folder.rglob("*")):
        if not found.is_symlink():
            found.chmod(found.stat().st_mode & 0o700)


def tell(file: SiloFile, log: Log, why: str) -> None:
    """Let a silo that cannot take part tell the coordinator why, then end; do nothing if no SuperLink is there."""
    if certificate_end(file.link.address) is None:
        return
    log(f"{file.name} cannot take part: {why}")
    log(f"the coordinator is told for {_TELL:.0f} s; Ctrl-C ends that")
    start(file, log, seconds=_TELL)


def start(file: SiloFile, log: Log, *, seconds: float | None = None) -> None:
    """Connect a silo and serve until stopped (Ctrl-C or SIGTERM), or for some seconds.

    A SuperNode that ends is started again.
    """
    from ekiden.silos import client_app

    command = command_of(file)
    with flower_programs(file.folder, client_app.jobs(file), log) as folder:
        watched = Monitored(file)
        about = Watched("ekiden_silo", watched.counts, watched.health, watched.page)
        with served(file.metrics, about) as port:
            if port:
                log(f"health and metrics, and a page: http://{file.metrics.host}:{port}/")
            drop = partial(drop_old_runs, file.folder / "runs")
            _keep_running([str(folder / command[0]), *command[1:]], log, seconds, watched, drop)


class Monitored:
    """What a monitor may know about a silo."""

    def __init__(self, file: SiloFile) -> None:
        self._file = file
        self.starts = 0
        self._certificate = ""
        self._asked = -math.inf

    def health(self) -> tuple[bool, str]:
        """Return whether the silo is connected, and in words since when, or why not, and for how
        long its SuperLink's certificate is valid.
        """
        # a monitor asks each few seconds
        if time.monotonic() - self._asked > _HOUR:
            end = certificate_end(self._file.link.address)
            _, self._certificate = certificate_state(end)
            self._asked = time.monotonic()
        good, words = connection.health(self._file.folder)
        return good, "; ".join(filter(None, (words, self._certificate)))

    def page(self) -> str:
        """Return the operator's page."""
        return page(f"Silo {self._file.name}", self.health(), self._sections())

    def _sections(self) -> Iterator[StatusTable]:
        file = self._file
        plans = [
            (digest, _lines(approval.told(file, one))) for digest, one in approval.waiting(file)
        ]
        do = f"Read: ekiden silo approve {file.path}"
        yield StatusTable("Plans that wait", ("plan", do), plans, "No plan waits for approval.")
        most = file.limits.evaluation_epsilon
        spent = [
            (f"epsilon of measuring {name}".strip(), f"{budget.told(file, name):.3g} of {most:g}")
            for name in file.named or ("",)
        ]
        if file.limits.epsilon is not None:
            spent.append(("epsilon", f"{budget.promised(file):.3g} of {file.limits.epsilon:g}"))
        yield StatusTable("Spent, over all runs", ("what", "how much"), spent, "")
        lines = [line.split(" ", 1) for line in participation.last_lines(file.folder)]
        told = "What was asked, what was told and to whom (requests.log)"
        yield StatusTable(told, ("time (UTC)", "what"), lines[::-1], "Nothing was asked yet.")

    def counts(self) -> Mapping[str, float]:
        """Return counts and sizes."""
        runs = self._file.folder / "runs"
        return {
            "supernode_starts_total": self.starts,
            "connection_changed_seconds": connection.read(self._file.folder).since,
            "runs": sum(1 for _ in folders(runs)),
            "disk_bytes": sum(sizes(runs)),
            "plans_waiting": sum(1 for _ in (self._file.folder / PLANS).glob("*.json")),
        }


def _lines(texts: Mapping[str, str]) -> str:
    return "\n".join(f"{name}: {text}" for name, text in texts.items())


def _keep_running(
    command: list[str],
    log: Log,
    seconds: float | None,
    watched: Monitored,
    drop: Callable[[], None],
) -> None:
    pause = _RESTART
    while True:
        began = time.monotonic()
        with subprocess.Popen(command) as process:
            watched.starts += 1
            try:
                code = None
                while code is None:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(_DAY if seconds is None else seconds)
                    if seconds is not None:
                        process.terminate()
                        return
                    drop()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
        if time.monotonic() - began > _LASTING:
            pause = _RESTART
        # After a crash, the SuperLink admits a node again only when its last heartbeat is old enough.
        log(f"{watched.health()[1]}; trying again in {pause:.0f} s", "WARNING")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
