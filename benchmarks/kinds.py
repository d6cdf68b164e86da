"""`fit` against a bare PyTorch loop for networks of each kind of data, in CPU seconds.

    python -m benchmarks.kinds [--networks unet text_mean] [--batches 20 128] [--pairs 9]

Both have the same samples, batches and optimiser, without augmentation and validation. They take
turns; printed is the median of the pairs' ratios.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from ekiden import Hardware, Training, federate, load, split
from ekiden.core.models import catalogue
from ekiden.core.training.feed import feed_for
from ekiden.core.training.fit import Bench, fit
from ekiden.core.training.network import Network
from ekiden.data import FederatedData, Subset

WORDS = 40  # of a text
NETWORKS = ("unet", "cnn_signal", "text_mean", "text_transformer", "table_mlp", "table_transformer")


def texts(n: int, folder: Path) -> FederatedData:
    """Texts of equal length."""
    rows = ["text,label"]
    for i in range(n):
        words = (f"w{k}" for k in torch.randint(400, (WORDS,)).tolist())
        rows.append(f"{' '.join(words)},{'ab'[i % 2]}")
    (folder / "texts.csv").write_text("\n".join(rows) + "\n")
    return split(load(str(folder / "texts.csv"), text_column="text"), "iid", 1)


def table(n: int, folder: Path) -> FederatedData:
    """Two numbers and two categories."""
    rows = ["age,score,sex,site,died"]
    for i, (age, score) in enumerate(torch.rand(n, 2).tolist()):
        died = int(age + score > 1)
        rows.append(f"{90 * age:.2f},{score:.4f},{'fm'[i % 2]},{'ABC'[i % 3]},{died}")
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    return federate({"a": str(folder / "table.csv")}, label_column="died", val_fraction=0)


def samples(network: str, n: int, folder: Path) -> FederatedData:
    """At least `n` samples of the kind that a network reads, at one client."""
    if network.startswith("text"):
        return texts(2 * n, folder)
    if network.startswith("table"):
        return table(n, folder)
    if network == "cnn_signal":
        return federate([(torch.randn(n, 2, 128), torch.randint(3, (n,)))], val_fraction=0)
    images = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8)
    if network == "unet":
        return federate([(images, torch.randint(2, (n, 32, 32)))], val_fraction=0)
    return federate([(images, torch.randint(10, (n,)))], val_fraction=0)


def loops(network: str, batch: int, n: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return an epoch of the bare loop and one of `fit`."""
    with tempfile.TemporaryDirectory() as folder:
        data = samples(network, n, Path(folder))
    dataset, held = data.dataset, data.clients[0].train
    train = Subset(held.samples, held.rows[:n])
    none = Subset(held.samples, held.rows[:0])

    def build() -> torch.nn.Module:
        return catalogue.build(network, dataset.shape, dataset.outputs, dataset.inputs)

    hardware, twin, ours = Hardware(threads=1), build(), Network(build())
    feed = feed_for(dataset, hardware, ours.module)
    bench = Bench(ours, feed, Training(select="last", batch_size=batch), hardware)
    start = ours.weights()
    x, y = train.samples.x[train.rows], train.samples.y[train.rows]

    def bare() -> None:
        optimizer = torch.optim.Adam(twin.parameters(), 1e-3, weight_decay=1e-4)
        twin.train()
        for rows in torch.split(torch.randperm(len(train)), batch):
            inputs = x[rows]
            if inputs.dtype == torch.uint8:
                inputs = inputs.float().div_(255)
            elif not inputs.is_floating_point():
                inputs = inputs.long()
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(twin(inputs), y[rows]))
            optimizer.step()

    return bare, lambda: fit(bench, start, train, none, epochs=1, seed=0)


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds that it takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Print one line for each network and batch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=NETWORKS)
    parser.add_argument("--batches", nargs="+", type=int, default=(20, 128))
    parser.add_argument("--pairs", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for network in args.networks:
        for batch in args.batches:
            bare, ours = loops(network, batch, max(2 * batch, 200))
            ratios = [seconds(ours) / seconds(bare) for _ in range(args.pairs + 1)][1:]
            print(f"{network:18} batch {batch:4}: {statistics.median(ratios):.3f} of the bare loop")


if __name__ == "__main__":
    main()
