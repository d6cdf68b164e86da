"""Rows of an SQL query: checked like those of a file, in one order, and read only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

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
        (QUERY.replace("(READ_ONLY);", "; -- READ_ONLY"), "READ_ONLY"),
        ("ATTACH 'new.db' AS n /* READ_ONLY */; SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS n -- (READ_ONLY)\n; SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS n (READ_ONLY false); SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS n (READ_ONLY, READ_WRITE); SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS n (\"read_write\", READ_ONLY); SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS READ_ONLY; SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db (READ_ONLY)' AS n; SELECT 1", "ATTACH is refused"),
        ("ATTACH 'new.db' AS n (TYPE sqlite) /* (READ_ONLY) */; SELECT 1", "ATTACH is refused"),
        ("ATTACH $$new.db$$ AS n (READ_WRITE) --' AS n (READ_ONLY)\n; SELECT 1", "refused"),
        ("ATTACH '/**/ -- new.db' AS n (READ_ONLY); SELECT 1", "the query fails"),
        ("/* /* */ATTACH 'x' (READ_ONLY)/* */ ATTACH 'new.db' AS n; SELECT 1", "fails|refused"),
        ("SET VARIABLE v = (FROM postgres_execute('omop', 'DROP TABLE p')); SELECT 1", "SET is"),
        ("SET profiling_output = 'new.db'; SELECT 1", "SET is refused"),
        ("SET http_logging_output = 'new.db'; SELECT 1", "SET is refused"),
        ("SET threads = 1 + 1; SELECT 1", "SET is refused"),
        ("SELECT * FROM query('SELECT 1')", r"query\(\) is refused"),
        (
            "WITH a AS (FROM postgres_execute('omop', 'COMMIT; DROP TABLE person')) SELECT 1",
            r"postgres_execute\(\) is refused",
        ),
    ],
)
def test_a_query_only_reads(text: str, what: str, folder: Path) -> None:
    (folder / "query.sql").write_text(text)
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(UserError, match=what):
        query.rows(folder / "query.sql")
    assert sorted(path.name for path in folder.iterdir()) == before
    with duckdb.connect(str(folder / "hospital.duckdb"), read_only=True) as database:
        assert database.execute("SELECT count(*) FROM person").fetchone() == (400,)


def test_a_query_may_have_comments_and_settings(folder: Path) -> None:
    """Between its words no comment is read, but before and after a statement."""
    (folder / "query.sql").write_text(
        "-- the hospital's\n SET threads to 1; /* a ' in a comment */ set memory_limit = '1GB'; "
        "attach if not exists 'hospital.duckdb' as omop (type duckdb, read_only) -- all of it\n;"
        "SELECT count(*) AS n FROM omop.person"
    )
    assert query.rows(folder / "query.sql")


def test_an_approval_is_for_the_rows_of_one_query(folder: Path) -> None:
    file = silo_file.read(folder / "silo.toml")
    before = approval.digest(file, TERMS)
    assert query.digest(folder / "query.sql") in approval.told(file, TERMS)["rows"]
    (folder / "query.sql").write_text(QUERY.replace("18", "0"))
    assert approval.digest(file, TERMS) != before


@pytest.mark.usefixtures("no_extensions")
def test_a_missing_extension_says_how_to_install_it(folder: Path) -> None:
    (folder / "query.sql").write_text(
        "ATTACH 'host=db password=geheim' AS omop (TYPE postgres, READ_ONLY); SELECT 1"
    )
    with pytest.raises(UserError, match=r"INSTALL postgres\w*'\)\"$") as caught:
        query.rows(folder / "query.sql")
    assert "\n" not in str(caught.value)
    assert "geheim" not in str(caught.value)


@pytest.fixture
def no_extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home in which DuckDB has no extension."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))


@pytest.fixture
def postgres(no_extensions: None) -> Iterator[str]:
    """A private PostgreSQL with 400 persons, on a socket in a temporary folder, and how to reach it."""
    if not shutil.which("initdb") or not shutil.which("pg_ctl"):
        pytest.skip("needs a PostgreSQL server: initdb and pg_ctl")
    extension = pytest.importorskip(
        "duckdb_extension_postgres_scanner", reason="needs DuckDB's extension postgres"
    )
    [file] = Path(extension.__file__).parent.rglob("*.duckdb_extension")
    duckdb.connect().install_extension(str(file))
    # The path of a socket has at most 107 bytes. The server refuses to run as root.
    with TemporaryDirectory(prefix="pg", dir="/tmp") as where:
        user = None
        if os.getuid() == 0:
            user = "nobody"
            shutil.chown(where, user)

        def call(*command: str) -> None:
            subprocess.run(command, check=True, cwd=where, user=user, stdout=subprocess.DEVNULL)

        call("initdb", "-D", f"{where}/data", "-A", "trust", "-U", "reader", "--no-sync")
        options = f"-F -c listen_addresses= -k {where}"
        call("pg_ctl", "-D", f"{where}/data", "-l", f"{where}/log", "-o", options, "-w", "start")
        try:
            with duckdb.connect() as database:
                database.execute(
                    f"ATTACH 'host={where} dbname=postgres user=reader' AS db (TYPE postgres)"
                )
                database.execute(
                    "CREATE TABLE db.person AS SELECT i AS person_id, 17 + (i * 7) % 60 AS age, "
                    "CASE WHEN i % 3 = 0 THEN 'f' ELSE 'm' END AS sex, i % 5 = 0 AS died "
                    "FROM range(400) t(i)"
                )
            yield f"host={where} dbname=postgres user=reader"
        finally:
            call("pg_ctl", "-D", f"{where}/data", "-m", "immediate", "-w", "stop")


def test_a_silos_data_may_come_from_postgresql(folder: Path, postgres: str) -> None:
    """With the bits of the same rows in a DuckDB file."""
    file = folder / "query.sql"
    rows = query.rows(file)
    attach = f"ATTACH '{postgres}' AS omop (TYPE postgres, READ_ONLY);"
    file.write_text(attach + QUERY.partition(";")[2].replace("omop.person", "omop.public.person"))
    assert query.rows(file) == rows
    dataset, _ = silo_file.read(folder / "silo.toml").unscaled()
    assert dataset.inputs.numeric == ("age",)  # type: ignore[attr-defined]

    file.write_text(f"{attach} SELECT * FROM omop.public.missing")
    with pytest.raises(UserError, match="missing"):
        query.rows(file)
    file.write_text(f"{attach} SELECT * FROM postgres_execute('omop', 'COMMIT; DROP TABLE person')")
    with pytest.raises(UserError, match="refused"):
        query.rows(file)
    file.write_text(f"{attach} SELECT count(*) AS n FROM omop.public.person")
    assert query.rows(file)


def test_a_failed_connection_shows_no_password(folder: Path, postgres: str) -> None:
    wrong = postgres.replace("dbname=postgres", "dbname=nowhere password=geheim")
    for address in (wrong, "postgresql://reader:geheim@127.0.0.1:1/omop"):
        (folder / "query.sql").write_text(
            f"ATTACH '{address}' AS omop (TYPE postgres, READ_ONLY); SELECT 1"
        )
        with pytest.raises(UserError, match="the query fails") as caught:
            query.rows(folder / "query.sql")
        assert "geheim" not in str(caught.value)
