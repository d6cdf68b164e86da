"""Training speed against a bare PyTorch loop, and what FedELMY's distances cost.

    python -m benchmarks.speed [--networks lenet resnet18] [--threads 1]
    python -m benchmarks.speed --device cuda --batches 100 --turns 5 [--precision bf16]

On a CPU seconds are those of the processor. Contestants take short turns in changing order, so that
a machine that slows down slows all of them;
printed are medians of ratios within a turn.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import Augment, Hardware, Training
from ekiden.core.models import catalogue
from ekiden.core.training.feed import feed_for
from ekiden.core.training.fit import Bench, Optimizer, Penalty, TaskLoss, fit
from ekiden.core.training.network import Network
from ekiden.data import Subset, from_tensors
from ekiden.methods import FedELMY


def main() -> None:
    """Print one line per network and contestant."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", nargs="+", default=["mlp", "lenet", "resnet18"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=0, help="by default 60, with ResNet-18 7")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument(
        "--batches", type=int, default=0, help="a turn; by default 10, with ResNet-18 1"
    )
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--pool", type=int, default=0, help="S; by default 5, with LeNet 10")
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of contestants' names")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    # as in a run: otherwise some kernels have other bits each time
    torch.backends.cudnn.deterministic = True
    for name in args.networks:
        large = name == "resnet18"
        batches, turns = args.batches or (1 if large else 10), args.turns or (7 if large else 60)
        hardware = Hardware(args.device, args.threads, args.precision)
        compare(name, batches, turns, hardware, args.batch, args.pool, tuple(args.only))


def compare(
    name: str,
    batches: int,
    turns: int,
    hardware: Hardware,
    batch: int,
    pool_size: int,
    only: tuple[str, ...],
) -> None:
    """All contestants on one network, without augmentation and validation, which the bare loop does
    not have.
    """
    n, size, device = batches * batch, pool_size or (10 if name == "lenet" else 5), hardware.device
    x = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8)
    y = torch.randint(10, (n,))
    dataset = from_tensors((x, y), (x[:1], y[:1]), classes=tuple("abcdefghij"), augment=Augment())
    training = Training(select="last", batch_size=batch)
    network = Network(catalogue.build(name, (3, 32, 32), 10), device)
    feed = feed_for(dataset, hardware, network.module)
    bench = Bench(network, feed, training, hardware)
    loss = TaskLoss(dataset.task)
    twin_of_ours = Network(catalogue.build(name, (3, 32, 32), 10), device)
    # no shortcut, on a CPU and on a GPU
    twin_of_ours.shortcuts[loss, hardware] = None
    optimizer = Optimizer(twin_of_ours.params, twin_of_ours.grad, training)
    twin_of_ours.shortcuts[loss, training, hardware, feed, dataset.train] = optimizer, None
    train = Subset(dataset.train, torch.arange(n))
    start = network.weights()
    twin = catalogue.build(name, (3, 32, 32), 10).to(device)
    x, y = x.to(device), y.to(device)

    def ours(penalty: Penalty | None, network: Network = network) -> Callable[[], object]:
        return lambda: fit(
            replace(bench, network=network),
            start,
            train,
            Subset(dataset.train, torch.arange(0)),
            epochs=1,
            seed=0,
            penalty=penalty,
        )

    def pool(models_in_pool: int, form: str, beta: float) -> Penalty | None:
        members = [
            start.with_params(start.params + 0.01 * torch.randn_like(start.params))
            for _ in range(models_in_pool)
        ]
        method = FedELMY(form=form, alpha=0.5, beta=beta)  # type: ignore[arg-type]
        return method.diversity(members, members[0])

    contestants = {
        "bare loop": lambda: bare(twin, x, y, batch, hardware),
        "fit": ours(None),
        "fit by autograd": ours(None, twin_of_ours),
        f"released form, S = {size}": ours(pool(size, "released", 1.0)),
        "released form, S = 2": ours(pool(2, "released", 1.0)),
        f"paper form, S = {size}": ours(pool(size, "paper", 1.0)),
    }
    contestants = {
        contestant: turn
        for contestant, turn in contestants.items()
        if contestant in ("bare loop", "fit") or contestant.startswith(only)
    }
    clock = time.process_time if device == "cpu" else time.perf_counter
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for turn in range(turns + 1):
        order = [*contestants][turn % len(contestants) :] + [*contestants][
            : turn % len(contestants)
        ]
        for contestant in order:
            began = clock()
            contestants[contestant]()
            if device != "cpu":
                torch.cuda.synchronize()
            if turn:  # the first turn warms up
                times[contestant].append(clock() - began)
    print(f"\n{name}, {sum(p.numel() for p in twin.parameters()):,} parameters, {hardware}")
    for contestant, seconds in times.items():
        speed = statistics.median(b / s for b, s in zip(times["bare loop"], seconds, strict=True))
        step = statistics.median(s / f for s, f in zip(seconds, times["fit"], strict=True))
        rate = n / statistics.median(seconds)
        print(
            f"  {contestant:26} {rate:9.0f} samples/s   {speed:5.3f} of bare   step {step:5.3f} of "
            "plain"
        )


def bare(module: nn.Module, x: Tensor, y: Tensor, batch: int, hardware: Hardware) -> None:
    """What anybody would write over the same preloaded tensors."""
    optimizer = torch.optim.Adam(module.parameters(), 1e-3, weight_decay=1e-4)
    module.train()
    for rows in torch.split(torch.randperm(len(x)), batch):
        inputs = x[rows].float().div_(255)
        optimizer.zero_grad()
        with hardware.autocast():
            loss = F.cross_entropy(module(inputs), y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


if __name__ == "__main__":
    main()
