"""What methods share whose model is made for the columns of a table."""

from typing import Self

from torch import nn

from ekiden.authoring import UserError
from ekiden.core.models.tables_and_texts import Linear, linear
from ekiden.core.training import frozen
from ekiden.methods.blocks.rounds import OrderedMethod


class TableMethod(OrderedMethod):
    """A method with a model of its own for numbers and tables."""

    def with_source(self, model: str, pretrained: str) -> tuple[Self, str, str]:
        """The linear network, which knows the columns; no other is possible."""
        if model not in ("auto", "linear") or pretrained:
            raise self.own_only("--model and --pretrained")
        return self, "linear", ""

    def columns_of(self, network: nn.Module, shape: tuple[int, ...], classes: int) -> Linear:
        """Return the linear network that knows the columns; refuse other networks, and frozen
        ones.
        """
        base = network if isinstance(network, Linear) else linear(shape, classes)
        reads_codes = any(isinstance(part, nn.Embedding) for part in network.modules())
        if (reads_codes and base is not network) or any(True for _ in frozen.fixed(network)):
            raise self.own_only("the model, and --train")
        return base

    def own_only(self, given: str) -> UserError:
        """Return the error for options of networks."""
        return UserError(
            f"{self.title()} has a model of its own for numbers and tables: leave out {given}"
        )
