"""Options for reading the user's files: what each column means, and how samples get one shape."""

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ekiden.base import outside
from ekiden.base.checks import Checked, Count, CountOrZero, Range
from ekiden.base.codec import made
from ekiden.base.errors import UserError
from ekiden.data.augment import Augment
from ekiden.data.cells import Writing
from ekiden.data.decode import Images
from ekiden.data.tables import Table


@dataclass(frozen=True)
class Reading(Checked):
    """What each column means, and how samples get one shape."""

    sample_kind: str = ""
    """kind of samples from outside Ekiden: FILE.py:NAME, or an entry point ekiden.kinds of a package; images, texts,
    arrays and tables are told apart by the data"""
    image_column: str = ""
    """column of images: encoded bytes, or paths relative to the table; by default `image`, if there is one"""
    text_column: str = ""
    """column of texts"""
    array_column: str = ""
    """column of lists of numbers of one length: signals, embeddings"""
    label_column: tuple[str, ...] = ()
    """column of labels; several columns of 0 and 1: one label each. By default `label`"""
    group_column: str = ""
    """column that says which silo a row belongs to: a hospital, a writer"""
    subject_column: str = ""
    """column that says whom or what a row is about (a patient, a writer, a device): all rows of one are only in
    training, only in validation or only in the test"""
    time_column: str = ""
    """column of dates (2024-01-31) or numbers: each silo trains on its past and is tested on its most recent rows"""
    domain_column: str = ""
    """column of domains, such as the kind of scanner"""
    feature_columns: tuple[str, ...] = ()
    """columns of a table that the model gets; by default all columns without another meaning"""
    drop_columns: tuple[str, ...] = ()
    """columns of a table that the model does not get: names, row numbers"""
    categorical_columns: tuple[str, ...] = ()
    """columns of numbers that are codes of categories, such as postcodes"""
    missing: tuple[str, ...] = ()
    """further cells of a table that mark a missing value, such as n.d. or -999"""
    decimal: Literal["", "point", "comma"] = ""
    """the sign before decimals; by default the one that the numbers of the table show"""
    dates: Literal["", "day-first", "month-first"] = ""
    """whether 03/04/2024 begins with the day or with the month; by default what the dates of the column show"""
    min_count: Count = 10
    """smallest number of rows that a silo reports when silos agree on the scaling of a table: a column with fewer
    values, or a category with fewer rows, is left out"""
    spelling: Literal["", "merge", "keep"] = ""
    """names of classes and categories that differ in case or blanks only (Yes, yes): merge takes them as one, the
    commonest spelling; keep as different. By default they are refused"""
    fit: Literal["stretch", "crop"] = "stretch"
    """how images come to --size: stretch scales both sides; crop scales the shorter side and cuts out the middle"""
    pixel_window: tuple[float, ...] = ()
    """LOW HIGH: pixel values that become black and white, for images of more than 8 bits"""
    colour: Literal["auto", "rgb", "grey"] = "auto"
    """channels of images: rgb has three, grey has one, auto has three if any image has colour"""
    tokenizer: str = ""
    """how texts become tokens: words (silos need not agree on them), or a folder with the tokenizer.json of a model;
    by default the tokenizer of --model hf:FOLDER, else words"""
    text_length: Annotated[int, Range(least=1, most=100_000)] = 256
    """largest number of tokens of a text; the rest is cut off"""
    augment_crop: CountOrZero = 0
    """black pixels added around each training image before an image of its size is cut out at random"""
    augment_flip: bool = False
    """mirror training images left and right, at random"""
    augment_rotation: Annotated[float, Range(least=0, most=180)] = 0.0
    """largest angle in degrees by which training images are rotated, at random"""

    def __post_init__(self) -> None:
        if self.pixel_window and (len(self.pixel_window) != 2 or not self.pixel_window[0] < self.pixel_window[1]):
            raise UserError(
                f"--pixel-window takes two values, low and high, not {' '.join(map(str, self.pixel_window))}"
            )
        if sum(map(bool, (self.image_column, self.text_column, self.array_column))) > 1:
            raise UserError("give one of --image-column, --text-column and --array-column: a sample is of one kind")
        if named := [c for c in self.drop_columns if c in self.feature_columns]:
            raise UserError(f"column {named[0]!r} is in --feature-columns and in --drop-columns: leave it out of one")
        own = (self.image_column, self.text_column, self.array_column, *self.label_column)
        own = (*own, self.group_column, self.subject_column, self.time_column)
        if twice := next((c for c in own if c and own.count(c) > 1), None):
            raise UserError(f"column {twice!r} cannot be two things: give each flag its own column")

    def chosen(self) -> dict[str, Any]:
        """Return the options that differ from the defaults, as plain values."""
        default = asdict(Reading())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    @property
    def writing(self) -> Writing:
        """Return how tables are written."""
        return Writing(self.missing, self.decimal, self.dates)

    def like(self, inputs: object) -> "Reading":
        """Return these options with the categories and the marks of missing values that a trained model knows."""
        if not isinstance(inputs, Table):
            return self
        missing = dict.fromkeys((*self.missing, *inputs.missing))
        return replace(self, categorical_columns=inputs.categorical, missing=tuple(missing))

    def located(self) -> "Reading":
        """Return these options so that they mean the same in every folder."""
        return replace(self, sample_kind=outside.located(self.sample_kind))

    @property
    def augment(self) -> Augment:
        """Return how training images are augmented, at the size of training."""
        return Augment(self.augment_crop, self.augment_flip, float(self.augment_rotation))

    def without_augment(self) -> "Reading":
        """Return the options for reading samples; augmentation does not belong to them."""
        return replace(self, augment_crop=0, augment_flip=False, augment_rotation=0.0)

    @property
    def names_columns(self) -> bool:
        """Return whether any column is named."""
        return any(getattr(self, f.name) for f in fields(self) if f.name.endswith(("_column", "_columns")))

    def for_model(self, model: str) -> "Reading":
        """Return these options with the tokenizer of the trained model, unless another was named."""
        folder = model.removeprefix("hf:")
        if not self.text_column or self.tokenizer or folder in (model, "") or not Path(folder).expanduser().is_dir():
            return self
        return replace(self, tokenizer=str(Path(folder).expanduser().absolute()))

    def images(self, size: int | None) -> Images:
        """Return what images become."""
        if self.fit == "crop" and not size:
            raise UserError("--fit crop needs --size, the size to cut out")
        return Images(size or 0, self.fit, self.pixel_window, self.colour)


def reading(columns: dict[str, Any]) -> Reading:
    """Return the `Reading` with these fields; `label_column` may be one name."""
    return made(Reading, listed(columns), what="option")


def listed(values: Any) -> Any:
    """Return `values` of a `Reading`, in which one column or mark may replace a list of them."""
    if not isinstance(values, dict):
        return values
    several = {f.name for f in fields(Reading) if f.name in ("label_column", "missing") or f.name.endswith("_columns")}
    return {k: (v,) if k in several and isinstance(v, str) else v for k, v in values.items()}
