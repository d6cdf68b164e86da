"""Seeds: each is derived from names and numbers, so nothing depends on a global random state."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def derive(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on all `parts` and on nothing else."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let what draws from PyTorch's global generators draw from `seed`; the CPU's draws outside stay what they were."""
    with torch.random.fork_rng(devices=[]):
        if torch.cuda.is_available() or torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # the same, but torch.manual_seed takes a traceback for each kind of device that may come later
            torch.default_generator.manual_seed(seed)
        yield
