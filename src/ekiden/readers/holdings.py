"""Read what one source holds, undecoded: a path, a frame, or samples in Python; and find out which
silo holds what.
"""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from ekiden.core.base.errors import UserError, counted, first_line, listed, tell
from ekiden.core.base.files import read_toml
from ekiden.core.data.samples import ClientData, Samples, Subset
from ekiden.core.tasks import LanguageModelling, inferred
from ekiden.readers import columns, frames, medical, raster
from ekiden.readers import schema as schemas
from ekiden.readers.cells import Cells, is_text
from ekiden.readers.columns import Reading
from ekiden.readers.kinds import arrays
from ekiden.readers.kinds.arrays import Arrays, with_channels
from ekiden.readers.kinds.images import Images, decode
from ekiden.readers.raster import split
from ekiden.readers.undecoded import PARTS, Raw, all_are, named_twice, natural

SUFFIXES = raster.SUFFIXES | {*medical.DICOM, *medical.NIFTI}
READABLE = (*frames.SUFFIXES, *arrays.SUFFIXES)
"""the names of file formats that are not images"""
_CLUTTER = ("Thumbs.db", "desktop.ini", "DICOMDIR")
_HIDDEN = (".", "__", "~$", "@eaDir", "$RECYCLE.BIN", "lost+found", "System Volume Information")


def find(path: Path) -> list[Path]:
    """Return the training part and, if there is one, the test part of the data at `path`."""
    if not path.exists():
        raise _not_there(path)
    if path.is_file():
        if path.suffix.lower() not in READABLE:
            raise UserError(
                f"{path} is not a .parquet file, and none of {', '.join(READABLE[1:])}: give one, "
                "or a folder of class folders."
            )
        sibling = path.with_name(path.name.replace("train", "test"))
        if sibling != path and sibling.is_file():
            return [path, sibling]
        return [path]
    there = {part.name.lower(): part for part in sorted(path.iterdir())}
    for suffix in (*READABLE, ""):
        train = f"train{suffix}"
        test = f"test{suffix}"
        if train in there:
            return [there[part] for part in (train, test) if part in there]
    return [path]


def _not_there(path: Path) -> UserError:
    """Return a line about a path that does not exist, with a name that is nearly the same."""
    hint = ""
    if path.parent.is_dir():
        there = {file.stem: file for file in path.parent.iterdir()}
        for near in get_close_matches(path.stem, there, n=1, cutoff=0.75):
            hint = f"did you mean {str(there[near])!r}? Otherwise "
    if re.match(r"(?i)[a-z][a-z0-9+]+:/", str(path)):
        hint = "it is an address: download what is there, and "
    kinds = f"a folder of class folders, or a file {', '.join(READABLE)}"
    return UserError(f"there is no file or folder {str(path)!r}: {hint}give {kinds}")


def files(table: Path, reading: Reading, usual: columns.Columns) -> Iterator[tuple[str, Path]]:
    """Yield a table and the images that its rows name by path, each with its name next to the
    table.
    """
    yield "", table
    for name in _beside(table, reading, usual):
        yield name, split(table.parent / name)[0]


def walked(root: Path, reading: Reading) -> tuple[list[tuple[str, Path]], Counter[str]]:
    """Return the samples below a folder, each with its name inside (which holds the class), and
    count other files.

    Files in class folders that are not read may be samples in another format; they are counted by
    extension.
    """
    kind = columns.kind_of(reading)
    found = list[tuple[str, Path]]()
    left = Counter[str]()
    for file in files_below(root):
        inside = file.relative_to(root)
        if kind.is_file(file):
            found.append((inside.as_posix(), file))
        elif len(inside.parts) > 1 and file.name not in _CLUTTER:
            left[file.suffix.lower() or file.name] += 1
    return found, left


def files_below(folder: Path, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield the files below a folder, sorted, and those below links to folders that do not lead in
    a circle; not what is hidden.
    """
    own = os.path.realpath(folder)
    if own in above:
        return
    with os.scandir(folder) as entries:
        found = sorted((entry.name, entry.is_dir()) for entry in entries)
    for name, inside in found:
        if name.startswith(_HIDDEN):
            continue
        if inside:
            yield from files_below(folder / name, (*above, own))
        else:
            yield folder / name


def no_image(folder: Path) -> str:
    """Return what a folder holds in which there is no image, for a message."""
    kinds = Counter(file.suffix.lower() or "none" for file in files_below(folder))
    if not kinds:
        return "it has no files"
    return (
        f"the extensions of its {counted(kinds.total(), 'file')} "
        f"({', '.join(dict(kinds.most_common(3)))}) are none of "
        f'{", ".join(sorted(SUFFIXES))}, and no file is DICOM by its header, "DICM" at byte 128'
    )


def _beside(table: Path, reading: Reading, usual: columns.Columns) -> list[str]:
    """Return the paths of images and masks in a table; none if it cannot be read, which `hold`
    reports.
    """
    import pyarrow as pa

    suffix = table.suffix.lower()
    cells = list[Any]()
    if suffix in arrays.SUFFIXES:
        return []
    try:
        if suffix == ".parquet":
            with frames.parquet(table) as file:
                for name in _pictured(file.schema_arrow.empty_table(), reading, usual):
                    cells += _paths(file, name)
        elif suffix in (".csv", ".tsv") and not _may_name_images(table, reading, usual):
            return []
        else:
            found = frames.arrow(table, str(table))
            for name in _pictured(found, reading, usual):
                cells += found[name].to_pylist()
    except (pa.ArrowException, OSError, KeyError, UserError):
        return []
    names = {cell for cell in cells if isinstance(cell, str) and cell}
    return sorted(name for name in names if split(table.parent / name)[0].is_file())


def _may_name_images(table: Path, reading: Reading, usual: columns.Columns) -> bool:
    """Return whether a text file may have a column of images: most have none, and are not read
    twice.
    """
    with table.open("rb") as text:
        head = text.read(1 << 16)
    if reading.image_column:
        return reading.image_column.encode() in head
    return b"image" in head or usual.image.encode() in head


def _pictured(table: Any, reading: Reading, usual: columns.Columns) -> list[str]:
    """Return the column of images, and those of labels, which may be masks; none without images."""
    image = columns.image_column(table, reading, usual)
    if image is None:
        return []
    labels = {*(reading.label_column or ("label",))}
    return [image, *labels.intersection(table.column_names)]


def _paths(file: Any, name: str) -> list[Any]:
    """Return the paths in a column of a Parquet file, or of structs with bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = file.schema_arrow.field(name).type
    if pa.types.is_struct(kind):
        structs = file.read([f"{name}.path"])[name]
        return list(pc.struct_field(structs, "path").to_pylist())
    if not is_text(kind):
        return []
    return list(file.read([name])[name].to_pylist())


def read(root: Path, reading: Reading) -> Raw:
    """Read a folder of class folders or domain/class folders, in which each file is a sample."""
    found, left = walked(root, reading)
    kind = columns.kind_of(reading)
    if not found and kind.suffixes:
        raise UserError(
            f"{root} holds no {kind.words} ({', '.join(kind.suffixes)}): put files into class "
            "folders"
        )
    if not found:
        raise UserError(
            f"{root} holds no image: {no_image(root)}. Put images into class folders (cat/1.png)"
        )
    names, paths = zip(*found, strict=True)
    folders = [name.split("/")[:-1] for name in names]
    levels = {*map(len, folders)}
    if levels not in ({1}, {2}):
        where = f"at {len(levels)} levels"
        if levels == {0}:
            where = f"in {root.name} itself"
        raise UserError(
            f"{root} must hold {kind.words} in class folders (cat/1.png) or all in domain/class "
            f"folders (photo/cat/1.png); found {len(found)} {kind.words} {where}."
        )
    above = np.array(folders)
    domain = None
    if levels == {2}:
        domain = above[:, 0]
        named = {name for name in np.unique(domain).tolist() if name.lower() in PARTS}
        if len(named) > 1:
            raise UserError(
                f"the folders {listed(sorted(named))} of {root} are parts of one data set, and "
                "none is called train: call the training part train, and the test part test"
            )
    if left:
        tell(
            f"{counted(left.total(), 'file')} below {root} not read as {kind.words} "
            f"({listed(left)})"
        )
    return Raw(str(root), list(paths), above[:, -1], domain, kind=kind)


def check_class_folders(parts: Sequence[Path], reading: Reading) -> None:
    """Refuse folders of tables, and a class or domain without any image: its name would vanish."""
    folders = list(filter(Path.is_dir, parts))
    images = list[tuple[str, Path]]()
    tables = list[str]()
    for part in folders:
        images += walked(part, reading)[0]
        tables += [path.name for path in part.iterdir() if path.suffix in frames.SUFFIXES]
    if tables and not images:
        raise UserError(
            f"{folders[0]} is a folder of tables ({min(tables)}, ...): name one of them, or give "
            "the folder as --silos if each is a silo"
        )
    # at each level below the parts, the folders that lead to an image
    known = defaultdict[int, set[str]](set)
    for name, _ in images:
        for level, above in enumerate(name.split("/")[:-1]):
            known[level].add(above)
    for level, names in known.items():
        for part in folders:
            for found in sorted(part.glob("*/" * level + "*/")):
                inside = found.relative_to(part).parts
                if found.name not in names and not any(name.startswith(_HIDDEN) for name in inside):
                    raise UserError(
                        f"the folder {found} holds no image ({no_image(found)}), so {found.name!r} "
                        "would be empty: put images there, or remove the folder"
                    )


class Pairs(Protocol):
    """A map-style dataset of (x, y) pairs, such as those of torch."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """(x, y) of one sample."""
        ...


Source: TypeAlias = tuple[Tensor | NDArray[Any], Tensor | NDArray[Any]] | Samples | Pairs
"""(x, y) with x (n, ...) and y (n,), or a map-style dataset of such pairs."""


def raw_of(source: Any, what: str) -> Raw:
    """Return the samples of arrays (x, y), of `Samples`, or of a map-style dataset of pairs; `what`
    names them.
    """
    if isinstance(source, Samples):
        raw = _raw(source.x, source.y, what, source.classes)
        subject = _for_each(source.subject, raw, "subject")
        if subject is not None and subject.dtype.kind == "f":
            raise UserError(f"subject of {what} holds fractions: number the subjects by integers")
        return replace(raw, subject=subject, time=_for_each(source.time, raw, "time"))
    if isinstance(source, Subset | ClientData):
        raise UserError(
            f"{what} is a {type(source).__name__}, which has neither scaling nor augmentation: "
            "divide what ekiden.load returns, or some of it, as in ekiden.split(data.subset(100), "
            "'iid', 3)"
        )
    if isinstance(source, tuple) and len(source) == 2:
        x, y = source
        if np.ndim(y) == 0 and isinstance(y, Tensor | int | np.integer) and np.ndim(x):
            raise UserError(
                f"{what} is one sample, not many: give (inputs, labels) with one row and one label "
                "for each sample, or divide a data set with ekiden.split"
            )
        if _array_like(x) and _array_like(y):
            numbers = _array(x, what)
            if isinstance(numbers, np.ndarray) and numbers.dtype.kind not in "biuf":
                raise UserError(
                    f"{what} holds {numbers.dtype} as inputs: give numbers, or a frame of texts"
                )
            return _raw(torch.as_tensor(numbers), _array(y, what), what)
    return _raw(*_collected(source, what), what)


def _raw(x: Tensor, y: Any, what: str, classes: tuple[str, ...] = ()) -> Raw:
    tokens = False
    if isinstance(y, np.ndarray) and y.ndim == 1 and len(y) and all_are(str, y):
        label = y.astype(np.str_)
    else:
        try:
            numbers = torch.as_tensor(y).cpu()
        except TypeError:
            raise UserError(
                f"{what} holds {y.dtype} as labels: give integers, numbers or names"
            ) from None
        if numbers.dtype in (torch.uint16, torch.uint32, torch.uint64):
            # torch stores these, and compares none
            numbers = numbers.long()
        label = numbers.numpy()
        tokens = isinstance(inferred(numbers, x), LanguageModelling)
    x = x.long() if tokens else _inputs(x, what)
    if len(label) != len(x):
        raise UserError(
            f"{what} has {len(x)} samples and {len(label)} labels: it must hold {len(x)} integers "
            "or other labels"
        )
    return Raw(what, x, label, classes=classes, kind=Arrays, given=True)


def _for_each(values: Any, raw: Raw, part: str) -> NDArray[Any] | None:
    """Return numbers (n,), one for each sample."""
    if values is None:
        return None
    what = f"{part} of {raw.source}"
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{what} must be numbers ({error}): number names first") from None
    if numbers.shape != (len(raw),) or not torch.isfinite(numbers).all():
        raise UserError(
            f"{what} has shape {tuple(numbers.shape)}: give one finite number for each of "
            f"{len(raw)} samples"
        )
    if not numbers.is_floating_point():
        numbers = numbers.long()
    return numbers.cpu().numpy()


def _array_like(part: Any) -> bool:
    """Return whether `part` is an array, or a list of numbers, names, or lists."""
    if isinstance(part, list):
        return bool(part) and isinstance(part[0], int | float | str | np.number | list)
    return hasattr(part, "__array__")


def _array(part: Any, what: str) -> Any:
    if isinstance(part, Tensor):
        if part.layout != torch.strided:
            raise UserError(f"{what} holds a sparse tensor: give tensor.to_dense()")
        return part.detach()
    if np.ma.is_masked(part):
        raise UserError(f"{what} holds masked values: fill them, or leave such samples out")
    try:
        array = np.asarray(part)
        if array.dtype.kind == "S":
            array = np.char.decode(array)
    except ValueError:
        raise UserError(
            f"{what} holds rows of different lengths: give each sample the same shape"
        ) from None
    if array.dtype == object and not all_are(str, array.flat):
        raise UserError(
            f"{what} holds values that are not numbers: give numbers, or name the columns to use"
        )
    # as tensors need it; not copied if it is
    return np.require(array, array.dtype.newbyteorder("="), ["C", "W"])


def _collected(pairs: Any, what: str) -> tuple[Tensor, Any]:
    """Return the samples and labels of pairs."""
    wanted = f"{what} must be tensors (x, y) or a map-style dataset of pairs (x, y), y integers, names or masks"
    try:
        again = hasattr(pairs, "__len__")
        items = [pairs[i] for i in range(len(pairs))] if again else [*iter(pairs)]
        for item in items:
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise UserError(f"{wanted}, not samples of type {type(item).__name__}.")
        if not items:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        if again:
            _say_random(items, pairs, what)
        xs, ys = zip(*items, strict=True)
        labels = _labels(ys)
        if all_are(Image.Image, xs):
            opened = Raw(what, xs, np.zeros(len(xs), dtype=np.int64), kind=Images)
            return decode([[opened]], Images())[0], labels
        tensors = [*map(_tensor, xs)]
    except (TypeError, ValueError, KeyError, OverflowError, RuntimeError) as error:
        raise UserError(f"{wanted} ({error}).") from error
    shapes = {tuple(x.shape) for x in tensors}
    if len(shapes) > 1:
        raise UserError(
            f"samples of {what} differ in shape ({', '.join(map(str, sorted(shapes)[:3]))}): "
            "resize them."
        )
    return torch.stack(tensors), labels


def _tensor(part: Any) -> Tensor:
    """Return a tensor, a number, an array or an opened image as a tensor."""
    if isinstance(part, Tensor):
        return part
    return torch.from_numpy(np.array(part))


def _say_random(items: Sequence[Any], pairs: Any, what: str) -> None:
    """Say whether samples are others when they are read again."""
    # transforms that are random change all samples, so a few tell
    for k, (one, _) in enumerate(items[:4]):
        again = pairs[k][0]
        if np.shape(one) != np.shape(again) or not np.array_equal(
            np.asarray(one), np.asarray(again), equal_nan=True
        ):
            tell(
                f"samples of {what} differ each time they are read, and are read once: leave out "
                "random changes, and let augment= make them in each epoch"
            )
            return


def _labels(ys: Sequence[Any]) -> Any:
    """Return the labels of pairs: names; whole numbers as int64; other numbers, arrays and masks
    unchanged.
    """
    if all_are(str, ys):
        return np.array(ys, dtype=np.str_)
    if isinstance(ys[0], Image.Image):
        return torch.stack([*map(_tensor, ys)])
    if any(map(np.ndim, ys)):
        return torch.stack([*map(torch.as_tensor, ys)])
    values = torch.tensor([*map(float, ys)], dtype=torch.float64)
    if (values == values.floor()).all():
        return torch.tensor([*map(int, ys)])
    return values


def _inputs(x: Tensor, what: str) -> Tensor:
    """Check samples (n, ...), and return them as uint8 images or float32."""
    if x.dtype == torch.uint8 and x.ndim in (3, 4) and len(x):
        return with_channels(x, what)
    if not x.is_floating_point() and x.ndim > 1 and len(x):
        kind = str(x.dtype).removeprefix("torch.")
        raise UserError(
            f"{what} has {kind} x of shape {tuple(x.shape)}: give uint8 images (n, C, H, W) or "
            "float values."
        )
    return with_channels(arrays.encode(x, what), what)


@dataclass(frozen=True)
class Holding:
    """What one source holds."""

    # name of the silo; "" if the source does not belong to one silo
    name: str
    # training part
    train: Raw
    # test part, if there is one
    test: Raw | None = None

    @property
    def parts(self) -> list[Raw]:
        """Return the training part and, if there is one, the test part."""
        if self.test is None:
            return [self.train]
        return [self.train, self.test]


def hold(
    source: Any,
    reading: Reading,
    name: str = "",
    what: str = "",
    usual: columns.Columns = columns.USUAL,
) -> Holding:
    """Read a path, a frame, or samples that are already in Python, which messages call `what`.

    `usual` are names of columns that mean something if `reading` does not say so.
    """
    what = what or (f"silo {name}" if name else "the table")
    if frames.is_frame(source) or type(source) is dict:
        return Holding(name, columns.samples(frames.arrow(source, what), what, reading, usual))
    if not isinstance(source, str | PathLike):
        if isinstance(source, dict):
            raise UserError(
                f"{what} is a {type(source).__name__} of {', '.join(source)}: give one of its "
                "parts, as in "
                'data["train"]'
            )
        if reading.names_columns or reading.sample_kind or reading.schema:
            raise UserError(
                f"{what} is {type(source).__name__}, which has no columns: give a frame, a path or "
                "a dict"
            )
        return Holding(name, raw_of(source, what))
    path = Path(source).expanduser()
    parts = find(path)
    check_class_folders(parts, reading)
    return Holding(name, *(read_part(part, reading, usual) for part in parts))


def read_part(part: Path, reading: Reading, usual: columns.Columns = columns.USUAL) -> Raw:
    """Read the training part or the test part of a source."""
    if not part.is_dir() and part.suffix.lower() not in arrays.SUFFIXES:
        return columns.samples(frames.arrow(part, str(part)), str(part), reading, usual)
    # arrays side by side, as in x.npy and y.npy
    if (part / f"{reading.array_column or 'x'}.npy").is_file():
        each = {file.stem: arrays.read(file)["x"] for file in sorted(part.glob("*.npy"))}
        found = _of_arrays(each, str(part), reading)
    elif part.is_dir() and reading.names_columns:
        raise UserError(f"{part} is a folder of images, which has no columns: name no column")
    elif part.is_dir():
        found = read(part, reading)
    elif reading.sample_kind:
        raise UserError(
            f"{part} holds arrays, not {columns.kind_of(reading).words}: leave out --sample-kind"
        )
    else:
        found = _of_arrays(arrays.read(part), str(part), reading)
    if reading.schema:
        schemas.refuse(schemas.of_labels(found, schemas.read(reading.schema)), str(part))
    return found


def _of_arrays(found: dict[str, NDArray[Any]], source: str, reading: Reading) -> Raw:
    """Take samples, labels and owners out of arrays, by their names."""
    import pyarrow as pa

    sample = reading.array_column or "x"
    labels = reading.label_column or ("y", "label")
    label = next((name for name in labels if name in found), labels[0])
    named = (
        reading.group_column,
        reading.domain_column,
        reading.subject_column,
        reading.time_column,
    )
    wanted = {sample: " of samples (--array-column)", label: " of labels (--label-column)"}
    for name in (sample, label, *filter(None, named)):
        if name not in found:
            raise UserError(
                f"{source} has no array {name!r}{wanted.get(name, '')}: it has {', '.join(found)}"
            )
    x = found[sample]
    y = found[label]
    if y.dtype.kind in "SO":
        raise UserError(f"labels in {source} are {y.dtype}: write them as integers, numbers or str")
    if y.dtype.kind in "iub":
        y = y.astype(np.int64)
    if y.dtype.kind == "f" or y.ndim == 2:
        y = y.astype(np.float64)
    group, domain, subject, time = named
    owners = (group or "group", domain or "domain", subject, time)
    for name in (label, *owners):
        if name in found and len(found[name]) != len(x):
            raise UserError(
                f"{source} holds {len(x)} samples and {len(found[name])} values in {name!r}: give "
                "one for each"
            )
    try:
        owned = pa.table({name: found[name] for name in owners if name in found})
    except pa.ArrowInvalid as error:
        raise UserError(
            f"groups, domains, subjects and times of {source} cannot be read: {first_line(error)}"
        ) from None
    cells = Cells(owned, source, reading.writing, owned.column_names)
    if unused := sorted({*found} - {sample, *labels, *filter(None, owners)}):
        tell(
            f"{source} holds {', '.join(unused)}, which nothing uses: say what they mean, as by "
            "--subject-column"
        )
    return Raw(
        source,
        arrays.samples(x, source).numpy(),
        y,
        cells.owners(owners[1]),
        cells.owners(owners[0]),
        kind=arrays.Arrays,
        targets=(label,),
        subject=cells.owners(subject),
        time=cells.time(time),
    )


def named_silos(given: Sequence[str]) -> dict[str, Path]:
    """Return the files or folders of silos, by the silos' names.

    Their paths are given, each with or without a name as in north=n.csv; or one folder that holds a
    file or a folder for each; or one TOML file that names them.
    """
    named = [*map(_name_and_path, given)]
    paths = [path for _, path in named]
    for path in paths:
        if not path.exists():
            raise UserError(
                f"there is no file or folder {str(path)!r}: give the files or folders of the silos"
            )
    if len(paths) == 1 and paths[0].suffix == ".toml":
        return _from_toml(paths[0])
    if len(paths) == 1 and paths[0].is_dir():
        paths = _silos_in(paths[0])
    if len(paths) == 1:
        raise UserError(
            f"a federation needs two silos or more: {paths[0]} alone is one data set (--data)"
        )
    stems = [silo_name(p.name if p.is_dir() else p.stem) for p in paths]
    if len(set(stems)) < len(stems):
        stems = [silo_name(f"{p.parent.name}-{s}") for p, s in zip(paths, stems, strict=True)]
    # a folder of silos has one path and two silos or more, without names
    if len(paths) == len(named):
        stems = [name or stem for (name, _), stem in zip(named, stems, strict=True)]
    return _by_name(stems, paths)


def _silos_in(folder: Path) -> list[Path]:
    """Return the folders and files of silos in a folder, and name other files."""
    found = list[Path]()
    left = list[str]()
    for part in sorted(folder.iterdir(), key=lambda part: natural(part.stem)):
        if part.name.startswith(_HIDDEN) or part.name in _CLUTTER:
            continue
        if part.is_dir() or part.suffix.lower() in READABLE:
            found.append(part)
        else:
            left.append(part.name)
    if not found:
        raise UserError(
            f"{folder} holds no folder and no file of a silo: put one for each silo there"
        )
    if left:
        tell(f"{counted(len(left), 'file')} in {folder} not read as a silo: {listed(left)}")
    return found


def written(found: Mapping[str, Path]) -> tuple[str, ...]:
    """Return silos in the form in which `named_silos` reads them, with absolute paths."""
    return tuple(f"{name}={path.absolute()}" for name, path in found.items())


def located_silo(text: str) -> str:
    """Return a silo as the user writes it, with or without a name, so that it means the same in
    every folder.
    """
    name, path = _name_and_path(text)
    return f"{name}={path.absolute()}" if name else str(path.absolute())


def _name_and_path(text: str) -> tuple[str, Path]:
    """Return the name, if there is one, and the path in NAME=PATH."""
    name, sign, rest = text.partition("=")
    whole = Path(text).expanduser()
    # unlike `Path.exists`, it is False also of a text that is too long for a name of a file
    if not sign or not name or "/" in name or os.sep in name or os.path.exists(whole):
        return "", whole
    return name, Path(rest).expanduser()


def silo_name(text: str) -> str:
    """Return `text` as a name of a silo that can also be a file name."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._") or "silo"


def _from_toml(path: Path) -> dict[str, Path]:
    values = read_toml(path, "it names the silos")
    found = values.get("silos")
    if not isinstance(found, dict) or len(values) > 1 or not all_are(str, found.values()):
        raise UserError(
            f'{path} must name the silos in one table, as in [silos] north = "north.csv"'
        )
    paths = [path.parent / Path(p).expanduser() for p in found.values()]
    made = _by_name([*map(silo_name, found)], paths)
    for name, file in made.items():
        if not file.exists():
            raise UserError(f"{path}: there is no file or folder {str(file)!r} for the silo {name}")
    if len(made) < 2:
        raise UserError(f"{path} names {len(made)} silo: name two or more")
    return made


def _by_name(names: Sequence[str], paths: Sequence[Path]) -> dict[str, Path]:
    if twice := named_twice(names):
        raise UserError(f"two silos are called {twice!r}: rename one, or name them in a TOML file")
    return dict(zip(names, paths, strict=True))
