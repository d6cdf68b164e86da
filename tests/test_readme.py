"""The README's Python runs as it is written."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text() if README.exists() else "", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[0])
def test_a_block_runs(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
