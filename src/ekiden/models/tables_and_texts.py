"""Networks for rows of tables and for texts (`ekiden.data.kinds`), trained from scratch."""

from math import ceil, sqrt

import torch
from torch import Tensor, nn

from ekiden.data.kinds import Table, Tokens
from ekiden.models.split import SplitNetwork

_WIDEST = 16  # width of an embedding in the MLP
_COLUMN = 32  # width of a column's token
_FAR = 5.0  # standard deviations; numbers beyond are outliers that would dominate the first layer
_WIDTH = 64  # of a text's token


class Row(nn.Module):
    """Splits a row into numbers and one embedding for each category."""

    def __init__(self, table: Table, widths: list[int]) -> None:
        super().__init__()
        self.numbers = table.numbers
        self.embeddings = nn.ModuleList(
            nn.Embedding(codes, width) for codes, width in zip(table.cardinalities, widths, strict=True)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """(b, d) rows to (b, numbers) and, for each category, (b, width)."""
        codes = x[:, self.numbers :].long()
        return x[:, : self.numbers].clamp(-_FAR, _FAR), [e(codes[:, k]) for k, e in enumerate(self.embeddings)]


class MlpFeatures(nn.Module):
    """Numbers next to embeddings, through two layers of 128 and 64 with ReLU."""

    def __init__(self, table: Table) -> None:
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
    """A token for each column, then attention: FT-Transformer (Gorishniy et al., 2021, https://arxiv.org/abs/2106.11959).

    The number x of column j becomes x w_j + b_j. A further token gathers what the head gets.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.row = Row(table, [_COLUMN] * len(table.categorical))
        self.weight = nn.Parameter(torch.randn(table.numbers, _COLUMN) / sqrt(_COLUMN))
        self.bias = nn.Parameter(torch.zeros(table.numbers, _COLUMN))
        self.gather = nn.Parameter(torch.randn(1, 1, _COLUMN) / sqrt(_COLUMN))
        self.blocks = Blocks(_COLUMN, 4, 2)
        self.norm = nn.LayerNorm(_COLUMN)

    def _get_name(self) -> str:
        return "TransformerFeatures"  # in the digests of run folders, which hold the network's description

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) rows to (b, 32)."""
        numbers, embedded = self.row(x)
        tokens = [self.gather.expand(len(x), -1, -1), numbers[:, :, None] * self.weight + self.bias]
        tokens += [e[:, None] for e in embedded]
        out: Tensor = self.norm(self.blocks(torch.cat(tokens, dim=1))[:, 0])
        return out


class Blocks(nn.Module):
    """Transformer blocks, normalised before attention and before the two layers (pre-norm), without dropout."""

    def __init__(self, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(blocks)
        )

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """(b, L, width) tokens; `padding` (b, L) is true where there is none."""
        for block in self.blocks:
            x = block(x, src_key_padding_mask=padding)
        return x


def table_mlp(table: Table, classes: int) -> SplitNetwork:
    """An MLP of 128 and 64 over numbers and embeddings of categories."""
    return SplitNetwork(MlpFeatures(table), nn.Linear(64, classes))


def table_transformer(table: Table, classes: int) -> SplitNetwork:
    """Two blocks of attention over the columns, like FT-Transformer."""
    return SplitNetwork(TableTransformerFeatures(table), nn.Linear(_COLUMN, classes))


class MeanFeatures(nn.Module):
    """The mean of the tokens' embeddings, through one layer with ReLU."""

    def __init__(self, tokens: Tokens) -> None:
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

    def __init__(self, tokens: Tokens) -> None:
        super().__init__()
        self.pad = tokens.pad
        self.embedding = nn.Embedding(tokens.vocabulary, _WIDTH, padding_idx=tokens.pad)
        self.places = nn.Parameter(torch.randn(tokens.length, _WIDTH) * 0.02)
        self.blocks = Blocks(_WIDTH, 4, 2)
        self.norm = nn.LayerNorm(_WIDTH)

    def _get_name(self) -> str:
        return "TransformerFeatures"  # in the digests of run folders, which hold the network's description

    def forward(self, x: Tensor) -> Tensor:
        """(b, L) tokens to (b, 64)."""
        there = x != self.pad
        read = there.clone()
        read[:, 0] = True  # attention over nothing is NaN, so an empty text reads its first place
        out = self.norm(self.blocks(self.embedding(x) + self.places[: x.shape[1]], ~read))
        out = out * there.unsqueeze(2)
        mean: Tensor = out.sum(1) / there.sum(1, keepdim=True).clamp(min=1)
        return mean


def text_mean(tokens: Tokens, classes: int) -> SplitNetwork:
    """The mean of embeddings of 64, a layer of 64: order does not matter."""
    return SplitNetwork(MeanFeatures(tokens), nn.Linear(_WIDTH, classes))


def text_transformer(tokens: Tokens, classes: int) -> SplitNetwork:
    """Two blocks of attention of width 64 over the tokens."""
    return SplitNetwork(TextTransformerFeatures(tokens), nn.Linear(_WIDTH, classes))
