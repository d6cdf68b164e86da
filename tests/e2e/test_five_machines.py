"""A coordinator and four silos on separate machines, which are network namespaces, with the
commands on the page."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ekiden import Hardware
from ekiden import run as run_here
from ekiden.core.data.samples import Subset
from ekiden.data import ClientData, FederatedData, Samples
from ekiden.methods import FedELMY
from ekiden.silos.silo import silo_file
from tests.e2e.silos import BIN, ROOT, assert_same_files, wait_for

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
HOST, ADDRESS = "link.example.org", "10.77.0.1"
SILOS = ("a", "b", "c", "d")
REACH = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"


def commands() -> list[str]:
    """The commands on the page, with the machine of each."""
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- five machines -->\n```\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1].splitlines()


class Machine:
    """A network namespace with its own folder. Every silo's reaches one address of the
    coordinator's."""

    def __init__(self, name: str, folder: Path, place: int) -> None:
        self.name, self.folder, self.place = name, folder / name, place
        self.space = f"ekiden-{os.getpid()}-{name}"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder.mkdir()
        _ip("netns", "add", self.space)
        hosts = (
            Path("/etc/netns") / self.space / "hosts"
        )  # `ip netns exec` uses it instead of /etc/hosts
        hosts.parent.mkdir(parents=True)
        hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} {HOST}\n")
        _ip("-n", self.space, "link", "set", "lo", "up")

    def connect(self, link: "Machine") -> None:
        """Lay a cable to the coordinator's machine."""
        here, there = f"eth{self.place}", f"silo{self.place}"
        _ip(
            "-n",
            link.space,
            "link",
            "add",
            there,
            "type",
            "veth",
            "peer",
            "name",
            here,
            "netns",
            self.space,
        )
        for machine, end, last in ((link, there, 1), (self, here, 2)):
            _ip("-n", machine.space, "addr", "add", f"10.77.{self.place}.{last}/30", "dev", end)
            _ip("-n", machine.space, "link", "set", end, "up")
        _ip("-n", self.space, "route", "add", "default", "via", f"10.77.{self.place}.1")

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.space, *words]

    @property
    def environment(self) -> dict[str, str]:
        paths = {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HOME": str(self.folder)}
        return {
            **os.environ,
            **paths,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }

    def type(self, line: str, timeout: float = 400) -> str:
        """Run a command and wait for its end."""
        done = subprocess.run(
            self.command("sh", "-c", line), cwd=self.folder, env=self.environment, timeout=timeout,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, line: str) -> Path:
        """Run a command that keeps running; return what it prints."""
        log = self.folder / "log"
        with log.open("ab") as file:
            self.processes.append(
                subprocess.Popen(
                    self.command("sh", "-c", f"exec {line}"), cwd=self.folder, env=self.environment, stdout=file,
                    stderr=file, start_new_session=True,
                )
            )  # fmt: skip
        return log

    def reaches(self, host: str, port: int) -> bool:
        done = subprocess.run(
            self.command(str(BIN / "python"), "-c", REACH, host, str(port)),
            capture_output=True,
            timeout=60,
            check=False,
        )
        return done.returncode == 0

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        _ip("netns", "del", self.space)
        shutil.rmtree(Path("/etc/netns") / self.space, ignore_errors=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    made: dict[str, Machine] = {}
    try:
        try:
            for place, name in enumerate(("link", *SILOS)):
                made[name] = Machine(name, tmp_path, place)
            _ip("-n", made["link"].space, "addr", "add", f"{ADDRESS}/32", "dev", "lo")
            for name in SILOS:
                made[name].connect(made["link"])
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here, which take root and iproute2: {error}")
        yield made
    finally:
        for machine in made.values():
            machine.end()


def pictures(folder: Path, place: int) -> None:
    """Handwritten digits 0 to 3, different ones for each silo: a folder of class folders."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number in range(4):
        (folder / str(number)).mkdir(parents=True)
        chosen = digits.images[digits.target == number][place::4]
        for k, image in enumerate(chosen):
            Image.fromarray((image * 15.9).astype("uint8")).save(
                folder / str(number) / f"{k:03}.png"
            )


def together(files: list[Path]) -> FederatedData:
    """The same data in one process."""
    held = [silo_file.read(file).load() for file in files]
    first = held[0][0]

    def joined(part: str) -> tuple[Samples, list[int]]:
        parts: list[Samples] = [getattr(dataset, part) for dataset, _ in held]
        starts = [sum(map(len, parts[:k])) for k in range(len(parts))]
        return Samples(torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])), starts

    (train, begins), (test, tests) = joined("train"), joined("test")
    clients = []
    for (_, client), begin, other in zip(held, begins, tests, strict=True):

        def moved(samples: Samples, rows: Tensor, by: int) -> Subset:
            return Subset(samples, rows + by)

        own = (moved(train, client.train.rows, begin), moved(train, client.val.rows, begin))
        clients.append(ClientData(client.name, *own, moved(test, client.test.rows, other)))
    return FederatedData(replace(first, train=train, test=test), tuple(clients))


def test_five_machines_run_by_the_commands_on_the_page(
    machines: dict[str, Machine], tmp_path: Path
) -> None:
    """Exactly those of the page, except for scp, which copies on one disk here."""
    lines = [line.partition("#")[::2] for line in commands()]
    (make, at), (bring, _), (init, _), (copy, _), (join, _), (start, _), *others = lines
    (silo, where), (asked, _), (approve, _), (run, _) = others
    assert at.strip() == where.strip() == "at a; the same at b, c and d"
    link = machines["link"]
    for name in SILOS:
        machines[name].type(make.replace(" a ", f" {name} "))
    assert bring.strip() == "for s in a b c d; do scp $s.example.org:$s/$s.key.pub .; done"
    link.type(bring.replace("scp $s.example.org:", "cp ../$s/"))
    assert HOST in init
    link.type(init)
    assert copy.strip() == "for s in a b c d; do scp fed/roster.json $s.example.org:; done"
    link.type(copy.replace("scp", "cp").replace("$s.example.org:", "../$s/"))
    for name in SILOS:
        machines[name].type(join.replace("a/silo.toml", f"{name}/silo.toml"))
    for place, name in enumerate(SILOS):
        pictures(machines[name].folder / name / "data", place)
    log = link.start(start)
    wait_for(log, "silos reach the SuperLink at", 120)
    for name in SILOS:
        machines[name].start(silo.replace("a/silo.toml", f"{name}/silo.toml"))
    for name in SILOS:
        reached = {
            (host, port): machines[name].reaches(host, port)
            for host in (HOST, "127.0.0.1")
            for port in (8000, 8001)
        }
        assert {place for place, open_ in reached.items() if open_} == {(HOST, 8000)}
    assert link.reaches("127.0.0.1", 8001)
    refused = " ".join(link.type(f"{asked} || true", timeout=560).split())
    assert "has approved this plan" in refused
    for name in SILOS:
        read = approve.strip().replace("a/silo.toml", f"{name}/silo.toml")
        plan = machines[name].type(read).split("plan ")[1].split()[0]
        machines[name].type(f"{read} {plan}")
    said = link.type(run, timeout=560)
    (there,) = (link.folder / "runs").iterdir()
    here = tmp_path / "here"
    data = together([machines[name].folder / name / "silo.toml" for name in SILOS])
    run_here(FedELMY(models=2, epochs=5), data, hardware=Hardware(threads=1), seed=0, folder=here)
    assert_same_files(there, here, said)
    verdict = " ".join(link.type(f"ekiden verify {there} --keys fed/keys").split())
    assert "each signed by its silo, and the result is what they gave" in verdict
