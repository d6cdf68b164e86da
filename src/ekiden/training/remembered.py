"""Outputs of frozen parts of a network: computed once for each sample, kept in memory and on the disk."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

log = logging.getLogger("ekiden")

_MOST = 2 * 10**9  # bytes of outputs for one sample set; larger ones are computed each time
_LONG = 1 << 14  # an output of up to this many numbers is kept even if the sample has fewer
_WORTH = 5.0  # seconds of computing from which outputs are kept on the disk
_PAUSE = 60.0  # seconds between two writes


@dataclass(eq=False)
class RememberedAnswers:
    """The outputs of one frozen part for the samples of one set.

    Each sample goes through the part alone. So its output depends only on the sample, not on the batch, the client, the
    order, or what was known before.

    Attributes:
        values: (n, ...) float32; on the device.
        known: (n,) bool; on the CPU.
        file: where they are kept; None: in memory alone.
        unsaved: seconds spent on computing outputs that are not in the file.
        saved_at: when the file was last written.
    """

    values: Tensor
    known: Tensor
    file: Path | None
    unsaved: float = 0.0
    saved_at: float = 0.0

    @classmethod
    def of(cls, first: Tensor, sample: Tensor, samples: int, file: Path | None) -> "RememberedAnswers | None":
        """Return room for outputs like `first` (1, ...) for `sample` (1, ...), with those in the file.

        It is None if they are not worth keeping: larger than the samples, or as long as a text.
        """
        if first.numel() > max(sample.numel(), _LONG) or first.numel() * 4 * samples > _MOST:
            return None
        if not sample.is_floating_point() and first.dim() > 2:
            return None
        values = torch.zeros(samples, *first.shape[1:], device=first.device)
        known = torch.zeros(samples, dtype=torch.bool)
        if file is not None and file.is_file():
            with contextlib.suppress(OSError, SafetensorError, KeyError):  # any error: the outputs can be computed
                found = load_file(file)
                if found["values"].shape == values.shape and found["known"].shape == known.shape:
                    values, known = found["values"].to(first.device), found["known"].bool()
        return cls(values, known, file, saved_at=time.monotonic())

    def get(self, index: Tensor, compute: Callable[[int], Tensor]) -> Tensor:
        """Return the outputs (b, ...) for samples `index` (b,); `compute` gives that of one sample, (1, ...)."""
        rows = index.cpu()
        missing = torch.unique(rows[~self.known[rows]])
        if len(missing):
            began = time.monotonic()
            for row in missing.tolist():
                self.values[row] = compute(row)[0]
            self.known[missing] = True
            self.unsaved += time.monotonic() - began
        if self.unsaved > _WORTH and (bool(self.known.all()) or time.monotonic() - self.saved_at > _PAUSE):
            self.save()
        return self.values[index]

    def save(self) -> None:
        """Write the file; a folder that cannot be written to is not an error."""
        self.unsaved, self.saved_at = 0.0, time.monotonic()
        if self.file is None:
            return
        with contextlib.suppress(OSError, SafetensorError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.file.parent, prefix=f".{self.file.stem}-")
            os.close(handle)
            try:
                save_file({"values": self.values.cpu(), "known": self.known}, temporary)
                os.replace(temporary, self.file)  # readers see the whole file or none
            finally:
                Path(temporary).unlink(missing_ok=True)
