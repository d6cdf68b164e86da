"""What each column means, and the undecoded samples, labels and owners in the columns of an Arrow
table.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, Count, CountOrZero, Range, made
from ekiden.core.base.errors import UserError, counted, nearest, tell, unknown
from ekiden.core.data.augment import Augment
from ekiden.readers import frames
from ekiden.readers import schema as schemas
from ekiden.readers.cells import Cells, Writing, is_text
from ekiden.readers.kinds import Arrays, Images, Inputs, Table, Tokens, named
from ekiden.readers.kinds.arrays import is_list
from ekiden.readers.kinds.images import holds_files, is_encoded, masks
from ekiden.readers.undecoded import Raw, named_twice, not_in


@dataclass(frozen=True)
class Reading(Checked):
    """What each column means, and how samples get one shape."""

    schema: str = ""
    """TOML file with the study's schema: its columns, units, ranges and categories, which the data
    must meet"""
    sample_kind: str = ""
    """kind of samples from outside Ekiden: FILE.py:NAME, or an entry point ekiden.kinds of a
    package; images, texts, arrays and tables are told apart by the data"""
    image_column: str = ""
    """column of images: encoded bytes, or paths relative to the table; by default `image`, if there
    is one"""
    text_column: str = ""
    """column of texts"""
    array_column: str = ""
    """column of lists of numbers of one length: signals, embeddings"""
    label_column: tuple[str, ...] = ()
    """column of labels; several columns of 0 and 1: one label each. By default `label`"""
    group_column: str = ""
    """column that says which silo a row belongs to: a hospital, a writer"""
    subject_column: str = ""
    """column that says whom or what a row is about (a patient, a writer, a device): all rows of one
    are only in training, only in validation or only in the test"""
    time_column: str = ""
    """column of dates (2024-01-31) or numbers: each silo trains on its past and is tested on its
    most recent rows"""
    domain_column: str = ""
    """column of domains, such as the kind of scanner"""
    feature_columns: tuple[str, ...] = ()
    """columns of a table that the model gets; by default all columns without another meaning"""
    drop_columns: tuple[str, ...] = ()
    """columns of a table that the model does not get: names, row numbers"""
    categorical_columns: tuple[str, ...] = ()
    """columns of numbers that are codes of categories, such as postcodes"""
    missing: tuple[str, ...] = ()
    """further cells of a table that mark a missing value, such as n.d. or -999; age=-1: only in the
    column age"""
    decimal: Literal["", "point", "comma"] = ""
    """the sign before decimals; by default the one that the numbers of the table show"""
    dates: str = ""
    """how dates are written that are not as 2024-01-31 or 2024-01-31 10:30:00+01:00: a pattern of
    strptime, such as %d.%m.%Y"""
    min_count: Count = 10
    """smallest number of rows that a silo reports when silos agree on the scaling of a table: a
    column with fewer values, or a category with fewer rows, is left out"""
    spelling: Literal["", "merge", "keep"] = ""
    """names of classes, categories, groups, domains and subjects that are written in several ways
    (Yes, yes, 1): merge takes them as one, the commonest spelling; keep as different. By default
    they are refused"""
    fit: Literal["stretch", "crop"] = "stretch"
    """how images come to --size: stretch scales both sides; crop scales the shorter side and cuts
    out the middle"""
    pixel_window: tuple[float, ...] = ()
    """LOW HIGH: pixel values that become black and white, for images of more than 8 bits"""
    colour: Literal["auto", "rgb", "grey"] = "auto"
    """channels of images: rgb has three, grey has one, auto has three if any image has colour"""
    tokenizer: str = ""
    """how texts become tokens: words (silos need not agree on them), or a folder with the
    tokenizer.json of a model; by default the tokenizer of --model hf:FOLDER, else words"""
    text_length: Annotated[int, Range(least=1, most=100_000)] = 256
    """largest number of tokens of a text; the rest is cut off"""
    augment_crop: CountOrZero = 0
    """black pixels added around each training image before an image of its size is cut out at
    random"""
    augment_flip: bool = False
    """mirror training images left and right, at random"""
    augment_rotation: Annotated[float, Range(least=0, most=180)] = 0.0
    """largest angle in degrees by which training images are rotated, at random"""

    def __post_init__(self) -> None:
        for name in _names_of_columns():
            value = getattr(self, name)
            if isinstance(value, tuple):
                object.__setattr__(self, name, tuple(frames.seen(value)))
            else:
                object.__setattr__(self, name, frames.seen([value])[0])
        if self.dates and "%" not in self.dates:
            raise UserError(f"--dates is a pattern, as in --dates=%d.%m.%Y, not {self.dates!r}")
        if self.pixel_window and (
            len(self.pixel_window) != 2 or not self.pixel_window[0] < self.pixel_window[1]
        ):
            raise UserError(
                f"--pixel-window needs two values, low and high, not {list(self.pixel_window)}"
            )
        if sum(map(bool, (self.image_column, self.text_column, self.array_column))) > 1:
            raise UserError(
                "give one of --image-column, --text-column and --array-column: a sample is of one "
                "kind"
            )
        for option in ("feature_columns", "label_column"):
            if named := {*self.drop_columns}.intersection(getattr(self, option)):
                flag = option.replace("_", "-")
                raise UserError(
                    f"column {min(named)!r} is in --{flag} and in --drop-columns: leave it out of "
                    "one"
                )
        own = self.named
        if self.domain_column:
            # a silo may be a domain of its own
            own.remove(self.domain_column)
        if twice := named_twice(own):
            raise UserError(
                f"column {twice!r} cannot be two things: give the name of each column once"
            )

    def chosen(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as plain values."""
        default = asdict(Reading())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    @property
    def writing(self) -> Writing:
        """Return how tables are written."""
        return Writing(self.missing, self.decimal, self.dates)

    def like(self, inputs: object) -> "Reading":
        """Return these options with the categories and the marks of missing values that a trained
        model knows.
        """
        if not isinstance(inputs, Table):
            return self
        missing = dict.fromkeys((*self.missing, *inputs.missing))
        return replace(self, categorical_columns=inputs.categorical, missing=tuple(missing))

    def located(self) -> "Reading":
        """Return these options so that they mean the same in every folder."""
        found = replace(self, sample_kind=outside.located(self.sample_kind))
        if self.schema:
            found = replace(found, schema=str(Path(self.schema).expanduser().absolute()))
        return found

    def with_schema(self) -> "Reading":
        """Return these options with the columns that the schema names, if there is one."""
        if not self.schema:
            return self
        told = schemas.read(self.schema).options()
        features = [
            name
            for name in self.feature_columns or told["feature_columns"]
            if name not in self.drop_columns
        ]
        for name, value in told.items():
            own = getattr(self, name)
            differs = own and own != value
            if name in ("feature_columns", "categorical_columns"):
                differs = not set(own) <= set(value)
            # marks of both count
            if differs and name != "missing":
                flag = name.replace("_", "-")
                given = list(own) if isinstance(own, tuple) else own
                raise UserError(
                    f"--{flag}={given!r} and the schema {self.schema} differ: leave out --{flag}"
                )
        told["feature_columns"] = tuple(features)
        told["categorical_columns"] = tuple(
            name for name in told["categorical_columns"] if name in features
        )
        told["missing"] = tuple(dict.fromkeys((*self.missing, *told["missing"])))
        return replace(self, **told)

    @property
    def augment(self) -> Augment:
        """Return how training images are augmented, at the size of training."""
        return Augment(self.augment_crop, self.augment_flip, float(self.augment_rotation))

    def without_augment(self) -> "Reading":
        """Return the options for reading samples; augmentation does not belong to them."""
        return replace(self, augment_crop=0, augment_flip=False, augment_rotation=0.0)

    @property
    def named(self) -> list[str]:
        """Return the columns that are named for what they mean."""
        samples = (self.image_column, self.text_column, self.array_column)
        owners = (self.group_column, self.domain_column, self.subject_column, self.time_column)
        return [*filter(None, (*samples, *owners)), *self.label_column]

    @property
    def names_columns(self) -> bool:
        """Return whether any column is named."""
        return any(getattr(self, name) for name in _names_of_columns())

    def for_model(self, model: str) -> "Reading":
        """Return these options with the tokenizer of the trained model, unless another was
        named.
        """
        scheme, _, name = model.partition(":")
        folder = Path(name).expanduser()
        open_ = self.text_column and not self.tokenizer
        if open_ and scheme == "hf" and name and folder.is_dir():
            return replace(self, tokenizer=str(folder.absolute()))
        return self

    def images(self, size: int | None) -> Images:
        """Return what images become."""
        if self.fit == "crop" and not size:
            raise UserError("--fit=crop needs --size, the size to cut out")
        return Images(size or 0, self.fit, self.pixel_window, self.colour)


def _names_of_columns() -> list[str]:
    """Return the fields of `Reading` that name columns."""
    return [f.name for f in fields(Reading) if f.name.endswith(("_column", "_columns"))]


def reading(columns: dict[str, Any]) -> Reading:
    """Return the `Reading` with these fields, and those that its schema names; `label_column` may
    be one name.
    """
    return made(Reading, listed(columns), what="option").with_schema()


def listed(values: Any) -> Any:
    """Return `values` of a `Reading`, in which one column or mark may replace a list of them."""
    if not isinstance(values, dict):
        return values
    found = dict(values)
    for name, value in values.items():
        several = name in ("label_column", "missing") or name.endswith("_columns")
        if several and isinstance(value, str):
            found[name] = (value,)
        if name == "schema" and isinstance(value, PathLike):
            found[name] = fspath(value)
    return found


@dataclass(frozen=True)
class Columns:
    """Names of columns that are not called `image`, `label`, `domain` and `group`."""

    image: str = "image"
    label: str = "label"
    domain: str = "domain"
    group: str = "group"


USUAL = Columns()


def samples(table: Any, source: str, reading: Reading, usual: Columns) -> Raw:
    """Take samples, labels, domains and groups out of a `pyarrow.Table`, as `reading` or else
    `usual` says.
    """
    targets = reading.label_column or _label(table, usual)
    table = _with_names(table, {*targets, reading.domain_column or usual.domain})
    _meet_schema(table, source, reading)
    _check_names(table, source, reading)
    if not targets and not reading.text_column:
        raise UserError(
            f"{source} has no column 'label': say which one holds the labels (--label-column); it "
            f"has: {', '.join(table.column_names)}."
        )
    domain = reading.domain_column or _usual_owner(table, usual.domain, "domain", reading)
    group = reading.group_column or _usual_owner(table, usual.group, "group", reading)
    subject = reading.subject_column
    time = reading.time_column
    for name in (subject, time):
        if name in targets:
            raise UserError(
                f"column {name!r} holds the labels: name others by --subject-column and "
                "--time-column"
            )
    meant = {*targets, domain, group, subject, time}
    kind, chosen = _kind(table, source, reading, usual, meant)
    if kind is not Table and usual == USUAL and not reading.schema:
        _say_left(table, source, kind, meant.union(chosen, reading.drop_columns))
    measured = [*targets, *filter(None, [time])]
    if kind is Table:
        measured += chosen
    cells = Cells(table, source, reading.writing, measured)
    if kind is Table:
        numbers: tuple[str, ...] = ()
        if reading.schema:
            numbers = schemas.read(reading.schema).of_kind("number", "date")
        read = cells.features(chosen, reading.categorical_columns, numbers)
    else:
        read = kind.of_cells(table.select(chosen), source)
    label: NDArray[Any] = np.zeros(len(table), dtype=np.int64)
    classes: tuple[str, ...] = ()
    if len(targets) == 1:
        classes = _names(table, targets[0], b"label_names")
    if len(targets) == 1 and kind is Images and holds_files(table[targets[0]]):
        label = masks(kind.of_cells(table.select(targets), source), read, source)
        targets = ()
    elif targets:
        label = cells.labels(targets)
    return Raw(
        source,
        read,
        label,
        cells.owners(domain),
        cells.owners(group),
        classes,
        _names(table, domain, b"domain_names"),
        targets,
        cells.owners(subject),
        cells.time(time),
        kind=kind,
    )


def _check_names(table: Any, source: str, reading: Reading) -> None:
    """Refuse columns that are named and not there; another silo may have those to leave out."""
    for name in (*reading.named, *reading.feature_columns):
        if name not in table.column_names:
            raise unknown(f"column of {source}", name, table.column_names)
    marked = [mark.partition("=")[0] for mark in reading.missing if "=" in mark]
    others = {*table.column_names} - {*reading.drop_columns}
    for name in dict.fromkeys((*reading.drop_columns, *marked)):
        if name not in table.column_names:
            hint = f"it has {', '.join(table.column_names)}"
            if near := nearest(name, others, n=1, cutoff=0.8):
                hint = f"did you mean {near[0]!r}?"
            tell(
                f"{source} has no column {name!r}, which is named to leave it out or its marks: "
                f"{hint}"
            )


def _usual_owner(table: Any, usual: str, default: str, reading: Reading) -> str:
    """Return the column of owners if none is named; "" if there is none."""
    # who names a column names all that mean something
    named = usual == default and reading.names_columns
    if named or usual not in table.column_names:
        return ""
    return usual


def _say_left(table: Any, source: str, kind: type[Inputs], meant: Collection[str]) -> None:
    """Name columns that have no meaning next to samples of another kind than rows."""
    left = not_in(meant, table.column_names)
    if left:
        tell(
            f"{source} has columns that no model of {kind.words} gets ({', '.join(left)}): leave "
            "them out by --drop-columns, or say what they mean, as by --subject-column"
        )


def _meet_schema(table: Any, source: str, reading: Reading) -> None:
    """Refuse a table that does not meet the study's schema, and name the columns that the schema
    does not have.
    """
    if not reading.schema:
        return
    schema = schemas.read(reading.schema)
    known = {name: _names(table, name, b"label_names") for name in schema.label_column}
    schemas.refuse(schemas.violations(table, source, schema, reading.writing, known), source)
    own = {*schema.columns, *reading.drop_columns, reading.group_column, reading.domain_column}
    if more := not_in(own, table.column_names):
        tell(
            f"{source} has {counted(len(more), 'column')} that the schema does not name and no "
            f"model gets: {', '.join(more)}"
        )


def kind_of(reading: Reading) -> type[Inputs]:
    """Return the kind of samples that is named, or else images."""
    if not reading.sample_kind:
        return Images
    found = named(reading.sample_kind)
    if found in (Images, Table, Tokens, Arrays):
        raise UserError(
            f"{found.words} are told by the data: leave out --sample-kind, or name a kind from "
            "outside"
        )
    return found


def _label(table: Any, usual: Columns) -> tuple[str, ...]:
    """Return the column of labels, if none is named: the usual one, or the only one of classes in
    Hugging Face data.
    """
    for name in ("label", usual.label):
        if name in table.column_names:
            return (name,)
    named = tuple(name for name in table.column_names if _names(table, name, b""))
    if len(named) > 1:
        return ()
    return named


def _kind(
    table: Any, source: str, reading: Reading, usual: Columns, meant: set[str]
) -> tuple[type[Inputs], list[str]]:
    """Return the kind of samples, and the columns that hold them."""
    left = not_in(meant.union(reading.drop_columns), table.column_names)
    columns = list(reading.feature_columns) or left
    if reading.sample_kind:
        return kind_of(reading), columns
    image = image_column(table, reading, usual, meant)
    if image is not None and not reading.feature_columns:
        return Images, [image]
    if reading.text_column:
        return Tokens, [reading.text_column]
    lists = [n for n in table.column_names if n not in meant and is_list(table[n].type)]
    if reading.array_column or (len(lists) == 1 and not reading.feature_columns):
        return Arrays, [reading.array_column or lists[0]]
    for name in columns:
        if name in meant:
            raise UserError(
                f"column {name!r} cannot be a feature and have another meaning: leave it out of one"
            )
    if not columns:
        raise UserError(f"{source} has no column left to learn from: drop fewer")
    for name in reading.categorical_columns:
        if name not in columns:
            raise UserError(
                f"{source} has no column {name!r} to take as categories: it has "
                f"{', '.join(columns)}"
            )
    return Table, columns


def image_column(
    table: Any, reading: Reading, usual: Columns = USUAL, meant: set[str] | None = None
) -> str | None:
    """Return the column of images: the one that is named, else the usual one, else the first of
    encoded images.
    """
    if reading.image_column or reading.text_column or reading.array_column:
        return reading.image_column or None
    left = not_in(meant or reading.label_column, table.column_names)
    for name in ("image", usual.image):
        # bytes, or paths
        if name in left and (is_encoded(table[name].type) or is_text(table[name].type)):
            return name
    for name in left:
        if is_encoded(table[name].type):
            return name
    return None


def _with_names(table: Any, kept: Collection[str]) -> Any:
    """Return the table with names in place of the numbers of classes, as Hugging Face stores them,
    in other columns.
    """
    import pyarrow as pa

    for place, name in enumerate(table.column_names):
        if name not in kept and (names := _names(table, name, b"")):
            texts = [None if k is None or k < 0 else names[k] for k in table[name].to_pylist()]
            table = table.set_column(place, name, pa.array(texts).dictionary_encode())
    return table


def _names(table: Any, column: str, key: bytes) -> tuple[str, ...]:
    """Return the names that the schema gives to a column's integers, under our own key or in
    Hugging Face features.
    """
    metadata = table.schema.metadata or {}
    try:
        if key in metadata:
            return tuple(map(str, json.loads(metadata[key])))
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
        return tuple(map(str, features[column]["names"]))
    except (ValueError, KeyError, TypeError):  # no names, or metadata of some other kind
        return ()
