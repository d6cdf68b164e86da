"""Training speed in bf16 against float32 on this machine.

    python -m benchmarks.precision [--networks lenet cnn] [--device cpu] [--threads 1] [--batches
    50]

Both take short turns, so that a machine that slows down slows both; printed are medians of ratios
within a turn.
"""

import argparse
import statistics
import time

import torch

from ekiden import Augment, Hardware, Training
from ekiden.core.models import catalogue
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench, fit
from ekiden.core.training.network import Network
from ekiden.data import Subset, from_tensors

SHAPES = {"mlp": (1, 28, 28), "lenet": (3, 32, 32), "cnn": (3, 32, 32), "cnn_tiny": (3, 64, 64)}
SMALL = {"mlp": 20, "lenet": 10}
"""mini-batches a turn, where more than one"""
BATCH = 128


def main() -> None:
    """Print one line per network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=[*SHAPES, "resnet18", "vgg11"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=11)
    parser.add_argument(
        "--batches",
        type=int,
        default=0,
        help="a turn; by default 1, or more of the smallest networks",
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.networks:
        compare(name, args.batches, args.device, args.threads, args.turns)


def compare(name: str, batches: int, device: str, threads: int, turns: int) -> None:
    """One network, without augmentation and validation."""
    shape, n = SHAPES.get(name, (3, 32, 32)), (batches or SMALL.get(name, 1)) * BATCH
    x, y = torch.randint(256, (n, *shape), dtype=torch.uint8), torch.randint(10, (n,))
    dataset = from_tensors((x, y), (x[:1], y[:1]), classes=tuple("abcdefghij"), augment=Augment())
    train, none = Subset(dataset.train, torch.arange(n)), Subset(dataset.train, torch.arange(0))
    benches = []
    for precision in ("float32", "bf16"):
        hardware = Hardware(device, threads, precision)
        network = Network(catalogue.build(name, shape, 10), torch.device(device))
        benches.append(Bench(network, Feed(dataset, hardware), Training(select="last"), hardware))
    start = benches[0].network.weights()
    times: list[list[float]] = [[], []]
    for turn in range(turns + 1):
        for i in (turn % 2, 1 - turn % 2):
            began = time.perf_counter()
            fit(
                benches[i], start, train, none, epochs=1, seed=0
            )  # ends with a look at the losses: all is done
            if turn:  # the first turn warms up
                times[i].append(time.perf_counter() - began)
    ratio = statistics.median(a / b for a, b in zip(*times, strict=True))
    rates = [n / statistics.median(seconds) for seconds in times]
    print(
        f"{name:9} float32 {rates[0]:8.0f} samples/s   bf16 {rates[1]:8.0f} samples/s   "
        f"{ratio:5.2f} times",
        flush=True,
    )


if __name__ == "__main__":
    main()
