"""The page: complete, self-contained, escaped; and what replaces missing parts."""

import base64
import re
import shutil
import sys
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from ekiden.cli.app import main
from ekiden.core.base.errors import UserError
from ekiden.lab.reporting import report
from ekiden.methods import FedAvg, FedProx, FedSeq
from tests.lab.reporting.conftest import copied, make, plan

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
