"""A teacher whose answers are given."""

from torch import Tensor, nn


class Fixed(nn.Module):
    """Answers the same to everything."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor) -> Tensor:
        return self.logits
