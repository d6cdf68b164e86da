"""What the settings of a run make of its data."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
import torch

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.data.augment import Augment
from ekiden.data import Reading
from ekiden.methods import GLM, FedGram, FedSeq
from ekiden.runs.plan import Plan, from_json, read, written
from ekiden.runs.recipe import Recipe


def test_a_subset_keeps_all_but_the_number_of_training_samples() -> None:
    plan = Plan(Recipe(FedSeq(epochs=1)), data="digits", clients=3, partition="iid", subset=100)
    few, whole = plan.dataset(), Plan(Recipe(FedSeq())).dataset()
    assert (len(few.train), len(few.test)) == (100, len(whole.test))
    for name in ("name", "classes", "mean", "std", "augment", "task", "inputs"):
        assert getattr(few, name) == getattr(whole, name), name
    augmented = replace(whole, augment=Augment(flip=True), classes=tuple("abcdefghij"), mean=(0.5,))
    kept = augmented.subset(100)
    assert replace(kept, train=augmented.train) == augmented, "in Python it loses nothing, either"
    assert torch.equal(kept.train.x, few.train.x)
    assert torch.equal(few.train.x, plan.dataset().train.x), "the seed chooses the samples"
    other = Plan(Recipe(FedSeq(), seed=1), subset=100).dataset()
    assert not torch.equal(few.train.x, other.train.x)
    assert sum(len(client.train) + len(client.val) for client in plan.federation().clients) == 100
    assert from_json(plan.to_json()) == plan
    assert "subset" not in Plan(Recipe(FedSeq())).to_json(), "older runs are the same"


def test_data_that_leave_owners_out_are_read_again_as_they_were(tmp_path: Path) -> None:
    sites = [*"abc"] * 20
    table = {"site": sites, "x": [1.0 * k for k in range(60)], "label": [0, 1, 1, 0, 1, 0] * 10}
    pyarrow.csv.write_csv(pa.table(table), tmp_path / "t.csv")
    left, whole = (
        ekiden.load(tmp_path / "t.csv", group_column="site", without=names) for names in (["b"], [])
    )
    silos = ekiden.split(left, "natural")
    mixed = ekiden.split(whole, "iid", 3).without("client-1")
    for name, data in {"natural": silos, "mixed": mixed}.items():
        result = ekiden.run(GLM(), data, "auto", folder=tmp_path / name, quiet=True)
        assert ekiden.evaluate(tmp_path / name)["loss"] == result.metrics[-1]["loss"]
    # a run folder cannot say these
    for data in (ekiden.split(left, "iid", 2), ekiden.split(whole, "natural").without("b")):
        assert data.origin is None


def test_every_setting_survives(tmp_path: Path) -> None:
    odd = Reading(
        drop_columns=('a "b"', "ü\\n\x7f"),
        pixel_window=(-0.5, 1e9),
        label_column=("y",),
        augment_flip=True,
    )
    plan = Plan(
        Recipe(FedSeq(epochs=3), seed=4, metric="balanced_accuracy"),
        "a.csv",
        reading=odd,
        data_seed=1,
        tune=True,
    )
    (tmp_path / "p.toml").write_text(written(plan), encoding="utf-8")
    found = read(tmp_path / "p.toml")
    assert found.recipe == plan.recipe
    assert (found.reading, found.data_seed, found.tune) == (odd, 1, True)
    assert set(tomllib.loads(written(Plan(Recipe(FedGram()))))) > {
        "width",
        "lr",
        "device",
        "data",
        "seed",
        "label_column",
    }


@pytest.mark.parametrize(
    ("text", "method", "line"),
    [
        (
            'method = "fedseq"\nepocs = 3',
            "",
            "unknown setting of fedseq 'epocs': did you mean 'epochs'",
        ),
        ("epochs = 3", "", 'it names no method: add a line such as method = "fedseq"'),
        ('method = "fedseqq"', "", "unknown method 'fedseqq': did you mean 'fedseq'"),
        ("method = 3", "", "it names no method"),
        (
            'method = "fedseq"',
            "fedgram",
            "it is for fedseq, not for fedgram: leave out one of them",
        ),
        ("epochs = '3'", "fedseq", "epochs '3' is of the wrong type"),
        ("epochs = nan", "fedseq", "epochs nan is of the wrong type"),
        ("lr = inf", "fedseq", "lr inf is out of range"),
        ("epochs = ", "fedseq", "is not valid TOML"),
        ("[training]\nlr = 1", "fedseq", "unknown setting of fedseq 'training'"),
        ('partition = "iidd"', "fedseq", "'iidd' is not a partition"),
        ('silos = "a.csv"', "fedseq", "silos 'a.csv' is of the wrong type"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, text: str, method: str, line: str
) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UserError) as refused:
        read(tmp_path / "p.toml", method)
    assert str(refused.value).startswith(str(tmp_path / "p.toml"))
    assert line in str(refused.value)


def test_stored_plans_are_checked() -> None:
    values = Plan(Recipe(FedSeq())).to_json()
    assert from_json(json.loads(json.dumps(values))) == Plan(Recipe(FedSeq()))
    values["recipe"]["training"]["select"] = "lastt"
    with pytest.raises(
        UserError, match=r"settings of fedseq cannot be read .training.select 'lastt' is unknown"
    ):
        from_json(values)
