"""Average: one-shot federated averaging."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    CountOrZero,
    Fed,
    NonNegative,
    Size,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.tasks import Need
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import (
    Init,
    OneShot,
    Rule,
    Trained,
    class_mean,
    combine,
    first_model,
    own_size,
    owned,
    refuse,
)
from ekiden.methods.blocks.rounds import note_apart, shortened
from ekiden.methods.one_shot.blocks.curvature import (
    Labels,
    Passes,
    diagonal,
    gradients,
    refuse_layers,
)

Head = Literal["mean", "class-wise", "class-counts"]


@dataclass(frozen=True)
class Average(OneShot):
    """One-shot averaging: every client trains once from the common initial model, the server
    averages.

    Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson, Blaise Agüera y Arcas:
    Communication-Efficient Learning of Deep Networks from Decentralized Data. AISTATS 2017.
    https://arxiv.org/abs/1602.05629. With one communication as in Neel Guha, Ameet Talwalkar,
    Virginia Smith: One-Shot Federated Learning. 2019.

    Departures from the paper: one round, all clients take part. The uniform average is the default,
    as in the one-shot comparisons of FedELMY and MA-Echo; `weighting = "samples"` is the paper's.
    `combine_heads = "class-wise"` averages each row of the classifier only over the clients with
    more than one sample of its class (zero if there are none), as the authors of MA-Echo do for all
    methods of their tables. Local training ends with the epoch that --select names, by default the
    best on validation data.
    """

    epochs: Count = 200
    """E, epochs at each client"""
    weighting: Literal["uniform", "samples"] = "uniform"
    """p_i: 1/N, or n_i/n"""
    combine_heads: Head = "mean"
    """how classifiers are averaged: mean (like the rest), class-wise (each class over its owners),
    or class-counts (by n_ic/n_c, the clients' shares of the class's samples)"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""
    combine: Rule = "mean"
    """how the server combines models: their mean, or a rule that tolerates some arbitrary models"""
    faulty: CountOrZero = 1
    """f, number of clients that may send arbitrary models: trimmed-mean drops f values at each end,
    and krum assumes f such clients"""
    clip_update: NonNegative = 0.0
    """C, longest step that a client may take from the model that it was sent; the server shortens
    longer steps. 0: no limit"""

    def __post_init__(self) -> None:
        """Refuse class-wise options with a rule other than the mean, and a limit on steps without a
        common start.
        """
        if self.combine != "mean" != self.combine_heads:
            raise UserError(
                f"--combine {self.combine} goes with --combine-heads=mean: leave that out"
            )
        if self.clip_update and self.init != "same":
            raise UserError(
                "--clip-update bounds the step from the common initial model: leave out "
                "--init=different"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """Need classes if the classifier is averaged by them."""
        if self.combine_heads == "mean":
            return frozenset()
        return CLASSES

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a rule that needs more clients."""
        refuse(self.combine, len(clients), self.faulty, weighted=self.weighting == "samples")

    def check_network(self, model: Size) -> None:
        """Refuse a network without a declared classifier, for rules other than the mean."""
        if self.combine_heads != "mean":
            # raises an error if the network declares none
            _ = model.layout.head

    def joined(self, fed: Fed, sent: Sequence[Trained]) -> Weights:
        """Average the models, their steps from the initial one limited; note who stands out."""
        models = {k: trained.model for k, trained in zip(fed.clients, sent, strict=True)}
        if self.clip_update:
            models = shortened(fed, models, fed.get(INITIAL), self.clip_update)
            pairs = zip(sent, models.values(), strict=True)
            sent = [trained._replace(model=model) for trained, model in pairs]
        result = self.aggregate(sent, fed.layout)
        note_apart(fed, self.combine, models, result)
        return result

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Trained:
        """Train on the plain loss."""
        start = first_model(client, model, self.init)
        return self.counted(client, client.fit(start, epochs=self.epochs))

    def counted(self, client: Client, model: Weights) -> Trained:
        """Return a trained model with the numbers of samples that its average needs."""
        if self.combine_heads != "mean":
            return Trained(model, client.class_counts())
        return Trained(model, own_size(client, self.weighting))

    def fits(self) -> tuple[int, ...] | None:
        """Return the epochs of the training; heads that are averaged by classes need counts of
        samples.
        """
        if self.combine_heads != "mean":
            return None
        return (self.epochs,)

    def aggregate(self, sent: Sequence[Trained], layout: Layout) -> Weights:
        """Return Σ p_i θ_i."""
        models = [t.model for t in sent]
        counts = torch.stack([t.counts for t in sent])
        weights = counts.sum(1).tolist() if self.weighting == "samples" else [1] * len(sent)
        result = combine(models, weights, self.combine, self.faulty)
        if self.combine_heads == "mean":
            return result
        if self.combine_heads == "class-wise":
            counts = owned(counts)
        return class_mean(models, counts, layout, result)

    def cost(self, clients: int, model: Size) -> int:
        """N·M; and 8·N for n_i, 8·N·K for n_ic, if they are needed."""
        numbers = int(self.weighting == "samples")
        if self.combine_heads != "mean":
            numbers = model.layout.classes
        return clients * (model + 8 * numbers)


class MergingMethod(OneShot):
    """A method that trains as `Average` does, and averages what it cannot merge otherwise."""

    epochs: int
    weighting: Literal["uniform", "samples"]
    init: Init

    @property
    def average(self) -> Average:
        """The local training, and the plain average."""
        return Average(epochs=self.epochs, weighting=self.weighting, init=self.init)

    def joined(self, fed: Fed, sent: Sequence[Any]) -> Weights:
        """Merge what the clients sent."""
        return self.merge(sent, fed.layout)

    @abstractmethod
    def merge(self, sent: Sequence[Any], layout: Layout) -> Weights:
        """Return one model."""


class Informed(NamedTuple):
    """What a client sends whose model is merged by more than its weights."""

    trained: Trained  # its model, and n_k if the average needs it
    curvature: list[Tensor]  # how precisely its data determine the weights; see the method

    def parts(self, number: int) -> list[Tensor]:
        """Return the curvature, which another party sent, if it has so many parts."""
        if len(self.curvature) != number:
            raise UserError(
                f"{len(self.curvature)} tensors came with a model, not {number}: use the same "
                "network at every client"
            )
        return self.curvature


class FisherMethod(MergingMethod):
    """A method that merges models by the Fisher information at each client's model."""

    fisher: Labels
    traits = Traits(needs=CLASSES)

    def check_network(self, model: Size) -> None:
        """Refuse a network if the Fisher information of a layer cannot be measured."""
        refuse_layers(model.network, model.shape, self.layers(model.layout))

    @on_client(gives="summary")
    def train(self, client: Client, model: Weights) -> Informed:
        """Train on the plain loss, then make one pass for the Fisher information."""
        trained = self.average.train(client, model)
        network = client.network(trained.model)
        draw = client.generator("labels")
        layers = self.layers(client.layout)
        passes = gradients(network, layers, client.batches(), self.fisher, draw, client.work)
        return Informed(trained, self.measured(passes))

    def layers(self, layout: Layout) -> Sequence[Layer]:
        """Return the layers whose Fisher information is measured: all that have parameters."""
        return [layer for layer in layout.layers if layer.params]

    def measured(self, passes: Passes) -> list[Tensor]:
        """Return the Fisher information as it travels: the diagonal (P,)."""
        return [diagonal(passes).float()]


def told_diagonal(sent: Informed) -> Tensor:
    """Return the diagonal (P,) that a client sent."""
    (found,) = sent.parts(1)
    if found.shape != sent.trained.model.params.shape:
        raise UserError(
            "the Fisher information does not have the model's size: use the same network at every "
            "client"
        )
    return found
