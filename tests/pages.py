"""Pages of the documentation as tests play them: their fenced blocks, from the top to the bottom.

What a block's fence says decides what is done with it:

- `sh`: each line is typed in. Plain `ekiden` commands run in this process, others in a shell; `pip`
  lines are left out.
- `python`: executed, all blocks of a page in one namespace.
- `python title="mine.py"`, `toml title="..."`, any language: written into that file.
- `text`: what the last command, or block of Python, before it must have printed. `...` stands for
  anything. White space and the lines of tables do not count, and numbers with a decimal point may
  differ by a tenth, since other processors round in another way.

Blocks with other fences are not touched.
"""

import contextlib
import io
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
README = DOCS.parent / "README.md"
_FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?[^\n]*\n(.*?)^```$', re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"^[-+(]*(\d[\d,]*\.\d+)[%),.:;]*$")
_RULE = re.compile(r"^[\u2500-\u257f]+$")
Command = Callable[..., tuple[int, str]]


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: the file.
        line: of its fence, from 1.
        language: the first word after the fence.
        title: the file that it is to be written to; empty if none.
        text: what is in it.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def place(self) -> str:
        """Where it stands, for messages."""
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, or those of one language."""
    text = page.read_text(encoding="utf-8")
    found = (
        Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2] or "", match[3])
        for match in _FENCE.finditer(text)
    )
    return [block for block in found if language in (None, block.language)]


def play(page: Path, command: Command | None = None) -> dict[str, Any]:
    """Do what a page says, in the current folder; see the module.

    Args:
        page: a Markdown file.
        command: runs the command line, as the fixture of this name; without it, `sh` blocks are
            left out.

    Returns:
        The names that the page's Python has defined.
    """
    names: dict[str, Any] = {"__name__": "page"}
    said, done = "", False
    for block in blocks(page):
        if block.title:
            Path(block.title).parent.mkdir(parents=True, exist_ok=True)
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            said, done = printed.getvalue(), True
        elif block.language == "sh":
            for line in _lines(block.text) if command else ():
                said, done = _typed(line, block, command), True
        elif block.language == "text":
            assert done, f"{block.place} shows what nothing has printed"
            assert agrees(block.text, said), (
                f"{block.place} shows\n{block.text}\nbut there came\n{said}"
            )
    return names


def agrees(shown: str, said: str) -> bool:
    """Whether a page shows what was said; see the module."""
    wanted, words = (
        [word for word in text.split() if not _RULE.match(word)] for text in (shown, said)
    )
    here = there = 0
    gap, tried = -1, 0  # the last "...", and the first word after what it stands for
    while there < len(words):
        if here < len(wanted) and wanted[here] == "...":
            gap, tried, here = here, there, here + 1
        elif here < len(wanted) and _same(wanted[here], words[there]):
            here, there = here + 1, there + 1
        elif gap >= 0:
            tried += 1
            here, there = gap + 1, tried
        else:
            return False
    return all(word == "..." for word in wanted[here:])


def _same(shown: str, said: str) -> bool:
    a, b = _NUMBER.match(shown), _NUMBER.match(said)
    if not (a and b):
        return shown == said
    one, other = (float(match[1].replace(",", "")) for match in (a, b))
    return math.isclose(one, other, rel_tol=0.1, abs_tol=0.02)


def _lines(text: str) -> Iterator[str]:
    """Command lines, without comments, and those that end in a backslash joined to the next."""
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def _typed(line: str, block: Block, command: Command | None) -> str:
    """What a command line prints.

    Raises:
        AssertionError: it fails.
    """
    name, *words = shlex.split(line, comments=True)
    if name == "pip":
        return ""
    if command and name == "ekiden" and not set(line) & set("|>&*"):
        code, said = command(*words)
    else:
        environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        }
        done = subprocess.run(
            line, shell=True, capture_output=True, text=True, check=False, env=environment
        )
        code, said = done.returncode, done.stdout + done.stderr
    assert code == 0, f"{block.place}: {line}\n{said}"
    return said
