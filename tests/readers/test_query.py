"""Rows of an SQL query: checked like those of a file, in one order, and read only."""

from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.readers import query
from ekiden.silos.silo import approval, silo_file
from tests.silos.test_silo import TERMS

duckdb = pytest.importorskip("duckdb", reason="needs the extra sql: pip install 'ekiden[sql]'")
QUERY = """ATTACH 'hospital.duckdb' AS omop (READ_ONLY);
-- adults
SELECT age, sex, p.died
FROM omop.person AS p JOIN 'visits.csv' AS v USING (person_id)
WHERE age >= 18;
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A silo whose data are in a database and a file next to it."""
    with duckdb.connect(str(tmp_path / "hospital.duckdb")) as database:
        database.execute(
            "CREATE TABLE person AS SELECT i AS person_id, 17 + (i * 7) % 60 AS age, "
            "CASE WHEN i % 3 = 0 THEN 'f' ELSE 'm' END AS sex, i % 5 = 0 AS died FROM range(400) t(i)"
        )
        database.execute(
            f"COPY (SELECT i AS person_id FROM range(300) t(i)) TO '{tmp_path}/visits.csv'"
        )
    (tmp_path / "query.sql").write_text(QUERY)
    (tmp_path / "silo.toml").write_text(
        'name = "a"\n[data]\nsql = "query.sql"\nlabel_column = "died"\n'
    )
    return tmp_path


def test_a_silos_data_may_come_from_a_query(folder: Path) -> None:
    """With the same checks as a file, the same bits each time, and in a folder that is private."""
    file = silo_file.read(folder / "silo.toml")
    dataset, client = file.unscaled()
    assert dataset.inputs.numeric == ("age",)  # type: ignore[attr-defined]
    assert dataset.inputs.categorical == ("sex",)  # type: ignore[attr-defined]
    assert 200 < len(client.train) + len(client.val) + len(client.test) < 300
    assert file.folder.stat().st_mode & 0o077 == 0
    assert query.rows(folder / "query.sql") == query.rows(folder / "query.sql")
    (folder / "query.sql").write_text(QUERY.replace(", p.died", ""))
    with pytest.raises(UserError, match="died"):
        file.unscaled()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("COPY (SELECT 1) TO 'out.csv'", "COPY is refused"),
        ("SELECT 1; DROP TABLE omop.person", "SELECT is refused"),
        ("CREATE TABLE t AS SELECT 1; SELECT * FROM t", "CREATE is refused"),
        ("INSTALL httpfs; SELECT 1", "is refused"),
        ("ATTACH 'hospital.duckdb' AS omop; SELECT * FROM omop.person", "READ_ONLY"),
        (QUERY.replace("SELECT age", "DELETE FROM omop.person; SELECT age"), "DELETE is refused"),
        ("SELECT * FROM nothing", "the query fails: .*nothing"),
        ("SELEC 1", "the query fails"),
        ("", "the query fails"),
    ],
)
def test_a_query_only_reads(text: str, what: str, folder: Path) -> None:
    (folder / "query.sql").write_text(text)
    with pytest.raises(UserError, match=what):
        query.rows(folder / "query.sql")
    assert not (folder / "out.csv").exists()
    with duckdb.connect(str(folder / "hospital.duckdb"), read_only=True) as database:
        assert database.execute("SELECT count(*) FROM person").fetchone() == (400,)


def test_an_approval_is_for_the_rows_of_one_query(folder: Path) -> None:
    file = silo_file.read(folder / "silo.toml")
    before = approval.digest(file, TERMS)
    assert query.digest(folder / "query.sql") in approval.told(file, TERMS)["rows"]
    (folder / "query.sql").write_text(QUERY.replace("18", "0"))
    assert approval.digest(file, TERMS) != before
