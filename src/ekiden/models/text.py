"""Networks for tokens (`ekiden.data.kinds.Tokens`), trained from scratch."""

import torch
from torch import Tensor, nn

from ekiden.data.kinds import Tokens
from ekiden.models.split import SplitNetwork
from ekiden.models.tabular import Blocks

_WIDTH = 64


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
