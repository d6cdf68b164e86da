"""A sweep's results next to printed values, and the page and the table made from them."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet
import pytest
from rich.console import Console

from ekiden.core.base.errors import UserError
from ekiden.core.tasks import Classification, recorded
from ekiden.lab.tables import experiment, ledger, sweep, verdicts
from ekiden.lab.tables.experiment import Cell, Experiment, Published
from ekiden.lab.tables.verdicts import CellResult, Comparison
from ekiden.methods import Centralized
from ekiden.runs import summary
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import Summary, label, size, spread, summarise

TABLE = """
title = "digits"
source = "a paper, Table 1"
link = "https://example.org"
seeds = [0, 1]
[budget.small]
epochs = 0.5
seeds = 1
[settings]
clients = 3
epochs = 2
[[column]]
label = "digits"
[[column]]
label = "clothes"
differs = "other clothes"
skip = "none here"
[[row]]
label = "FedSeq"
method = "fedseq"
printed = ["10 ± 1", 20]
note = "shuffled"
[[row]]
label = "Local"
method = "local"
metric = "client_mean"
printed = [20.125, "-"]
"""


def parsed(budget: str = "paper") -> Experiment:
    return experiment.parsed(TABLE, "table", budget, "table.toml")


def result(cell: Cell, *accuracies: float) -> CellResult:
    rows = [{"step": 1, "accuracy": a / 100, "client_mean": (a + 1) / 100} for a in accuracies]
    return CellResult(
        cell,
        tuple(
            Summary(Path(), {"recipe": {"seed": i}, "task": recorded(Classification())}, [row], 1.0)
            for i, row in enumerate(rows)
        ),
    )


def costing(found: CellResult) -> CellResult:
    cost = {"bytes": 1, "forward": 1, "backward": 1}
    return replace(found, runs=tuple(replace(run, metrics=[run.last | cost]) for run in found.runs))


def test_mean_spread_difference_and_verdict() -> None:
    found = parsed()
    seq = found.cells[0]
    one = result(seq, 9.0, 11.0)
    assert one.values == pytest.approx((9.0, 11.0))
    assert (one.mean, one.std) == pytest.approx((10.0, 2**0.5))
    assert one.to_json()["difference"] == pytest.approx(0.0)
    # standard error √(2/2 + 1/2) = 1.2247, 1.5² / (1² + 0.5²) = 1.8 degrees of freedom, limit
    # 4.7639: 5.83 points
    expected = {15.8: "consistent", 15.9: "above", 4.2: "consistent", 4.1: "below"}
    for middle, wanted in expected.items():
        assert verdicts.verdict(result(seq, middle - 1, middle + 1), found) == wanted
    assert verdicts.verdict(result(seq, 11.9), found) == "no spread known: one seed"
    assert verdicts.verdict(result(seq), found) == "not run"
    local = found.cells[2]
    assert result(local, 19.0).mean == pytest.approx(20.0), "the metric of this row is client_mean"
    assert verdicts.verdict(result(local, 19.0), found) == "no spread known: one seed"
    assert verdicts.verdict(result(local, 19.0, 19.0), found) == "no spread known: its seeds agree"
    assert verdicts.verdict(result(replace(local, published=None), 19.0), found) == "not printed"
    other = found.cells[1]
    assert verdicts.verdict(result(other, 19.0), found) == "not comparable: other clothes"
    small = parsed("small")
    assert (
        verdicts.verdict(result(small.cells[0], 10.0), small)
        == "not comparable: budget small (epochs 1 of 2)"
    )


def test_places_are_among_rows_or_columns() -> None:
    found = parsed()
    seq, own = result(found.cells[0], 30.0), result(found.cells[2], 40.0)
    assert verdicts.ranks(found, [seq, own]) == {}, "one on all test data, one on the clients' own"
    local = result(replace(own.cell, metric="accuracy"), 40.0)
    assert verdicts.ranks(found, [seq, local]) == {seq.cell.slug: 2, local.cell.slug: 1}
    across = replace(found, methods_in_rows=False)
    assert verdicts.ranks(across, [seq, local]) == {}, "each alone in its row"
    pooled = result(replace(found.cells[0], row="all", plan=Plan(Recipe(Centralized()))), 90.0)
    assert verdicts.ranks(found, [seq, local, pooled]) == {seq.cell.slug: 2, local.cell.slug: 1}, (
        "a yardstick has none"
    )


def test_a_metric_that_no_run_has(tmp_path: Path) -> None:
    made = swept(tmp_path / "sweep")
    file = tmp_path / "sweep" / "experiment.toml"
    file.write_text(
        TABLE.replace('method = "fedseq"', 'method = "fedseq"\nmetric = "global_accuracy"')
    )
    seq, _, local, _ = verdicts.collect(sweep.opened(made.folder))
    assert (seq.runs, len(seq.left_out), len(local.runs)) == ((), 2, 1), (
        "it takes no other cell with it"
    )
    assert "seed 0 does not count: " in seq.left_out[0]
    assert (
        "'global_accuracy' was not measured: write one of accuracy, client_mean in"
        in seq.left_out[0]
    )


def swept(folder: Path, budget: str = "paper") -> sweep.Sweep:
    """A sweep folder with three finished runs, made in this process."""
    found = parsed(budget)
    made = sweep.Sweep(found, folder, "experiments/table.toml")
    sweep.begin(made, TABLE)
    for run in made.runs()[:3]:
        job = sweep.jobs(made, [run])[0]
        job.plan.run(job.folder, job.plan.federation(), about=job.about)
    return made


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> sweep.Sweep:
    return swept(tmp_path_factory.mktemp("sweep"))


def test_the_page_holds_what_the_runs_hold(done: sweep.Sweep) -> None:
    page = ledger.page([sweep.opened(done.folder)])
    runs = [summarise(run.folder) for run in done.runs()[:3]]
    seq = [100 * run.last["accuracy"] for run in runs if run.config["recipe"]["method"] == "fedseq"]
    assert len(seq) == 2
    mean, std = sum(seq) / 2, abs(seq[0] - seq[1]) / 2**0.5
    last = [run.last for run in runs if run.config["recipe"]["method"] == "fedseq"]
    sent = size(last[0]["bytes"])
    assert last[0]["bytes"] == last[1]["bytes"] > 0
    passes, alone = (
        f"{sum(row['forward'] + 2 * row['backward'] for row in rows) / len(rows) / 1e6:,.3g}"
        for rows in (last, [run.last for run in runs if run.config["recipe"]["method"] == "local"])
    )
    compared = Comparison(mean, std, 2, Published(10.0, 1.0))
    assert compared.t is not None
    says = (f"{compared.t:+.2f} ({compared.limit:.2f})", compared.verdict)
    values = (
        f"{mean:.2f} ± {std:.2f}",
        "0, 1",
        sent,
        passes,
        "10.00 ± 1.00",
        f"{mean - 10:+.2f}",
        *says,
    )
    assert f"| FedSeq | digits | {' | '.join(values)} |" in page
    local = next(
        100 * run.last["client_mean"] for run in runs if run.config["recipe"]["method"] == "local"
    )
    assert (
        f"| Local | digits | {local:.2f} | 0 | 0 B | {alone} | 20.125 | {local - 20.125:+.2f} |  | "
        "no spread known" in page
    )
    assert "[a paper, Table 1](https://example.org)" in page
    assert "    ekiden sweep experiments/table.toml\n" in page
    assert "Budget: nothing scaled." in page
    assert "2 of 4 cells, 3 runs" in page
    assert "- FedSeq / digits: shuffled" in page
    assert "clothes |" not in page, "what was not run is not in it"


def test_the_table_in_the_terminal(done: sweep.Sweep) -> None:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(verdicts.listing(done.experiment, verdicts.collect(done)))
    seq = verdicts.collect(done)[0]
    wanted = [
        "FedSeq",
        "digits",
        spread(seq.values),
        "2",
        "10.00 ± 1.00",
        f"{seq.to_json()['difference']:+.2f}",
    ]
    text = console.export_text()
    assert "digits: % as mean ± std" in text
    assert "not run" in text
    lines = [[part.strip() for part in line.split("│")[1:-1]] for line in text.splitlines()]
    assert wanted in lines


def test_a_smaller_budget_is_written_on_everything(tmp_path: Path) -> None:
    made = swept(tmp_path / "sweep", "small")
    run = summarise(made.runs()[0].folder)
    assert run.config["sweep"]["budget"] == "small"
    assert run.config["sweep"]["scaled"] == [{"name": "epochs", "full": 2, "used": 1}]
    assert run.config["recipe"]["hyperparameters"]["epochs"] == 1
    assert label(run.config).endswith(", budget small: epochs 1 of 2")
    page = ledger.section(sweep.opened(made.folder))
    assert "Budget small: epochs 1 of 2, 1 of 2 seeds." in page
    assert "not comparable: budget small (epochs 1 of 2)" in page
    assert "    ekiden sweep experiments/table.toml --budget small\n" in page


def test_metrics_as_parquet_and_csv(done: sweep.Sweep, tmp_path: Path) -> None:
    runs = [summarise(folder) for folder in sweep.expand([done.folder, done.folder / "sweep.json"])]
    assert len(runs) == 3
    rows = sum(len(run.metrics) for run in runs)
    assert summary.write(runs, tmp_path / "out.parquet") == rows
    assert summary.write(runs, tmp_path / "out.csv") == rows
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    last = next(r for r in reversed(table) if r["row"] == "FedSeq" and r["seed"] == 0)
    metrics = summarise(done.runs()[0].folder).last
    assert (last["step"], last["accuracy"], last["bytes"]) == (
        metrics["step"],
        metrics["accuracy"],
        metrics["bytes"],
    )
    assert last["client_accuracy_client-1"] == metrics["clients"][1]
    assert (last["method"], last["column"], last["budget"], last["finished"]) == (
        "fedseq",
        "digits",
        "paper",
        True,
    )
    assert {r["consensus"] for r in table if r["method"] == "fedseq"} == {None}
    csv = pyarrow.csv.read_csv(tmp_path / "out.csv").to_pylist()
    assert [r["accuracy"] for r in csv] == [r["accuracy"] for r in table]
    with pytest.raises(UserError, match=r"must end in \.parquet or \.csv"):
        summary.write(runs, tmp_path / "out.xlsx")
    with pytest.raises(UserError, match="cannot write"):
        summary.write(runs, tmp_path / "none" / "out.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "out.parquet"]


def test_the_page_escapes_what_files_say(tmp_path: Path) -> None:
    table = (
        TABLE.replace('label = "FedSeq"', 'label = "A | B"')
        + '[[row]]\nlabel = "C"\nmethod = "fedavg"\n'
    )
    table = table.replace(
        'title = "digits"', 'title = "digits"\nnote = "# no heading"\npaired = ["A | B"]'
    )
    found = experiment.parsed(table, "table", "paper", "table.toml")
    made = sweep.Sweep(found, tmp_path, "my tables/table.toml")
    assert r"\# no heading" in ledger.section(made)
    assert "    ekiden sweep 'my tables/table.toml'\n" in ledger.section(made)
    row = ledger.table_row(ledger.line(costing(result(found.cells[0], 9.0)), found))
    assert row.startswith(r"| A \| B | digits | 9.00 |")
    assert len(re.findall(r"(?<!\\)\|", row)) == 11


def test_a_run_that_cannot_be_read_is_named(done: sweep.Sweep, tmp_path: Path) -> None:
    for number, change in enumerate(({"training": {"new": 1}}, {"hyperparameters": []})):
        folder = tmp_path / str(number)
        shutil.copytree(done.runs()[0].folder, folder)
        config = json.loads((folder / "config.json").read_text())
        config["recipe"] |= change
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=str(folder)):
            summarise(folder)
    for name, line in (("times", "[]"), ("times", "{}"), ("metrics", '{"step": 3}')):
        folder = tmp_path / f"{name}{line}"
        shutil.copytree(done.runs()[0].folder, folder)
        (folder / f"{name}.jsonl").write_text(f"{line}\n")
        with pytest.raises(UserError, match=f"{name}.jsonl.* the run folder is damaged"):
            summarise(folder)


@pytest.mark.parametrize("label", ["votes", "votes (N models)"])
def test_a_method_with_many_models_is_marked_once(label: str) -> None:
    table = experiment.parsed(
        TABLE + f'[[row]]\nlabel = "{label}"\nmethod = "fedov"\n', "table", "paper", "table.toml"
    )
    assert verdicts.names(table.cells[-2], table) == ("votes (N models)", "digits")


def test_how_many_runs_were_printed() -> None:
    for number, said in ((1, "1 run."), (5, "5 runs.")):
        table = experiment.parsed(
            f"printed_seeds = {number}\n{TABLE}", "table", "paper", "table.toml"
        )
        assert ledger.runs_line(table) == [f"Printed values are means of {said}", ""]
