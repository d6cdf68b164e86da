"""How often the courier looks for answers."""

import pytest

from ekiden.transports.flower.courier import Patience


@pytest.mark.parametrize(("waited", "pause"), [(0.0, 0.1), (2.0, 0.1), (10.0, 0.5), (20.0, 1.0), (3600.0, 1.0)])
def test_looks_soon_at_first_and_then_less_often(waited: float, pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ekiden.transports.flower.courier.time.monotonic", lambda: 1000.0 + waited)
    assert Patience(poll=1.0).pause(1000.0) == pytest.approx(pause)
    assert Patience(poll=0.0).pause(1000.0) == 0
