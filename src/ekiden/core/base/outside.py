"""Code from outside the package: the user's own files, as `mine.py:MyMethod`, other packages, and
their entry points.

A file is code, so it runs only if the user typed its name on the command line, now or when it had
the same content, or allowed it by `ekiden trust`. Whatever else names files (run folders, records,
files of settings, texts in Python) may come from anybody, so it grants nothing. `trust` is called
by `ekiden.cli` alone; a test looks at the source for that.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from ekiden.core.base.errors import UserError, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Group = Literal["ekiden.methods", "ekiden.models", "ekiden.datasets", "ekiden.kinds"]
_PREFIX = "ekiden_file_"
_ALLOWED: set[str] = set()
"""digests of code that may run in this process: `allow` names it, or `own_copy` found it for somebody
who asked for it"""


def is_file(name: str) -> bool:
    """Whether `name` has the form PATH.py:NAME."""
    return name.rpartition(":")[0].endswith(".py")


def located(name: str) -> str:
    """Return `name` with an absolute path, which holds in every folder."""
    if not is_file(name):
        return name
    path, _, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().absolute()}:{attribute}"


def short(name: str) -> str:
    """Return `name` without the folder of the file."""
    if is_file(name):
        return Path(name).name
    return name


def trust(name: str, register: Path | None = None) -> None:
    """Note that the user named the code in the file of `name`; other names need no trust.

    Args:
        name: PATH.py:NAME.
        register: the file that notes it; by default the user's own, which counts on this machine
            and not for what others ask a silo.
    """
    if is_file(name):
        _note(_digest(_path(name)), _path(name), register or _list())


def trust_text(text: str, path: Path) -> None:
    """Note that the user named what this text says; `path` is for who reads the list."""
    _note(_digest_of(text.encode()), path, _list())


def trusts_text(text: str) -> bool:
    """Whether the user has named what this text says."""
    return _digest_of(text.encode()) in _trusted()


def allow(name: str) -> None:
    """Let the code in PATH.py:NAME run in this process, as it is now: its user names it in a file
    that nobody else writes.
    """
    _ALLOWED.add(_digest(_path(name)))


def _note(digest: str, path: Path, register: Path) -> None:
    if (digest, str(path)) not in _noted(register):
        register.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with register.open("a", encoding="utf-8") as file:
            file.write(f"{digest} {path}\n")


def load(name: str) -> Any:
    """Return what the Python file in PATH.py:NAME calls NAME."""
    path = _path(name)
    attribute = name.rpartition(":")[2]
    digest = _digest(path)
    if digest not in _ALLOWED.union(_trusted()):
        raise UserError(
            f"{path} is code that was not run from here before, or that has changed since: read "
            f"it, then `ekiden trust {path}` if it may run"
        )
    module = _module(path, digest)
    if not hasattr(module, attribute):
        own = [
            n
            for n, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        raise unknown(f"name in {path}", attribute, own)
    return getattr(module, attribute)


def by_content(name: str) -> str:
    """Return PATH.py:NAME as FILE.py:NAME@DIGEST, which means the same content for everybody."""
    return f"{short(name)}@{_digest(_path(name))}"


def own_copy(name: str, register: Path | None = None) -> str:
    """Return PATH.py:NAME of the user's own file that FILE.py:NAME@DIGEST names; only a file of
    this name that the user trusts, and that may run from now on.

    Args:
        name: of the code, by its content.
        register: as in `trust`.
    """
    file, _, digest = name.rpartition("@")
    wanted, _, attribute = file.rpartition(":")
    for known, path in _noted(register or _list()):
        own = Path(path)
        if known == digest and own.name == wanted and own.is_file() and _digest(own) == digest:
            _ALLOWED.add(digest)
            return f"{path}:{attribute}"
    raise UserError(
        f"{short(file or name)[:80]} is code that is not here, or that was never allowed to run "
        f"here: put the same file here, read it, then `ekiden trust {Path(wanted).name[:80]}`"
    )


def call(name: str, group: Group, *args: Any) -> Any:
    """Call the function `name` (in a file, or an entry point of `group`), and return its result."""
    function = load(name) if is_file(name) else installed(group)[name].load()
    if not callable(function):
        raise UserError(f"{name} is not a function: give the name of a function")
    wanted = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    args = args if wanted else ()
    if len(wanted) != len(args):
        raise UserError(f"{name} takes {len(wanted)} arguments, but is called with {len(args)}")
    try:
        return function(*args)
    except UserError:
        raise
    except Exception as error:
        raise failure(source(function) or Path(name), error) from error


def reference(thing: Any) -> str | None:
    """Return the PATH.py:NAME from which `load` gives `thing`, also if it was imported; None if no
    single file does.
    """
    module = getattr(thing, "__module__", "")
    name = getattr(thing, "__name__", "")
    if module.startswith(_PREFIX):
        return f"{_origin(module)}:{name}"
    held = sys.modules.get(module)
    file = source(thing)
    alone = "." not in module and module != "__main__" and getattr(held, name, None) is thing
    if file and alone:
        return f"{file.absolute()}:{name}"
    return None


def known_as(kind: type, group: Group) -> str | None:
    """Return the name that gives a class: an entry point of `group`, or PATH.py:NAME; None if there
    is none.
    """
    for point in _points(group):
        if point.value == f"{kind.__module__}:{kind.__qualname__}":
            return point.name
    return reference(kind)


def digests(names: Sequence[str]) -> dict[str, str]:
    """Return the digest of each file among `names`, by its path."""
    return {str(_path(name)): _digest(_path(name)) for name in names if is_file(name)}


def refuse_changed(code: Mapping[str, str]) -> None:
    """Refuse files that have changed since a run noted these digests."""
    for path, digest in code.items():
        if _digest(_path(f"{path}:")) != digest:
            raise UserError(
                f"{path} has changed since the run began: restore it, or start a new run"
            )


def failure(path: Path, error: Exception) -> UserError:
    """Return one line about an error of the user's code."""
    line = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            line = frame.lineno
    # an error of syntax is in no frame
    line = getattr(error, "lineno", line)
    where = str(path)
    if line:
        where = f"{path}, line {line}"
    return UserError(f"{where}, fails: {type(error).__name__}: {error}")


def summary_of(thing: object) -> str:
    """Return the first paragraph of the docstring in one line."""
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())


def source(thing: Any) -> Path | None:
    """Return the file that a class or function is written in, if there is one."""
    try:
        file = inspect.getsourcefile(thing)
    except (TypeError, OSError):  # built in, or typed at a prompt
        return None
    if file:
        return Path(file)
    return None


def installed(group: Group) -> dict[str, "EntryPoint"]:
    """Return the entry points that other packages declare in a group, by name."""
    return {point.name: point for point in _points(group)}


@cache
def _points(group: Group) -> tuple["EntryPoint", ...]:
    # it takes longer to load than most of this package
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def path_in(name: str) -> Path:
    """Return the absolute path in PATH.py:NAME."""
    return Path(name.rpartition(":")[0]).expanduser().absolute()


def _path(name: str) -> Path:
    path = path_in(name)
    if not path.is_file():
        raise UserError(f"there is no file {path}: give PATH.py:NAME")
    return path


def _digest(path: Path) -> str:
    return _digest_of(path.read_bytes())


def _digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _list() -> Path:
    """Return the file that lists the contents that the user has named."""
    # it loads PyTorch, which most commands do not need
    from ekiden.core.base.files import cache_folder

    return cache_folder() / "trusted-code"


def _noted(register: Path) -> list[tuple[str, str]]:
    """Return the digests that the user has named, each with the path of its file."""
    try:
        return re.findall(r"^(\S+) (.+)$", register.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return []


def _trusted() -> dict[str, str]:
    return dict(_noted(_list()))


def _module(path: Path, digest: str) -> ModuleType:
    """Return the module in the file, which is executed once in a process as long as it stays as it
    is.
    """
    name = f"{_PREFIX}{digest}_{str(path).encode().hex()}"
    if name in sys.modules:
        return sys.modules[name]
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except Exception as error:
        raise failure(path, error) from error


def _origin(module: str) -> Path:
    return Path(bytes.fromhex(module.rpartition("_")[2]).decode())


class _Source(SourceFileLoader):
    """Executes the file itself, with the content that was allowed. A compiled copy in `__pycache__`
    may hold other code, and no digest covers it.
    """

    def get_code(self, fullname: str) -> CodeType:
        """Compile what the file holds, if that is what its module is named after."""
        content = self.get_data(self.path)
        if not fullname.startswith(f"{_PREFIX}{_digest_of(content)}_"):
            raise UserError(f"{self.path} has changed since it was read: run the command again")
        return self.source_to_code(content, self.path)


class _Files:
    """Finds the modules of the user's files by name, so that worker processes find the classes in
    them too.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the file of module `name`."""
        if not name.startswith(_PREFIX):
            return None
        path = str(_origin(name))
        return importlib.util.spec_from_file_location(name, path, loader=_Source(name, path))


sys.meta_path.append(_Files())


def require_extra(extra: str, what: str, *modules: str) -> None:
    """Refuse early if packages are not installed that something needs. This imports nothing.

    Args:
        extra: the extra of Ekiden that installs them.
        what: what needs them; the subject of the message.
        modules: their names in Python.
    """
    for module in modules:
        if module in sys.modules and sys.modules[module] is not None:
            continue
        if find_spec(module) is None:
            raise UserError(f'{what} needs the package {module}: pip install "ekiden[{extra}]"')
