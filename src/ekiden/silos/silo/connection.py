"""Whether a silo is connected to its SuperLink: since when, or why not and what to do."""

import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ekiden.core.base.checks import Checked, made
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import is_held

# in the silo's folder
FILE = "connection.json"
# there, too: held by the process that serves the silo
STARTED = "started"
# seconds without an answer; Flower sends a heartbeat each 30 s, also during a task
_SILENT = 90.0


@dataclass(frozen=True)
class Connection(Checked):
    """What a silo knows about its connection."""

    # when it was connected, or lost the connection; seconds since 1970
    since: float = 0.0
    # last answer of the SuperLink
    seen: float = 0.0
    # why the last request failed; empty if it did not
    why: str = ""

    @property
    def stands(self) -> bool:
        """Whether the silo is connected."""
        return not self.why and time.time() - self.seen < _SILENT


def read(folder: Path) -> Connection:
    """Return what a silo noted; of a silo that never ran, the default."""
    try:
        return made(Connection, json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, UserError):
        return Connection()


def is_started(folder: Path) -> bool:
    """Return whether `ekiden silo start` serves the silo of this folder."""
    return is_held(folder / STARTED)


def health(folder: Path) -> tuple[bool, str]:
    """Return whether a silo is connected, and in words since when, or why not."""
    found = read(folder)
    moment = f"{datetime.fromtimestamp(found.since, UTC):%Y-%m-%d %H:%M} UTC"
    if found.stands:
        return True, f"connected since {moment}"
    if not found.since:
        return False, "not connected yet"
    return False, f"not connected since {moment}: {found.why or 'nothing was heard for a while'}"
