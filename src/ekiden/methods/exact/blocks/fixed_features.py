"""What methods share that make a linear classifier of fixed features: which features, and who settles them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from ekiden.base.checks import Count, CountOrZero, NonNegative, Positive
from ekiden.base.errors import UserError, unknown
from ekiden.base.sums import LARGEST
from ekiden.data.samples import Dataset, Subset
from ekiden.data.tasks import Classification, Need
from ekiden.engine.federation import in_order
from ekiden.engine.method import CLASSES, NUMBERS, VECTORS, Method, Size
from ekiden.engine.worker import Client
from ekiden.methods.exact.blocks import feature_room as room_for
from ekiden.methods.exact.blocks import run_source as source
from ekiden.methods.exact.blocks.feature_room import Room, features_of
from ekiden.methods.exact.blocks.label_sums import labels_as_targets
from ekiden.models.patches import PatchSums
from ekiden.models.split import SplitNetwork, as_split
from ekiden.models.whole_features import PatchFeatures, WholeFeatures
from ekiden.training.network import Network
from ekiden.training.weights import Weights

Settled = tuple[Tensor, ...]
"""What the first client decides about the features; see `WholeFeatures.tell`."""

_FEATURES = ("auto", "patches", "random", "fourier", "network")
_IMAGE = 16  # side in pixels from which patches are used
_SAMPLES = 1024  # samples from which the first client sets the features


@dataclass(frozen=True)
class FixedFeatures(Method):
    """A method whose model is a linear classifier of fixed features, which are whole numbers from -127 to 127.

    What depends on data (filters, scales) is settled by the first client, and the others adopt it; or by nobody.
    """

    features: str = "auto"
    """φ: patches, answers to patches of the first client's images; random, random units of the inputs; fourier, Fourier
    features of the inputs; network, the features of the given network and random units of these; run:FOLDER, the same
    with the model of a finished run; auto, patches for images of 16 pixels a side or more, else random"""
    bytes: str = "M"
    """most bytes of a hand-off, or with several laps of the run divided by N - 1; they decide the number of features: M
    (as much as a model of the network), 5% (of that), 250kB, 11.5MB"""
    width: CountOrZero = 0
    """D, number of features; 0: as many as `bytes` allows"""
    patch: str = "6"
    """p, side of the patches in pixels; several sides share the features, as in 5,8"""
    pooling: Count = 2
    """g, answers are averaged over g x g parts of the image"""
    mirror: Literal["colour", "always", "never"] = "colour"
    """average the features of an image and of its mirror image: only for colour images (grey ones are often digits or
    letters), for all images, or never"""
    soft_threshold: NonNegative = 0.5
    """t, subtracted from the absolute value of each answer"""
    root: bool = True
    """take the square root of the averages"""
    bilinear: bool = False
    """let the parts of the image overlap: the nearer an answer is to the centre of a part, the more it counts there"""
    candidates: Count = 1
    """number of patches that the first client draws for each filter; with more than one it chooses those whose features
    say most about its labels"""
    bandwidth: Positive = 1.0
    """σ of Fourier features, in median distances between samples of the first client"""
    dictionary: Literal["first", "all", "seed"] = "first"
    """what filters and scales follow from: samples of the first client, who can choose them; the same, but with random
    filters whitened by the moments of all clients' patches, so that no patch travels and the clients are passed twice;
    or the seed alone, so that nobody can choose them"""
    min_active: CountOrZero = 0
    """k; left out of a client's sums: samples of classes with fewer than k samples there, and features that have their
    usual value for all but fewer than k samples"""
    order: str = "given"
    """order of the clients: given, reversed, random, or names separated by commas; the first one sets the features"""

    @property
    def needs(self) -> frozenset[Need]:
        """Vectors, or classes if only these have the sums; numbers, unless a network makes the features."""
        labels = CLASSES if self.only_classes else VECTORS
        return labels if self.features == "network" or self.of_run else labels | NUMBERS

    @property
    def only_classes(self) -> bool:
        """Whether labels must be classes."""
        return False

    @property
    def seeded(self) -> bool:
        """Whether features follow from the seed, so that nobody can choose them."""
        return self.dictionary == "seed"

    @property
    def of_run(self) -> bool:
        """Whether the features are those of a finished run."""
        return self.features.startswith(source.PREFIX)

    def check_features(self) -> None:
        """Refuse unknown features, a budget that is none, and sizes of patches that are none."""
        if self.features not in _FEATURES and not self.of_run:
            raise unknown("features", self.features, (*_FEATURES, "run:FOLDER"))
        if self.candidates > 1 and self.dictionary != "first":
            raise UserError(
                f"--candidates chooses among patches of the first client: leave out --dictionary {self.dictionary}"
            )
        if not re.fullmatch(r"[1-9]\d?(,[1-9]\d?)*", self.patch):
            raise UserError(f"--patch {self.patch!r} is not a size of patches: write 6, or several as in 5,8")
        room_for.check_bytes(self.bytes)

    def check(self, clients: Sequence[str]) -> None:
        """Refuse an order that does not name the clients."""
        in_order(self.order, clients)

    def with_source(self, model: str, pretrained: str) -> tuple[Self, str, str]:
        """The network of the run whose features are wanted, and the file of its model."""
        if not self.of_run or source.is_named(self.features):
            return self, model, pretrained
        if pretrained:
            raise UserError("--features run:FOLDER has the values of that run: leave out --pretrained")
        features, model, pretrained = source.named(self.features, model)
        return replace(self, features=features), model, pretrained

    def check_source(self, pretrained: str, dataset: Dataset) -> None:
        """Refuse samples that differ in kind from those of the run whose features are used."""
        if self.of_run:
            source.check_same_data(self.features, pretrained, dataset)

    def refuse_without_patches(self, model: Size, more: Mapping[str, bool]) -> None:
        """Refuse options for patches where the features have none.

        Args:
            model: knows the network.
            more: further options for patches, and whether they were chosen.
        """
        if isinstance(features_of(model.network.module), PatchFeatures):
            return
        for option, given in {**more, "--candidates": self.candidates > 1, "--bilinear": self.bilinear}.items():
            if given:
                raise UserError(f"{option} is for patches of images: leave it out")

    def network_with(self, features: WholeFeatures, classes: int) -> nn.Module:
        """Return the network of all parties: these features, which nobody trains, and a linear head."""
        return SplitNetwork(features.requires_grad_(False), nn.Linear(features.width, classes))

    def features_for(self, network: nn.Module, shape: tuple[int, ...], room: Room) -> WholeFeatures:
        """Return as many features as there is room for, without values that depend on data.

        Args:
            network: what the user chose; it may be changed.
            shape: of one sample.
            room: what the clients may hand on.
        """
        made = self._features_for(network, shape, replace(room, seeded=self.seeded))
        if self.seeded:
            made.fix()
        return made

    def _features_for(self, network: nn.Module, shape: tuple[int, ...], room: Room) -> WholeFeatures:
        if self.of_run:
            source.check_body(self.features, network)
        if self.features == "network" or self.of_run:
            return room_for.frozen_network(as_split(network).features, shape, room)
        if self.features == "patches" or (self.features == "auto" and len(shape) == 3 and min(shape[1:]) >= _IMAGE):
            return self._patches(shape, room)
        inputs = torch.Size(shape).numel()
        if self.features == "fourier":
            return room_for.fourier(inputs, self.bandwidth, room)
        return room_for.random_units(inputs, room)

    def _patches(self, shape: tuple[int, ...], room: Room) -> PatchFeatures:
        sizes = tuple(map(int, self.patch.split(",")))
        return PatchFeatures(
            shape,
            room_for.patch_room(shape[0], max(sizes), self.pooling, room),
            sizes,
            pool=self.pooling,
            mirror=self.mirror == "always" or (self.mirror == "colour" and shape[0] > 1),
            threshold=self.soft_threshold,
            root=self.root,
            bilinear=self.bilinear,
            candidates=self.candidates,
        )

    def settled_by(self, client: Client, model: Weights, moments: Sequence[PatchSums] | None = None) -> WholeFeatures:
        """Return features that are settled from some of the client's samples.

        Args:
            client: the first one.
            model: the initial model.
            moments: second moments of all clients' patches, if these make the filters.
        """
        features = features_of(client.network(model))
        if self.seeded:
            features.settle(client.unit(), client.scaling, torch.Generator())
            return features
        seen: list[tuple[Tensor, Tensor]] = []
        for x, y in client.batches(passes=0):
            seen.append((x, y))
            if sum(len(x) for x, _ in seen) >= _SAMPLES:
                break
        samples, labels = (torch.cat(part) for part in zip(*seen, strict=True))
        draw = torch.Generator().manual_seed(client.seed("features"))
        with torch.no_grad():
            if isinstance(features, PatchFeatures):
                targets = labels_as_targets(client.task, labels, client.classes) if self.candidates > 1 else None
                features.settle(samples, client.scaling, draw, moments, targets)
            else:
                features.settle(samples, client.scaling, draw)
        client.work.forward += len(samples) * (1 + (self.candidates > 1))
        return features

    def adopted(self, client: Client, model: Weights, settled: Settled) -> WholeFeatures:
        """Return the features as another client settled them.

        Raises:
            UserError: they are of another kind, or would be this client's own choice and differ from it.
        """
        features = features_of(client.network(model))
        if self.seeded:
            own = self.settled_by(client, model).tell()
            if not all(a.equal(b) for a, b in zip(own, settled, strict=False)):
                raise UserError("the features received are not those that follow from the seed: refused")
        features.adopt(settled)
        return features

    def summed(self, client: Client) -> Subset:
        """Return the training samples of a client whose sums leave; see `min_active`."""
        train = client.data.train
        if not self.min_active or not isinstance(client.task, Classification):
            return train
        return Subset(train.samples, train.rows[client.class_counts()[train.y] >= self.min_active])

    def active(self, phi: Tensor) -> Tensor:
        """Return which of the features (n, D) of a client's samples are shown: (D,) bool; see `min_active`."""
        width = phi.shape[1]
        counts = torch.zeros(width * (2 * LARGEST + 1), dtype=torch.int64, device=phi.device)
        places = torch.arange(width, device=phi.device) * (2 * LARGEST + 1) + LARGEST
        for rows in torch.split(phi, _SAMPLES):
            counts += torch.bincount((rows.long() + places).flatten(), minlength=len(counts))
        usual = counts.view(width, -1).amax(1)
        return len(phi) - usual >= self.min_active


def with_rows(network: nn.Module, weight: Tensor, bias: Tensor) -> Weights:
    """Return `network` with a classifier of its features φ, as weights.

    Args:
        network: `FixedFeatures.network_with`.
        weight: (K, D).
        bias: (K,).
    """
    linear = cast(nn.Linear, as_split(network).head).requires_grad_(True)
    with torch.no_grad():
        linear.weight.copy_(weight)
        linear.bias.copy_(bias)
    return Network(network, linear.weight.device).weights()
