"""The rows that an SQL query gives, through DuckDB: of CSV and Parquet files, SQLite, PostgreSQL and
MySQL.

A query only reads. Its file holds one SELECT, after statements that say where the data are (ATTACH,
READ_ONLY), load extensions that are installed (LOAD), or set options (SET). These are compared with
the forms that are allowed before any is executed, because DuckDB makes a database that is not there.
"""

import hashlib
import json
import re
from contextlib import chdir
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import read_text
from ekiden.core.base.outside import require_extra

_LONGEST = 1 << 20
_TEXT = "'(?:[^']|'')*'"
_OPTION = rf"(?:TYPE|SCHEMA|SECRET|ENCRYPTION_KEY)\s+(?:\w+|{_TEXT})\s*"
_SETTING = (
    r"threads|memory_limit|timezone|search_path|schema|(?:s3|azure|http_proxy|pg|mysql|sqlite)\w*"
)
"""options that let DuckDB write no file, as profiling_output, log_query_path and http_logging_output do"""
_COMMENTS = r"(?:\s|--[^\n]*(?:\n|$)|/\*(?:[^*]|\*(?!/))*\*/)*"
_BEFORE = re.compile(
    rf"""{_COMMENTS}(
    ATTACH\s+(?:IF\s+NOT\s+EXISTS\s+)?{_TEXT}(?:\s+AS\s+\w+)?\s*
        \(\s*(?:{_OPTION},\s*)*READ_ONLY\s*(?:,\s*{_OPTION})*\)
    |LOAD\s+\w+
    |SET\s+(?:GLOBAL\s+|SESSION\s+)?(?:{_SETTING})\s*(?:=|\sTO\s)\s*(?:\w+|{_TEXT})
    ){_COMMENTS};?""",
    re.IGNORECASE | re.VERBOSE,
)
"""what may stand before the SELECT, without a value that is an expression"""
_READING = re.compile("read_.*|.*_scan|range|generate_series|unnest")
"""table functions that only read"""


def digest(file: Path) -> str:
    """Return the SHA-256 digest of a query's file."""
    return hashlib.sha256(_text(file).encode()).hexdigest()


def rows(file: Path) -> bytes:
    """Return what a query gives as a Parquet file, in an order that follows from the rows alone.

    Paths in the query are relative to its file.

    Raises:
        UserError: the query would change something, or fails.
    """
    from pyarrow import parquet

    require_extra("sql", "data.sql", "duckdb")
    import duckdb

    text = _text(file)
    # No extension is downloaded: it would be code that nobody here named.
    own = chdir(file.absolute().parent)
    with (
        own,
        duckdb.connect(":memory:", config={"autoinstall_known_extensions": False}) as database,
    ):
        try:
            *before, select = duckdb.extract_statements(text)
            allowed = [_allowed(file, statement) for statement in before]
            if select.type.name != "SELECT":
                raise _refused(file, select)
            parsed = database.execute("SELECT json_serialize_sql(?)", [select.query]).fetchall()
            json.loads(parsed[0][0], object_hook=partial(_check_function, file))
            for statement in allowed:
                database.execute(statement)
            asked = select.query.strip().rstrip(";")
            found = database.sql(f"SELECT * FROM ({asked}\n) ORDER BY ALL").to_arrow_table()
        except (duckdb.Error, ValueError) as error:
            raise UserError(f"{file}: {_reason(str(error), text)}") from None
    content = BytesIO()
    parquet.write_table(found, content)
    return content.getvalue()


def _allowed(file: Path, statement: Any) -> str:
    """Return a statement before the SELECT as it is executed, without comments; refuse others."""
    found = _BEFORE.fullmatch(statement.query)
    if not found:
        raise _refused(file, statement)
    return found[1]


def _refused(file: Path, statement: Any) -> UserError:
    return UserError(
        f"{file}: {statement.type.name} is refused: write ATTACH '...' AS name "
        "(READ_ONLY), LOAD name and SET option = value first, then one SELECT"
    )


def _check_function(file: Path, node: dict[str, Any]) -> dict[str, Any]:
    """Refuse table functions that do not only read: `postgres_execute` runs any text in a database
    that was attached READ_ONLY, and `query` any text here.
    """
    if node.get("error"):
        raise ValueError(node["error_message"])
    if node.get("type") == "TABLE_FUNCTION":
        name = node["function"]["function_name"]
        if not _READING.fullmatch(name):
            raise UserError(f"{file}: {name}() is refused: it may do more than read")
    return node


def _reason(error: str, text: str) -> str:
    """Return DuckDB's reason on one line, without passwords."""
    if missing := re.search(r"INSTALL (\w+)", error):
        name = missing[1]
        return (
            f"DuckDB's extension {name} is not installed: run once "
            f"python -c \"import duckdb; duckdb.sql('INSTALL {name}')\""
        )
    # DuckDB repeats how it connects, and the log keeps it.
    for address in re.findall(r"'([^']*(?:=|://)[^']*)'", text):
        error = error.replace(address, "...")
    why = " ".join(error.split())[:300]
    return f"the query fails: {why or 'it is empty'}"


def _text(file: Path) -> str:
    try:
        return read_text(file, _LONGEST)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
