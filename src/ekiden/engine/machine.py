"""What this machine has for a run: devices and cores."""

import os
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ekiden.base.checks import require
from ekiden.base.errors import UserError
from ekiden.base.settings import Hardware


def resolve(hardware: Hardware, workers: int, build: Callable[[], nn.Module]) -> Hardware:
    """Replace defaults that depend on the machine and the network, so that the run folder says what was used."""
    require(workers > 0, "workers", workers, "1 or more")
    if reason := missing(hardware.device):
        raise UserError(f"device {hardware.device!r} cannot be used here ({reason}): try --device cpu")
    if hardware.threads:
        return hardware
    small = sum(p.numel() for p in build().parameters()) < 1_000_000
    return replace(hardware, threads=1 if small else max(1, cores() // workers))


def missing(device: str) -> str:
    """Return why `device` cannot be used on this machine; empty if it can."""
    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n")[0]
    return ""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
