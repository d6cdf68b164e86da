"""Frozen parts of a network: their values never change, so they do not travel and are named by a
digest.

Their outputs are computed once for each sample, and kept in memory and on the disk.
"""

import contextlib
import copy
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MethodType
from typing import Any, Protocol, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ekiden.core.base.files import add_tensor

log = logging.getLogger("ekiden")
# bytes of outputs for one sample set; larger ones are computed each time
_MOST = 2 * 10**9
# an output of up to this many numbers is kept even if the sample has fewer
_LONG = 1 << 14
# seconds of computing from which outputs are kept on the disk
_WORTH = 5.0
# seconds between two writes
_PAUSE = 60.0
# names of former parameters and of running statistics
_FIXED = "_ekiden_fixed"
# digest of a part that always gives the same output for the same input
_KEY = "_ekiden_key"
# attribute of a batch that says which samples it has; see `Source`
SOURCE = "_ekiden_source"


@dataclass(eq=False)
class RememberedAnswers:
    """The outputs of one frozen part for the samples of one set.

    Each sample goes through the part alone. So its output depends only on the sample, not on the
    batch, the client, the order, or what was known before.
    """

    values: Tensor  # (n, ...) float32; on the device
    known: Tensor  # (n,) bool; on the CPU
    file: Path | None  # where they are kept; None: in memory alone
    unsaved: float = 0.0  # seconds spent on computing outputs that are not in the file
    saved_at: float = 0.0  # when the file was last written

    @classmethod
    def of(
        cls, first: object, sample: Tensor, samples: int, file: Path | None
    ) -> "RememberedAnswers | None":
        """Return room for outputs like `first` (1, ...) for `sample` (1, ...), with those in the
        file.

        It is None if they cannot be kept, as several tensors, or are not worth it: larger than the
        samples, or as long as a text.
        """
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        if first.numel() > max(sample.numel(), _LONG) or first.numel() * 4 * samples > _MOST:
            return None
        if not sample.is_floating_point() and first.dim() > 2:
            return None
        values = torch.zeros(samples, *first.shape[1:], device=first.device)
        known = torch.zeros(samples, dtype=torch.bool)
        if file is not None and file.is_file():
            # any error: the outputs can be computed
            with contextlib.suppress(OSError, SafetensorError, KeyError):
                found = load_file(file)
                if found["values"].shape == values.shape and found["known"].shape == known.shape:
                    values = found["values"].to(first.device)
                    known = found["known"].bool()
        return cls(values, known, file, saved_at=time.monotonic())

    def get(self, index: Tensor, compute: Callable[[int], Tensor]) -> Tensor:
        """Return the outputs (b, ...) for samples `index` (b,); `compute` gives that of one sample,
        (1, ...).
        """
        rows = index.cpu()
        missing = torch.unique(rows[~self.known[rows]])
        if len(missing):
            began = time.monotonic()
            for row in missing.tolist():
                self.values[row] = compute(row)[0]
            self.known[missing] = True
            self.unsaved += time.monotonic() - began
        if self.unsaved > _WORTH and (
            bool(self.known.all()) or time.monotonic() - self.saved_at > _PAUSE
        ):
            self.save()
        return self.values[index]

    def save(self) -> None:
        """Write the file; a folder that cannot be written to is not an error."""
        self.unsaved = 0.0
        self.saved_at = time.monotonic()
        if self.file is None:
            return
        with contextlib.suppress(OSError, SafetensorError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.file.parent, prefix=f".{self.file.stem}-")
            os.close(handle)
            try:
                save_file({"values": self.values.cpu(), "known": self.known}, temporary)
                # readers see the whole file or none
                os.replace(temporary, self.file)
            finally:
                Path(temporary).unlink(missing_ok=True)


class Source(Protocol):
    """Knows which samples a batch has, and the outputs of frozen parts for them."""

    def answer(self, key: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `compute` gives for the batch, one sample at a time."""


def fix(module: nn.Module) -> nn.Module:
    """Turn everything in `module` that needs no gradient into constants of it, in place; return the
    module.

    A frozen parameter becomes a buffer that is not persistent: `state_dict`, `parameters` and
    `Network` leave it out, and copies keep it. A part all of whose parameters are frozen stays in
    evaluation mode, with its running statistics. It is run only once for a sample, unless samples
    are augmented. Modules without frozen parameters or constants do not change.
    """
    frozen = {id(p) for p in module.parameters() if not p.requires_grad} | {
        id(t) for _, t in fixed(module)
    }
    if not frozen:
        return module
    for part in _still(module, frozen):
        for inner in part.modules():
            _note(inner, [n for n in inner._buffers if n not in inner._non_persistent_buffers_set])
            inner._non_persistent_buffers_set.update(inner._buffers)
            # otherwise loading invents a counter that is not in the file
            if isinstance(inner, _BatchNorm):
                inner.track_running_stats = False
        part.eval()
        _set(part, "train", _stay)
    sequences = [
        m
        for m in module.modules()
        if type(m) is nn.Sequential and any(id(p) in frozen for p in m.parameters())
    ]
    lengths = {id(m): _leading(m, frozen) for m in sequences}
    for part in module.modules():
        names = [n for n, p in part._parameters.items() if p is not None and id(p) in frozen]
        _note(part, names)
        for name in names:
            value = cast(nn.Parameter, part._parameters.pop(name))
            part.register_buffer(name, value.detach(), persistent=False)
    for part in module.modules():
        if "train" in vars(part):
            setattr(part, _KEY, digest(part))
            _set(part, "forward", _answer)
    for part in sequences:
        if (length := lengths[id(part)]) and "train" not in vars(part):
            setattr(part, _KEY, digest(part[:length]))
            part.__dict__["_ekiden_leading"] = length
            for child in islice(part.children(), length):
                child.eval()
                _set(child, "train", _stay)
            _set(part, "forward", _answer_first)
    return module


def is_asked_once(part: nn.Module) -> bool:
    """Return whether `fix` made this module reuse known outputs."""
    return hasattr(part, _KEY) and "forward" in vars(part)


def is_fixed(part: nn.Module) -> bool:
    """Return whether values of this module itself are constants."""
    return bool(getattr(part, _FIXED, ()))


def fixed(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the constants of `module` that `fix` made, by name."""
    for path, part in module.named_modules():
        for name in getattr(part, _FIXED, ()):
            if (value := part._buffers.get(name)) is not None:
                yield f"{path}.{name}" if path else name, value


def digest(module: nn.Module) -> str:
    """Return a digest of the constants of `module`: names, shapes and values; empty if there are
    none.
    """
    found = hashlib.blake2b(digest_size=16)
    tensors = dict(fixed(module))
    for name, tensor in tensors.items():
        add_tensor(found, name, tensor)
    if tensors:
        return found.hexdigest()
    return ""


def size(module: nn.Module) -> int:
    """Return the number of constants."""
    return sum(tensor.numel() for _, tensor in fixed(module))


def copied(module: nn.Module) -> nn.Module:
    """Return a copy of `module` that shares its constants, which nobody changes."""
    return copy.deepcopy(module, {id(t): t for _, t in fixed(module)})


class Copies:
    """Makes a network once and gives copies of it, because drawing the values of a large network
    takes long.
    """

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        """Call `build`, which gives the same network each time, when the first one is needed."""
        self._build = build
        self._first: nn.Module | None = None

    def __call__(self) -> nn.Module:
        """A copy of the network."""
        if self._first is None:
            self._first = self._build()
        return copied(self._first)


def _still(module: nn.Module, frozen: set[int]) -> Iterator[nn.Module]:
    """Yield the largest parts all of whose parameters, at least one, are frozen."""
    own = [*module.parameters(), *(t for _, t in fixed(module))]
    if own and all(id(p) in frozen for p in own):
        yield module
        return
    for child in module.children():
        yield from _still(child, frozen)


def _leading(sequence: nn.Sequential, frozen: set[int]) -> int:
    """Return how many members at the beginning have no trained member before them and end with a
    frozen one.
    """
    length = 0
    for i, member in enumerate(sequence, 1):
        own = list(member.parameters())
        if any(id(p) not in frozen for p in own):
            break
        if own:
            length = i
    return length


def _note(part: nn.Module, names: Sequence[str]) -> None:
    if names:
        setattr(part, _FIXED, (*getattr(part, _FIXED, ()), *names))


def _set(part: nn.Module, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of this one module and of its copies."""
    part.__dict__[name] = MethodType(function, part)


def _stay(part: nn.Module, mode: bool = True) -> nn.Module:
    """Stay in evaluation mode."""
    return type(part).train(part, False)


def _answer(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Return known outputs, if these are samples without augmentation."""
    forward = type(part).forward
    if len(args) == 1 and not kwargs and (source := _source(args[0])) is not None:
        return source.answer(getattr(part, _KEY), lambda x: cast(Tensor, forward(part, x)))
    return forward(part, *args, **kwargs)


def _answer_first(part: nn.Module, x: Tensor) -> Tensor:
    """Take known outputs of the frozen members at the beginning, then run the others."""
    assert isinstance(part, nn.Sequential)
    source = _source(x)
    length = part.__dict__["_ekiden_leading"]

    def first(x: Tensor) -> Tensor:
        for member in islice(part.children(), length):
            x = member(x)
        return x

    x = first(x) if source is None else source.answer(getattr(part, _KEY), first)
    for member in islice(part.children(), length, None):
        x = member(x)
    return x


def _source(x: object) -> Source | None:
    """Return the samples of a batch; None if it was changed, or if its gradient is needed."""
    found = getattr(x, SOURCE, None)
    if found is None or not isinstance(x, Tensor) or x.requires_grad:
        return None
    source, version = found
    if x.is_inference() or version == x._version:
        return cast(Source, source)
    return None
