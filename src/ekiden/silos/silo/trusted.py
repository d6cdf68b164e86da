"""Files of code that a silo's operator trusts: a run may name what is in them, by their content."""

from pathlib import Path

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.silos.silo.silo_file import SiloFile

REGISTER = "trusted-code"  # file in the silo's folder: a digest and a path in each line


def trust(file: SiloFile, code: Path) -> str:
    """Let runs execute a Python file as it is now, and return how they name it."""
    if code.suffix != ".py":
        raise UserError(f"{code} is not a Python file: runs execute nothing else")
    name = outside.located(f"{code}:")
    file.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    outside.trust(name, file.folder / REGISTER)
    return outside.by_content(name).replace(":", "", 1)


def own_copy(file: SiloFile, name: str) -> str:
    """Return PATH.py:NAME of the trusted file that FILE.py:NAME@DIGEST names.

    Raises:
        UserError: the operator does not trust a file of this name and content, or it has changed.
    """
    try:
        return outside.own_copy(name, file.folder / REGISTER)
    except UserError:
        code = Path(name.rpartition(":")[0]).name[:80]
        raise UserError(
            f"the run executes {outside.short(name)[:120]}, which {file.name} does not trust: put "
            f"the same file there, read it, then `ekiden silo trust {file.path.name} {code}` if it "
            "may run"
        ) from None
