"""Run the SuperNode of a silo: print its command first, and start it again when it ends."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import Timeout

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import leave_no_core, lock_file, locked
from ekiden.silos.commands import QUIET, Say, Security, flower, interrupt, path, without_proxy
from ekiden.silos.metrics import LogCounts, served
from ekiden.silos.silo.approval import PLANS
from ekiden.silos.silo.participation import FILE as LOG
from ekiden.silos.silo.participation import folders, sizes
from ekiden.silos.silo.shelf import drop_old_runs
from ekiden.silos.silo.silo_file import SiloFile

_RESTART = 10.0
_DAY = 86400.0
_TELL = 60.0  # time in seconds for which a silo that cannot take part stays connected to say why
GUARD = "ekiden.silos.client_app"  # module that answers instead of `flwr-clientapp`
_LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Lets a process use memory pages of 2 MB if the system has them: copies of large models are
faster."""
_SHIM = """import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
try:
    link.connect({address!r})
except OSError:
    os.execv(sys.executable, [sys.executable, "-m", "ekiden.silos.client_app", "run", *sys.argv[1:]])
link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
while link.recv(1):
    pass
"""
"""Replaces `flwr-clientapp`: a Python program that starts at once, lets `guard` do the work, and
waits for its end."""
_SUPERNODE = """import os, sys, traceback
from flwr.supernode.cli import flower_supernode
code = 1
try:
    flower_supernode()
    code = 0
except SystemExit as stop:
    code = stop.code if isinstance(stop.code, int) else 1
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
"""
"""`flower-supernode` that ends with its main thread. After a broken connection, another of its
threads would keep the process alive; it would do nothing, and would never be started again."""


def command_of(file: SiloFile, security: Security) -> list[str]:
    """Return the command that connects a silo."""
    command = [flower("flower-supernode"), "--superlink", file.link.address, *security.flags()]
    if file.link.key:
        command += ["--auth-supernode-private-key", str(file.beside(file.link.key))]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # a free port
        port = file.link.port or probe.getsockname()[1]
    return [*command, "--port", str(port), "--node-config", f'silo="{file.path}"']


@contextmanager
def alone(file: SiloFile) -> Iterator[None]:
    """Prevent a second `ekiden silo start` on this machine from serving the same silo, or using the
    same key.
    """
    keep_private(file)
    started = file.folder / "started"
    wanted = [(started, started, "stop that one first")]
    if file.link.key:
        key = file.beside(file.link.key)
        wanted.append((key, lock_file(key), "stop that one first, or give each silo its own key"))
    with ExitStack() as held:
        for path, lock, remedy in wanted:
            try:
                held.enter_context(locked(lock, wait=False))
            except Timeout:
                raise UserError(f"another `ekiden silo start` is using {path}: {remedy}") from None
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


def tell(file: SiloFile, security: Security, say: Say, why: str) -> None:
    """Let a silo that cannot take part tell the coordinator why, then end; do nothing if no
    SuperLink is there.
    """
    host, _, port = file.link.address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except OSError:
        return
    say(f"{file.name} cannot take part: {why}")
    say(f"the coordinator is told for {_TELL:.0f} s; Ctrl-C ends that")
    start(file, security, say, seconds=_TELL)


def start(file: SiloFile, security: Security, say: Say, *, seconds: float | None = None) -> None:
    """Connect a silo and serve until stopped (Ctrl-C or SIGTERM), or for some seconds.

    A SuperNode that ends is started again.
    """
    command = command_of(file, security)
    say(f"$ {shlex.join(command)}")
    signal.signal(signal.SIGTERM, interrupt)
    with TemporaryDirectory(prefix="ekiden-") as scratch:
        address, stand_in, shim = (
            Path(scratch) / name for name in ("socket", "flwr-clientapp", "shim.py")
        )
        shim.write_text(_SHIM.format(address=str(address)), encoding="utf-8")
        script = (
            f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(shim))} "$@"\n'
        )
        stand_in.write_text(script, encoding="utf-8")
        stand_in.chmod(0o755)
        node = Path(scratch) / "supernode.py"
        node.write_text(_SUPERNODE, encoding="utf-8")
        environment = {
            **os.environ,
            **QUIET,
            **without_proxy(os.environ),
            "PATH": f"{scratch}{os.pathsep}{path()}",
            "FLWR_HOME": str(file.folder / "flower"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
        serve = [sys.executable, "-m", GUARD, "serve", str(address), str(file.path)]
        with subprocess.Popen(serve, env=_LARGE_PAGES | environment) as guard:
            try:
                old = partial(drop_old_runs, file.folder / "runs")
                watched = Monitored(file)
                with served(
                    file.metrics, "ekiden_silo", watched.counts, watched.is_running
                ) as port:
                    if port:
                        say(f"health and metrics: http://{file.metrics.host}:{port}/metrics")
                    _keep_running(
                        [sys.executable, str(node), *command[1:]],
                        environment,
                        say,
                        seconds,
                        old,
                        watched,
                    )
            finally:
                guard.terminate()


class Monitored:
    """What a monitor may know about a silo."""

    def __init__(self, file: SiloFile) -> None:
        self._file = file
        self._log = LogCounts(file.folder / LOG)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def is_running(self) -> bool:
        """Return whether the SuperNode runs."""
        return self.process is not None and self.process.poll() is None

    def counts(self) -> Mapping[str, float]:
        """Return counts and sizes."""
        runs = self._file.folder / "runs"
        return {
            "supernode_starts_total": self.starts,
            "runs": sum(1 for _ in folders(runs)),
            "disk_bytes": sum(sizes(runs)),
            "plans_waiting": sum(1 for _ in (self._file.folder / PLANS).glob("*.json")),
            **self._log(),
        }


def _keep_running(
    command: list[str],
    environment: Mapping[str, str],
    say: Say,
    seconds: float | None,
    daily: Callable[[], None],
    watched: Monitored,
) -> None:
    while True:
        began = time.monotonic()
        with subprocess.Popen(command, env=environment) as process:
            watched.process, watched.starts = process, watched.starts + 1
            try:
                code = None
                while code is None:
                    with suppress(subprocess.TimeoutExpired):
                        code = process.wait(_DAY if seconds is None else seconds)
                    if code is None and seconds is not None:
                        process.terminate()
                        return
                    daily()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
        if seconds is not None:
            return
        # After a crash, the SuperLink admits a node again only when its last heartbeat is old
        # enough.
        early = time.monotonic() - began < 60
        hint = " (is its key registered, and not in use by another silo?)" if early else ""
        say(f"flower-supernode ended with code {code}{hint}: starting it again in {_RESTART:.0f} s")
        time.sleep(_RESTART)
