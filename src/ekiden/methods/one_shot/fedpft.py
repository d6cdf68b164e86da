"""FedPFT: Gaussian mixtures of frozen features travel, and a head is trained on features drawn from
them.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    Fed,
    NonNegative,
    OwnSamples,
    Positive,
    Ref,
    Size,
    State,
    Training,
    Traits,
    UserError,
    Weights,
    on_client,
    require,
)
from ekiden.core.training.fit import Diverged, Optimizer
from ekiden.core.training.network import Network, trial
from ekiden.core.training.weights import Part
from ekiden.methods.blocks.rounds import OrderedMethod
from ekiden.methods.blocks.symmetric import numbers, symmetric, upper

Covariance = Literal["spherical", "diagonal", "full"]
# added to all variances, so that a Gaussian of one sample has a density; the default of scikit-learn
FLOOR = 1e-6


class Mixtures(NamedTuple):
    """A mixture of at most G Gaussians over A features for each of K classes; zeros if there are
    fewer.
    """

    weights: Tensor  # (K, G) π; all zero for a class without samples
    means: Tensor  # (K, G, A) μ
    # Σ, as (K, G, 1) variances, (K, G, A) diagonals, or (K, G, A(A + 1)/2) lower triangles by rows
    covariances: Tensor

    def draw(
        self, counts: Tensor, classes: int, features: int, generator: Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw `counts` (K,) features of the classes: (n, A) float32 and labels (n,), on the
        CPU.
        """
        self._check(counts, classes, features)
        drawn = [torch.empty(0, features)]
        labels = [torch.empty(0, dtype=torch.int64)]
        for c, n in enumerate(counts.tolist()):
            if not n:
                continue
            chosen = torch.multinomial(
                self.weights[c].double(), n, replacement=True, generator=generator
            )
            noise = torch.randn(n, features, generator=generator, dtype=torch.float64)
            spread = self.covariances[c].double()
            if spread.shape[1] in (1, features):
                noise = noise * spread.sqrt()[chosen]
            else:
                noise = torch.einsum("nij,nj->ni", square_roots(symmetric(spread))[chosen], noise)
            drawn.append((self.means[c].double()[chosen] + noise).float())
            labels.append(torch.full((n,), c))
        return torch.cat(drawn), torch.cat(labels)

    def _check(self, counts: Tensor, classes: int, features: int) -> None:
        of = (classes, *self.means.shape[1:2])
        shapes = [tuple(part.shape) for part in (counts, *self)]
        known = [(classes,), of, (*of, features)]
        if shapes not in [[*known, (*of, size)] for size in _sizes(features)]:
            raise UserError(
                f"counts and mixtures of shapes {shapes} do not fit this network of {classes} "
                f"classes and {features} features: use the same model at every client"
            )
        shares = self.weights.double().sum(1)[counts > 0]
        not_negative = [counts, self.weights]
        if self.covariances.shape[2] in (1, features):
            not_negative.append(self.covariances)
        if any((part < 0).any() for part in not_negative) or not (shares > 0).all():
            raise UserError(
                "mixtures with a negative count, weight or variance, or samples without weight: "
                "refused"
            )


def fit(
    features: Tensor,
    labels: Tensor,
    classes: int,
    mixtures: int,
    covariance: Covariance,
    seed: int,
    dtype: torch.dtype,
) -> Mixtures:
    """Fit a mixture to the features (n, A) of each class by EM from k-means++ seeds (scikit-learn),
    in float64.

    A class with fewer samples than `mixtures` gets as many Gaussians as samples.
    """
    dim = features.shape[1]
    weights = torch.zeros(classes, mixtures)
    means = torch.zeros(classes, mixtures, dim)
    spread = torch.zeros(classes, mixtures, size_of_covariance(covariance, dim))
    for c in sorted(set(labels.tolist())):
        own = features[labels == c].double().cpu()
        g = min(mixtures, len(own))
        found = _em(own, g, covariance, seed + c)
        weights[c, :g], means[c, :g], spread[c, :g] = found
    sent = Mixtures(weights.to(dtype), means.to(dtype), spread.to(dtype))
    if not all(part.isfinite().all() for part in sent):
        raise UserError(
            "features or their variances are too large for 16-bit numbers: use --no-half"
        )
    return sent


def _em(
    x: Tensor, mixtures: int, covariance: Covariance, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights (g,), means (g, A) and packed covariances (g, ...) for the samples x (n,
    A) of one class.
    """
    # imported here since it takes a second, and few need it
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture

    model = GaussianMixture(
        mixtures,
        covariance_type="diag" if covariance == "diagonal" else covariance,
        reg_covar=FLOOR,
        init_params="k-means++",
        random_state=seed % 2**32,
    )
    try:
        with warnings.catch_warnings():
            # what 100 iterations give is good enough to send, converged or not
            warnings.simplefilter("ignore", ConvergenceWarning)
            if len(x) == 1:
                # scikit-learn refuses a single sample
                x = x.repeat(2, 1)
            model.fit(x.numpy())
    except ValueError as error:
        raise UserError(
            f"no mixture of {mixtures} {covariance} Gaussians fits {len(x)} samples ({error})"
        ) from None
    weights, means, found = (
        torch.from_numpy(v) for v in (model.weights_, model.means_, model.covariances_)
    )
    if covariance == "full":
        return weights, means, upper(found)
    return weights, means, found.view(mixtures, -1)


def size_of_covariance(covariance: Covariance, features: int) -> int:
    """Return the number of entries in a packed covariance: 1, A or A(A + 1)/2."""
    return _sizes(features)[("spherical", "diagonal", "full").index(covariance)]


def _sizes(features: int) -> tuple[int, int, int]:
    return 1, features, numbers(features)


def square_roots(matrices: Tensor) -> Tensor:
    """Return the symmetric square roots of matrices (..., A, A); negative eigenvalues (of 16-bit
    rounding) become 0.
    """
    values, vectors = torch.linalg.eigh(matrices)
    roots: Tensor = (vectors * values.clamp(min=0).sqrt()[..., None, :]) @ vectors.mT
    return roots


class Own(NamedTuple):
    """What a client sends to the server: its class counts (K,) int64, and mixtures of its
    features.
    """

    counts: Annotated[Tensor, OwnSamples]
    mixtures: Mixtures


class JointMixtures(NamedTuple):
    """What a client of the chain hands on; it covers all clients so far."""

    counts: Tensor
    mixtures: Mixtures


@dataclass(frozen=True)
class Chained(State):
    """The state with what the last client handed on."""

    joint: Ref[JointMixtures] | None = None


@dataclass(frozen=True)
class FedPFT(OrderedMethod):
    """Clients send Gaussian mixtures of frozen features; a classifier is trained on features drawn
    from them.

    Mahdi Beitollahi, Alex Bie, Sobhan Hemati, Leo Maxime Brunswic, Xu Li, Xi Chen, Guojun Zhang:
    Parametric Feature Transfer: One-shot Federated Learning with Foundation Models. 2024.
    https://arxiv.org/abs/2402.01862 (Algorithm 1 and its decentralised form).

    The extractor is that of the initial network, which everyone has and which never changes or
    travels: give a pretrained one. Each client fits one mixture per class by EM. In a star the
    server draws as many features as there were samples and trains the head. In a chain each client
    draws features from what it received, joins its own, and fits mixtures to both; the last one
    trains the head on drawn and own features.

    Departures from the paper: a class with fewer samples than mixtures gets a Gaussian for each
    sample, where the public code leaves the class out. EM starts from k-means++ seeds, not from
    k-means. Absent classes travel as zeros, so that the bytes do not depend on the data. The
    differentially private form is left out. We read the abstract and Flower's baseline `fedpft`,
    which trains the head for one epoch at rate 10^-4; here it is 100 epochs at 10^-2.
    """

    topology: Literal["star", "chain"] = "star"
    """topology: from all clients to the server, or from client to client"""
    mixtures: Count = 10
    """K, Gaussians for each class"""
    covariance: Covariance = "diagonal"
    """Σ: spherical, diagonal or full"""
    half: bool = True
    """send 16-bit numbers, as the paper does; otherwise 32-bit numbers"""
    head_epochs: Count = 100
    """passes over the drawn features, to train the head"""
    head_lr: Positive = 0.01
    """learning rate of the head (AdamW)"""
    head_weight_decay: NonNegative = 0.01
    """weight decay of the head"""
    head_batch_size: Count = 128
    """features in a mini-batch"""
    order: str = "given"
    """order of the clients in a chain: given, reversed, random, or names separated by commas"""

    traits = Traits(splits_model=True, needs=CLASSES, weighs=False)

    def __post_init__(self) -> None:
        """Refuse an order for a star."""
        require(
            self.topology == "chain" or self.order == "given",
            "order",
            self.order,
            "given, unless --topology=chain",
        )

    def run(self, fed: Fed, s: Chained) -> Iterator[State]:
        """Yield one state in a star, or the state after each hop in a chain."""
        steps = self.steps(len(fed.clients))
        while s.step < steps:
            if self.topology == "star":
                sent = fed.get(fed.call_all(self.describe, INITIAL))
                s = s.next(model=self.at_server(fed, sent))
            else:
                client = fed.order(self.order)[s.step]
                if s.step < steps - 1:
                    s = s.next(joint=fed.call(self.join, client, INITIAL, s.joint))
                else:
                    s = s.next(model=fed.call(self.finish, client, INITIAL, s.joint), joint=None)
            yield s

    @on_client(gives=lambda m: "summary" if m.topology == "star" else None)
    def describe(self, client: Client, model: Weights) -> Own:
        """Return mixtures of the client's features."""
        x, y = features(client, model)
        return Own(client.class_counts().cpu(), self.mixture(client, x, y))

    @on_client(gives=lambda m: "summary" if m.topology == "chain" else None)
    def join(self, client: Client, model: Weights, received: JointMixtures | None) -> JointMixtures:
        """Return mixtures fitted to the client's features and to those drawn from the received
        mixtures.
        """
        x, y = self.joined(client, model, received)
        return JointMixtures(
            torch.bincount(y, minlength=client.classes), self.mixture(client, x, y)
        )

    @on_client(gives=lambda m: "model" if m.topology == "chain" else None)
    def finish(self, client: Client, model: Weights, received: JointMixtures | None) -> Weights:
        """Train the head at the last client of the chain."""
        x, y = self.joined(client, model, received)
        draw = client.generator("head")
        return self.with_head(model, client.module, client.head, x, y, draw)

    def at_server(self, fed: Fed, sent: Sequence[Own]) -> Weights:
        """Train the head at the server on features drawn from all clients' mixtures."""
        model: Weights = fed.get(INITIAL)
        network = Network(fed.network(model))
        dim = width(network, fed.shape)
        draw = fed.generator("features")
        drawn = [one.mixtures.draw(one.counts, fed.layout.classes, dim, draw) for one in sent]
        x, y = (torch.cat(parts) for parts in zip(*drawn, strict=True))
        return self.with_head(model, network.module, network.head, x, y, fed.generator("head"))

    def joined(
        self, client: Client, model: Weights, received: JointMixtures | None
    ) -> tuple[Tensor, Tensor]:
        """Return the client's own features and those that it draws (n, A), and labels (n,), on the
        CPU.
        """
        x, y = features(client, model)
        if received is None:
            return x, y
        draw = client.generator("features")
        mixtures = Mixtures(*(part.cpu() for part in received.mixtures))
        drawn, labels = mixtures.draw(received.counts.cpu(), client.classes, x.shape[1], draw)
        return torch.cat([x, drawn]), torch.cat([y, labels])

    def mixture(self, client: Client, x: Tensor, y: Tensor) -> Mixtures:
        """Return mixtures of features (n, A) with labels (n,)."""
        dtype = torch.float16 if self.half else torch.float32
        return fit(
            x, y, client.classes, self.mixtures, self.covariance, client.seed("mixtures"), dtype
        )

    def with_head(
        self, model: Weights, module: nn.Module, part: Part, x: Tensor, y: Tensor, draw: Generator
    ) -> Weights:
        """Return `model` with its head, `part` of it, trained on features (n, A) with labels
        (n,).
        """
        values = part.of(model)
        head = Network(copy.deepcopy(module.get_submodule("head")), values.params.device)
        head.load(values)
        head.module.eval()
        x = x.to(head.params.device)
        y = y.to(head.params.device)
        steps = Optimizer(
            head.params,
            head.grad,
            Training(optimizer="adamw", lr=self.head_lr, weight_decay=self.head_weight_decay),
        )
        for _ in range(self.head_epochs):
            order = torch.randperm(len(x), generator=draw).to(x.device)
            for rows in torch.split(order, self.head_batch_size):
                head.grad.zero_()
                F.cross_entropy(head.module(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
                steps.step()
        trained = head.weights()
        if not trained.is_finite():
            raise Diverged(f"the head became NaN or infinite: lower --head-lr (now {self.head_lr})")
        return part.put(trained, model)

    def steps(self, clients: int) -> int:
        """Return 1, or N hops."""
        if self.topology == "star":
            return 1
        return clients

    def cost(self, clients: int, model: Size) -> int:
        """N·S in a star, (N - 1)·S in a chain, S = 8C + b·C·K·(1 + A + c) for C classes and K
        mixtures.

        b is 2 or 4 bytes, A the number of features, c that of a covariance: 1, A or A(A + 1)/2.
        """
        dim = width(model.network, model.shape)
        classes = model.layout.classes
        gaussian = 1 + dim + size_of_covariance(self.covariance, dim)
        sends = clients if self.topology == "star" else clients - 1
        return sends * classes * (8 + (2 if self.half else 4) * self.mixtures * gaussian)


def features(client: Client, model: Weights) -> tuple[Tensor, Tensor]:
    """Return the head's inputs (n, A) for the client's training samples, and labels (n,), on the
    CPU.
    """
    with torch.no_grad():
        features = []
        labels = []
        for x, y in client.batches(passes=0):
            features.append(client.probe(x, model)[0].cpu())
            labels.append(y.cpu())
    x = torch.cat(features)
    y = torch.cat(labels)
    if not x.isfinite().all():
        raise UserError(
            f"{client.name}: the extractor gives NaN or infinity: check its weights and this "
            "client's data"
        )
    return x, y


def width(network: Network, shape: tuple[int, ...]) -> int:
    """Return A, the number of features that enter the head."""
    with torch.no_grad():
        return network.probe(
            trial(network.module, torch.zeros(1, *shape, device=network.params.device))
        )[0].shape[1]
