"""MA-Echo: one-shot aggregation through null-space projections."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.authoring import (
    CLASSES,
    Client,
    Count,
    Fed,
    Fraction,
    Method,
    Model,
    NonNegative,
    Range,
    Size,
    State,
    Traits,
    UserError,
    Weights,
    mean,
    on_client,
    require,
)
from ekiden.core.base.outside import require_extra
from ekiden.core.training.network import Network, fresh
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Init, class_mean, owned
from ekiden.methods.blocks.rounds import participants, sample
from ekiden.methods.one_shot.blocks.curvature import compress, note_averaged, projectors, thin
from ekiden.methods.one_shot.blocks.ensemble import copies
from ekiden.methods.one_shot.ot_fusion import align, carry, check_chain, transport


class Contribution(NamedTuple):
    """What a client sends."""

    model: Weights  # its trained model
    # one for each linear and convolutional layer but the classifier: P (d, d), or F (d, k) with P ≈
    # F Fᵀ
    projectors: list[Tensor]
    owns: Tensor  # (K,) bool, the classes of which it has more than one sample


@dataclass(frozen=True)
class MAEcho(Method):
    """One-shot aggregation that moves all models to a common optimum along directions that their
    data do not see.

    Shangchao Su, Bin Li, Xiangyang Xue: One-shot Federated Learning without Server-side Training.
    Neural Networks 164, 203-215, 2023. https://arxiv.org/abs/2204.12493 (Algorithm 1, Eq. 11).

    With each model W_i a client sends, per layer, the projector P_i on the inputs that its data
    give. The server alternates: W goes down the distances ‖(W - V_i)P_i‖, and each V_i, starting
    from W_i, moves towards W in the directions that P_i does not see.

    Departures from the paper: `form = "released"`, the default, is the authors' code, from which
    their published numbers come: projectors by a damped recursion over the mean inputs of batches,
    α = 1/N, V steps λ(I - P). The result is the mean of the V_i, and classifier rows are averaged
    over the owners of each class. `form = "paper"` is Algorithm 1 with factor 2 in the direction
    and I - μ/(1 + μ)P in the V steps, and the result W. Both forms leave the classifier out of the
    iteration and average it (`combine_heads`), as the code does and the paper's ablation says;
    Algorithm 1 names all layers. Biases are one more input, which is constant 1. Layers that are
    neither linear nor convolutional are averaged. With `align` projectors follow the aligned units,
    T P Tᵀ (the text's transposes contradict each other; the code computes the projectors again from
    the data). Local training ends with the epoch that --select names, by default the best on
    validation data.
    """

    epochs: Count = 10
    """E, epochs at each client"""
    rounds: Count = 1
    """T, rounds of training and aggregation; 1: one-shot"""
    form: Literal["released", "paper"] = "released"
    """the iteration of the authors' code, or of Algorithm 1"""
    iterations: Count = 60
    """τ, iterations at the server"""
    step: Annotated[float, Range(above=0, below=2)] = 1.6
    """λ of the released form, below 2; η of the paper's form, at most 1"""
    weighting: Literal["uniform", "qp"] = "uniform"
    """α_i: 1/N, or the minimum of ‖Σ α_i g_i‖² with Σ α_i = 1 and 0 <= α_i <= C"""
    bound: Fraction = 1.0
    """C, largest α_i, at least 1/N"""
    mu: NonNegative = 1.0
    """μ, how strongly P_i holds back a V step in the paper's form"""
    normalise: bool = False
    """Norm, bring each row of a V step to length 1 (for different initial models)"""
    origin: Literal["mean", "first", "random"] = "mean"
    """W at the start: mean of the models, the first client's, or random values"""
    combine_heads: Literal["class-wise", "mean"] = "class-wise"
    """the classifier: each row is averaged over the clients with more than one sample of its class,
    or over all clients"""
    projector: Literal["recursion", "closed"] = "recursion"
    """P_i: damped recursion over batch means (released), or closed form over all samples (paper)"""
    ranks: str = ""
    """k, number of eigenvectors sent for each projector: one number, or one for each layer,
    separated by commas; empty: all"""
    align: bool = False
    """MA-Echo + OT: first align all models to the first client's by optimal transport"""
    init: Init = "same"
    """initial models: the same for all clients, or a different one for each"""
    participation: Fraction = 1.0
    """m/N, share of the clients drawn for each round; at least one client"""
    decentralised: bool = False
    """every client sends its model to every other and aggregates by itself; the server reads
    nothing"""

    traits = Traits(needs=CLASSES)  # clients report which classes they own

    def __post_init__(self) -> None:
        short = self.form == "released" or self.step <= 1
        require(short, "step", self.step, "at most 1 in the paper's form")
        complete = self.participation == 1 or not self.decentralised
        wanted = "1, since with --decentralised all take part"
        require(complete, "participation", self.participation, wanted)
        positive = all(k.isdecimal() and int(k) > 0 for k in self._ranks)
        require(positive, "ranks", self.ranks, "numbers of 1 or more")

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a C with which weights cannot sum to 1."""
        if self.weighting == "qp":
            require_extra("methods", "--weighting=qp", "clarabel")
        m = participants(len(clients), self.participation)
        wanted = f"at least 1/N = {1 / m:.4g}, so that the weights can sum to 1"
        require(
            self.weighting == "uniform" or self.bound * m >= 1 - 1e-9, "bound", self.bound, wanted
        )

    def check_network(self, model: Size) -> None:
        """Refuse a wrong number of ranks, and for alignment a network with shortcuts."""
        self.rank_of(model.layout)
        if self.align:
            check_chain(model.network.module, model.shape)

    @property
    def one_model(self) -> bool:
        """Return False without a server: each client has its own model."""
        return not self.decentralised

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        if s.step == 0:
            note_averaged("MA-Echo", fed.layout)
        while s.step < self.rounds:
            seed = int(torch.randint(1 << 62, (), generator=fed.generator("start")))
            clients = sample(fed, self.participation)
            models: Sequence[Model | None] = s.personal or [s.model] * len(clients)
            pairs = zip(clients, models, strict=True)
            asked = [fed.call(self.train, k, model, s.step == 0) for k, model in pairs]
            if self.decentralised:
                s = s.next(model=None, personal=fed.call_all(self.gather, asked, seed))
            else:
                sent = fed.get(asked)
                s = s.next(model=self.combine(sent, fed.network(sent[0].model), seed))
            yield s

    @on_client(gives="summary")
    def train(self, client: Client, model: Weights, first: bool) -> Contribution:
        """Train on the plain loss, then make one pass for the projectors."""
        if first and self.init == "different":
            model = client.fresh()
        model = client.fit(model, epochs=self.epochs)
        closed = self.projector == "closed"
        found = projectors(
            client.network(model), client.layout.hidden, client.batches(), closed=closed
        )
        ranks = zip(found, self.rank_of(client.layout), strict=True)
        sent = [compress(p, k).float() for p, k in ranks]
        return Contribution(model, sent, owned(client.class_counts()))

    @on_client(gives="model")
    def gather(self, client: Client, sent: list[Contribution], seed: int) -> Weights:
        """Aggregate at each client what all have sent; the result is the same everywhere."""
        return self.combine(sent, copies(client.module, [sent[0].model])[0], seed)

    def combine(self, sent: Sequence[Contribution], network: nn.Module, seed: int) -> Weights:
        """Align the models (with `align`), choose the start, aggregate."""
        layout = Network(network).layout
        if self.align:
            sent = [aligned(c, sent[0].model, layout) for c in sent]
        start = None
        if self.origin == "random":
            start = Network(fresh(network, seed), sent[0].model.params.device).weights()
        return self.aggregate(sent, layout, start)

    def aggregate(
        self, sent: Sequence[Contribution], layout: Layout, start: Weights | None = None
    ) -> Weights:
        """Return the common model, layer by layer; all other parameters are averaged."""
        models = [c.model for c in sent]
        result = mean(models)
        params = result.params.clone()
        w = models[0] if self.origin == "first" else start or result
        for i, layer in enumerate(layout.hidden):
            v = torch.stack([layer.matrix(m.params) for m in models])
            seen = [reduced(c.projectors[i]).to(v) for c in sent]
            layer.put(params, self.harmonise(layer.matrix(w.params), v, seen))
        result = result.with_params(params)
        if self.combine_heads == "mean":
            return result
        return class_mean(models, torch.stack([c.owns for c in sent]), layout, result)

    def harmonise(self, w: Tensor, clients: Tensor, projectors: Sequence[Tensor]) -> Tensor:
        """Iterate for one layer, from W (out, d), W_i (N, out, d) and P_i or F_i."""
        plain = self.form == "released" and self.weighting == "uniform" and not self.normalise
        if plain and not any(map(complete, projectors)):
            return harmonise_in_factors(w, clients, projectors, self.step, self.iterations)
        v = clients.clone()
        pull_step = self.step
        move_step = self.step
        kept = 1.0
        if self.form == "paper":
            # the factor 2 of g_i, which the released code drops
            pull_step = 2 * self.step
            move_step = 1.0
            kept = self.mu / (1 + self.mu)
        for _ in range(self.iterations):
            seen = project(w - v, projectors)  # (W - V_i) P_i, half of the paper's direction g_i
            alphas = self.alphas(seen)
            pull = torch.einsum("n,nod->od", alphas, seen)
            w = w - pull_step * pull
            change = w - v
            # (W - V_i)(I - μ/(1 + μ) P_i), Eq. 11
            move = change - kept * project(change, projectors)
            if self.normalise:
                move = unit_rows(move, change)
            # Algorithm 1 steps from the running V_i, not from W_i
            v = v + move * move_step
        if self.form == "paper":
            return w
        # the code returns the mean of the V_i; written as a change of the first, equal V_i give
        # their value without rounding
        return v[0] + (v - v[0]).mean(0)

    def alphas(self, seen: Tensor) -> Tensor:
        """α of the directions g_i = 2(W - V_i)P_i, given without the factor 2."""
        if self.weighting == "uniform":
            return torch.full((len(seen),), 1 / len(seen)).to(seen)
        flat = seen.flatten(1).double()
        gram = 4 * (flat @ flat.T)  # (N, N) ⟨g_i, g_j⟩, with the factor 2 of each
        return torch.from_numpy(min_norm(gram.cpu().numpy(), self.bound)).to(seen)

    def rank_of(self, layout: Layout) -> list[int]:
        """Return how many eigenvectors of each projector travel, 0 for all."""
        wanted = len(layout.hidden)
        given = [int(k) for k in self._ranks]
        if len(given) not in (0, 1, wanted):
            raise UserError(
                f"--ranks {self.ranks} names {len(given)} layers, this network has {wanted}: give "
                "as many"
            )
        if len(given) == wanted:
            return given
        return (given or [0]) * wanted

    @property
    def _ranks(self) -> list[str]:
        return self.ranks.split(",") if self.ranks else []

    def steps(self, clients: int) -> int:
        """Return T, the number of rounds."""
        return self.rounds

    def cost(self, clients: int, model: Size) -> int:
        """(2T - 1)·m·M, models up in every round and down in all but the first, and T·m·payload.

        Decentralised: T·N·(N - 1)·(M + payload).
        """
        payload = self.payload(model.layout)
        if self.decentralised:
            return self.rounds * clients * (clients - 1) * (model + payload)
        each = (2 * self.rounds - 1) * model + self.rounds * payload
        return participants(clients, self.participation) * each

    def payload(self, layout: Layout) -> int:
        """Return K + 4·Σ d·k: a client's classes and projectors, with k = d for complete
        projectors.
        """
        numbers = 0
        for layer, k in zip(layout.hidden, self.rank_of(layout), strict=True):
            numbers += layer.inputs * min(k or layer.inputs, layer.inputs)
        return layout.classes + 4 * numbers


def harmonise_in_factors(
    w: Tensor, clients: Tensor, factors: Sequence[Tensor], step: float, iterations: int
) -> Tensor:
    """Return what the released form with α_i = 1/N gives, from factors of P_i = F_i F_iᵀ.

    What an iteration needs of W - V_i is A_i = (W - V_i)F_i and the mean over i. So it computes
    with (out, k) instead of (out, d) matrices, and with those of all clients in one product.

    Args:
        w: W, (out, d).
        clients: W_i, (N, out, d).
        factors: F_i, (d, k_i).
        step: λ.
        iterations: τ.
    """
    n = len(clients)
    widths = [f.shape[1] for f in factors]
    joined = torch.cat([*factors], 1)  # (d, Σk)
    grams = [f.T @ f for f in factors]
    a = torch.cat([(w - v) @ f for v, f in zip(clients, factors, strict=True)], 1)
    # W minus the mean of the V_i, which is all that the result needs
    apart = w - clients[0] - (clients - clients[0]).mean(0)
    for _ in range(iterations):
        pull = a @ joined.T / n
        w = w - step * pull
        c = a - step * (pull @ joined)
        apart = (1 - step) * (apart - step * pull) + step / n * (c @ joined.T)
        kept = [part @ g for part, g in zip(torch.split(c, widths, 1), grams, strict=True)]
        a = (1 - step) * c + step * torch.cat(kept, 1)
    return w - apart


def reduced(projector: Tensor) -> Tensor:
    """Return a complete projector of low rank as a factor, which is cheaper to compute with."""
    if complete(projector):
        return thin(projector)
    return projector


def complete(projector: Tensor) -> bool:
    """Return whether this is P (d, d), and not a factor F (d, k) of it."""
    return projector.shape[0] == projector.shape[1]


def project(differences: Tensor, projectors: Sequence[Tensor]) -> Tensor:
    """Return (W - V_i)P_i of each client, (N, out, d)."""
    parts = []
    for x, p in zip(differences, projectors, strict=True):
        seen = x @ p
        if not complete(p):
            seen = seen @ p.T
        parts.append(seen)
    return torch.stack(parts)


def unit_rows(move: Tensor, change: Tensor) -> Tensor:
    """Scale each row of `move` to length 1; rows that are only rounding errors of `change` become
    zero.
    """
    length = move.norm(dim=-1, keepdim=True)
    nothing = length <= 1e-5 * change.norm(dim=-1, keepdim=True)
    return torch.where(nothing, torch.zeros_like(move), move / length.clamp(min=1e-30))


def aligned(contribution: Contribution, target: Weights, layout: Layout) -> Contribution:
    """Return a client's model and projectors with hidden units in the order of `target`'s."""
    model, moved = align(
        contribution.model,
        target,
        layout,
        lambda i, a, b: transport(a, b, normalise=True, squared=False),
    )
    layers = zip(contribution.projectors, moved, layout.dense, strict=False)
    return contribution._replace(
        model=model, projectors=[carried(p, t, layer) for p, t, layer in layers]
    )


def carried(projector: Tensor, moved: Tensor | None, layer: Layer) -> Tensor:
    """Return TᵀPT (rows a, columns b of T) for P, or TᵀF for a factor F."""
    once = carry(projector.T.contiguous(), moved, layer).T
    if complete(projector):
        return carry(once.contiguous(), moved, layer)
    return once


Matrix = np.ndarray[Any, np.dtype[np.float64]]


def min_norm(gram: Matrix, bound: float) -> Matrix:
    """Return the minimum of ½αᵀGα with Σα = 1 and 0 <= α <= bound: weights of the shortest
    combination of vectors.

    Args:
        gram: G (N, N), inner products of the vectors; may be singular.
        bound: at least 1/N.

    Returns:
        α (N,), to about 1e-10; uniform where all are equally good.
    """
    # imported here since it takes a while, and few need it
    import clarabel
    from scipy import sparse

    n = len(gram)
    scale = float(np.trace(gram)) / len(gram)
    if bound * n <= 1 + 1e-9 or scale <= 0:
        return np.full(n, 1 / n)
    # Clarabel wants constraints as rows · α + slack = right, the slack in a cone
    limits = sparse.csc_matrix(np.vstack([np.ones(n), -np.eye(n), np.eye(n)]))
    right = np.concatenate([[1.0], np.zeros(n), np.full(n, bound)])
    slack = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(2 * n)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.max_threads = 1
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-12
    upper = sparse.csc_matrix(np.triu(gram / scale))
    found = clarabel.DefaultSolver(upper, np.zeros(n), limits, right, slack, settings).solve()
    solution: Matrix = np.clip(found.x, 0, bound)
    solution /= solution.sum()
    return solution
