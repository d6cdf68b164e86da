"""The text of `--help`: plain, folded to the width of the terminal, without the boxes that tyro draws."""

import re
import shutil
import textwrap
from collections.abc import Iterator

WIDE = 118  # columns in which tyro writes one box below the other
_LEFT = 26
_MOST = 100
_EMPTY = re.compile(r" ?\(default: (?:None|'')?\)")


def tidy(text: str) -> str:
    """Return tyro's help, written in `WIDE` columns, as plain text for this terminal.

    Args:
        text: boxes of flags, each with a title, maybe a description, and the flags with their help.
    """
    width = min(shutil.get_terminal_size().columns, _MOST)
    lines: list[str] = []
    for title, rows in _boxes(text):
        if title:
            lines += ["", title]
        for flag, told in rows:
            lines += _row(_plain(flag), _EMPTY.sub("", re.sub(r"\s+", " ", told)).strip(), width)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def _boxes(text: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each box as its title and its rows (flag, help); text outside, and descriptions, have no flag."""
    title, rows = "", list[tuple[str, str]]()
    for line in text.splitlines():
        if head := re.match(r"╭─ (.+?) ─*╮", line):
            yield title, rows
            name = head[1].removesuffix(" options").rpartition(".")[2]
            title, rows = ("arguments" if name == "positional arguments" else name), []
        elif line[:1] == "╰" or re.fullmatch(r"│ ─+ │", line):
            rows.append(("", ""))
        elif line[:1] != "│":
            rows.append(("", line))
        elif (inside := line[2:-1]).startswith(" ") and inside.strip() and rows:
            rows[-1] = rows[-1][0], f"{rows[-1][1]} {inside}"
        else:
            flag, _, told = inside.partition("  ")
            is_flag = flag[:1] == "-" or (title == "arguments" and re.match(r"[\[{A-Z]", flag))
            if is_flag or not (rows and inside.strip() and rows[-1][1] and not rows[-1][0]):
                rows.append((flag, told) if is_flag else ("", inside.strip()))
            else:  # a paragraph goes on
                rows[-1] = "", f"{rows[-1][1]} {inside}"
    yield title, rows


def _plain(flag: str) -> str:
    """A flag and its value: `INT` for `{None}|INT`, `STR ...` for `[STR [STR ...]]`."""
    return re.sub(r"\[+(\w+) \[\w+ \.\.\.\]+", r"\1 ...", flag).replace("{None}|", "")


def _row(flag: str, told: str, width: int) -> list[str]:
    if not flag:
        return textwrap.wrap(told, width, break_on_hyphens=False, break_long_words=False) or [""]
    told_lines = textwrap.wrap(told, width - _LEFT, break_on_hyphens=False, break_long_words=False) or [""]
    first = f"  {flag}"
    if len(first) > width:
        choices = textwrap.wrap(
            flag.replace(",", ", "), width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
        return [*choices, *(f"{'':{_LEFT}}{line}" for line in told_lines)]
    if len(first) < _LEFT - 1:
        first, told_lines = f"{first:<{_LEFT}}{told_lines[0]}", told_lines[1:]
    return [first.rstrip(), *(f"{'':{_LEFT}}{line}" for line in told_lines)]
