"""Read tables of all kinds as Arrow tables: Parquet, CSV and Feather files, frames, data sets of
Hugging Face.
"""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from csv import reader as csv_reader
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from ekiden.core.base.errors import UserError, counted, first_line, listed, row_text, tell
from ekiden.core.base.memory import limited
from ekiden.readers.cells import DELIMITER, is_text
from ekiden.readers.undecoded import composed, named_twice

_INDEX = "the index"
_NOT_READ = "of a frame is not read: make it a column by frame.reset_index()"
# of a Parquet file: 8 GB of numbers, 16 GB of texts and images
_MOST_VALUES = 1 << 30
_MOST_BYTES = 1 << 34
# Arrow's allocator takes 1 GB at once, for the first cell.
_ROOM = 2 << 30
_UNPACKED = 64
"""bytes that a file of any size may take in memory, and how many for each byte of it: tables of few
different values take 20"""
_READING = Lock()
# bytes from which we learn how a text file is written
_HEAD = 1 << 16
# characters around a name that nobody sees
_UNSEEN = " \t\r\n\u00a0\u200b\ufeff"


def is_frame(source: Any) -> bool:
    """Return whether `source` is a table of a library; the library is not imported for this."""
    return _reader(source) is not None


def arrow(source: Any, what: str) -> Any:
    """Return a `pyarrow.Table` for a path, a frame, or a dict of columns."""
    import pyarrow as pa

    if isinstance(source, str | Path):
        table = _file(Path(source).expanduser())
    else:
        reader = _reader(source)
        if isinstance(source, dict):
            reader = partial(_of_columns, what=what)
        if reader is None:
            kind = type(source).__name__
            raise UserError(
                f"{what} cannot be of type {kind}: give a path, a frame or a dict of columns"
            )
        try:
            table = reader(source)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise UserError(
                f"{what} cannot be read: {first_line(error)}; give columns of equal length, each with "
                "values of one type, as by frame.astype(str)"
            ) from None
    table = _without_views(table)
    metadata = table.schema.metadata
    table = table.rename_columns(seen(table.column_names)).replace_schema_metadata(metadata)
    _refuse_nameless(table, what)
    if twice := named_twice(table.column_names):
        raise UserError(f"{what} has two columns called {twice!r}: rename one")
    if not len(table):
        raise UserError(f"{what} has no row: it needs at least one")
    return table


def _without_views(table: Any) -> Any:
    """Return the table without the views as which polars writes texts and bytes: few functions of
    Arrow take them.
    """
    import pyarrow as pa

    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    for place, column in enumerate(table.schema):
        if column.type in plain:
            values = table[place].cast(plain[column.type])
            table = table.set_column(place, column.with_type(values.type), values)
    return table


def seen(names: Iterable[str]) -> list[str]:
    """Return names of columns as they are shown: one form of each character, and nothing unseen
    around them.
    """
    return [name.strip(_UNSEEN) for name in composed(names)]


def _of_columns(columns: dict[str, Any], what: str) -> Any:
    import pyarrow as pa

    plain = dict(columns)
    for name, values in columns.items():
        if getattr(values, "ndim", 1) != 1:
            raise UserError(
                f"{name!r} of {what} is an array, not a column: give arrays as a pair, (inputs, "
                "labels)"
            )
        if type(values).__name__ == "Tensor":
            plain[name] = values.tolist()
    return pa.table(plain)


def _of_pandas(frame: Any) -> Any:
    import pyarrow as pa

    names = [str(name) for name in frame.index.names if name is not None]
    if names or not str(frame.index.dtype).lower().startswith("int"):
        tell(f"{_INDEX} {listed(map(repr, names)) or f'({frame.index.dtype})'} {_NOT_READ}")
    return pa.Table.from_pandas(frame, preserve_index=False)


def _of_hub(source: Any) -> Any:
    """Read a data set of Hugging Face, whose features may name classes."""
    import pyarrow as pa

    if getattr(source, "format", {}).get("type") == "custom":
        tell(
            "the transform of a data set of Hugging Face (set_transform) is not applied: use map "
            "instead"
        )
    whole = hasattr(source, "num_rows")
    table = source.with_format("arrow")[:] if whole else pa.Table.from_pylist(list(source))
    if source.features is None or not table.num_rows:
        return table
    return table.replace_schema_metadata(source.features.arrow_schema.metadata)


_READERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("pandas", "DataFrame"): _of_pandas,
    ("polars", "DataFrame"): lambda frame: frame.to_arrow(),
    ("polars", "LazyFrame"): lambda frame: frame.collect().to_arrow(),
    ("pyarrow", "Table"): lambda table: table,
    ("datasets", "Dataset"): _of_hub,
    ("datasets", "IterableDataset"): _of_hub,
}
"""how frames become Arrow tables, by library and class"""


def _reader(source: Any) -> Callable[[Any], Any] | None:
    for (library, name), reader in _READERS.items():
        module = sys.modules.get(library)
        if module is not None and isinstance(source, getattr(module, name, ())):
            return reader
    return None


def _file(path: Path) -> Any:
    import pyarrow as pa

    suffix = path.suffix.lower()
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path")
    if not path.stat().st_size:
        raise UserError(f"{path} is empty: it needs a header and rows")
    most = _ROOM + _UNPACKED * path.stat().st_size
    try:
        # One at a time: limits that overlap in two threads would outlive both.
        with _READING, limited(most):
            return _within(most, path, _READ_FILES.get(suffix, _text)(path))
    except MemoryError:
        raise UserError(
            f"{path} needs more memory than its size allows ({most >> 20:,} MB): if it is right, "
            "write it in parts"
        ) from None
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if "invalid UTF8" in str(error):
            raise UserError(f"{path} is not written in UTF-8: save it as CSV UTF-8") from None
        if "Empty CSV" in str(error):
            raise UserError(f"{path} has no row: it needs a header and rows") from None
        kind = suffix.removeprefix(".").capitalize()
        raise UserError(
            f"{path} cannot be read as {kind}, copy or write it again ({first_line(error)})"
        ) from error


def _within(most: int, path: Path, table: Any) -> Any:
    """Return a table if its categories, written out, take at most so many bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    size = 0
    for column in table.columns:
        if pa.types.is_dictionary(column.type) and is_text(column.type.value_type):
            for chunk in column.chunks:
                lengths = pc.binary_length(chunk.dictionary).take(chunk.indices)
                size += pc.sum(lengths.cast("int64")).as_py() or 0
    if size > most:
        raise MemoryError
    return table


def _of_parquet(path: Path) -> Any:
    with parquet(path) as file:
        return _of_pandas_file(file.read())


def _of_feather(path: Path) -> Any:
    from pyarrow import feather

    return _of_pandas_file(feather.read_table(path))


@contextmanager
def parquet(path: Path) -> Iterator[Any]:
    """Open a Parquet file if what it declares can be read: a file of a kilobyte can say
    billions of values.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        about = file.metadata
        values = size = 0
        for group in map(about.row_group, range(about.num_row_groups)):
            values += sum(group.column(place).num_values for place in range(group.num_columns))
            size += group.total_byte_size
        if values > _MOST_VALUES or size > _MOST_BYTES:
            raise UserError(
                f"{path} says that it holds {values:,} values, {_MOST_VALUES:,} and "
                f"{_MOST_BYTES >> 30} GB are read at most: write it in parts"
            )
        yield file


def _of_pandas_file(table: Any) -> Any:
    """Return the table without the index that pandas writes, and with its categories, which Parquet
    may lose.
    """
    import pyarrow as pa

    try:
        told = json.loads((table.schema.metadata or {})[b"pandas"])["columns"]
        categories = [one["field_name"] for one in told if one["pandas_type"] == "categorical"]
    except (ValueError, KeyError, TypeError):  # not of pandas, or of an old one
        categories = []
    for name in categories:
        if name in table.column_names and not pa.types.is_dictionary(table[name].type):
            table = table.set_column(
                table.column_names.index(name), name, table[name].dictionary_encode()
            )
    index = [name for name in table.column_names if re.fullmatch(r"__index_level_\d+__", name)]
    if named := [str(kind) for name in index if not pa.types.is_integer(kind := table[name].type)]:
        tell(f"{_INDEX} ({listed(named)}) {_NOT_READ}")
    return table.drop_columns(index)


def _refuse_nameless(table: Any, what: str) -> None:
    """Refuse columns without a name, such as the row numbers that pandas writes."""
    if "" in table.column_names:
        raise UserError(
            f"column {table.column_names.index('')} of {what} (counted from 0) has no name: give "
            "it one, or leave it out, as by frame.to_csv(index=False)"
        )


def _text(path: Path) -> Any:
    """Read a table of text from a text file. Its delimiter is found in the file; `Cells` finds what
    the text means.
    """
    import pyarrow as pa
    from pyarrow import csv

    lines = _first_lines(path)
    # as Excel writes it
    told = re.fullmatch(r'"?sep=(.)"?\s*', lines[0])
    if told:
        lines = lines[1:]
    if told or path.suffix.lower() == ".tsv":
        delimiter = told[1] if told else "\t"
    else:
        bare = re.sub(r'"[^"]*"', "", "".join(lines[:1]))
        delimiter = max(",;\t|", key=bare.count)
    width = len(next(csv_reader(lines, delimiter=delimiter), []))

    def read(threads: bool) -> Any:
        return csv.read_csv(
            path,
            read_options=csv.ReadOptions(
                use_threads=threads, autogenerate_column_names=True, skip_rows=int(bool(told))
            ),
            parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=csv.ConvertOptions(
                column_types={f"f{k}": pa.large_string() for k in range(width)},
                null_values=[""],
                strings_can_be_null=True,
            ),
        )

    try:
        table = read(threads=True)
    except pa.ArrowInvalid:
        with _unlike_the_header(path, width):
            # which counts rows
            table = read(threads=False)
    names = [(column[0].as_py() or "").strip() for column in table.columns]
    _check_rows(table, names, delimiter, path)
    return table.slice(1).rename_columns(names).replace_schema_metadata({DELIMITER: delimiter})


def _first_lines(path: Path) -> list[str]:
    """Return the lines of the beginning of a text file; refuse other files and encodings."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path} is written in UTF-16: save it as CSV UTF-8")
    if b"\0" in head:
        raise UserError(f"{path} is not a text file: give CSV, TSV, Parquet or Feather")
    try:
        # the last character may be cut in two
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head)
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not written in UTF-8 (byte {error.start}): save it as CSV UTF-8"
        ) from None
    return text.splitlines(keepends=True) or [""]


def _check_rows(table: Any, names: Sequence[str], delimiter: str, path: Path) -> None:
    """Refuse a header within the table, and name cells that have swallowed rows."""
    import pyarrow.compute as pc

    for name, column in zip(names, table.columns, strict=True):
        for cell in column.filter(pc.match_substring(column, "\n")).to_pylist():
            rows = cell.splitlines()[1:-1]
            # a list of two, each with as many signs, is hardly prose
            if len(rows) > 1 and all(row.count(delimiter) == len(names) - 1 for row in rows):
                tell(
                    f"a cell of column {name!r} of {path} holds {len(rows)} lines that look like "
                    f"rows ({rows[0][:40]!r}): check for a quotation mark that is not closed"
                )
    header = table.slice(0, 1).to_pylist()
    first = pc.equal(table.column(0), table.column(0)[0])
    for row in pc.indices_nonzero(first).to_pylist()[1:]:
        if len(names) > 1 and table.slice(row, 1).to_pylist() == header:
            raise UserError(f"{path} has its header again in {row_text(row - 1)}: remove that row")


@contextmanager
def _unlike_the_header(path: Path, width: int) -> Iterator[None]:
    """Say which row has more or fewer cells than the header."""
    import pyarrow as pa

    try:
        yield
    except pa.ArrowInvalid as error:
        found = re.search(r"Row #(\d+): Expected \d+ columns, got (\d+)", str(error))
        if not found:
            raise
        row = int(found[1]) - 2
        cells = counted(int(found[2]), "cell")
        above = "remove lines above the header, or " * (row < 2)
        raise UserError(
            f"{path} has {cells} in {row_text(row)}, and its header names "
            f"{counted(width, 'column')}: {above}correct the row"
        ) from None


_READ_FILES = {
    ".parquet": _of_parquet,
    ".csv": _text,
    ".tsv": _text,
    ".feather": _of_feather,
    ".arrow": _of_feather,
}
SUFFIXES = tuple(_READ_FILES)
