"""Areas and precisions of ranks, from scores and from the counts of silos."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as sk

from tests.core.tasks.scored import ece, exact, of_two, told

EDGES = [k / 15 for k in range(16)]
SCORE = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1e-9, 1 - 1e-9, *EDGES]), st.floats(0, 1), st.floats(0.49, 0.51)
)


@given(st.lists(st.tuples(SCORE, st.integers(0, 1)), min_size=2, max_size=60))
def test_two_classes_are_as_scikit_learn_has_them_also_from_counts(
    samples: list[tuple[float, int]],
) -> None:
    p, y = (np.array(part) for part in zip(*samples, strict=True))
    s = of_two(p, y)
    most = np.maximum(p, 1 - p)
    right = (p > 0.5) == (y == 1)
    wanted = {
        "accuracy": right.mean(),
        "brier": ((p - y) ** 2).mean(),
        "calibration_error": ece(most, right),
    }
    if 0 < y.sum() < len(y):
        wanted["auroc"] = sk.roc_auc_score(y, p)
    if y.any():
        wanted["average_precision"] = sk.average_precision_score(y, p)
    found, summed = exact(s), told(s)
    assert found.exact
    assert not summed.exact
    assert not found.errors
    for name, value in wanted.items():
        assert found.values[name] == pytest.approx(value, abs=1e-9), name
        assert s.metrics()[name] == found.values[name]
        assert abs(summed.values[name] - value) <= summed.errors.get(name, 0) + 1e-6, name
    assert ("auroc" in found.values) == ("auroc" in summed.values) == ("auroc" in wanted)
    if "auroc" in wanted:
        for one in found.thresholds:
            called = p >= one.threshold
            assert one.sensitivity == pytest.approx(called[y == 1].mean())
            assert one.specificity == pytest.approx((~called)[y == 0].mean())


@pytest.mark.parametrize("kind", ["tiny", "middle", "float32"])
def test_scores_that_lie_close_together_are_told_apart(kind: str) -> None:
    """Below 1e-7, where bins ended before, and between 0.49 and 0.51, where there were ten of
    them."""
    draw = np.random.default_rng(0)
    y = (draw.random(2000) < 0.1).astype(int)
    z = draw.normal(size=2000) + y
    p = {"tiny": 1e-9 * np.exp(z), "middle": 0.5 + 0.002 * z, "float32": 1 / (1 + np.exp(30 - z))}[
        kind
    ]
    s = of_two(p, y)
    assert exact(s).values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=1e-12)
    found = told(s)
    assert found.values["auroc"] == pytest.approx(sk.roc_auc_score(y, p), abs=2e-3)
    assert found.values["average_precision"] == pytest.approx(
        sk.average_precision_score(y, p), abs=5e-3
    )


def test_samples_of_one_class_have_no_area() -> None:
    for of in (exact, told):
        found = of(of_two([0.1, 0.9, 1.0], [1, 1, 1]))
        assert not {"auroc", "calibration_slope"} & found.values.keys()
        assert found.values["average_precision"] == 1
        assert found.values["accuracy"] == pytest.approx(2 / 3)
        assert not found.thresholds
