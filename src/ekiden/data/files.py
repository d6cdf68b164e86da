"""Read undecoded images from Parquet files and from folders of class folders."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np

from ekiden.base.errors import UserError
from ekiden.base.wording import counted
from ekiden.data import frames, medical, raster
from ekiden.data.picture import split
from ekiden.data.raw import Inputs, Raw

SUFFIXES = raster.SUFFIXES | {*medical.DICOM, *medical.NIFTI}
READABLE = (".parquet", ".csv", ".tsv", ".feather", ".arrow", ".npy", ".npz", ".safetensors")
"""the names of file formats that are not images"""
_TABLES = READABLE[:5]


def find(path: Path) -> tuple[Path, Path | None]:
    """Return the training part and, if there is one, the test part of the data at `path`."""
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


def files(part: Path, kind: type[Inputs], image_column: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the files of one part, sorted, each with its name inside the part (which holds the class).

    The files of a table are the table itself and the images that its rows name by path.
    """
    if part.is_file():
        yield "", part
        yield from ((name, split(part.parent / name)[0]) for name in _beside(part, image_column))
        return
    for file in _below(part):
        inside = file.relative_to(part)
        if not any(p.startswith(".") for p in inside.parts) and kind.is_file(file):
            yield inside.as_posix(), file


def _below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, sorted, and those below links to folders that do not lead in a circle."""
    own = os.path.realpath(folder)
    if own in above:
        return
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, inside in found:
        if inside:
            yield from _below(folder / name, (*above, own))
        else:
            yield folder / name


def no_image(folder: Path) -> str:
    """Return what a folder holds in which there is no image, for a message."""
    there = [file for file in _below(folder) if not file.name.startswith(".")]
    if not there:
        return "it has no files"
    kinds = Counter(p.suffix.lower() or "none" for p in there).most_common(3)
    return (
        f"the extensions of its {counted(len(there), 'file')} ({', '.join(kind for kind, _ in kinds)}) are none of "
        f'{", ".join(sorted(SUFFIXES))}, and no file is DICOM by its header, "DICM" at byte 128'
    )


def _beside(table: Path, image_column: str) -> list[str]:
    """Return the paths of images in a table; none if it cannot be read, which `hold` reports."""
    import pyarrow as pa  # noqa: PLC0415  (`import ekiden` stays light)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        if image_column and not pa.types.is_nested((named := frames.arrow(table, str(table))[image_column]).type):
            names = {name for name in named.to_pylist() if isinstance(name, str)}
            return sorted(name for name in names if split(table.parent / name)[0].is_file())
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
    except (pa.ArrowException, OSError, KeyError, UserError):
        return []
    names = {row["path"] for row in rows if row and row.get("path")}
    return sorted(name for name in names if split(table.parent / name)[0].is_file())


def read(root: Path, kind: type[Inputs]) -> Raw:
    """Read a folder of class folders or domain/class folders, in which each file is a sample."""
    found = list(files(root, kind))
    if not found and kind.suffixes:
        raise UserError(f"{root} holds no {kind.words} ({', '.join(kind.suffixes)}): put files into class folders")
    if not found:
        raise UserError(f"{root} holds no image: {no_image(root)}. Put images into class folders (cat/1.png)")
    levels = {name.count("/") for name, _ in found}
    if levels not in ({1}, {2}):
        raise UserError(
            f"{root} must hold {kind.words} in class folders (cat/1.png) or all in domain/class folders "
            f"(photo/cat/1.png); found {len(found)} {kind.words} at {len(levels)} levels."
        )
    parts = [name.split("/") for name, _ in found]
    return Raw(
        source=str(root),
        images=[file for _, file in found],
        label=np.array([p[-2] for p in parts]),
        domain=np.array([p[0] for p in parts]) if levels == {2} else None,
        kind=kind,
    )


def check_class_folders(parts: Sequence[Path], kind: type[Inputs]) -> None:
    """Refuse folders of tables, and a class or domain without any image: its name would vanish."""
    folders = [part for part in parts if part.is_dir()]
    images = [name.split("/")[:-1] for part in folders for name, _ in files(part, kind)]
    tables = [path.name for part in folders for path in sorted(part.glob("*")) if path.suffix in _TABLES]
    if tables and not images:
        raise UserError(
            f"{folders[0]} is a folder of tables ({tables[0]}, ...): name one with --data, or the folder with --silos "
            "if each is a silo"
        )
    depth = max((len(above) for above in images), default=0)
    for level in range(depth):
        known = {above[level] for above in images if len(above) > level}
        for part in folders:
            for found in sorted(part.glob("*/" * level + "*/")):
                inside = found.relative_to(part).parts
                if found.name not in known and not any(name.startswith((".", "__")) for name in inside):
                    raise UserError(
                        f"the folder {found} holds no image ({no_image(found)}), so {found.name!r} would be empty: put "
                        "images there, or remove the folder"
                    )
