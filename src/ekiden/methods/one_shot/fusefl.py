"""FuseFL: networks side by side that read each other's features block by block."""

import copy
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm
from typing import Annotated, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    Fed,
    Forward,
    Method,
    Objective,
    OwnSamples,
    Positive,
    Range,
    Ref,
    Size,
    State,
    Traits,
    UserError,
    Weights,
    Work,
    mean,
    on_client,
)
from ekiden.core.models.split import as_split
from ekiden.core.training import frozen
from ekiden.core.training.network import Dense, Network, fresh, resize, trial
from ekiden.methods.blocks.symmetric import numbers, symmetric, upper


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """Mean and covariance of the features of each class."""

    counts: Annotated[Tensor, OwnSamples]  # (K,) int32, samples
    means: Tensor  # (K, A) float32; zeros for a class without samples
    covariances: Tensor  # (K, A(A + 1)/2) float32, upper triangles of (1/n) Σ (h - μ)(h - μ)ᵀ

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        size = self.means.shape[-1]
        shapes = [
            (len(self.counts),),
            (len(self.counts), size),
            (len(self.counts), numbers(size)),
        ]
        if [tuple(t.shape) for t in (self.counts, self.means, self.covariances)] != shapes:
            raise UserError(
                "class Gaussians do not fit together: use the same method and model everywhere"
            )
        finite = torch.isfinite(self.means.sum() + self.covariances.sum())
        if not finite or (self.counts < 0).any():
            raise UserError(
                "class Gaussians of negative counts or of values that are not finite: check the "
                "data"
            )


def measure(batches: Iterable[tuple[Tensor, Tensor]], classes: int) -> ClassGaussians:
    """Return the Gaussians of features (b, A) with labels (b,)."""
    parts = list(batches)
    h = torch.cat([part[0] for part in parts]).double()
    y = torch.cat([part[1] for part in parts])
    counts = []
    means = []
    covariances = []
    for c in range(classes):
        own = h[y == c]
        n = max(len(own), 1)
        means.append(own.sum(0) / n)
        centred = own - means[-1]
        counts.append(len(own))
        covariances.append(upper(centred.T @ centred / n))
    return ClassGaussians(
        torch.tensor(counts, dtype=torch.int32),
        torch.stack(means).float(),
        torch.stack(covariances).float(),
    )


def pooled(parts: Sequence[ClassGaussians], c: int) -> tuple[int, Tensor, Tensor]:
    """Return number, mean (A,) and unbiased covariance (A, A) of class c over all parts,
    float64.
    """
    weights = torch.stack([p.counts[c] for p in parts]).double()
    n = weights.sum().clamp(min=1)
    means = torch.stack([p.means[c] for p in parts]).double()
    mean = weights @ means / n
    away = means - mean
    covariances = torch.stack([p.covariances[c] for p in parts]).double()
    # Σ n_k Σ_k + Σ n_k (μ_k - μ)(μ_k - μ)ᵀ: the scatter within clients and that of their means
    within = symmetric(weights @ covariances)
    between = (away * weights[:, None]).T @ away
    return int(weights.sum()), mean, (within + between) / (n - 1).clamp(min=1)


def drawn(
    parts: Sequence[ClassGaussians], each: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `each` features (m, A) of every class that a client has; return them with their classes
    (m,).
    """
    features = []
    labels = []
    for c in range(len(parts[0].counts)):
        n, mean, covariance = pooled(parts, c)
        if n:
            scales, axes = torch.linalg.eigh(covariance)
            noise = torch.randn(each, len(mean), generator=generator, dtype=torch.float64)
            features.append(mean + noise * scales.clamp(min=0).sqrt() @ axes.T)
            labels.append(torch.full((each,), c))
    return torch.cat(features).float(), torch.cat(labels)


def calibrate(
    head: nn.Module, x: Tensor, y: Tensor, lr: float, generator: torch.Generator, batch: int = 128
) -> None:
    """Make one shuffled pass of plain SGD on the cross-entropy of `head` at features (m, A) of
    classes (m,).
    """
    params = list(head.parameters())
    for rows in torch.split(torch.randperm(len(x), generator=generator), batch):
        with torch.enable_grad():
            slopes = torch.autograd.grad(F.cross_entropy(head(x[rows]), y[rows]), params)
        with torch.no_grad():
            for param, slope in zip(params, slopes, strict=True):
                param.sub_(slope, alpha=lr)


M = TypeVar("M", bound=nn.Module)


class Adapter(nn.Linear):
    """A 1x1 convolution over maps (b, C, h, w), a linear layer over vectors (b, C)."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (b, C, ...) to (b, C', ...)."""
        return F.linear(input.movedim(1, -1), self.weight, self.bias).movedim(-1, 1)


class Stage(nn.Module):
    """One client's block and the adapter before it."""

    def __init__(self, block: nn.Module, adapter: Adapter | None = None) -> None:
        super().__init__()
        # from the channels of all clients to those that the block reads; None: their mean
        self.adapter = adapter
        self.block = block  # layers of the extractor

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Return features (b, C', ...) from those of every client in the level before, each (b, C,
        ...).
        """
        out: Tensor = self.block(self.joined(parts))
        return out

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return what the block reads."""
        if self.adapter is None:
            return average(parts)
        joined: Tensor = self.adapter(torch.cat(list(parts), 1))
        return joined


class Fused(nn.Module):
    """Levels of stages; each stage reads the outputs of all stages of the level before."""

    def __init__(self, levels: Sequence[Sequence[Stage]], head: nn.Module, frozen: int = 0) -> None:
        super().__init__()
        # the levels, from the input on; a level has one stage per client, or only the owner's
        self.levels = nn.ModuleList(nn.ModuleList(level) for level in levels)
        # it reads the sum of what the last level's stages give
        self.classifier = head
        self.frozen = frozen  # number of levels that are not trained and keep their statistics
        self.levels[:frozen].requires_grad_(False)

    def train(self, mode: bool = True) -> "Fused":
        """Set the mode; frozen levels stay in evaluation mode."""
        super().train(mode)
        self.levels[: self.frozen].eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (b, K) of inputs (b, ...)."""
        logits: Tensor = self.classifier(self.features(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """Return the sum of the outputs of the last level's stages, (b, A)."""
        parts = [x]
        for level in self.levels:
            assert isinstance(level, nn.ModuleList)
            parts = [stage(parts) for stage in level]
        return torch.stack(parts).sum(0)


def average(parts: Sequence[Tensor]) -> Tensor:
    """Return the mean of tensors of one shape; a single tensor is returned unchanged."""
    # no division: a single part may be whole numbers, as tokens are
    if len(parts) == 1:
        return parts[0]
    return sum(parts[1:], parts[0]) / len(parts)


def filled(module: M, weights: Weights) -> M:
    """Return `module`, all of whose parameters are trainable, with these values."""
    Network(module, weights.params.device).load(weights)
    return module


def read(module: nn.Module) -> Weights:
    """Return the values of `module`, all of whose parameters are trainable, as a copy."""
    return Network(copy.deepcopy(module), next(module.parameters()).device).weights()


def content(module: nn.Module) -> int:
    """Return the bytes of the values of `module` on the wire."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


def cut(features: nn.Module, blocks: int) -> list[nn.Module]:
    """Divide the children of an extractor among `blocks` blocks, with as equal numbers of layers as
    possible.

    A block begins with a linear or convolutional layer, or a child that holds such layers, or with
    the flattening before it. Extractors with fewer of them than `blocks` are divided before norms
    too.
    """
    if not isinstance(features, nn.Sequential):
        raise UserError(
            "FuseFL divides the extractor between its children: make `features` an nn.Sequential"
        )
    children = list(features)
    starts = [i for i, child in enumerate(children) if dense_of(child)]
    if len(starts) < blocks:
        starts = [i for i, child in enumerate(children) if list(child.parameters())]
    if len(starts) < blocks:
        raise UserError(
            f"the extractor has {len(starts)} layers with weights: use --blocks "
            f"{max(len(starts), 1)}"
        )
    begins = [int(part[0]) for part in torch.tensor(starts).tensor_split(blocks)]
    for i in range(1, blocks):
        # flattening belongs behind the adapter, which joins maps and not their positions
        while isinstance(children[begins[i] - 1], nn.Flatten):
            begins[i] -= 1
    # what comes before the first of them belongs to the first block
    places = pairwise([0, *begins[1:], len(children)])
    return [nn.Sequential(*children[begin:end]) for begin, end in places]


def dense_of(module: nn.Module) -> list[Dense]:
    """Return the linear and convolutional layers."""
    return [m for m in module.modules() if isinstance(m, Dense)]


def channels(blocks: Sequence[nn.Module]) -> list[int]:
    """Return C of each block: the outputs of the last linear or convolutional layer up to its
    end.
    """
    counts: list[int] = []
    for block in blocks:
        if dense := dense_of(block):
            counts.append(len(dense[-1].weight))
        else:
            counts.append(counts[-1])
    return counts


def thin(network: nn.Module, width: float) -> nn.Module:
    """Return a copy of `network` with `width` times the hidden units; unless that is 1, its values
    mean nothing.

    Widths are rounded to multiples of the numbers of groups of its GroupNorms, and are never less
    than these.
    """
    network = copy.deepcopy(network)
    if width == 1:
        return network
    multiple = lcm(*(m.num_groups for m in network.modules() if isinstance(m, nn.GroupNorm)))

    def scaled(n: int) -> int:
        return max(1, round(width * n / multiple)) * multiple

    last = dense_of(network)[-1]
    # outputs of the layer before, as they were
    before = 0
    for name, layer in network.named_modules():
        if isinstance(layer, Dense):
            if isinstance(layer, nn.Conv2d) and layer.groups > 1:
                raise UserError("a convolution in groups cannot be made thin: use --hidden-width=1")
            outputs, inputs = layer.weight.shape[:2]
            if before and isinstance(layer, nn.Linear) and inputs % before:
                raise UserError(
                    f"layer {name} does not read the layer before it: use --hidden-width=1"
                )
            narrow = inputs
            if before and isinstance(layer, nn.Linear):
                # it reads all positions of a flattened map, each with as many channels
                positions = inputs // before
                narrow = scaled(before) * positions
            elif before:
                narrow = scaled(inputs)
            resize(layer, outputs if layer is last else scaled(outputs), narrow)
            before = outputs
        elif isinstance(layer, _BatchNorm | nn.GroupNorm) and layer.affine:
            resize_norm(layer, scaled(layer.weight.numel()))
        elif list(layer.parameters(recurse=False)):
            raise UserError(
                f"layer {name} is of a kind that cannot be made thin: use --hidden-width=1"
            )
    return network


def resize_norm(layer: _BatchNorm | nn.GroupNorm, units: int) -> None:
    """Give a norm that scales its channels another number of channels, with initial values."""
    layer.weight = nn.Parameter(torch.ones(units))
    layer.bias = nn.Parameter(torch.zeros(units))
    if isinstance(layer, nn.GroupNorm):
        layer.num_channels = units
    else:
        layer.num_features = units
        if layer.running_mean is not None:
            layer.running_mean = torch.zeros(units)
            layer.running_var = torch.ones(units)


# widths that are tried, as shares of the network's; of 64 channels each step is one
STEPS = 64


class KeptBlocks(NamedTuple):
    """What a client keeps."""

    levels: list[list[Weights]]  # the fused blocks so far, of all clients in their order
    blocks: list[Weights]  # its own blocks after these
    head: Weights  # its own classifier


@dataclass(frozen=True)
class Levels(State):
    """The state of the run."""

    seed: int = 0  # seed of the clients' common thin network
    # for each round, each client's block with the adapter before it
    sent: tuple[tuple[Ref[Weights], ...], ...] = ()


@dataclass(frozen=True)
class FuseFL(Method):
    """The network is trained block by block, each on top of the frozen blocks of all clients.

    Zhenheng Tang, Yonggang Zhang, Peijie Dong, Yiu-ming Cheung, Amelie Chi Zhou, Bo Han, Xiaowen
    Chu: FuseFL: One-Shot Federated Learning through the Lens of Causality with Progressive Model
    Fusion. NeurIPS 2024. https://arxiv.org/abs/2410.20380 (Figure 4).

    In round b every client trains its blocks from b on and its classifier. Then block b of all
    clients is frozen, and these blocks stand side by side. A client's block b + 1 reads all of them
    through an adapter, a 1x1 convolution, which the client trains together with that block. The
    result is the network of all clients' blocks.

    Departures from the paper: written after the authors' code and the paper's abstract and Figure
    4; the rest of the paper's text was not available. Frozen blocks stay in evaluation mode; in the
    code their BatchNorms and dropouts stay in training mode. As in the code, the averaged
    classifier reads the sum of the last blocks' features and is then calibrated on samples from
    class Gaussians (CCVR), which takes one more communication. The code's pooled covariances keep
    the outer product of the mean because of a misplaced parenthesis; ours do not. The width that
    fits into N models is ours. Local training ends with its last epoch, whatever --select says, as
    in the code.
    """

    blocks: Count = 2
    """K, blocks of the network and rounds"""
    epochs: Count = 100
    """E, epochs at each client per round"""
    hidden_width: Annotated[float, Range(least=0, most=1)] = 0.0
    """width of the hidden layers as a share of the network's; 0: the widest for which no more than
    N models move"""
    adapter: Literal["conv", "mean"] = "conv"
    """what a block reads from the blocks before it: a 1x1 convolution of all channels, or their
    mean"""
    calibration_samples: Count = 5000
    """number of virtual features of each class on which the classifier is calibrated, once each"""
    calibration_lr: Positive = 0.01
    """learning rate of the calibration (plain SGD, batches of 128)"""

    traits = Traits(private=KeptBlocks, needs=CLASSES)

    def selection(self, select: str) -> str:
        """Return the last epoch, as in the authors' code."""
        return "last"

    def check_network(self, model: Size) -> None:
        """Refuse a network that cannot be divided, or not be made thin."""
        network = copy.deepcopy(model.network.module).cpu().eval()
        if frozen.digest(network) or not all(p.requires_grad for p in network.parameters()):
            raise UserError(
                "some of the network's layers are frozen, and FuseFL trains every block: unfreeze "
                "them"
            )
        split = as_split(network)
        if not any(isinstance(m, nn.Linear) for m in split.head.modules()):
            raise UserError("FuseFL needs a linear classifier: let `head` be or hold an nn.Linear")
        whole = Fused(
            [[Stage(part)] for part in cut(split.features, self.blocks)], split.head
        ).eval()
        x = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
        x = trial(model.network.module, x)
        with torch.no_grad():
            if not torch.allclose(whole(x), network(x), rtol=1e-4, atol=1e-5):
                raise UserError(
                    "the network is not head(features(x)), which is what FuseFL divides: use "
                    "ensemble"
                )
            try:
                self.result_network(network, 2).eval()(x)
            except RuntimeError as error:
                raise UserError(
                    f"thin blocks of this network do not fit each other ({error}): use "
                    "--hidden-width=1"
                ) from None

    def run(self, fed: Fed, s: Levels) -> Iterator[State]:
        """Yield the state after each round; each round gets the blocks of the one before."""
        if s.step == 0:
            s = replace(
                s, seed=int(torch.randint(1 << 62, (), generator=fed.generator("thin network")))
            )
        while s.step < self.blocks:
            before = s.sent[-1] if s.sent else ()
            sent = fed.call_all(self.train, INITIAL, before, len(fed.clients), s.seed)
            s = s.next(sent=(*s.sent, sent))
            if s.step == self.blocks:
                s = replace(s, model=self.fused(fed, s))
            yield s
        if s.step < self.steps(len(fed.clients)):
            measured = fed.call_all(self.measure, INITIAL, s.sent[-1], s.seed)
            s = s.next(model=self.calibrated(fed, s, fed.get(measured)))
            yield s

    def fused(self, fed: Fed, s: Levels) -> Weights:
        """Return the network of all blocks and classifiers."""
        stages = [fed.get(level) for level in s.sent]
        parts, head = self.parts(fed.network(fed.get(INITIAL)), len(fed.clients))
        levels = self.filled(parts, stages)
        heads = fed.get(fed.call_all(self.head))
        return Network(Fused(levels, filled(head, mean(heads)))).weights()

    def calibrated(self, fed: Fed, s: Levels, gaussians: Sequence[ClassGaussians]) -> Weights:
        """Return the network with its classifier calibrated."""
        assert isinstance(s.model, Weights)
        result = self.result_network(fed.network(fed.get(INITIAL)).cpu(), len(fed.clients))
        network = Network(result)
        network.load(s.model)
        generator = fed.generator("calibration")
        x, y = drawn(gaussians, self.calibration_samples, generator)
        calibrate(result.get_submodule("classifier"), x, y, self.calibration_lr, generator)
        fed.work.add(Work(len(x), len(x)))
        return network.weights()

    @on_client(gives="model")
    def train(
        self, client: Client, initial: Weights, before: tuple[Weights, ...], clients: int, seed: int
    ) -> Weights:
        """Train all blocks that are not yet frozen, and the classifier.

        Args:
            client: whose state is `KeptBlocks`.
            initial: says what the network is like; also its values, where it is not thin.
            before: the blocks that were trained last, of all clients.
            clients: N.
            seed: of the thin network's values.
        """
        parts, head = self.parts(client.network(initial), clients, seed)
        fused: list[list[Weights]] = []
        if before:
            kept: KeptBlocks = client.state
            fused = [*kept.levels, list(before)]
            head = filled(head, kept.head)
            parts[len(fused) :] = [
                filled(p, w) for p, w in zip(parts[len(fused) :], kept.blocks, strict=True)
            ]
        frozen = self.filled(parts, fused)
        own = [
            self.stage(parts, len(fused), clients, client.seed("adapter")),
            *map(Stage, parts[len(fused) + 1 :]),
        ]
        network = Network(
            Fused([*frozen, *([stage] for stage in own)], head, len(frozen)),
            initial.params.device,
        )
        network.load(
            client.fit(
                network.weights(),
                epochs=self.epochs,
                objective=Through(client.loss, max(len(before), 1)),
                training=replace(client.training, select="last"),
                network=network,
            )
        )
        client.state = KeptBlocks(fused, [read(stage.block) for stage in own[1:]], read(head))
        return read(own[0])

    @on_client(gives="model")
    def head(self, client: Client) -> Weights:
        """Return the client's classifier."""
        kept: KeptBlocks = client.state
        return kept.head

    @on_client(gives="summary")
    def measure(
        self, client: Client, initial: Weights, last: tuple[Weights, ...], seed: int
    ) -> ClassGaussians:
        """Return the class Gaussians of the fused network's features."""
        parts, head = self.parts(client.network(initial), len(last), seed)
        levels = [*client.state.levels, list(last)]
        module = Fused(self.filled(parts, levels), head).to(initial.params.device).eval()
        batches = client.batches(passes=len(last))
        with torch.no_grad():
            features = ((module.features(x).flatten(1), y) for x, y in batches)
            return measure(features, client.classes)

    def parts(
        self, network: nn.Module, clients: int, seed: int = 0
    ) -> tuple[list[nn.Module], nn.Module]:
        """Return blocks and classifier of the network of `width`, newly drawn unless that is 1."""
        width = self.hidden_width or self.fitting(network, clients)
        if width != 1:
            network = fresh(thin(network, width), seed)
        split = as_split(network.requires_grad_(True))
        return cut(split.features, self.blocks), split.head

    def fitting(self, network: nn.Module, clients: int) -> float:
        """Return the widest of 1/64, ..., 1 with which no more than N models move, or the first."""
        limit = clients * content(network)
        network = copy.deepcopy(network).to("meta")

        def moves(step: int) -> int:
            return self.moves(thin(network, step / STEPS), clients)

        fitting = bisect_right(range(1, STEPS + 1), limit, key=moves)
        return max(fitting, 1) / STEPS

    def stage(self, parts: Sequence[nn.Module], b: int, clients: int, seed: int = 0) -> Stage:
        """Return block b with the adapter before it, newly drawn."""
        if b == 0 or self.adapter == "mean":
            return Stage(copy.deepcopy(parts[b]))
        size = channels(parts)[b - 1]
        adapter = fresh(Adapter(clients * size, size), seed)
        assert isinstance(adapter, Adapter)
        return Stage(copy.deepcopy(parts[b]), adapter)

    def filled(
        self, parts: Sequence[nn.Module], levels: Sequence[Sequence[Weights]]
    ) -> list[list[Stage]]:
        """Return the clients' blocks of each level, with their adapters and these values."""
        found = []
        for b, level in enumerate(levels):
            found.append([filled(self.stage(parts, b, len(level)), values) for values in level])
        return found

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network of all clients' blocks, level by level."""
        parts, head = self.parts(network, clients)
        levels = []
        for b in range(self.blocks):
            levels.append([self.stage(parts, b, clients) for _ in range(clients)])
        return Fused(levels, head)

    def steps(self, clients: int) -> int:
        """Return K, and one for the calibration."""
        return self.blocks + 1

    def cost(self, clients: int, model: Size) -> int:
        """N·(Σ_b M_b + M_head) + N·(N - 1)·Σ_{b < K} M_b, with M_b the bytes of a thin block and
        its adapter.

        The calibration adds N·(N - 1)·M_K + 4N·C·(1 + A + A(A + 1)/2), for C classes and A
        features.
        """
        network = model.network.module
        return self.moves(
            thin(network, self.hidden_width or self.fitting(network, clients)), clients
        )

    def moves(self, network: nn.Module, clients: int) -> int:
        """Return the same for a thin network."""
        split = as_split(network)
        parts = cut(split.features, self.blocks)
        pieces = list(map(content, parts))
        if self.adapter == "conv":
            for b, size in enumerate(channels(parts[:-1]), 1):
                pieces[b] += 4 * size * (clients * size + 1)
        own = sum(pieces) + content(split.head)
        total = clients * (own + (clients - 1) * sum(pieces[:-1]))
        linear = [m for m in split.head.modules() if isinstance(m, nn.Linear)]
        features = linear[0].in_features
        classes = linear[-1].out_features
        gaussians = 4 * classes * (1 + features + numbers(features))
        return total + clients * (clients - 1) * pieces[-1] + clients * gaussians


@dataclass(frozen=True)
class Through(Objective):
    """A loss behind frozen blocks of so many clients, each of which is a pass forward."""

    loss: Objective
    columns: int  # stages of the first level

    @property
    def fixed(self) -> bool:
        """Whether the loss is."""
        return self.loss.fixed

    def further(self, batch: int) -> Work:
        """Count the passes in addition to the first."""
        return Work((self.columns - 1) * batch, 0)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a mini-batch."""
        return self.loss(forward, x, y)
