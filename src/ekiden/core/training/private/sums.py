"""Sums over samples with noise: features clipped to whole numbers, and noise that hides one
sample.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.training.gram import LARGEST, NoisySums, measure, noisy
from ekiden.core.training.private.accountant import Spent, noise_for
from ekiden.core.training.private.noise import LEAST, MOST, ROUNDED, Draw, Noise
from ekiden.core.training.private.promise import DP, check_delta

# parts of 1/σ² that go to products, class sums and counts
_SHARES = (0.68, 0.3, 0.01)
_CENTRE = (
    0.01  # the part of 1/σ² that goes to the mean of one client's features, which all subtract
)
# the largest part of the squared length of this mean that may be noise
_HIDDEN = 0.2
# features for which the noise's largest eigenvalue is about as large as a usual one of the sums
_ROOM = 0.5
# of `clip`, for each feature
_UNIT = LARGEST / 4


def planned_sums(dp: DP, samples: int, where: str) -> Spent:
    """Return what one release of a client's sums tells: a Gaussian mechanism of sensitivity 1.

    A sample is in the sums of its own silo only, so the run keeps the ε of one release.
    """
    check_delta(dp, samples, where)
    return Spent(noise_for(dp.epsilon, dp.delta, 1.0, 1), 1.0, 1)


def of_centre(plan: Spent) -> Spent:
    """Return what the mean of a client's features tells, of all that its release may tell."""
    return replace(plan, noise=plan.noise / math.sqrt(_CENTRE))


def of_sums(plan: Spent) -> Spent:
    """Return what the sums tell without the mean."""
    return replace(plan, noise=plan.noise / math.sqrt(1 - _CENTRE))


def width_for(dp: DP, samples: int) -> int:
    """Return D for so many samples of all clients, from them and from ε alone.

    The noise matrix has a norm of about 2σC²√D, and C²n/D is a usual eigenvalue of the sums.
    """
    return max(16, int((_ROOM * samples / noise_for(dp.epsilon, dp.delta, 1.0, 1)) ** (2 / 3)))


@dataclass(frozen=True)
class Release:
    """One release of a client's sums, and of the mean of its features if no other client gave one
    before.

    The vector that one sample adds is (φφᵀ above and on the diagonal, φ in the row of its class, 1
    in its count). Its parts have norms of at most √((C⁴ + C²·127²)/2), C and 1, where C bounds ‖φ‖.
    Each has noise of its own. The inverse squares of noise by norm, with that of the mean, add up
    to that of `spent`: Gaussians compose so, also if the later one depends on the earlier one, as
    the sums depend on the mean.
    """

    dp: DP  # the promise
    spent: Spent  # what the sums and the mean tell together
    noise: Noise  # the client's random numbers, for the sums or for the mean

    def deviations(self, width: int) -> tuple[int, int, int]:
        """Return the standard deviations of one client's noise for products, class sums and
        counts.
        """
        square = bound(self.dp, width)
        products = math.sqrt(square * (square + min(square, LARGEST**2)) / 2)
        norms = (products, math.sqrt(square), 1.0)
        first, second, third = (
            self._deviation(norm, share, self.dp.honest, width)
            for norm, share in zip(norms, _SHARES, strict=True)
        )
        return first, second, third

    def _deviation(self, norm: float, share: float, honest: int, width: int) -> int:
        """Return σ of one of `honest` clients whose noise together hides a part of this norm with
        its share.
        """
        found = math.ceil(math.sqrt((self.spent.noise**2 * norm**2 / share + ROUNDED) / honest))
        if found > MOST:
            raise UserError(
                f"--dp epsilon={self.dp.epsilon:g} needs too much noise for {width} features: "
                "lower clip"
            )
        return max(found, LEAST)

    def centre(self, blocks: Iterable[tuple[Tensor, Tensor]], width: int) -> Tensor:
        """Return (D,) int8, the noisy mean of features (b, D); 0 if much of it is noise, as for few
        samples.

        Features are clipped as with `clip` = 1, so that the mean has its full length. The client
        alone adds all of its noise. Numbers of samples are not secret.
        """
        square = bound(replace(self.dp, clip=1.0), width)
        total = torch.zeros(width, dtype=torch.int64)
        n = 0
        for phi, _ in blocks:
            total += centred_clipped(phi, square).sum(0).long().cpu()
            n += len(phi)
        sigma = self._deviation(math.sqrt(square), _CENTRE, 1, width)
        told = (total + Draw(self.noise).gaussian(sigma, width)).double()
        if width * sigma**2 > _HIDDEN * float(told.square().sum()):
            return torch.zeros(width, dtype=torch.int8)
        return (told / n).round().clamp(-LARGEST, LARGEST).to(torch.int8)

    def sums(
        self,
        blocks: Iterable[tuple[Tensor, Tensor]],
        classes: int,
        width: int,
        device: torch.device,
    ) -> NoisySums:
        """Return noisy sums of centred and clipped features (b, D), which are whole numbers, with
        labels (b,).
        """
        square = bound(self.dp, width)
        clipped: Iterator[tuple[Tensor, Tensor]] = (
            (centred_clipped(phi, square), y) for phi, y in blocks
        )
        draw = Draw(self.noise)
        return noisy(
            measure(clipped, classes, width, device), self.deviations(width), draw.gaussian
        )


def bound(dp: DP, width: int) -> int:
    """Return C², the largest square of a norm; a whole number."""
    return max(1, math.floor((dp.clip * _UNIT) ** 2 * width))


def centred_clipped(phi: Tensor, square: int) -> Tensor:
    """Return whole numbers (b, D): each row minus its mean, with a squared norm of at most
    `square`.

    A row that is longer is shortened and rounded; if rounding makes it too long again, it is cut
    off towards 0.
    """
    u = phi.double()
    u = (u - u.mean(1, keepdim=True).round()).clamp(-LARGEST, LARGEST)
    # whole numbers below 2^53
    squares = u.square().sum(1, keepdim=True)
    # rounding adds D/12 to a square
    aim = max(square - phi.shape[1] / 8, square / 2)
    short = u * (aim / squares.clamp(min=1)).sqrt()
    shortened = torch.where(
        short.round().square().sum(1, keepdim=True) <= square, short.round(), short.trunc()
    )
    return torch.where(squares <= square, u, shortened)
