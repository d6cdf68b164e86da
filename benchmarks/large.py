"""What steps of a large model cost in a run folder, against the same arithmetic without Ekiden.

    python -m benchmarks.large           # 300 MB
    python -m benchmarks.large 1000      # other megabytes, both methods
    python -m benchmarks.large 1000 fedseq

The network is one linear layer, and each client takes one step of SGD on two samples, so that the
numbers have what moving and keeping a model costs, not what training costs. "Bare" copies the model
into a network that it keeps, takes the step and, for FedAvg with four clients, averages. "Writing"
is one write of the model with a digest, which each step needs to survive a power cut. All take
turns in a process for each method. Seconds are CPU time of one thread, with what the system spends
for this process. Memory is the peak of a run, with PyTorch and the data, and of a process that goes
on with this run for one step.
"""

import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ekiden import Hardware, Training, run, split
from ekiden.core.base.files import safetensors_chunks, with_digest, write
from ekiden.core.engine.method import Method
from ekiden.data import from_tensors
from ekiden.methods import FedAvg, FedSeq

WIDTH, CLIENTS, BATCH, TURNS = 4096, 4, 2, 3
TRAINING = Training(optimizer="sgd", lr=0.01, weight_decay=0.0, batch_size=BATCH, select="last")
METHODS: dict[str, tuple[Method, int]] = {
    "fedseq": (FedSeq(epochs=1), 1),
    "fedavg": (FedAvg(rounds=TURNS + 1, epochs=1), CLIENTS),
}
"""each with the number of clients in a step"""


def network(megabytes: int) -> nn.Linear:
    """Make a network of this size: 4,096 features, and as many outputs as it takes."""
    return nn.Linear(WIDTH, megabytes * 10**6 // (4 * WIDTH), bias=False)


def bare(model: Tensor, x: Tensor, y: Tensor, clients: int) -> Callable[[], None]:
    """Return a step that trains so many clients from `model` and averages, in memory that it has
    already.
    """
    weights, total = model.clone().requires_grad_(), torch.zeros_like(model)
    weights.grad = torch.zeros_like(model)

    def step() -> None:
        for client in range(clients):
            gradient = weights.grad
            assert gradient is not None
            gradient.zero_()
            with torch.no_grad():
                weights.copy_(model)
            logits = x[client * BATCH : (client + 1) * BATCH] @ weights.T
            cross_entropy(logits, y[client * BATCH :][:BATCH]).backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                weights.sub_(gradient, alpha=TRAINING.lr)
                total.lerp_(weights, 1 / (client + 1))

    return step


def clocked(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def steps(method: Method, megabytes: int, x: Tensor, y: Tensor, folder: Path) -> list[float]:
    """Return the CPU seconds of each step but the first, which makes the model."""
    layer = network(megabytes)
    classes = tuple(map(str, range(layer.out_features)))
    silos = split(
        from_tensors((x, y), (torch.rand_like(x[:1]), y[:1]), classes=classes),
        "iid",
        CLIENTS,
        val_fraction=0,
    )
    times: list[float] = []
    run(
        method,
        silos,
        lambda: layer,
        training=TRAINING,
        hardware=Hardware(threads=1),
        folder=folder,
        evaluate_every=0,
        stop_after=TURNS,
        on_step=lambda row: times.append(time.process_time()),
        quiet=True,
    )
    return [after - before for before, after in itertools.pairwise(times)]


def peak_of(megabytes: int, name: str, x: Tensor, y: Tensor, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a step and the peak in GB, of a run that begins or goes on in
    `folder`.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    times = steps(METHODS[name][0], megabytes, x, y, folder)
    return median(times or [0]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measure(megabytes: int, name: str) -> str:
    """Return a row of the table."""
    method, clients = METHODS[name]
    x, y = samples()
    found: list[tuple[float, ...]] = []
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        ours, peak = peak_of(megabytes, name, x, y, place / "first")
        resumed = called(str(megabytes), name, str(place / "first"))
        model = network(megabytes).weight.detach()
        step = bare(model, x, y, clients)
        step()
        for turn in range(TURNS):
            base = clocked(step)
            writing = clocked(
                lambda: write(
                    place / "model", with_digest(safetensors_chunks({"0": model}, {})), sync=True
                )
            )
            ours = median(steps(method, megabytes, x, y, place / f"{turn}")) if turn else ours
            found.append((base, writing, ours, ours / (base + writing)))
    numbers = " | ".join(f"{median(column):.2f}" for column in zip(*found, strict=True))
    return f"| {name} | {megabytes} | {numbers} | {peak:.1f} | {resumed} |"


def samples() -> tuple[Tensor, Tensor]:
    """Make the samples and labels, always the same."""
    return torch.rand(
        CLIENTS * BATCH, WIDTH, generator=torch.Generator().manual_seed(0)
    ), torch.arange(CLIENTS * BATCH)


def called(*words: str) -> str:
    """Return what this script prints in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.large", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def main() -> None:
    """Print the table, or one of its rows."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    if len(sys.argv) > 3:
        print(f"{peak_of(megabytes, sys.argv[2], *samples(), Path(sys.argv[3]))[1]:.1f}")
        return
    if len(sys.argv) > 2:
        print(measure(megabytes, sys.argv[2]))
        return
    print(
        "| method | MB | bare, s | writing once, s | a step, s | of bare plus writing | memory, GB "
        "| of a resume, GB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in METHODS:
        print(called(str(megabytes), name), flush=True)


if __name__ == "__main__":
    main()
