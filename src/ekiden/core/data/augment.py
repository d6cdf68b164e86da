"""Augment batches on the device: crop, flip and rotation as ONE gather of pixels, and scaling."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from ekiden.core.base.checks import Checked, CountOrZero, Range
from ekiden.core.base.constants import constant
from ekiden.core.base.errors import UserError, counted


@dataclass(frozen=True)
class Augment(Checked):
    """Random crop, flip and rotation of whole batches, in this order, each image with its own
    draws.

    The three are composed into one index map, so every output pixel is a copy of one input pixel,
    or black (0) if it comes from outside the frame. Each call draws `torch.rand(4, B)` on the CPU:
    row offset, column offset, flip and angle of each image. So all devices and thread counts see
    the same transformations, and switching one of them on or off does not change the draws of the
    others.

    Attributes:
        crop: black pixels added at each side before an image of the original size is cut out.
        flip: mirror left and right with probability 1/2.
        rotation: largest angle in degrees, drawn from (-rotation, rotation); positive is
            counter-clockwise.
    """

    _flag: ClassVar[str] = "{}"
    crop: CountOrZero = 0
    flip: bool = False
    rotation: Annotated[float, Range(least=0, most=180)] = 0.0

    @property
    def active(self) -> bool:
        """Return whether anything is switched on."""
        return bool(self.crop or self.flip or self.rotation)

    def draw(self, images: int, generator: Generator | None = None) -> Tensor:
        """Return what decides on the transformations of a batch: (4, B) on the CPU, in [0, 1)."""
        return torch.rand(4, images, generator=generator)

    def __call__(
        self, x: Tensor, generator: Generator | None = None, *, draws: Tensor | None = None
    ) -> Tensor:
        """Transform a batch.

        Args:
            x: (B, C, H, W), uint8 or float, on any device.
            generator: a CPU generator; torch's default CPU generator if None.
            draws: what `draw` returned; drawn here if None.

        Returns:
            A new tensor of the shape, dtype and device of `x`; `x` itself if nothing is switched
            on.

        Raises:
            UserError: `x` is not a batch of images.
        """
        if not self.active:
            return x
        if x.ndim != 4:
            raise UserError(
                "crop, flip and rotation need images (channels, height, width), but these samples "
                f"have shape {tuple(x.shape[1:])}: switch augmentation off"
            )
        draws = (self.draw(len(x), generator) if draws is None else draws).to(x.device)
        index = self._index(draws, x.shape[2], x.shape[3])
        # the last slot is black
        flat = F.pad(x.flatten(2), (0, 1))
        return flat.gather(2, index.expand(-1, x.shape[1], -1)).view(x.shape)

    def _index(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Return the flat source pixel of each output pixel, (B, 1, H·W); H·W means black."""
        # the largest whole number that float32 counts to
        if height * width >= 2**24:
            draws = draws.double()
        # floor(u·m) < m for every odd m and u < 1, also after rounding
        dy, dx = (draws[:2] * (2 * self.crop + 1)).floor().sub(self.crop)[:, :, None]
        mirror = torch.where(draws[2] < 0.5, -1.0, 1.0)[:, None] if self.flip else 1.0
        cy = (height - 1) / 2
        cx = (width - 1) / 2
        v = torch.arange(height, dtype=draws.dtype, device=draws.device) - cy
        u = torch.arange(width, dtype=draws.dtype, device=draws.device) - cx

        # Backwards from the output: rotate around the centre, mirror there, move by the crop's
        # offset.
        if self.rotation:
            angle = torch.deg2rad((2 * draws[3] - 1) * self.rotation)[:, None]
            cos = angle.cos()
            sin = angle.sin()
            y = (cos * v + (cy + dy))[:, :, None] + (sin * u)[:, None, :]
            x = (mirror * cos * u + (cx + dx))[:, None, :] - (mirror * sin * v)[:, :, None]
            y = y.round_()
            x = x.round_()
        else:  # rows and columns stay separate: (B, H, 1) and (B, 1, W)
            y = (v + (cy + dy))[:, :, None]
            x = (mirror * u + (cx + dx))[:, None, :]

        # A pixel must lie both in the cropped frame, which is what gets rotated, and in the image.
        inside = _within(y, dy, height) & _within(x, dx, width)
        black = height * width
        # cheaper than torch.where
        index: Tensor = (y * width + x).sub_(black).mul_(inside).add_(black)
        return index.flatten(1).long()[:, None]


def _within(at: Tensor, shift: Tensor, size: int) -> Tensor:
    """Return whether `at` lies in [0, size) and in [shift, size + shift), for each image's own
    shift (B, 1).
    """
    low = shift.clamp(min=0)[:, :, None]
    high = (shift + size - 1).clamp(max=size - 1)[:, :, None]
    # one comparison instead of two
    inside: Tensor = (at - (low + high) / 2).abs_() <= (high - low) / 2
    return inside


def normalise(x: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Scale bytes to [0, 1], subtract the mean and divide by the standard deviation of each
    channel, or of all.

    Floats (B, C, ...) are scaled already, and tokens (int64) stay unchanged. The result is float32,
    and `x` itself if it holds tokens, or if it is float32, mean is 0 and std is 1.
    """
    if x.dtype == torch.int64:
        return x
    if len(mean) not in (1, x.shape[1]) or len(std) not in (1, x.shape[1]):
        raise UserError(
            f"--mean has {counted(len(mean), 'value')} and --std {len(std)}, but the "
            f"images have {counted(x.shape[1], 'channel')}: give one value, or one "
            "for each channel"
        )
    if not min(std) > 0:
        raise UserError(
            f"--std holds {min(std):g}, and pixels are divided by it: give a number above 0, such as "
            "1 for a channel that does not vary"
        )
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    out = x.float()
    if not any(mean) and set(std) == {1}:
        if unit == 1:
            return out
        return out.div_(unit)
    shape = (-1, *[1] * (x.ndim - 2))
    centre = constant(mean, torch.float64, x.device).view(shape)
    spread = constant(std, torch.float64, x.device).view(shape)
    scale = (1 / (unit * spread)).float()
    offset = (-centre / spread).float()
    return (out * scale if out is x else out.mul_(scale)).add_(offset)
