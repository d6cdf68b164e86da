"""The tables in docs/tasks.md, made from the tasks and the methods: `python -m
tests.tools.task_table` writes them."""

import re
from pathlib import Path

from ekiden.core.tasks import KINDS, Need
from ekiden.methods import METHODS

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"
_MADE = re.compile(r"(<!-- made: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
_NUMBERS: frozenset[Need] = frozenset({"numbers", "continuous"})


def metrics() -> str:
    """What each task measures."""
    lines = ["| task | headline | also measured |", "|---|---|---|"]
    for kind in KINDS.values():
        first, *others = (
            f"`{metric.name}`{'' if metric.higher else ' ↓'}" for metric in kind.metrics
        )
        lines.append(f"| {kind.kind} | {first} | {', '.join(others)} |")
    return "\n".join(lines)


def methods() -> str:
    """Which methods, with their defaults, do which tasks."""
    lines = [
        "| method | " + " | ".join(KINDS) + " | tokens as inputs |",
        "|---|" + ":-:|" * (len(KINDS) + 1),
    ]
    for kind in METHODS:
        needs = kind().needs
        does = [needs <= task.offers | _NUMBERS for task in KINDS.values()] + [
            "numbers" not in needs
        ]
        lines.append(
            f"| {kind.title()} | " + " | ".join("yes" if one else "–" for one in does) + " |"
        )
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with its tables as they are now."""
    made = {"metrics": metrics, "methods": methods}
    return _MADE.sub(lambda found: f"{found[1]}\n{made[found[2]]()}\n\n{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
