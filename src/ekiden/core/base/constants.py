"""Tensors that are made once in a process."""

from functools import cache

import torch
from torch import Tensor


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of `values`, which nobody changes.

    Making it again at each step would wait for a GPU, and keep the step from being recorded.
    """
    # a tensor that is made while a network is traced has no values, so it is not kept
    if torch.compiler.is_exporting():
        return _made(values, dtype, device)
    return _kept(values, dtype, device)


def _made(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype, device=device)


_kept = cache(_made)
