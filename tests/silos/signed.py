"""Silos that sign what they do."""

from pathlib import Path

from tests.silos.fakes import NAMES, FakeNodes, with_keys

LIMITS = '[limits]\nlevel = "models"\nmethods = ["fedseq", "fedavg", "fedtasuki", "dfedavgm", "maecho"]\n'


def federation(folder: Path) -> tuple[FakeNodes, dict[str, str]]:
    files, public = with_keys(folder, NAMES, LIMITS)
    return FakeNodes(files), public
