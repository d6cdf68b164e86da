"""The silo's own log of requests and of what it did, one line each, for the person who runs it.

Lines are only added. Each ends with a digest of itself and of the line before, so that a line that was changed or taken
out is noticed. Requests cannot push older lines out, and cannot fill the disk: a run may write `_RUN` bytes, and all
requests that belong to no run here may write `_STRANGERS` bytes a day.
"""

import hashlib
import json
import logging
import os
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ekiden.base.files import lock_file, locked, write

FILE = "requests.log"
"""file in the silo's folder"""
_SIZES = "requests.json"
_RUN = 2_000_000
_STRANGERS = 1_000_000
_LENGTH = 16
_LONGEST = 4096  # bytes of a line
log = logging.getLogger("ekiden")


def note(folder: Path, line: str, run: str = "") -> None:
    """Append a line with the time; text from other parties cannot break the line.

    Args:
        folder: the silo's folder.
        line: what happened.
        run: the run that it belongs to, if the silo takes part in that.
    """
    file = folder / FILE
    now = datetime.now(UTC)
    safe = "".join(c if c.isprintable() else "?" for c in f"{now:%Y-%m-%dT%H:%M:%SZ} {line}")[: _LONGEST // 4]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(lock_file(file)):
            today = f"{now:%Y-%m-%d}"
            peer = run or today
            written, most = _sizes(folder), _RUN if run else _STRANGERS
            size = written.get(peer, 0) + len(safe.encode()) + _LENGTH + 2
            if size > most:
                if written.get(peer, 0) > most:
                    return
                who, until = (f"run {run}", "") if run else ("requests of no run", " today")
                safe = f"{now:%Y-%m-%dT%H:%M:%SZ} {who}: too many lines, further ones are left out{until}"
                size = most + 1
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8") as out:
                out.write(f"{safe} {_digest(_last(file), safe)}\n")
            days = {name: size for name, size in written.items() if "-" not in name or name == today}
            write(folder / _SIZES, [json.dumps({**days, peer: size}).encode()], sync=False)
    except OSError as error:  # a full disk must not keep the silo from reporting it
        log.warning("cannot write %s: %s", file, error.strerror)


def changed(folder: Path) -> int | None:
    """Return the number of the first line of the log that was changed, or does not follow the one before; else None."""
    before = ""
    with suppress(FileNotFoundError), open(folder / FILE, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text, _, found = line.rstrip("\n").rpartition(" ")
            if found != _digest(before, text):
                return number
            before = found
    return None


def _digest(before: str, line: str) -> str:
    return hashlib.sha256(f"{before}\n{line}".encode()).hexdigest()[:_LENGTH]


def _last(file: Path) -> str:
    """Return the digest at the end of the log."""
    with open(file, "rb") as lines:
        lines.seek(max(0, os.fstat(lines.fileno()).st_size - _LENGTH - 1))
        return lines.read().decode(errors="replace").strip()


def _sizes(folder: Path) -> dict[str, int]:
    """Return how many bytes each run, and strangers today, have written."""
    try:
        found = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
        return {str(name): int(size) for name, size in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
