"""From files to undecoded samples: Parquet tables, and folders of images."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError, unknown
from ekiden.data.medical import split
from ekiden.data.reading import Reading

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}) | {
    ".dcm",
    ".dicom",
    ".nii",
}

READABLE = (".parquet", ".csv", ".tsv", ".feather", ".arrow", ".npy", ".npz", ".safetensors")
"""the names of file formats that are not images"""
_TABLES = READABLE[:5]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are called if not `image`, `label`, `domain` and `group`."""

    image: str = "image"
    label: str = "label"
    domain: str = "domain"
    group: str = "group"


@dataclass(frozen=True)
class Raw:
    """One part of a data set (training or test) as it lies in its files, nothing decoded.

    Attributes:
        source: the file or folder, for messages.
        images: n encoded images, files or opened images; or n texts, the columns of a table (`pyarrow.Table`), an array
            (n, ...).
        label: (n,) integers or names, or float64 numbers; (n, K) float64 for several columns.
        domain: (n,) integers or names, or None.
        group: (n,) integers or names, or None.
        classes: class names in the order of the labels, empty where the source does not say.
        domains: domain names in their order, likewise.
        kind: what the samples are.
        targets: names of the columns of labels; none where there are no labels.
    """

    source: str
    images: Any
    label: NDArray[Any]
    domain: NDArray[Any] | None = None
    group: NDArray[Any] | None = None
    classes: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    kind: Literal["images", "table", "tokens", "arrays"] = "images"
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.images):
            what = "image" if self.kind == "images" else "row"
            raise UserError(f"{self.source} is empty: it needs at least one labelled {what}.")

    def taken(self, rows: NDArray[np.int64]) -> "Raw":
        """These rows."""
        if isinstance(self.images, list | tuple):
            samples: Any = [self.images[row] for row in rows]
        else:
            samples = self.images.take(rows) if self.kind == "table" else self.images[rows]
        domain, group = (None if part is None else part[rows] for part in (self.domain, self.group))
        return replace(self, images=samples, label=self.label[rows], domain=domain, group=group)


def find(path: Path) -> tuple[Path, Path | None]:
    """The training part and the test part, if there is one, of the data at `path`.

    Raises:
        UserError: there is nothing there, or a file that is not Parquet.
    """
    if not path.exists():
        there = {file.stem: file for file in path.parent.iterdir()} if path.parent.is_dir() else {}
        near = get_close_matches(path.stem, there, n=1, cutoff=0.75)
        hint = f"did you mean {str(there[near[0]])!r}? " if near else ""
        kinds = f"a folder of class folders, or a file {', '.join(READABLE)}"
        raise UserError(f"there is no file or folder {str(path)!r}: {hint}Known are {kinds}")
    if path.is_file():
        if path.suffix.lower() not in READABLE:
            raise UserError(
                f"{path} is not a .parquet file, and none of {', '.join(READABLE[1:])}: give one, or a folder of class "
                "folders."
            )
        sibling = path.with_name(path.name.replace("train", "test"))
        return path, sibling if sibling != path and sibling.is_file() else None
    for name in (*(f"train{suffix}" for suffix in READABLE), "train"):
        if (train := path / name).exists():
            test = path / name.replace("train", "test")
            return train, test if test.exists() else None
    return path, None


def files(part: Path) -> Iterator[tuple[str, Path]]:
    """The files of one part, sorted, each with its name inside the part (which holds the class).

    Those of a table are itself and the images that its rows name instead of holding them.
    """
    if part.is_file():
        yield "", part
        yield from ((name, part.parent / name) for name in _beside(part))
        return
    for file in sorted(part.rglob("*")):
        inside = file.relative_to(part)
        suffix = file.suffix.lower() if not file.name.lower().endswith(".nii.gz") else ".nii"
        if suffix in SUFFIXES and not any(p.startswith(".") for p in inside.parts):
            yield inside.as_posix(), file


def _beside(table: Path) -> list[str]:
    """Paths of images in a Parquet file; none where it cannot be read, which `read` says."""
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        with pq.ParquetFile(table) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            chunks = [group.column(i) for group in groups for i in range(group.num_columns)]
            lacking = {
                chunk.path_in_schema.removesuffix(".bytes")
                for chunk in chunks
                if chunk.path_in_schema.endswith(".bytes")
                and not (chunk.statistics and chunk.statistics.null_count == 0)
            }
            rows = [row for name in lacking for row in file.read([f"{name}.path"])[name].to_pylist()]
    except (pa.ArrowException, OSError, KeyError):
        return []
    names = {row["path"] for row in rows if row and row.get("path")}
    return sorted(name for name in names if (table.parent / name).is_file())


def read(part: Path, columns: Columns) -> Raw:
    """Read a Parquet file or a folder of class folders or domain/class folders.

    Raises:
        UserError: the file is damaged or lacks a column, or the folder has another layout or no images.
    """
    return _folder(part) if part.is_dir() else _parquet(part, columns)


def _folder(root: Path) -> Raw:
    found = list(files(root))
    levels = {name.count("/") for name, _ in found}
    if levels not in ({1}, {2}):
        raise UserError(
            f"{root} must hold images in class folders (cat/1.png) or all in domain/class folders "
            f"(photo/cat/1.png); found {len(found)} images at {len(levels)} levels."
        )
    parts = [name.split("/") for name, _ in found]
    return Raw(
        source=str(root),
        images=[file for _, file in found],
        label=np.array([p[-2] for p in parts]),
        domain=np.array([p[0] for p in parts]) if levels == {2} else None,
    )


def check_class_folders(parts: Sequence[Path]) -> None:
    """Refuse a class or domain whose folders hold no image in any part: its name would vanish. And folders of tables.

    Raises:
        UserError: names the folder.
    """
    folders = [part for part in parts if part.is_dir()]
    images = [name.split("/")[:-1] for part in folders for name, _ in files(part)]
    tables = [path.name for part in folders for path in sorted(part.glob("*")) if path.suffix in _TABLES]
    if tables and not images:
        raise UserError(
            f"{folders[0]} is a folder of tables ({tables[0]}, ...): name one by --data, or the folder by --silos if "
            "each is a silo"
        )
    depth = max((len(above) for above in images), default=0)
    for level in range(depth):
        known = {above[level] for above in images if len(above) > level}
        for part in folders:
            for found in sorted(part.glob("*/" * level + "*/")):
                inside = found.relative_to(part).parts
                if found.name not in known and not any(name.startswith((".", "__")) for name in inside):
                    raise UserError(
                        f"the folder {found} holds no image ({', '.join(sorted(SUFFIXES)[:5])}, ...), so "
                        f"{found.name!r} would be empty: put images there, or remove the folder"
                    )


def _parquet(path: Path, columns: Columns) -> Raw:
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        table = pq.read_table(path, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise UserError(f"{path} cannot be read as Parquet, copy or write it again ({reason})") from error
    return from_table(table, str(path), columns)


def from_table(table: Any, source: str, columns: Columns) -> Raw:
    """Take images, labels, domains and groups out of an Arrow table.

    Args:
        table: a `pyarrow.Table`; its images are bytes, or structs with `bytes` and `path`.
        source: where it comes from, for messages.
        columns: names of the columns.

    Raises:
        UserError: no image or label column, or one of another type or with missing values.
    """
    image = _column(table, ("image", columns.image), source, "an image", "bytes, or structs of bytes and path")
    label = _column(table, ("label", columns.label), source, "a label", "integers or class names")
    domain = _pick(table, ("domain", columns.domain))
    group = _pick(table, ("group", columns.group))
    return Raw(
        source=source,
        images=_images(table, image, source),
        label=_values(table, label, source),
        domain=None if domain is None else _values(table, domain, source),
        group=None if group is None else _values(table, group, source),
        classes=_names(table, label, b"label_names"),
        domains=() if domain is None else _names(table, domain, b"domain_names"),
    )


def _pick(table: Any, candidates: Iterable[str]) -> str | None:
    return next((c for c in candidates if c in table.column_names), None)


def _column(table: Any, candidates: tuple[str, str], source: str, what: str, of: str) -> str:
    name = _pick(table, candidates)
    if name is None:
        has = ", ".join(table.column_names) or "none"
        raise UserError(f"{source} has no column {candidates[-1]!r}: it needs {what} column of {of}; it has: {has}.")
    return name


def _images(table: Any, name: str, source: str) -> list[bytes | Path | None]:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415

    column, kind = table[name], table[name].type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return _paths(column.to_pylist(), name, source)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(column.to_pylist())
    if not pa.types.is_struct(kind) or kind.get_field_index("bytes") < 0:
        raise UserError(
            f"column {name!r} of {source} holds {kind}: images must be bytes, structs of bytes and path, or paths."
        )
    encoded = pc.struct_field(column, "bytes").to_pylist()
    if (column.null_count == 0 and None not in encoded) or kind.get_field_index("path") < 0:
        return list(encoded)
    paths = pc.struct_field(column, "path").to_pylist()
    beside = Path(source).parent  # images stored as files next to the table
    return [b if b is not None or p is None else beside / p for b, p in zip(encoded, paths, strict=True)]


def _paths(names: list[str | None], column: str, source: str) -> list[bytes | Path | None]:
    """Files next to the table.

    Raises:
        UserError: one is not there.
    """
    beside = Path(source).parent
    for row, name in enumerate(names):
        if not name or not split(beside / name)[0].is_file():
            raise UserError(
                f"row {row} of {source} names the image {name!r} (column {column!r}), which is not a file in {beside}: "
                "give paths relative to the table"
            )
    return [beside / str(name) for name in names]


def _values(table: Any, name: str, source: str) -> NDArray[Any]:
    import pyarrow as pa  # noqa: PLC0415

    column = table[name]
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.null_count:
        row = column.is_null().to_pylist().index(True)
        raise UserError(f"column {name!r} of {source} has no value in row {row}: give every row one.")
    if pa.types.is_integer(column.type):
        return np.array(column.to_numpy(), dtype=np.int64)  # a copy, as Arrow's memory is read-only
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
        return np.array(column.to_pylist(), dtype=np.str_)
    raise UserError(f"column {name!r} of {source} holds {column.type}: it must hold integers or names (strings).")


def _names(table: Any, column: str, key: bytes) -> tuple[str, ...]:
    """Names that the schema gives to the integers of a column, by our own key or by Hugging Face features."""
    metadata = table.schema.metadata or {}
    try:
        if key in metadata:
            return tuple(map(str, json.loads(metadata[key])))
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(map(str, features[column]["names"]))
    except (ValueError, KeyError, TypeError):  # no names, or metadata of some other kind
        return ()


def samples(table: Any, source: str, reading: Reading) -> Raw:
    """Take samples, labels, domains and groups out of an Arrow table, as `reading` says.

    Raises:
        UserError: a column is missing, or holds what it cannot.
    """
    named = (reading.image_column, reading.text_column, reading.array_column, reading.group_column)
    for name in (*named, reading.domain_column, *reading.label_column, *reading.feature_columns):
        if name and name not in table.column_names:
            raise unknown(f"column of {source}", name, table.column_names)
    unlabelled = not reading.label_column and "label" not in table.column_names
    if unlabelled and not reading.text_column:
        raise UserError(
            f"{source} has no column 'label': say which one holds the labels (--label-column, label_column=); it has: "
            f"{', '.join(table.column_names)}."
        )
    targets = reading.label_column or (() if unlabelled else ("label",))
    domain = reading.domain_column or _pick(table, ["domain"] * (not reading.names_columns))
    group = reading.group_column or _pick(table, ["group"] * (not reading.names_columns))
    meant = {*targets, domain, group}
    kind, chosen = _kind(table, source, reading, meant)
    return Raw(
        source,
        chosen,
        targets_of(table, targets, source) if targets else np.zeros(len(table), dtype=np.int64),
        None if domain is None else _names_of(table, domain, source),
        None if group is None else _names_of(table, group, source),
        _names(table, targets[0], b"label_names") if len(targets) == 1 else (),
        () if domain is None else _names(table, domain, b"domain_names"),
        kind,
        targets,
    )


def _kind(table: Any, source: str, reading: Reading, meant: set[str | None]) -> tuple[Any, Any]:
    """What the samples are, and they themselves."""
    image = reading.image_column or (None if reading.text_column or reading.array_column else _image(table, meant))
    if image is not None and not reading.feature_columns:
        return "images", _images(table, image, source)
    if reading.text_column:
        return "tokens", _texts(table, reading.text_column, source)
    lists = [n for n in table.column_names if n not in meant and _is_list(table[n].type)]
    array = reading.array_column or (lists[0] if len(lists) == 1 and not reading.feature_columns else None)
    if array is not None:
        return "arrays", _lists(table, array, source)
    dropped = meant | set(reading.drop_columns)
    columns = reading.feature_columns or [n for n in table.column_names if n not in dropped]
    if used := [name for name in columns if name in meant]:
        raise UserError(f"column {used[0]!r} cannot be a feature and the label, group or domain: leave it out of one")
    if not columns:
        raise UserError(f"{source} has no column left to learn from: drop fewer")
    return "table", table.select(list(columns))


def _image(table: Any, meant: set[str | None]) -> str | None:
    """The column of images that need not be named: of encoded bytes."""
    import pyarrow as pa  # noqa: PLC0415

    def encoded(kind: Any) -> bool:
        struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
        return bool(struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))

    return next((n for n in table.column_names if n not in meant and encoded(table[n].type)), None)


def _is_list(kind: Any) -> bool:
    import pyarrow as pa  # noqa: PLC0415

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _texts(table: Any, name: str, source: str) -> list[str]:
    import pyarrow as pa  # noqa: PLC0415

    column = table[name]
    if pa.types.is_null(column.type):
        raise UserError(f"column {name!r} of {source} is empty: name the column of texts by --text-column")
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        raise UserError(f"column {name!r} of {source} holds {column.type}, not texts: name another by --text-column")
    return [text or "" for text in column.to_pylist()]


def _lists(table: Any, name: str, source: str) -> NDArray[np.float32]:
    """(n, ...) numbers of a column of lists, maybe nested.

    Raises:
        UserError: it holds no lists of numbers, a missing one, or some of another length.
    """
    kind = table[name].type
    if not _is_list(kind):
        raise UserError(f"column {name!r} of {source} holds {kind}, not lists of numbers: give them one length each")
    rows = table[name].to_numpy()
    lengths = [-1 if row is None else len(row) for row in rows]
    odd = next((i for i, n in enumerate(lengths) if n != lengths[0] or n < 1), None)
    if odd is not None:
        lacks = "no values" if lengths[odd] < 1 else f"{lengths[odd]} values, row 0 has {lengths[0]}"
        raise UserError(f"column {name!r} of {source} has {lacks} in row {odd}: give all one length")
    try:
        return np.array([np.stack(row) if row.dtype == object else row for row in rows], dtype=np.float32)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"column {name!r} of {source} is not an array of numbers ({error}): give equal lengths"
        ) from None


def targets_of(table: Any, columns: Sequence[str], source: str) -> NDArray[Any]:
    """(n,) labels of one column: integers, names, or float64; (n, K) float64 of several.

    Raises:
        UserError: a value is missing, or text is where numbers are expected.
    """
    import pyarrow as pa  # noqa: PLC0415

    each = []
    for name in columns:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise UserError(
                f"the label in row {row} of {source} is missing (column {name!r}): give it one, or leave the row out"
            )
        if pa.types.is_boolean(column.type):
            numbers = column.cast(pa.int8())
            each.append(np.array(numbers.to_numpy(), dtype=np.float64))
            if len(columns) == 1:
                return np.where(each[0] > 0, "true", "false")
        elif pa.types.is_floating(column.type) or pa.types.is_decimal(column.type):
            each.append(np.array(column.cast(pa.float64()).to_numpy(), dtype=np.float64))
        elif len(columns) == 1:
            return _values(table, name, source)
        elif pa.types.is_integer(column.type):
            each.append(np.array(column.to_numpy(), dtype=np.float64))
        else:
            raise UserError(
                f"column {name!r} of {source} holds {column.type}: with several --label-column, all must hold numbers"
            )
        if not np.isfinite(each[-1]).all():
            row = int(np.flatnonzero(~np.isfinite(each[-1]))[0])
            raise UserError(f"the label in row {row} of {source} is {each[-1][row]} (column {name!r}): give a number")
    return each[0] if len(each) == 1 else np.stack(each, axis=1)


def _names_of(table: Any, name: str, source: str) -> NDArray[Any]:
    """Groups or domains: integers or names; whole numbers that are stored as floats count as integers."""
    import pyarrow as pa  # noqa: PLC0415

    column = table[name]
    if pa.types.is_floating(column.type) or pa.types.is_boolean(column.type):
        if column.null_count:
            row = column.is_null().to_pylist().index(True)
            raise UserError(f"column {name!r} of {source} has no value in row {row}: give every row one.")
        values = column.cast(pa.float64()).to_numpy()
        if (values != np.floor(values)).any():
            raise UserError(f"column {name!r} of {source} holds fractions: it must hold integers or names (strings).")
        return np.array(values, dtype=np.int64)
    return _values(table, name, source)


def natural(name: str) -> tuple[bool, int, str]:
    """Sort key: numbers by value, before other names."""
    number = name.isascii() and name.isdigit()
    return not number, int(name) if number else 0, name


def class_codes(
    parts: Sequence[NDArray[Any]], names: tuple[str, ...], source: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Class indices of each part, and the class names.

    Integers stay as they are (without names they run from 0 to the largest); names are numbered in the
    order of `names`, or else sorted.

    Raises:
        UserError: integers below 0, beyond the names or far more than there are samples; unknown names; no sample of
            an integer below the largest, without names.
    """
    if not all(p.dtype.kind == "i" for p in parts):
        return codes(parts, names, "label", source)
    low, high = min(int(p.min()) for p in parts), max(int(p.max()) for p in parts)
    limit = len(names) or sum(map(len, parts)) + 1
    if low < 0 or high >= limit:
        bad = low if low < 0 else high
        raise UserError(
            f"label {bad} in {source}: labels must be integers from 0 to classes - 1"
            + (f" ({len(names)} classes are named)." if names else ", or class names.")
        )
    present = {int(k) for p in parts for k in np.unique(p)}
    if not names and len(present) <= high:
        gap = next(k for k in range(high) if k not in present)
        raise UserError(
            f"no image in {source} has label {gap}, but the largest label is {high}: number the labels from 0 "
            "without gaps, or write class names instead of numbers"
        )
    return [torch.from_numpy(p) for p in parts], names or tuple(str(i) for i in range(high + 1))


def codes(
    parts: Sequence[NDArray[Any]], names: tuple[str, ...], what: str, source: str
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Numbers for the values of all parts: places in `names`, or else in the sorted values.

    Raises:
        UserError: a value that is not among `names`.
    """
    if names and all(p.dtype.kind == "i" for p in parts):
        parts = [np.array(names)[p] if p.min() >= 0 and p.max() < len(names) else p for p in parts]
    found, inverse = np.unique(np.concatenate([p.astype(np.str_) for p in parts]), return_inverse=True)
    order = names or tuple(sorted(map(str, found), key=natural))
    place = {name: i for i, name in enumerate(order)}
    if strange := next((str(f) for f in found if str(f) not in place), None):
        raise UserError(f"{what} {strange!r} in {source} is not among the {what} names: {', '.join(order)}.")
    numbers = np.array([place[str(f)] for f in found], dtype=np.int64)[inverse]
    cuts = np.cumsum([len(p) for p in parts])[:-1]
    return [torch.from_numpy(p.copy()) for p in np.split(numbers, cuts)], order


def images_in(table: Any, column: str, source: str) -> list[bytes | Path | None]:
    """Return the encoded images, or the files, in a column of an Arrow table.

    Raises:
        UserError: the column holds something else.
    """
    return _images(table, column, source)
