"""What there is to choose from, and the graphs of topologies."""

import json
from collections.abc import Callable

import pytest

Command = Callable[..., tuple[int, str]]


def test_methods_networks_and_data_sets_are_listed(command: Command) -> None:
    code, listed = command("list")
    assert code == 0
    assert all(name in listed for name in ("fedelmy", "centralized", "resnet18", "tiny_imagenet"))


def test_graphs(command: Command) -> None:
    printed = command("topology", "ring", "--clients", "8")[1]
    assert "symmetric, rows sum to 1, columns sum to 1, connected" in printed
    assert "spectral gap: 0.1953" in printed
    matrix = json.loads(command("topology", "ring", "--clients", "8", "--json")[1])["matrix"]
    assert sum(weight == pytest.approx(1 / 3) for row in matrix for weight in row) == 24
    drawn = command("topology", "matching", "--clients", "8")[1]
    assert "redrawn each round" in drawn
    assert "not connected" in drawn
    assert "mean over 100 rounds: 0.2" in drawn
