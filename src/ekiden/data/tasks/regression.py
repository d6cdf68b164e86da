"""Numbers for each sample."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ekiden.base.checks import Positive
from ekiden.base.errors import UserError
from ekiden.base.wording import row_text
from ekiden.data.tasks import measures
from ekiden.data.tasks.base import Metric, Need, VectorTask

_DECILES = (-1.2816, -0.8416, -0.5244, -0.2533, 0.0, 0.2533, 0.5244, 0.8416, 1.2816)
"""boundaries of the normal distribution's deciles"""


@dataclass(frozen=True)
class Regression(VectorTask):
    """K numbers for each sample: y (n,) or (n, K) float64 in their own unit; squared error.

    The network's outputs (b, K) are standardised: (y - mean) / std. Answers are in the unit of y, (n, K) float64. The
    loss is the squared error of standardised numbers, so guessing the mean has a loss of about 1.

    Attributes:
        mean: mean of each target, or one for all.
        std: standard deviation of each target, or one for all.
    """

    kind: ClassVar[str] = "regression"
    offers: ClassVar[frozenset[Need]] = frozenset({"vectors"})
    metrics: ClassVar[tuple[Metric, ...]] = measures.OF_NUMBERS
    unit: ClassVar[int] = 4096

    mean: tuple[float, ...] = (0.0,)
    std: tuple[Positive, ...] = (1.0,)

    def labels(self, y: Tensor, n: int, what: str) -> Tensor:
        """See `Task`."""
        if y.ndim not in (1, 2) or len(y) != n or y.is_complex():
            raise UserError(
                f"{what} has targets of shape {tuple(y.shape)}: regression needs a number, or a row of numbers, for "
                f"each of {n} samples"
            )
        y = y.double()
        if not torch.isfinite(y).all():
            row = int((~torch.isfinite(y)).nonzero()[0, 0])
            raise UserError(
                f"{what} has NaN or infinity in the target of {row_text(row)}: remove or replace such values."
            )
        return y

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return (outputs - self.standardised(y)).square().mean()

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """See `Task`."""
        return (outputs - self.standardised(y)).square().mean(1)

    def answers(self, outputs: Tensor, *, full: bool) -> Tensor:
        """See `Task`."""
        mean, std = self._scale(outputs)
        return outputs.double() * std + mean

    def right(self, answers: Tensor, y: Tensor) -> Tensor | None:
        """See `Task`."""
        return None

    def distance(self, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        """Return the mean squared difference; the temperature is not used. See `Task`."""
        return (outputs - teacher).square().mean()

    def targets(self, y: Tensor, outputs: int) -> Tensor:
        """Return the standardised numbers."""
        return self.standardised(y)

    def drawn(self, n: int, outputs: int, generator: torch.Generator) -> Tensor:
        """Draw normal numbers with the mean and the standard deviation of the targets."""
        values = torch.randn(n, outputs, generator=generator)
        mean, std = self._scale(values)
        return values.double() * std + mean

    def guess(self, outputs: int) -> float:
        """Return 1, the variance of standardised targets."""
        return 1.0

    def counts(self, y: Tensor, outputs: int) -> Tensor:
        """See `Task`."""
        return torch.full((outputs,), len(y))

    def strata(self, y: Tensor) -> Tensor:
        """Return the decile of the first target, as if it were normal."""
        first = self.standardised(y)[:, 0].contiguous()
        return torch.bucketize(first, torch.tensor(_DECILES, device=y.device))

    def standardised(self, y: Tensor) -> Tensor:
        """Return targets as the network gives them, (b, K) float32.

        They are centred in float64: float32 has 256 between the two numbers nearest to 3e9.
        """
        y = y if y.ndim == 2 else y[:, None]
        mean, std = self._scale(y)
        return ((y.double() - mean) / std).float()

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(v, dtype=torch.float64, device=like.device) for v in (self.mean, self.std))
        return mean, std
