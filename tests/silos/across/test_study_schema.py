"""A study's schema between silos: agreed on, part of the signed terms, and checked by each silo on
its own data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ekiden import Training
from ekiden.core.base.errors import PrivateError, UserError
from ekiden.methods import FedAvg
from ekiden.readers import schema as schemas
from ekiden.readers.scaling import read_agreed
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust.agreement import parse
from tests.silos.fakes import FakeNodes, keyed

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

NAMES = ("north", "south")
STUDY = """label_column = "died"
subject_column = "patient"
[columns.patient]
kind = "id"
[columns.age]
kind = "number"
unit = "years"
least = 18
most = 110
missing = ["-1"]
[columns.sex]
kind = "category"
categories = ["f", "m"]
[columns.died]
kind = "category"
categories = ["no", "yes"]
"""
Command = Callable[..., tuple[int, str]]


def hospitals(folder: Path, more: str = 'schema = "study.toml"\n') -> None:
    (folder / "study.toml").write_text(STUDY)
    for k, name in enumerate(NAMES):
        draw = np.random.default_rng(k)
        died = draw.choice(["no", "yes"], 80)
        table = pd.DataFrame(
            {
                "patient": [f"{name}-{i // 2}" for i in range(80)],
                "sex": draw.choice(["f", "m"], 80),
                "age": np.where(
                    died == "yes", draw.integers(60, 90, 80), draw.integers(20, 50, 80)
                ),
                "died": died,
            }
        )
        table.loc[3, "age"] = -1
        table.to_csv(folder / f"{name}.csv", index=False)
        silo = f'name = "{name}"\n[data]\npath = "{name}.csv"\n{more}[hardware]\nthreads = 1\n[limits]\nlevel = "models"\n'
        (folder / f"{name}.toml").write_text(silo)


def spoil(folder: Path, column: str, value: Any) -> None:
    table = pd.read_csv(folder / "south.csv", dtype=str)
    table.loc[17, column] = value
    table.to_csv(folder / "south.csv", index=False)


def run(folder: Path, said: list[str]) -> Any:
    training = Training(lr=1e-2, batch_size=16)
    plan: RemotePlan[Any] = RemotePlan(
        Recipe(FedAvg(rounds=2, epochs=2), training=training, evaluate_every=0),
        "north,south",
    )
    nodes = FakeNodes([read(folder / f"{name}.toml") for name in NAMES])
    return session.run(plan, nodes, folder / "run", nodes.public, said.append, poll=0)


def agree(folder: Path, command: Command, *more: str) -> tuple[int, str]:
    for name in NAMES:
        code, said = command("silo", "sums", str(folder / f"{name}.toml"))
        assert code == 0, said
    sums = [str(folder / f"{name}-sums.json") for name in NAMES]
    return command("federation", "agree", *sums, "--out", str(folder / "agreed.json"), *more)


@pytest.mark.slow
def test_the_schema_is_part_of_the_terms_and_each_silo_checks_its_data(
    tmp_path: Path, command: Command
) -> None:
    hospitals(tmp_path)
    code, said = agree(tmp_path, command)
    assert code == 0, said
    hospitals(tmp_path, 'schema = "study.toml"\nagreed = "agreed.json"\n')
    lines: list[str] = []
    result = run(tmp_path, lines)
    assert result.metrics[-1]["accuracy"] > 0.8
    terms = parse((tmp_path / "run" / "agreement.json").read_text())
    assert schemas.parse(terms.schema) == schemas.read(tmp_path / "study.toml")
    with pytest.raises(UserError, match=r"least and most of a number must be numbers"):
        parse(
            (tmp_path / "run" / "agreement.json")
            .read_text()
            .replace('\\"least\\":18.0', '\\"least\\":\\"18\\"')
        )


@pytest.mark.slow
def test_an_agreed_schema_reaches_the_silos_in_the_agreed_file(
    tmp_path: Path, command: Command
) -> None:
    hospitals(tmp_path, 'label_column = "died"\nsubject_column = "patient"\nmissing = ["age=-1"]\n')
    code, said = agree(tmp_path, command, "--schema", str(tmp_path / "study.toml"))
    assert code == 0, said
    assert (
        read_agreed(tmp_path / "agreed.json").schema == schemas.read(tmp_path / "study.toml").text()
    )
    hospitals(tmp_path, 'agreed = "agreed.json"\n')
    result = run(tmp_path, [])
    assert result.metrics[-1]["accuracy"] > 0.8
    assert schemas.parse(
        parse((tmp_path / "run" / "agreement.json").read_text()).schema
    ).classes == ("no", "yes")
    (tmp_path / "other.toml").write_text(STUDY.replace("110", "120"))
    hospitals(tmp_path, 'schema = "other.toml"\nagreed = "agreed.json"\n')
    with pytest.raises(UserError, match=r"the schema of data.schema is not that of data.agreed"):
        read(tmp_path / "north.toml").load()


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("age", "777", "column 'age' holds values out of range"),
        ("age", "n.d.", "column 'age' holds values that are not numbers"),
        ("sex", "strange-name", "column 'sex' holds categories that are not in the schema"),
        ("died", None, "column 'died' has no value"),
    ],
)
def test_a_silo_that_does_not_meet_the_schema_is_named_without_its_values(
    column: str, value: str | None, told: str, tmp_path: Path, command: Command
) -> None:
    hospitals(tmp_path)
    assert agree(tmp_path, command)[0] == 0
    hospitals(tmp_path, 'schema = "study.toml"\nagreed = "agreed.json"\n')
    spoil(tmp_path, column, value)
    code, said = command("silo", "sums", str(tmp_path / "south.toml"))
    assert code == 2
    assert "row 17" in said  # at the silo itself
    lines: list[str] = []
    with pytest.raises(UserError, match="south") as error:
        run(tmp_path, lines)
    text = " ".join([str(error.value), *lines])
    assert f"its data do not meet the study's schema ({told})" in text
    assert "17" not in text
    assert value is None or value not in text
    assert "row 17" in (tmp_path / "south-silo" / "requests.log").read_text()
    assert not (tmp_path / "run").exists()


def test_no_error_of_reading_tells_the_coordinator_a_value(tmp_path: Path) -> None:
    hospitals(tmp_path, 'label_column = "died"\n')
    table = pd.read_csv(tmp_path / "south.csv", dtype=str)
    table.loc[17, "age"] = "secret"
    table.to_csv(tmp_path / "south.csv", index=False)
    with pytest.raises(PrivateError, match=r"secret.* in row 17"):
        read(tmp_path / "south.toml").load()
    lines: list[str] = []
    with pytest.raises(UserError, match="silo south: it cannot read its data") as error:
        run(tmp_path, lines)
    assert "secret" not in " ".join([str(error.value), *lines])


def test_silos_with_other_schemas_are_named(tmp_path: Path, command: Command) -> None:
    hospitals(tmp_path)
    assert agree(tmp_path, command)[0] == 0
    hospitals(tmp_path, 'schema = "study.toml"\nagreed = "agreed.json"\n')
    (tmp_path / "other.toml").write_text(STUDY.replace("110", "120"))
    file = tmp_path / "south.toml"
    file.write_text(file.read_text().replace("study.toml", "other.toml"))
    with pytest.raises(UserError, match="north and south hold data of different schema; name one"):
        run(tmp_path, [])
    file.write_text(
        file.read_text().replace(
            'schema = "other.toml"', 'label_column = "died"\nsubject_column = "patient"'
        )
    )
    with pytest.raises(UserError, match="hold data of different schema; name one"):
        run(tmp_path, [])


def test_terms_with_another_schema_are_refused_by_a_silo(tmp_path: Path, command: Command) -> None:
    hospitals(tmp_path)
    assert agree(tmp_path, command)[0] == 0
    hospitals(tmp_path, 'schema = "study.toml"\nagreed = "agreed.json"\n')
    run(tmp_path, [])
    (tmp_path / "study.toml").write_text(STUDY.replace("110", "120"))
    terms = (tmp_path / "run" / "agreement.json").read_text()
    silo = Silo(keyed(read(tmp_path / "north.toml"), NAMES))
    with pytest.raises(UserError, match="north and the run are of different schema"):
        silo._agreed(parse(terms))


def test_a_drafted_schema_of_a_column_with_gaps_is_agreed_on(
    tmp_path: Path, command: Command
) -> None:
    """The draft names no category for missing values."""
    hospitals(tmp_path, 'label_column = "died"\nsubject_column = "patient"\nmissing = ["age=-1"]\n')
    for name in NAMES:
        table = pd.read_csv(tmp_path / f"{name}.csv", dtype=str)
        table.loc[10:39, "sex"] = None
        table.to_csv(tmp_path / f"{name}.csv", index=False)
    code, said = command(
        *(
            "data",
            str(tmp_path / "north.csv"),
            "--label-column",
            "died",
            "--subject-column",
            "patient",
        ),
        *("--missing", "age=-1", "--draft-schema", str(tmp_path / "draft.toml")),
    )
    assert code == 0, said
    code, said = agree(tmp_path, command, "--schema", str(tmp_path / "draft.toml"))
    assert code == 0, said
