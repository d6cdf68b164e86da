"""The Flower commands that Ekiden wraps. Each is printed before it is run, and works when typed by hand."""

import ipaddress
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ekiden._version import __version__
from ekiden.errors import UserError
from ekiden.transports.flower import keys
from ekiden.transports.flower.session import RemotePlan, as_text
from ekiden.transports.flower.silo_file import SiloFile

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
Say = Callable[[str], None]
_CONNECTION = "ekiden"
_RESTART = 10.0
GUARD = "ekiden.transports.flower.guard"
"""module that answers in the place of `flwr-clientapp`"""
_SHIM = """import json, os, socket, sys
link = socket.socket(socket.AF_UNIX)
try:
    link.connect({address!r})
except OSError:
    os.execv(sys.executable, [sys.executable, "-m", "ekiden.transports.flower.guard", "run", *sys.argv[1:]])
link.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
while link.recv(1):
    pass
"""
"""Stands in for `flwr-clientapp`: a Python that starts at once, has the work done by `guard`, and waits for its end."""
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
"""`flower-supernode` that ends with its main thread: after a broken connection, another thread of its would keep the
process, which does nothing any more and so is never started again."""


@dataclass(frozen=True)
class Security:
    """How to know the SuperLink.

    Attributes:
        certificate: PEM file of the authority that signed its certificate; None: the system's authorities.
        insecure: no TLS at all.
    """

    certificate: Path | None = None
    insecure: bool = False

    def flags(self) -> list[str]:
        """For Flower's commands."""
        if self.insecure:
            return ["--insecure"]
        return ["--root-certificates", str(self.certificate.absolute())] if self.certificate else []


def checked(address: str, security: Security, say: Say, *, anywhere: bool) -> None:
    """Refuse what would be unsafe, and warn of what is.

    Args:
        address: HOST:PORT.
        security: how it is reached.
        say: tells the user.
        anywhere: whether the user said that a plain connection to another machine is meant.

    Raises:
        UserError: no address, no certificate file, or a plain connection to another machine.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{address!r} is no address of a SuperLink: give HOST:PORT, such as link.example.org:8000")
    if security.insecure:
        if not _is_loopback(host) and not anywhere:
            raise UserError(
                f"--insecure to {host} would send models and requests in the clear: use a certificate, "
                "or say --insecure-anywhere"
            )
        say("WARNING: --insecure: nothing on this connection is encrypted or authenticated")
    elif security.certificate is not None and not security.certificate.is_file():
        raise UserError(f"there is no certificate {security.certificate}: get the SuperLink's CA certificate first")


def supernode(file: SiloFile, security: Security) -> list[str]:
    """The command that connects a silo."""
    command = [_flower("flower-supernode"), "--superlink", file.link.address, *security.flags()]
    if file.link.key:
        command += ["--auth-supernode-private-key", str(file.beside(file.link.key))]
    return [*command, "--port", str(file.link.port), "--node-config", f'silo="{file.path}"']


def start_silo(file: SiloFile, security: Security, say: Say) -> None:
    """Connect a silo and serve until stopped (Ctrl-C or SIGTERM); a SuperNode that ends is started again."""
    command = supernode(file, security)
    say(f"$ {shlex.join(command)}")
    signal.signal(signal.SIGTERM, _interrupt)
    with TemporaryDirectory(prefix="ekiden-") as scratch:
        address, stand_in, shim = (Path(scratch) / name for name in ("socket", "flwr-clientapp", "shim.py"))
        shim.write_text(_SHIM.format(address=str(address)), encoding="utf-8")
        script = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(str(shim))} "$@"\n'
        stand_in.write_text(script, encoding="utf-8")
        stand_in.chmod(0o755)
        node = Path(scratch) / "supernode.py"
        node.write_text(_SUPERNODE, encoding="utf-8")
        environment = {
            **os.environ,
            **QUIET,
            "PATH": f"{scratch}{os.pathsep}{_path()}",
            "FLWR_HOME": str(file.folder / "flower"),
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
        serve = [sys.executable, "-m", GUARD, "serve", str(address), str(file.path)]
        with subprocess.Popen(serve, env=environment) as guard:
            try:
                _keep_running([sys.executable, str(node), *command[1:]], environment, say)
            finally:
                guard.terminate()


def _keep_running(command: list[str], environment: Mapping[str, str], say: Say) -> None:
    while True:
        with subprocess.Popen(command, env=environment) as process:
            try:
                code = process.wait()
            except KeyboardInterrupt:
                process.terminate()
                process.wait()
                raise
        # After a crash the SuperLink lets a node in again only when its last heartbeat is old enough.
        say(f"flower-supernode ended with code {code}: starting it again in {_RESTART:.0f} s")
        time.sleep(_RESTART)


def register(public_key: Path, link: str, security: Security, say: Say) -> None:
    """Let the holder of a key connect to the SuperLink.

    Raises:
        UserError: the SuperLink did not take it.
    """
    _flwr(["supernode", "register", str(public_key.absolute()), _CONNECTION], link, security, say)


def run(
    plan: RemotePlan[Any],
    link: Mapping[str, Any],
    security: Security,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
) -> None:
    """Submit a run to the SuperLink and show its log until it ends."""
    with TemporaryDirectory(prefix="ekiden-") as scratch:
        app = Path(scratch) / "app"
        write_app(app)
        settings = {
            "plan": as_text(plan),
            "folder": str(folder.absolute()),
            "keys": json.dumps(dict(public_keys)),
            "link": json.dumps(dict(link)),
        }
        lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        (app / "run.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        arguments = ["run", str(app), _CONNECTION, "--run-config", str(app / "run.toml"), "--stream"]
        _flwr(arguments, link["link"], security, say)


def _flwr(arguments: list[str], link: str, security: Security, say: Say) -> None:
    """Run a command of Flower's that talks to the SuperLink."""
    with TemporaryDirectory(prefix="ekiden-") as home:
        write_connection(Path(home), link, security)
        command = [_flower("flwr"), *arguments]
        say(f"$ FLWR_HOME={home} {shlex.join(command)}")
        environment = {**os.environ, **QUIET, "FLWR_HOME": home, "PATH": _path()}
        code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        raise UserError(
            f"flwr {arguments[0]} ended with code {code}: is there a SuperLink at {link}, and is its certificate known?"
        )


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def write_app(app: Path) -> None:
    """A Flower app of no code: it names the two ends that are installed with Ekiden."""
    app.mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        f"""[project]
name = "ekiden-run"
version = "{__version__}"
description = "A run of Ekiden"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "ekiden"

[tool.flwr.app.components]
serverapp = "ekiden.transports.flower.server_app:app"
clientapp = "ekiden.transports.flower.client_app:app"

[tool.flwr.app.config]
plan = ""
folder = ""
keys = "{{}}"
link = "{{}}"
""",
        encoding="utf-8",
    )


def write_connection(home: Path, link: str, security: Security) -> None:
    """A Flower configuration with one connection, `ekiden`."""
    lines = ["[superlink]", 'default = "ekiden"', "", "[superlink.ekiden]", f"address = {json.dumps(link)}"]
    if security.insecure:
        lines.append("insecure = true")
    elif security.certificate is not None:
        lines.append(f"root-certificates = {json.dumps(str(security.certificate.absolute()))}")
    (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_keys(folder: Path, names: tuple[str, ...]) -> dict[str, str]:
    """The public keys NAME.pub of all silos.

    Raises:
        UserError: one is missing.
    """
    return {name: keys.read_public(folder / f"{name}.pub") for name in names}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _path() -> str:
    """The path with this Python's commands first, also where its environment is not activated."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def _flower(command: str) -> str:
    found = shutil.which(command, path=_path())
    if found is None:
        raise UserError(f"{command} is not installed: pip install 'ekiden[flower]'")
    return found
