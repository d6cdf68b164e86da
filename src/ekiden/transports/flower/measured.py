"""What a silo reports about models on its own test samples, and for how many models.

Each answer reveals something about the samples. So answers are coarse, the same models get the same answer again, and
a run may have only a limited number of models measured.
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
    """Return what is reported about a model: the number of right answers, and a coarse mean loss.

    One sample moves this mean loss by one step at most. A sample with several labels (labels, pixels, tokens) counts
    with the share of its right answers; the sum is rounded to whole samples. Samples without labels that count are left
    out. No sample counts for more than 10 in the mean loss.

    Args:
        scores: scores of the test samples.
        least: smallest number of samples about which anything is reported.
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
    """Round to two significant digits, or to steps of 10/n, rounded up to one digit, if these are larger."""
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
        """Return what was reported about exactly these models before."""
        path = self._file(digest)
        return _read(path) if path.exists() else None

    def put(self, digest: str, counts: Sequence[Count]) -> None:
        """Store an answer before it is sent."""
        write(self._file(digest), marked([pack(_Answer(tuple(counts)))]))

    def _file(self, digest: str) -> Path:
        return self._folder / f"measured-{digest[:32]}.parcel"


def _read(path: Path) -> tuple[Count, ...]:
    try:
        return unpack(verified(path.read_bytes()), _Answer)[0].counts
    except (OSError, Damaged, wire.WireError) as error:
        raise UserError(f"{path} is damaged ({error}): the run cannot measure more models here") from None
