"""Bound what a step may allocate, on systems that can: a small file can ask for more than there is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STATUS = Path("/proc/self/status")


@contextmanager
def limited(most: int) -> Iterator[None]:
    """Let this process allocate at most `most` bytes more inside; further allocations fail."""
    if not _STATUS.exists():
        yield
        return
    # Linux alone has both
    import resource

    told = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmData"))
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    ends = {*limits} - {resource.RLIM_INFINITY}
    soft = min({1024 * int(told.split()[1]) + most, *ends})
    resource.setrlimit(resource.RLIMIT_DATA, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
