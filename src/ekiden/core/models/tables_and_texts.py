"""Networks of tables, of any numbers, and of texts."""

from dataclasses import dataclass
from functools import partial
from math import ceil, sqrt
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ekiden.core.base.constants import constant
from ekiden.core.data.inputs import Inputs
from ekiden.core.models.split import SplitNetwork


@runtime_checkable
class TableRows(Protocol):
    """What networks need to know of a table (`ekiden.readers.kinds.Table`)."""

    @property
    def numeric(self) -> tuple[str, ...]: ...
    @property
    def centre(self) -> tuple[float, ...]: ...
    @property
    def scale(self) -> tuple[float, ...]: ...
    @property
    def gaps(self) -> tuple[str, ...]: ...
    @property
    def categorical(self) -> tuple[str, ...]: ...
    @property
    def vocabularies(self) -> tuple[tuple[str, ...], ...]: ...
    @property
    def numbers(self) -> int: ...
    @property
    def cardinalities(self) -> tuple[int, ...]: ...


@runtime_checkable
class Tokenised(Protocol):
    """What networks need to know of texts (`ekiden.readers.kinds.Tokens`)."""

    @property
    def tokenizer(self) -> str: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def pad(self) -> int: ...


OTHER = (
    " = other"  # the end of the name of a term for all categories that are not in the vocabulary
)


@dataclass(frozen=True)
class Term:
    """A number that enters a linear network: (value in its own unit - centre) / scale."""

    name: str
    centre: float = 0.0
    scale: float = 1.0
    column: str = ""  # that it comes from, if that has another name


def terms(inputs: Inputs | None, width: int) -> list[Term]:
    """Return what enters the head of a linear network, in order.

    Of a table: its numbers; for each column with gaps whether the number is missing; for each
    category but the first one whether the row has it. `other` is any category that is not in the
    vocabulary. A sample that is not a row of a table has `width` numbers.
    """
    if not isinstance(inputs, TableRows):
        return [Term(f"x{k}") for k in range(width)]
    found = [Term(*one) for one in zip(inputs.numeric, inputs.centre, inputs.scale, strict=True)]
    found += [Term(f"{name} missing", column=name) for name in inputs.gaps]
    for name, known in zip(inputs.categorical, inputs.vocabularies, strict=True):
        ends = [OTHER, *(f" = {text or 'missing'}" for text in known)]
        found += [Term(name + ends[code], column=name) for code in _levels(known)]
    return found


def _levels(known: tuple[str, ...]) -> tuple[int, ...]:
    """Return the codes that get an indicator: all but that of the first category that is not a
    gap.
    """
    usual = next((code for code, name in enumerate(known, 1) if name), 1)
    return (*range(usual), *range(usual + 1, len(known) + 1))


class Indicators(nn.Module):
    """Makes what `terms` lists of the rows of a table."""

    def __init__(self, table: TableRows) -> None:
        super().__init__()
        self.numbers = table.numbers
        self.levels = tuple(map(_levels, table.vocabularies))

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) rows to (b, D)."""
        parts = [x[:, : self.numbers]]
        for column, levels in enumerate(self.levels, self.numbers):
            parts.append((x[:, column, None] == constant(levels, x.dtype, x.device)).to(x))
        return torch.cat(parts, dim=1)


class Linear(SplitNetwork):
    """A linear network that knows the names of what enters its head."""

    def __init__(
        self, features: nn.Module, names: list[str], columns: list[str], outputs: int
    ) -> None:
        super().__init__(features, nn.Linear(len(names), outputs))
        # (D,) of them
        self.names = names
        # (D,) of the data, from which they come
        self.columns = columns


def linear(shape: tuple[int, ...], classes: int, inputs: Inputs | None = None) -> Linear:
    """Numbers, and indicators of categories, times weights: as in a regression."""
    entering = terms(inputs, torch.Size(shape).numel())
    names = [t.name for t in entering]
    columns = [t.column or t.name for t in entering]
    features = Indicators(inputs) if isinstance(inputs, TableRows) else nn.Flatten()
    return Linear(features, names, columns, classes)


# width of an embedding in the MLP
_WIDEST = 16
# width of a column's token
_COLUMN = 32
# standard deviations; numbers beyond are outliers that would dominate the first layer
_FAR = 5.0
# of a text's token
_WIDTH = 64


class Row(nn.Module):
    """Splits a row into numbers and one embedding for each category."""

    def __init__(self, table: TableRows, widths: list[int]) -> None:
        super().__init__()
        self.numbers = table.numbers
        self.embeddings = nn.ModuleList(map(nn.Embedding, table.cardinalities, widths))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(b, d) rows to (b, numbers) and, for each category, (b, width)."""
        codes = x[:, self.numbers :].long()
        return x[:, : self.numbers].clamp(-_FAR, _FAR), [
            e(codes[:, k]) for k, e in enumerate(self.embeddings)
        ]


class MlpFeatures(nn.Module):
    """Numbers next to embeddings, through two layers of 128 and 64 with ReLU."""

    def __init__(self, table: TableRows) -> None:
        super().__init__()
        widths = [min(_WIDEST, ceil(sqrt(codes)) + 1) for codes in table.cardinalities]
        self.row = Row(table, widths)
        self.layers = nn.Sequential(
            nn.Linear(table.numbers + sum(widths), 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) rows to (b, 64)."""
        numbers, embedded = self.row(x)
        features: Tensor = self.layers(torch.cat([numbers, *embedded], dim=1))
        return features


class TableTransformerFeatures(nn.Module):
    """A token for each column, then attention: FT-Transformer (Gorishniy et al., 2021,
    https://arxiv.org/abs/2106.11959).

    The number x of column j becomes x w_j + b_j. A further token gathers what the head gets.
    """

    def __init__(self, table: TableRows) -> None:
        super().__init__()
        self.row = Row(table, [_COLUMN] * len(table.categorical))
        self.weight = nn.Parameter(torch.randn(table.numbers, _COLUMN) / sqrt(_COLUMN))
        self.bias = nn.Parameter(torch.zeros(table.numbers, _COLUMN))
        self.gather = nn.Parameter(torch.randn(1, 1, _COLUMN) / sqrt(_COLUMN))
        self.blocks = Blocks(_COLUMN)
        self.norm = nn.LayerNorm(_COLUMN)

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) rows to (b, 32)."""
        numbers, embedded = self.row(x)
        tokens = [self.gather.expand(len(x), -1, -1), numbers[:, :, None] * self.weight + self.bias]
        tokens += [e[:, None] for e in embedded]
        out: Tensor = self.norm(self.blocks(torch.cat(tokens, dim=1))[:, 0])
        return out


class Blocks(nn.Module):
    """Two transformer blocks of four heads, normalised before attention and before the two layers
    (pre-norm), without dropout.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        block = partial(
            nn.TransformerEncoderLayer,
            width,
            4,
            2 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.ModuleList([block(), block()])

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """(b, L, width) tokens; `padding` (b, L) is true where there is none."""
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


def table_mlp(table: TableRows, classes: int) -> SplitNetwork:
    """An MLP of 128 and 64 over numbers and embeddings of categories."""
    return SplitNetwork(MlpFeatures(table), nn.Linear(64, classes))


def table_transformer(table: TableRows, classes: int) -> SplitNetwork:
    """Two blocks of attention over the columns, like FT-Transformer."""
    return SplitNetwork(TableTransformerFeatures(table), nn.Linear(_COLUMN, classes))


class MeanFeatures(nn.Module):
    """The mean of the tokens' embeddings, through one layer with ReLU."""

    def __init__(self, tokens: Tokenised) -> None:
        super().__init__()
        self.pad = tokens.pad
        self.embedding = nn.Embedding(tokens.vocabulary, _WIDTH, padding_idx=tokens.pad)
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """(b, L) tokens to (b, 64)."""
        there = (x != self.pad).unsqueeze(2)
        mean = (self.embedding(x) * there).sum(1) / there.sum(1).clamp(min=1)
        features: Tensor = self.layers(mean)
        return features


class TextTransformerFeatures(nn.Module):
    """Embeddings of tokens and places, two blocks of attention, then the mean over the tokens."""

    def __init__(self, tokens: Tokenised) -> None:
        super().__init__()
        self.pad = tokens.pad
        self.embedding = nn.Embedding(tokens.vocabulary, _WIDTH, padding_idx=tokens.pad)
        self.places = nn.Parameter(torch.randn(tokens.length, _WIDTH) * 0.02)
        self.blocks = Blocks(_WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(b, L) tokens to (b, 64)."""
        there = x != self.pad
        read = there.clone()
        # attention over nothing is NaN, so an empty text reads its first place
        read[:, 0] = True
        out = self.norm(self.blocks(self.embedding(x) + self.places[: x.shape[1]], ~read))
        out = out * there.unsqueeze(2)
        mean: Tensor = out.sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return mean


def text_mean(tokens: Tokenised, classes: int) -> SplitNetwork:
    """The mean of embeddings of 64, a layer of 64: order does not matter."""
    return SplitNetwork(MeanFeatures(tokens), nn.Linear(_WIDTH, classes))


def text_transformer(tokens: Tokenised, classes: int) -> SplitNetwork:
    """Two blocks of attention of width 64 over the tokens."""
    return SplitNetwork(TextTransformerFeatures(tokens), nn.Linear(_WIDTH, classes))
