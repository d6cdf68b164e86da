"""What a coordinator does at its machine: run a SuperLink, and submit runs to it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ekiden._version import __version__
from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError
from ekiden.silos import forks
from ekiden.silos.coordinator.federation import FILE, Federation, read, status
from ekiden.silos.logs import ENDED, OURS, Log
from ekiden.silos.metrics import Metrics, Watched, served
from ekiden.silos.security import Say, certificate_state, without_proxy
from ekiden.silos.status_page import StatusTable, page
from ekiden.silos.trust import keys

if TYPE_CHECKING:
    from ekiden.silos.control import RunAtLink, SuperLink
    from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan


def connect(address: str, certificate: Path | None) -> "SuperLink":
    """Return a connection to a SuperLink's Control API."""
    from ekiden.silos.control import SuperLink

    return SuperLink(address, certificate)


def run(
    plan: "RemotePlan[Any]",
    link: Mapping[str, Any],
    certificate: Path | None,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    measures: "Measuring | None" = None,
) -> str:
    """Submit a run to the SuperLink and show its output until it ends; Ctrl-C and SIGTERM end it.

    Returns:
        Why it ended early; empty if all went well.
    """
    signal.signal(signal.SIGTERM, interrupt)
    superlink = connect(link["link"], certificate)
    settings = {
        "plan": json.dumps(plan.to_json()),
        "folder": str(folder.absolute()),
        "keys": json.dumps(dict(public_keys)),
        "link": json.dumps(dict(link)),
        "measures": json.dumps(plain(measures)) if measures else "",
    }
    with TemporaryDirectory(prefix="ekiden-") as scratch:
        app = Path(scratch) / "app"
        write_app(app, folder.name)
        number = superlink.start(app, settings)
    say(f"run {number} at the SuperLink")
    heard = RunOutput(say)
    try:
        for line in superlink.lines(number):
            heard(line)
    except KeyboardInterrupt:
        say(f"stopping run {number} at the SuperLink")
        superlink.stop(number)
        raise
    except UserError as error:
        return f"the SuperLink is gone ({error})"
    if heard.ended:
        return heard.ended
    return _reason(next(run for run in superlink.runs() if run.run == number), heard, say)


def _reason(run: "RunAtLink", heard: "RunOutput", say: Say) -> str:
    """Return why a run ended that did not say so itself; empty if it was completed."""
    match run.state:
        case "completed":
            return ""
        case "stopped":
            return f"run {run.run} was stopped (`ekiden stop`)"
        case _ if "heartbeat" in run.reason:
            return (
                "the process that led the run is gone: it was killed, or the machine lacks memory"
            )
    say("\n".join(heard.others))
    return f"run {run.run} failed: {run.reason or 'the lines above say why'}"


@dataclass
class RunOutput:
    """Reads what a run's ServerApp prints: shows our lines to the user, and keeps others for an error."""

    say: Say
    ended: str = ""
    others: deque[str] = field(default_factory=lambda: deque(maxlen=100))

    def __call__(self, line: str) -> None:
        """Read a line."""
        if line.startswith(ENDED):
            self.ended = line.removeprefix(ENDED)
        elif line.startswith(OURS):
            self.say(line)
        elif line:
            self.others.append(line)


def interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM like Ctrl-C."""
    raise KeyboardInterrupt


def write_app(app: Path, name: str = "ekiden-run") -> None:
    """Write a Flower app without code: it names the two ends that are installed with Ekiden."""
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        f"""[project]
name = "{app_name(name)}"
version = "{__version__}"
description = "A run of Ekiden"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "ekiden"

[tool.flwr.app.components]
serverapp = "ekiden.silos.server_app:app"
clientapp = "ekiden.silos.client_app:app"

[tool.flwr.app.config]
plan = ""
folder = ""
keys = "{{}}"
link = "{{}}"
measures = ""
""",
        encoding="utf-8",
    )


def app_name(name: str) -> str:
    """Return a valid name of a Flower app: letters, digits and hyphens, a letter first, 32
    characters at most.
    """
    safe = re.sub("[^A-Za-z0-9]+", "-", name).strip("-")
    return (safe if safe[:1].isalpha() else f"run-{safe}")[:32].rstrip("-")


def read_keys(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the public keys NAME.pub of all silos."""
    do = "`ekiden federation add` lets a silo in"
    return {name: keys.read_public(folder / f"{name}.pub", do) for name in names}


@contextmanager
def flower_programs(home: Path, jobs: forks.Jobs, log: Log) -> Iterator[Path]:
    """Give the folder of Flower's programs, which do `jobs`, keep what they need in `home`, and
    print to the log; this process then ends on SIGTERM as on Ctrl-C.
    """
    signal.signal(signal.SIGTERM, interrupt)
    os.environ |= without_proxy(os.environ) | {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home / "flower"),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
    }
    with forks.programs(jobs) as (folder, lines):
        log.follow(lines)
        yield folder


def superlink_command(federation: Federation) -> list[str]:
    """Return the command that runs a federation's SuperLink."""
    return [sys.executable, "-m", "ekiden.silos.superlink", str(federation.folder.absolute())]


def start_superlink(federation: Federation, log: Log, metrics: Metrics) -> None:
    """Run a federation's SuperLink and let its silos in, until stopped (Ctrl-C or SIGTERM)."""
    for host, port in (("0.0.0.0", federation.port), ("127.0.0.1", federation.control_port)):
        if _is_taken(host, port):
            raise UserError(
                f"port {port} is taken: if this SuperLink is not running already, change it in "
                f"{federation.folder / FILE}, and the silos' port in every silo.toml, too"
            )
    from flwr.supercore.cli import flower_superexec
    from flwr.superlink.cli import flwr_serverapp

    from ekiden.silos import server_app, superlink  # noqa: F401

    command = superlink_command(federation)
    good, words = _certificate(federation)
    if not good:
        raise UserError(words)
    log(words)
    jobs = {
        "flower-superlink": superlink.main,
        "flwr-serverapp": flwr_serverapp,
        "flower-superexec": flower_superexec,
    }
    unfinished = not federation.database.exists()
    with (
        flower_programs(federation.folder.absolute(), jobs, log) as folder,
        subprocess.Popen([str(folder / "flower-superlink"), command[-1]]) as process,
    ):
        try:
            _await_port(process, federation.control_port)
            unfinished = False
            let_in(federation, read_keys(federation.keys, federation.silos), log)
            about = Watched(
                "ekiden_link",
                partial(counted, federation),
                partial(health, federation),
                partial(operators_page, federation),
            )
            with served(metrics, about) as port:
                if port:
                    log(f"health and metrics, and a page: http://{metrics.host}:{port}/")
                log(
                    f"silos reach the SuperLink at {federation.address}, the coordinator here at {federation.link}"
                )
                process.wait()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            if unfinished:  # a database whose tables were not all made stops every later start
                process.wait()
                for file in federation.folder.glob(f"{federation.database.name}*"):
                    file.unlink()
    raise UserError(f"the SuperLink ended with code {process.returncode}: the lines above say why")


def _certificate(federation: Federation) -> tuple[bool, str]:
    return certificate_state(
        keys.valid_until(federation.folder / "link.crt"), str(federation.folder)
    )


def health(federation: Federation) -> tuple[bool, str]:
    """Return whether silos can connect, and in words what is to do."""
    good, words = _certificate(federation)
    if good and not is_running(federation):
        return False, f"the SuperLink does not run: `ekiden federation start {federation.folder}`"
    return good, words


RUN_COLUMNS = ("run", "what", "state", "since (UTC)", "reason")
REMEDY = {
    "connected": "",
    "away": "there: ekiden silo status silo.toml",
    "never": "there: ekiden silo join, then ekiden silo start",
}
"""what to do about a silo in each state"""


def operators_page(federation: Federation) -> str:
    """Return the coordinator's page: who is connected, and the runs."""
    silos = [
        (silo.name, silo.state, "" if silo.seen is None else f"{silo.seen:.0f}", REMEDY[silo.state])
        for silo in status(read(federation.folder))
    ]
    runs: list[tuple[str, ...]] = []
    with suppress(UserError):
        known = connect(federation.link, federation.certificate).runs()
        runs = [run.row for run in known[:100]]
    columns = ("silo", "state", "last seen (s)", "what to do")
    sections = (
        StatusTable("Silos", columns, silos, "No silo is let in: ekiden federation add"),
        StatusTable("Runs", RUN_COLUMNS, runs, "No run was started yet."),
    )
    return page(f"Federation {federation.folder.name}", health(federation), sections)


def counted(federation: Federation) -> Mapping[str, float]:
    """Return what a monitor may know: how many silos are connected, and when the certificate
    ends.
    """
    found = read(federation.folder)  # silos come and go
    states = Counter(silo.state for silo in status(found))
    ends = keys.valid_until(federation.folder / "link.crt") - datetime.now(UTC)
    return {
        "certificate_seconds": ends.total_seconds(),
        **{
            f'silos{{state="{state}"}}': float(states[state])
            for state in ("connected", "away", "never")
        },
    }


def let_in(federation: Federation, public: Mapping[str, str], say: Say) -> None:
    """Register silos' keys at a SuperLink that runs."""
    superlink = connect(federation.link, federation.certificate)
    for name, key in public.items():
        superlink.register(key)
        say(f"{name} may connect")


def is_running(federation: Federation) -> bool:
    """Return whether something answers at the coordinator's port."""
    return _is_taken("127.0.0.1", federation.control_port)


def _await_port(process: subprocess.Popen[bytes], port: int, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.3)
    if process.poll() is None:
        raise UserError(
            f"the SuperLink was not ready after {seconds:g} s: is this machine busy? Start it again"
        )
    raise UserError("the SuperLink did not start: the lines above say why")


def _is_taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False
