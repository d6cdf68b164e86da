"""Tensors that are made once in a process."""

from functools import cache

import torch
from torch import Tensor


@cache
def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values`, which nobody changes.

    Making it again at each step would wait for a GPU, and keep the step from being recorded.
    """
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)
