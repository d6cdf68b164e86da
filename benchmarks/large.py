"""What steps of a large model cost in a run folder, against the same arithmetic without Ekiden.

    python -m benchmarks.large           # 300 MB
    python -m benchmarks.large 1000      # other megabytes

The network is one linear layer, and each client takes one step of SGD on two samples, so that the numbers have what
moving and keeping a model costs, not what training costs. "Bare" copies the model, takes the step and, for FedAvg with
four clients, averages. "Writing" is one write of the model with a digest, which each step needs to survive a power cut.
All take turns in one process. Seconds are CPU time of one thread, with what the system spends for this process.
"""

import itertools
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
from ekiden.base.files import safetensors_chunks, with_digest, write
from ekiden.data import from_tensors
from ekiden.engine.method import Method
from ekiden.methods import FedAvg, FedSeq

WIDTH, CLIENTS, BATCH, TURNS = 4096, 4, 2, 3
TRAINING = Training(optimizer="sgd", lr=0.01, weight_decay=0.0, batch_size=BATCH, select="last")


def network(megabytes: int) -> nn.Linear:
    """Make a network of this size: 4,096 features, and as many outputs as it takes."""
    return nn.Linear(WIDTH, megabytes * 10**6 // (4 * WIDTH), bias=False)


def bare(model: Tensor, x: Tensor, y: Tensor, clients: int) -> Tensor:
    """Return the mean of what so many clients train in one step from `model`, as a loop without Ekiden would."""
    total: Tensor | None = None
    for client in range(clients):
        weights = model.clone().requires_grad_()
        loss = cross_entropy(x[client * BATCH : (client + 1) * BATCH] @ weights.T, y[client * BATCH :][:BATCH])
        (gradient,) = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            weights -= TRAINING.lr * gradient
            total = weights.detach() if total is None else total.add_(weights.detach())
    assert total is not None
    return total if clients == 1 else total.div_(clients)


def clocked(work: Callable[[], object]) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def steps(method: Method, megabytes: int, x: Tensor, y: Tensor, folder: Path) -> list[float]:
    """Return the CPU seconds of each step but the first, which makes the model."""
    layer = network(megabytes)
    classes = tuple(map(str, range(layer.out_features)))
    silos = split(from_tensors((x, y), (x[:1], y[:1]), classes=classes), "iid", CLIENTS, val_fraction=0)
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


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    x, y = torch.rand(CLIENTS * BATCH, WIDTH), torch.arange(CLIENTS * BATCH)
    model = network(megabytes).weight.detach()
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for turn in range(TURNS):
            one = clocked(lambda: bare(model, x, y, 1))
            all_of_them = clocked(lambda: bare(model, x, y, CLIENTS))
            writing = clocked(
                lambda: write(place / "model", with_digest(safetensors_chunks({"0": model}, {})), sync=True)
            )
            for name, base, method in (
                ("FedSeq", one, FedSeq(epochs=1)),
                (f"FedAvg, {CLIENTS} clients", all_of_them, FedAvg(rounds=TURNS + 1, epochs=1)),
            ):
                ours = median(steps(method, megabytes, x, y, place / f"{name}-{turn}"))
                for column, seconds in zip(("bare", "writing", "ours"), (base, writing, ours), strict=True):
                    found.setdefault(f"{name} {column}", []).append(seconds)
                found.setdefault(f"{name} ratio", []).append(ours / (base + writing))
    print(f"| {megabytes} MB | bare, s | writing once, s | a step, s | of bare plus writing |\n|---|---|---|---|---|")
    for name in ("FedSeq", f"FedAvg, {CLIENTS} clients"):
        numbers = (f"{median(found[f'{name} {column}']):.2f}" for column in ("bare", "writing", "ours", "ratio"))
        print(f"| {name} | {' | '.join(numbers)} |")


if __name__ == "__main__":
    main()
