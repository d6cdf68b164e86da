"""Run the SuperLink of a federation that `ekiden federation init` made, and print its command first."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

from ekiden.base.errors import UserError
from ekiden.transports.flower.commands import QUIET, Say, Security, interrupt, path, register, without_proxy
from ekiden.transports.flower.coordinator.federation import FILE, Federation

LINK = "ekiden.transports.flower.link"
"""module that runs `flower-superlink` with a port for silos and one for the coordinator"""


def command_of(federation: Federation) -> list[str]:
    """Return the command that runs a federation's SuperLink."""
    folder = federation.folder.absolute()
    outside = "[::]" if ":" in federation.host else "0.0.0.0"
    return [
        *(sys.executable, "-m", LINK, f"{outside}:{federation.port}"),
        *("--host", "127.0.0.1", "--port", str(federation.control_port)),
        *("--database", str(folder / "link.db"), "--ssl-ca-certfile", str(folder / "ca.crt")),
        *("--ssl-certfile", str(folder / "link.crt"), "--ssl-keyfile", str(folder / "link.key")),
        *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
    ]


def start(federation: Federation, say: Say) -> None:
    """Run a federation's SuperLink and let its silos in, until stopped (Ctrl-C or SIGTERM)."""
    for host, port in (("0.0.0.0", federation.port), ("127.0.0.1", federation.control_port)):
        if _taken(host, port):
            where = f"{federation.folder / FILE}{' and every silo.toml' if port == federation.port else ''}"
            raise UserError(
                f"port {port} is taken: if this SuperLink is not running already, change the port in {where}"
            )
    command = command_of(federation)
    say(f"$ {shlex.join(command)}")
    signal.signal(signal.SIGTERM, interrupt)
    home = str(federation.folder.absolute() / "flower")
    environment = {**os.environ, **QUIET, **without_proxy(os.environ), "PATH": path(), "FLWR_HOME": home}
    with subprocess.Popen(command, env=environment) as process:
        try:
            _await_port(process, federation.control_port)
            security = Security(federation.certificate)
            for name in federation.silos:
                register(federation.keys / f"{name}.pub", federation.link, security, say, again=True)
            say(f"silos reach the SuperLink at {federation.address}, the coordinator here at {federation.link}")
            process.wait()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
    raise UserError(f"the SuperLink ended with code {process.returncode}: the lines above say why")


def _await_port(process: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.3)
    raise UserError("the SuperLink did not start: the lines above say why")


def _taken(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return True
        return False
