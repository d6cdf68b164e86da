"""Ensemble: the clients' models answer together."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ekiden.authoring import (
    CLASSES,
    Client,
    Count,
    Fed,
    Size,
    Traits,
    Weights,
    on_client,
)
from ekiden.core.tasks import Need
from ekiden.core.training.network import Network
from ekiden.methods.blocks.combining import Init, OneShot, Trained, first_model, owned
from ekiden.methods.one_shot.blocks.ensemble import EnsembleModel, Rule, join


@dataclass(frozen=True)
class Ensemble(OneShot):
    """Every client trains once; the result is all N models, whose answers are averaged for each
    sample.

    A yardstick of one-shot federated learning in Neel Guha, Ameet Talwalkar, Virginia Smith:
    One-Shot Federated Learning. 2019. https://arxiv.org/abs/1902.11175. The rules are those of the
    released codes of FedELMY and DENSE (`logits`), MA-Echo (`class-wise`) and PFNM
    (`probabilities`, `counts`).

    Departures from the paper: all clients' models are members, none is selected. The result is one
    network that contains N networks: it takes N times the memory and the time of a single model.
    Local training ends with the epoch that --select names, by default the best on validation data.
    """

    traits = Traits(joins_models=True, averages=False)

    epochs: Count = 200
    """E, epochs at each client"""
    rule: Rule = "logits"
    """how answers are combined: mean of logits z_i; mean of probabilities p_i; majority; logits of
    owned classes (more than one sample) divided by the number of owners; p_i weighted by
    n_ic/n_c"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    @property
    def needs(self) -> frozenset[Need]:
        """Need classes, unless outputs are averaged, which has a meaning in all tasks."""
        return frozenset() if self.rule == "logits" else CLASSES

    def joined(self, fed: Fed, sent: Sequence[Trained]) -> Weights:
        """Join the models into one network."""
        counts = torch.stack([m.counts for m in sent]).float()
        if not counts.numel():
            counts = torch.ones(len(sent), fed.layout.classes)
        models = [m.model for m in sent]
        return join(fed.network(models[0]), models, self.rule, counts)

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Trained:
        """Train on the plain loss."""
        model = client.fit(first_model(client, model, self.init), epochs=self.epochs)
        match self.rule:
            case "class-wise":
                return Trained(model, owned(client.class_counts()))
            case "counts":
                return Trained(model, client.class_counts().int())
        return Trained(model, torch.empty(0, dtype=torch.int64))

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return one network that contains N networks."""
        classes = Network(copy.deepcopy(network)).layout.classes
        return EnsembleModel([copy.deepcopy(network) for _ in range(clients)], classes, self.rule)

    def cost(self, clients: int, model: Size) -> int:
        """N·M; and N·K for the owned classes, 4·N·K for class counts, where the rule needs them."""
        each = 0
        if self.rule == "class-wise":
            each = 1
        elif self.rule == "counts":
            each = 4
        return clients * (model + model.layout.classes * each)
