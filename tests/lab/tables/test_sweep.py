"""Sweeps: their cells, what is chosen of them, and the folder that marks one."""

import json
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.lab.tables import experiment, sweep
from ekiden.methods import FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe


def test_a_damaged_mark_and_a_foreign_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a sweep folder"):
        sweep.opened(tmp_path)
    (tmp_path / "sweep.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="is damaged or of another version"):
        sweep.opened(tmp_path)


def test_cells_are_named_by_row_and_column() -> None:
    rows = "".join(
        f'[[row]]\nlabel = "{label}"\nmethod = "{method}"\n'
        for label, method in (("FedSeq", "fedseq"), ("FedSeq long", "fedseq"), ("Local", "local"))
    )
    columns = "".join(
        f'[[column]]\nlabel = "{label}"\n' for label in ("PACS", "PACS E=2", "PACS E=20")
    )
    found = experiment.parsed(rows + columns, "table", "paper", "table.toml")

    def labels(only: list[str], without: list[str]) -> list[str]:
        return [cell.label for cell in sweep.select(found, only, without)]

    assert len(labels([], [])) == 9
    assert labels(["FedSeq"], ["E=20"]) == ["FedSeq / PACS", "FedSeq / PACS E=2"], (
        "a full label comes first"
    )
    assert labels(["seq"], ["E=2", "E=20"]) == ["FedSeq / PACS", "FedSeq long / PACS"]
    assert labels(["local/PACS", "long / E=2"], []) == ["FedSeq long / PACS E=2", "Local / PACS"]
    with pytest.raises(UserError, match="unknown cell 'Lokal': did you mean 'Local'"):
        labels(["Lokal"], [])
    with pytest.raises(UserError, match="leaves no cell"):
        labels(["Local"], ["Local"])


def test_a_network_in_a_folder_counts_where_its_folder_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a checkout that has the records of runs, but not the network with which they began."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "small").mkdir(parents=True)

    def named(model: str) -> Plan[Method]:
        return Plan(Recipe(FedSeq(), model=model, pretrained="start.safetensors"))

    with_folder = named("hf:models/small")
    (tmp_path / "models" / "small").rmdir()
    without = named("hf:models/small")
    assert with_folder.recipe.model != without.recipe.model
    assert sweep.flat(with_folder) == sweep.flat(without)
    assert sweep.flat(with_folder) != sweep.flat(named("hf:models/large"))
