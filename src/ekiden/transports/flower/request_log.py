"""The silo's own log of requests and of what it did, one line each, for the person who runs it."""

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

FILE = "requests.log"
"""file in the silo's folder; when it grows too long, it becomes requests.log.1"""
_MOST = 10_000_000
log = logging.getLogger("ekiden")


def note(folder: Path, line: str) -> None:
    """Append a line with the time; text from other parties cannot break the line."""
    file = folder / FILE
    safe = "".join(c if c.isprintable() else "?" for c in line)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > _MOST:
            os.replace(file, folder / f"{FILE}.1")
        with open(file, "a", encoding="utf-8") as out:
            out.write(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {safe}\n")
    except OSError as error:  # a full disk must not keep the silo from reporting it
        log.warning("cannot write %s: %s", file, error.strerror)
