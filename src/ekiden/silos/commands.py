"""Run Flower's commands. Each is printed before it is run, and also works when typed by hand."""

import ipaddress
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import Any

from ekiden._version import __version__
from ekiden.core.base.errors import UserError
from ekiden.silos.coordinator.federation import FILE, Federation, answers, read, status
from ekiden.silos.coordinator.remote_plan import RemotePlan, as_text
from ekiden.silos.coordinator.session import ENDED
from ekiden.silos.metrics import Metrics, served
from ekiden.silos.trust import keys

_PENDING = 45.0  # seconds in which a run at the SuperLink begins
_SOON = 30  # days
_OWN_HOSTS = ("127.0.0.1", "localhost", "::1")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
Say = Callable[[str], None]
_CONNECTION = "ekiden"
DATABASE = "link.db"  # file in a federation's folder with the SuperLink's messages
_SUPERLINK = "ekiden.silos.superlink"
"""module that runs `flower-superlink` with a port for silos and one for the coordinator"""


@dataclass(frozen=True)
class Security:
    """How to authenticate the SuperLink."""

    # PEM file of the authority that signed its certificate; None trusts the system's authorities
    certificate: Path | None = None
    insecure: bool = False  # use no TLS

    def flags(self) -> list[str]:
        """Return the flags for Flower's commands."""
        if self.insecure:
            return ["--insecure"]
        return ["--root-certificates", str(self.certificate.absolute())] if self.certificate else []


def checked(address: str, security: Security, say: Say, *, anywhere: bool) -> None:
    """Refuse unsafe connections, and warn about insecure ones that are allowed.

    A plain connection to another machine is allowed if the user says so (`anywhere`).
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"{address!r} is not the address of a SuperLink: give HOST:PORT, such as "
            "link.example.org:8000"
        )
    if security.insecure:
        if not _is_loopback(host) and not anywhere:
            raise UserError(
                f"--insecure to {host} would send models and requests in the clear: use a "
                "certificate, "
                "or say --insecure-anywhere"
            )
        say("WARNING: --insecure: nothing on this connection is encrypted or authenticated")
    elif security.certificate is not None and not security.certificate.is_file():
        raise UserError(
            f"there is no certificate {security.certificate}: get the SuperLink's CA certificate "
            "first"
        )


def register(
    public_key: Path, link: str, security: Security, say: Say, *, again: bool = False
) -> None:
    """Let the holder of a key connect to the SuperLink; `again` if the key may be registered
    already.
    """
    arguments = ["supernode", "register", str(public_key.absolute()), _CONNECTION]
    try:
        _ask(arguments, link, security, say)
    except Refused as refused:
        if "already in use" not in str(refused):
            raise
        if not again:
            raise UserError(f"{public_key} is registered already: its holder may connect") from None
    say(f"registered {public_key.stem}")


def run(
    plan: RemotePlan[Any],
    link: Mapping[str, Any],
    security: Security,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    measures: Path | None = None,
    *,
    validation: bool = False,
    by: Sequence[str] = (),
    at: Mapping[float, float] = {},
    weights: Path | None = None,
) -> str:
    """Submit a run to the SuperLink and show its output until it ends; Ctrl-C and SIGTERM end it.

    Returns:
        Why it ended early; empty if all went well.
    """
    signal.signal(signal.SIGTERM, interrupt)

    def unserved(number: str) -> None:
        with suppress(UserError):
            known = runs(link["link"], security, lambda line: None)
            if any(row["run-id"] == number and row["status"] == "pending" for row in known):
                say(
                    f"run {number} still waits at the SuperLink: nothing there starts it; look at "
                    "what "
                    "`ekiden federation start` prints, and start it again"
                )

    heard = _Heard(say, unserved)
    with TemporaryDirectory(prefix="ekiden-") as scratch:
        app = Path(scratch) / "app"
        write_app(app, folder.name)
        settings = {
            "plan": as_text(plan),
            "folder": str(folder.absolute()),
            "keys": json.dumps(dict(public_keys)),
            "link": json.dumps(dict(link)),
            "measures": str(measures.absolute()) if measures else "",
            "validation": validation,
            "by": ",".join(by),
            "at": json.dumps(list(at.items())),
            "weights": str(weights.absolute()) if weights else "",
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (app / "run.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = [
            "run",
            str(app),
            _CONNECTION,
            "--run-config",
            str(app / "run.toml"),
            "--stream",
        ]
        try:
            _flwr(arguments, link["link"], security, say, heard)
        except KeyboardInterrupt:
            if heard.run:
                say(f"stopping run {heard.run} at the SuperLink")
                stop(heard.run, link["link"], security, say)
            raise
        except Refused:
            say("\n".join(heard.others))
            raise
        finally:
            heard.close()
    if heard.ended:
        return heard.ended
    found = [row for row in runs(link["link"], security, say) if row["run-id"] == heard.run]
    if found and found[0]["status"] == "finished:completed":
        return ""
    if found and found[0]["status"] == "finished:stopped":
        return f"run {heard.run} was stopped"
    say("\n".join(heard.others))
    return f"run {heard.run} ended early: the log of its ServerApp is above"


class _Heard:
    """Reads the output of `flwr run --stream`: shows Ekiden's lines to the user, and keeps Flower's
    for an error.
    """

    def __init__(
        self, say: Say, unserved: Callable[[str], None], seconds: float = _PENDING
    ) -> None:
        """Call `unserved` with the run's number if Ekiden says nothing in the first seconds of the
        run.
        """
        self.run = ""
        self.ended = ""
        self.others: deque[str] = deque(maxlen=100)
        self._say = say
        self._unserved = unserved
        self._seconds = seconds
        self._timer: Timer | None = None

    def close(self) -> None:
        """Wait for no first line any more."""
        if self._timer is not None:
            self._timer.cancel()

    def __call__(self, line: str) -> None:
        """Read a line."""
        if found := re.search(r"Successfully started run (\d+)", line):
            self.run = found[1]
            self._say(f"run {self.run} at the SuperLink")
            self._timer = Timer(self._seconds, self._unserved, [self.run])
            self._timer.daemon = True
            self._timer.start()
        elif line.startswith(ENDED):
            self.close()
            self.ended = line.removeprefix(ENDED)
        elif line.startswith("ekiden: "):
            self.close()
            self._say(line)
        elif line:
            self.others.append(line)


def stop(run_id: str, link: str, security: Security, say: Say) -> None:
    """End a run at the SuperLink."""
    _ask(["stop", run_id, _CONNECTION], link, security, say)
    say(f"run {run_id} is stopped; a silo that works on a task of it finishes that task")


def runs(link: str, security: Security, say: Say) -> list[dict[str, Any]]:
    """Return the runs that the SuperLink knows, as Flower describes them; the newest first."""
    found: list[dict[str, Any]] = _ask(["ls", _CONNECTION], link, security, say)["runs"]
    return found


class Refused(UserError):
    """The SuperLink did not do what it was asked."""


def _ask(arguments: Sequence[str], link: str, security: Security, say: Say) -> dict[str, Any]:
    """Return the answer of a short Flower command.

    Raises:
        Refused: the command failed; the message says why.
    """
    with TemporaryDirectory(prefix="ekiden-") as home:
        command, environment = _command(
            [*arguments, "--format", "json"], Path(home), link, security, say
        )
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    try:
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {}
    if done.returncode or not answer.get("success"):
        what = " ".join(str(answer.get("error-message") or done.stderr.strip()[-300:]).split())
        raise Refused(
            f"the SuperLink at {link} did not do `flwr {arguments[0]}`: {what or 'no answer'}"
        )
    return answer


def _flwr(
    arguments: Sequence[str], link: str, security: Security, say: Say, hear: Say | None = None
) -> None:
    """Run a Flower command that talks to the SuperLink, and pass on its output, line by line.

    Raises:
        Refused: the command failed.
    """
    with TemporaryDirectory(prefix="ekiden-") as home:
        command, environment = _command(arguments, Path(home), link, security, say)
        pipe = subprocess.PIPE
        # The command gets its own session, so Ctrl-C does not end only the command: our handler
        # ends the run.
        with subprocess.Popen(
            command,
            env=environment,
            stdout=pipe,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    (hear or say)(line.rstrip("\n"))
            except BaseException:
                process.terminate()
                raise
    if process.returncode:
        raise Refused(
            f"flwr {arguments[0]} ended with code {process.returncode}: is there a SuperLink at "
            f"{link}, and is its "
            "certificate known?"
        )


def _command(
    arguments: Sequence[str], home: Path, link: str, security: Security, say: Say
) -> tuple[list[str], dict[str, str]]:
    """Return a Flower command for this SuperLink, and its environment."""
    write_connection(home, link, security)
    command = [flower("flwr"), *arguments]
    say(f"$ FLWR_HOME={home} {shlex.join(command)}")
    return command, {
        **os.environ,
        **QUIET,
        **without_proxy(os.environ),
        "FLWR_HOME": str(home),
        "PATH": path(),
        "PYTHONUNBUFFERED": "1",
    }


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to this machine away from a proxy; they name what they
    named before, too.
    """
    found = {}
    for name in ("NO_PROXY", "no_proxy"):
        named = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join([*named, *(host for host in _OWN_HOSTS if host not in named)])
    return found


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
validation = false
by = ""
at = "[]"
weights = ""
""",
        encoding="utf-8",
    )


def app_name(name: str) -> str:
    """Return a valid name of a Flower app: letters, digits and hyphens, a letter first, 32
    characters at most.
    """
    plain = re.sub("[^A-Za-z0-9]+", "-", name).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:32].rstrip("-")


def write_connection(home: Path, link: str, security: Security) -> None:
    """Write a Flower configuration with one connection, `ekiden`."""
    lines = [
        "[superlink]",
        'default = "ekiden"',
        "",
        "[superlink.ekiden]",
        f"address = {json.dumps(link)}",
    ]
    if security.insecure:
        lines.append("insecure = true")
    elif security.certificate is not None:
        lines.append(f"root-certificates = {json.dumps(str(security.certificate.absolute()))}")
    (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_keys(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Return the public keys NAME.pub of all silos."""
    return {name: keys.read_public(folder / f"{name}.pub") for name in names}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def path() -> str:
    """Return the path with this Python's commands first, even if its environment is not
    activated.
    """
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def flower(command: str) -> str:
    """Return the path of a Flower command."""
    found = shutil.which(command, path=path())
    if found is None:
        raise UserError(f"{command} is not installed: pip install 'ekiden[flower]'")
    return found


def superlink_command(federation: Federation) -> list[str]:
    """Return the command that runs a federation's SuperLink."""
    folder = federation.folder.absolute()
    outside = "[::]" if ":" in federation.host else "0.0.0.0"
    return [
        *(
            sys.executable,
            "-m",
            _SUPERLINK,
            f"{outside}:{federation.port}",
            "--keys",
            str(federation.keys.absolute()),
        ),
        *("--host", "127.0.0.1", "--port", str(federation.control_port)),
        *("--database", str(folder / DATABASE), "--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "link.crt"), "--ssl-keyfile", str(folder / "link.key")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def start_superlink(federation: Federation, say: Say, metrics: Metrics | None = None) -> None:
    """Run a federation's SuperLink and let its silos in, until stopped (Ctrl-C or SIGTERM)."""
    for host, port in (("0.0.0.0", federation.port), ("127.0.0.1", federation.control_port)):
        if _taken(host, port):
            where = f"{federation.folder / FILE}{' and every silo.toml' if port == federation.port else ''}"
            raise UserError(
                f"port {port} is taken: if this SuperLink is not running already, change the port "
                f"in {where}"
            )
    command = superlink_command(federation)
    if (
        left := (keys.valid_until(federation.folder / "link.crt") - datetime.now(UTC)).days
    ) < _SOON:
        say(
            f"its certificate ends in {left} days: `ekiden federation rotate {federation.folder}` "
            "renews it"
        )
    say(f"$ {shlex.join(command)}")
    signal.signal(signal.SIGTERM, interrupt)
    home = str(federation.folder.absolute() / "flower")
    environment = {
        **os.environ,
        **QUIET,
        **without_proxy(os.environ),
        "PATH": path(),
        "FLWR_HOME": home,
    }
    unfinished = not (federation.folder / DATABASE).exists()
    with subprocess.Popen(command, env=environment) as process:
        try:
            _await_port(process, federation.control_port)
            unfinished = False
            security = Security(federation.certificate)
            let_in(federation, federation.silos, security, say)
            counts = partial(counted, federation)
            with served(
                metrics or Metrics(), "ekiden_link", counts, lambda: process.poll() is None
            ) as port:
                if metrics and port:
                    say(f"health and metrics: http://{metrics.host}:{port}/metrics")
                say(
                    f"silos reach the SuperLink at {federation.address}, the coordinator here at "
                    f"{federation.link}"
                )
                process.wait()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            if unfinished:  # a database whose tables were not all made stops every later start
                process.wait()
                for file in federation.folder.glob(f"{DATABASE}*"):
                    file.unlink()
    raise UserError(f"the SuperLink ended with code {process.returncode}: the lines above say why")


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
        **{
            f'requests_total{{answer="{answer}"}}': count
            for answer, count in answers(found).items()
        },
    }


def let_in(federation: Federation, names: Iterable[str], security: Security, say: Say) -> None:
    """Register silos' keys at a SuperLink that runs."""
    for name in names:
        register(federation.keys / f"{name}.pub", federation.link, security, say, again=True)


def is_running(federation: Federation) -> bool:
    """Return whether something answers at the coordinator's port."""
    return _taken("127.0.0.1", federation.control_port)


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


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False
