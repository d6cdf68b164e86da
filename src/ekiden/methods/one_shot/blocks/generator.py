"""A network that makes samples from noise."""

import torch
from torch import Generator, Tensor, nn


class SampleGenerator(nn.Module):
    """Noise (b, z) → samples: images (b, C, H, W) with values in [0, 1], or features (b, d) without bounds.

    Images grow from a quarter of their side by two nearest-neighbour steps; sides that are not a multiple of 4 are cut.
    """

    def __init__(self, shape: tuple[int, ...], noise: int, width: int, generator: Generator) -> None:
        super().__init__()
        self._shape = shape
        norm, leaky = nn.BatchNorm2d, nn.LeakyReLU(0.2)
        if len(shape) == 3:
            self._start = (2 * width, -(-shape[1] // 4), -(-shape[2] // 4))
            self.first = nn.Linear(noise, self._start[0] * self._start[1] * self._start[2])
            self.rest = nn.Sequential(
                norm(2 * width),
                nn.Upsample(scale_factor=2),
                nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
                norm(2 * width),
                leaky,
                nn.Upsample(scale_factor=2),
                nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
                norm(width),
                leaky,
                nn.Conv2d(width, shape[0], 3, padding=1),
                nn.Sigmoid(),
            )
        else:
            self.first = nn.Linear(noise, 2 * width)
            size = int(torch.Size(shape).numel())
            self.rest = nn.Sequential(nn.BatchNorm1d(2 * width), leaky, nn.Linear(2 * width, size))
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Conv2d)):
                nn.init.normal_(part.weight, 0.0, 0.02, generator=generator)
            elif isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d)):
                nn.init.normal_(part.weight, 1.0, 0.02, generator=generator)
        for name, values in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(values)
        self.rest.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # on a CPU 1.6 times as fast

    def forward(self, z: Tensor) -> Tensor:
        """Return samples (b, *shape)."""
        x = self.first(z)
        if len(self._shape) == 3:
            x = x.view(len(z), *self._start).contiguous(memory_format=torch.channels_last)
            return self.rest(x)[:, :, : self._shape[1], : self._shape[2]]  # type: ignore[no-any-return]
        return self.rest(x).view(len(z), *self._shape)  # type: ignore[no-any-return]
