"""A real SuperLink and three SuperNodes on loopback, with TLS and keys: the same bits as in one process."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from ekiden import Hardware, Training
from ekiden import run as run_here
from ekiden.core.folder import read_lines
from ekiden.core.method import Method
from ekiden.data import load, parse, split
from ekiden.methods import FedELMY, FedSeq

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("flower")]

NAMES = ("client-0", "client-1", "client-2")
BIN = Path(sys.executable).parent
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


def certificates(folder: Path) -> None:
    """A certificate authority and the SuperLink's certificate for this machine."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def issue(subject: str, key: Any, issuer: str, signer: Any, extensions: Sequence[Any]) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
        )
        for extension in extensions:
            builder = builder.add_extension(extension, critical=False)
        pem: bytes = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return pem

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    basic = x509.BasicConstraints(ca=True, path_length=None)
    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    (folder / "ca.crt").write_bytes(issue("ca", authority, "ca", authority, [basic, usage, identifier]))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    (folder / "link.crt").write_bytes(issue("link", server, "ca", authority, [names, issuer]))
    (folder / "link.key").write_bytes(
        server.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


class Federation:
    """The processes of a SuperLink and its silos."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(4)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(folder / "link-home"),
        }

    @property
    def link(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def prepare(self) -> None:
        certificates(self.folder)
        (self.folder / "own.py").write_text(OWN)
        (self.folder / "keys").mkdir()
        for i, name in enumerate(NAMES):
            (self.folder / f"{name}.toml").write_text(
                f'name = "{name}"\n[data]\npython = "own.py:mine"\n[hardware]\nthreads = 1\n'
                f'[limits]\nmethods = ["fedelmy", "fedseq"]\n'
                f'[link]\naddress = "{self.link}"\ncertificate = "ca.crt"\nkey = "{name}.key"\n'
                f"port = {self.ports[1 + i]}\n"
            )
            self.ekiden("silo", "keys", f"{name}.toml")
            shutil.copy(self.folder / f"{name}.key.pub", self.folder / "keys" / f"{name}.pub")

    def start_link(self) -> None:
        flags = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "link.crt", "--ssl-keyfile", "link.key"]
        flags += ["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", "link.db"]
        self.start("link", [str(BIN / "flower-superlink"), *flags, "--port", str(self.ports[0])])
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.ports[0]), timeout=1):
                return
            time.sleep(0.3)
        raise AssertionError((self.folder / "link.log").read_text())

    def start_silo(self, name: str) -> None:
        self.start(name, [str(BIN / "ekiden"), "silo", "start", f"{name}.toml"])

    def start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of one machine."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def readable(self, model: Path) -> int:
        """How many layers of a model, and headers of tensors, are found in the SuperLink's files."""
        found = b"".join(file.read_bytes() for file in self.folder.glob("link.db*"))
        assert len(found) > 100_000
        layers = [t.reshape(-1)[-8:].numpy().tobytes() for t in safetensors.torch.load_file(model).values()]
        assert len(layers) >= 4
        assert all(len(layer) == 32 for layer in layers)
        return sum(found.count(text) for text in (*layers, b'"dtype":"F32"'))

    def ekiden(self, *arguments: str, timeout: float = 280) -> str:
        done = subprocess.run(
            [str(BIN / "ekiden"), *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return done.stdout + done.stderr

    def run(self, method: str, *flags: str) -> str:
        return self.ekiden(
            *("run", method, "--on", "flower", "--link", self.link, "--certificate", "ca.crt", "--keys", "keys"),
            *("--clients", ",".join(NAMES), "--lr", "0.01", "--batch-size", "64", "--seed", "3", *flags),
        )


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    federation = Federation(tmp_path_factory.mktemp("flower"))
    try:
        federation.prepare()
        federation.start_link()
        files = [f"keys/{name}.pub" for name in NAMES]
        said = federation.ekiden("silo", "register", *files, "--link", federation.link, "--certificate", "ca.crt")
        assert said.count("registered") >= 3, said
        for name in NAMES:
            federation.start_silo(name)
        yield federation
    finally:
        for process in federation.processes.values():
            process.terminate()
        for name in list(federation.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                federation.processes[name].wait(20)
            federation.kill(name)


CASES: dict[str, tuple[Method, list[str]]] = {
    "fedelmy": (FedELMY(models=2, epochs=2, warmup=2), ["--models", "2", "--epochs", "2", "--warmup", "2"]),
    "fedseq": (FedSeq(epochs=3), ["--epochs", "3"]),
}


@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(federation: Federation, name: str, tmp_path: Path) -> None:
    method, flags = CASES[name]
    data = split(load("digits"), parse("dirichlet:0.5"), 3, seed=0)
    here = tmp_path / "here"
    expected = run_here(method, data, training=TRAINING, hardware=Hardware(threads=1), seed=3, folder=here)
    said = federation.run(name, *flags)
    there = federation.folder / "runs" / f"{name}-flower-seed3"
    assert (there / "model.safetensors").exists(), said + (federation.folder / "client-0.log").read_text()
    assert (there / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
    assert (there / "ledger.jsonl").read_bytes() == (here / "ledger.jsonl").read_bytes()
    assert read_lines(there / "metrics.jsonl")[-1]["accuracy"] == expected.accuracy
    assert f"{100 * expected.accuracy:.2f}" in said
    rows = read_lines(there / "network.jsonl")
    tasks = {"fedelmy": 4, "fedseq": 3}[name]  # one message a hop, and FedELMY's warm-up
    assert [row["kind"] for row in rows] == ["task"] * tasks + ["evaluate"] * 3
    assert all(0 < row["engine"] < 10_000 for row in rows)
    said = federation.ekiden("verify", str(there), "--keys", "keys")
    assert "verified: 3 tasks, each signed by its silo, and the result is what they gave" in " ".join(said.split())
    assert federation.readable(there / "model.safetensors") == 0
    assert json.loads((there / "config.json").read_text())["on"] == "flower"


def test_what_a_silo_does_not_allow_is_refused_at_both_ends(federation: Federation) -> None:
    said = federation.run("local", "--epochs", "1")
    assert "silo client-0: client-0 does not allow 'local', only fedelmy, fedseq (limits.methods" in said
    assert "refused: client-0 does not allow 'local'" in (federation.folder / "client-0.log").read_text()


@pytest.mark.slow
def test_killed_silo_coordinator_and_link(federation: Federation, tmp_path: Path) -> None:
    """SIGKILL of a silo in mid-training, then of the SuperLink with the coordinator; the run ends bit-equal."""
    method = FedSeq(epochs=400, order="reversed")
    data = split(load("digits"), parse("dirichlet:0.5"), 3, seed=0)
    here = tmp_path / "here"
    run_here(method, data, training=TRAINING, hardware=Hardware(threads=1), seed=3, folder=here)
    out = federation.folder / "faults" / "fedseq-flower-seed3"
    command = [str(BIN / "ekiden"), "run", "fedseq", "--on", "flower", "--link", federation.link, "--certificate"]
    command += ["ca.crt", "--keys", "keys", "--clients", ",".join(NAMES), "--lr", "0.01", "--batch-size", "64"]
    command += ["--seed", "3", "--epochs", "400", "--order", "reversed", "--out", "faults"]
    federation.start("run", command)
    wait_for(federation.folder / "client-2.log", "epoch 20/400")
    federation.kill("client-2")
    federation.start_silo("client-2")
    wait_for(out / "times.jsonl", '"step":1')
    wait_for(federation.folder / "client-1.log", "epoch 20/400")
    federation.kill("link")
    federation.kill("run")
    federation.start_link()
    time.sleep(60)  # until the silos are connected again
    said = federation.ekiden("resume", str(out), timeout=400)
    assert (out / "model.safetensors").exists(), said
    assert (out / "model.safetensors").read_bytes() == (here / "model.safetensors").read_bytes()
    assert (out / "ledger.jsonl").read_bytes() == (here / "ledger.jsonl").read_bytes()


def wait_for(file: Path, text: str, seconds: float = 200) -> None:
    end = time.monotonic() + seconds
    while not (file.exists() and text in file.read_text()):
        assert time.monotonic() < end, f"{text} not in {file}: {file.read_text() if file.exists() else 'no file'}"
        time.sleep(0.5)
