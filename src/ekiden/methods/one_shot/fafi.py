"""FAFI: clients train features and class prototypes that agree; the server averages features and
prototypes.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import (
    CLASSES,
    NUMBERS,
    Client,
    Count,
    Fed,
    Forward,
    NonNegative,
    Objective,
    Positive,
    Range,
    Task,
    Traits,
    UserError,
    Weights,
    Work,
    on_client,
)
from ekiden.core.data.augment import Augment
from ekiden.core.models.split import SplitNetwork, as_split
from ekiden.core.training.network import Network
from ekiden.methods.blocks.combining import OneShot, Trained, own_size
from ekiden.methods.one_shot.blocks.curvature import shares
from ekiden.methods.one_shot.blocks.ensemble import copies


class Prototypes(nn.Linear):
    """Scores (b, K) of features z (b, D): P z/‖z‖, with one prototype for each class as a row of P
    (K, D).
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__(width, classes, bias=False)

    def reset_parameters(self) -> None:
        """Draw prototypes from a standard normal distribution, as the code does."""
        nn.init.normal_(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        """Return the scores."""
        return super().forward(F.normalize(input, dim=1))


class FusedFeatures(nn.Module):
    """The features Σ p_k z_k (b, D) of all clients' extractors."""

    shares: Tensor  # (N,) p_k

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)  # the extractors
        self.register_buffer("shares", torch.full((len(members),), 1 / len(members)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean features of inputs (b, ...)."""
        each = [p * member(x) for p, member in zip(self.shares, self.members, strict=True)]
        return torch.stack(each).sum(0)


@dataclass(frozen=True)
class AlignedLoss(Objective):
    """2 ℓ(P ẑ, y) + μ ℓ_con(ẑ, y) + ν ℓ(P Pᵀ, classes) over a mini-batch and a second view of each
    sample.
    """

    method: "FAFI"

    def further(self, batch: int) -> Work:
        """Count the passes of the second views."""
        return Work(batch, batch)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a batch."""
        network = as_split(forward)
        labels = torch.cat([y, y])
        z = network.features(torch.cat([x, self.method.view(x)]))
        scores = network.head(z).float()
        prototypes = cast(Tensor, network.head.weight)
        contrast = supervised_contrast(
            F.normalize(z.float(), dim=1), labels, self.method.temperature
        )
        own = torch.arange(len(prototypes), device=y.device)
        apart = F.cross_entropy(prototypes @ prototypes.T, own)
        return (
            2 * F.cross_entropy(scores, labels) + self.method.mu * contrast + self.method.nu * apart
        )


@dataclass(frozen=True)
class FAFI(OneShot):
    """One-shot learning of aligned features: the result averages the features of all models, and
    their prototypes.

    Hui Zeng, Wenke Huang, Tongqing Zhou, Xinyi Wu, Guancheng Wan, Yingwen Chen, Zhiping Cai: Does
    One-shot Give the Best Shot? Mitigating Model Inconsistency in One-shot Federated Learning. ICML
    2025. https://openreview.net/forum?id=2XvF67vbCK

    The classifier is one learned prototype for each class, compared with normalised features.
    Clients minimise the cross-entropy of these scores, a contrast between samples of different
    classes, and the similarity of different prototypes. A sample's class is that whose mean
    prototype is nearest to the mean of the models' features.

    Departures from the paper: written after its abstract and released code; equation numbers are
    not known. The abstract calls the contrast unsupervised, the code uses labels (Khosla et al.,
    NeurIPS 2020), as we do. The code adds the cross-entropy twice, as that of the classifier and as
    that between prototypes and features, which gives the factor 2. The abstract weights features by
    how informative they are; no weights in the code differ so between models, and ours are its
    n_k/n. Second views are shifted, noisy and optionally mirrored; the code crops, mirrors and
    changes colours of both views. The first is the sample as the run augments it. The code clips
    gradients to length 1, here --clip-norm does. Local training ends with the epoch that --select
    names, by default the best on validation data.
    """

    traits = Traits(
        joins_models=True, averages=False, splits_model=True, weighs=False, needs=CLASSES | NUMBERS
    )

    epochs: Count = 200
    """E, epochs at each client"""
    temperature: Positive = 0.07
    """τ, temperature of the contrast between samples"""
    mu: NonNegative = 1.0
    """μ, weight of the contrast between samples"""
    nu: NonNegative = 1.0
    """ν, weight of the loss that keeps prototypes apart"""
    shift: Annotated[float, Range(least=0, most=0.5)] = 0.125
    """largest shift of an image for its second view, as a share of its height"""
    flip: bool = False
    """whether second views are mirrored at random"""
    jitter: NonNegative = 0.1
    """standard deviation of the noise that second views get, in units of the inputs"""
    weighting: Literal["uniform", "samples"] = "samples"
    """p_k, weights of the features: 1/N, or n_k/n"""

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: Task
    ) -> nn.Module:
        """Replace the classifier by prototypes of its inputs."""
        split = as_split(network)
        first = next((part for part in split.head.modules() if isinstance(part, nn.Linear)), None)
        if first is None:
            raise UserError(
                "FAFI replaces the classifier by prototypes: `head` must begin with an nn.Linear"
            )
        return SplitNetwork(split.features, Prototypes(first.in_features, classes))

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Trained:
        """Train extractor and prototypes."""
        trained = client.fit(model, epochs=self.epochs, objective=AlignedLoss(self))
        return Trained(trained, own_size(client, self.weighting))

    def view(self, x: Tensor) -> Tensor:
        """Return another view of inputs (b, ...)."""
        if x.ndim == 4:
            x = Augment(crop=round(self.shift * x.shape[2]), flip=self.flip)(x)
        if self.jitter:
            x = x + self.jitter * torch.randn(x.shape).to(x.device)
        return x

    def joined(self, fed: Fed, sent: Sequence[Trained]) -> Weights:
        """Return the weights of the network of mean features and mean prototypes."""
        models = [t.model for t in sent]
        members = list(map(as_split, copies(fed.network(models[0]), models)))
        features = FusedFeatures([member.features for member in members])
        features.shares.copy_(torch.tensor(shares(sent)))
        head = members[0].head
        with torch.no_grad():
            mean = torch.stack([cast(Tensor, member.head.weight) for member in members]).mean(0)
            cast(Tensor, head.weight).copy_(mean)
        return Network(SplitNetwork(features, head)).weights()

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return one network that contains N extractors."""
        split = as_split(network)
        members = [copy.deepcopy(split.features) for _ in range(clients)]
        return SplitNetwork(FusedFeatures(members), copy.deepcopy(split.head))

    def cost(self, clients: int, model: int) -> int:
        """N·M, prototypes in place of the classifier; and 8·N for n_k."""
        return clients * (model + 8 * (self.weighting == "samples"))


def supervised_contrast(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return the mean of -log of the softmax share, among all other samples, of samples of the same
    class.

    Prannay Khosla et al.: Supervised Contrastive Learning. NeurIPS 2020.
    https://arxiv.org/abs/2004.11362 (equation 2, L_out).

    Args:
        z: features (b, D) of length 1.
        y: labels (b,).
        temperature: τ.
    """
    # a sample is not a positive of itself
    own = torch.eye(len(z), dtype=torch.bool, device=z.device)
    share = (z @ z.T / temperature).masked_fill(own, -torch.inf).log_softmax(1)
    same = (y[:, None] == y) & ~own
    each = share.masked_fill(~same, 0).sum(1) / same.sum(1).clamp(min=1)
    return -each.mean()
