"""Runs side by side: the best is marked, no word is broken, and LaTeX has the same cells."""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ekiden.lab.drawing import comparison, fitted, latex
from ekiden.methods import FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import summarise


def test_the_best_is_bold_and_latex_has_the_same_cells(tmp_path: Path) -> None:
    runs = []
    for epochs in (1, 5):
        plan = Plan(Recipe(FedSeq(epochs=epochs)), data="digits", clients=2)
        plan.run(tmp_path / str(epochs), plan.federation())
        runs.append(summarise(tmp_path / str(epochs)))
    table = comparison(runs)
    values = [*table.columns[3].cells]
    best = max(range(2), key=lambda place: float(str(values[place])))
    assert [bool(getattr(cell, "style", "")) for cell in values] == [best == 0, best == 1]
    text = latex(table)
    assert rf"\textbf{{{values[best]}}}" in text
    assert r"accuracy \%" in text
    assert text.count(r" \\") == 3
    (only,) = comparison(runs[:1]).columns[3].cells
    assert not getattr(only, "style", ""), "alone it is not the best"


def test_columns_go_before_words_are_broken() -> None:
    table = Table("method", "data", "seeds", "accuracy %", "bytes moved", "forward", "backward")
    table.add_row(
        "fedelmyparallel (epochs=10, models=3, lr=0.001)",
        "office_caltech10",
        *("3", "75.00 ± 0.10", "10.00 MB", "1,000", "2,000"),
    )
    out = StringIO()
    console = Console(file=out, width=100)
    console.print(fitted(table, console))
    for words in ("fedelmyparallel", "office_caltech10", "75.00 ± 0.10", "models=3, lr=0.001)"):
        assert words in out.getvalue()
    assert "backward" not in out.getvalue()
    assert "--json" in out.getvalue()
