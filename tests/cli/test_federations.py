"""The commands of a federation: silos that come, agree and go."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.readers.kinds import terms
from ekiden.silos.silo.silo_file import read
from tests.silos.silo_files import TABLE, sums_of, tables


def test_silos_agree_on_the_scaling_of_tables(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    files = tables(tmp_path)
    with pytest.raises(
        UserError,
        match=r"silos agree on the scaling of a table, .* before they start: run `ekiden silo sums",
    ):
        read(files[0]).load()
    for file in files:
        code, said = command("silo", "sums", str(file))
        assert code == 0, said
    told = json.loads((tmp_path / "a-sums.json").read_text())
    assert set(told) == {
        "moments",
        "missing",
        "categories",
        "dates",
        "marks",
        "silo",
        "classes",
        "rows",
        "followed",
        "secret",
    }
    assert (told["silo"], told["rows"], told["followed"], told["secret"]) == (
        "a",
        [],
        None,
        "",
    )  # and no row
    out = tmp_path / "agreed.json"
    code, said = command(
        "federation", "agree", *(str(tmp_path / f"{n}-sums.json") for n in "ab"), "--out", str(out)
    )
    assert code == 0, said
    for file, name in zip(files, "ab", strict=True):
        file.write_text(TABLE.format(name=name, more='agreed = "agreed.json"'))
    (one, a), (two, b) = (read(file).load() for file in files)
    assert one.inputs == two.inputs
    assert terms(one.inputs) == terms(two.inputs) != ""
    rows = torch.cat([a.train.x, b.train.x])
    assert abs(float(rows[:, 0].mean())) < 1e-5
    assert abs(float(rows[:, 0].std(correction=0)) - 1) < 1e-5
    assert a.train.x[:, 0].mean() < -0.5 < 0.5 < b.train.x[:, 0].mean()  # each on one scale
    assert set(one.train.x[:, -1].tolist()) == {1.0, 2.0}


def test_mistakes_in_agreeing(tmp_path: Path, command: Callable[..., tuple[int, str]]) -> None:
    files = tables(tmp_path)
    for file in files:
        command("silo", "sums", str(file))
    a, b = tmp_path / "a-sums.json", tmp_path / "b-sums.json"
    b.write_text(b.read_text().replace('"age"', '"alter"'))
    for given, line in (
        ((a, b), "b-sums.json lacks the column 'age' of numbers, which"),
        ((a, tmp_path / "c.json"), "cannot read"),
        ((a, tmp_path / "a.csv"), "holds no sums of a table"),
        ((), "SUMS is missing"),
    ):
        code, said = command(
            "federation", "agree", *map(str, given), "--out", str(tmp_path / "x.json")
        )
        assert (code, len(said.splitlines()), line in said) == (2, 1, True), said
    assert not (tmp_path / "x.json").exists()
    files[0].write_text(TABLE.format(name="a", more='agreed = "a.csv"'))
    with pytest.raises(UserError, match="holds no agreed scaling"):
        read(files[0]).load()
    files[0].write_text(TABLE.format(name="a", more='task = "regresion"'))
    with pytest.raises(UserError, match=r"data.task 'regresion' is unknown: it must be one of"):
        read(files[0])
    files[0].write_text(TABLE.format(name="a", more="").replace('"died"', '"dead"'))
    with pytest.raises(UserError, match=r"unknown column of .* 'dead': did you mean 'died'"):
        read(files[0]).load()


def changed(file: str, change: Callable[[dict[str, Any]], None]) -> None:
    told = json.loads(Path(file).read_text())
    change(told)
    Path(file).write_text(json.dumps(told))


def test_agreeing_names_silos_that_are_missing_or_in_another_unit(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = sums_of(tmp_path, command)
    made = command(
        "federation", "init", "fed", "--silos", "a,b,c", "--host", "localhost", "--data", "x.csv"
    )
    assert made[0] == 0, made[1]
    code, said = command("federation", "agree", a, b, "--federation", "fed")
    assert (code, said.count("\n")) == (2, 1)
    assert "the sums of c are missing" in said
    assert command("federation", "agree", a, a)[1].startswith("ekiden: two files are the sums of a")
    assert not (tmp_path / "agreed.json").exists()

    def metres(told: dict[str, Any]) -> None:
        age = told["moments"]["age"]
        told["moments"]["age"] = {
            "count": age["count"],
            "mean": age["mean"] / 100,
            "squares": age["squares"] / 1e4,
        }

    code, said = command("federation", "agree", a, b)
    assert (code, "differs" in said) == (0, False), said
    changed(b, metres)
    code, said = command("federation", "agree", a, b)
    assert code == 0
    assert "column 'age' differs between silos: a (mean 5" in said


def test_agreeing_refuses_or_merges_spellings(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    a, b = sums_of(tmp_path, command)

    def capitals(told: dict[str, Any]) -> None:
        told["categories"]["sex"] = {
            name.upper(): n for name, n in told["categories"]["sex"].items()
        }

    one = json.loads(Path(a).read_text())["categories"]["sex"]
    changed(b, capitals)
    code, said = command("federation", "agree", a, b)
    assert code == 2
    name = next(iter(one))
    assert f"column 'sex' has {name!r} (a) and {name.upper()!r} (b)" in said
    for how, count in (("merge", len(one)), ("keep", 2 * len(one))):
        code, said = command("federation", "agree", a, b, "--spelling", how)
        assert code == 0, said
        (known,) = json.loads((tmp_path / "agreed.json").read_text())["table"]["vocabularies"]
        assert len(known) == count
