"""What a long-running command prints: each line with its time, level and source, as text or as JSON."""

import json
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

Format = Literal["text", "json"]
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LEVEL = re.compile(r"(?:\S+Z )?(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b[ :]*(?:\[\S+\] )?\s*(.*)")
"""how Flower and uvicorn begin a line"""
OURS = "ekiden: "
# beginning of the line in the log of a run's ServerApp that says why the run ended early
ENDED = "ekiden ended: "


def numbers_in(file: Path) -> dict[str, float]:
    """Return the numbers, by name, that a process keeps in a file; none if it is not there, or is
    damaged.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True)
class Log:
    """Writes lines to standard output, without colours."""

    form: Format = "text"

    def __call__(self, text: str, level: str = "INFO", source: str = "ekiden") -> None:
        """Write a line."""
        time = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        if self.form == "json":
            line = json.dumps({"time": time, "level": level, "source": source, "text": text})
        else:
            line = f"{time} {level:7} {source}: {text}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def other(self, line: str) -> None:
        """Write a line that another process printed."""
        plain = _COLOUR.sub("", line).rstrip()
        level = "INFO"
        text = plain
        if found := _LEVEL.fullmatch(plain):
            level = found[1]
            text = found[2]
        if text.startswith(OURS):
            self(text.removeprefix(OURS), level)
        elif text:
            self(text, level, "flower")

    def follow(self, lines: Iterable[str]) -> None:
        """Write the lines of other processes as they come, in a thread."""

        def write() -> None:
            # the pipe was closed, because the other process is gone
            with suppress(ValueError):
                for line in lines:
                    self.other(line)

        threading.Thread(target=write, daemon=True).start()
