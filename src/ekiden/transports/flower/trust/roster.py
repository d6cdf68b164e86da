"""The roster of a federation: who takes part, by public key. A coordinator gives the same file to all silos."""

import json
from dataclasses import dataclass
from pathlib import Path

from ekiden.base.checks import Checked, made, plain, reading
from ekiden.base.errors import UserError, at
from ekiden.base.files import read_regular
from ekiden.transports.flower.trust import keys
from ekiden.transports.flower.trust.agreement import check_name

FILE = "roster.json"
_MOST = 1 << 20


@dataclass(frozen=True)
class Roster(Checked):
    """Who takes part."""

    certificate: str  # PEM text of the authority that signs the SuperLink's certificate
    silos: tuple[str, ...]  # their names, in the order that methods see
    keys: tuple[str, ...]  # their public keys

    def __post_init__(self) -> None:
        if len(self.silos) != len(self.keys) or len(set(self.silos)) != len(self.silos):
            raise UserError("a roster names each silo once, with its key")
        for name, key in zip(self.silos, self.keys, strict=True):
            check_name(name, "the roster")
            if not keys.is_name(name):
                raise UserError(f"the roster names {name[:80]!r}, which cannot be a silo's name")
            keys.check(key)

    @property
    def key_of(self) -> dict[str, str]:
        """Return the public key of each silo."""
        return dict(zip(self.silos, self.keys, strict=True))

    def to_json(self) -> str:
        """Return the roster as text."""
        return json.dumps(plain(self), indent=1)


def read(path: Path) -> Roster:
    """Return the roster in a file."""
    with at(str(path)):
        try:
            values = json.loads(read_regular(path, _MOST))
        except FileNotFoundError:
            raise UserError("there is no such file: the coordinator's `ekiden federation init` wrote it") from None
        except (ValueError, RecursionError):
            raise UserError("this is not a roster: `ekiden federation init` writes one") from None
        with reading("the roster", "what `ekiden federation` wrote"):
            return made(Roster, values)
