"""What runs with 100 to 1,000,000 clients cost: seconds to the first step, seconds a step, memory,
size of the folder.

    python -m benchmarks.clients            # all rows, each in its own process
    python -m benchmarks.clients fedavg 1000

Each client has 4 training samples of 8 numbers and the network is an mlp with 32 hidden units, so
that the table has what clients cost, not what training costs. Methods of rounds call 10 clients in
each round. A chain calls one client in a step, and gossip calls all of them. A few steps are done
in a run folder; "start" is everything before the first step, with the division of the data, and "a
step" is the median of the steps after the first. Models are measured after each step in the row
that says so, and in no other. Seconds are CPU time of one thread.
"""

import argparse
import itertools
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from ekiden import Hardware, Training, run, split
from ekiden.core.engine.method import Method
from ekiden.data import from_tensors
from ekiden.methods import SCAFFOLD, DFedAvgM, FedAvg, FedGram, FedSeq

SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
EVALUATED = "fedavg, evaluated"
METHODS = ("fedavg", EVALUATED, "fedseq", "fedgram", "scaffold", "gossip")
STEPS, EACH, FEATURES = 5, 4, 8
MOST_AT_ONCE = 10_000  # clients of gossip, which calls all of them in each step


def method_of(name: str, clients: int) -> Method:
    """Return the method with settings for so many clients."""
    drawn = 10 / clients
    match name:
        case "fedavg" | "fedavg, evaluated":
            return FedAvg(rounds=STEPS, epochs=1, participation=drawn)
        case "scaffold":
            return SCAFFOLD(rounds=STEPS, epochs=1, participation=drawn)
        case "fedseq":
            return FedSeq(epochs=1)
        case "fedgram":
            return FedGram()
        case _:
            return DFedAvgM(rounds=STEPS, epochs=1, topology="ring")


def network() -> nn.Module:
    """Make a small network."""
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 2))


def measure(name: str, clients: int) -> str:
    """Run, and return a row of the table."""
    torch.set_num_threads(1)
    x, y = torch.rand(clients * EACH, FEATURES), torch.arange(clients * EACH) % 2
    dataset = from_tensors(
        (x, y), (torch.rand(200, FEATURES), torch.arange(200) % 2), classes=("a", "b")
    )
    memory = resident()
    began, times = time.process_time(), list[float]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        run(
            method_of(name, clients),
            split(dataset, "iid", clients),
            network,
            training=Training(optimizer="sgd", batch_size=EACH, select="last"),
            hardware=Hardware(threads=1),
            folder=folder,
            evaluate_every=int(name == EVALUATED),
            stop_after=STEPS - 1,
            on_start=lambda: times.append(time.process_time()),
            on_step=lambda row: times.append(time.process_time()),
            quiet=True,
        )
        size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6
        files = sum(1 for f in folder.rglob("*") if f.is_file())
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - memory) / 1e6
    steps = statistics.median(b - a for a, b in itertools.pairwise(times[1:]))
    return f"| {name} | {clients:,} | {times[0] - began:.2f} | {steps:.3f} | {grown:.0f} | {size:.1f} | {files:,} |"


def resident() -> int:
    """Return the bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Print the table, or one of its rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("method", nargs="?", choices=METHODS)
    parser.add_argument("clients", nargs="?", type=int)
    given = parser.parse_args()
    if given.method:
        print(measure(given.method, given.clients))
        return
    print(
        "| method | clients | start, s | a step, s | memory, MB | folder, MB | files "
        "|\n|---|---|---|---|---|---|---|"
    )
    for name in METHODS:
        for clients in SIZES:
            if name == "gossip" and clients > MOST_AT_ONCE:
                continue
            command = [sys.executable, "-m", "benchmarks.clients", name, str(clients)]
            print(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(),
                flush=True,
            )


if __name__ == "__main__":
    main()
