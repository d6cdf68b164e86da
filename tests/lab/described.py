"""Samples that clients hold, to describe."""

import torch

from ekiden.data import Dataset, Dirichlet, FederatedData, Iid, Samples, split
from ekiden.readers.kinds import of_tensor


def toy(classes: int, clients: int, n: int = 2000) -> FederatedData:
    """Samples of classes in turn."""
    y = torch.arange(n) % classes
    samples = Samples(torch.zeros(n, 1), y)
    dataset = Dataset(
        "toy",
        samples,
        samples,
        tuple(f"class{c}" for c in range(classes)),
        inputs=of_tensor(samples.x),
    )
    return split(dataset, Iid() if clients > 20 else Dirichlet(0.5, 1), clients, seed=0)
