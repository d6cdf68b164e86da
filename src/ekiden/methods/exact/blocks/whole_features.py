"""Fixed features that are small whole numbers, so that sums over them are exact."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError
from ekiden.core.training.gram import LARGEST
from ekiden.methods.blocks.sums import forms
from ekiden.methods.exact.blocks import patches

# float32 holds whole numbers up to here exactly, so products of matrices are exact in any order
EXACT = 2**24 - 1
# Inputs further from their mean than this number of standard deviations are cut off
SPREAD = 4
# largest sum that a feature of patches tells from larger ones, in usual sums, where nobody settles
# it
REACH = 3.0
_MOST_INPUTS = 100_000
Scaling = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation of pixels in [0, 1], one for all or one for each channel; see
`Client.scaling`."""


NORMALISED = {"mean": torch.float32, "std": torch.float32}
"""What a client still settles about patches that follow from the seed."""


class WholeFeatures(nn.Module, ABC):
    """An extractor whose outputs are whole numbers from -127 to 127, as float32.

    Some of its values depend on data: a client settles them from samples of its own, the others
    adopt them.
    """

    width: int  # D, the number of features
    settled: Mapping[str, torch.dtype]
    """Names of the buffers that a client settles, and the types in which they travel."""
    fixed = False
    """Whether nobody settles them; see `fix`."""
    variance: int = 2**14
    """A little more than the largest variance of a number from -127 to 127."""

    @abstractmethod
    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Settle these values from samples."""

    @abstractmethod
    def fix(self) -> None:
        """Set these values by formula, from the seed alone. No client's samples matter, and no
        client can choose them.

        What `settle` then still sets follows from how the inputs were normalised.
        """

    def tell(self) -> tuple[Tensor, ...]:
        """Return the settled values as they travel."""
        return tuple(self.get_buffer(name).to(kind) for name, kind in self.settled.items())

    def adopt(self, told: Sequence[Tensor]) -> None:
        """Adopt what another party's `tell` gave."""
        if forms(told) != forms(self.tell()):
            raise UserError(
                "the features received are of another kind than here: use the same method and data "
                "kind"
            )
        for name, values in zip(self.settled, told, strict=True):
            if not torch.isfinite(values).all():
                raise UserError("the features received hold values that are not finite: refused")
            self.get_buffer(name).copy_(values)
        for name in ("scale", "gain", "std"):
            if name in self.settled and not (self.get_buffer(name) > 0).all():
                raise UserError(
                    f"the features received have a {name} that is not positive: refused"
                )

    def told_bytes(self) -> int:
        """Bytes of `tell()`."""
        return sum(t.numel() * t.itemsize for t in self.tell())


class RandomReLU(WholeFeatures):
    """Random rectified linear units of a vector: relu(R u + b) with inputs u (d,) as whole numbers,
    standardised by the client that settles them.

    R and b are Gaussian, drawn once and rounded so that R u + b is exact in float32. With `direct`
    the inputs u are the first features, followed by the units.
    """

    settled: Mapping[str, torch.dtype] = dict.fromkeys(("centre", "scale", "gain"), torch.float32)

    def __init__(self, inputs: int, width: int, *, direct: bool = False) -> None:
        """Draw the units, for vectors of `inputs` numbers."""
        super().__init__()
        if inputs > _MOST_INPUTS:
            raise UserError(
                f"random features are for samples of at most {_MOST_INPUTS} numbers, but these "
                f"have {inputs}: use --size or other --features"
            )
        self.width = width
        self.direct = direct
        self.register_buffer("centre", torch.zeros(inputs))
        self.register_buffer("scale", torch.full((inputs,), LARGEST / SPREAD))
        units = width
        if direct:
            units -= inputs
        self.linear = nn.Linear(inputs, units) if units else None
        self.register_buffer("gain", torch.ones(units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the units, whole numbers as large as float32 can add up exactly."""
        if self.linear is None:
            return
        self.linear.requires_grad_(False)
        # A silo asks for the shapes with each message: no draws for these.
        if self.linear.weight.is_meta:
            return
        with torch.no_grad():
            weight = torch.randn_like(self.linear.weight)
            bias = torch.randn_like(self.linear.bias)
            # A bias reads a constant input of 127, which makes it as large as the others.
            bias *= weight.norm(dim=1) / SPREAD
            most = LARGEST * (weight.abs().sum(1) + bias.abs() + weight.shape[1])
            factor = torch.minimum(LARGEST / weight.abs().max(), EXACT / most.max())
            self.linear.weight.copy_((weight * factor).round())
            self.linear.bias.copy_((bias * factor * LARGEST).round())

    def standardise(self, x: Tensor) -> None:
        """Standardise by the mean and the spread of these inputs."""
        rows = x.flatten(1).double()
        spread = rows.std(0, correction=0)
        # An input that hardly varies uses the mean spread: its own would blow up noise.
        usual = spread.mean()
        spread = torch.where(spread > 1e-3 * usual, spread, usual.clamp(min=1e-6))
        self.get_buffer("centre").copy_(rows.mean(0))
        self.get_buffer("scale").copy_(LARGEST / SPREAD / spread)

    def whole(self, x: Tensor) -> Tensor:
        """The standardised inputs u (b, d), cut off at -127 and 127."""
        centred = x.flatten(1).float() - self.get_buffer("centre")
        return (centred * self.get_buffer("scale")).round().clamp(-LARGEST, LARGEST)

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) whole numbers of inputs (b, ...) with d numbers each."""
        with torch.autocast(x.device.type, enabled=False):
            inputs = self.whole(x)
            if self.linear is None:
                return inputs
            units: Tensor = self.linear(inputs).relu() * self.get_buffer("gain")
            units = units.round().clamp(max=LARGEST)
            if self.direct:
                units = torch.cat([inputs, units], 1)
            return units

    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Standardise by these inputs, and let the largest answer of each unit be 127."""
        if self.fixed:
            return
        self.standardise(x)
        if self.linear is not None:
            top = self.linear(self.whole(x)).amax(0)
            self.get_buffer("gain").copy_(
                LARGEST / torch.where(top > 0, top, top.abs().max()).clamp(min=1)
            )

    def fix(self) -> None:
        """Take inputs as they are: their mean is about 0, and their deviation about 1. Let an answer
        of four deviations be 127, if the inputs do not depend on each other.
        """
        self.fixed = True
        self.settled = {}
        if self.linear is not None:
            with torch.no_grad():
                deviation = self.linear.weight.norm(dim=1) * (LARGEST / SPREAD)
                self.get_buffer("gain").copy_(
                    LARGEST / (SPREAD * deviation + self.linear.bias.abs()).clamp(min=1)
                )


class FrozenNetwork(WholeFeatures):
    """The features of a network that is not trained, as whole numbers, and random units of them.

    The network computes in floating point. Its features are the same on equal machines; between
    other machines, rounding removes most differences.
    """

    settled: Mapping[str, torch.dtype] = RandomReLU.settled

    def __init__(self, network: nn.Module, inputs: int, width: int) -> None:
        """Freeze `network`, which gives `inputs` numbers for each sample."""
        super().__init__()
        self.width = width
        self.network = network.requires_grad_(False)
        self.units = RandomReLU(inputs, width, direct=True)

    def get_buffer(self, target: str) -> Tensor:
        """That of the units."""
        return self.units.get_buffer(target)

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) whole numbers of inputs (b, ...)."""
        units: Tensor = self.units(self._outputs(x))
        return units

    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Standardise the network's features by those of these inputs."""
        if not self.fixed:
            self.units.settle(self.network(x), scaling, draw)

    def fix(self) -> None:
        """Standardise the network's features of each sample by their own mean and deviation."""
        self.units.fix()
        self.fixed = True
        self.settled = {}

    def _outputs(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        if not self.fixed:
            return outputs
        centred = outputs.float() - outputs.float().mean(1, keepdim=True)
        return centred / centred.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)


class BlockAverages(nn.Module):
    """What the blocks of a network give, except the last one: each is averaged over the image, or
    the signal.
    """

    def __init__(self, network: nn.Module) -> None:
        """Take apart `network`, a sequence. A block begins with a child that has filters or a
        matrix.
        """
        super().__init__()
        children: list[nn.Module] = []
        if type(network) is nn.Sequential:
            children = [*network.children()]
        starts = []
        for i, child in enumerate(children):
            # The values of frozen layers are buffers.
            values = (*child.parameters(), *child.buffers())
            if any(t.dim() > 1 for t in values):
                starts.append(i)
        if len(starts) < 2:
            raise UserError(
                "--features blocks needs a network that is a sequence of two blocks or more: give "
                "network"
            )
        self.layers = nn.Sequential(*children[: starts[-1]])
        self.ends = frozenset(starts[1:])

    def forward(self, x: Tensor) -> Tensor:
        """(B, d) of inputs (B, C, ...)."""
        found = []
        for i, layer in enumerate(self.layers, 1):
            x = layer(x)
            if i in self.ends:
                found.append(x.flatten(2).mean(2) if x.dim() > 2 else x)
        return torch.cat(found, 1)


class PatchFeatures(WholeFeatures):
    """The features of `Patches`, whose dictionary is patches of the images of the client that
    settles them.
    """

    settled: Mapping[str, torch.dtype] = {
        "filters": torch.int8,
        **dict.fromkeys(("gain", "mean", "std", "scale"), torch.float32),
    }
    variance: int = 2**12
    """A little more than the largest variance of a number from 0 to 127."""

    def __init__(
        self,
        shape: tuple[int, ...],
        width: int,
        sizes: Sequence[int],
        how: patches.Pooling = patches.USUAL_POOLING,
    ) -> None:
        """Prepare for images of `shape`.

        Args:
            shape: (C, H, W).
            width: as many features as this or a few less.
            sizes: p, sides of patches in pixels; each gets as many of the filters.
            how: responses become features.
        """
        super().__init__()
        filters = width // (2 * how.pool**2)
        shared = [(len(range(i, filters, len(sizes))), size) for i, size in enumerate(sizes)]
        self.patches = patches.Patches(shape, shared, how)
        self.width = self.patches.width
        self.seed = torch.initial_seed()  # the run's, where its network is made

    def get_buffer(self, target: str) -> Tensor:
        """That of the patches."""
        return self.patches.get_buffer(target)

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) whole numbers from 0 to 127 of images (b, C, H, W)."""
        features: Tensor = self.patches(x)
        return features

    def adopt(self, told: Sequence[Tensor]) -> None:
        """Take over filters and scales."""
        super().adopt(told)
        sizes = self.patches.sizes
        parts = [count * self.patches.shape[0] * size**2 for count, size in sizes]
        for (count, _), part in zip(
            sizes, torch.split(self.get_buffer("filters"), parts), strict=True
        ):
            filters = part.view(count, -1)
            most = float(filters.abs().sum(1).max())
            if (filters.sum(1) != 0).any() or most * 2 * 255 > EXACT:
                raise UserError(
                    "the filters received do not sum to zero, or are too large for exact sums: "
                    "refused"
                )

    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Make filters of patches of these images, and let the largest answer to each be 127.

        Inputs that do not come from bytes are scaled so that each channel of `x` goes from 0 to
        255.
        """
        self.patches.scale_by(*scaling)
        if self.fixed:
            return
        pixels = (x * self.get_buffer("std") + self.get_buffer("mean")) * 255
        # Half a level of room, since what comes from bytes was rounded when it was normalised.
        if float(pixels.min()) < -0.5 or float(pixels.max()) > 255.5:
            self._stretch(x)
        images = self.patches.bytes(x).to(torch.uint8).cpu()
        self.patches.take(
            [patches.from_images(images, count, draw, size) for count, size in self.patches.sizes]
        )
        # The least largest sum is 1, so that a feature without answers stays 0.
        self.patches.scale.copy_(self.patches.sums(x).amax(0).clamp(min=1))

    def fix(self) -> None:
        """Take filters from patches of images that the seed makes, and scales by formula."""
        with torch.no_grad(), torch.device("cpu"):
            self.patches.fix(self.seed, REACH)
        self.fixed = True
        self.settled = NORMALISED

    def _stretch(self, x: Tensor) -> None:
        """Let each channel of `x` go from 0 to 255."""
        low = x.float().amin((0, 2, 3)).double()
        high = x.float().amax((0, 2, 3)).double()
        span = torch.where(high > low, high - low, 1)
        self.patches.scale_by((-low / span).tolist(), (1 / span).tolist())
