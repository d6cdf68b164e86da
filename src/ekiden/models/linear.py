"""A linear network: of the columns of a table with indicators of categories, or of any numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.data.kinds import Inputs, Table, Tokens
from ekiden.models.split import SplitNetwork

OTHER = " = other"
"""the end of the name of a term for all categories that are not in the vocabulary"""


@dataclass(frozen=True)
class Term:
    """A number that enters a linear network: (value in its own unit - centre) / scale."""

    name: str
    centre: float = 0.0
    scale: float = 1.0


def terms(inputs: Inputs | None, width: int) -> list[Term]:
    """Return what enters the head of a linear network, in order.

    Of a table: its numbers; for each column with gaps whether the number is missing; for each category but the first
    one whether the row has it. `other` is any category that is not in the vocabulary.

    Args:
        inputs: what a sample is.
        width: numbers of a sample that is not a row of a table.
    """
    if not isinstance(inputs, Table):
        return [Term(f"x{k}") for k in range(width)]
    found = [Term(*one) for one in zip(inputs.numeric, inputs.centre, inputs.scale, strict=True)]
    found += [Term(f"{name} missing") for name in inputs.gaps]
    for name, known in zip(inputs.categorical, inputs.vocabularies, strict=True):
        ends = [OTHER, *(f" = {text or 'missing'}" for text in known)]
        found += [Term(name + ends[code]) for code in _levels(known)]
    return found


def _levels(known: tuple[str, ...]) -> list[int]:
    """Return the codes that get an indicator: all but that of the first category that is not a gap."""
    usual = next((code for code, name in enumerate(known, 1) if name), 1)
    return [code for code in range(len(known) + 1) if code != usual]


class Indicators(nn.Module):
    """Makes what `terms` lists of the rows of a table."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.numbers = table.numbers
        self.levels = tuple(_levels(known) for known in table.vocabularies)

    def forward(self, x: Tensor) -> Tensor:
        """(b, d) rows to (b, D)."""
        codes = x[:, self.numbers :]
        each = [
            (codes[:, k, None] == torch.tensor(levels, dtype=x.dtype, device=x.device)).to(x)
            for k, levels in enumerate(self.levels)
        ]
        return torch.cat([x[:, : self.numbers], *each], dim=1)


class Linear(SplitNetwork):
    """A linear network that knows the names of what enters its head."""

    def __init__(self, features: nn.Module, names: list[str], outputs: int) -> None:
        super().__init__(features, nn.Linear(len(names), outputs))
        self.names = names  # (D,) of them


def linear(shape: tuple[int, ...], classes: int, inputs: Inputs | None = None) -> Linear:
    """Numbers, and indicators of categories, times weights: as in a regression."""
    if isinstance(inputs, Tokens):
        raise UserError("linear reads numbers, but these samples are texts: use --model with text_mean")
    names = [term.name for term in terms(inputs, torch.Size(shape).numel())]
    return Linear(Indicators(inputs) if isinstance(inputs, Table) else nn.Flatten(), names, classes)
