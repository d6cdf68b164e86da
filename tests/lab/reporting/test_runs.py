"""Which runs a report holds, and which of them are seeds of one method."""

from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.lab.reporting.runs import accuracies, collect, open_models_of
from ekiden.lab.tables import sweep
from ekiden.methods import FedSeq
from ekiden.runs.summary import summarise
from tests.lab.reporting.conftest import EXPERIMENT, make, plan

pytestmark = pytest.mark.xdist_group("report")


def test_accuracies_of_all_models_and_classes(runs: Path) -> None:
    made = summarise(runs / "fedper")
    run = open_models_of(made)
    assert run.personal
    rows = accuracies(run)["class"]
    right = sum(n * a for n, a in rows.values())
    assert right / sum(n for n, _ in rows.values()) == pytest.approx(made.last["accuracy"])


def test_methods_that_occur_twice_are_told_apart_by_what_differs(
    runs: Path, tmp_path: Path
) -> None:
    make(plan(FedSeq(epochs=1)), tmp_path / "short")
    found = collect([runs / "fedseq", tmp_path / "short"])
    assert [group.name for group in found.groups] == ["FedSeq (epochs=4)", "FedSeq (epochs=1)"]
    assert len({group.setting for group in found.groups}) == 1


def test_runs_of_other_data_or_precision_are_no_seeds_of_one_method(
    runs: Path, tmp_path: Path
) -> None:
    plain = plan(FedSeq(epochs=4))
    make(
        replace(
            plain,
            recipe=replace(plain.recipe, seed=1),
            hardware=replace(plain.hardware, precision="bf16"),
        ),
        tmp_path / "bf16",
    )
    make(replace(plain, recipe=replace(plain.recipe, seed=2), tune=True), tmp_path / "tuned")
    found = collect([runs / "fedseq", tmp_path / "bf16", tmp_path / "tuned"])
    assert [(group.name, len(group.runs)) for group in found.groups] == [
        ("FedSeq (precision=float32)", 1),
        ("FedSeq (precision=bf16)", 1),
        ("FedSeq", 1),
    ]
    assert [group.setting.endswith("on validation data") for group in found.groups] == [
        False,
        False,
        True,
    ]
    tuned = open_models_of(found.groups[2].first)
    assert len(tuned.data.dataset.test) == sum(len(c.val) for c in tuned.data.clients) > 0
    assert found.groups[2].first.last["accuracy"] == pytest.approx(
        sum(n * a for n, a in accuracies(tuned)["class"].values()) / len(tuned.data.dataset.test)
    )


def test_records_are_no_runs(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    swept = sweep.opened(runs / "sweep")
    sweep.keep_records(swept, EXPERIMENT, file, swept.runs())
    with pytest.raises(
        UserError, match=r"holds records, not steps or models: .*`ekiden results .*kept\.jsonl`"
    ):
        collect([file])
