"""Read what one source holds, undecoded: a path, a frame, or arrays in files side by side."""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ekiden.base.errors import UserError
from ekiden.data import arrays, columns, files, frames, given, times
from ekiden.data.raw import Raw
from ekiden.data.reading import Reading


@dataclass(frozen=True)
class Holding:
    """What one source holds.

    Attributes:
        name: name of the silo; "" if the source does not belong to one silo.
        train: training part.
        test: test part, if there is one.
    """

    name: str
    train: Raw
    test: Raw | None = None

    @property
    def parts(self) -> list[Raw]:
        """Return the training part and, if there is one, the test part."""
        return [self.train] if self.test is None else [self.train, self.test]


def suits(path: Path) -> bool:
    """Return whether a file can hold samples."""
    return path.suffix.lower() in files.READABLE


def hold(
    source: Any, reading: Reading, name: str = "", what: str = "", usual: columns.Columns = columns.USUAL
) -> Holding:
    """Read a path, a frame, or samples that are already in Python.

    Args:
        source: where the samples are.
        reading: what its columns mean.
        name: name of the silo.
        what: its name in messages, unless it is a path.
        usual: names of columns that mean something if `reading` does not say so.
    """
    what = what or (f"silo {name}" if name else "the table")
    if frames.is_frame(source) or type(source) is dict:
        return Holding(name, columns.samples(frames.arrow(source, what), what, reading, usual))
    if not isinstance(source, str | PathLike):
        if isinstance(source, dict):
            raise UserError(
                f"{what} is a {type(source).__name__} of {', '.join(source)}: give one of its parts, as in "
                'data["train"]'
            )
        if reading.names_columns or reading.sample_kind:
            raise UserError(f"{what} is {type(source).__name__}, which has no columns: give a frame, a path or a dict")
        return Holding(name, given.raw_of(source, what))
    train, test = files.find(Path(source).expanduser())
    parts = [part for part in (train, test) if part is not None]
    files.check_class_folders(parts, columns.kind_of(reading))
    return Holding(name, *(_read(part, reading, usual) for part in parts))


def _read(part: Path, reading: Reading, usual: columns.Columns) -> Raw:
    if part.is_dir():
        if found := _pair(part, reading):
            return found
        if reading.names_columns:
            raise UserError(f"{part} is a folder of images, which has no columns: leave out the flags of columns")
        return files.read(part, columns.kind_of(reading))
    if part.suffix.lower() in arrays.SUFFIXES:
        if reading.sample_kind:
            raise UserError(f"{part} holds arrays, not {columns.kind_of(reading).words}: leave out --sample-kind")
        return _of_arrays(arrays.read(part), str(part), reading)
    return columns.samples(frames.arrow(part, str(part)), str(part), reading, usual)


def _pair(folder: Path, reading: Reading) -> Raw | None:
    """Read arrays in files side by side, as in x.npy and y.npy."""
    if not (folder / f"{reading.array_column or 'x'}.npy").is_file():
        return None
    found = {file.stem: arrays.read(file)["x"] for file in sorted(folder.glob("*.npy"))}
    return _of_arrays(found, str(folder), reading)


def _of_arrays(found: dict[str, NDArray[Any]], source: str, reading: Reading) -> Raw:
    sample, label = reading.array_column or "x", (*reading.label_column, *("y", "label") * (not reading.label_column))
    labels = [name for name in label if name in found]
    for what, name, there in (
        ("samples (--array-column)", sample, sample in found),
        ("labels (--label-column)", label[0], bool(labels)),
    ):
        if not there:
            raise UserError(f"{source} has no array {name!r} of {what}: it has {', '.join(found)}")
    y = found[labels[0]]
    if y.dtype.kind in "SO":
        raise UserError(f"labels in {source} are {y.dtype}: write them as integers, numbers or str")
    y = y.astype(np.int64) if y.dtype.kind in "iub" else y.astype(np.float64) if y.dtype.kind == "f" else y
    for name in (reading.group_column, reading.domain_column, reading.subject_column, reading.time_column):
        if name and name not in found:
            raise UserError(f"{source} has no array {name!r}: it has {', '.join(found)}")
    x = found[sample]
    owners = [reading.group_column or "group", reading.domain_column or "domain"]
    group, domain = (found.get(name) for name in owners)
    subject, time = (found.get(name) for name in (reading.subject_column, reading.time_column))
    whole = ((labels[0], y), (owners[0], group), (owners[1], domain))
    for name, array in (*whole, (reading.subject_column, subject), (reading.time_column, time)):
        if array is not None and len(array) != len(x):
            raise UserError(f"{source} holds {len(x)} samples and {len(array)} values in {name!r}: give one for each")
    pictures = x.dtype == np.uint8 and x.ndim in (3, 4)
    given_x = torch.from_numpy(np.array(x)) if pictures else arrays.encode(x, source)
    x = arrays.noticed(given_x, source).numpy()
    return Raw(
        source,
        x,
        y.astype(np.float64) if y.ndim == 2 else y,
        domain,
        group,
        kind=arrays.Arrays,
        targets=(labels[0],),
        subject=None if subject is None else _names(subject),
        time=None if time is None else times.of_array(time, f"the array {reading.time_column!r} of {source}"),
    )


def _names(values: NDArray[Any]) -> NDArray[np.str_]:
    """Return names as texts; whole numbers that are stored as floats count as integers."""
    whole = values.dtype.kind == "f" and bool((values == np.floor(values)).all())
    return (values.astype(np.int64) if whole else values).astype(np.str_)
