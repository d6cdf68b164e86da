"""Tables of the report, and the commands that repeat its runs."""

import csv
import json
import shlex
import shutil
from pathlib import Path

import pytest

from ekiden import Training
from ekiden.cli.runs import run_options
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import Method
from ekiden.lab.reporting.runs import collect
from ekiden.lab.reporting.tables import command, promises
from ekiden.methods import FedAvg, FedELMY, FedSeq
from ekiden.readers.columns import Reading
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from tests.lab.reporting.conftest import copied

pytestmark = pytest.mark.xdist_group("report")


@pytest.mark.parametrize(
    "wanted",
    [
        Plan(Recipe(FedSeq())),
        Plan(
            Recipe(FedELMY(models=2, alpha=0.06, average_start=False, form="released"), seed=3),
            clients=4,
        ),
        Plan(
            Recipe(FedAvg(server_optimizer="adam", server_lr=0.01), evaluate_every=5),
            "a folder/with space",
            "domains:a,b",
            size=32,
        ),
        Plan(
            Recipe(
                FedSeq(order="b,a"),
                training=Training(lr=5e-5, mean=(0.5,), std=(0.25,), augment=False, select="last"),
            )
        ),
        Plan(Recipe(FedSeq(), evaluate_on="own")),
        Plan(
            Recipe(FedSeq(), model="cnn"),
            val_fraction=0.0,
            workers=2,
            hardware=Hardware("cuda:1", 2, "bf16", True),
        ),
    ],
)
def test_the_command_of_a_plan_is_read_as_that_plan(wanted: Plan[Method]) -> None:
    words = shlex.split(command(wanted))
    assert words[:3] == ["ekiden", "run", wanted.recipe.method.title()]
    kind = type(wanted.recipe.method)
    assert run_options(Plan(Recipe(kind())), words[3:]).plan == wanted


def test_paired_differences_of_a_sweep(runs: Path, out: Path, page: str) -> None:
    table = list(csv.DictReader((out / "data" / "paired-1-1.csv").read_text().splitlines()))
    last = {
        (name, seed): read_lines(runs / "sweep" / f"{name}--digits--seed{seed}" / "metrics.jsonl")[
            -1
        ]["accuracy"]
        for name in ("Averaged", "Sequential-i-")
        for seed in (0, 1)
    }
    apart = [100 * (last["Averaged", seed] - last["Sequential-i-", seed]) for seed in (0, 1)]
    assert [(row["task"], row["other"], row["seeds"]) for row in table] == [
        ("digits", "Sequential <i>", "2")
    ]
    assert float(table[0]["mean"]) == pytest.approx(sum(apart) / 2)
    assert float(table[0]["standard_error"]) == pytest.approx(abs(apart[0] - apart[1]) / 2)
    assert "Averaged minus the others, paired by seed" in page
    assert (
        f"{sum(apart) / 2:+.2f} ± {abs(apart[0] - apart[1]) / 2:.2f}: Sequential &lt;i&gt;" in page
    )


def test_the_numbers_are_those_of_the_runs(runs: Path, out: Path, page: str) -> None:
    last = [
        100 * read_lines(runs / f"fedelmy-{seed}" / "metrics.jsonl")[-1]["accuracy"]
        for seed in (0, 1)
    ]
    mean, std = sum(last) / 2, abs(last[0] - last[1]) / 2**0.5
    assert (
        f"FedELMY,digits · dirichlet:0.5 · 3 clients,{mean}"
        in (out / "data" / "results-2.csv").read_text()
    )
    assert f">{mean:.2f} ± {std:.2f}<" in page
    seqs = [
        read_lines(f / "metrics.jsonl")[-1]["accuracy"]
        for f in sorted((runs / "sweep").glob("Sequential*"))
    ]
    row = (out / "data" / "results-1.csv").read_text().splitlines()[1].split(",")
    assert float(row[2]) == pytest.approx(50 * sum(seqs))
    assert row[7:9] == ["50.0", "2.0"]
    assert "cannot be run<small>published 99.50</small>" in page
    moved = json.loads((runs / "fedseq" / "config.json").read_text())["model_bytes"] * 2
    assert f"client-0,client-1,{moved // 2}" in "".join(
        f.read_text() for f in (out / "data").glob("ledger-*")
    )
    assert f",{float(moved)}," in (out / "data" / "cost-1.csv").read_text().replace(
        f",{moved},", f",{float(moved)},"
    )


def test_every_finished_cell_is_in_its_table(runs: Path, tmp_path: Path) -> None:
    """Also if the run of a smaller budget is the same, or a folder is named twice or copied."""
    for name in ("table", "table-small"):
        shutil.copytree(runs / "sweep", tmp_path / name)
    mark = tmp_path / "table-small" / "sweep.json"
    mark.write_text(mark.read_text().replace('"paper"', '"small"'))
    copy = tmp_path / "table-small" / "experiment.toml"
    copy.write_text(copy.read_text() + "[budget.small]\nseeds = 1\n")
    found = collect([tmp_path / "table", tmp_path / "table-small"])
    assert [[len(r.runs) for r in results] for _, results in found.sweeps] == [[2, 2, 0], [1, 1, 0]]
    assert [len(group.runs) for group in found.groups] == [2, 2], "in figures each run is once"
    left_out = {folder.name for folder, _ in found.left_out}
    assert left_out == {"Sequential-i---digits--seed1", "Averaged--digits--seed1"}, (
        "a budget of one seed"
    )
    twice = collect(
        [
            runs / "sweep",
            tmp_path / ".." / tmp_path.name / "table" / ".." / "table",
            tmp_path / "table",
        ]
    )
    assert [[len(r.runs) for r in results] for _, results in twice.sweeps] == [[2, 2, 0]] * 2
    assert not twice.left_out


def test_a_run_with_noise_has_its_epsilon_on_the_page(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path, "fedseq")
    assert promises(collect([folder])) == []
    config = json.loads((folder / "config.json").read_text())
    told = {
        "epsilon": 2.5,
        "delta": 1e-5,
        "clip": 1.0,
        "honest": 3,
        "clients": {"a": {"noise": 0.7}, "b": {"noise": 1.9}},
    }
    (folder / "config.json").write_text(json.dumps(config | {"privacy": told}))
    (table,) = promises(collect([folder]))
    assert [row[2:] for row in table.rows] == [["2.5", "1e-05", "1", "1.9", "3"]]


def test_the_command_that_repeats_a_run_has_what_columns_mean() -> None:
    reading = Reading(label_column=("died",), drop_columns=("id", "n"))
    recipe = Recipe(FedSeq(epochs=3), training=Training(lr=0.1))
    assert command(Plan(recipe, data="a b.csv", reading=reading, hardware=Hardware(threads=2))) == (
        "ekiden run fedseq --epochs 3 --lr 0.1 --data 'a b.csv' --label-column died --drop-columns "
        "id n --threads 2"
    )
