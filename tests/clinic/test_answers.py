"""Tables of subgroups from Python and the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest

from ekiden import Hardware, Training, UserError, evaluate, load, open_run, run, split
from ekiden.clinic import subgroups
from ekiden.clinic.recalibration import kept_subgroups
from ekiden.data import FederatedData, federate
from ekiden.methods import FedSeq
from ekiden.runs.card import card

Command = Callable[..., tuple[int, str]]


def silos() -> FederatedData:
    draw = np.random.default_rng(0)
    frames = []
    for _ in range(2):
        frame = pandas.DataFrame(
            {"age": draw.integers(20, 90, 60), "sex": draw.choice(["f", "m"], 60)}
        )
        frames.append(
            frame.assign(died=np.where(frame.age + draw.normal(0, 20, 60) > 60, "yes", "no"))
        )
    return federate(frames, names=["north", "south"], label_column="died")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("subgroups") / "run"
    run(
        FedSeq(epochs=1),
        silos(),
        training=Training(max_steps=2),
        hardware=Hardware(threads=1),
        folder=found,
    )
    return found


def test_subgroups_are_measured_from_python_and_kept_for_the_report(folder: Path) -> None:
    assert "Not measured: fairness between groups" in card(open_run(folder))
    row = evaluate(folder, silos(), by=["sex", "age:40:65"])
    groups = row["subgroups"]["groups"]
    assert {column: list(rows) for column, rows in groups.items()} == {
        "sex": ["f", "m"],
        "age": ["below 40", "40 to below 65", "65 or more"],
        "client": ["north", "south"],
    }
    for column in groups:
        assert sum(one["samples"] for one in groups[column].values()) == 24
    for column in ("sex", "age"):
        for name, exact in row["groups"][column].items():
            assert groups[column][name]["values"]["accuracy"] == pytest.approx(exact["accuracy"])
    said = card(open_run(folder))
    assert "measured for subgroups (sex, age, client)" in said
    assert "fairness" not in said
    assert kept_subgroups(folder)["groups"] == json.loads(json.dumps(groups))
    (folder / "subgroups.json").write_text(json.dumps({"model": "0" * 64, "groups": {}}))
    assert kept_subgroups(folder) == {}, "of another model"
    (folder / "subgroups.json").write_text("{")
    with pytest.raises(UserError, match=r"subgroups.json is damaged: remove it"):
        kept_subgroups(folder)


def test_subgroups_that_cannot_be_measured_are_one_line(folder: Path, command: Command) -> None:
    with pytest.raises(UserError, match="column 'age' has numbers: say where to divide it"):
        evaluate(folder, silos(), by="age")
    code, said = command("evaluate", str(folder), "--by", "sex")
    assert (code, "', silos), or on other data" in said) == (2, True), said
    code, said = command("evaluate", str(folder), "--by", "sex", "--client", "north")
    assert (code, "--by is for test samples and the global model" in said) == (2, True), said


def test_the_column_that_names_the_silos_divides_them(tmp_path: Path, command: Command) -> None:
    draw = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {"age": draw.integers(20, 90, 80), "hospital": ["north", "south"] * 40}
    )
    frame.assign(died=draw.choice(["yes", "no"], 80)).to_csv(
        file := tmp_path / "p.csv", index=False
    )
    held = split(load(file, label_column="died", group_column="hospital"), "natural")
    run("average", held, training=Training(max_steps=1), folder=tmp_path / "run", quiet=True)
    for by in ("hospital", "client"):
        assert list(evaluate(tmp_path / "run", by=by)["subgroups"]["groups"]) == ["client"]
    code, said = command("evaluate", str(tmp_path / "run"), "--by", "hospital", "--json")
    assert (code, list(json.loads(said)["subgroups"]["groups"]["client"])) == (
        0,
        ["north", "south"],
    )
    for by, line in (
        ("age:nan", "ascending numbers"),
        ("nosuch", "unknown column 'nosuch': choose one of age."),
    ):
        with pytest.MonkeyPatch.context() as patch:  # before anything is measured
            patch.setattr("ekiden.core.engine.evaluation.TestSet.scores", None)
            code, said = command("evaluate", str(tmp_path / "run"), "--by", by)
            assert (code, line in said) == (2, True), said
            with pytest.raises(UserError, match=line):
                evaluate(tmp_path / "run", by=by)


def test_a_test_part_of_one_class_is_measured(
    folder: Path, command: Command, tmp_path: Path
) -> None:
    rows = pandas.DataFrame({"age": range(20, 60), "sex": ["f", "m"] * 20, "died": "yes"})
    rows.to_csv(tmp_path / "one.csv", index=False)
    code, said = command(
        "evaluate", str(folder), "--data", str(tmp_path / "one.csv"), "--label-column", "died"
    )
    assert code == 0, said
    assert "accuracy" in said


def test_a_column_called_client_is_not_taken_for_the_silos() -> None:
    frames = [
        pandas.DataFrame({"client": list("xy") * 20, "n": range(40), "died": list("abba") * 10})
        for _ in range(2)
    ]
    with pytest.raises(
        UserError, match="by client means the silos, and a column has this name, too"
    ):
        subgroups.check_divisions(
            subgroups.divisions(["client"]), federate(frames, label_column="died").dataset
        )
