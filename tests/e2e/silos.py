"""A real SuperLink and three silos on loopback, with TLS and keys, for tests to run methods on and
to break."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch

from ekiden import Hardware, Training
from ekiden import run as run_here
from ekiden.core.engine.method import Method
from ekiden.data import load, parse, split
from ekiden.runs.result import Result
from ekiden.silos import commands
from ekiden.silos.coordinator.federation import Federation as Parts
from ekiden.silos.trust.keys import make_certificates, read_public
from tests.warm import WarmProcess, command, ekiden

NAMES = ("client-0", "client-1", "client-2")
BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
TRAINING = Training(lr=0.01, batch_size=64)
OWN = """
from ekiden.data import load, parse, split

def mine():
    return split(load("digits"), parse("dirichlet:0.5"), 3, seed=0)
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def as_session(args: list[str], folder: Path, log: Path) -> None:
    """An `ekiden` command that is killed together with the processes that it started."""
    os.setsid()
    command(args, folder, log, log)


class WarmSession(WarmProcess):
    """A process of `as_session`, with what tests do to those of `subprocess`."""

    def wait(self, timeout: float | None = None) -> int:
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(str(self.name), timeout or 0.0)
        return self.exitcode


class Federation:
    """The processes of a SuperLink and its silos."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        self.folder, self.names = folder, names
        self.ports = free_ports(2)
        self.parts = Parts(folder, "127.0.0.1", self.ports[0], self.ports[1], names)
        self.processes: dict[str, Any] = {}
        self.seen: set[bytes] = set()
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "link-home"),
        }

    @property
    def link(self) -> str:
        """For the coordinator."""
        return self.parts.link

    @property
    def address(self) -> str:
        """For silos."""
        return self.parts.address

    def prepare(self) -> None:
        make_certificates(self.folder, "127.0.0.1")
        (self.folder / "federation.toml").write_text(
            f'host = "127.0.0.1"\nport = {self.parts.port}\n'
            f"control_port = {self.parts.control_port}\nsilos = {json.dumps(self.names)}\n"
        )
        (self.folder / "own.py").write_text(OWN)
        (self.folder / "keys").mkdir()
        for name in self.names:
            (self.folder / f"{name}.toml").write_text(
                f'name = "{name}"\n[data]\npython = "own.py:mine"\n[hardware]\nthreads = 1\n'
                f'[limits]\nmethods = ["fedelmy", "fedgram", "fedseq"]\n'
                f'approve = false\nexact_evaluation = true\nlevel = "models"\nmin_clients = 2\n'
                f'[link]\naddress = "{self.address}"\ncertificate = "ca.crt"\nkey = '
                f'"{name}.key"\npeers = "keys"\n'
            )
            self.ekiden("silo", "keys", f"{name}.toml")
            shutil.copy(self.folder / f"{name}.key.pub", self.folder / "keys" / f"{name}.pub")

    def start_link(self) -> None:
        self.start("link", commands.superlink_command(self.parts))
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.ports[1]), timeout=1),
            ):
                return
            time.sleep(0.3)
        raise AssertionError((self.folder / "link.log").read_text())

    def start_silo(self, name: str) -> None:
        self.start(name, [str(BIN / "ekiden"), "silo", "start", f"{name}.toml"])

    def start_warm_silo(self, name: str) -> None:
        """As `start_silo`, without its own interpreter: 4 s of processor time less."""
        given = (["silo", "start", f"{name}.toml"], self.folder, self.folder / f"{name}.log")
        self.processes[name] = WarmSession(
            target=as_session, args=given, environment=self.environment
        )
        self.processes[name].start()

    def start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of one machine."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Collect what the SuperLink's files hold until the block ends: SQLite overwrites what it
        deleted."""
        self.seen, ended = set(), threading.Event()

        def watch() -> None:
            while not ended.wait(0.1):
                self._look()

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self._look()

    def _look(self) -> None:
        """Add each page of the database, its log and its journal, and the first bytes of the next
        one."""
        for file in self.folder.glob("link.db*"):
            with contextlib.suppress(FileNotFoundError):  # a journal goes with its transaction
                data = file.read_bytes()
                self.seen |= {data[at : at + 4096 + 32] for at in range(0, len(data), 4096)}

    def readable(self, model: Path) -> int:
        """How many layers of a model, and headers of tensors, the SuperLink's files held while it
        was watched."""
        assert sum(map(len, self.seen)) > 100_000
        layers = [
            t.reshape(-1)[-8:].numpy().tobytes()
            for t in safetensors.torch.load_file(model).values()
        ]
        assert len(layers) >= 4
        assert all(len(layer) == 32 for layer in layers)
        return sum(text in page for page in self.seen for text in (*layers, b'"dtype":"F32"'))

    def ekiden(self, *arguments: str, timeout: float = 280) -> str:
        done = ekiden(*arguments, folder=self.folder, environment=self.environment, timeout=timeout)
        return done.stdout + done.stderr

    def run(self, method: str, *flags: str, timeout: float = 280) -> str:
        with self.watching():
            return self.ekiden(
                *(
                    "run",
                    method,
                    "--on",
                    "flower",
                    "--link",
                    self.link,
                    "--certificate",
                    "ca.crt",
                    "--keys",
                    "keys",
                ),
                *(
                    "--clients",
                    ",".join(self.names),
                    "--lr",
                    "0.01",
                    "--batch-size",
                    "64",
                    "--seed",
                    "3",
                    "--evaluate-dp",  # as on one machine
                    "exact",
                    *flags,
                ),
                timeout=timeout,
            )


@contextlib.contextmanager
def running(
    folder: Path,
    start: Callable[[Federation, str], None] = Federation.start_silo,
    names: tuple[str, ...] = NAMES,
) -> Iterator[Federation]:
    """A federation whose processes all run, and end with the block."""
    federation = Federation(folder, names)
    try:
        federation.prepare()
        federation.start_link()
        link = commands.connect(federation.link, folder / "ca.crt")
        for name in names:
            link.register(read_public(folder / "keys" / f"{name}.pub"))
        for name in names:
            start(federation, name)
        yield federation
    finally:
        for process in federation.processes.values():
            process.terminate()
        for name in list(federation.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                federation.processes[name].wait(20)
            federation.kill(name)


class Cable:
    """A TCP connection through this process that can break in the middle of a transfer."""

    def __init__(self, to: int) -> None:
        self.cuts: list[str] = []
        self._to = to
        self._left: dict[str, float] = {}
        self._broken_until = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> "Cable":
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listener.close()

    def cut_after(self, **directions: int) -> None:
        """Break after this many bytes went `up` to the SuperLink or `down` from it; each direction
        once."""
        self._left = {direction: float(count) for direction, count in directions.items()}

    def _serve(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            for source, sink, direction in ((near, far, "up"), (far, near, "down")):
                threading.Thread(
                    target=self._carry, args=(source, sink, direction), daemon=True
                ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if direction in self._left:
                    self._left[direction] -= len(data)
                    if self._left[direction] < 0:
                        del self._left[direction]
                        self.cuts.append(direction)
                        self._broken_until = time.monotonic() + 5
                if time.monotonic() < self._broken_until:
                    break
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def wait_for(file: Path, text: str, seconds: float = 500) -> None:
    end = time.monotonic() + seconds
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < end, (
            f"{text} not in {file}: {file.read_text() if file.exists() else 'no file'}"
        )
        time.sleep(0.5)


def expected(method: Method, folder: Path, without: Sequence[str] = (), **more: Any) -> Result:
    """The same run in this process, without some clients."""
    data = split(load("digits"), parse("dirichlet:0.5"), 3, seed=0)
    data = data.without(*without) if without else data
    return run_here(
        method, data, training=TRAINING, hardware=Hardware(threads=1), seed=3, folder=folder, **more
    )


def assert_same_files(there: Path, here: Path, said: str = "") -> None:
    """The models and the ledger of two run folders are equal byte for byte."""
    models = [*here.glob("model.safetensors"), *here.glob("personal/*.safetensors")]
    assert models
    for file in (*models, here / "ledger.jsonl"):
        name = file.relative_to(here)
        assert (there / name).exists(), said
        assert (there / name).read_bytes() == file.read_bytes(), name
