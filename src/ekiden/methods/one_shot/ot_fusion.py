"""OT fusion: align the neurons of the models by optimal transport, then average."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import (
    Client,
    Count,
    CountOrZero,
    Fed,
    NonNegative,
    Size,
    UserError,
    Weights,
    Work,
    on_client,
    require,
)
from ekiden.core.base.outside import require_extra
from ekiden.core.tasks import Need
from ekiden.core.training.network import Network, trial
from ekiden.core.training.weights import Layer, Layout
from ekiden.methods.blocks.combining import Init, OneShot, Trained
from ekiden.methods.one_shot.average import Average
from ekiden.methods.one_shot.blocks.curvature import watched

Matching = Callable[[int, Tensor, Tensor], Tensor]
"""(layer number, its units' rows (a, d), the target's rows (b, d)) -> transport (a, b) whose
columns sum to 1."""


@dataclass(frozen=True)
class OTFusion(OneShot):
    """One-shot averaging after every model's neurons were matched to those of one model by optimal
    transport.

    Sidak Pal Singh, Martin Jaggi: Model Fusion via Optimal Transport. NeurIPS 2020.
    https://arxiv.org/abs/1910.05653.

    Layer by layer: undo the permutation of the layer before at the inputs, match the units to the
    target's by exact optimal transport between their weights (or activations), permute. The
    classifier is only averaged.

    Departures from the paper: the defaults are those of the authors' commands (exact transport,
    Euclidean distance, rows of weights normalised), not of their script. The classifier, whose
    outputs are classes, is not matched. Columns of the transport sum to 1 exactly (theirs to 1/(1 +
    n·1e-7)). Biases count as one more input of a unit, and normalisation layers follow their units.
    One-shot federated learning has no shared samples, so activations are taken on standard normal
    inputs. Networks with shortcuts are refused; the code can fuse them. Not offered: its cost
    normalisations, marginals by importance, and activations that are taken again after each aligned
    layer. Local training ends with the epoch that --select names, by default the best on validation
    data.
    """

    epochs: Count = 10
    """E, epochs at each client"""
    alignment: Literal["weights", "activations"] = "weights"
    """how units are compared"""
    samples: Count = 200
    """m, number of inputs on which activations are compared"""
    normalise: bool = True
    """compare weights regardless of their scale"""
    squared: bool = False
    """cost of a match: squared Euclidean distance instead of the distance"""
    sinkhorn: NonNegative = 0.0
    """entropic regularisation of the transport, 0.01 in the authors' script; 0: exact transport"""
    reference: CountOrZero = 0
    """number of the client whose model the others are aligned to; 0 is the first"""
    combine_heads: Literal["mean", "class-wise"] = "mean"
    """the classifier: averaged, or each row averaged over the clients with more than one sample of
    its class"""
    init: Init = "different"
    """initial models: the same for all clients, or a different one for each"""

    @property
    def needs(self) -> frozenset[Need]:
        """Need classes if the classifier is averaged by them."""
        return self.average.needs

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a target that is not one of the clients."""
        require_extra("methods", "OT fusion", "ot")
        require(
            self.reference < len(clients),
            "reference",
            self.reference,
            f"below {len(clients)}, the number of clients",
        )

    def check_network(self, model: Size) -> None:
        """Refuse a network whose layers do not follow one another."""
        self.average.check_network(model)
        check_chain(model.network.module, model.shape)

    def joined(self, fed: Fed, sent: Sequence[Trained]) -> Weights:
        """Align the models, and average them."""
        target = sent[self.reference].model
        probe = torch.randn(self.samples, *fed.shape, generator=fed.generator("x"))
        aligned = []
        for trained in sent:
            matching = self.matching(fed, trained.model, target, probe)
            model, _ = align(trained.model, target, fed.layout, matching)
            aligned.append(Trained(model, trained.counts))
        return self.average.aggregate(aligned, fed.layout)

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Trained:
        """Train on the plain loss."""
        return self.average.train(client, model)

    @property
    def average(self) -> Average:
        """The averaging after the alignment."""
        return Average(epochs=self.epochs, combine_heads=self.combine_heads, init=self.init)

    def matching(self, fed: Fed, model: Weights, target: Weights, probe: Tensor) -> Matching:
        """Return how units of `model` are matched to those of `target`."""
        settings = self.squared, self.sinkhorn
        if self.alignment == "weights":
            return lambda i, a, b: transport(a, b, self.normalise, *settings)
        fed.work.add(Work(2 * len(probe)))
        ours = activations(fed.network(model), fed.layout, probe)
        theirs = activations(fed.network(target), fed.layout, probe)
        return lambda i, a, b: transport(ours[i], theirs[i], False, *settings)

    def cost(self, clients: int, model: Size) -> int:
        """N·M; and 8·N·K of class counts for a class-wise classifier."""
        return self.average.cost(clients, model)


def align(
    model: Weights, target: Weights, layout: Layout, matching: Matching
) -> tuple[Weights, list[Tensor | None]]:
    """Return `model` with its hidden units in the order of `target`'s.

    Returns:
        The aligned model, and for each dense layer the transport of its inputs (None: they are as
        they were).
    """
    params = torch.zeros_like(target.params)
    buffers = target.buffers.clone()
    inputs: list[Tensor | None] = []
    # how the units that the next layer reads were moved; None: not at all
    moved: Tensor | None = None
    number = 0
    for layer in layout.layers:
        if layer.kind in ("linear", "conv"):
            inputs.append(moved)
            rows = carry(layer.matrix(model.params), moved, layer)
            moved = None
            if layer is not layout.head:
                moved = matching(number, rows, layer.matrix(target.params))
            layer.put(params, _move(rows, moved))
            number += 1
        else:
            if layer.kind == "other":
                raise UserError(
                    f"layer {layer.name} is of a kind whose units cannot be aligned: {_ADVICE}"
                )
            for part in layer.params:
                part.of(params).copy_(_move(part.of(model.params), moved))
            for part in layer.statistics:
                part.of(buffers).copy_(_move(part.of(model.buffers), moved))
    return Weights(params, buffers, model.counters.clone()), inputs


_ADVICE = "OT fusion needs a network whose layers follow one another, without shortcuts; use average instead"


def carry(rows: Tensor, moved: Tensor | None, layer: Layer) -> Tensor:
    """Return `rows` (r, inputs of `layer`) with their columns in the new order of the units that
    the layer reads.

    A unit is a block of columns: one weight, a kernel, or all positions of a channel that was
    flattened. The last column, the bias, stays.
    """
    if moved is None:
        return rows
    columns = rows.shape[1] - (layer.bias is not None)
    if columns % len(moved):
        raise UserError(f"layer {layer.name} does not read the layer before it: {_ADVICE}")
    blocks = rows[:, :columns].reshape(len(rows), len(moved), -1)
    carried = torch.einsum("rap,ab->rbp", blocks, moved).flatten(1)
    return torch.cat([carried, rows[:, columns:]], 1)


def _move(values: Tensor, moved: Tensor | None) -> Tensor:
    """Return values that belong to units, in the units' new order."""
    if moved is None:
        return values
    if len(values) != len(moved):
        raise UserError(f"a layer has {len(values)} values for {len(moved)} units: {_ADVICE}")
    return moved.T @ values  # (b, ...): each unit of the target, as a mean of ours


def transport(
    ours: Tensor, theirs: Tensor, normalise: bool, squared: bool, sinkhorn: float = 0.0
) -> Tensor:
    """Return the transport of units (a, d) to units (b, d), as (a, b) with columns that sum to 1.

    It is exact, and the identity where that is as good as any; or regularised where `sinkhorn` is
    above 0.
    """
    # imported here since it takes seconds, and few need it
    import ot

    cost = costs(ours, theirs, normalise, squared)
    if not torch.isfinite(cost).all():
        raise UserError("a model holds NaN or infinite weights: its units cannot be matched")
    a, b = cost.shape
    given = cost.cpu().numpy()
    if sinkhorn:
        found = ot.sinkhorn([], [], given, sinkhorn, method="sinkhorn_log", warn=False)
    else:
        found = ot.emd([], [], given, numItermax=10_000_000)
    plan = torch.from_numpy(found).to(cost)
    least = float((plan * cost).sum()) + 1e-10
    if not sinkhorn and a == b and float(cost.diagonal().mean()) <= least:
        plan = torch.eye(a, dtype=cost.dtype, device=cost.device) / a
    # columns sum to 1, so that each unit of the target is a mean of ours
    return (plan / plan.sum(0)).to(ours.dtype)


def costs(ours: Tensor, theirs: Tensor, normalise: bool, squared: bool) -> Tensor:
    """Return (a, b) float64 distances between units (a, d) and (b, d), or squares; of directions if
    `normalise`.
    """
    x = ours.double()
    y = theirs.double()
    if normalise:
        x = F.normalize(x, eps=1e-9)
        y = F.normalize(y, eps=1e-9)
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist") ** (2 if squared else 1)


def activations(network: nn.Module, layout: Layout, x: Tensor) -> list[Tensor]:
    """Return (units, samples x positions): outputs of each dense layer before its activation
    function, on the CPU.
    """
    with torch.no_grad(), watched(network, layout.dense) as seen:
        network(x.to(next(network.parameters()).device))
    found = []
    for layer in layout.dense:
        found += [out.transpose(0, 1).flatten(1).cpu() for _, out in seen[layer.name]]
    return found


def check_chain(network: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuse a network whose function changes when hidden units change places along with what reads
    them.
    """
    generator = torch.Generator().manual_seed(0)
    built = Network(copy.deepcopy(network).eval())
    model = built.weights()

    def shuffle(number: int, rows: Tensor, goal: Tensor) -> Tensor:
        return torch.eye(len(rows))[torch.randperm(len(rows), generator=generator)].to(rows)

    x = trial(built.module, torch.randn(2, *shape, generator=generator).to(built.params.device))
    with torch.no_grad():
        before = built.module(x)
        built.load(align(model, model, built.layout, shuffle)[0])
        after = built.module(x)
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max() + 1)):
        raise UserError(
            f"the network's layers do not simply follow one another (shortcuts?): {_ADVICE}"
        )
