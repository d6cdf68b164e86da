"""A network in two named parts."""

from typing import Protocol, cast

from torch import Tensor, nn

from ekiden.base.errors import UserError


class Split(Protocol):
    """A network that says where its classifier begins. Your own network does so by its attributes' names.

    Methods that personalise or exchange the head, or that read representations, need it. A static type
    only: `isinstance` does not see the submodules of an `nn.Module`.
    """

    @property
    def features(self) -> nn.Module:
        """Extractor: (B, *shape) inputs to (B, d) representations."""

    @property
    def head(self) -> nn.Module:
        """Classifier, often the last layer alone: (B, d) representations to (B, classes) logits."""


def as_split(network: object) -> Split:
    """`network` as a network in two parts."""
    if not (hasattr(network, "features") and hasattr(network, "head")):
        raise UserError(
            "this method reads representations: give the network two attributes, `features` and `head`, with "
            "forward(x) = head(features(x))"
        )
    return cast(Split, network)


class SplitNetwork(nn.Module):
    """`head(features(x))`.

    Attributes:
        features: (B, *shape) inputs to (B, d) representations.
        head: (B, d) representations to (B, classes) logits.
    """

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.features = features
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """(B, classes) logits of (B, *shape) inputs."""
        logits: Tensor = self.head(self.features(x))
        return logits
