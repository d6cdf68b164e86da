"""Several networks whose answers are combined, as one network."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import UserError, Weights
from ekiden.base.errors import unknown
from ekiden.training import frozen
from ekiden.training.network import Network

Rule = Literal["logits", "probabilities", "majority", "class-wise", "counts"]


class EnsembleModel(nn.Module):
    """N networks whose answers are combined by a rule. Its weights are those of all members, one after the other."""

    counts: Tensor  # (N, K) class counts, or 1 for owned classes and 0 for others; unused by the first three rules

    def __init__(self, members: Sequence[nn.Module], classes: int, rule: Rule) -> None:
        super().__init__()
        if not members:
            raise UserError("an ensemble needs at least one model")
        if rule not in get_args(Rule):
            raise unknown("rule", rule, get_args(Rule))
        self.members = nn.ModuleList(members)  # the networks
        self.rule = rule
        self.register_buffer("counts", torch.ones(len(members), classes))

    def scores(self, x: Tensor) -> Tensor:
        """Return (b, K) scores of inputs (b, ...); only a running sum of them is in memory.

        logits: mean of the logits; probabilities: mean of the softmax; majority: share of the votes;
        class-wise: logits of owned classes, divided by the number of owners (0 without owners);
        counts: softmax, weighted by the member's share of the class's samples.
        """
        total: Tensor | None = None
        for member, counts in zip(self.members, self.counts, strict=True):
            part = self._part(member(x).float(), counts)
            total = part if total is None else total + part
        assert total is not None
        if self.rule == "class-wise":
            return total / self.counts.sum(0).clamp(min=1)
        return total / (self.counts.sum(0) + 1e-6) if self.rule == "counts" else total / len(self.members)

    def _part(self, logits: Tensor, counts: Tensor) -> Tensor:
        if self.rule == "logits":
            return logits
        if self.rule == "majority":
            return F.one_hot(logits.argmax(1), logits.shape[1]).to(logits.dtype)
        if self.rule == "class-wise":
            return torch.where(counts > 0, logits, torch.zeros_like(logits))
        return logits.softmax(1) * counts if self.rule == "counts" else logits.softmax(1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K): the scores if these are logits, otherwise their logarithms."""
        scores = self.scores(x)
        return scores if self.rule in ("logits", "class-wise") else scores.clamp(min=1e-12).log()


def join(module: nn.Module, models: Sequence[Weights], rule: Rule, counts: Tensor) -> Weights:
    """Return the weights of the ensemble of `models`, all of which are weights of `module`."""
    ensemble = EnsembleModel(copies(module, models), counts.shape[1], rule)
    ensemble.counts.copy_(counts)
    return Network(ensemble).weights()


def copies(module: nn.Module, models: Sequence[Weights]) -> list[nn.Module]:
    """Return a copy of `module` with the values of each of `models`."""
    members = []
    for model in models:
        network = Network(frozen.copied(module))
        network.load(model)
        members.append(network.module)
    return members
