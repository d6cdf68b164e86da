"""Runs side by side: the best is marked, no word is broken, and LaTeX has the same cells."""

from pathlib import Path

from ekiden.lab.drawing import comparison, latex
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
