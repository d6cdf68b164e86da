"""The notebooks run from top to bottom, and print what the site shows."""

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.pages import DOCS, agrees

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


def _code(path: Path) -> list[str]:
    """The source of each cell that Python itself can read."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [
        source.partition("\n")[2] if source.startswith("%%writefile") else source for source in code
    ]


def _said(cells: Any) -> list[str]:
    """What each cell prints or shows as text; of a figure, that there is one."""
    texts = []
    for cell in cells:
        if cell["cell_type"] != "code" or "install" in cell["metadata"].get("tags", ()):
            continue
        parts = [
            "a figure"
            if "image/png" in data
            else "".join(output.get("text") or data.get("text/plain", ""))
            for output in cell["outputs"]
            for data in [output.get("data", {})]
        ]
        texts.append("\n".join(parts))
    return texts


def test_there_is_a_notebook_for_each_thing_to_do() -> None:
    assert {path.stem for path in NOTEBOOKS} == {
        "first-run",
        "your-data",
        "own-method",
        "study",
        "paper-table",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_ready_for_a_hosted_one(path: Path) -> None:
    first, *cells = _code(path)
    assert first == '%pip install --quiet "ekiden[pandas,report]"'
    for source in cells:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                assert all(importlib.import_module(name.name) for name in node.names)
            elif (
                isinstance(node, ast.ImportFrom) and node.module and node.module != "mine"
            ):  # a file of the notebook
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), node.module
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "ekiden"
            ):
                assert hasattr(importlib.import_module("ekiden"), node.attr), node.attr
    assert path.with_suffix(".ipynb").stat().st_size < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")
def test_a_notebook_prints_what_the_site_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("nbclient")
    from tests.tools.notebooks import execute

    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    shown = _said(json.loads(path.read_text(encoding="utf-8"))["cells"])
    done = _said(execute(path, tmp_path).cells)
    for one, other in zip(shown, done, strict=True):
        assert agrees(one, other), f"the notebook shows\n{one}\nbut there came\n{other}"
