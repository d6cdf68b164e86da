"""Start commands that compute nothing in a fraction of a second: PyTorch takes longer to import than
they take to run.

Help pages and the commands that read settings need definitions of methods and networks, and these
mention PyTorch: as base classes, in annotations, as decorators. In such a process `import torch`,
and `import numpy` and `PIL`, give stand-ins that can be mentioned and nothing else. Whatever would compute with one raises
`TensorsNeeded`, and the command starts again with PyTorch. So a wrong guess costs time, never a
result.
"""

import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, Protocol

# in the environment of a command that needs PyTorch after all
_AGAIN = "EKIDEN_WITH_TORCH"
_SLOW = ("torch", "numpy", "PIL")


class TensorsNeeded(BaseException):
    """A value of PyTorch is needed. Not an `Exception`, so that nothing but `start` catches it."""


def _refuse(*_: object, **__: object) -> Any:
    raise TensorsNeeded


# Not `type`: classes derive from a stand-in and from an abstract class or a protocol at once.
class _Mentioned(type(Protocol)):  # type: ignore[misc]
    """The class of stand-ins: they are classes themselves, and so are all their attributes."""

    def __getattr__(cls, name: str) -> Any:
        # Python asks classes for names of its own, with one line (`_is_protocol`) or two
        if name.startswith("_"):
            raise AttributeError(name)
        made = _mention(name)
        setattr(cls, name, made)
        return made

    def __getitem__(cls, _: object) -> Any:
        """Return the class itself: `NDArray[np.float64]` is an annotation."""
        return cls

    __iter__ = __add__ = __mul__ = __neg__ = __float__ = __int__ = _refuse


class _Given(metaclass=_Mentioned):
    """What a call of a stand-in gives. It decorates functions, as `torch.no_grad()` does; nothing
    else can be done with it.
    """

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *given: Any) -> Any:
        """Return a function as it is."""
        if len(given) == 1 and isinstance(given[0], FunctionType):
            return given[0]
        raise TensorsNeeded

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __enter__ = __exit__ = _refuse
    __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __str__ = __repr__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _refuse
    __neg__ = __float__ = __int__ = __index__ = __format__ = _refuse
    __hash__ = _refuse


def _mention(name: str) -> Any:
    return _Mentioned(name, (_Given,), {"__module__": "torch"})


class _Module(ModuleType):
    """`torch`, or a module in it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _mention(name)
        setattr(self, name, made)
        return made


class _Finder:
    """Finds stand-ins for all modules of PyTorch, NumPy and Pillow."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a stand-in; None for other modules."""
        if name.partition(".")[0] not in _SLOW:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make an empty module."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""


def start(command: Callable[[], None]) -> None:
    """Run a command without PyTorch; if it turns out to need it, replace this process by one that
    begins again.
    """
    if "torch" in sys.modules or os.environ.pop(_AGAIN, ""):
        return command()
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        command()
    except TensorsNeeded:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, _AGAIN: "1"})
