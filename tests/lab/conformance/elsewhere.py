"""A GPU's rules without a GPU: tensors that claim another device, and refuse to meet those of the
CPU.

Inside `Elsewhere()`, `device="cuda"` (or `cuda:0`, `cuda:1`) gives tensors whose memory is noted as
that device's. They are computed with the kernels of the CPU, so results can be compared bit for bit
with a run on the CPU. What PyTorch refuses on a GPU is refused here, as far as devices are
concerned:

- An operation takes tensors of one device. Exceptions, as on a GPU: a CPU tensor of no dimension in
  pointwise operations; indices on the CPU, where the indexed tensor is on a GPU; `copy_` and
  `fill_` between devices.
- Memory of a device is read by `.cpu()`, `.tolist()`, `.item()`, `float` and the like, not by numpy
  or DLPack.
- Each device has a random generator of its own, other than the CPU's, and takes no other.
- A gradient lies where its parameter lies.

Stricter than a GPU in two points. Operations on a device's tensors within `torch.autocast("cpu")`
are refused: a GPU would silently ignore the autocast. And a CPU tensor of no dimension is refused
by all operations that PyTorch does not tag as pointwise, though kernels of a GPU accept it here and
there.

Not covered: all that a kernel does (bits, speed, memory, what it does not support), streams and
asynchronous copies, `torch.Generator(device="cuda")`, `torch.compile`, and other processes.

How it works: devices are noted by storage, so that views, `.data`, parameters and autograd need no
care. Functions that take or tell a device are replaced in `torch` while the mode is on, and a
`TorchDispatchMode` checks each operation below autograd. Tensors that PyTorch makes inside an
operation of its own go wherever they are first used."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from ekiden.core.base import constants

CPU = torch.device("cpu")
_UNDECIDED = torch.device(
    "vulkan"
)  # stands for the device of what PyTorch made inside an operation
_LIKE = (
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "randint_like",
)
_NEW = ("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full")
_DRAWN = ("rand", "randn", "randint", "randperm")
_ROUNDED = ("mm", "addmm", "bmm", "convolution", "sum", "mean", "lerp_")
_GPUS = 2
_Function = Callable[..., Any]
_Leaf = TypeVar("_Leaf")


class Mixed(RuntimeError):
    """Tensors of several devices met."""


class Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode; see the module.

    Attributes:
        rounds: whether products and sums on a device come out a little otherwise than on the CPU,
            as a GPU's do. So what is computed here in one run and there in another gives other
            bits.
        seen: names of all operations done on a device, as `aten.add`.
    """

    def __init__(self, *, rounds: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rounds = rounds
        self.seen: set[str] = set()
        self._devices: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._generators = tuple(torch.Generator().manual_seed(1000 + i) for i in range(_GPUS))
        self._asked = (
            False  # inside a factory that the program called: its tensors are where it wants them
        )
        self._cpu_autocast = False
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "Elsewhere":
        self._patch()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()
        # what was kept on a device of this mode lies on none of the next one's
        constants._kept.cache_clear()

    # Where tensors are

    def device_of(self, tensor: Tensor) -> torch.device:
        """The device on which `tensor` claims to be."""
        device = self._noted(tensor)
        return CPU if device == _UNDECIDED else device

    def _noted(self, tensor: Tensor) -> torch.device:
        real = _device(tensor)
        if real.type != "cpu":
            return real
        found = self._devices.get(tensor.untyped_storage()._cdata)
        return found[1] if found else CPU

    def _note(self, tensor: Tensor, device: torch.device) -> None:
        if _device(tensor).type != "cpu":
            return
        storage = tensor.untyped_storage()
        if device == CPU:
            self._devices.pop(storage._cdata, None)
        else:  # the weak reference keeps the address from being used again
            self._devices[storage._cdata] = (StorageWeakRef(storage), device)  # type: ignore[no-untyped-call]
        if len(self._devices) > 20_000:
            self._devices = {
                key: kept
                for key, kept in self._devices.items()
                if not kept[0].expired()  # type: ignore[no-untyped-call]
            }

    def _parse(self, device: Any) -> torch.device:
        parsed = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if parsed.type == "cuda":
            parsed = torch.device("cuda", parsed.index or 0)
            if parsed.index >= _GPUS:
                raise RuntimeError("CUDA error: invalid device ordinal")
        return parsed

    def _move(self, tensor: Tensor, device: torch.device) -> Tensor:
        if self.device_of(tensor) == device:
            return tensor
        moved: Tensor = _Move.apply(tensor, device, self)  # type: ignore[no-untyped-call]
        return moved

    # What operations do

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _all(Tensor, (args, *kwargs.values()))
        name = func.overloadpacket.__name__
        if not tensors:
            result = func(*args, **kwargs)
            if not self._asked:
                for out in _all(Tensor, result):
                    self._note(out, _UNDECIDED)
            return result
        before = [self._noted(t) for t in tensors]
        alike = before.count(before[0]) == len(before)
        device = before[0] if alike else self._common(func, name, args, tensors)
        if device != _UNDECIDED:
            for tensor, noted in zip(tensors, before, strict=True):
                if noted == _UNDECIDED:
                    self._note(tensor, device)
        if device.type == "cuda":
            self.seen.add(f"aten.{name}")
            if self._cpu_autocast:
                raise Mixed(f"{func}: autocast of the CPU does nothing for a tensor on {device}")
        if _tagged(func, torch.Tag.nondeterministic_seeded):
            with self._draws(func, args, kwargs, device):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if (
            self.rounds
            and device.type == "cuda"
            and name in _ROUNDED
            and result.is_floating_point()
        ):
            result.mul_(1 + 2**-20)
        inputs = {t.untyped_storage()._cdata for t in tensors if _device(t).type == "cpu"}
        for out in _all(Tensor, result):
            if _device(out).type == "cpu" and out.untyped_storage()._cdata not in inputs:
                self._note(out, device)
        return result

    def _common(
        self, func: Any, name: str, args: Sequence[Any], tensors: Sequence[Tensor]
    ) -> torch.device:
        """Where the operation takes place, which is where its result lies.

        Raises:
            Mixed: there is no such place.
        """
        if name in (
            "copy_",
            "fill_",
            "fill",
            "copy",
        ):  # between devices; what is written stays where it is
            target = self._noted(tensors[0])
            return next((self._noted(t) for t in tensors), CPU) if target == _UNDECIDED else target
        free: list[Tensor] = []
        if name in ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"):
            free = [i for i in args[1] if i is not None and self._noted(i) == CPU]
            free += [v for v in args[2:3] if v.ndim == 0 and self._noted(v) == CPU]
        elif name in ("masked_fill", "masked_fill_"):
            free = [v for v in args[2:3] if isinstance(v, Tensor) and self._noted(v) == CPU]
        elif _tagged(func, torch.Tag.pointwise):
            written = _written(func, args)
            free = [
                t
                for t in tensors
                if t.ndim == 0 and self._noted(t) == CPU and not _among(t, written)
            ]
        bound = {self._noted(t) for t in tensors if not _among(t, free)} - {_UNDECIDED}
        if len(bound) > 1:
            found = " and ".join(sorted(map(str, bound)))
            raise Mixed(
                f"Expected all tensors to be on the same device, but found {found} ({func})"
            )
        if bound:
            return bound.pop()
        return CPU if free else _UNDECIDED

    @contextlib.contextmanager
    def _draws(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Iterator[None]:
        """Let a random operation draw from the generator of its device."""
        given = _all(torch.Generator, (args, *kwargs.values()))
        own = [self._generators[device.index]] if device.type == "cuda" else []
        if (
            given
            and not self._asked
            and any(g is h for g in given for h in self._generators) != bool(own)
        ):
            raise Mixed(f"Expected a '{device.type}' device type for generator ({func})")
        if given or not own:
            yield
            return
        default = torch.default_generator
        kept = default.get_state()
        default.set_state(own[0].get_state())
        try:
            yield
        finally:
            own[0].set_state(default.get_state())
            default.set_state(kept)

    # What takes or tells a device

    def _patch(self) -> None:
        self._patches = contextlib.ExitStack()
        for name in sorted({f.__name__ for f in _device_constructors()} & vars(torch).keys()):
            self._replace(torch, name, self._factory(getattr(torch, name)))
        for name in _LIKE:
            self._replace(torch, name, self._like(getattr(torch, name)))
        for name in _NEW:
            self._replace(Tensor, name, self._like(getattr(Tensor, name)))
        self._replace(Tensor, "device", property(self.device_of))
        self._replace(Tensor, "is_cuda", property(lambda t: self.device_of(t).type == "cuda"))
        self._replace(Tensor, "is_cpu", property(lambda t: self.device_of(t).type == "cpu"))
        self._replace(Tensor, "get_device", lambda t: self.device_of(t).index if t.is_cuda else -1)
        self._replace(Tensor, "to", self._to(Tensor.to))
        self._replace(Tensor, "cpu", lambda t, **_: self._move(t, CPU))
        self._replace(Tensor, "cuda", lambda t, device=0, **_: self._move(t, self._parse(device)))
        for name in ("numpy", "__array__", "__dlpack__", "pin_memory"):
            self._replace(Tensor, name, self._on_cpu_only(getattr(Tensor, name)))
        self._replace(Tensor, "__deepcopy__", self._deepcopy(Tensor.__deepcopy__))
        self._replace(Tensor, "grad", self._grad())
        self._replace(torch, "autocast", self._autocast(torch.autocast))
        cuda: dict[str, Any] = {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "init": lambda: None,
            "device_count": lambda: _GPUS,
            "current_device": lambda: 0,
            "set_device": lambda device: None,
            "set_sync_debug_mode": lambda mode: None,
            "get_device_name": lambda device=None: "none: the CPU with a GPU's rules",
            "is_bf16_supported": lambda *_: True,
            "synchronize": lambda device=None: None,
            "manual_seed": self._generators[0].manual_seed,
            "manual_seed_all": lambda seed: [g.manual_seed(seed) for g in self._generators],
            "get_rng_state": lambda device="cuda": self._generators[
                self._parse(device).index
            ].get_state(),
            "set_rng_state": lambda state, device="cuda": self._generators[
                self._parse(device).index
            ].set_state(state),
            "default_generators": self._generators,
        }
        for name, stand_in in cuda.items():
            self._replace(torch.cuda, name, stand_in)

    def _replace(self, owner: Any, name: str, by: Any) -> None:
        self._patches.enter_context(mock.patch.object(owner, name, by))

    @contextlib.contextmanager
    def _by_program(self) -> Iterator[None]:
        before, self._asked = self._asked, True
        try:
            yield
        finally:
            self._asked = before

    def _factory(self, original: _Function) -> _Function:
        @wraps(original)
        def made(*args: Any, **kwargs: Any) -> Any:
            device = self._parse(kwargs["device"]) if kwargs.get("device") is not None else None
            elsewhere = device is not None and device.type == "cuda"
            data = args[0] if args else None
            if isinstance(data, Tensor) and original.__name__ in ("tensor", "as_tensor", "asarray"):
                at = self.device_of(data) if device is None else device
                out = original(*args, **{k: v for k, v in kwargs.items() if k != "device"})
                return self._move(out, at)
            if elsewhere:
                kwargs["device"] = CPU
                if original.__name__ in _DRAWN:
                    own = self._generators[device.index]  # type: ignore[union-attr]
                    if kwargs.setdefault("generator", own) is not own:
                        raise Mixed(
                            "Expected a 'cuda' device type for generator "
                            f"(torch.{original.__name__})"
                        )
            elif any(kwargs.get("generator") is g for g in self._generators):
                raise Mixed(
                    f"Expected a 'cpu' device type for generator (torch.{original.__name__})"
                )
            with self._by_program():
                out = original(*args, **kwargs)
            if elsewhere:
                self._note(out, device)  # type: ignore[arg-type]
            return out

        return made

    def _like(self, original: _Function) -> _Function:
        @wraps(original)
        def made(like: Tensor, *args: Any, **kwargs: Any) -> Any:
            device = kwargs.pop("device", None)
            out = original(like, *args, **kwargs)
            target = self.device_of(like) if device is None else self._parse(device)
            return out.to(target)

        return made

    def _to(self, original: _Function) -> _Function:
        @wraps(original)
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            device, rest = kwargs.pop("device", None), list(args)
            if rest and isinstance(rest[0], Tensor):
                device, rest[0] = rest[0].device, rest[0].dtype
            elif rest and (rest[0] is None or isinstance(rest[0], (str, int, torch.device))):
                device = rest.pop(0)
            if device is None or torch.device(device).type == "meta":
                return original(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            return self._move(original(tensor, CPU, *rest, **kwargs), self._parse(device))

        return to

    def _on_cpu_only(self, original: _Function) -> _Function:
        @wraps(original)
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.device_of(tensor) != CPU:
                kind = self.device_of(tensor)
                raise TypeError(
                    f"can't convert {kind} device type tensor to numpy. Use Tensor.cpu() first"
                )
            return original(tensor, *args, **kwargs)

        return read

    def _deepcopy(self, original: _Function) -> _Function:
        @wraps(original)
        def copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
            result: Tensor = original(tensor, memo)
            self._note(result, self.device_of(tensor))
            return result

        return copied

    def _grad(self) -> property:
        real: Any = torch._C.TensorBase.grad

        def put(tensor: Tensor, grad: Tensor | None) -> None:
            if grad is not None and self.device_of(grad) != self.device_of(tensor):
                raise Mixed("assigned grad has data located on a different device")
            real.__set__(tensor, grad)

        return property(real.__get__, put, real.__delete__)

    def _autocast(self, original: Any) -> _Function:
        @contextlib.contextmanager
        def autocast(device_type: str, *args: Any, **kwargs: Any) -> Iterator[None]:
            before, self._cpu_autocast = self._cpu_autocast, device_type == "cpu"
            try:
                with original("cpu", *args, **kwargs):
                    yield
            finally:
                self._cpu_autocast = before

        return autocast


class _Move(torch.autograd.Function):
    """A copy on another device, whose gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device, mode: Elsewhere) -> Tensor:
        """Copy."""
        ctx.origin, ctx.mode = mode.device_of(tensor), mode
        moved = tensor.clone()
        mode._note(moved, device)
        return moved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Copy back."""
        return ctx.mode._move(grad, ctx.origin), None, None


@cache
def _tagged(func: Any, tag: torch.Tag) -> bool:
    return tag in func.tags


def _device(tensor: Tensor) -> torch.device:
    """The device where the tensor really is."""
    device: torch.device = torch._C.TensorBase.device.__get__(tensor)
    return device


def _all(kind: type[_Leaf], value: Any) -> list[_Leaf]:
    """Yield all values of a type in nested lists and tuples, as operations take and return them."""
    if isinstance(value, kind):
        return [value]
    return (
        [leaf for part in value for leaf in _all(kind, part)]
        if isinstance(value, (list, tuple))
        else []
    )


def _written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """The tensors that an operation changes."""
    pairs = zip(func._schema.arguments, args, strict=False)
    changed = [a for spec, a in pairs if spec.alias_info is not None and spec.alias_info.is_write]
    return _all(Tensor, changed)


def _among(tensor: Tensor, others: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in others)
