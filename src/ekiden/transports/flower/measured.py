"""What a silo says about models on its own test samples, and about how many of them.

Each answer tells something about the samples. So it is coarse, the same models get the same answer again, and the
number of models that a run may have measured is limited.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.base.files import Damaged, marked, verified, write
from ekiden.data.tasks import Scores
from ekiden.engine import wire
from ekiden.transports.flower.parcel import Count, pack, unpack

MOST = 10.0
"""largest loss of a sample that counts in the mean"""


@dataclass(frozen=True)
class _Answer:
    counts: tuple[Count, ...]


def coarse(scores: Scores, least: int) -> Count:
    """What is said of a model: how many answers are right, and a mean loss that one sample moves by one step at most.

    Of samples with several labels (labels, pixels, tokens), each counts the same, with the share of its answers that
    are right; the sum is rounded to whole samples. One without any label that counts is left out. In the mean loss no
    sample counts for more than 10.

    Args:
        scores: of the test samples.
        least: so many samples there must be; of fewer nothing is said.
    """
    task = scores.task
    units = task.units(scores.y) if len(scores) else None
    if units is not None:
        scores = scores.at((units > 0).nonzero().flatten())
    samples = len(scores)
    if samples < max(least, 1):
        return Count(0, 0.0, 0)
    mean = float(scores.loss.double().clamp(max=MOST).mean())
    found = task.right(scores.answers, scores.y)
    right = 0 if found is None else round(float(found.double().sum()))
    return Count(right, mean if math.isnan(mean) else _rounded(mean, samples) * samples, samples)


def _rounded(mean: float, samples: int) -> float:
    """To two significant digits, or to steps of 10/n, rounded up to one digit, where these are larger."""
    share = MOST / samples
    digit = 10.0 ** math.floor(math.log10(share))
    step = max(math.ceil(share / digit) * digit, 10.0 ** (math.floor(math.log10(mean)) - 1) if mean > 0 else 0.0)
    return round(round(mean / step) * step, 6)


class Measured:
    """The answers of one run, in its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def models(self) -> int:
        """Number of models measured so far."""
        return sum(len(_read(path)) for path in self._folder.glob("measured-*.parcel"))

    def find(self, digest: str) -> tuple[Count, ...] | None:
        """What was said of these very models before."""
        path = self._file(digest)
        return _read(path) if path.exists() else None

    def put(self, digest: str, counts: Sequence[Count]) -> None:
        """Keep an answer before it leaves."""
        write(self._file(digest), marked([pack(_Answer(tuple(counts)))]))

    def _file(self, digest: str) -> Path:
        return self._folder / f"measured-{digest[:32]}.parcel"


def _read(path: Path) -> tuple[Count, ...]:
    try:
        return unpack(verified(path.read_bytes()), _Answer)[0].counts
    except (OSError, Damaged, wire.WireError) as error:
        raise UserError(f"{path} is damaged ({error}): the run cannot measure more models here") from None
