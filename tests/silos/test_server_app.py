"""What the app at the SuperLink makes of the configuration that the command line wrote."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.core.base.checks import plain
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator.remote_plan import Measuring


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower loads
@pytest.mark.parametrize("by", [(), ("sex",), ("sex", "age:40:65")])
def test_a_model_is_measured_by_the_subgroups_that_were_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by: tuple[str, ...]
) -> None:
    from ekiden.silos import server_app

    asked: dict[str, Any] = {}

    def evaluate(plan: Any, measured: Measuring, *about: object) -> None:
        asked.update(vars(plan), asked=measured)

    monkeypatch.setattr(session, "evaluate", evaluate)
    measured = Measuring("run", by=by)
    monkeypatch.setattr(
        remote_plan,
        "from_json",
        lambda values: SimpleNamespace(data="", evaluate_dp="exact"),
    )
    config = {
        "plan": "{}",
        "keys": "{}",
        "link": "{}",
        "measures": json.dumps(plain(measured)),
        "folder": str(tmp_path),
    }
    server_app.main(SimpleNamespace(), SimpleNamespace(run_config=config, run_id=1))
    assert asked == {"asked": measured, "data": "", "evaluate_dp": "exact"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_answer_counts_for_what_was_asked_alone() -> None:
    """A silo chooses what its message says about itself, and may send bytes without a message."""
    from ekiden.silos.coordinator.courier import Lost
    from ekiden.silos.envelope import wrap
    from ekiden.silos.server_app import GridNodes

    def message(text: bytes) -> Any:
        named = SimpleNamespace(reply_to_message_id="that of another silo", src_node_id=9)
        return SimpleNamespace(metadata=named, has_error=lambda: False, content=wrap(text))

    class Grid:
        def pull_messages(self, tickets: list[str]) -> list[Any]:
            came = {"good": message(b"yes"), "odd": message(b"no"), "bad": SimpleNamespace()}
            return [came[ticket] for ticket in tickets if ticket in came]

    found = GridNodes(Grid()).receive(["bad", "odd", "none", "good"])
    assert found == {
        "odd": b"no",
        "good": b"yes",
        "bad": Lost("its answer is not a message (AttributeError)"),
    }
