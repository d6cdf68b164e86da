"""The command line in this process."""

import sys
from collections.abc import Callable

import pytest

from ekiden.cli.app import main

Call = Callable[..., tuple[int, str, str]]


def caller(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Something to call the command with: gives exit code and what it printed."""

    def calling(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ekiden", *args])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, *capfd.readouterr()

    return calling
