"""What aggregation costs for N perceptrons 784-400-200-100-10: seconds next to those of the MA-Echo
paper, and memory.

    python -m benchmarks.aggregation

Models are random, projectors those of as many batches of random samples as MNIST would give.
Seconds are those of one core, so that a busy machine does not matter. Every number of clients has a
process of its own; its peak is what it needs beyond an empty one.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ekiden import Hardware, federate, run
from ekiden.core.engine.federation import Fed
from ekiden.core.models import catalogue
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights, mean
from ekiden.methods import DENSE, MAEcho
from ekiden.methods.one_shot.blocks.curvature import projectors
from ekiden.methods.one_shot.blocks.ensemble import EnsembleModel
from ekiden.methods.one_shot.ma_echo import Contribution
from ekiden.methods.one_shot.ot_fusion import align, transport

SHAPE, CLASSES = (1, 28, 28), 10
CLIENTS = (10, 20, 50)
PAPER = {  # Table 1 of MA-Echo, elapsed seconds on its machine
    "average": (0.005, 0.008, 0.010),
    "OT fusion": (0.233, 0.557, 1.473),
    "DENSE": (626.93, 760.556, 1270.33),
    "MA-Echo": (1.883, 3.299, 9.603),
}
LIMIT = 4e9
"""bytes that MA-Echo over 50 models may need"""


@dataclass(frozen=True)
class TimedDENSE(DENSE):
    """Says how long its epochs take."""

    def synthesise(self, fed: Fed, teacher: EnsembleModel, student: nn.Module) -> Tensor:
        """As DENSE does."""
        return timed("synthesis", lambda: super(TimedDENSE, self).synthesise(fed, teacher, student))

    def distil(self, *args: Any) -> None:
        """As DENSE does."""
        timed("distillation", lambda: super(TimedDENSE, self).distil(*args))


SECONDS: dict[str, float] = {}
T = TypeVar("T")


def timed(name: str, work: Callable[[], T]) -> T:
    """Do `work` and note how many seconds of one core it takes."""
    start = time.process_time()
    result = work()
    SECONDS[name] = time.process_time() - start
    return result


def network(seed: int) -> Network:
    """A perceptron of MA-Echo."""
    torch.manual_seed(seed)
    return Network(catalogue.build("mlp_ma_echo", SHAPE, CLASSES))


def contribution(seed: int, clients: int) -> Contribution:
    """What one of so many clients of MA-Echo sends, if it has its share of the 60,000 samples of
    MNIST.
    """
    own = network(seed)
    batches = [(torch.rand(64, *SHAPE), torch.zeros(64)) for _ in range(60_000 // (64 * clients))]
    found = projectors(own.module.eval(), own.layout.hidden, batches, closed=False)
    return Contribution(
        own.weights(), [p.float() for p in found], torch.ones(CLASSES, dtype=torch.bool)
    )


def echo(clients: int) -> tuple[float, int, int]:
    """Seconds of MA-Echo, its peak in bytes, and the bytes of what the clients sent."""
    torch.set_num_threads(1)
    contribution(0, 50)  # libraries are loaded
    before = peak()
    layout, sent = network(0).layout, [contribution(i, clients) for i in range(clients)]
    each = sum(t.numel() * 4 for t in (sent[0].model.params, *sent[0].projectors))
    timed("MA-Echo", lambda: MAEcho().aggregate(sent, layout))
    return SECONDS["MA-Echo"], peak() - before, clients * each


def others(clients: int) -> dict[str, float]:
    """Seconds of the other methods; those of DENSE are estimated from one epoch."""
    torch.set_num_threads(1)
    networks = [network(i) for i in range(clients)]
    layout, sent = networks[0].layout, [n.weights() for n in networks]

    def matching(number: int, ours: Tensor, theirs: Tensor) -> Tensor:
        return transport(ours, theirs, normalise=True, squared=False)

    def fuse() -> Weights:
        return mean([align(m, sent[0], layout, matching)[0] for m in sent])

    matching(0, torch.eye(3), torch.eye(3))  # libraries are loaded
    timed("average", lambda: mean(sent))
    timed("OT fusion", fuse)
    x, y = torch.randint(256, (10, *SHAPE), dtype=torch.uint8), torch.arange(10)
    data = federate([(x, y)] * clients, test=(x, y), val_fraction=0)
    run(TimedDENSE(epochs=1, distill_epochs=1), data, "mlp_ma_echo", hardware=Hardware(threads=1))
    epochs = DENSE().distill_epochs  # epoch e synthesises one batch and learns from e
    SECONDS["DENSE"] = (
        epochs * SECONDS["synthesis"] + epochs * (epochs + 1) / 2 * SECONDS["distillation"]
    )
    return {name: SECONDS[name] for name in ("average", "OT fusion", "DENSE")}


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Print what each number of clients costs; 1 if the memory limit is missed."""
    most = 0
    print("seconds of one core (elapsed in the paper); DENSE is estimated from its first epoch")
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for i, n in enumerate(CLIENTS):
            seconds, most, sent = pool.apply(echo, (n,))
            cells = {"MA-Echo": seconds} | pool.apply(others, (n,))
            print(
                f"N = {n}:",
                ", ".join(f"{name} {cells[name]:.3f} ({PAPER[name][i]:g})" for name in PAPER),
            )
            print(
                f"  MA-Echo's peak memory {most / 1e9:.2f} GB, {most / sent:.2f} of N·(M + "
                "projectors)",
                flush=True,
            )
    print(f"limit of memory for N = {CLIENTS[-1]}: {LIMIT / 1e9:g} GB")
    return int(most > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
