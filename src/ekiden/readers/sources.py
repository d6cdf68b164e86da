"""Load data sets by name, from the user's own files, or from what several silos hold."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ekiden.core.base import outside
from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError, first_line, unknown
from ekiden.core.base.outside import require_extra
from ekiden.core.data.augment import Augment
from ekiden.core.data.samples import Dataset, FederatedData, Origin, coming_from
from ekiden.core.tasks import Task
from ekiden.readers import cache, frames
from ekiden.readers.assemble import AskedData, assemble, augmented, from_tensors
from ekiden.readers.columns import Columns, Reading, reading, samples
from ekiden.readers.holdings import (
    READABLE,
    Holding,
    Source,
    check_class_folders,
    files,
    find,
    hold,
    named_silos,
    walked,
    written,
)
from ekiden.readers.kinds import Images
from ekiden.readers.partition import Natural, split
from ekiden.readers.targets import in_order, with_labels_of
from ekiden.readers.undecoded import Raw, all_are


@dataclass(frozen=True)
class Named:
    """A named data set."""

    hub: str | None = (
        None  # its id on the Hugging Face hub; None if we know no complete and readable copy there
    )
    # its configuration there
    config: str | None = None
    # names of its columns there
    columns: Columns = field(default_factory=Columns)
    # the split there that is the test part; None if there is only `train` (then 20 % of every
    # (domain, class), or of
    # every group, is held out)
    test: str | None = "test"
    # domain names in the order of the papers
    domains: tuple[str, ...] = ()
    # side to which images are resized; None keeps their size
    size: int | None = None
    # per channel, subtracted after scaling bytes to [0, 1]
    mean: tuple[float, ...] = (0.0,)
    # per channel, divided by
    std: tuple[float, ...] = (1.0,)
    # how training batches are augmented
    augment: Augment = field(default_factory=Augment)


_TINY = Named(
    hub="zh-plus/tiny-imagenet",
    test="valid",
    mean=(0.4802, 0.4481, 0.3975),
    std=(0.2302, 0.2265, 0.2262),
    augment=Augment(flip=True, rotation=20),
)
_SHIFTED = Named(test=None, size=32, augment=Augment(crop=4, flip=True, rotation=15))
_CIFAR = Named(columns=Columns(image="img"), augment=Augment(crop=4, flip=True))

NAMED: dict[str, Named] = {
    "digits": Named(),  # ships with scikit-learn
    "mnist": Named(hub="ylecun/mnist"),
    "fashion_mnist": Named(hub="zalando-datasets/fashion_mnist"),
    "svhn": Named(hub="ufldl-stanford/svhn", config="cropped_digits"),
    "femnist": Named(
        hub="flwrlabs/femnist", columns=Columns(label="character", group="writer_id"), test=None
    ),
    "pathmnist": Named(),
    "cifar10": replace(_CIFAR, hub="uoft-cs/cifar10"),
    "cifar100": replace(
        _CIFAR, hub="uoft-cs/cifar100", columns=Columns(image="img", label="fine_label")
    ),
    "tiny_imagenet": _TINY,
    "tiny_imagenet20": replace(_TINY, hub=None),  # its first 20 classes
    "pacs": replace(
        _SHIFTED,
        hub="flwrlabs/pacs",
        domains=("photo", "art_painting", "cartoon", "sketch"),
        mean=(0.485, 0.456, 0.406),
        std=(0.229, 0.224, 0.225),
    ),
    "office_caltech10": replace(_SHIFTED, domains=("amazon", "caltech10", "dslr", "webcam")),
}


@checked("name", "size", "task")
def load(
    name: Any,
    *,
    size: int | None = None,
    task: str = "",
    like: Dataset | None = None,
    classes: Sequence[str] | None = None,
    whole: bool = False,
    without: Sequence[str] = (),
    **columns: Any,
) -> Dataset:
    """Load a data set, decoded once and then kept in a cache folder (`$EKIDEN_CACHE` or
    `~/.cache/ekiden`).

    A name is first looked for in the folder `$EKIDEN_DATA`, then among the named sets (`NAMED`:
    `digits` ships with scikit-learn, others come from the Hugging Face hub), then as a path.
    Layouts of your own data:

    - a table: Parquet, CSV, TSV or Feather, or a frame of pandas, polars, Arrow or Hugging Face.
      Its rows are the samples, unless one column holds them: `image` (encoded bytes, structs of
      bytes and path, or paths), or the one that `image_column`, `text_column` or `array_column`
      names. The test part of `a_train.csv` is `a_test.csv`;
    - a folder of class folders, or of domain folders with class folders;
    - arrays: `.npz` or safetensors with `x` and `y`, or a folder with `x.npy` and `y.npy`;
    - a folder with one of these as `train`, and optionally one as `test`.

    Or PATH.py:FUNCTION: a function without arguments that returns a `Dataset`, or a pair (train,
    test) as `ekiden.data.from_tensors` takes them. For a function that returns silos, use `silos`.
    Without a test part, 20 % of every (domain, class), or of every group if there are groups, is
    held out with a fixed seed.

    Args:
        name: a name, a path, or a frame.
        size: side in pixels to which images are resized (bilinear with antialias); the default is
            the named set's, or else the images' own.
        task: its name, which says what the labels mean (`ekiden.core.tasks.KINDS`); by default
            inferred from them.
        like: a data set whose classes and scaling are used, to measure a model trained on it on
            other data.
        classes: names of all classes in their order, if these data need not hold all of them.
        whole: whether all samples are for the test if there is no test part, to evaluate a model.
        without: names of natural owners whose rows are left out, as if they were not in the data.
        **columns: fields of `ekiden.data.Reading`, such as label_column="died",
            group_column="hospital".

    Returns:
        The data set. Rows of a table are scaled once clients agree on the scaling, as in
        `ekiden.split`.

    Raises:
        UserError: there is no such data set, it cannot be read, or its images differ in size.
    """
    for names in (classes, without):
        if isinstance(names, str):
            raise UserError(f"classes and without are lists of names, not {names!r}")
    chosen = reading(columns).like(like and like.inputs)
    named = isinstance(name, str | PathLike)
    asked = _Request(
        fspath(name) if named else "own data",
        chosen.without_augment(),
        size,
        task,
        like,
        classes=classes,
        whole=whole,
        without=tuple(without),
    )
    if named:
        loaded = asked.loaded()
    elif frames.is_frame(name) or type(name) is dict:
        loaded = assemble([hold(name, asked.reading)], asked)
    else:
        raise _refused(name)
    found = augmented(in_order(loaded, tuple(classes or ())), chosen)
    if like is not None or classes or whole or not named:
        return found
    place = located(asked.name)
    if found.name == asked.name:
        found = replace(found, name=place)
    reads = chosen.located().chosen()
    return coming_from(found, Origin(place, (), size, task, reads, without=asked.without))


def _refused(given: Any) -> UserError:
    """Return a line about what `load` does not take."""
    instead = ""
    if isinstance(given, dict):
        instead = ": give one of its parts, as in data['train']"
    if isinstance(given, tuple | list | np.ndarray | Tensor):
        instead = ": several files, or arrays in memory, are silos, ekiden.federate([(x, y), ...])"
    return UserError(f"load takes a name, a path or a frame, not {type(given).__name__}{instead}")


@dataclass(frozen=True)
class _Request(AskedData):
    """What `load` is asked for, with what is known of a named data set."""

    spec: Named = field(default_factory=Named)

    def loaded(self) -> Dataset:
        """Return the data set of this name, or at this path."""
        name = self.name
        task = str(self.task or "")
        if _is_function(name):
            if self.reading != Reading():
                raise UserError(
                    f"{name} makes the samples itself: leave out what says how files are read"
                )
            return with_labels_of(
                _dataset_of(outside.call(name, "ekiden.datasets"), name, self.size, task), task
            )
        spec = NAMED.get(name)
        path = path_of(name)
        asked = self
        if spec:
            asked = replace(
                self,
                spec=spec,
                size=self.size or spec.size,
                domains=spec.domains,
                doubt=spec == Named(),
            )
        if path is not None:
            made = asked.files({"": path}, path.stem)
        elif file := next(
            (c for c in self.reading.label_column if Path(c).suffix in frames.SUFFIXES), ""
        ):
            raise UserError(f"{file!r} is read as a column: name the data first, then the columns")
        elif self.reading.names_columns or self.reading.schema:
            raise UserError(
                f"{name} has fixed columns, which cannot be chosen: give local files of it in "
                "EKIDEN_DATA"
            )
        elif name == "digits":
            made = asked.kept(name, *_digits())
        else:
            made = asked.kept(name, *_from_hub(name, asked.spec))
        if spec is None:
            return made
        return replace(made, mean=spec.mean, std=spec.std, augment=spec.augment)

    def files(self, sources: Mapping[str, Path], stem: str) -> Dataset:
        """Load the files or folders of each silo."""

        def held() -> list[Holding]:
            return [
                hold(path, self.reading, silo, usual=self.spec.columns)
                for silo, path in sources.items()
            ]

        return self.kept(stem, _contents(sources, self.reading, self.spec.columns), held)

    def kept(
        self,
        stem: str,
        pieces: Iterable[bytes | memoryview | str | Path],
        held: Callable[[], list[Holding]],
    ) -> Dataset:
        """Assemble what is held, once; then it is in the cache.

        Args:
            stem: beginning of the name of the cache file.
            pieces: all that the samples are made of.
            held: reads it.
        """
        if self.like is not None or self.whole:
            return assemble(held(), self)
        asked = (
            self.reading,
            self.size,
            self.task,
            self.classes,
            self.spec.columns,
            self.domains,
            self.spec.hub,
            self.without,
        )
        own = []
        if self.reading.schema:
            own.append(Path(self.reading.schema).expanduser())
        if outside.is_file(self.reading.sample_kind):
            own.append(Path(self.reading.sample_kind.rpartition(":")[0]).expanduser())
        try:
            content = cache.key([repr(asked), *own, *pieces])
        except OSError as error:
            raise UserError(
                f"cannot read {error.filename} ({error.strerror}): check that it is there."
            ) from error
        made = cache.cached(stem, content, lambda: assemble(held(), self))
        return replace(made, name=self.name, named=bool(self.classes))


def join(
    paths: Sequence[str],
    *,
    size: int | None = None,
    task: str = "",
    like: Dataset | None = None,
    **columns: Any,
) -> Dataset:
    """Load the files or folders of several silos as one data set, in which each silo is a natural
    owner.

    Args:
        paths: paths of the silos; or one folder with a file or a folder for each; or a TOML file
            that names them.
        size: as in `load`.
        task: as in `load`.
        like: as in `load`.
        **columns: as in `load`; the same for all silos.

    Raises:
        UserError: as in `load`; or the silos' data do not go together.
    """
    chosen = reading(columns).like(like and like.inputs)
    asked = _Request("silos", chosen.without_augment(), size, task, like)
    sources = named_silos(paths)
    made = augmented(asked.files(sources, "silos"), chosen)
    origin = Origin(silos=written(sources), size=size, task=task, reading=chosen.located().chosen())
    if like is not None:
        return made
    return coming_from(made, origin)


def silos(name: str, *, val_fraction: float = 0.1, seed: int = 0) -> FederatedData | None:
    """Return the silos that the user's function returns; None if `name` is not the name of such a
    function.

    The function returns what `ekiden.federate` returns, or a list that it takes.
    """
    if not _is_function(name):
        return None
    given = outside.call(name, "ekiden.datasets")
    if isinstance(given, list):
        return federate(given, val_fraction=val_fraction, seed=seed)
    if isinstance(given, FederatedData):
        return given
    return None


def _is_function(name: str) -> bool:
    """Return whether a function makes the data: one in a file, or one of another package."""
    return outside.is_file(name) or name in outside.installed("ekiden.datasets")


def _dataset_of(given: Any, name: str, size: int | None, task: str = "") -> Dataset:
    """Return the result of the user's function as a data set."""
    if size is not None:
        raise UserError(f"{name} makes the images itself: leave out --size")
    if isinstance(given, tuple) and len(given) == 2:
        given = from_tensors(*given, name=outside.short(name), task=task or None)
    if isinstance(given, FederatedData | list):
        raise UserError(
            f"{name} returns silos, but a data set is needed here: return a Dataset or (train, "
            "test)"
        )
    if not isinstance(given, Dataset):
        raise UserError(
            f"{name} returns {type(given).__name__}: return what ekiden.federate or ekiden.load "
            "returns, a list of silos, or a pair (train, test)"
        )
    return given


def located(name: str) -> str:
    """Return the name of a data set so that it means the same in every folder: relative paths
    become absolute.

    An unknown name stays unchanged; `load` reports what is wrong with it.
    """
    if outside.is_file(name):
        return outside.located(name)
    here = Path(name).expanduser()
    with suppress(UserError):
        if path_of(name) == here:
            return str(here.absolute())
    return name


def path_of(name: str) -> Path | None:
    """Return where the files of a data set are; None for a named set without local files."""
    root = os.environ.get("EKIDEN_DATA")
    # otherwise it is a relative path
    named = name.partition("/")[0] not in ("", ".", "..")
    local = Path(root).expanduser() / name if root and named else None
    if local is not None and local.exists():
        return local
    if name in NAMED:
        return None
    path = Path(name).expanduser()
    if path.exists() and name:
        return path
    if "/" in name or os.sep in name or path.suffix.lower() in READABLE:
        # raises the error that it is not there
        find(path)
    known = {*NAMED}
    if local and local.parent.is_dir():
        known.update(part.name for part in local.parent.iterdir() if part.is_dir())
    raise UserError(
        f"{unknown('data set', name, known)} There is no file or folder of that name either."
    )


def _contents(
    sources: Mapping[str, Path], reading: Reading, usual: Columns
) -> Iterator[str | Path]:
    """Yield all that samples are made of: the files, and the images that they name."""
    for silo, path in sources.items():
        parts = find(path)
        check_class_folders(parts, reading)
        for number, part in enumerate(parts):
            if part.is_dir():
                found, left = walked(part, reading)
                # what is said about it is kept, too
                yield str(left)
            else:
                found = [*files(part, reading, usual)]
            for inside, file in found:
                yield f"{silo}:{number}:{inside}"
                yield file


def _from_hub(name: str, spec: Named) -> tuple[Iterable[memoryview], Callable[[], list[Holding]]]:
    place = f"set EKIDEN_DATA to a folder that holds {name}/train.parquet and {name}/test.parquet"
    if spec.hub is None:
        raise UserError(
            f"{name!r} is available only as local files: {place} (columns image, label, and maybe "
            "domain)."
        )
    require_extra("hub", f"{name!r} is on the Hugging Face hub, which", "datasets")
    # seconds, and only this function needs it
    import datasets

    splits = [*filter(None, ("train", spec.test))]
    try:
        parts = datasets.load_dataset(spec.hub, spec.config, split=splits)
    except Exception as error:  # from the network, the hub or the disk: any kind
        raise UserError(
            f"cannot get {spec.hub!r} from the Hugging Face hub ({first_line(error)}): {place}."
        ) from error
    where = f"the hub's {spec.hub}"
    tables = [frames.arrow(part, where) for part in parts]

    def held() -> list[Holding]:
        return [Holding("", *(samples(table, where, Reading(), spec.columns) for table in tables))]

    columns = chain.from_iterable(table.itercolumns() for table in tables)
    chunks = chain.from_iterable(column.chunks for column in columns)
    pieces = chain.from_iterable(chunk.buffers() for chunk in chunks)
    return (memoryview(piece) for piece in pieces if piece is not None), held


def _digits() -> tuple[Iterable[str], Callable[[], list[Holding]]]:
    """Return the 1797 hand-written digits of scikit-learn, 8 x 8 grey pixels from 0 to 16."""

    def held() -> list[Holding]:
        from PIL import Image
        from sklearn.datasets import load_digits

        digits = load_digits()
        pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
        images = [*map(Image.fromarray, pixels)]
        return [Holding("", Raw("digits", images, digits.target.astype(np.int64), kind=Images))]

    from importlib.metadata import version

    # importing it takes seconds
    return [version("scikit-learn")], held


@checked("silos", "test", "tests", "task")
def federate(
    silos: Sequence[Source] | Mapping[str, Source],
    test: Source | None = None,
    *,
    tests: Sequence[Source] | None = None,
    names: Sequence[str] | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    augment: Augment | None = None,
    task: Task | str | None = None,
    **columns: Any,
) -> FederatedData:
    """Return one data set held by several silos, each with the samples given for it.

    Args:
        silos: what each client holds for training and validation, as in `from_tensors`; a list, or
            a dict by their names.
        test: a common test set. Each of its classes is divided among the clients in proportion to
            their training samples of the class.
        tests: or else the test set of each client. Without `test` and `tests`, 20 % of each class
            of each silo is held out.
        names: names of the clients; client-0, client-1, ... by default.
        val_fraction: share of a client's (shuffled) samples for validation.
        seed: seed of the shuffle.
        classes: as in `from_tensors`; one list for all silos, so that a label means the same
            everywhere.
        mean: as in `from_tensors`.
        std: as in `from_tensors`.
        augment: as in `from_tensors`.
        task: as in `from_tensors`.
        **columns: as in `ekiden.load`, if silos are frames, paths, or data sets of Hugging Face.

    Raises:
        UserError: as in `from_tensors`; or there are no silos, or not as many tests or names as
            silos.
    """
    sources: Any = silos
    if isinstance(silos, Mapping) and names is None:
        names = list(silos)
        sources = list(silos.values())
    _check(sources, test, tests, names)
    how = reading(columns)
    if names is None and all_are(str | PathLike, sources):
        found = named_silos([*map(fspath, sources)])
        names = list(found)
        sources = list(found.values())
    names = names or [f"client-{k}" for k in range(len(sources))]

    def held(source: Any, name: str, what: str = "") -> Holding:
        return hold(source, how.without_augment(), name, what)

    holdings = list[Holding]()
    for place, (source, name) in enumerate(zip(sources, names, strict=True)):
        holding = held(source, name)
        if tests is not None:
            own = held(tests[place], name, f"the test set of {name}")
            holding = replace(holding, test=own.train)
        holdings.append(holding)
    common = origin = None
    name = "own data"
    if test is not None:
        common = held(test, "", "test").train
    elif tests is None and not (classes or augment) and (*mean, *std) == (0.0, 1.0):
        origin = _origin(sources, names, task, how)
    if origin:
        name = "silos"
    dataset = assemble(holdings, AskedData(name, how, task=task, classes=classes), common)
    dataset = replace(dataset, mean=tuple(mean), std=tuple(std), augment=augment or dataset.augment)
    return split(
        coming_from(augmented(dataset, how), origin),
        Natural(),
        seed=seed,
        val_fraction=val_fraction,
    )


def _origin(
    sources: Sequence[Any], names: Sequence[str], task: Task | str | None, how: Reading
) -> Origin | None:
    """Return where the silos' data come from, if that are files that the command line can read."""
    paths_only = all_are(str | PathLike, sources)
    if isinstance(task, Task) or not paths_only or "=" in "".join(names):
        return None
    paths = {name: Path(source).expanduser() for name, source in zip(names, sources, strict=True)}
    return Origin(silos=written(paths), task=task or "", reading=how.located().chosen())


def _check(silos: Any, test: Any, tests: Sequence[Any] | None, names: Sequence[str] | None) -> None:
    """Refuse arguments that do not have one entry for each silo."""
    if isinstance(silos, Mapping):
        raise UserError("the dict of silos has their names: leave out names")
    several = isinstance(silos, Sequence) and not isinstance(silos, str)
    # (inputs, labels) of one silo
    arrays = several and all_are(Tensor | np.ndarray, silos)
    if not several or (arrays and len(silos) == 2):
        raise UserError(
            "federate needs a list with the samples of each silo, as in [(inputs, labels), "
            "(inputs, labels)]. One table with a column of silos: ekiden.split(ekiden.load(DATA, "
            "group_column=NAME), 'natural')"
        )
    if not len(silos):
        raise UserError(
            "the list of silos is empty: give the samples of each, as in [(x, y), (x, y)]"
        )
    if test is not None and tests is not None:
        raise UserError("test is one test set for all silos, tests one for each: give one of them")
    if isinstance(names, str):
        raise UserError(f"names is a list with a name for each silo, not {names!r}")
    for what, given in ("tests", tests), ("names", names):
        if given is not None and len(given) != len(silos):
            raise UserError(f"{len(given)} {what} for {len(silos)} silos: give one for each.")
    for name in names or ():
        if not isinstance(name, str):
            raise UserError(f"names of silos are texts, not {name!r}: write it as {str(name)!r}")
        if not name:
            raise UserError("a silo's name is empty: give it one of letters and digits")
    if names is not None and len(set(names)) < len(names):
        raise UserError("two silos have the same name: give each its own.")
