"""The page: complete, self-contained, escaped; and what replaces missing parts."""

import base64
import csv
import json
import re
import shutil
import sys
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from ekiden import Training
from ekiden.cli.app import main
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.folder import read_lines
from ekiden.lab.reporting import report
from ekiden.lab.reporting.runs import Opener, accuracies, collect
from ekiden.lab.reporting.tables import command, promises
from ekiden.lab.tables import sweep
from ekiden.methods import FedAvg, FedProx, FedSeq
from ekiden.readers.columns import Reading
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from tests.lab.reporting.conftest import EXPERIMENT, make, plan

pytestmark = pytest.mark.xdist_group("report")
SECTIONS = [
    "results",
    "cost",
    "curves",
    "groups",
    "data",
    "forgetting",
    "ledger",
    "runs",
]


@pytest.fixture
def page(out: Path) -> str:
    return (out / "index.html").read_text()


def copied(runs: Path, home: Path, name: str) -> Path:
    return Path(shutil.copytree(runs / name, home / name))


def test_has_every_section_and_figure_and_the_files_behind_them(out: Path, page: str) -> None:
    assert re.findall(r'<h2 id="([^"]+)"', page) == SECTIONS
    drawn = re.findall(r'<figure class="card \w+" id="figure-([^"]+)"', page)
    kinds = {re.split(r"-\d", name)[0] for name in drawn}
    assert kinds == {
        *("bytes", "compute", "steps", "clients", "class", "holds"),
        *("forgetting", "ledger"),
    }
    for name in drawn:
        assert (out / "figures" / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert (out / "figures" / f"{name}.svg").read_text().startswith("<?xml")
    tables = re.findall(r'<div class="card full table" id="table-([^"]+)"', page)
    assert {f.stem for f in (out / "data").iterdir()} == {*drawn, *tables}
    links = dict(re.findall(r'download="([^"]+)" href="data:text/csv;base64,([^"]*)"', page))
    assert {f.name: f.read_text() for f in (out / "data").iterdir()} == {
        name: base64.b64decode(data).decode() for name, data in links.items()
    }


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


def test_needs_nothing_from_elsewhere_and_nothing_in_it_has_two_meanings(page: str) -> None:
    assert not re.search(r"<(script|link rel=.stylesheet|img|iframe)", page)
    elsewhere = set(re.findall(r'(?:src|href)="(\w+:[^",;]+)', page))
    assert elsewhere == {"data:text/csv", "https://arxiv.org/abs/2404.12130"}, (
        "the experiment's own link"
    )
    ids = Counter(re.findall(r'\bid="([^"]+)"', page))
    assert [name for name, times in ids.items() if times > 1] == []
    used = {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)}
    assert used
    assert used - set(ids) == set()


def test_colours_of_figures_are_those_of_the_page(page: str) -> None:
    inside = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL)).replace(
        "stroke: #000000; stroke-opacity: 0", ""
    )
    assert "var(--ink)" in inside
    assert "var(--s0)" in inside
    assert not re.search("#000000|#ffffff|#1b1f24|#0072b2", inside, re.IGNORECASE)


def test_what_users_named_is_text(page: str) -> None:
    assert "Table &lt;b&gt;1&lt;/b&gt;" in page
    assert "Sequential &lt;i&gt;" in page
    assert "Nobody &amp; Sons" in page
    assert "<i>" not in page


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


def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        report([runs / "fedseq"], tmp_path / name, details=0)
    one, two = (
        {f.name: f.read_bytes() for f in (tmp_path / name).rglob("*") if f.is_file()}
        for name in ("one", "two")
    )
    assert one == two
    assert "draws the other methods" in one["index.html"].decode()


def test_damaged_and_unfinished_runs_are_named_and_the_others_shown(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "fedavg", tmp_path / "runs" / "good")
    shutil.copytree(runs / "fedavg", tmp_path / "runs" / "twin")
    damaged, short, lines = (
        copied(runs, tmp_path / "runs", name) for name in ("fedseq", "fedelmy-0", "fedelmy-1")
    )
    (damaged / "config.json").write_text('{"format"')
    metrics = (short / "metrics.jsonl").read_text().splitlines(keepends=True)
    (short / "metrics.jsonl").write_text(metrics[0])
    (lines / "metrics.jsonl").write_text("no line\n")
    found = report([tmp_path / "runs"], tmp_path / "out", details=0)
    assert [run.folder.name for group in found.groups for run in group.runs] == ["good"]
    why = {folder.name: text for folder, text in found.left_out}
    assert "cannot be read: the run folder is damaged" in why["fedseq"]
    assert why["fedelmy-0"].startswith("stopped after step 1: `ekiden resume")
    assert "line 1 cannot be read" in why["fedelmy-1"]
    assert why["twin"].startswith("the same run as")
    text = (tmp_path / "out" / "index.html").read_text()
    assert all(name in text for name in ("left-out", "fedelmy-0", "4 folders are"))


@pytest.mark.slow
def test_a_damaged_ledger_costs_its_figures_only(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path, "fedseq")
    (folder / "ledger.jsonl").write_text("no line\n")
    report([folder], tmp_path / "out", details=1)
    text = (tmp_path / "out" / "index.html").read_text()
    assert "ledger.jsonl, line 1 cannot be read" in text
    assert 'id="figure-clients-1"' in text


def test_nothing_to_report(runs: Path, tmp_path: Path) -> None:
    folder = copied(runs, tmp_path, "fedseq")
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"no finished run to report: .*stopped after step 0"):
        report([folder], tmp_path / "out", details=1)
    with pytest.raises(UserError, match="does not exist"):
        report([tmp_path / "nowhere"], tmp_path / "out", details=1)
    with pytest.raises(UserError, match="name the run folders"):
        report([], tmp_path / "out", details=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        report([tmp_path / "empty"], tmp_path / "out", details=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "fedseq"]


def test_writes_over_nothing_but_an_older_report(runs: Path, out: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(out, tmp_path / "out"))
    (out / "figures" / "old.png").touch()
    (out / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(out)
    report([runs / "fedseq"], tmp_path / "link", details=0)
    assert not (out / "figures" / "old.png").exists()
    assert (out / "notes.txt").read_text() == "mine"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "index.html").write_text("my own page")
    for wrong, text in (
        (tmp_path / "mine", "not a report"),
        (tmp_path / "mine" / "index.html", "names a folder"),
    ):
        with pytest.raises(UserError, match=text):
            report([runs / "fedseq"], wrong, details=0)
    assert (tmp_path / "mine" / "index.html").read_text() == "my own page"


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
    tuned = Opener()(found.groups[2].first)
    assert len(tuned.data.dataset.test) == sum(len(c.val) for c in tuned.data.clients) > 0
    assert found.groups[2].first.last["accuracy"] == pytest.approx(
        sum(n * a for n, a in accuracies(tuned)["class"].values()) / len(tuned.data.dataset.test)
    )


def test_on_the_command_line(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = copied(runs, tmp_path, "fedavg")
    (unfinished / "metrics.jsonl").write_text("")
    arguments = [
        "report",
        str(runs / "fedseq"),
        str(unfinished),
        "-o",
        str(tmp_path / "out"),
        "--details",
        "0",
    ]
    monkeypatch.setattr(sys, "argv", ["ekiden", *arguments])
    main()
    printed = capsys.readouterr().out
    assert f"left out: {unfinished}: stopped after step 0" in printed
    assert f"report: {tmp_path / 'out' / 'index.html'}" in printed
    for wrong, text in (
        ([*arguments[:1], "nowhere"], "nowhere does not exist"),
        ([*arguments[:-1], "-1"], "0 or more"),
    ):
        monkeypatch.setattr(sys, "argv", ["ekiden", *wrong])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_labels_are_shown_as_they_are(tmp_path: Path) -> None:
    """Not shown as formulas, and not left out of legends if they begin with an underscore."""
    labels = [r"A $\foo$ [/b]", "_B", "$5 and $6"]
    for label, method in zip(
        labels,
        (FedSeq(epochs=1), FedAvg(rounds=1, epochs=1), FedProx(rounds=1, epochs=1)),
        strict=True,
    ):
        make(
            plan(method),
            tmp_path / "runs" / str(labels.index(label)),
            sweep={"row": label, "column": "digits"},
        )
    report([tmp_path / "runs"], tmp_path / "out", details=0)
    for figure in ("bytes-1", "clients-1"):
        drawn = unescape((tmp_path / "out" / "figures" / f"{figure}.svg").read_text())
        assert all(label in drawn for label in labels), figure


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


def test_records_are_no_runs(runs: Path, tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    swept = sweep.opened(runs / "sweep")
    sweep.keep_records(swept, EXPERIMENT, file)
    with pytest.raises(
        UserError, match=r"holds records, not steps or models: .*`ekiden results .*kept\.jsonl`"
    ):
        collect([file])


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
