"""What samples are, and how raw ones become tensors: images, rows of a table, tokens, arrays.

Each kind is a small dataclass of plain values. A run folder keeps it: files given later become the same tensors.
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ekiden.base.checks import Checked, Count, CountOrZero
from ekiden.base.codec import made, reading
from ekiden.base.errors import UserError, unknown

PAD = 0
"""the token that fills up short texts"""


@dataclass(frozen=True)
class Images(Checked):
    """Pictures: (C, H, W) uint8. `Dataset.mean` and `std` scale them.

    Attributes:
        size: side in pixels that all are brought to; 0: they keep theirs.
        fit: how. stretch: both sides are scaled to `size`. crop: the shorter side is scaled to `size`, then the middle
            is cut out.
        window: the values of the file that become 0 and 255, for pixels of more than 8 bits; (): those of the file's
            type.
    """

    size: CountOrZero = 0
    fit: Literal["stretch", "crop"] = "stretch"
    window: tuple[float, ...] = ()

    def encode(self, raw: Any) -> Tensor:
        """Return (n, C, H, W) uint8 for files, encoded bytes or opened pictures.

        Raises:
            UserError: one cannot be decoded, or they differ in size.
        """
        from ekiden.data.decode import decode  # noqa: PLC0415  (it needs this module)
        from ekiden.data.files import Raw  # noqa: PLC0415

        images = list(raw)
        return decode([Raw("the images given", images, np.zeros(len(images), dtype=np.int64))], self)[0]


@dataclass(frozen=True)
class Table(Checked):
    """Rows of a table: (d,) float32.

    A row holds the numbers, scaled; then, for each column in which numbers are missing, 1 where one is and 0 elsewhere;
    then the code of each category. A missing number is encoded as the mean, that is 0. Code 0 is every category that is
    not in the vocabulary; the others count from 1.

    Before the silos have agreed (`Dataset.least`), rows are float64: numbers as they are, NaN where one is missing, and
    codes of all categories that occur.

    Attributes:
        numeric: names of the columns of numbers.
        categorical: names of the columns of categories.
        centre: per numeric column, subtracted.
        scale: per numeric column, divided by.
        gaps: the numeric columns that say where numbers are missing.
        vocabularies: per categorical column, its known categories; "" is a missing one.
        agreed: whether scaling and vocabularies are agreed. Before that, rows are float64: numbers as they are, NaN
            where one is missing, and codes of all categories that occur.
    """

    numeric: tuple[str, ...]
    categorical: tuple[str, ...]
    centre: tuple[float, ...] = ()
    scale: tuple[float, ...] = ()
    gaps: tuple[str, ...] = ()
    vocabularies: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        agreed = len(self.scale) == len(self.centre) == len(self.numeric) and all(s > 0 for s in self.scale)
        if (self.scale and not agreed) or not set(self.gaps) <= set(self.numeric):
            raise UserError("the columns of a table and their scaling do not go together: agree on them again")
        if self.vocabularies and len(self.vocabularies) != len(self.categorical):
            raise UserError("the columns of a table and their categories do not go together: agree on them again")

    @property
    def numbers(self) -> int:
        """How many values of a row are numbers; codes follow."""
        return len(self.numeric) + len(self.gaps)

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """How many codes each categorical column has."""
        return tuple(len(names) + 1 for names in self.vocabularies)

    def encode(self, raw: Any) -> Tensor:
        """Return (n, d) float32 for a path, a frame (pandas, polars, Arrow), or a dict of columns.

        Raises:
            UserError: a column is missing, or holds text where numbers are expected.
        """
        from ekiden.data.frames import arrow  # noqa: PLC0415  (it needs this module)
        from ekiden.data.tabular import encode, rows  # noqa: PLC0415

        table = arrow(raw, "the table given")
        return encode(*rows(table, self, "the table given"), self)


@dataclass(frozen=True)
class Tokens(Checked):
    """Texts: (L,) int64 tokens, filled up with `PAD`; batches are cut to their longest text.

    Attributes:
        tokenizer: words: each word's hash, which needs no agreement; or a folder with the tokenizer of a model.
        vocabulary: how many different tokens there are.
        length: most tokens of a text; the rest is cut off.
        digest: of the tokenizer's file; "" for words.
        pad: the token that fills up.
    """

    tokenizer: str = "words"
    vocabulary: Count = 8192
    length: Count = 256
    digest: str = ""
    pad: CountOrZero = PAD

    def encode(self, raw: Any) -> Tensor:
        """Return (n, L) int64 for a list of texts, L being that of the longest one.

        Raises:
            UserError: the tokenizer is not there, or is another one.
        """
        from ekiden.data.texts import encode  # noqa: PLC0415  (it needs this module)

        return encode(list(raw), self)

    def mask(self, tokens: Tensor) -> Tensor:
        """Return (b, L) bool, where there is text."""
        return tokens != self.pad

    def lengths(self, tokens: Tensor) -> Tensor:
        """Return (n,) int64, how many tokens each text has."""
        places = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
        return (self.mask(tokens) * places).amax(dim=1)


@dataclass(frozen=True)
class Arrays(Checked):
    """Numbers of one shape: signals (channels, time), embeddings (d,), or any others; float32, used as they are."""

    def encode(self, raw: Any) -> Tensor:
        """Return (n, ...) float32 for an array, or a path of arrays.

        Raises:
            UserError: the samples differ in shape, or hold NaN.
        """
        from ekiden.data.arrays import encode  # noqa: PLC0415  (it needs this module)

        return encode(raw, "the arrays given")


Inputs: TypeAlias = Images | Table | Tokens | Arrays
_KINDS: dict[str, type[Inputs]] = {"images": Images, "table": Table, "tokens": Tokens, "arrays": Arrays}


def kind(inputs: Inputs) -> str:
    """Return what they are called: images, table, tokens or arrays."""
    return type(inputs).__name__.lower()


def to_json(inputs: Inputs) -> dict[str, Any]:
    """As plain values."""
    return {"kind": kind(inputs), **asdict(inputs)}


def from_json(values: Any) -> Inputs:
    """The inputs with these plain values.

    Raises:
        UserError: they are none of this version.
    """
    if not isinstance(values, dict) or values.get("kind") not in _KINDS:
        name = values.get("kind") if isinstance(values, dict) else values
        raise unknown("kind of inputs", str(name), _KINDS)
    with reading("the inputs", "the version of Ekiden that wrote them"):
        return made(_KINDS[values["kind"]], {name: value for name, value in values.items() if name != "kind"})


def of_tensor(x: Tensor) -> Inputs:
    """What samples (n, ...) are of which nothing else is known."""
    if x.dtype == torch.int64:
        return Tokens(vocabulary=int(x.max()) + 1 if x.numel() else 1, length=x.shape[1])
    return Images() if x.dtype == torch.uint8 else Arrays()


def terms(inputs: Inputs) -> str:
    """What parties must agree on, as text; "" where plain. A tokenizer is known by its digest, wherever its file is."""
    if isinstance(inputs, Tokens) and inputs.digest:
        inputs = replace(inputs, tokenizer="model")
    if isinstance(inputs, Images) and inputs == Images(inputs.size):  # the shape says it, as in older runs
        return ""
    return "" if is_plain(inputs) else json.dumps(to_json(inputs), sort_keys=True)


def of_terms(text: str, x: Tensor) -> Inputs:
    """The inputs in a text that `terms` wrote; where it is empty, those of samples like `x`.

    Raises:
        UserError: it holds none.
    """
    try:
        return from_json(json.loads(text)) if text else of_tensor(x)
    except ValueError:
        raise UserError("the inputs cannot be read: they are not valid JSON") from None


def is_plain(inputs: Inputs) -> bool:
    """Whether nothing is to be told of them: images of their own size, or arrays."""
    return inputs in (Images(), Arrays())
