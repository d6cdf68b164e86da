"""Files of code that a silo's operator trusts: a run may name what is in them, by their content."""

from pathlib import Path

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.silos.silo.silo_file import SiloFile


def register(file: SiloFile) -> Path:
    """Return the file that notes which code runs may execute at a silo."""
    return file.folder / "trusted-code"


def own_copy(file: SiloFile, name: str) -> str:
    """Return PATH.py:NAME of the trusted file that FILE.py:NAME@DIGEST names.

    Raises:
        UserError: the operator does not trust a file of this name and content, or it has changed.
    """
    try:
        return outside.own_copy(name, register(file))
    except UserError:
        code = Path(name.rpartition(":")[0]).name[:80]
        raise UserError(
            f"the run executes {outside.short(name)[:120]}, which {file.name} does not trust: put "
            f"the same file there, read it, then `ekiden silo trust {file.path.name} {code}` if it "
            "may run"
        ) from None
