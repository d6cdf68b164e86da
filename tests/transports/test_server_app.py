"""What the app at the SuperLink makes of the configuration that the command line wrote."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.transports.flower.coordinator import remote_plan, session


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Flower loads
@pytest.mark.parametrize(("text", "by"), [("", []), ("sex", ["sex"]), ("sex,age:40:65", ["sex", "age:40:65"])])
def test_a_model_is_measured_by_the_subgroups_that_were_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, by: list[str]
) -> None:
    from ekiden.transports.flower import server_app

    asked: dict[str, Any] = {}
    monkeypatch.setattr(session, "evaluate", lambda *about, **more: asked.update(more))
    monkeypatch.setattr(remote_plan, "from_json", lambda values: SimpleNamespace(names=("a", "b")))
    config = {"plan": "{}", "keys": "{}", "link": "{}", "measures": "run", "folder": str(tmp_path), "validation": False}
    context = SimpleNamespace(run_config={**config, "by": text, "at": "[[365.0, 0.5]]", "weights": ""}, run_id=1)
    server_app.main(SimpleNamespace(), context)
    assert asked == {"validation": False, "by": by, "at": {365.0: 0.5}, "weights": None}
