"""References to values that live at the parties of a run."""

from dataclasses import dataclass
from typing import Generic, TypeVar

T_co = TypeVar("T_co", covariant=True)

SERVER = "server"
EVERYONE = "*"


@dataclass(frozen=True)
class Ref(Generic[T_co]):
    """A reference to a value that stays at its owner and moves only when another party uses it.

    Attributes:
        owner: name of the client that holds it, or `EVERYONE` for values that all can derive from the seed.
        key: its name there.
    """

    owner: str
    key: str
