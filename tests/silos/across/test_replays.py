"""Old messages, sent again: by a relay that recorded them, or by a coordinator of the same or
another session."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ekiden.core.base.errors import UserError
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Request
from ekiden.core.engine.wire import Ref
from ekiden.methods import FedAvg, FedGram
from ekiden.silos.coordinator.transport import Remote
from ekiden.silos.silo import approval
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.parcel import Answer, Ask, unpack
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import far
from tests.silos.test_masking import numbers

COUNTED = {"requests.log", "requests.json", "requests", "days.json"}
"""files that count and log what is asked"""


def kept(folder: Path) -> dict[str, bytes]:
    """All that a silo has on its disk, but what it counts and logs."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in COUNTED)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if not path.name.endswith(".lock")
    }


def given(answers: list[bytes]) -> dict[tuple[str, str], set[str]]:
    """The digests of what each silo signed to have given, by the silo and the value's name."""
    found: dict[tuple[str, str], set[str]] = {}
    for data in answers:
        answer, _ = unpack(data, Answer)
        hop = custody.parse(answer.record) if answer.record else None
        if isinstance(hop, custody.Hop):
            found.setdefault((hop.client, hop.ref.key), set()).add(hop.given)
    return found


AVERAGE = FedAvg(rounds=2, epochs=1)
RUNS: dict[str, tuple[Method, dict[str, str]]] = {
    "masked chain": (FedGram(width=40), {}),
    "secure average": (replace(AVERAGE, secure=True), {}),
    "average": (AVERAGE, {}),
    "noise": (AVERAGE, {"dp": "epsilon=8,delta=1e-4,clip=1"}),
}
SLOW = ("average", "masked chain")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else []) for c in RUNS]
)
def test_old_requests_change_nothing_and_are_given_nothing_new(case: str, tmp_path: Path) -> None:
    """All requests of a run, the newest first, then in their order, also after each silo was
    started again."""
    files, public = with_keys(tmp_path, NAMES)
    nodes, (method, more) = FakeNodes(files), RUNS[case]
    far(method, nodes, tmp_path / "run", public, **more)
    before, once, log = [kept(file.folder) for file in files], given(nodes.said), list(nodes.log)
    assert any("measured-after-" in str(one) for one in before)
    assert all(len(digests) == 1 for digests in once.values())
    answers = [nodes.silo(node).answer(data) for node, data in (*reversed(log), *log)]
    assert [kept(file.folder) for file in files] == before
    again = given(answers)
    assert again
    assert all(digests == once[name] for name, digests in again.items())
    refused = [unpack(answer, Answer)[0].error for answer in answers]
    assert any("of the run is over" in error for error in refused)


def test_a_silo_whose_key_or_approval_is_gone_answers_no_old_request(tmp_path: Path) -> None:
    """Its own key is another one now, that of a peer is, it knows the peer no more, or nobody
    approves the run."""
    files, public = with_keys(tmp_path, NAMES, "[limits]\napprove = true\n")
    nodes = FakeNodes(files)
    for file in files:
        with pytest.raises(UserError, match="nobody"):
            far(FedGram(width=40), nodes, tmp_path / "run", public)
        ((plan, _),) = approval.waiting(file)
        approval.approve(file, plan)
    far(FedGram(width=40), nodes, tmp_path / "run", public)
    file, log = (
        files[0],
        [data for node, data in nodes.log if node == 100 and unpack(data, Ask)[0].agreement],
    )
    (approved,) = file.folder.glob("runs/*/approved")
    own, peer = file.key, tmp_path / "peers" / "client-1.pub"
    kinds = {unpack(data, Ask)[0].kind for data in log}
    assert {"hello", "task", "evaluate"} <= kinds

    def answers() -> set[str]:
        return {unpack(nodes.silo(100).answer(data), Answer)[0].error for data in log}

    assert "" in answers()
    for path, said in (
        (approved, "nobody at client-0 has approved this plan"),
        (peer, "there is no public key"),
        (own, "the run knows another key of client-0"),
    ):
        path.rename(path.with_suffix(".away"))
        if path is own:
            keys.generate(own)
        before = kept(file.folder / "runs")
        found = answers()
        assert found
        assert all(said in error for error in found), found
        assert kept(file.folder / "runs") == before
        path.with_suffix(".away").rename(path)
    shutil.copy(tmp_path / "peers" / "client-2.pub", peer)
    assert all("knows another" in error for error in answers())


def test_a_restored_backup_uses_no_masks_for_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silo forgets with it which masks it has used. A coordinator has it train again, from
    another model.

    Under the same masks, the difference of the two parts would be that of the two models.
    """
    files, public = with_keys(tmp_path, NAMES)
    nodes, submit, added = FakeNodes(files), Remote.submit, Client.added
    parts, own, folder = list[Any](), list[Any](), files[1].folder
    method = FedAvg(rounds=1, epochs=1, secure=True)

    def backed_up(node: int, data: bytes) -> None:
        if unpack(data, Ask)[0].kind == "task" and not (tmp_path / "backup").exists():
            shutil.copytree(folder, tmp_path / "backup")

    def noted(self: Client, before: Any, part: Any, *more: Any) -> Any:
        masked = added(self, before, part, *more)
        if self.name == "client-1":
            own.append(part)
            parts.append(masked)
        return masked

    def sends(self: Remote, request: Request) -> None:
        submit(self, request)
        if request.client != "client-1":
            return
        self._finish(Ref("client-1", request.key))
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "backup", folder)
        model, *more = request.args
        submit(self, replace(request, args=(model.with_params(model.params + 0.01), *more)))
        self._finish(Ref("client-1", request.key))

    nodes.lose = backed_up
    monkeypatch.setattr(Remote, "submit", sends)
    monkeypatch.setattr(Client, "added", noted)
    with pytest.raises(UserError, match="does not open"):
        far(method, nodes, tmp_path / "run", public)
    assert len(parts) == 2
    apart, models = (
        [a - b for a, b in zip(*map(numbers, pair), strict=True)] for pair in (parts, own)
    )
    assert len(models[0]) > 1000
    assert not np.array_equal(apart[0], models[0])
    assert float((apart[0] == models[0]).mean()) < 0.01
