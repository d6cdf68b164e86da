"""Random Fourier features as whole numbers."""

from collections.abc import Mapping, Sequence
from math import pi, sqrt

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.base.sums import LARGEST
from ekiden.models.whole import EXACT, SPREAD, OfVectors, Scaling

AMPLITUDE = 126
"""largest value of a feature; no cosine of a rational angle lies half-way between two of its parts"""
_TURNS = 2**16  # parts of a turn in which the offsets are drawn
_PAIRED = 512  # samples whose distances are measured


class RandomFourier(OfVectors):
    """Cosines of random projections of a vector: 126·cos(2π((R u mod q)/q + b)) with standardised inputs u.

    Ali Rahimi, Benjamin Recht: Random Features for Large-Scale Kernel Machines. NIPS 2007.
    https://papers.nips.cc/paper/3182-random-features-for-large-scale-kernel-machines

    R is Gaussian and rounded so that R u is exact in float32. The mean over features of 2φ(x)φ(x')/126² tends to the
    kernel exp(-‖x - x'‖²/(2σ²)) of standardised inputs. The whole number q follows from σ, which is `bandwidth` times
    the median distance between samples of the client that settles it. With `direct` the inputs u are also features.

    Attributes:
        period: (1,) q.
    """

    settled: Mapping[str, torch.dtype] = dict.fromkeys(("centre", "scale", "period"), torch.float32)

    def __init__(self, inputs: int, width: int, *, bandwidth: float = 1.0, direct: bool = False) -> None:
        """Draw projections and offsets.

        Args:
            inputs: d, numbers of a sample.
            width: D.
            bandwidth: σ in median distances.
            direct: whether the inputs are features too.
        """
        super().__init__(inputs)
        self.width, self.direct, self.bandwidth = width, direct, bandwidth
        units = width - inputs if direct else width
        self.linear = nn.Linear(inputs, units, bias=False)
        self.register_buffer("offset", torch.zeros(units))
        self.register_buffer("fineness", torch.ones(1))
        self.register_buffer("period", torch.ones(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the projections, whole numbers as large as float32 can add up exactly, and the offsets."""
        with torch.no_grad():
            weight = torch.randn_like(self.linear.weight)
            most = LARGEST * (weight.abs().sum(1) + weight.shape[1])
            fineness = torch.minimum(LARGEST / weight.abs().max(), EXACT / most.max())
            self.get_buffer("fineness").copy_(fineness)
            self.linear.weight.copy_((weight * fineness).round())
            self.get_buffer("offset").copy_(torch.randint_like(self.get_buffer("offset"), _TURNS))
            self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) whole numbers of inputs (b, ...) with d numbers each."""
        with torch.autocast(x.device.type, enabled=False):
            inputs = self.whole(x)
            period = self.get_buffer("period").double()
            turns = self.linear(inputs).double().remainder(period) / period + self.get_buffer("offset") / _TURNS
            units = (AMPLITUDE * (2 * pi * turns).cos()).round().float()
            return torch.cat([inputs, units], 1) if self.direct else units

    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Standardise by these inputs, and take their median distance as the unit of σ."""
        if self.fixed:
            return
        self.standardise(x)
        inputs = self.whole(x)[:_PAIRED].double()
        apart = torch.pdist(inputs)
        apart = apart[apart > 0]
        self._turn_once_in(float(apart.median()) if len(apart) else self._usual)

    def fix(self) -> None:
        """Take the distance of independent inputs of deviation 1 as the unit of σ."""
        super().fix()
        if not self.get_buffer("period").is_meta:
            self._turn_once_in(self._usual)

    @property
    def _usual(self) -> float:
        """The root of the mean square of distances."""
        return sqrt(2 * self.inputs) * LARGEST / SPREAD

    def _turn_once_in(self, distance: float) -> None:
        period = 2 * pi * float(self.get_buffer("fineness")) * self.bandwidth * distance
        self.get_buffer("period").fill_(max(round(min(period, EXACT)), 2))

    def adopt(self, told: Sequence[Tensor]) -> None:
        """Take over scales and period."""
        super().adopt(told)
        period = float(self.get_buffer("period"))
        if not (2 <= period <= EXACT and period == round(period)):
            raise UserError(f"the features received have a period of {period:g}, not a whole number above 1: refused")
