"""The level that a method needs, from what its tasks declare."""

import pytest

from ekiden.core.engine.method import Method
from ekiden.methods import FedGram, FedSeq, RegMean
from ekiden.silos.silo.levels import Level, allows, needed

CAREFUL = FedGram(features="components", min_active=5)


@pytest.mark.parametrize(
    ("method", "least", "bounded", "level"),
    [
        # sums at points that nobody chose, of as many samples as the silo wants
        (CAREFUL, 5, None, "sums"),
        (CAREFUL, 6, None, "models"),
        (FedGram(), 0, None, "models"),
        (FedSeq(), 5, None, "models"),
        (RegMean(), 5, None, "all"),
        # noisy sums leave no few samples out: only a bound on epsilon protects these
        (CAREFUL, 5, False, "models"),
        (CAREFUL, 5, True, "sums"),
        (FedSeq(), 5, True, "sums"),
    ],
)
def test_a_method_needs_the_level_of_what_it_gives(
    method: Method, least: int, bounded: bool | None, level: Level
) -> None:
    assert needed(method, least, bounded=bounded) == level


def test_a_level_admits_itself_and_those_below() -> None:
    levels: list[Level] = ["sums", "models", "all"]
    for place, level in enumerate(levels):
        assert [allows(level, wanted) for wanted in levels] == [k <= place for k in range(3)]
