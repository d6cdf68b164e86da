"""Rows of an SQL query: checked like those of a file, in one order, and read only."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from ekiden.core.base.errors import UserError
from ekiden.readers import query
from ekiden.silos.silo import approval, silo_file
from tests.silos.asked import TERMS

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


PERSONS = (
    "CREATE TABLE db.person AS SELECT i AS person_id, 17 + (i * 7) % 60 AS age, "
    "CASE WHEN i % 3 = 0 THEN 'f' ELSE 'm' END AS sex, i % 5 = 0 AS died FROM range(400) t(i)"
)


@contextmanager
def server_folder() -> Iterator[tuple[str, str | None]]:
    """A short folder, as the path of a socket has at most 107 bytes, and the user of a server, which
    refuses to run as root."""
    with TemporaryDirectory(prefix="db", dir="/tmp") as where:
        user = None
        if os.getuid() == 0:
            user = "nobody"
            shutil.chown(where, user)
        yield where, user


def give(user: str | None, file: Path, text: str) -> None:
    """Write a file that a server's user may read, whatever the umask."""
    file.write_text(text)
    if user is not None:
        shutil.chown(file, user)


def install(name: str) -> None:
    """Install an extension of DuckDB from a package."""
    package = pytest.importorskip(f"duckdb_extension_{name}", reason=f"needs DuckDB's {name}")
    [file] = Path(package.__file__).parent.rglob("*.duckdb_extension")
    duckdb.connect().install_extension(str(file))


@pytest.fixture
def postgres(no_extensions: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A private PostgreSQL with 400 persons, and how to reach it; `~/.pgpass` has the password."""
    if not shutil.which("initdb") or not shutil.which("pg_ctl"):
        pytest.skip("needs a PostgreSQL server: initdb and pg_ctl")
    install("postgres_scanner")
    monkeypatch.delenv("PGPASSWORD", raising=False)
    passwords = Path.home() / ".pgpass"
    passwords.write_text("*:*:*:reader:geheim\n")
    # others' rights make the file count for nothing
    passwords.chmod(0o600)
    with server_folder() as (where, user):

        def call(*command: str) -> None:
            subprocess.run(command, check=True, cwd=where, user=user, stdout=subprocess.DEVNULL)

        give(user, Path(where) / "first", "geheim\n")
        known = ("-U", "reader", "-A", "scram-sha-256", "--pwfile", "first")
        call("initdb", "-D", f"{where}/data", *known, "--no-sync")
        options = f"-F -c listen_addresses= -k {where}"
        call("pg_ctl", "-D", f"{where}/data", "-l", f"{where}/log", "-o", options, "-w", "start")
        try:
            address = f"host={where} dbname=postgres user=reader"
            with duckdb.connect() as database:
                database.execute(f"ATTACH '{address}' AS db (TYPE postgres); {PERSONS}")
            yield address
        finally:
            call("pg_ctl", "-D", f"{where}/data", "-m", "immediate", "-w", "stop")


@pytest.fixture
def mysql(no_extensions: None) -> Iterator[str]:
    """A private MariaDB with 400 persons, and how to reach it."""
    if not shutil.which("mariadb-install-db") or not shutil.which("mariadbd"):
        pytest.skip("needs a MariaDB server: mariadb-install-db and mariadbd")
    install("mysql_scanner")
    with server_folder() as (where, user):
        own = ("--no-defaults", f"--datadir={where}/data")
        made = ("mariadb-install-db", *own, "--skip-test-db")
        subprocess.run(made, check=True, cwd=where, user=user, stdout=subprocess.DEVNULL)
        first = (
            "CREATE DATABASE omop;\nCREATE USER reader@localhost IDENTIFIED BY 'geheim';\n"
            "GRANT ALL ON omop.* TO reader@localhost;\n"
        )
        give(user, Path(where) / "first", first)
        options = (f"--socket={where}/s", "--skip-networking", f"--init-file={where}/first")
        address = f"host=localhost socket={where}/s user=reader password=geheim database=omop"
        with subprocess.Popen(("mariadbd", *own, *options), cwd=where, user=user) as server:
            try:
                while not Path(f"{where}/s").exists():
                    assert server.poll() is None
                    time.sleep(0.05)
                with duckdb.connect() as database:
                    database.execute(f"ATTACH '{address}' AS db (TYPE mysql); {PERSONS}")
                yield address
            finally:
                server.kill()


def test_a_silos_data_may_come_from_postgresql(folder: Path, postgres: str) -> None:
    """With the bits of the same rows in a DuckDB file."""
    check_same_rows(folder, f"ATTACH '{postgres}' AS omop (TYPE postgres, READ_ONLY);", "postgres")
    dataset, _ = silo_file.read(folder / "silo.toml").unscaled()
    assert dataset.inputs.numeric == ("age",)  # type: ignore[attr-defined]


def test_a_silos_data_may_come_from_mysql(folder: Path, mysql: str) -> None:
    """A whole number instead of yes and no: MySQL has no other."""
    file = folder / "query.sql"
    file.write_text(QUERY.replace("p.died", "p.died::INT AS died"))
    check_same_rows(folder, f"ATTACH '{mysql}' AS omop (TYPE mysql, READ_ONLY);", "mysql")


def check_same_rows(folder: Path, attach: str, kind: str) -> None:
    """From a server and from the DuckDB file; nothing else is done at the server."""
    file = folder / "query.sql"
    rows, select = query.rows(file), file.read_text().partition(";")[2]
    file.write_text(attach + select)
    assert query.rows(file) == rows
    file.write_text(f"{attach} SELECT * FROM omop.missing")
    with pytest.raises(UserError, match="missing"):
        query.rows(file)
    file.write_text(f"{attach} SELECT * FROM {kind}_execute('omop', 'COMMIT; DROP TABLE person')")
    with pytest.raises(UserError, match="refused"):
        query.rows(file)
    file.write_text(attach + select)
    assert query.rows(file) == rows


def test_a_failed_connection_shows_no_password(folder: Path, postgres: str) -> None:
    wrong = postgres.replace("dbname=postgres", "dbname=nowhere password=geheim")
    for address in (wrong, "postgresql://reader:geheim@127.0.0.1:1/omop"):
        (folder / "query.sql").write_text(
            f"ATTACH '{address}' AS omop (TYPE postgres, READ_ONLY); SELECT 1"
        )
        with pytest.raises(UserError, match="the query fails") as caught:
            query.rows(folder / "query.sql")
        assert "geheim" not in str(caught.value)
