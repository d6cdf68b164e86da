"""Peak memory of FedELMY with ResNet-18, in models beyond activations and data.

    python -m benchmarks.memory

Two fresh processes train on the same batch size: one holds only parameters and gradients (2 M) and its activations,
the other runs FedELMY with S = 5 in a run folder. The difference of their peaks, plus those 2 M, is what the method
and its safety need. The allocator is told to give freed blocks back at once, so that a peak is what was alive.
"""

import os
import resource
import tempfile
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from ekiden import Hardware, Training, federate, models, run
from ekiden.data import FederatedData
from ekiden.methods import FedELMY

MODELS = 5
BATCH = 16
M = 44_734_408


def data() -> FederatedData:
    """Two silos of few images."""
    x = torch.randint(256, (2 * BATCH, 3, 32, 32), dtype=torch.uint8)
    y = torch.arange(2 * BATCH) % 10
    return federate([(x, y), (x, y)], test=(x, y), val_fraction=0.5)


def plain() -> int:
    """Peak bytes of forward and backward passes and of an evaluation, alone."""
    torch.set_num_threads(1)
    samples = data()  # what the other process holds too, as is what importing an optimiser brings
    torch.optim.Adam([torch.zeros(1)])
    network = models.build("resnet18", (3, 32, 32), 10)
    for _ in range(3):
        loss = F.cross_entropy(network(torch.rand(BATCH, 3, 32, 32)), torch.zeros(BATCH, dtype=torch.int64))
        network.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            network.eval()(torch.rand(2 * BATCH, 3, 32, 32))
        network.train()
    assert samples.clients
    return peak()


def fedelmy() -> int:
    """Peak bytes of a run of two hops."""
    with tempfile.TemporaryDirectory() as folder:
        method = FedELMY(models=MODELS, epochs=2, warmup=1, alpha=0.5)
        run(
            method,
            data(),
            "resnet18",
            training=Training(batch_size=BATCH),
            hardware=Hardware(threads=1),
            folder=f"{folder}/run",
        )
        return peak()


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the peak in models."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "100000"  # for the processes started below
    peaks = []
    for work in (plain, fedelmy):
        with get_context("spawn").Pool(1) as pool:
            peaks.append(pool.apply(work))
    beyond = (peaks[1] - peaks[0]) / M + 2
    print(f"FedELMY, ResNet-18, S = {MODELS}: {beyond:.1f} M beyond activations and data (bound: S + 6 = {MODELS + 6})")


if __name__ == "__main__":
    main()
