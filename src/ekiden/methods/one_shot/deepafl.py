"""DeepAFL: deep analytic federated learning."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ekiden.authoring import (
    INITIAL,
    NUMBERS,
    VECTORS,
    Client,
    Count,
    CountOrZero,
    Fed,
    Method,
    Positive,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.base.settings import derive
from ekiden.core.base.sums import fixed, real
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Need
from ekiden.core.training.network import Network, fresh, trial
from ekiden.methods.blocks.sums import WholeSums
from ekiden.methods.blocks.symmetric import numbers, symmetric, upper

ACTIVATIONS = {"gelu": nn.GELU, "tanh": nn.Tanh, "relu": nn.ReLU}


@dataclass(frozen=True, eq=False)
class LeastSquaresSums(WholeSums):
    """Sums over samples, for a least-squares problem with inputs a and targets y, in fixed
    point.
    """

    squares: Tensor  # (A(A + 1)/2,) int64, the upper triangle of Σ a aᵀ in units of 2^-28
    products: Tensor  # (A, K) int64, Σ a yᵀ

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        super().__post_init__()
        if self.products.ndim != 2 or self.squares.shape != (numbers(len(self.products)),):
            raise UserError("sums do not fit together: use the same method and model everywhere")


class KeptSolutions(NamedTuple):
    """What a client keeps."""

    # the solutions that it has received: W_0 (D, K), G_0 (F, K), W_1, G_1, ...
    solutions: list[Tensor]


@dataclass(frozen=True)
class Solved(State):
    """The state of the server."""

    seed: int = 0  # seed of the random layers
    solutions: tuple[Tensor, ...] = ()  # W_0 (D, K), G_0 (F, K), W_1, G_1, ..., float64


class Residual(nn.Module):
    """z + Δᵀσ(R z + b)."""

    def __init__(self, width: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.random = nn.Linear(width, hidden)  # (D to F) R and b
        self.activation = activation  # σ
        self.delta = nn.Linear(hidden, width, bias=False)  # (F to D) Δ
        nn.init.zeros_(self.delta.weight)

    def forward(self, z: Tensor) -> Tensor:
        """Map (b, D) to (b, D)."""
        out: Tensor = z + self.delta(self.activation(self.random(z)))
        return out


@dataclass(frozen=True)
class DeepAFL(Method):
    """Random and least-squares layers on frozen features, each solved exactly from sums over all
    clients.

    Jianheng Tang, Yajiang Huang, Kejia Fan, Feijiang Han, Jiaxu Li, Jinfeng Xu, Run He, Anfeng Liu,
    Houbing Herbert Song, Huiping Zhuang, Yunhuai Liu: DeepAFL: Deep Analytic Federated Learning.
    ICLR 2026. https://arxiv.org/abs/2603.00579.

    z_0 = tanh(R_0 h) of the features h of the initial network. Layer t: W_t is the ridge regression
    of the one-hot labels on z_t; f = σ(R_t z_t) are random features; z_{t+1} = z_t + Δᵀf, where Δ
    minimises ‖Y - (Z_t + F Δ) W_t‖² + λ_s‖Δ‖² ("sandwiched least squares"). W_T is the classifier.
    No gradient is taken, and the result depends on how samples are spread over clients only by
    rounding.

    Departures from the paper: written after the authors' code and the paper's abstract; the paper's
    text was not available. Δ is computed and sent as G W_tᵀ, with G of K columns, which is the same
    matrix in fewer bytes. Clients send Fᵀ(Y - Z W), where the code sends W(Y - Z W)ᵀF, and of
    symmetric matrices only one triangle. Sums and solutions are float64, and travel in fixed point
    with 28 bits after the point; in the code they are float32. The default is few and narrow
    layers; the code's script has T = 20 and D = F = 1024, on a pretrained ResNet-18. The factor of
    R_0 is ours.
    """

    layers: CountOrZero = 3
    """T, number of residual layers; each takes two more communications"""
    width: Count = 256
    """D, length of z"""
    random_features: Count = 256
    """F, number of random features in a layer"""
    ridge: Positive = 1.0
    """λ of the classifiers"""
    sandwich: Positive = 0.05
    """λ_s of the residual layers"""
    features: Literal["network", "inputs"] = "network"
    """h: the inputs of the initial network's classifier, or the samples themselves"""
    activation: Literal["gelu", "tanh", "relu"] = "gelu"
    """σ of the random features"""
    scale: Positive = 1.0
    """factor of R_0, for features that are much smaller or larger than 1"""

    traits = Traits(private=KeptSolutions, weighs=False)

    @property
    def needs(self) -> frozenset[Need]:
        """Need target vectors, and numeric inputs if the inputs are the features."""
        return VECTORS if self.features == "network" else VECTORS | NUMBERS

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: Task
    ) -> nn.Module:
        """Return a linear classifier on the inputs if these are the features."""
        if self.features == "network":
            return network
        return SplitNetwork(nn.Flatten(), nn.Linear(prod(shape), classes))

    def check_network(self, model: Size) -> None:
        """Refuse a network whose classifier is not a linear layer on vectors."""
        network = Network(copy.deepcopy(model.network.module).cpu())
        wanted = inputs(network.module)
        h, _ = network.probe(trial(network.module, torch.zeros(2, *model.shape)))
        if h.shape[1] != wanted:
            raise UserError(
                "DeepAFL replaces the classifier: let `head` begin with an nn.Linear of what it "
                "reads"
            )

    def run(self, fed: Fed, s: Solved) -> Iterator[State]:
        """Yield the state after each aggregation: W_0, then G_t and W_{t+1} in turn."""
        if s.step == 0:
            s = replace(
                s, seed=int(torch.randint(1 << 62, (), generator=fed.generator("random layers")))
            )
        while s.step < self.steps(len(fed.clients)):
            last = s.solutions[-1] if s.solutions else None
            sums = fed.sum(
                self.sums, fed.clients, INITIAL, last, s.seed, len(fed.clients), at="server"
            )
            solutions = (*s.solutions, self.solve(sums, s.solutions))
            network = self.assembled(fed.network(fed.get(INITIAL)), solutions, s.seed)
            s = s.next(solutions=solutions, model=Network(network.cpu()).weights())
            yield s

    @on_client(gives="sum")
    def sums(
        self,
        client: Client,
        initial: Weights,
        last: Tensor | None,
        seed: int,
        clients: int,
        before: LeastSquaresSums | None,
    ) -> LeastSquaresSums:
        """Add sums of (z, y), or of (f, y - Wᵀz) where the last solution was a classifier W.

        Args:
            client: whose state is `KeptSolutions`.
            initial: the frozen network.
            last: the newest solution.
            seed: of the random layers.
            clients: N.
            before: the sums of others.
        """
        solutions = [] if last is None else [*client.state.solutions, last]
        client.state = KeptSolutions(solutions)
        head = self.head(inputs(client.module), client.classes, seed, solutions).to(
            initial.params.device
        )
        # the layers that are known: Flatten, R_0 and tanh, and residual layers with a Δ
        solved = 3 + len(solutions) // 2
        squares: Tensor | float = 0.0
        products: Tensor | float = 0.0
        with torch.no_grad():
            for x, labels in client.batches(passes=0):
                a = head[:solved](client.probe(x, initial)[0].double())
                y = client.task.targets(labels, client.classes).double()
                if len(solutions) % 2:
                    # after a classifier W its residual Y - Z W is the target, of random features
                    y = y - a @ solutions[-1]
                    residual = head[solved]
                    assert isinstance(residual, Residual)
                    a = residual.activation(residual.random(a))
                squares = squares + a.T @ a
                products = products + a.T @ y
        assert isinstance(squares, Tensor)
        assert isinstance(products, Tensor)
        own = LeastSquaresSums(
            *(fixed(t, clients, "sums of features") for t in (upper(squares), products))
        )
        return client.added(before, own, (solutions, seed, clients))

    def solve(self, sums: LeastSquaresSums, solutions: Sequence[Tensor]) -> Tensor:
        """Return the next solution from the sums over all clients: W, or G if the last one was
        W.
        """
        squares = symmetric(real(sums.squares))
        products = real(sums.products)
        if len(solutions) % 2:
            return sandwiched(squares, products, solutions[-1], self.sandwich)
        squares.diagonal().add_(self.ridge)
        solved: Tensor = torch.linalg.solve(squares, products)
        return solved

    def head(
        self, features: int, classes: int, seed: int, solutions: Sequence[Tensor]
    ) -> nn.Sequential:
        """Return what replaces the classifier, float64; layers without a solution yet add
        nothing.
        """

        def drawn(layer: int, reads: int, gives: int) -> nn.Linear:
            linear = fresh(nn.Linear(reads, gives), derive(seed, "layer", layer)).double()
            assert isinstance(linear, nn.Linear)
            return linear

        first = drawn(0, features, self.width)
        last = nn.Linear(self.width, classes, bias=False).double()
        head = nn.Sequential(nn.Flatten(), first, nn.Tanh())
        with torch.no_grad():
            first.weight *= self.scale
            for t in range(self.layers):
                residual = Residual(
                    self.width, self.random_features, ACTIVATIONS[self.activation]()
                )
                residual.random = drawn(t + 1, self.width, self.random_features)
                residual.delta.double()
                if 2 * t + 1 < len(solutions):
                    residual.delta.weight.copy_(
                        solutions[2 * t] @ solutions[2 * t + 1].T
                    )  # (D, F) Δᵀ = W_t G_tᵀ
                head.append(residual)
            if solutions:
                last.weight.copy_(solutions[(len(solutions) - 1) // 2 * 2].T)
        return head.append(last)

    def assembled(
        self, network: nn.Module, solutions: Sequence[Tensor] = (), seed: int = 0
    ) -> nn.Module:
        """Return `network`, changed, with these solutions in place of its classifier."""
        network.head = self.head(inputs(network), classes(network), seed, solutions).float()
        return network

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network with random and residual layers before its new classifier."""
        return self.assembled(copy.deepcopy(network))

    def steps(self, clients: int) -> int:
        """Return 2T + 1."""
        return 2 * self.layers + 1

    def cost(self, clients: int, model: Size) -> int:
        """8N·((T + 1)·(D(D + 1)/2 + DK) + T·(F(F + 1)/2 + FK)) up, 8N·T·(DK + FK) down."""
        k = model.layout.classes
        classifiers = (self.layers + 1) * (numbers(self.width) + self.width * k)
        residuals = self.layers * (numbers(self.random_features) + self.random_features * k)
        down = self.layers * (self.width + self.random_features) * k
        return 8 * clients * (classifiers + residuals + down)


def sandwiched(squares: Tensor, products: Tensor, w: Tensor, ridge: float) -> Tensor:
    """Return G (F, K) with Δ = G Wᵀ, the minimiser of ‖R - F Δ W‖² + λ‖Δ‖².

    Where the gradient is zero, FᵀF Δ W Wᵀ + λΔ = FᵀR Wᵀ; G solves FᵀF G WᵀW + λG = FᵀR, in the
    eigenvectors of both squares.

    Args:
        squares: (F, F) FᵀF.
        products: (F, K) FᵀR.
        w: (D, K) W.
        ridge: λ.
    """
    # in the eigenvectors of both squares the equation is diagonal
    left, v = torch.linalg.eigh(squares)
    right, q = torch.linalg.eigh(w.T @ w)
    squared = left.clamp(min=0)[:, None] * right.clamp(min=0)
    inner = (v.T @ products @ q) / (ridge + squared)
    gain: Tensor = v @ inner @ q.T
    return gain


def inputs(network: nn.Module) -> int:
    """Return how many numbers the network's classifier reads."""
    head = getattr(network, "head", None)
    linear = (
        [m for m in head.modules() if isinstance(m, nn.Linear)]
        if isinstance(head, nn.Module)
        else []
    )
    if not linear:
        raise UserError(
            "DeepAFL replaces the classifier: name it `head`, and let it begin with an nn.Linear"
        )
    return linear[0].in_features


def classes(network: nn.Module) -> int:
    """The number of the network's outputs."""
    return Network(copy.deepcopy(network).requires_grad_(True)).layout.classes
