"""FENS: the clients' models answer together, through a small network that federated rounds
train.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    BelowOne,
    Client,
    Count,
    Fed,
    Method,
    NonNegative,
    Positive,
    Range,
    Ref,
    Size,
    State,
    Traits,
    UserError,
    Weights,
    mean,
    on_client,
)
from ekiden.core.data.samples import Subset
from ekiden.core.training.network import Network
from ekiden.methods.blocks.combining import Init, first_model
from ekiden.methods.blocks.symmetric import symmetric, upper
from ekiden.methods.one_shot.blocks.ensemble import copies
from ekiden.methods.rounds.fedavg import FedAvg, ServerOptimizer

Form = Literal["linear", "per-class", "mlp", "ridge"]


class HeldOut(NamedTuple):
    """What a client keeps."""

    rows: Tensor  # (m,) int64, rows of the training samples that its model was not trained on
    y: Tensor  # (m,) int64, their labels; empty until the models arrive, as are the answers
    answers: Tensor  # (m, N, K) logits of all models for them


class TrainedAggregator(NamedTuple):
    """What a client sends in a round."""

    aggregator: Weights  # the aggregator after training at this client
    weight: float  # the number of samples that it was trained on


class RegressionSums(NamedTuple):
    """Totals over a client's held-out samples; φ (D,) are the N·K probabilities that the models
    answer.
    """

    gram: Tensor  # (D·(D + 1)/2,) float64, the upper triangle of Σ φφᵀ, row by row
    cross: Tensor  # (D, K) float64, Σ φyᵀ
    samples: int  # n


@dataclass(frozen=True)
class Stacking(State):
    """The state of the run."""

    models: tuple[Ref[Weights], ...] = ()  # the clients' models
    aggregator: Weights | None = None  # the aggregator after the last round
    momentum: Tensor | None = None  # first moment of the server's optimiser
    second: Tensor | None = None  # second moment of the server's optimiser


@dataclass(frozen=True)
class FENS(Method):
    """Clients train once and get each other's models; federated rounds only train what joins the
    models' answers.

    Youssef Allouah, Akash Dhasade, Rachid Guerraoui, Nirupam Gupta, Anne-Marie Kermarrec, Rafael
    Pinot, Rafael Pires, Rishi Sharma: Revisiting Ensembling in One-Shot Federated Learning. NeurIPS
    2024. https://arxiv.org/abs/2411.07182

    `aggregator = "ridge"` needs no rounds. It is David H. Wolpert's stacked generalization (Neural
    Networks 1992) by ridge regression on the N·K probabilities. Each client sends sums, which add
    up to the sums over all clients' held-out samples, so the solution is that of pooled samples.

    Departures from the paper: written after its abstract and the released code; the rest of the
    text was not available. Defaults are those of the code's scripts, except for the aggregator:
    they train the `mlp`. `linear` and `per-class` begin with the mean of the answers, not with
    random weights; the constant that the code adds to all logits of `linear` changes no answer and
    is left out. Adam's second moment at the server begins with τ², as in FedAdam's paper; in the
    code it begins with 0. Models travel as float32, not as int8. The gate that reads the sample
    itself is left out. The ridge is ours; it shrinks towards the mean of the probabilities, which
    is its limit for λ → ∞. Passes through the aggregator are not counted as compute. Local training
    ends with the epoch that --select names, by default the best on validation data. The code
    reports the best test accuracy over rounds, ours is that of the last round.
    """

    traits = Traits(private=HeldOut, joins_models=True, needs=CLASSES, weighs=False)

    epochs: Count = 200
    """E, epochs at each client"""
    holdout: Annotated[float, Range(above=0, below=1)] = 0.1
    """share of a client's training data that its model is not trained on but the aggregator is"""
    aggregator: Form = "per-class"
    """what combines the N models' answers: a weight for each model; one for each model and class; a
    perceptron with one hidden layer on their logits; or a ridge regression on their probabilities,
    in closed form"""
    hidden: Count = 2
    """d, hidden units of the perceptron for each client"""
    rounds: Count = 500
    """T, rounds in which the aggregator is trained"""
    local_steps: Count = 1
    """mini-batches of a client per round"""
    aggregator_batch_size: Count = 128
    """samples in such a mini-batch"""
    aggregator_lr: Positive = 1.0
    """η_l, learning rate of clients for the aggregator (SGD)"""
    server_optimizer: Literal["sgd", "adam"] = "adam"
    """the server's optimiser on the mean change of the aggregator; sgd at rate 1 is plain
    averaging"""
    server_lr: Positive = 1e-3
    """η_g, learning rate of the server"""
    server_momentum: BelowOne = 0.9
    """β_1, momentum of the server"""
    ridge: NonNegative = 0.0
    """λ of the ridge; 0: the one with the least generalised cross-validation"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    def run(self, fed: Fed, s: Stacking) -> Iterator[State]:
        """Yield the state after local training, then after each round; in the first, all clients
        get all models.
        """
        last = self.steps(len(fed.clients))
        if s.step == 0:
            s = s.next(models=fed.call_all(self.train, INITIAL))
            yield s
        while s.step < last:
            s = self.round(fed, s)
            if s.step == last:
                s = replace(s, model=self.joined(fed, s))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Weights:
        """Train on all samples except those held out."""
        train = client.data.train
        # at least one sample for each side; a client of one sample holds nothing out
        held = min(max(round(self.holdout * client.n), 1), client.n - 1)
        order = torch.randperm(client.n, generator=client.generator("holdout"))
        rows = order[:held].sort().values
        client.state = HeldOut(rows, order[:0], torch.empty(0))
        rest = Subset(train.samples, train.rows[order[held:].sort().values])
        return client.fit(first_model(client, model, self.init), epochs=self.epochs, train=rest)

    def ask(self, client: Client, models: Sequence[Weights]) -> None:
        """Compute all models' answers on the held-out samples."""
        train = client.data.train
        rows = client.state.rows
        held = Subset(train.samples, train.rows[rows.cpu()])
        answers = []
        with torch.no_grad():
            for network in map(client.network, models):
                parts = [network(x).float() for x, _ in client.batches(held)]
                answers.append(torch.cat(parts))
        # a task draws the same batches each time, so labels and answers are in one order
        y = torch.cat([y for _, y in client.batches(held, passes=0)])
        client.state = HeldOut(rows, y, torch.stack(answers, 1))

    def round(self, fed: Fed, s: Stacking) -> Stacking:
        """Solve the ridge regression, or run one round of FedAvg for another aggregator."""
        if self.aggregator == "ridge":
            return self.solve(fed, s)
        module = self.combiner(len(fed.clients), fed.layout.classes, fed.generator("aggregator"))
        start = s.aggregator or Network(module).weights()
        # The models travel in the first round only: clients keep their answers.
        models = s.models if s.step == 1 else ()
        sent = fed.get(fed.call_all(self.improve, models, start))
        if not any(trained.weight for trained in sent):
            raise _nothing_held()
        target = mean(
            [trained.aggregator for trained in sent], [trained.weight for trained in sent]
        )
        host = FedAvg(
            server_optimizer=self.server_optimizer,
            server_lr=self.server_lr,
            server_momentum=self.server_momentum,
        )
        after = host.update(ServerOptimizer(momentum=s.momentum, second=s.second), start, target)
        assert isinstance(after.model, Weights)
        if not after.model.is_finite():
            raise UserError("the aggregator became NaN or infinite: lower --aggregator-lr")
        return s.next(aggregator=after.model, momentum=after.momentum, second=after.second)

    @on_client(gives="model")
    def improve(
        self, client: Client, models: tuple[Weights, ...], aggregator: Weights
    ) -> TrainedAggregator:
        """Take some steps of SGD on the answers for the held-out samples."""
        if models:
            self.ask(client, models)
        answers = client.state.answers
        y = client.state.y
        if not len(y):
            return TrainedAggregator(aggregator, 0.0)
        draw = client.generator("aggregator")
        network = Network(self.combiner(answers.shape[1], client.classes, draw), answers.device)
        network.load(aggregator)
        for rows in minibatches(len(y), self.aggregator_batch_size, self.local_steps, draw):
            network.grad.zero_()
            F.cross_entropy(network.module(answers[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
            network.params.sub_(network.grad, alpha=self.aggregator_lr)
        return TrainedAggregator(
            network.weights(), float(min(len(y), self.local_steps * self.aggregator_batch_size))
        )

    def solve(self, fed: Fed, s: Stacking) -> Stacking:
        """Solve the ridge regression from the clients' sums."""
        sums = fed.get(fed.call_all(self.products, s.models))
        if not sum(part.samples for part in sums):
            raise _nothing_held()
        network = Network(self.combiner(len(fed.clients), fed.layout.classes))
        network.params.copy_(ridge(sums, self.ridge).flatten())
        return s.next(aggregator=network.weights())

    @on_client(gives=lambda m: "summary" if m.aggregator == "ridge" else None)
    def products(self, client: Client, models: tuple[Weights, ...]) -> RegressionSums:
        """Return sums over the held-out samples."""
        self.ask(client, models)
        phi = client.state.answers.softmax(2).flatten(1).double()
        return RegressionSums(
            upper(phi.T @ phi),
            phi.T @ F.one_hot(client.state.y, client.classes).double(),
            len(phi),
        )

    def joined(self, fed: Fed, s: Stacking) -> Weights:
        """Return the models and the aggregator as one network."""
        assert s.aggregator is not None
        models = fed.get(s.models)
        combiner = self.combiner(len(fed.clients), fed.layout.classes)
        Network(combiner).load(s.aggregator)
        return Network(JointNetwork(copies(fed.network(models[0]), models), combiner)).weights()

    def combiner(self, members: int, classes: int, draw: Generator | None = None) -> nn.Module:
        """Return the aggregator (b, N, K) → (b, K) before training."""
        match self.aggregator:
            case "linear":
                return Weighted(members, 1)
            case "per-class":
                return Weighted(members, classes)
            case "mlp":
                return Perceptron(members, classes, members * self.hidden, draw or Generator())
            case "ridge":
                return LinearCombiner(members, classes)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return one network of N networks and the aggregator."""
        classes = Network(copy.deepcopy(network)).layout.classes
        return JointNetwork(
            [copy.deepcopy(network) for _ in range(clients)], self.combiner(clients, classes)
        )

    def steps(self, clients: int) -> int:
        """Return one step for the models, and one for each round or one for the ridge."""
        if self.aggregator == "ridge":
            return 2
        return 1 + self.rounds

    def cost(self, clients: int, model: Size) -> int:
        """N·M to the server and N·(N - 1)·M to the other clients, and what the aggregator costs.

        T·N·(2a + 8): it travels down and up, with a weight; or N·(4·D·(D + 1) + 8·D·K + 8) for the
        sums, D = N·K.
        """
        classes = model.layout.classes
        if self.aggregator == "ridge":
            d = clients * classes
            aggregator = clients * (4 * d * (d + 1) + 8 * d * classes + 8)
        else:
            size = 4 * len(Network(self.combiner(clients, classes)).params)
            aggregator = self.rounds * clients * (2 * size + 8)
        return clients * clients * model + aggregator


def _nothing_held() -> UserError:
    return UserError(
        "no client has two training samples, so none can hold one out: give the clients more data"
    )


def minibatches(n: int, size: int, steps: int, draw: Generator) -> Iterator[Tensor]:
    """Return the rows of these mini-batches: shuffled passes over n samples, one after the
    other.
    """
    return islice(
        chain.from_iterable(torch.split(torch.randperm(n, generator=draw), size) for _ in count()),
        steps,
    )


def ridge(sums: Sequence[RegressionSums], penalty: float) -> Tensor:
    """Return W (D, K) with the least ‖Y - ΦW‖² + λ‖W - W_0‖² over all samples; ΦW_0 is the mean of
    the models.

    Args:
        sums: one or more.
        penalty: λ; 0: the one of 81, from 1e-4 to 1e4 times the mean eigenvalue of ΦᵀΦ, with the
            least generalised cross-validation RSS(λ) / (n - df(λ))².
    """
    d, classes = sums[0].cross.shape
    gram = symmetric(torch.stack([part.gram for part in sums]).sum(0))
    cross = torch.stack([part.cross for part in sums]).sum(0)
    n = sum(part.samples for part in sums)
    start = torch.eye(classes, dtype=torch.float64).repeat(d // classes, 1) * classes / d
    # The residual sum of squares of W_0; the rows of Y have length 1.
    rss = n - 2 * (start * cross).sum() + (start * (gram @ start)).sum()
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    # W - W_0 is the ridge regression of Y - ΦW_0.
    slopes = vectors.T @ (cross - gram @ start)

    def validation(weight: Tensor) -> Tensor:
        power = slopes.square().sum(1)
        fit = (power * (values + 2 * weight) / (values + weight) ** 2).sum()
        score: Tensor = (rss - fit) / (n - (values / (values + weight)).sum()) ** 2
        return score

    if penalty:
        best = torch.tensor(penalty, dtype=torch.float64)
    else:
        grid = torch.logspace(-4, 4, 81, dtype=torch.float64) * values.mean()
        best = grid[torch.stack([validation(weight) for weight in grid]).argmin()]
    change: Tensor = vectors @ (slopes / (values + best)[:, None])
    return start + change


class JointNetwork(nn.Module):
    """N networks whose logits an aggregator joins."""

    def __init__(self, members: Sequence[nn.Module], combiner: nn.Module) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.combiner = combiner

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K)."""
        answers = torch.stack([member(x).float() for member in self.members], 1)
        return self.combiner(answers)  # type: ignore[no-any-return]


class Weighted(nn.Module):
    """Weights of the models' logits, one for each model or for each of its classes; at first their
    mean.
    """

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((members, width), 1 / members))

    def forward(self, answers: Tensor) -> Tensor:
        """Return logits (b, K) from (b, N, K)."""
        logits: Tensor = (answers * self.weight).sum(1)
        return logits


class Perceptron(nn.Module):
    """One hidden layer of ReLUs on the models' logits."""

    def __init__(self, members: int, classes: int, hidden: int, draw: Generator) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(hidden, members * classes))
        self.first_bias = nn.Parameter(torch.empty(hidden))
        self.second = nn.Parameter(torch.empty(classes, hidden))
        self.second_bias = nn.Parameter(torch.empty(classes))
        for inputs, *parameters in (
            (members * classes, self.first, self.first_bias),
            (hidden, self.second, self.second_bias),
        ):
            # the same bounds as in nn.Linear, whose draws have no generator of their own
            for parameter in parameters:
                nn.init.uniform_(
                    parameter, -1 / math.sqrt(inputs), 1 / math.sqrt(inputs), generator=draw
                )

    def forward(self, answers: Tensor) -> Tensor:
        """Return logits (b, K) from (b, N, K)."""
        hidden = F.linear(answers.flatten(1), self.first, self.first_bias).relu()
        return F.linear(hidden, self.second, self.second_bias)


class LinearCombiner(nn.Module):
    """A linear map of the models' probabilities; at first their mean. What it gives adds up to
    1.
    """

    def __init__(self, members: int, classes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(classes).repeat(members, 1) / members)

    def forward(self, answers: Tensor) -> Tensor:
        """Return logits (b, K) from (b, N, K): logarithms. A regression can answer 0 or less, which
        counts as 0.001.
        """
        scores: Tensor = answers.softmax(2).flatten(1) @ self.weight
        return scores.clamp(min=1e-3).log()
