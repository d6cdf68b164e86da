"""What tests of silos need not repeat as often as the product does."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="package", autouse=True)
def noise_is_drawn_again_a_few_times() -> Iterator[None]:
    """How far noise moves a figure is tested in `tests/clinic/test_noisy.py`; here it is only there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiden.clinic.noisy._REDRAWN", 5)
        yield
