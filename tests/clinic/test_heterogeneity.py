"""Random-effects means over silos: against an independent rewrite, and from sums alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ekiden.clinic.figures import Figures
from ekiden.clinic.heterogeneity import Weighed, between, heterogeneity, total
from ekiden.core.tasks import Classification

# Twelve areas under the curve and standard errors; the largest silo is the best one.
AREAS = [0.77, 0.81, 0.69, 0.90, 0.74, 0.83, 0.72, 0.79, 0.66, 0.85, 0.76, 0.80]
ERRORS = [0.03, 0.02, 0.06, 0.01, 0.05, 0.02, 0.04, 0.03, 0.08, 0.02, 0.05, 0.03]


def reference(x: list[float], errors: list[float]) -> tuple[float, float, float, float]:
    """τ², mean, its error, and the reach of the prediction, as DerSimonian and Laird's paper has it."""
    y, v = np.array(x), np.array(errors) ** 2
    w = 1 / v
    fixed = np.average(y, weights=w)
    q = (w * (y - fixed) ** 2).sum()
    tau = max(0.0, (q - (len(y) - 1)) / (w.sum() - (w**2).sum() / w.sum()))
    weights = 1 / (v + tau)
    error = weights.sum() ** -0.5
    reach = stats.t(len(y) - 2).ppf(0.975) * np.sqrt(tau + error**2)
    return tau, float(np.average(y, weights=weights)), float(error), float(reach)


SILOS = st.lists(st.tuples(st.floats(0.3, 0.95), st.floats(0.005, 0.2)), min_size=4, max_size=12)


@given(SILOS)
def test_it_is_that_of_dersimonian_and_laird(silos: list[tuple[float, float]]) -> None:
    tau, mean, error, reach = reference([x for x, _ in silos], [e for _, e in silos])
    found = between(total([Weighed.of(*one) for one in silos]), silos)
    assert found.deviation**2 == pytest.approx(tau, abs=1e-9)
    assert found.mean == pytest.approx(mean, abs=1e-7)
    assert found.interval[1] - found.mean == pytest.approx(1.959964 * error, rel=1e-4)
    assert found.prediction[1] - found.mean == pytest.approx(reach, rel=1e-4)
    sums = between(total([Weighed.of(*one) for one in silos]))
    assert sums.deviation == found.deviation
    # a weighted mean of equal numbers may differ from them in the last bit
    values = [x for x, _ in silos]
    assert min(values) - 1e-12 <= sums.mean <= max(values) + 1e-12


def test_it_is_that_of_statsmodels() -> None:
    """Thirteen trials of BCG (Colditz et al. 1994), log relative risks; `combine_effects` of
    statsmodels 0.15.0, method "dl"."""
    table = np.array(
        [
            *((4, 119, 11, 128), (6, 300, 29, 274), (3, 228, 11, 209), (62, 13536, 248, 12619)),
            *((33, 5036, 47, 5761), (180, 1361, 372, 1079), (8, 2537, 10, 619)),
            *((505, 87886, 499, 87892), (29, 7470, 45, 7232), (17, 1699, 65, 1600)),
            *((186, 50448, 141, 27197), (5, 2493, 3, 2338), (27, 16886, 29, 17825)),
        ]
    )
    a, b, c, d = table.T
    risks = np.log(a / (a + b)) - np.log(c / (c + d))
    errors = np.sqrt(1 / a - 1 / (a + b) + 1 / c - 1 / (c + d))
    each = list(zip(risks.tolist(), errors.tolist(), strict=True))
    found = between(total([Weighed.of(*one) for one in each]), each)
    assert found.deviation**2 == pytest.approx(0.3087602628623761, rel=1e-9)
    assert found.mean == pytest.approx(-0.7141172220732273, rel=1e-9)
    assert found.interval == pytest.approx((-1.064445, -0.363789), abs=1e-6)


def test_silos_that_differ_have_a_wide_prediction() -> None:
    each = list(zip(AREAS, ERRORS, strict=True))
    found = between(total([Weighed.of(*one) for one in each]), each)
    tau, mean, *_ = reference(AREAS, ERRORS)
    assert found.silos == 12
    assert found.deviation == pytest.approx(tau**0.5)
    assert 0.04 < found.deviation < 0.08
    assert found.prediction[0] < 0.7 < found.interval[0] < mean < found.interval[1] < 0.9
    assert found.prediction[1] > 0.9


def test_fewer_than_four_silos_tell_nothing() -> None:
    def one(area: float, error: float) -> Figures:
        ends = (area - 1.959964 * error, area + 1.959964 * error)
        return Figures(100, 1, {"auroc": area}, {"auroc": ends})

    silos = [one(*each) for each in zip(AREAS, ERRORS, strict=True)]
    assert heterogeneity(silos[:3], Classification()) == {}
    found = heterogeneity(silos, Classification())
    assert found["auroc"]["mean"] == pytest.approx(reference(AREAS, ERRORS)[1], abs=1e-6)
    assert list(found) == ["auroc"]
