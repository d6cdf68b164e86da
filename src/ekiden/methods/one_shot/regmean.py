"""RegMean: layer by layer, the weights whose outputs are nearest to those of every client's model
on its own data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Range,
    Size,
    State,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.models.split import FIRST, SECOND
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Init
from ekiden.methods.blocks.symmetric import numbers
from ekiden.methods.one_shot.average import Informed, MergingMethod
from ekiden.methods.one_shot.blocks.curvature import (
    half,
    moments,
    note_averaged,
    refuse_layers,
    shares,
    whole,
)

# relative eigenvalue of the scaled Gram matrix below which a direction is rounding error: sums
# travel in float32
_UNSEEN = 1e-6


@dataclass(frozen=True)
class RegMean(MergingMethod):
    """One-shot merging of each linear layer by least squares on the inputs that the clients' models
    see.

    Xisen Jin, Xiang Ren, Daniel Preotiuc-Pietro, Pengxiang Cheng: Dataless Knowledge Fusion by
    Merging Weights of Language Models. ICLR 2023. https://arxiv.org/abs/2212.09849. W = (Σ G_k)⁻¹ Σ
    G_k W_k with G_k = X_kᵀX_k, whose entries off the diagonal are multiplied by α: the least
    squares solution for the outputs of all models.

    Departures from the paper: the models come from one round of federated training. Convolutions
    are treated as linear layers over patches, and a bias as the weight of one more input, which is
    constant 1; the paper averages both. The classifier is merged like any layer, since all clients
    have the same classes. Directions in which no client has inputs stay at the average of the
    models instead of zero (pseudo-inverse) or a singular system. Normalisation layers and all
    others are averaged. Local training ends with the epoch that --select names, by default the best
    on validation data. The code's G_k is a mean over samples (`weighting = "uniform"`). LoRM's code
    sends G_k in both kinds of rounds and multiplies off-diagonals by 0.5 or less. Only the
    beginning of both papers' texts was available.

    With adapters B·A of which both factors are trained (`--train lora:factors=both`) and several
    rounds it is LoRM: Riccardo Salami, Pietro Buzzega, Matteo Mosconi, Jacopo Bonato, Luigi
    Sabetta, Simone Calderara: Closed-Form Merging of Parameter-Efficient Modules for Federated
    Continual Learning. ICLR 2025. https://arxiv.org/abs/2410.17961. All clients train B in rounds
    1, 3, ... and A in the others, so that both have solutions: B = Σ B_k A G_k Aᵀ (A Σ G_k Aᵀ)⁻¹
    and A = Σ A_k G_k (Σ G_k)⁻¹. Departures: a sequence of tasks is left out; B's matrix A G_k Aᵀ
    travels instead of G_k.
    """

    traits = Traits(averages=False)  # of two factors it merges one at a time

    epochs: Count = 200
    """E, epochs at each client in each round"""
    rounds: Count = 1
    """T, rounds of training and merging"""
    alpha: Annotated[float, Range(least=0, most=1)] = 0.9
    """α, factor of the off-diagonal entries of G_k; 0 gives a weighted average, 1 plain least
    squares"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k, factor of G_k as a mean over samples: 1/N, or n_k/n as in the sum over all samples"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""

    def __post_init__(self) -> None:
        """Refuse clients with initial models of their own, if later rounds begin with the merged
        one.
        """
        if self.rounds > 1 and self.init != "same":
            raise UserError("--init=different is for one round: leave it out, or --rounds")

    def check_network(self, model: Size) -> None:
        """Refuse a network if the inputs of a layer cannot be measured, or if the resting factor
        differs.
        """
        refuse_layers(model.network, model.shape, model.layout.dense)
        if self.init != "same" and resting(model.layout, 0):
            raise UserError("--init=different draws another factor A at each client: leave it out")

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after each round: train and measure at all clients, merge."""
        while s.step < self.rounds:
            sent = fed.get(fed.call_all(self.train, s.model, s.step))
            s = s.next(model=self.merge(sent, fed.layout, s.step))
            yield s

    @on_client(gives="summary")
    def train(self, client: Client, model: Weights, round: int) -> Informed:
        """Train on the plain loss, then make one forward pass for the Gram matrices.

        What goes with the model is for each linear and convolutional layer that was trained the
        half of G = XᵀX, a mean over samples; only its diagonal if α = 0.
        """
        if rests := resting(client.layout, round):
            trained = self.average.counted(
                client, fitted_without(client, model, rests, self.epochs)
            )
        else:
            trained = self.average.train(client, model)
        found = moments(
            client.network(trained.model), active(client.layout, round), client.batches()
        )
        return Informed(
            trained, [half(gram) if self.alpha else gram.diagonal().float() for gram in found]
        )

    def merge(self, sent: Sequence[Informed], layout: Layout, round: int = 0) -> Weights:
        """Return W = M + (Σ p_k G_k)⁻¹ Σ p_k G_k (W_k - M) for each layer of the round, M being the
        average.
        """
        if round == 0:
            note_averaged("RegMean", layout)
        models = [s.trained for s in sent]
        mean = self.average.aggregate(models, layout)
        params = mean.params.clone()
        layers = active(layout, round)
        grams = [s.parts(len(layers)) for s in sent]
        for i, layer in enumerate(layers):
            centre = layer.matrix(mean.params).double()
            total = torch.zeros(layer.inputs, layer.inputs, dtype=torch.float64)
            pull = torch.zeros_like(centre)
            for model, told, p in zip(models, grams, shares(models), strict=True):
                gram = p * self.gram(told[i], layer.inputs)
                total += gram
                pull += (layer.matrix(model.model.params) - centre) @ gram
            # from M instead of 0, so that what no client's inputs show stays at the average
            layer.put(params, (centre + solved(total, pull)).float())
        return mean.with_params(params)

    def gram(self, told: Tensor, size: int) -> Tensor:
        """Return G (size, size) float64 with α, from what a client told."""
        if self.alpha:
            return shrunk(whole(told, size), self.alpha)
        if told.shape != (size,):
            raise UserError(
                f"{len(told)} numbers do not fit a diagonal of {size}: use the same network at "
                "every client"
            )
        return told.double().diag()

    def steps(self, clients: int) -> int:
        return self.rounds

    def cost(self, clients: int, model: Size) -> int:
        """(2T - 1)·N·M, 4·N·Σ d(d + 1)/2 (d if α = 0) a round, d inputs of a layer and its bias;
        and 8·T·N for n_k.
        """
        entries = 0
        for round in range(self.rounds):
            sizes = [layer.inputs for layer in active(model.layout, round)]
            entries += sum(numbers(d) if self.alpha else d for d in sizes)
        up = self.rounds * self.average.cost(clients, model) + clients * 4 * entries
        return up + (self.rounds - 1) * clients * model


def resting(layout: Layout, round: int) -> tuple[Layer, ...]:
    """Return the factor of adapters that is not trained in a round, if both can be: A in the first,
    then B, ...
    """
    first = tuple(layer for layer in layout.layers if layer.name.endswith(FIRST))
    second = tuple(layer for layer in layout.layers if layer.name.endswith(SECOND))
    if not (first and second):
        return ()
    return (first, second)[round % 2]


def active(layout: Layout, round: int) -> tuple[Layer, ...]:
    """Return the layers that are merged in a round."""
    rests = resting(layout, round)
    return tuple(layer for layer in layout.dense if layer not in rests)


def fitted_without(client: Client, model: Weights, rests: Sequence[Layer], epochs: int) -> Weights:
    """Train everything but these layers."""
    module = client.network(model)
    still = {part.name for layer in rests for part in layer.params}
    for part in client.layout.params:
        module.get_parameter(part.name).requires_grad_(part.name not in still)
    device = model.params.device
    network = Network(module, device)
    network.load(client.fit(network.weights(), epochs=epochs, network=network))
    for part in client.layout.params:
        module.get_parameter(part.name).requires_grad_(True)
    return Network(module, device).weights()


def shrunk(gram: Tensor, alpha: float) -> Tensor:
    """Return G with its off-diagonal entries multiplied by α."""
    return alpha * gram + (1 - alpha) * gram.diagonal().diag()


def solved(gram: Tensor, right: Tensor) -> Tensor:
    """Return X (o, d) of least norm with X·G = `right`; G (d, d) may be singular. Inputs are first
    scaled alike.
    """
    scale = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(scale > 0, 1 / scale, 0.0)
    # X = R S (S G S)⁺ S with S = diag(G)^-½: so the inputs' units do not decide the rank
    inverse = torch.linalg.pinv(gram * scale[:, None] * scale, rtol=_UNSEEN, hermitian=True)
    found: Tensor = (right * scale) @ inverse * scale
    return found
