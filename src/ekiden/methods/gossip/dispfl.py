"""DisPFL: decentralised personalised models, each with a sparse mask of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, cos, pi, prod
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from ekiden.authoring import (
    Client,
    Count,
    Fed,
    Fraction,
    Range,
    Size,
    State,
    UserError,
    Weights,
    mean,
    on_client,
)
from ekiden.core.engine import wire
from ekiden.methods.blocks.rounds import own_models, training_of
from ekiden.methods.gossip.topology import GossipMethod, sends


class Sparse(NamedTuple):
    """A sparse model as it travels."""

    values: Tensor  # (s·P,) the active parameters
    mask: Tensor  # (P / 8,) uint8, one bit a parameter
    rest: Weights  # no parameters; running statistics and counters


class Masks(NamedTuple):
    """What a client keeps: (P,) bool."""

    trained: Tensor  # the mask with which its model was trained
    current: Tensor  # the mask with which it will be trained


@dataclass(frozen=True)
class DisPFL(GossipMethod):
    """Personalised sparse models: clients average where their masks overlap, train, and move their
    masks.

    Rong Dai, Li Shen, Fengxiang He, Xinmei Tian, Dacheng Tao: DisPFL: Towards
    Communication-Efficient Personalized Federated Learning via Decentralized Sparse Training. ICML
    2022. https://arxiv.org/abs/2206.00187

    In each round every client gets the active weights and masks that its peers had after the
    previous round. The result is one model per client, as it is after its last training.

    Departures from the paper: each client draws its own first mask. Inactive weights get no
    gradient, instead of being set to zero after each step (the same unless the gradient's norm is
    limited). Weights that were just pruned may regrow, as in the authors' code. Weights regrow at
    random, as in the authors' script; `regrow = "gradient"` is the default of their code. All
    clients take part in every round. Statistics of normalisation layers travel with the weights and
    are averaged evenly. Local training ends with the epoch that --select names, by default the best
    on validation data.
    """

    rounds: Count = 500
    """T, rounds of exchange and training"""
    epochs: Count = 5
    """E, epochs at each client per round"""
    density: Fraction = 0.5
    """s, share of active weights"""
    prune: Annotated[float, Range(least=0, most=1)] = 0.5
    """a, share of active weights that is moved in the first round; falls to 0 as a cosine"""
    regrow: Literal["random", "gradient"] = "random"
    """where weights regrow: anywhere (the authors' script), or where the gradient of a batch is
    largest"""
    sparsity_distribution: Literal["erk", "uniform"] = "erk"
    """density of the tensors: by the Erdős–Rényi kernel (small tensors are denser), or the same for
    all"""
    topology: str = "peers:0.1"
    """graph of the clients: peers:K (a number, or a share of all), complete, ring, torus, star,
    exponential, erdos_renyi:P[:SEED], matching or one_peer"""
    lr_decay: Fraction = 0.998
    """factor of the learning rate η after each round"""

    traits = replace(GossipMethod.traits, private=Masks)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < self.rounds:
            shown = fed.call_each(self.show, own_models(fed, s))
            learned = []
            for k, circle in zip(fed.clients, self.circles(fed, s), strict=True):
                learned.append(fed.call(self.learn, k, [shown[j] for j in circle], s.step))
            s = s.next(personal=tuple(learned))
            yield s

    @on_client(gives="model")
    def show(self, client: Client, model: Weights) -> Sparse:
        """Return the active weights, with the mask that they were trained with."""
        if client.state is None:
            draw = client.generator("mask")
            first = random_mask(client.shapes, self.active(client.shapes), draw).to(
                model.params.device
            )
            client.state = Masks(first, first)
        mask = client.state.trained
        return Sparse(model.params[mask], pack(mask), model.with_params(model.params[:0]))

    @on_client(gives="model")
    def learn(self, client: Client, shown: list[Sparse], round: int) -> Weights:
        """Average with the client's mask, train, change the mask."""
        mask = client.state.current
        model = overlap(shown, len(mask))
        model = model.with_params(model.params * mask)
        training = training_of(client, self.lr_decay, round)
        model = client.fit(model, epochs=self.epochs, training=training, penalty=Inactive(~mask))
        where = client.gradient(model) if self.regrow == "gradient" else None
        moved = move(
            mask, model.params, client.shapes, self.share(round), where, client.seed("regrow")
        )
        client.state = Masks(mask, moved)
        return model

    def share(self, round: int) -> float:
        """Return α_t = (a / 2)(1 + cos(πt / T))."""
        return self.prune / 2 * (1 + cos(pi * round / self.rounds))

    def active(self, shapes: Sequence[tuple[int, ...]]) -> list[int]:
        """Return the number of active weights of each tensor."""
        shares = densities(shapes, self.density, self.sparsity_distribution == "erk")
        return [
            min(prod(shape), max(1, round(d * prod(shape))))
            for shape, d in zip(shapes, shares, strict=True)
        ]

    def cost(self, clients: int, model: Size) -> int:
        """Along each edge 4 bytes for an active weight, a bit for each weight, and the
        statistics.
        """
        rest = model.network.weights()
        active = sum(self.active(model.network.shapes))
        sparse = 4 * active + ceil(len(rest.params) / 8) + wire.size((rest.buffers, rest.counters))
        return sends(self.topology, clients, self.rounds) * sparse


@dataclass(frozen=True)
class Inactive:
    """Inactive weights stay zero: no gradient moves them, and neither decay nor momentum move a
    zero.
    """

    where: Tensor  # (P,) bool
    fixed = True

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Drop their gradient."""
        grad.masked_fill_(self.where, 0.0)


def overlap(shown: Sequence[Sparse], size: int) -> Weights:
    """Return for each coordinate the mean over the clients whose mask contains it; 0 if no mask
    does.
    """
    total = torch.zeros(size, device=shown[0].values.device)
    count = torch.zeros_like(total)
    for values, packed, _ in shown:
        add_where(packed, values, 1, total, count)
    return mean([s.rest for s in shown]).with_params(total / count.clamp(min=1))


def add_where(
    packed: Tensor | None, values: Tensor, weight: int, total: Tensor, count: Tensor
) -> None:
    """Add a client's values, times its weight, where its mask is true (None: everywhere), and the
    weight to `count` (P,) there.
    """
    mask = torch.ones_like(total, dtype=torch.bool)
    if packed is not None:
        mask = unpack(packed, len(total))
    if int(mask.sum()) != len(values):
        raise UserError(
            "a client's mask does not fit its weights: use the same network at every client"
        )
    total[mask] += weight * values
    count[mask] += weight


def densities(shapes: Sequence[tuple[int, ...]], density: float, erk: bool) -> list[float]:
    """Return the density of each tensor, so that all together have `density`.

    Erdős–Rényi kernel: in proportion to (sum of dimensions) / (product of dimensions). Densities
    above 1 become 1, and the rest is distributed again.
    """
    sizes = [prod(shape) for shape in shapes]
    raw = [sum(shape) / max(1, prod(shape)) if erk else 1.0 for shape in shapes]
    dense: set[int] = set()
    while len(dense) < len(shapes):
        sparse = [i for i in range(len(shapes)) if i not in dense]
        budget = density * sum(sizes) - sum(sizes[i] for i in dense)
        scale = budget / sum(sizes[i] * raw[i] for i in sparse)
        over = {i for i in sparse if scale * raw[i] > 1}
        # tensors above density 1 keep all weights, and the others share what that leaves
        if not over:
            return [1.0 if i in dense else scale * raw[i] for i in range(len(shapes))]
        dense |= over
    return [1.0] * len(shapes)


def random_mask(
    shapes: Sequence[tuple[int, ...]], active: Sequence[int], draw: Generator
) -> Tensor:
    """Return (P,) bool with this many active weights in each tensor."""
    parts = []
    for shape, count in zip(shapes, active, strict=True):
        part = torch.zeros(prod(shape), dtype=torch.bool)
        part[torch.randperm(prod(shape), generator=draw)[:count]] = True
        parts.append(part)
    return torch.cat(parts)


def move(
    mask: Tensor,
    params: Tensor,
    shapes: Sequence[tuple[int, ...]],
    share: float,
    where: Tensor | None,
    seed: int,
) -> Tensor:
    """In each tensor prune the smallest `share` of active weights and regrow as many among the
    inactive ones.

    Args:
        mask: (P,) bool.
        params: (P,) whose size decides what is pruned.
        shapes: shapes of the tensors.
        share: α_t.
        where: (P,) regrow where its absolute value is largest; at random if None.
        seed: seed of the random places.
    """
    moved = mask.clone()
    start = 0
    draw = Generator().manual_seed(seed)
    for shape in shapes:
        # a view, so that changing it changes `moved`
        part = moved[start : start + prod(shape)]
        count = ceil(share * int(part.sum()))
        sizes = params[start : start + prod(shape)].abs().masked_fill(~part, float("inf"))
        part[sizes.argsort(stable=True)[:count]] = False
        score = torch.rand(prod(shape), generator=draw)
        if where is not None:
            score = where[start : start + prod(shape)].abs()
        # a score below all others, since active weights do not regrow
        score = score.to(part.device).masked_fill(part, -1.0)
        part[score.argsort(descending=True, stable=True)[:count]] = True
        start += prod(shape)
    return moved


def pack(mask: Tensor) -> Tensor:
    """Pack a (P,) bool mask, eight entries in each byte."""
    packed = np.packbits(mask.cpu().numpy(), bitorder="little")
    return torch.from_numpy(packed).to(mask.device)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Return the mask of `size` entries."""
    bits = np.unpackbits(packed.cpu().numpy(), bitorder="little")[:size]
    return torch.from_numpy(bits).bool().to(packed.device)
