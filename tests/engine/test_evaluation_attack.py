"""What made-up models show of one record, in a small form; benchmarks/evaluation_attack.py prints the table."""

import pytest
from benchmarks.evaluation_attack import MINIMUM, MODELS, NO_MINIMUM, attack


@pytest.mark.slow  # many histograms
def test_minimums_leave_a_few_bits_for_each_model() -> None:
    apart, bits = attack(NO_MINIMUM, 128)
    assert (apart, bits) == (33, 5 * MODELS), "every score that was tried is read exactly"
    apart, bits = attack(MINIMUM, 128)
    assert MODELS <= bits <= 4 * MODELS, "one bit by the confusion matrix, and little by joined bins"
