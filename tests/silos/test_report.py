"""What a silo reports about its test samples."""

import pytest
import torch
from torch import Tensor

from ekiden.clinic.counting import Care, counting_of, real
from ekiden.clinic.noisy import Exact
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked
from ekiden.core.tasks import (
    Classification,
    Scores,
    Segmentation,
)
from ekiden.core.tasks.base import IGNORED
from ekiden.silos.trust import report as measured
from ekiden.silos.trust.report import Reported, SiloReport, fits, total_of

TEN = Care(10)


def told(s: Scores, care: Care = TEN) -> dict[str, Tensor]:
    """The numbers that a silo reports about answers, by name."""
    counting = counting_of(s.task, s.outputs, full=False)
    return counting.split(counting.count(s, care))


def test_nothing_is_said_of_nine_samples_or_none() -> None:
    for n in (0, 9):
        y = torch.zeros(n, dtype=torch.int64)
        assert not any(
            v.any() for v in told(Scores(Classification(), 2, y, y, torch.ones(n))).values()
        )
    y = torch.zeros(10, dtype=torch.int64)
    found = told(Scores(Classification(), 2, y, y, torch.ones(10)))
    assert (int(found["right"]), int(found["samples"]), found["loss"].tolist()) == (10, 10, [10, 0])


def test_samples_without_a_label_that_counts_are_left_out() -> None:
    task = Segmentation()
    good = (torch.arange(120) % 3).reshape(20, 2, 3)
    y = good.clone()
    y[:8] = IGNORED
    found = told(Scores(task, 3, y, good, torch.ones(20)))
    assert int(found["samples"]) == 12
    assert float(real(found["loss"].numpy())) == pytest.approx(12 * 6)
    assert not told(Scores(task, 3, y, good, torch.ones(20)), Care(13))["samples"]


def test_reports_add_up_and_fit_or_not() -> None:
    counting = counting_of(Classification(), 2, full=True)
    y = torch.arange(12) % 2
    answers = torch.stack([1 - y, y], 1).float() * 0.8 + 0.1
    told_ = counting.count(Scores(Classification(), 2, y, answers, torch.ones(12)), Care(), y)
    one = measured.report(Exact(counting), told_[None], 0)
    assert fits(one, Exact(counting), 1)
    assert not fits(one, Exact(counting), 2)
    assert not fits(SiloReport(one.counts.float(), one.own), Exact(counting), 1)
    both = total_of({"a": Reported(shown=one), "b": Reported(shown=one)}, 0)
    assert both is not None
    assert torch.equal(both.counts, 2 * one.counts)
    assert total_of({}, 0) is None
    hidden = Masked("", [], [], [], 0, "sum", "list", ["a"])
    assert (
        total_of({"a": Reported(hidden)}, 2) is None
    )  # not all gave their part: it cannot be opened
    with pytest.raises(UserError, match="twice"):
        total_of({"a": Reported(hidden), "b": Reported(hidden)}, 2)


@pytest.mark.parametrize("classes", [2, 5])
def test_a_confusion_matrix_shows_one_of_k_answers_of_a_sample_and_no_more(classes: int) -> None:
    """A made-up model gives one class to all samples but one. The matrix can only say the class of
    that one."""
    y, seen = torch.arange(40) % classes, set()
    for answer in range(classes):
        for loss in (0.0, 3.0, 9.0):
            answers, losses = torch.zeros(40, dtype=torch.int64), torch.zeros(40)
            answers[7], losses[7] = answer, loss
            seen.add(
                tuple(
                    told(Scores(Classification(), classes, y, answers, losses))["table"]
                    .flatten()
                    .tolist()
                )
            )
    assert len(seen) == classes
