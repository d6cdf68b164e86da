"""Eight hospitals train one model while processes are killed at random; it ends with the bits of a
run without faults.

    make hospital                                     # or: python -m benchmarks.hospital --seed 1 --faults 10

A real SuperLink and eight SuperNodes run on this machine, with TLS and keys. Faults follow from the
seed, but not when they strike: SIGKILL to all processes of a hospital, one that stays dead for more
than a minute, and SIGKILL to the process that leads the run, which `ekiden resume` continues. Then
model and ledger are compared byte by byte with those of a run in one process that nothing
disturbed. It ends with code 1 if they differ.
"""

import argparse
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import ekiden
from ekiden.methods import FedELMY

SITES = tuple(f"hospital-{i}" for i in range(8))
METHOD = FedELMY(models=2, epochs=200, warmup=10)
FLAGS = ("fedelmy", "--models", "2", "--epochs", "200", "--warmup", "10", "--model", "mlp")
OWN = f"""
from dataclasses import replace

from ekiden.data import load, split

def mine():
    found = split(load("digits"), "dirichlet:0.5", {len(SITES)}, seed=0)
    clients = tuple(replace(c, name=f"hospital-{{i}}") for i, c in enumerate(found.clients))
    return replace(found, clients=clients)
"""
DEAD = 75.0  # seconds


class Hospitals:
    """The processes of a federation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.began = time.monotonic()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        (folder / "own.py").write_text(OWN, encoding="utf-8")
        with ExitStack() as held:
            probes = [held.enter_context(socket.socket()) for _ in range(2)]
            for probe in probes:
                probe.bind(("127.0.0.1", 0))
            ports = [str(probe.getsockname()[1]) for probe in probes]
        self.ekiden(
            *(
                "federation",
                "init",
                "fed",
                "--silos",
                ",".join(SITES),
                "--data",
                f"{folder / 'own.py'}:mine",
                "--level",
                "models",
            ),
            *("--port", ports[0], "--control-port", ports[1]),
        )
        for site in SITES:
            with open(folder / "fed" / "silos" / site / "silo.toml", "a", encoding="utf-8") as file:
                file.write("\n[hardware]\nthreads = 1\n")

    def say(self, line: str) -> None:
        """Print what happened, and when."""
        print(f"{time.monotonic() - self.began:5.0f} s  {line}", flush=True)

    def ekiden(self, *words: str) -> None:
        """Run a command and wait for its end."""
        subprocess.run([*_EKIDEN, *words], cwd=self.folder, check=True, stdout=subprocess.DEVNULL)

    def start(self, name: str, *words: str) -> None:
        """Run a command that keeps running; it prints into NAME.log."""
        with open(self.folder / f"{name}.log", "ab") as log:
            self.running[name] = subprocess.Popen(
                [*_EKIDEN, *words], cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def open(self, site: str) -> None:
        """Start a hospital."""
        self.start(site, "silo", "start", f"fed/silos/{site}/silo.toml")

    def kill(self, name: str) -> None:
        """SIGKILL to all processes of one party."""
        process = self.running.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_leader(self) -> bool:
        """SIGKILL to the ServerApp that leads the run; return whether there was one."""
        for process, command in _descendants(self.running["link"].pid):
            if b"flwr-serverapp" in command:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    return True
        return False

    def lines(self, name: str) -> list[str]:
        """Return what a command has printed."""
        file = self.folder / f"{name}.log"
        return (
            file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
        )


_EKIDEN = (sys.executable, "-m", "ekiden")


def _descendants(process: int) -> Iterator[tuple[int, bytes]]:
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split()):
            with suppress(OSError):
                yield child, Path(f"/proc/{child}/cmdline").read_bytes()
            yield from _descendants(child)


@contextmanager
def hospitals() -> Iterator[Hospitals]:
    """Make a federation, start all of it, and end all of it with the block."""
    with TemporaryDirectory(prefix="hospital-") as folder:
        made = Hospitals(Path(folder))
        try:
            made.start("link", "federation", "start", "fed")
            while not any("silos reach the SuperLink" in line for line in made.lines("link")):
                if made.running["link"].poll() is not None:
                    sys.exit("\n".join(made.lines("link")))
                time.sleep(0.5)
            for site in SITES:
                made.open(site)
            yield made
        finally:
            for process in made.running.values():
                process.terminate()
            time.sleep(3)
            for name in list(made.running):
                made.kill(name)


def disturbed(made: Hospitals, seed: int, faults: int) -> Path:
    """Run while processes are killed, and return the run folder."""
    draw = random.Random(seed)
    kinds = ["dies"] * max(0, faults - 2) + ["is dead for a while", "leader"][: min(2, faults)]
    draw.shuffle(kinds)
    made.start("run", "run", *FLAGS, "--on", "flower", "--federation", "fed")
    folder, told, back = made.folder / "runs" / "fedelmy-flower-seed0", 0, dict[str, float]()
    strike = float("inf")
    while True:
        time.sleep(0.5)
        new = made.lines("run")[told:]
        told += len(new)
        for line in new:
            if line.startswith("ekiden: ") and "step" in line:
                made.say(f"coordinator: {line.removeprefix('ekiden: ')}")
                strike = min(
                    strike, time.monotonic()
                )  # nothing is killed before the run is on its way
        for site in [site for site, moment in back.items() if moment < time.monotonic()]:
            del back[site]
            made.open(site)
            made.say(f"{site} is back")
        if (code := made.running["run"].poll()) is not None:
            if code == 0:
                return folder
            if not (folder / "config.json").exists():
                sys.exit("\n".join(made.lines("run")))
            made.say("the run ended early: `ekiden resume` continues it")
            made.start("run", "resume", str(folder))
        elif kinds and time.monotonic() > strike:
            strike = time.monotonic() + draw.uniform(5, 20)
            kind = kinds.pop()
            if kind == "leader":
                if made.kill_leader():
                    made.say("SIGKILL: the process that leads the run")
                else:
                    kinds.insert(0, kind)
                continue
            site = draw.choice([site for site in SITES if site not in back])
            made.kill(site)
            made.say(f"SIGKILL: {site} {kind}")
            back[site] = time.monotonic() + (DEAD if kind != "dies" else draw.uniform(1, 10))


def main() -> None:
    """Compare the two runs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0, help="which faults (default 0)")
    parser.add_argument("--faults", type=int, default=6, help="how many (default 6)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the blocks below end what they began
    with TemporaryDirectory(prefix="undisturbed-") as here, hospitals() as made:
        scope: dict[str, Any] = {}
        exec(OWN, scope)
        result = ekiden.run(
            METHOD,
            scope["mine"](),
            "mlp",
            folder=Path(here) / "run",
            hardware=ekiden.Hardware(threads=1),
            quiet=True,
        )
        made.say(f"undisturbed, in one process: {result.metrics[-1]['accuracy']:.4f}")
        there = disturbed(made, options.seed, options.faults)
        same = {
            name: (there / name).read_bytes() == (Path(here) / "run" / name).read_bytes()
            for name in ("model.safetensors", "ledger.jsonl")
        }
        for name, equal in same.items():
            made.say(f"{name}: {'the same bits' if equal else 'DIFFERS'}")
    sys.exit(0 if all(same.values()) else 1)


if __name__ == "__main__":
    main()
