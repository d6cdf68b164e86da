"""Our mean against a printed one; the numbers are worked out by hand, quantiles from a table of
Student's t."""

import numpy as np
import pytest

from ekiden.lab.tables.experiment import Published
from ekiden.lab.tables.verdicts import Comparison


def test_a_value_printed_without_spread() -> None:
    """Three runs of ours; theirs are assumed to be three with the same spread."""
    found = Comparison(37.28, 15.57, 3, Published(17.9))
    assert found.difference == pytest.approx(19.38)
    assert found.error == pytest.approx(12.713, abs=5e-4)  # 15.57 √(2/3)
    assert found.t == pytest.approx(1.5244, abs=5e-5)
    assert found.limit == pytest.approx(
        4.3027, abs=5e-5
    )  # 2 degrees of freedom: one spread, of three runs
    assert found.verdict == "consistent"


def test_a_value_printed_with_spread_and_runs() -> None:
    found = Comparison(80.0, 3.0, 9, Published(77.0, 2.0, 4))
    assert found.error == pytest.approx(2**0.5)  # √(9/9 + 4/4)
    assert found.t == pytest.approx(2.1213, abs=5e-5)
    assert found.limit == pytest.approx(
        2.2622, abs=0.02
    )  # 2² / (1/8 + 1/3) = 8.73 degrees of freedom; here that of 9
    assert found.verdict == "consistent"
    assert Comparison(81.0, 3.0, 9, Published(77.0, 2.0, 4)).verdict == "above"
    assert Comparison(73.0, 3.0, 9, Published(77.0, 2.0, 4)).verdict == "below"


def test_verdicts_that_the_spread_of_single_runs_hides() -> None:
    """Both spreads are known: the difference is within 2√2 standard deviations, but not of the
    means."""
    found = Comparison(52.0, 1.0, 5, Published(50.0, 1.0, 5))
    assert found.t == pytest.approx(3.1623, abs=5e-5)
    assert found.limit == pytest.approx(2.3060, abs=5e-5)  # 8 degrees of freedom
    assert found.verdict == "above"
    lone = Comparison(52.5, 1.0, 3, Published(50.0))  # theirs was taken to be exact
    assert lone.t == pytest.approx(3.0619, abs=5e-5)
    assert lone.verdict == "consistent"
    assert Comparison(53.6, 1.0, 3, Published(50.0)).verdict == "above"  # t = 4.41


@pytest.mark.slow
def test_two_equal_means_are_told_apart_in_one_case_of_twenty() -> None:
    """Their spread may be printed or assumed to equal ours: 20,000 papers and reproductions of
    three runs each."""
    draws = np.random.default_rng(0).normal(size=(20_000, 2, 3))
    for printed in (True, False):
        found = [
            Comparison(
                a.mean(),
                a.std(ddof=1),
                3,
                Published(b.mean(), b.std(ddof=1) if printed else None, 3),
            )
            for a, b in draws[: 4_000 if printed else None]
        ]
        wrong = sum(one.verdict != "consistent" for one in found) / len(found)
        assert wrong < 0.055, printed
        assert printed or wrong > 0.045


def test_one_printed_run_leaves_the_degrees_of_freedom_to_ours() -> None:
    found = Comparison(54.0, 1.0, 3, Published(50.0, runs=1))
    assert found.error == pytest.approx((4 / 3) ** 0.5)
    assert found.limit == pytest.approx(4.3027, abs=5e-5)  # 2 degrees of freedom
    assert found.verdict == "consistent"  # t = 3.46


def test_no_spread() -> None:
    one = Comparison(54.0, None, 1, Published(50.0, 1.0))
    assert (one.error, one.t, one.limit) == (None, None, None)
    assert one.verdict == "no spread known: one seed"
    alike = Comparison(50.0, 0.0, 3, Published(50.0))
    assert (alike.t, alike.verdict) == (None, "no spread known: its seeds agree")
    theirs = Comparison(50.5, 0.0, 3, Published(50.0, 1.0))
    assert theirs.limit == pytest.approx(4.3027, abs=5e-5), (
        "only theirs spread: 2 degrees of freedom"
    )
    assert theirs.verdict == "consistent"
