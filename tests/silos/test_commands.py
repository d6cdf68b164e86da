"""A run that the command line submits ends with a line that says why."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")

from ekiden import FederatedData, steps
from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import note_end
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq
from ekiden.silos import commands
from ekiden.silos.control import RunAtLink
from ekiden.silos.logs import ENDED

ours = "ekiden: step 1 of 3 done"


class Link:
    """A SuperLink with one run."""

    def __init__(
        self, lines: list[str], state: str, reason: str = "", *, dies: bool = False
    ) -> None:
        self.printed, self.state, self.reason, self.dies = lines, state, reason, dies
        self.given: dict[str, Any] = {}
        self.stopped: list[str] = []

    def start(self, app: Path, settings: dict[str, Any]) -> str:
        self.given = {"app": (app / "pyproject.toml").read_text(), "settings": settings}
        return "7"

    def lines(self, run: str) -> Iterator[str]:
        assert run == "7"
        yield from self.printed
        if self.dies:
            raise UserError("no SuperLink at 127.0.0.1:9 answers")

    def runs(self) -> list[RunAtLink]:
        return [RunAtLink("7", "fedseq", self.state, "", self.reason)]

    def stop(self, run: str) -> None:
        self.stopped.append(run)


def ended(link: Link, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    said: list[str] = []
    monkeypatch.setattr(commands, "connect", lambda address, certificate: link)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    plan: Any = SimpleNamespace(to_json=dict)
    return commands.run(plan, {"link": ""}, None, folder / "r", {}, said.append), said


@pytest.mark.parametrize(
    ("link", "why"),
    [
        (Link([ours], "completed"), ""),
        (Link([ours, f"{ENDED}silo b: no"], "failed", "ServerApp failed"), "silo b: no"),
        (Link([ours], "stopped"), "run 7 was stopped (`ekiden stop`)"),
        (
            Link([ours], "failed", "No heartbeat received from the task"),
            "the process that led the run is gone: it was killed, or the machine lacks memory",
        ),
        (Link([ours], "failed", "KeyError: 'x'"), "run 7 failed: KeyError: 'x'"),
        (
            Link([ours], "running", dies=True),
            "the SuperLink is gone (no SuperLink at 127.0.0.1:9 answers)",
        ),
    ],
    ids=["completed", "refused", "stopped", "killed", "a bug", "no SuperLink"],
)
def test_each_end_of_a_run_says_why(
    link: Link, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, said = ended(link, tmp_path, monkeypatch)
    assert found == why
    assert said[:2] == ["run 7 at the SuperLink", ours]


def test_what_flower_printed_is_shown_only_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    traceback = ["Traceback (most recent call last):", "KeyError: 'x'"]
    _, said = ended(Link([ours, *traceback], "completed"), tmp_path, monkeypatch)
    assert "Traceback" not in " ".join(said)
    _, said = ended(Link([ours, *traceback], "failed", "KeyError"), tmp_path, monkeypatch)
    assert said[-1] == "\n".join(traceback)


def test_the_app_declares_what_a_run_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower refuses a setting that the app does not declare, or of another type."""
    import tomllib

    link = Link([], "completed")
    ended(link, tmp_path, monkeypatch)
    declared = tomllib.loads(link.given["app"])["tool"]["flwr"]["app"]["config"]
    kinds = [
        {name: type(value) for name, value in one.items()}
        for one in (declared, link.given["settings"])
    ]
    assert kinds[0] == kinds[1]


def test_why_a_run_stopped_is_in_its_folder(
    blobs: FederatedData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`show` and `log` say it until the run is started again; a folder of others moves no cursor."""
    folder = tmp_path / "run"
    for _ in steps(FedSeq(epochs=1), blobs, Tiny, folder=folder):
        break
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"on": "flower", "sealed": True}))
    note_end(folder, "silo b: \x1b[2Jno")
    for command in ("show", "log"):
        call([command, str(folder)])
        said = " ".join(capsys.readouterr().out.split())
        assert "silo b: ?[2Jno; `ekiden resume" in said
    lines = (folder / "attempts.jsonl").read_text().splitlines()
    assert [set(json.loads(line)) for line in lines][-1] == {"ended", "reason"}
