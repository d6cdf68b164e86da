"""The patients of the survival reference at two silos, and what these report about their times."""

from typing import Any

import numpy as np

from ekiden.readers.followed import Followed
from tests.methods.survival_reference import CUT
from tests.methods.survival_reference import cohort as patients

ROWS = {"a": slice(0, CUT), "b": slice(CUT, None), "all": slice(None)}
Y = {
    name: np.stack([patients()["days"][rows], patients()["died"][rows]], 1)
    for name, rows in ROWS.items()
}


def told(times: Any, least: int = 1) -> dict[str, Followed]:
    return {name: Followed.of(Y[name], times, least) for name in ("a", "b")}
