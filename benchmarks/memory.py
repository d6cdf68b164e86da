"""Peak memory of FedELMY with ResNet-18, in models beyond activations and data.

    python -m benchmarks.memory

Two fresh processes train on the same batch size: one holds only parameters and gradients (2 M) and
its activations, the other runs FedELMY with S = 5 in a run folder. The difference of their peaks,
plus those 2 M, is what the method and its safety need. The allocator is told to give freed blocks
back at once, so that a peak is what was alive.
"""

import gc
import os
import resource
import tempfile
import warnings
from multiprocessing import get_context

import torch
import torch.nn.functional as F

from ekiden import Hardware, Training, federate, run
from ekiden.core.models import catalogue
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
    network = catalogue.build("resnet18", (3, 32, 32), 10)
    for _ in range(3):
        loss = F.cross_entropy(
            network(torch.rand(BATCH, 3, 32, 32)), torch.zeros(BATCH, dtype=torch.int64)
        )
        network.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.inference_mode():
            network.eval()(torch.rand(2 * BATCH, 3, 32, 32))
        network.train()
    assert samples.clients
    return peak()


def fedelmy() -> tuple[int, float]:
    """Peak bytes of a run of two hops, and the most models' worth of tensors alive after an
    epoch.
    """
    most = 0.0

    def watch(client: str, epoch: int, epochs: int) -> None:
        nonlocal most
        most = max(most, alive())

    with tempfile.TemporaryDirectory() as folder:
        method = FedELMY(models=MODELS, epochs=2, warmup=1, alpha=0.5)
        run(
            method,
            data(),
            "resnet18",
            training=Training(batch_size=BATCH),
            hardware=Hardware(threads=1),
            folder=f"{folder}/run",
            watch=watch,
        )
        return peak(), most


def alive() -> float:
    """Tensors of more than a megabyte that exist now, in models, each memory counted once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old names in torch that wake up when looked at
        tensors = [o for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(size for size in memory.values() if size > 1e6)) / M


def peak() -> int:
    """Peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Print the peak in models."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "100000"  # for the processes started below
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        alone = pool.apply(plain)
        whole, most = pool.apply(fedelmy)
    print(f"FedELMY, ResNet-18, S = {MODELS}, in models; bound: S + 6 = {MODELS + 6}")
    print(f"  peak of the process beyond activations and data: {(whole - alone) / M + 2:.2f}")
    print(f"  tensors alive after an epoch, at most:           {most:.2f}")


if __name__ == "__main__":
    main()
