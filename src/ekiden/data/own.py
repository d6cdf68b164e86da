"""The user's files and frames as data sets: tables, texts, arrays, images; one source, or one for each silo."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import arrays, cache, files, frames, tabular, texts
from ekiden.data.decode import decode
from ekiden.data.files import Raw, class_codes, codes, natural
from ekiden.data.holdout import hold_out
from ekiden.data.inputs import Arrays, Images, Inputs, Table, Tokens
from ekiden.data.reading import Reading
from ekiden.data.samples import Dataset, Samples
from ekiden.data.tasks import Classification, LanguageModelling, MultiLabel, Regression, Task, named
from ekiden.data.tasks.base import IGNORED

_MANY = 50  # different whole numbers in a label; more are hardly classes


@dataclass(frozen=True)
class Holding:
    """What one source holds.

    Attributes:
        name: of the silo; "" where the source is not one silo's.
        train: training part.
        test: test part, if there is one.
    """

    name: str
    train: Raw
    test: Raw | None = None

    @property
    def parts(self) -> list[Raw]:
        """The parts that are there."""
        return [self.train] if self.test is None else [self.train, self.test]


def suits(path: Path) -> bool:
    """Whether a file is one of those that hold samples."""
    return path.suffix.lower() in files.READABLE


def hold(source: Any, reading: Reading, name: str = "") -> Holding:
    """Read a path or a frame.

    Raises:
        UserError: it cannot be read, or lacks a column.
    """
    if not isinstance(source, str | Path):
        what = f"silo {name}" if name else "the table"
        return Holding(name, files.samples(frames.arrow(source, what), what, reading))
    train, test = files.find(Path(source).expanduser())
    parts = [part for part in (train, test) if part is not None]
    files.check_class_folders(parts)
    return Holding(name, *(_read(part, reading) for part in parts))


def _read(part: Path, reading: Reading) -> Raw:
    if part.is_dir():
        if found := _pair(part, reading):
            return found
        if reading.names_columns:
            raise UserError(f"{part} is a folder of images, which has no columns: leave out the flags of columns")
        return files.read(part, files.Columns())
    if part.suffix.lower() in arrays.SUFFIXES:
        return _of_arrays(arrays.read(part), str(part), reading)
    return files.samples(frames.arrow(part, str(part)), str(part), reading)


def _pair(folder: Path, reading: Reading) -> Raw | None:
    """Arrays that lie side by side, as in x.npy and y.npy."""
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
    owners = [reading.group_column or "group", reading.domain_column or "domain"]
    for named_, name in ((reading.group_column, owners[0]), (reading.domain_column, owners[1])):
        if named_ and name not in found:
            raise UserError(f"{source} has no array {name!r}: it has {', '.join(found)}")
    x = found[sample]
    group, domain = (found.get(name) for name in owners)
    for name, array in ((labels[0], y), (owners[0], group), (owners[1], domain)):
        if array is not None and len(array) != len(x):
            raise UserError(f"{source} holds {len(x)} samples and {len(array)} values in {name!r}: give one for each")
    pictures = x.dtype == np.uint8 and x.ndim in (3, 4)
    x = arrays.channels_first(x) if pictures else arrays.encode(x, source).numpy()
    return Raw(source, x, y.astype(np.float64) if y.ndim > 1 else y, domain, group, kind="arrays", targets=(labels[0],))


def silos(given: Sequence[str]) -> dict[str, Path]:
    """The files or folders of silos, by the silos' names.

    Args:
        given: their paths; or one folder that holds a file or a folder for each; or one TOML file that names them.

    Raises:
        UserError: there is nothing there, or two have one name.
    """
    paths = [Path(p).expanduser() for p in given]
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {str(path)!r}: give the files or folders of the silos")
    if len(paths) == 1 and paths[0].suffix == ".toml":
        return _from_toml(paths[0])
    if len(paths) == 1 and paths[0].is_dir():
        inside = sorted(paths[0].iterdir(), key=lambda p: natural(p.stem))
        found = [p for p in inside if not p.name.startswith((".", "__")) and (p.is_dir() or suits(p))]
        if not found:
            raise UserError(f"{paths[0]} holds no folder and no file of a silo: put one for each silo there")
        paths = found
    if len(paths) == 1:
        raise UserError(f"a federation needs two silos or more: give several after --silos, or {paths[0]} by --data")
    stems = [silo_name(p.name if p.is_dir() else p.stem) for p in paths]
    if len(set(stems)) < len(stems):
        stems = [silo_name(f"{p.parent.name}-{s}") for p, s in zip(paths, stems, strict=True)]
    return _unlike(list(zip(stems, paths, strict=True)))


def _from_toml(path: Path) -> dict[str, Path]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    found = values.get("silos")
    if set(values) != {"silos"} or not isinstance(found, dict) or not all(isinstance(p, str) for p in found.values()):
        raise UserError(f'{path} must name the silos in one table, as in [silos] north = "north.csv"')
    made = _unlike([(silo_name(name), path.parent / Path(p).expanduser()) for name, p in found.items()])
    for name, file in made.items():
        if not file.exists():
            raise UserError(f"{path}: there is no file or folder {str(file)!r} for the silo {name}")
    if len(made) < 2:
        raise UserError(f"{path} names {len(made)} silo: name two or more")
    return made


def _unlike(named_: list[tuple[str, Path]]) -> dict[str, Path]:
    names = [name for name, _ in named_]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two silos are called {twice!r}: rename one, or name them in a TOML file")
    return dict(named_)


def silo_name(text: str) -> str:
    """`text` as a name of a silo: it becomes the name of files."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._") or "silo"


def assemble(
    holdings: Sequence[Holding],
    reading: Reading,
    *,
    name: str,
    size: int | None = None,
    task: str = "",
    like: Dataset | None = None,
    inputs: Inputs | None = None,
) -> Dataset:
    """One data set of what all sources hold; each silo's samples are a group.

    Without a test part, 20 % of a source is held out, evenly from all (domain, group, label).

    Args:
        holdings: the sources.
        reading: how they were read.
        name: of the data set.
        size: side of images in pixels.
        task: its name; "" for what the labels look like.
        like: a data set whose classes, scaling and task are taken over, to measure a model on other data.
        inputs: what samples become, where that is agreed already.

    Raises:
        UserError: the sources do not go together.
    """
    raws = [part for holding in holdings for part in holding.parts]
    _alike(raws)
    if len(holdings) > 1 and reading.group_column:
        raise UserError("several silos and --group-column both say which client holds what: give one of them")
    y, classes, chosen = labels(raws, task, like)
    domain, domains = _codes("domain", raws)
    if len(holdings) > 1:
        groups = tuple(holding.name for holding in holdings)
        group: Sequence[Tensor | None] = [
            torch.full((len(part.label),), k) for k, holding in enumerate(holdings) for part in holding.parts
        ]
    else:
        group, groups = _codes("group", raws)
    pieces: list[tuple[Raw, Samples]] = []
    tests: list[tuple[Raw, Samples]] = []
    at = 0
    for holding in holdings:
        given = [
            (raw, Samples(y[at + k], y[at + k], domain[at + k], group[at + k])) for k, raw in enumerate(holding.parts)
        ]
        at += len(given)
        first, second = given if len(given) == 2 else _hold_out(*given[0], chosen)
        pieces.append(first)
        tests.append(second)
    tests = [(raw, samples) for raw, samples in tests if len(samples)]
    if not tests:
        raise UserError(
            f"{raws[0].source} has only {len(raws[0].label)} rows, too few to hold out a test part: add one"
        )
    known = inputs if like is None else like.inputs
    x, inputs = _tensors([[raw for raw, _ in pieces], [raw for raw, _ in tests]], reading, size, known)
    train, test = (
        Samples(
            tensor,
            tensor if isinstance(chosen, LanguageModelling) else torch.cat([s.y for _, s in side]),
            _joined([s.domain for _, s in side]),
            _joined([s.group for _, s in side]),
            classes,
        )
        for tensor, side in zip(x, (pieces, tests), strict=True)
    )
    if isinstance(chosen, LanguageModelling):
        tokens = cast(Tokens, inputs)
        chosen = replace(chosen, vocabulary=tokens.vocabulary)
        train, test = (replace(s, y=s.x.masked_fill(s.x == tokens.pad, IGNORED)) for s in (train, test))
    owners = tuple(map(silo_name, groups)) if reading.group_column or len(holdings) > 1 else ()
    if len(set(owners)) < len(owners):
        owners = tuple(f"{owner}-{k}" for k, owner in enumerate(owners))
    made = Dataset(name, train, test, classes, domains, task=chosen, inputs=inputs, groups=owners)
    if like is not None:
        return replace(made, mean=like.mean, std=like.std)
    if isinstance(chosen, Regression):  # until the clients agree; partitions divide by it
        made = replace(made, task=_provisional(chosen, train.y))
    open_ = (isinstance(inputs, Table) and known is None) or isinstance(chosen, Regression)
    return replace(made, least=reading.min_count if open_ else 0)


def augmented(dataset: Dataset, reading: Reading) -> Dataset:
    """The data set whose training images undergo what the user chose, or else what the set defines.

    Raises:
        UserError: the samples are not images.
    """
    if not reading.augment.active:
        return dataset
    if len(dataset.shape) != 3:
        raise UserError(
            "--augment-crop, --augment-flip and --augment-rotation are for images, these samples have shape "
            f"{dataset.shape}: leave them out"
        )
    return replace(dataset, augment=reading.augment)


def _alike(raws: Sequence[Raw]) -> None:
    for raw in raws[1:]:
        if raw.kind != raws[0].kind:
            raise UserError(
                f"{raws[0].source} holds {_KINDS[raws[0].kind]}, {raw.source} {_KINDS[raw.kind]}: give one kind"
            )


_KINDS = {"images": "images", "table": "a table", "tokens": "texts", "arrays": "arrays"}


def labels(raws: Sequence[Raw], task: str, like: Dataset | None) -> tuple[list[Tensor], tuple[str, ...], Task]:
    """The labels of each part, the names of the outputs, and the task.

    Raises:
        UserError: the labels are not those of the task.
    """
    source = raws[0].source
    parts = [raw.label for raw in raws]
    chosen = like.task if like is not None else named(task) if task else _guess(raws)
    if not isinstance(chosen, LanguageModelling) and raws[0].kind == "tokens" and not raws[0].targets:
        raise UserError(
            f"{source} has no column 'label': say which one holds the labels (--label-column, label_column=), "
            "or learn the texts themselves by --task language-modelling"
        )
    match chosen:
        case LanguageModelling():
            if raws[0].kind != "tokens":
                raise UserError(f"language modelling needs texts, {source} holds {_KINDS[raws[0].kind]}: --text-column")
            return [torch.zeros(len(p), dtype=torch.int64) for p in parts], (), chosen
        case Classification():
            if any(part.ndim > 1 for part in parts):
                raise UserError("classification has one label a sample: name one --label-column, or --task multi-label")
            whole = [_whole(part, raw) for part, raw in zip(parts, raws, strict=True)]
            names = like.classes if like is not None else raws[0].classes
            if (names or raws[0].kind == "images") and (like is None or any(p.dtype.kind != "i" for p in whole)):
                return *class_codes(whole, names, source), chosen
            y, classes = codes([p.astype(np.str_) for p in whole], names, "label", source)
            if len(classes) < 2:
                raise UserError(f"all labels in {source} are {classes[0]!r}: classification needs two classes or more")
            return y, classes, chosen
        case MultiLabel() | Regression():
            numbers = [_numbers(part, raw, chosen.kind) for part, raw in zip(parts, raws, strict=True)]
            y = [chosen.labels(torch.from_numpy(p), len(p), raw.source) for p, raw in zip(numbers, raws, strict=True)]
            columns = raws[0].targets
            width = 1 if y[0].ndim == 1 else y[0].shape[1]
            if len(columns) != width:
                columns = tuple(f"{columns[0] if columns else 'y'}-{k}" for k in range(width))
            return y, columns if like is None else like.classes, chosen
    raise UserError(f"{chosen.kind} cannot be read from files: give a function that makes the data, FILE.py:NAME")


def _guess(raws: Sequence[Raw]) -> Task:
    """What the labels look like."""
    parts = [raw.label for raw in raws]
    if parts[0].ndim > 1:
        binary = all(np.isin(part, (0, 1)).all() for part in parts)
        return MultiLabel() if binary else Regression()
    if all(part.dtype.kind == "f" for part in parts) and any((part != np.floor(part)).any() for part in parts):
        return Regression()
    different = {value for part in parts for value in np.unique(part).tolist()}
    if all(part.dtype.kind in "if" for part in parts) and len(different) > _MANY and not raws[0].classes:
        shown = raws[0].targets[0] if raws[0].targets else "label"
        raise UserError(
            f"the label {shown!r} of {raws[0].source} has {len(different)} different whole numbers: say "
            "whether they are numbers to predict, --task regression, or classes, --task classification"
        )
    return Classification()


def _whole(part: NDArray[Any], raw: Raw) -> NDArray[Any]:
    """Labels of classes: names or integers."""
    if part.dtype.kind != "f":
        return part
    if (part != np.floor(part)).any():
        row = int(np.flatnonzero(part != np.floor(part))[0])
        raise UserError(f"the label in row {row} of {raw.source} is {part[row]}, no class: take --task regression")
    return part.astype(np.int64)


def _numbers(part: NDArray[Any], raw: Raw, kind: str) -> NDArray[np.float64]:
    if part.dtype.kind == "U" and kind == "multi-label" and set(np.unique(part)) <= {"true", "false"}:
        part = part == "true"
    if part.dtype.kind == "U":
        raise UserError(
            f"the label {raw.targets[0] if raw.targets else 'label'!r} of {raw.source} holds text ({str(part[0])!r}): "
            f"{kind} needs numbers"
        )
    if kind == "multi-label" and part.ndim == 1:
        part = part[:, None]
    return part.astype(np.float64)


def _codes(what: str, raws: Sequence[Raw]) -> tuple[Sequence[Tensor | None], tuple[str, ...]]:
    """Numbers and names of the domains or groups, if all parts have them."""
    values = [raw.domain if what == "domain" else raw.group for raw in raws]
    given = [value for value in values if value is not None]
    if len(given) < len(values):
        return [None] * len(values), ()
    return codes(given, raws[0].domains if what == "domain" else (), what, raws[0].source)


def _hold_out(raw: Raw, samples: Samples, task: Task) -> list[tuple[Raw, Samples]]:
    """A training part and a test part of one source."""
    strata = (_provisional(task, samples.y) if isinstance(task, Regression) else task).strata(samples.y)
    rows = hold_out(samples.domain, samples.group, strata)
    return [(raw.taken(part.numpy()) if len(part) else raw, samples.taken(part)) for part in rows]


def _provisional(task: Regression, y: Tensor) -> Regression:
    """The task with the scale of these targets."""
    columns = (y[:, None] if y.ndim == 1 else y).double()
    std = columns.std(0, correction=0)
    return replace(task, mean=tuple(columns.mean(0).tolist()), std=tuple(torch.where(std > 0, std, 1.0).tolist()))


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given) if len(given) == len(parts) else None


def _tensors(
    sides: Sequence[Sequence[Raw]], reading: Reading, size: int | None, known: Inputs | None
) -> tuple[list[Tensor], Inputs]:
    """The samples of the training and of the test side, and what they are."""
    raws = [raw for side in sides for raw in side]
    match raws[0].kind:
        case "images":
            images = known if isinstance(known, Images) else reading.images(size)
            return decode([_merged(side) for side in sides], images, cache.room), images
        case "tokens":
            tokens = (
                known
                if isinstance(known, Tokens)
                else texts.tokens_for(reading.tokenizer or "words", reading.text_length)
            )
            return _padded([[texts.encode(raw.images, tokens) for raw in side] for side in sides], tokens), tokens
        case "arrays":
            return [_stacked(side, raws[0]) for side in sides], (
                Images() if raws[0].images.dtype == np.uint8 and raws[0].images.ndim == 4 else Arrays()
            )
    if size:
        raise UserError("--size is the side of images, the data are a table: leave it out")
    if isinstance(known, Table):
        return [
            torch.cat([tabular.encode(*tabular.rows(raw.images, known, raw.source), known) for raw in side])
            for side in sides
        ], known
    table, tensors = tabular.unscaled(
        [raw.images for raw in raws], [raw.source for raw in raws], reading.categorical_columns
    )
    cut = len(sides[0])
    return [torch.cat(tensors[:cut]), torch.cat(tensors[cut:])], table


def _merged(side: Sequence[Raw]) -> Raw:
    """The images of several sources as those of one."""
    if len(side) == 1:
        return side[0]
    images = [image for raw in side for image in raw.images]
    source = f"{side[0].source} and {len(side) - 1} other{'s' * (len(side) > 2)}"
    return Raw(source, images, np.concatenate([raw.label.astype(np.str_) for raw in side]))


def _padded(sides: Sequence[Sequence[Tensor]], tokens: Tokens) -> list[Tensor]:
    """Texts of one length."""
    longest = max(part.shape[1] for side in sides for part in side)
    out = []
    for side in sides:
        whole = torch.full((sum(map(len, side)), longest), tokens.pad)
        at = 0
        for part in side:
            whole[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        out.append(whole)
    return out


def _stacked(side: Sequence[Raw], first: Raw) -> Tensor:
    for raw in side:
        if raw.images.shape[1:] != first.images.shape[1:] or raw.images.dtype != first.images.dtype:
            raise UserError(
                f"samples of {raw.source} have shape {raw.images.shape[1:]} ({raw.images.dtype}), those of "
                f"{first.source} {first.images.shape[1:]} ({first.images.dtype}): give all one shape and type"
            )
    return torch.from_numpy(np.concatenate([np.ascontiguousarray(raw.images) for raw in side]))
