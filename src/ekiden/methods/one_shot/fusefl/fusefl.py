"""FuseFL: networks that are fused block by block."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    Client,
    Count,
    Fed,
    Forward,
    Method,
    Objective,
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
from ekiden.methods.one_shot.fusefl.ccvr import ClassGaussians, calibrate, drawn, measure
from ekiden.methods.one_shot.fusefl.fused import Adapter, Fused, Stage, channels, content, cut, filled, read, thin
from ekiden.models.split import as_split
from ekiden.training import frozen
from ekiden.training.network import Network, fresh, trial

STEPS = 64  # widths that are tried, as shares of the network's


class KeptBlocks(NamedTuple):
    """What a client keeps."""

    levels: list[list[Weights]]  # the fused blocks so far, of all clients in their order
    blocks: list[Weights]  # its own blocks after these
    head: Weights  # its own classifier


@dataclass(frozen=True)
class Levels(State):
    """The state of the run."""

    seed: int = 0  # seed of the clients' common thin network
    sent: tuple[tuple[Ref[Weights], ...], ...] = ()  # for each round, each client's block with the adapter before it


@dataclass(frozen=True)
class FuseFL(Method):
    """The network is trained block by block, each on top of the frozen blocks of all clients.

    Zhenheng Tang, Yonggang Zhang, Peijie Dong, Yiu-ming Cheung, Amelie Chi Zhou, Bo Han, Xiaowen Chu: FuseFL: One-Shot
    Federated Learning through the Lens of Causality with Progressive Model Fusion. NeurIPS 2024.
    https://arxiv.org/abs/2410.20380 (Figure 4).

    In round b every client trains its blocks from b on and its classifier. Then block b of all clients is frozen, and
    these blocks stand side by side. A client's block b + 1 reads all of them through an adapter, a 1x1 convolution,
    which the client trains together with that block. The result is the network of all clients' blocks.

    Departures from the paper: written after the authors' code and the paper's abstract and Figure 4; the rest of the
    paper's text was not available. Frozen blocks stay in evaluation mode; in the code their BatchNorms and dropouts
    stay in training mode. As in the code, the averaged classifier reads the sum of the last blocks' features and is
    then calibrated on samples from class Gaussians (CCVR), which takes one more communication. The code's pooled
    covariances keep the outer product of the mean because of a misplaced parenthesis; ours do not. The width that fits
    into N models is ours. Local training ends with its last epoch, whatever --select says, as in the code.
    """

    blocks: Count = 2
    """K, blocks of the network and rounds"""
    epochs: Count = 100
    """E, epochs at each client per round"""
    hidden_width: Annotated[float, Range(least=0, most=1)] = 0.0
    """width of the hidden layers as a share of the network's; 0: the widest for which no more than N models move"""
    adapter: Literal["conv", "mean"] = "conv"
    """what a block reads from the blocks before it: a 1x1 convolution of all channels, or their mean"""
    combine_heads: Literal["calibrated", "average", "logits"] = "calibrated"
    """classifier of the result: the average of the clients' classifiers on the sum of the last blocks' features,
    calibrated or not; or the mean logits of the clients' classifiers, each on its own last block"""
    calibration_samples: Count = 5000
    """number of virtual features of each class on which the classifier is calibrated, once each"""
    calibration_lr: Positive = 0.01
    """learning rate of the calibration (plain SGD, batches of 128)"""

    traits = Traits(private=KeptBlocks, needs=CLASSES)

    def selection(self, select: str) -> str:
        """Return the last epoch, as in the authors' code."""
        return "last"

    def start(self) -> Levels:
        """Start without a model: it needs the last block."""
        return Levels(model=None)

    def check_network(self, model: Size) -> None:
        """Refuse a network that cannot be divided, or not be made thin."""
        network = copy.deepcopy(model.network.module).cpu().eval()
        if frozen.digest(network) or not all(p.requires_grad for p in network.parameters()):
            raise UserError("some of the network's layers are frozen, and FuseFL trains every block: unfreeze them")
        split = as_split(network)
        if not any(isinstance(m, nn.Linear) for m in split.head.modules()):
            raise UserError("FuseFL needs a linear classifier: let `head` be or hold an nn.Linear")
        whole = Fused([[Stage(part)] for part in cut(split.features, self.blocks)], [split.head]).eval()
        x = torch.randn(2, *model.shape, generator=torch.Generator().manual_seed(0))
        x = trial(model.network.module, x)
        with torch.no_grad():
            if not torch.allclose(whole(x), network(x), rtol=1e-4, atol=1e-5):
                raise UserError("the network is not head(features(x)), which is what FuseFL divides: use ensemble")
            try:
                self.result_network(network, 2).eval()(x)
            except RuntimeError as error:
                raise UserError(
                    f"thin blocks of this network do not fit each other ({error}): use --hidden-width=1"
                ) from None

    def run(self, fed: Fed, s: Levels) -> Iterator[State]:
        """Yield the state after each round; each round gets the blocks of the one before."""
        if s.step == 0:
            s = replace(s, seed=int(torch.randint(1 << 62, (), generator=fed.generator("thin network"))))
        while s.step < self.blocks:
            before = s.sent[-1] if s.sent else ()
            sent = tuple(fed.call(self.train, k, INITIAL, before, len(fed.clients), s.seed) for k in fed.clients)
            s = s.next(sent=(*s.sent, sent))
            if s.step == self.blocks:
                s = replace(s, model=self.fused(fed, s))
            yield s
        if s.step < self.steps(len(fed.clients)):
            measured = [fed.call(self.measure, k, INITIAL, s.sent[-1], s.seed) for k in fed.clients]
            s = s.next(model=self.calibrated(fed, s, fed.get(measured)))
            yield s

    def fused(self, fed: Fed, s: Levels) -> Weights:
        """Return the network of all blocks and classifiers."""
        stages = [fed.get(level) for level in s.sent]
        parts, head = self.parts(fed.network(fed.get(INITIAL)).requires_grad_(True), len(fed.clients))
        levels = [[self.filled(parts, b, values, len(level)) for values in level] for b, level in enumerate(stages)]
        heads = fed.get([fed.call(self.head, k) for k in fed.clients])
        heads = heads if self.combine_heads == "logits" else [mean(heads)]
        return Network(Fused(levels, [filled(copy.deepcopy(head), h) for h in heads])).weights()

    def calibrated(self, fed: Fed, s: Levels, gaussians: Sequence[ClassGaussians]) -> Weights:
        """Return the network with its classifier calibrated."""
        assert isinstance(s.model, Weights)
        result = self.result_network(fed.network(fed.get(INITIAL)).requires_grad_(True).cpu(), len(fed.clients))
        network = Network(result)
        network.load(s.model)
        generator = fed.generator("calibration")
        x, y = drawn(gaussians, self.calibration_samples, generator)
        calibrate(result.get_submodule("heads.0"), x, y, self.calibration_lr, generator)
        fed.work.add(Work(len(x), len(x)))
        return network.weights()

    @on_client
    def train(self, client: Client, initial: Weights, before: tuple[Weights, ...], clients: int, seed: int) -> Weights:
        """Train all blocks that are not yet frozen, and the classifier.

        Args:
            client: whose state is `KeptBlocks`.
            initial: says what the network is like; also its values, where it is not thin.
            before: the blocks that were trained last, of all clients.
            clients: N.
            seed: of the thin network's values.
        """
        parts, head = self.parts(client.network(initial).requires_grad_(True), clients, seed)
        fused: list[list[Weights]] = []
        if before:
            kept: KeptBlocks = client.state
            fused = [*kept.levels, list(before)]
            head = filled(head, kept.head)
            parts[len(fused) :] = [filled(p, w) for p, w in zip(parts[len(fused) :], kept.blocks, strict=True)]
        frozen = [[self.filled(parts, b, w, clients) for w in level] for b, level in enumerate(fused)]
        own = [self.stage(parts, len(fused), clients, client.seed("adapter")), *map(Stage, parts[len(fused) + 1 :])]
        network = Network(Fused([*frozen, *([stage] for stage in own)], [head], len(frozen)), initial.params.device)
        network.load(
            client.fit(
                network.weights(),
                epochs=self.epochs,
                objective=Through(client.loss, clients if before else 1),
                training=replace(client.training, select="last"),
                network=network,
            )
        )
        client.state = KeptBlocks(fused, [read(stage.block) for stage in own[1:]], read(head))
        return read(own[0])

    @on_client
    def head(self, client: Client) -> Weights:
        """Return the client's classifier."""
        kept: KeptBlocks = client.state
        return kept.head

    @on_client
    def measure(self, client: Client, initial: Weights, last: tuple[Weights, ...], seed: int) -> ClassGaussians:
        """Return the class Gaussians of the fused network's features."""
        parts, head = self.parts(client.network(initial).requires_grad_(True), len(last), seed)
        levels = [*client.state.levels, list(last)]
        stages = [[self.filled(parts, b, w, len(last)) for w in level] for b, level in enumerate(levels)]
        module = Fused(stages, [head]).to(initial.params.device).eval()
        with torch.no_grad():
            return measure(
                ((module.features(x).flatten(1), y) for x, y in client.batches(passes=len(last))), client.classes
            )

    def parts(self, network: nn.Module, clients: int, seed: int = 0) -> tuple[list[nn.Module], nn.Module]:
        """Return blocks and classifier of the network of `width`, newly drawn unless that is 1."""
        width = self.hidden_width or self.fitting(network, clients)
        split = as_split(network if width == 1 else fresh(thin(network, width), seed))
        return cut(split.features, self.blocks), split.head

    def fitting(self, network: nn.Module, clients: int) -> float:
        """Return the widest of 1/64, ..., 1 with which no more than N models move, or the first."""
        network, limit, low, high = copy.deepcopy(network).to("meta"), clients * content(network), 1, STEPS
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.moves(thin(network, middle / STEPS), clients) <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        return low / STEPS

    def stage(self, parts: Sequence[nn.Module], b: int, clients: int, seed: int = 0) -> Stage:
        """Return block b with the adapter before it, newly drawn."""
        if b == 0 or self.adapter == "mean":
            return Stage(copy.deepcopy(parts[b]))
        size = channels(parts)[b - 1]
        adapter = fresh(Adapter(clients * size, size), seed)
        assert isinstance(adapter, Adapter)
        return Stage(copy.deepcopy(parts[b]), adapter)

    def filled(self, parts: Sequence[nn.Module], b: int, values: Weights, clients: int) -> Stage:
        """Return block b of a client, with its adapter and these values."""
        return filled(self.stage(parts, b, clients), values)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network of all clients' blocks, level by level."""
        parts, head = self.parts(network, clients)
        levels = [[self.stage(parts, b, clients) for _ in range(clients)] for b in range(self.blocks)]
        return Fused(levels, [copy.deepcopy(head) for _ in range(clients if self.combine_heads == "logits" else 1)])

    def steps(self, clients: int) -> int:
        """Return K, plus one for the calibration."""
        return self.blocks + (self.combine_heads == "calibrated")

    def cost(self, clients: int, model: Size) -> int:
        """N·(Σ_b M_b + M_head) + N·(N - 1)·Σ_{b < K} M_b, with M_b the bytes of a thin block and its adapter.

        The calibration adds N·(N - 1)·M_K + 4N·C·(1 + A + A(A + 1)/2), for C classes and A features.
        """
        network = model.network.module
        return self.moves(thin(network, self.hidden_width or self.fitting(network, clients)), clients)

    def moves(self, network: nn.Module, clients: int) -> int:
        """Return the same for a thin network."""
        split = as_split(network)
        parts = cut(split.features, self.blocks)
        adapters = [4 * size * (clients * size + 1) * (self.adapter == "conv") for size in channels(parts)]
        pieces = [content(part) + before for part, before in zip(parts, [0, *adapters], strict=False)]
        total = clients * (sum(pieces) + content(split.head)) + clients * (clients - 1) * sum(pieces[:-1])
        if self.combine_heads != "calibrated":
            return total
        linear = [m for m in split.head.modules() if isinstance(m, nn.Linear)]
        features, classes = linear[0].in_features, linear[-1].out_features
        numbers = classes * (1 + features + features * (features + 1) // 2)
        return total + clients * (clients - 1) * pieces[-1] + 4 * clients * numbers


@dataclass(frozen=True)
class Through(Objective):
    """A loss behind frozen blocks of so many clients, each of which is a pass forward."""

    loss: Objective
    columns: int  # stages of the first level

    def further(self, batch: int) -> Work:
        """Count the passes in addition to the first."""
        return Work((self.columns - 1) * batch, 0)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a mini-batch."""
        return self.loss(forward, x, y)
