"""Fixed features: which ones, who settles them, how many the bytes allow, and the exact sums of
them and of targets.
"""

import json
import re
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ekiden.authoring import (
    CLASSES,
    NUMBERS,
    VECTORS,
    Client,
    Count,
    CountOrZero,
    NonNegative,
    Size,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.base.checks import Range
from ekiden.core.base.errors import first_line, tell, unknown
from ekiden.core.data.samples import Dataset, Subset
from ekiden.core.engine.folder import read_config, tensors_digest
from ekiden.core.engine.method import Chooser
from ekiden.core.models.split import SplitNetwork, as_split
from ekiden.core.tasks import Classification, Need
from ekiden.core.training import frozen
from ekiden.core.training.gram import (
    FULL,
    LARGEST,
    AnySums,
    Rounding,
    measure,
    measure_targets,
    size,
    size_of_targets,
)
from ekiden.core.training.network import Network, trial
from ekiden.methods.blocks.rounds import OrderedMethod
from ekiden.methods.exact.blocks.components import MOST, MOST_INPUTS, Components
from ekiden.methods.exact.blocks.patches import Pooling
from ekiden.methods.exact.blocks.whole_features import (
    BlockAverages,
    FrozenNetwork,
    PatchFeatures,
    RandomReLU,
    WholeFeatures,
)

PREFIX = "run:"
OWN = "own"
_NAMED = re.compile(r"run:[0-9a-f]{32}")
_BODY = "features."
_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)(%|B|kB|MB|GB|)")
_MOST_FEATURES = 100_000
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
Settled = tuple[
    Tensor, ...
]  # What the first client decides about the features; see `WholeFeatures.tell`
_FEATURES = ("auto", "patches", "components", "random", "network", "blocks")
_IMAGE = 16  # side in pixels from which patches are used
# Side up to which the features of thousands of seed images take minutes at most
_LARGE = 64
# Samples from which the first client sets the features
_SAMPLES = 1024


def sums_of(
    blocks: Iterator[tuple[Tensor, Tensor]],
    task: Task,
    outputs: int,
    width: int,
    device: torch.device,
    largest: int = LARGEST,
    rounding: Rounding | None = None,
) -> AnySums:
    """Return sums over samples: for each class in classification, otherwise with the targets of
    least squares.

    Args:
        blocks: features (b, D), whole numbers in any floating-point type, and labels (b, ...).
        task: what the labels mean.
        outputs: K.
        width: D.
        device: device of the sums.
        largest: absolute value of a feature; see `measure`.
        rounding: how products are rounded; None: not at all.
    """
    if isinstance(task, Classification):
        return measure(blocks, outputs, width, device, largest, rounding)
    counted = ((h, (task.targets(y, outputs) * task.unit).round()) for h, y in blocks)
    return measure_targets(counted, outputs, width, device, largest, rounding)


def labels_as_targets(task: Task, y: Tensor, outputs: int) -> Tensor:
    """Return (b, K), what least squares fits for labels (b, ...): one-hot classes, or the targets
    of the task.
    """
    if isinstance(task, Classification):
        return torch.nn.functional.one_hot(y, outputs).float()
    return task.targets(y, outputs)


def size_of_sums(
    task: Task, outputs: int, width: int, *, wide: bool = False, bits: int = FULL
) -> int:
    """Return the bytes of the sums of `sums_of`; `wide` is for features above `LARGEST`, `bits` for
    rounded ones.
    """
    of = size if isinstance(task, Classification) else size_of_targets
    return of(outputs, width, wide=wide, bits=bits)


def named(features: str, model: str) -> tuple[str, str, str]:
    """Return `features` with the digest of the body instead of the run folder, its network, and its
    file.

    Args:
        features: run:FOLDER.
        model: network that the user chose, or auto.
    """
    folder = Path(features.removeprefix(PREFIX)).expanduser().absolute()
    config = read_config(folder)
    file = folder / "model.safetensors"
    network = config["network"]
    train = config["recipe"]["train"]
    if network is None or train != "all":
        what = "a network of its own"
        if network is not None:
            what = f"only a part of its network (--train {train})"
        raise UserError(
            f"{folder} trained {what}: give a run that trained a complete network with a name"
        )
    if model not in ("auto", network):
        raise UserError(f"{folder} is a run of {network}, not of {model}: leave out --model")
    if not file.exists():
        raise UserError(
            f"{folder} has no model: finish it by `ekiden resume {folder}`, or give a run that "
            "ends with a global model"
        )
    with _opened(file) as opened:
        names = [name for name in opened.keys() if name.startswith(_BODY)]  # noqa: SIM118
        body = {name.removeprefix(_BODY): opened.get_tensor(name) for name in names}
    if not body:
        raise UserError(
            f"the model of {folder} has no part that is called features: give the run of another "
            "method"
        )
    return f"{PREFIX}{tensors_digest(body)}", network, str(file)


def check_same_data(features: str, pretrained: str, dataset: Dataset) -> None:
    """Refuse a model of other samples than those of `dataset`."""
    if not pretrained:
        raise UserError(
            f"--features {features} has no model of a run: give --features {PREFIX}FOLDER, and no "
            "network of your own"
        )
    with _opened(Path(pretrained)) as opened:
        about = json.loads((opened.metadata() or {}).get("ekiden", "{}"))
    taken = about.get("input", {})
    for what, there, own in (
        ("samples of shape", taken.get("shape"), list(dataset.shape)),
        ("the classes", about.get("classes"), [str(name) for name in dataset.classes]),
    ):
        if there != own:
            raise UserError(
                f"{pretrained} is for {what} {str(there)[:100]}, these data have {str(own)[:100]}: "
                "give data of the same kind"
            )
    if (taken.get("mean"), taken.get("std")) != (
        list(map(float, dataset.mean)),
        list(map(float, dataset.std)),
    ):
        raise UserError(
            f"{pretrained} is for samples of another scale than these data: give the data of that "
            "run"
        )


def check_body(features: str, network: nn.Module) -> None:
    """Refuse a network whose body is not the one that `features` names; one without values
    passes.
    """
    body = as_split(network).features.state_dict()
    if any(tensor.is_meta for tensor in body.values()):
        return
    wanted = features.removeprefix(PREFIX)
    found = tensors_digest(body)
    if found != wanted:
        raise UserError(
            f"the features are those of a model with digest {wanted[:8]}, the model given has "
            f"{found[:8]}: put back the model.safetensors of that run"
        )


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} cannot be read ({first_line(error)}): restore it, or run again"
        ) from None


class ShortColumns(NamedTuple):
    """A matrix of which each column counts in a unit of its own."""

    counts: Tensor  # (D, C) int8 or int16
    units: Tensor  # (C,) float32

    @classmethod
    def of(cls, matrix: Tensor, kind: torch.dtype = torch.int16) -> "ShortColumns":
        """Return `matrix` (D, C), each number rounded to whole units; the largest of a column is
        the most that fits.
        """
        matrix = matrix.double()
        most = torch.iinfo(kind).max
        units = (matrix.abs().amax(0) / most).float()
        counts = (matrix / torch.where(units > 0, units, 1)).round().clamp(-most, most)
        return cls(counts.to(kind), units)

    def matrix(self) -> Tensor:
        """(D, C) float64."""
        return self.counts.double() * self.units.double()

    def plus(self, other: "ShortColumns") -> "ShortColumns":
        """Return the sum of both, rounded again."""
        return ShortColumns.of(self.matrix() + other.matrix())


@dataclass(frozen=True)
class Room:
    """What a client may hand on."""

    width: int  # D, where the user chose it; 0: as many features as fit into the bytes
    # the bytes as the user wrote them: M, a share of M, or a size; `OWN` is for a network's
    # features alone
    text: str
    model: int  # M, bytes of a model of the user's network
    sums: Callable[[int], int]  # the bytes of all sums over so many features
    seeded: bool = False  # whether nobody settles the features, so that no values of theirs travel

    @property
    def bytes(self) -> int:
        """The largest number of bytes."""
        if self.text == "M":
            return self.model
        found = _WRITTEN.fullmatch(self.text)
        assert found is not None, "checked"
        number = float(found[1])
        unit = found[2]
        if unit == "%":
            return int(self.model * number / 100)
        return int(number * _UNITS[unit])

    def features(self, each: int, fixed: int, least: int = 1, always: int = 0) -> int:
        """D: what the user chose, or what fits with `each` bytes more a feature and `fixed` more in
        all.

        Where nobody settles the features, only `always` more bytes travel.
        """
        if self.width:
            if self.width < least:
                raise UserError(
                    f"--width {self.width} is too small for features of this kind: give {least} or "
                    "more"
                )
            return self.width

        def taken(width: int) -> int:
            bytes_ = self.sums(width) + always
            if not self.seeded:
                bytes_ += each * width + fixed
            return bytes_

        found = bisect_right(range(1, _MOST_FEATURES), self.bytes, key=taken)
        if found < least:
            few = "a feature"
            if least > 1:
                few = f"{least} features, the fewest possible"
            raise UserError(
                f"--bytes {self.text} ({self.bytes} bytes) has no room for {few}: give "
                f"{taken(least)}B or more"
            )
        return found


def frozen_network(network: nn.Module, shape: tuple[int, ...], room: Room) -> FrozenNetwork:
    """The features of a network as it is, and random units of these."""
    with torch.no_grad():
        inputs = network.eval()(trial(network, torch.zeros(1, *shape))).flatten(1).shape[1]
    own = room.text == OWN and not room.width
    width = inputs if own else room.features(each=4, fixed=4 * inputs)
    if width < inputs:
        least = room.sums(inputs) + 8 * inputs
        raise UserError(
            f"the network has {inputs} features, and --{'width' if room.width else 'bytes'} leaves "
            f"room for {width}: give --width {inputs} or --bytes {least}B, or more"
        )
    return FrozenNetwork(
        nn.Sequential(frozen.fix(network.requires_grad_(False)), nn.Flatten()), inputs, width
    )


def features_of(network: nn.Module) -> WholeFeatures:
    """Return the features of a network that `FixedFeatures.own_network` made."""
    return cast(WholeFeatures, as_split(network).features)


@dataclass(frozen=True)
class FixedFeatures(OrderedMethod):
    """A method whose model is a linear classifier of fixed features, which are whole numbers from
    -127 to 127.

    What depends on data (filters, scales) is settled by the first client, and the others adopt it;
    or by nobody.
    """

    features: str = "auto"
    """φ: patches, answers to patches of images; components, the principal components that such
    answers have on images of the seed, or random units on normal numbers; random, random units of
    the inputs; network, the features of the given network and random units of these; blocks, the
    same with what its blocks give, each averaged over the image, without the last one; run:FOLDER,
    the features of a finished run's model; auto, patches for images of 16 pixels a side or more, else random"""
    bytes: str = "M"
    """most bytes of a hand-off, or with several laps of the run divided by N - 1; they decide the
    number of features: M (as much as a model of the network), 5% (of that), 250kB, 11.5MB; or own,
    for as much as the given network's own features need, without random units"""
    width: Annotated[int, Range(least=0, most=_MOST_FEATURES)] = 0
    """D, number of features; 0: what `bytes` allows"""
    patch: str = "6"
    """p, side of the patches in pixels; several sides share the features, as in 5,8"""
    pooling: Count = 2
    """g, answers are averaged over g x g parts of the image"""
    mirror: Literal["colour", "always", "never"] = "colour"
    """average the features of an image and of its mirror image: only for colour images (grey ones
    are often digits or letters), for all images, or never"""
    soft_threshold: NonNegative = 0.5
    """t, subtracted from the absolute value of each answer"""
    root: bool = True
    """take the square root of the averages"""
    bilinear: bool = False
    """let the parts of the image overlap: the nearer an answer is to the centre of a part, the more
    it counts there"""
    dictionary: Literal["auto", "seed", "first"] = "auto"
    """what filters and scales follow from: seed, the seed alone, which makes images of its own, so
    that nobody can choose them; first, samples of the first client, who can choose them; auto, seed
    for patches, else first"""
    min_active: CountOrZero = 0
    """k; left out of a client's sums: samples of classes with fewer than k samples there, and
    features that have their usual value for all but fewer than k samples"""
    order: str = "given"
    """order of the clients: given, reversed, random, or names separated by commas; the first one
    sets the features"""

    @property
    def needs(self) -> frozenset[Need]:
        """Vectors, or classes if only these have the sums; numbers, unless a network makes the
        features.
        """
        labels = VECTORS
        if self.only_classes:
            labels = CLASSES
        if self.features == "network" or self.of_run:
            return labels
        return labels | NUMBERS

    @property
    def only_classes(self) -> bool:
        """Whether labels must be classes."""
        return False

    @property
    def seeded(self) -> bool:
        """Whether features follow from the seed whatever the samples are, so that nobody can choose
        them.
        """
        return self.dictionary == "seed" or self.features == "components"

    def seeded_for(self, shape: tuple[int, ...]) -> bool:
        """Whether features of samples of this shape follow from the seed."""
        return self.seeded or (self.dictionary == "auto" and self._has_patches(shape))

    def _has_patches(self, shape: tuple[int, ...]) -> bool:
        large = len(shape) == 3 and min(shape[1:]) >= _IMAGE
        return self.features == "patches" or (self.features == "auto" and large)

    @property
    def chosen_by(self) -> Chooser:
        """Nobody, if features follow from the seed."""
        return "nobody" if self.seeded else "party"

    @property
    def least(self) -> int:
        """K."""
        return self.min_active

    @property
    def of_network(self) -> bool:
        """Whether the features are those of a network that somebody gave."""
        return self.features in ("network", "blocks") or self.of_run

    @property
    def of_run(self) -> bool:
        """Whether the features are those of a finished run."""
        return self.features.startswith(PREFIX)

    def __post_init__(self) -> None:
        """The features must be known, and the budget and the sizes of patches must be such."""
        if self.features not in _FEATURES and not self.of_run:
            raise unknown("features", self.features, (*_FEATURES, "run:FOLDER"))
        if self.features == "components" and self.dictionary == "first":
            raise UserError(
                "--features components follow from the seed: leave out --dictionary first"
            )
        if not re.fullmatch(r"[1-9]\d?(,[1-9]\d?)*", self.patch):
            raise UserError(
                f"--patch {self.patch!r} is not a size of patches: write 6, or several as in 5,8"
            )
        if self.bytes not in ("M", OWN) and not _WRITTEN.fullmatch(self.bytes):
            raise UserError(
                f"--bytes {self.bytes!r} is not a size: write M, a share as in 5%, or a size as in "
                "250kB"
            )
        if self.bytes == OWN and not self.of_network:
            raise UserError(
                "--bytes own is for the features of a given network: leave it out, or give "
                "--features network"
            )

    def with_source(self, model: str, pretrained: str) -> tuple[Self, str, str]:
        """The network of the run whose features are wanted, and the file of its model."""
        if not self.of_run or _NAMED.fullmatch(self.features):
            return self, model, pretrained
        if pretrained:
            raise UserError(
                "--features=run:FOLDER has the values of that run: leave out --pretrained"
            )
        features, model, pretrained = named(self.features, model)
        return replace(self, features=features), model, pretrained

    def check_source(self, pretrained: str, dataset: Dataset) -> None:
        """Refuse samples that differ in kind from those of the run whose features are used."""
        if self.of_run:
            check_same_data(self.features, pretrained, dataset)

    def check_network(self, model: Size) -> None:
        """Refuse overlapping parts of images where the features have none."""
        if self.bilinear and not isinstance(features_of(model.network.module), PatchFeatures):
            raise UserError("--bilinear is for patches of images: leave it out")

    @abstractmethod
    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes of all that a client hands on about `width` features, without what is
        settled about them.
        """

    def handed_on(self, model: Size) -> int:
        """Return the bytes of all that a client hands on, and of what is settled."""
        features = features_of(model.network.module)
        return features.told_bytes() + self.told(features.width, model.layout.classes, model.task)

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: Task
    ) -> nn.Module:
        """Return a network of as many fixed features as there is room for, which nobody trains, and
        a linear head.
        """
        model = sum(t.numel() * t.element_size() for t in network.state_dict().values())
        room = Room(
            self.width,
            self.bytes,
            model,
            lambda width: self.told(width, classes, task),
            self.seeded_for(shape),
        )
        features = self._features_for(network, shape, room)
        if room.seeded:
            features.fix()
        return SplitNetwork(features.requires_grad_(False), nn.Linear(features.width, classes))

    def _features_for(
        self, network: nn.Module, shape: tuple[int, ...], room: Room
    ) -> WholeFeatures:
        if self.of_run:
            check_body(self.features, network)
        if self.of_network:
            body = as_split(network).features
            if self.features == "blocks":
                body = BlockAverages(body)
            return frozen_network(body, shape, room)
        if self._has_patches(shape):
            return self._patches(shape, room)
        inputs = torch.Size(shape).numel()
        if self.features == "components":
            return self._components(shape, room)
        width = room.features(each=4, fixed=8 * inputs)
        # The inputs are features, too, if they take half of them at most.
        return RandomReLU(inputs, width, direct=2 * inputs <= width)

    def _components(self, shape: tuple[int, ...], room: Room) -> Components:
        square = len(shape) == 3 and shape[1] == shape[2]
        images = square and _IMAGE <= shape[1] <= _LARGE
        inputs = torch.Size(shape).numel()
        vectors = len(shape) < 3 and inputs <= MOST_INPUTS
        if not images and not vectors:
            raise UserError(
                f"--features components are for square images of {_IMAGE} to {_LARGE} pixels a "
                f"side, and for vectors and signals of at most {MOST_INPUTS} numbers, these samples "
                f"have shape {shape}: give --features patches, --features random, or --size"
            )
        scaling = 0
        if images:
            scaling = 8 * shape[0]
        width = room.features(each=0, fixed=0, always=scaling)
        if not self.width:
            width = min(width, MOST)
        return Components(
            shape if images else (inputs,), width, mirror=images and self._mirrors(shape)
        )

    def _mirrors(self, shape: tuple[int, ...]) -> bool:
        return self.mirror == "always" or (self.mirror == "colour" and shape[0] > 1)

    def _patches(self, shape: tuple[int, ...], room: Room) -> PatchFeatures:
        sizes = tuple(map(int, self.patch.split(",")))
        # A filter of the largest patches and its gain serve 2g² features, each of which has a
        # scale.
        together = 2 * self.pooling**2
        filter_ = shape[0] * max(sizes) ** 2 + 4
        width = room.features(
            each=4 + -(-filter_ // together), fixed=0, least=together, always=8 * shape[0]
        )
        how = Pooling(
            self.pooling, self._mirrors(shape), self.soft_threshold, self.root, self.bilinear
        )
        return PatchFeatures(shape, width, sizes, how)

    def settled_by(self, client: Client, model: Weights) -> WholeFeatures:
        """Return features that are settled from some of the client's samples."""
        features = features_of(client.network(model))
        if features.fixed:
            features.settle(client.unit(), client.scaling, torch.Generator())
            return features
        seen: list[Tensor] = []
        for x, _ in client.batches(passes=0):
            seen.append(x)
            if sum(map(len, seen)) >= _SAMPLES:
                break
        samples = torch.cat(seen)
        with torch.no_grad():
            features.settle(samples, client.scaling, client.generator("features"))
        client.work.forward += len(samples)
        return features

    def adopted(self, client: Client, model: Weights, settled: Settled) -> WholeFeatures:
        """Return the features as another client settled them."""
        features = features_of(client.network(model))
        if features.fixed:
            own = self.settled_by(client, model).tell()
            if not all(a.equal(b) for a, b in zip(own, settled, strict=False)):
                raise UserError(
                    "the features received are not those that follow from the seed: refused"
                )
        features.adopt(settled)
        return features

    def summed(self, client: Client, *, held_out: bool = False) -> Subset:
        """Return the training or validation samples of a client whose sums leave; see
        `min_active`.
        """
        part = client.data.val if held_out else client.data.train
        return self.often_enough(part, client.classes, client.task)

    def often_enough(self, part: Subset, classes: int, task: Task) -> Subset:
        """Return the samples of classes with `min_active` samples or more."""
        if not self.min_active or not isinstance(task, Classification):
            return part
        often = part.class_counts(classes)[part.y] >= self.min_active
        if often.all():
            return part
        return Subset(part.samples, part.rows[often])

    def held(self, client: Client, features: WholeFeatures) -> tuple[Tensor, Tensor]:
        """Return features (n, D) and labels (n,) of a client's samples on the CPU, as far as they
        may leave.
        """
        with torch.no_grad():
            rows = [
                (features(x).cpu(), y.cpu())
                for x, y in client.batches(self.summed(client), shuffle=False)
            ]
        if not rows:
            return torch.zeros(0, features.width), torch.zeros(0, dtype=torch.int64)
        phi, y = (torch.cat(part) for part in zip(*rows, strict=True))
        if self.min_active:
            phi = phi * self.active(phi.to(torch.int8))
        return phi, y

    def check_classes(self, counts: Tensor, task: Task) -> None:
        """Refuse sums in which `min_active` left one class at most; say so if it left some out at
        all clients.

        Args:
            counts: (K,) samples of each class in the sums of all clients.
            task: the task.
        """
        if not self.min_active or not isinstance(task, Classification):
            return
        there = int((counts > 0).sum())
        said = f"no client has {self.min_active} training samples (min_active) of {len(counts) - there} of"
        if there < 2 <= len(counts):
            raise UserError(
                f"{said} {len(counts)} classes, so no model tells classes apart: give a smaller "
                "--min-active"
            )
        if there < len(counts):
            tell(f"{said} {len(counts)} classes: the model does not know them")

    def active(self, phi: Tensor) -> Tensor:
        """Return which of the features (n, D) of a client's samples are shown: (D,) bool; see
        `min_active`.
        """
        width = phi.shape[1]
        counts = torch.zeros(width * (2 * LARGEST + 1), dtype=torch.int64, device=phi.device)
        places = torch.arange(width, device=phi.device) * (2 * LARGEST + 1) + LARGEST
        for rows in torch.split(phi, _SAMPLES):
            counts += torch.bincount((rows.long() + places).flatten(), minlength=len(counts))
        usual = counts.view(width, -1).amax(1)
        return len(phi) - usual >= self.min_active


@dataclass(frozen=True)
class FeaturesOfClasses(FixedFeatures):
    """A method whose clients tell about classes of features that the first client settled."""

    traits = Traits(weighs=False)

    @property
    def only_classes(self) -> bool:
        """Labels must be classes."""
        return True

    def steps(self, clients: int) -> int:
        return 1

    @on_client(gives=lambda m: "nothing" if m.seeded else "model")
    def settle(self, client: Client, model: Weights) -> Settled:
        """Return the features that follow from the client's samples."""
        return self.settled_by(client, model).tell()


def with_rows(network: nn.Module, rows: Tensor) -> Weights:
    """Return a network of `FixedFeatures.own_network` with a classifier of its features φ, as
    weights.

    Args:
        network: it is changed.
        rows: (K, D + 1) weights and biases.
    """
    linear = cast(nn.Linear, as_split(network).head).requires_grad_(True)
    with torch.no_grad():
        linear.weight.copy_(rows[:, :-1])
        linear.bias.copy_(rows[:, -1])
    return Network(network, linear.weight.device).weights()
