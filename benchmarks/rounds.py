"""A round of many small clients against one bare PyTorch loop, and what clients that are not drawn
cost.

    python -m benchmarks.rounds

100 clients of 100 samples each, one epoch a round: the same samples, batches and optimiser steps as
in the bare loop, which makes one network and one optimiser and knows no clients. Contestants take
turns; printed are ratios of medians of CPU time, all in one thread, so that what else runs on the
machine does not count. Then 10 clients drawn from 100 and from 1,000, in a run folder: milliseconds
a round and growth of the memory.

    python -m benchmarks.rounds --workers 2

Instead: how much faster the round is with so many worker processes, by the clock (leave the machine
idle), and how much so many bare loops side by side do more than one, which is what the cores have
to give.
"""

import argparse
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import nn

from ekiden import Augment, Hardware, Training, run
from ekiden.core.engine.method import Method
from ekiden.core.models import catalogue
from ekiden.data import ClientData, FederatedData, Samples, Subset, from_tensors
from ekiden.methods import SCAFFOLD, FedAvg, FedDC

SHAPE, CLASSES, EACH, BATCH = (3, 32, 32), 10, 100, 20
TRAINING = Training(optimizer="sgd", lr=0.01, momentum=0.9, batch_size=BATCH, select="last")
HARDWARE = Hardware(threads=1)


def federation(clients: int, samples: int) -> FederatedData:
    """Clients with `samples` training samples each, images of the size of CIFAR-10."""
    n = clients * samples
    x, y = torch.randint(256, (n, *SHAPE), dtype=torch.uint8), torch.randint(CLASSES, (n,))
    dataset = from_tensors(
        (x, y), (x[:CLASSES], y[:CLASSES]), classes=tuple("abcdefghij"), augment=Augment()
    )
    none = Subset(dataset.train, torch.arange(0))
    tests = (
        Subset(dataset.test, torch.arange(CLASSES)),
        *(Subset(dataset.test, none.rows) for _ in range(clients)),
    )
    held = enumerate(zip(torch.split(torch.arange(n), samples), tests, strict=False))
    return FederatedData(
        dataset,
        tuple(
            ClientData(f"client-{i}", Subset(dataset.train, r), none, test) for i, (r, test) in held
        ),
    )


def round_seconds(
    method: Method,
    data: FederatedData,
    folder: str | None,
    rounds: int,
    workers: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> list[float]:
    """Seconds of each round after the first, evaluation left out."""
    ends: list[float] = []
    run(
        method,
        data,
        "lenet",
        training=TRAINING,
        hardware=HARDWARE,
        folder=folder,
        workers=workers,
        evaluate_every=10**9,
        on_step=lambda row: ends.append(clock()),
        stop_after=rounds,
    )
    return [b - a for a, b in itertools.pairwise(ends)]


def bare(module: nn.Module, data: Samples) -> None:
    """What anybody would write over the same preloaded tensors."""
    optimizer = torch.optim.SGD(module.parameters(), TRAINING.lr, momentum=TRAINING.momentum)
    module.train()
    for rows in torch.split(torch.randperm(len(data)), BATCH):
        inputs = data.x[rows].float().div_(255)
        optimizer.zero_grad()
        F.cross_entropy(module(inputs), data.y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def throughput(clients: int, turns: int) -> None:
    """A round against the bare loop, in memory and in a run folder."""
    data = federation(clients, EACH)
    module = catalogue.build("lenet", SHAPE, CLASSES)
    rounds = turns + 1

    def of(folder: str | None) -> Callable[[], float]:
        return lambda: statistics.median(round_seconds(FedAvg(rounds=9, epochs=1), data, folder, 2))

    def loop() -> float:
        began = time.process_time()
        bare(module, data.dataset.train)
        return time.process_time() - began

    times: dict[str, list[float]] = {"bare loop": [], "in memory": [], "in a run folder": []}
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, work in zip(times, (loop, of(None), of(f"{folder}/run")), strict=True):
                seconds = work()
                if turn:  # the first turn warms up
                    times[name].append(seconds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"a round of {clients} clients of {EACH} samples, batch {BATCH}, small CNN, one thread")
    for name, seconds in medians.items():
        speed = len(data.dataset.train) / seconds
        print(f"  {name:16} {speed:8.0f} samples/s   {medians['bare loop'] / seconds:5.3f} of bare")


def scale(method: Method, clients: int, rounds: int) -> tuple[float, float]:
    """Seconds of a round and megabytes by which the process grows in `rounds`, 10 clients drawn for
    each.
    """
    torch.set_num_threads(1)
    data = federation(clients, 20)
    with tempfile.TemporaryDirectory() as folder:
        round_seconds(method, data, f"{folder}/warm", 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds = round_seconds(method, data, f"{folder}/run", rounds)
    return statistics.median(seconds), (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    ) / 1024


def bare_seconds(samples: int, start: float) -> float:
    """Clock seconds of the bare loop in this process, begun at `start`, when it is ready."""
    torch.set_num_threads(1)
    data, module = federation(1, samples).dataset.train, catalogue.build("lenet", SHAPE, CLASSES)
    bare(module, data)
    time.sleep(max(0.0, start - time.time()))
    began = time.perf_counter()
    bare(module, data)
    return time.perf_counter() - began


def scaling(clients: int, workers: int, turns: int) -> None:
    """A round in one and in several processes, next to bare loops alone and side by side."""
    data = federation(clients, EACH)
    seconds: dict[int, list[float]] = {1: [], workers: []}
    loops: dict[int, list[float]] = {1: [], workers: []}
    for _ in range(turns):
        for n in seconds:
            seconds[n] += round_seconds(
                FedAvg(rounds=9, epochs=1), data, None, 4, n, time.perf_counter
            )
            with get_context("spawn").Pool(n) as pool:
                slowest = max(
                    pool.starmap(
                        bare_seconds, [(clients * EACH, time.time() + 12)] * n, chunksize=1
                    )
                )
            loops[n].append(slowest / n)
    print(f"a round of {clients} clients of {EACH} samples, batch {BATCH}, small CNN, by the clock")
    for name, times in (("--workers", seconds), ("bare loops", loops)):
        one, several = statistics.median(times[1]), statistics.median(times[workers])
        print(
            f"  {name:10} 1: {one:5.2f} s   {workers}: {several:5.2f} s   {one / several:5.2f} "
            "times"
        )


def main() -> None:
    """Print ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.workers:
        scaling(args.clients, args.workers, args.turns)
        return
    throughput(args.clients, args.turns)
    if not args.rounds:
        return
    print(
        f"10 clients drawn for each of {args.rounds} rounds, in a run folder: seconds a round, "
        "growth of the process"
    )
    for kind in (FedAvg, SCAFFOLD, FedDC):
        for clients in (100, 1000):
            method = kind(rounds=args.rounds, epochs=1, participation=10 / clients)
            with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
                seconds, grown = pool.apply(scale, (method, clients, args.rounds))
            print(f"  {method.title():9} of {clients:5}: {1000 * seconds:6.1f} ms, {grown:6.1f} MB")


if __name__ == "__main__":
    main()
