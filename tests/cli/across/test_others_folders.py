"""A run folder that somebody else made: it does not move the cursor, hang a command, or run in a
spreadsheet."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ekiden.cli.app import main
from ekiden.lab.reporting.style import as_csv
from tests.methods.gram_runs import silos
from tests.methods.test_fedgram import go


@pytest.fixture
def run(tmp_path: Path) -> Path:
    go(silos([torch.arange(60, 300)]), folder=tmp_path / "run")
    return tmp_path / "run"


def show(run: Path, monkeypatch: pytest.MonkeyPatch, command: str = "show") -> int:
    monkeypatch.setattr(sys, "argv", ["ekiden", command, str(run)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_terminal_escapes_are_not_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["dataset"] = "digits\x1b]0;owned\x07\x1b[2J\x9b31m"
    (run / "config.json").write_text(json.dumps(config))
    show(run, monkeypatch)
    out, err = capfd.readouterr()
    assert "owned" in out + err
    assert not set("\x1b\x07\x9b") & set(out + err)


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "times.jsonl", "ledger.jsonl", "config.json", "environment.json"]
)
@pytest.mark.parametrize(
    "put",
    [os.mkfifo, lambda path: os.symlink("/dev/zero", path)] if os.name == "posix" else [],
    ids=["pipe", "device"],
)
def test_what_is_no_regular_file_does_not_hang(
    name: str,
    put: Callable[[Path], None],
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (run / name).unlink(missing_ok=True)
    put(run / name)
    code = show(run, monkeypatch)
    if name != "environment.json":  # without it only the machine is not known
        assert code == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"{run / name} " in line


READ = [
    ("card", "state.safetensors"),
    ("card", "recalibration.json"),
    ("card", "subgroups.json"),
    ("report", "sweep.json"),
    ("verify", "custody.jsonl"),
    ("stop", "link.json"),
]


@pytest.mark.skipif(os.name != "posix", reason="other systems have no such pipes")
@pytest.mark.parametrize(("command", "name"), READ)
def test_no_command_hangs_at_a_pipe(
    command: str,
    name: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    monkeypatch.chdir(run.parent)
    code = show(run, monkeypatch, command)
    out, err = capfd.readouterr()
    assert code == (0 if command == "report" else 2), "a report leaves out what it cannot read"
    assert (
        len(
            [
                line
                for line in (out + err).splitlines()
                if line.startswith(("ekiden: ", "left out: "))
            ]
        )
        == 1
    )


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "ledger.jsonl", "environment.json"]
)
def test_what_is_nested_too_deeply_is_refused_in_one_line(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_text("[" * 200_000 + "\n")
    assert show(run, monkeypatch) == 2
    assert capfd.readouterr().err == (
        "ekiden: a file is nested too deeply to be read: it is damaged, or made to do harm\n"
    )


def test_no_text_of_a_run_turns_the_lines_of_a_report_around(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["dataset"] = "\u202egnp.exe\u2066"
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        sys, "argv", ["ekiden", "report", str(run), "--out", str(run.parent / "report")]
    )
    main()
    texts = [
        file.read_text()
        for file in (run.parent / "report").rglob("*")
        if file.suffix in (".html", ".csv")
    ]
    assert any("?gnp.exe?" in text for text in texts)
    assert not any(set("\u202e\u2066") & set(text) for text in texts)


@pytest.mark.parametrize(
    "shape", [[1, 8, 10**9], [1, 10**12, 10**12], [1, 8, -8], [1, 8, "x"], None]
)
def test_a_shape_that_no_file_of_the_run_fills_is_one_line(
    shape: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: Callable[..., tuple[int, str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        command(
            "run", "fedseq", "--data", "digits", "--clients", "2", "--epochs", "1", "--out", "runs"
        )[0]
        == 0
    )
    (run,) = Path("runs").iterdir()
    config = json.loads((run / "config.json").read_text())
    config["input"]["shape"] = shape
    (run / "config.json").write_text(json.dumps(config))
    for words in (("evaluate", str(run)), ("export", str(run), "--to", "pt2", "-o", "out.pt2")):
        code, said = command(*words)
        assert (code, said.count("\n")) == (2, 1)
        assert "far larger than its files" in said or "wrong input.shape" in said


def test_exports_hold_no_formulas(run: Path, command: Callable[..., tuple[int, str]]) -> None:
    """Names of runs, data sets and files are of others."""
    config = json.loads((run / "config.json").read_text())
    config["dataset"] = "=1+1"
    (run / "config.json").write_text(json.dumps(config))
    out = run.parent / "out.csv"
    assert command("export", str(run), "--to", "csv", "-o", str(out))[0] == 0
    assert ",'=1+1," in out.read_text().replace('"', "")


def test_tables_hold_no_formulas() -> None:
    rows: list[list[str | float | None]] = [
        ["=1+1", -1.5, None],
        ["+cmd", 2, "@sum"],
        ["-x", 0, "plain"],
        ["\t=1", 1, "a=b"],
    ]
    assert as_csv(["=name", "value", "more"], rows) == (
        "'=name,value,more\n'=1+1,-1.5,\n'+cmd,2,'@sum\n'-x,0,plain\n'\t=1,1,a=b\n"
    )


def test_a_run_between_machines_that_does_not_say_how_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"on": "flower"}))
    (run / "link.json").write_text("{}")
    for plan in (None, {"clients": "a,b"}):
        if plan is not None:
            (run / "config.json").write_text(
                json.dumps(config | {"on": "flower", "remote_plan": plan})
            )
        assert show(run, monkeypatch, "resume") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert re.search(
            "does not say how the run goes|link.json cannot be read|the run folder is damaged", line
        ), line
