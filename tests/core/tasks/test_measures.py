"""Metrics at their edges: from samples against scikit-learn, and from counts, as silos tell them."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from ekiden.core.tasks import MultiLabel, Regression, Scores, scaled
from ekiden.core.tasks.measures import ratio
from tests.core.tasks.scored import ece, exact, told


def test_labels_with_confidences_of_one() -> None:
    draw = np.random.default_rng(0)
    logit = np.where(np.arange(3000)[:, None] % 2 == 0, -18.0, -3.2) * np.ones((1, 2))
    p = torch.sigmoid(torch.tensor(logit, dtype=torch.float32))
    y = torch.tensor(draw.random((3000, 2)) < np.where(logit < -10, 0.05, 0.001)).float()
    s = Scores(MultiLabel(), 2, y, p, torch.zeros(3000))
    q, right = (
        torch.maximum(p, 1 - p).double().numpy().ravel(),
        ((p >= 0.5) == (y > 0.5)).double().numpy().ravel(),
    )
    assert exact(s).values["calibration_error"] == pytest.approx(ece(q, right), abs=1e-7)
    assert told(s).values["calibration_error"] == pytest.approx(ece(q, right), abs=1e-6)


@pytest.mark.parametrize("size", [1e-7, 1e-4, 0.3])
def test_tiny_errors_of_numbers_are_told(size: float) -> None:
    draw = torch.Generator().manual_seed(0)
    y = 50 + 20 * torch.randn(300, 1, generator=draw, dtype=torch.float64)
    task = scaled(Regression(), y)
    answers = y + 20 * size * torch.randn(300, 1, generator=draw, dtype=torch.float64)
    s = Scores(task, 1, y, answers, torch.zeros(300))
    wanted = {
        "rmse": sk.root_mean_squared_error(y, answers),
        "mae": sk.mean_absolute_error(y, answers),
    }
    for of in (exact, told):
        found = of(s)
        for name, value in wanted.items():
            assert found.values[name] == pytest.approx(value, rel=1e-4), name
            if of is exact or size > 1e-4:
                assert found.intervals[name][0] < value < found.intervals[name][1]
        assert 1 - found.values["r2"] == pytest.approx(
            1 - sk.r2_score(y, answers), rel=1e-3, abs=1e-12
        )


def test_a_ratio_of_two_numbers_is_not_defined_where_it_has_no_denominator() -> None:
    assert np.isnan(ratio(0.0, 0.0))
    assert ratio(1.0, 2.0) == 0.5
