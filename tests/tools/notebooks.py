"""Run the notebooks and keep what their cells print: `python -m tests.tools.notebooks [NAME...]`.

The site shows these outputs; `tests/test_notebooks.py` compares them with those of a new run.
"""

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


def installs(cell: Any) -> bool:
    """Whether a cell installs packages, which tests do not."""
    return "install" in cell.metadata.get("tags", ())


def execute(path: Path, folder: Path) -> Any:
    """Return the notebook as it is after a run in an empty folder, without cells that install
    packages.

    Raises:
        CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if not installs(cell)]
    os.environ["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # for `!ekiden`
    )
    nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def main(names: list[str]) -> None:
    """Run the notebooks of these names, or all, and write their outputs into them."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        kept = nbformat.read(path, as_version=4)
        with TemporaryDirectory() as folder:
            done = {cell.id: cell for cell in execute(path, Path(folder)).cells}
        for cell in kept.cells:
            if cell.cell_type == "code" and cell.id in done:
                cell.outputs = done[cell.id].outputs
        nbformat.write(kept, path)
        print(path.name)


if __name__ == "__main__":
    main(sys.argv[1:])
