"""The README's Python runs as it is written."""

from pathlib import Path

import pytest

from tests.pages import README, Block, blocks


@pytest.mark.parametrize("block", blocks(README, "python"), ids=lambda block: block.place)
def test_a_block_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    exec(compile(block.text, str(README), "exec"), {"__name__": "readme"})
