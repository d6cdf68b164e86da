"""Commands that measure a model."""

from collections.abc import Callable
from pathlib import Path

import ekiden
from ekiden import run

Command = Callable[..., tuple[int, str]]


def test_a_threshold_is_for_two_classes(command: Command, tmp_path: Path) -> None:
    data = ekiden.split(ekiden.load("digits"), "iid", 2)
    run(
        "average",
        data,
        "mlp",
        training=ekiden.Training(max_steps=1),
        folder=tmp_path / "run",
        quiet=True,
    )
    code, said = command("evaluate", str(tmp_path / "run"), "--threshold", "0.4")
    assert code == 2
    assert "--threshold is for two classes, and none follows from these data: leave it out" in said
