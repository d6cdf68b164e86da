"""What tests of silos share, and what they need not repeat as often as the product does."""

from collections.abc import Iterator

import pytest

from ekiden import methods


@pytest.fixture(scope="package", autouse=True)
def noise_is_drawn_again_a_few_times() -> Iterator[None]:
    """How far noise moves a figure is tested in `tests/clinic/test_noisy.py`; here it is only there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ekiden.clinic.noisy._REDRAWN", 5)
        yield


@pytest.fixture
def any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a method asks for is not known beforehand, so silos take any request."""
    monkeypatch.setattr("ekiden.silos.silo.policy.plan_of", lambda *args: None)


@pytest.fixture
def toy_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method of `tests.silos.toy` is known by its name."""
    monkeypatch.setitem(methods.PLACES, "Toy", "tests.silos.toy:Toy")
