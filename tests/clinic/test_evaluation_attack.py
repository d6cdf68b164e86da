"""What made-up models show of one record, in a small form; benchmarks/evaluation_attack.py prints
the table."""

import pytest
import torch
from benchmarks.evaluation_attack import MINIMUM, MODELS, NO_MINIMUM, attack

from ekiden.clinic.counting import EXACT, Care, counting_of, real
from ekiden.core.tasks import Classification, Scores


@pytest.mark.slow  # many histograms
def test_minimums_leave_a_few_bits_for_each_model() -> None:
    apart, bits = attack(NO_MINIMUM, 128)
    assert (apart, bits) == (30, 4 * MODELS), "every score that was tried is read exactly"
    apart, bits = attack(MINIMUM, 128)
    assert MODELS <= bits <= 4 * MODELS, (
        "one bit by the confusion matrix, and little by joined bins"
    )


def test_a_last_silo_that_makes_up_the_result_reads_seven_scores_of_single_samples() -> None:
    """With the coordinator, who reads the report: one sample in each group of the calibration error
    but one."""
    scores = torch.tensor([0.57, 0.61, 0.68, 0.74, 0.81, 0.88, 0.95], dtype=torch.float64)
    scores = (
        scores
        + torch.rand(7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 100
    )
    p = torch.cat([scores, torch.full((MODELS,), 0.5, dtype=torch.float64)])
    y = torch.arange(len(p)) % 2
    answers = torch.stack([1 - p, p], 1)
    found = Scores(Classification(), 2, y, answers, -answers[torch.arange(len(p)), y].log())
    counting = counting_of(Classification(), 2, full=True)
    for care in (EXACT, Care(10, 5, coarse=True)):
        sums = torch.from_numpy(
            real(counting.split(counting.count(found, care))["confidence"].numpy())
        )
        read = torch.isclose(sums[None], scores[:, None], atol=2**-20).any(1)
        assert read.all() if care is EXACT else not read.any()
