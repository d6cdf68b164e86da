"""Packages that only some commands need."""

import sys
from importlib.util import find_spec

from ekiden.base.errors import UserError


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
