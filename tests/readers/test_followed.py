"""What a silo reports about events at times: no number of it is small."""

import numpy as np
import pytest

from ekiden.clinic import curves
from ekiden.clinic.curves import Curve
from ekiden.core.base.errors import UserError
from ekiden.readers.followed import Followed
from ekiden.readers.moments import ColumnMoments, ColumnSums
from tests.clinic.survival_times import Y, told

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")


def test_no_number_of_a_silo_is_small() -> None:
    """All are 0 or the minimum, also what follows by subtraction from the number of rows."""
    grid = sorted(set(Y["all"][:, 0]))
    for name, one in told(grid, 10).items():
        assert 2 <= len(one.times) < len(grid)
        assert all(n == 0 or n >= 10 for n in (*one.events, *one.before, *one.at, one.later))
        assert sum(one.events) + sum(one.before) + sum(one.at) + one.later == len(Y[name])
        same = Followed.of(Y[name], one.times, 1)
        assert same.events == one.events
        assert [a + b for a, b in zip(same.before, same.at, strict=True)] == [
            a + b for a, b in zip(one.before, one.at, strict=True)
        ]
    both = curves.compared("days", told(grid, 10)).curves
    assert set(both["all"].times) == set(both["a"].times) & set(both["b"].times)
    assert both["all"].at_risk == Curve.of(Followed.of(Y["all"], both["all"].times, 1)).at_risk


def test_wrong_grids_are_refused() -> None:
    for times in ([200.0, 100.0], [0.0, 10.0], [float("inf")]):
        with pytest.raises(UserError):
            told(times)
    with pytest.raises(UserError, match="no time of days has enough rows at all silos"):
        curves.compared("days", told([20.0], 60))


def test_what_is_followed_travels_with_the_sums() -> None:
    times = np.array([[1.0, 1.0], [2.0, 0.0], [3.0, 1.0], [4.0, 1.0]])
    followed = Followed.of(times, (2.0, 3.5), 1)
    sums = ColumnSums({"target: t": ColumnMoments(4, 2.5, 5.0)}, {}, {}, followed=followed)
    assert ColumnSums.from_json(sums.to_json(), "here") == sums
