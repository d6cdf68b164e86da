"""What the help pages show, and how."""

import re
from dataclasses import fields

import pytest

from ekiden import Hardware, Training
from ekiden.cli.runs import RunOptions, overview, run_options
from ekiden.data import Reading
from ekiden.engine.method import Method
from ekiden.experiments.plan import Plan
from ekiden.methods import METHODS, SORTS, FedELMY, FedSeq, MAEcho, method_named


@pytest.mark.parametrize("kind", [FedELMY, FedSeq, MAEcho])
def test_the_help_of_a_method_fits_and_begins_with_its_own(
    kind: type[Method], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        run_options(Plan(kind()), ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    boxes = re.findall(r"^\n([\w-]+)$", text, re.MULTILINE)
    assert boxes == ["options", kind.title(), "data", "columns", "network", "training", "hardware", "run"]
    flags = re.findall(r"^  (--[a-z][\w-]*)", text, re.MULTILINE)
    nested = {"method", "reading", "training", "hardware", "plan"}
    kinds = (kind, Plan, Reading, Training, Hardware, RunOptions)
    wanted = {f"--{f.name.replace('_', '-')}" for one in kinds for f in fields(one) if f.name not in nested}
    assert sorted(flags) == sorted(wanted), "each once"


def test_the_help_of_run_is_one_screen_with_every_method() -> None:
    text = overview()
    assert len(text.splitlines()) <= 24
    assert max(map(len, text.splitlines())) <= 80
    assert all(re.search(rf"\b{method.title()}\b", text) for method in METHODS)
    assert sorted(m.title() for group in SORTS.values() for m in group) == sorted(m.title() for m in METHODS)


@pytest.mark.parametrize("name", ["fedelmy-parallel", "fedelmyparallel", "FedELMY_Parallel", "ot-fusion", "otfusion"])
def test_names_with_and_without_hyphens(name: str) -> None:
    assert method_named(name).title() == name.lower().replace("-", "").replace("_", "")
