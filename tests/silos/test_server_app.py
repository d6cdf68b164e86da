"""What the app at the SuperLink makes of the configuration that the command line wrote."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.silos.coordinator import remote_plan, session


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower loads
@pytest.mark.parametrize(
    ("text", "by"), [("", []), ("sex", ["sex"]), ("sex,age:40:65", ["sex", "age:40:65"])]
)
def test_a_model_is_measured_by_the_subgroups_that_were_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, by: list[str]
) -> None:
    from ekiden.silos import server_app

    asked: dict[str, Any] = {}
    monkeypatch.setattr(session, "evaluate", lambda *about, **more: asked.update(more))
    monkeypatch.setattr(
        remote_plan,
        "from_json",
        lambda values: SimpleNamespace(names=("a", "b"), data="", evaluate_dp="exact"),
    )
    config = {
        "plan": "{}",
        "keys": "{}",
        "link": "{}",
        "measures": "run",
        "folder": str(tmp_path),
        "validation": False,
    }
    context = SimpleNamespace(
        run_config={**config, "by": text, "at": "[[365.0, 0.5]]", "weights": ""}, run_id=1
    )
    server_app.main(SimpleNamespace(), context)
    assert asked == {
        "validation": False,
        "by": by,
        "at": {365.0: 0.5},
        "weights": None,
        "data": "",
        "evaluate_dp": "exact",
    }


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
