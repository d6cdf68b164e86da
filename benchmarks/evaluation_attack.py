"""What 100 evaluations show of one record, to a coordinator that makes up the models and knows all
other samples.

    python -m benchmarks.evaluation_attack

Each model gives one test sample a score that says something about it, and the other samples scores
that make this easy to read. The record is taken to have as many bits as anybody wants to know. The
table has, for each setting, how many answers of a silo the coordinator can tell apart, and how many
bits of a random record it really reads by 100 models.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import log2

import torch
from torch import Tensor

from ekiden.clinic.counting import EXACT, Care, counting_of, edges, middles
from ekiden.clinic.subgroups import told
from ekiden.core.tasks import Classification, Scores

MODELS = 100
SAMPLES = 80  # at a silo
BINS = len(edges(1)) + 1
_P = torch.from_numpy(middles(edges(1)))
_COUNTING = counting_of(Classification(), 2, full=True)


@dataclass(frozen=True)
class Setting:
    """How carefully silos report.

    Attributes:
        name: what the table says.
        care: the minimums.
        silos: whose counts are added up; 1: the silo's own counts are read.
        groups: number of subgroups of each silo, whose counts are reported, too.
    """

    name: str
    care: Care
    silos: int = 1
    groups: int = 0


NO_MINIMUM = Setting("no minimum, a silo's own counts", EXACT)
MINIMUM = Setting("minimums, a silo's own counts", Care(10, 5, coarse=True))
SETTINGS = (
    NO_MINIMUM,
    Setting("no minimum, total of three silos (masks)", EXACT, silos=3),
    MINIMUM,
    Setting("minimums, total of three silos (masks)", Care(10, 5, coarse=True), silos=3),
    Setting("the same, and two subgroups", Care(10, 5, coarse=True), silos=3, groups=2),
)


def arrangements() -> Iterator[list[int]]:
    """Yield bins of the scores of all other samples."""
    n = SAMPLES - 1
    yield [BINS // 2] * n
    yield (
        [0] * 4 + [BINS - 2] * 5 + [BINS - 1] * (n - 9)
    )  # the sample is the median of the first ten
    groups = n // 9
    yield sorted(
        int((k % groups + 0.5) * BINS / groups) for k in range(n)
    )  # it makes a group of nine large enough
    yield torch.linspace(0, BINS - 1, n).long().tolist()


@lru_cache(maxsize=8)  # the other silos always answer the same
def counts(place: int, others: tuple[int, ...], setting: Setting) -> Tensor:
    """Return what a silo reports if one sample's score is in this bin."""
    at = torch.tensor([place, *others])
    y = torch.arange(SAMPLES) % 2
    p = _P[at]
    loss = -torch.where(y > 0, p, 1 - p).clamp(min=1e-12).log()
    scores = Scores(Classification(), 2, y, torch.stack([1 - p, p], 1), loss)
    parts = [_COUNTING.count(scores, setting.care)]
    group = torch.arange(SAMPLES) // 2 % max(setting.groups, 1)
    shown = told([group], scores, setting.care)
    for g in range(setting.groups):
        rows = ((group == g) & shown).nonzero().flatten()
        parts.append(_COUNTING.count(scores.at(rows), setting.care))
    return torch.cat(parts)


def answer(place: int, others: Sequence[int], setting: Setting) -> bytes:
    """Return what the coordinator reads: the silo's counts, and those of others where masks hide
    single ones.
    """
    rest = counts(BINS - 1, tuple(others), setting)
    found = counts(place, tuple(others), setting) + (setting.silos - 1) * rest
    return found.numpy().tobytes()


def attack(setting: Setting, step: int) -> tuple[int, int]:
    """Return how many answers can be told apart, and how many bits of a random record 100 models
    show.

    Args:
        setting: how carefully silos report.
        step: every so many bins are tried as scores of the sample.
    """
    best: dict[bytes, int] = {}
    chosen: list[int] = []
    for others in arrangements():
        known = {answer(place, others, setting): place for place in range(0, BINS, step)}
        if len(known) > len(best):
            best, chosen = known, others
    bits = int(log2(len(best)))
    places, read = list(best.values()), {value: k for k, value in enumerate(best)}
    record = torch.randint(2**bits, (MODELS,), generator=torch.Generator().manual_seed(0)).tolist()
    right = sum(read[answer(places[part], chosen, setting)] == part for part in record)
    return len(best), bits * right


def main() -> None:
    """Print the table."""
    print(
        "| what the coordinator reads | answers told apart | bits of a record by 100 models "
        "|\n|---|---:|---:|"
    )
    for setting in SETTINGS:
        apart, bits = attack(setting, 32)  # 129 scores, 7 bits
        print(f"| {setting.name} | {apart:,} | {bits:,} |", flush=True)


if __name__ == "__main__":
    main()
