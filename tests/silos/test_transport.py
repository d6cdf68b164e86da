"""What the coordinator asks, reads and gives on between silos."""

import json
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.methods import (
    FedAvg,
    FedSeq,
)
from ekiden.silos.coordinator.courier import Lost, Patience
from ekiden.silos.trust import custody
from ekiden.silos.trust.custody import Hop
from ekiden.silos.trust.parcel import Ask, unpack
from tests.silos.fakes import NAMES
from tests.silos.sessions import (
    assert_equal,
    away,
    far,
    here,
    nodes_in,
    sealed_in,
)

pytestmark = pytest.mark.usefixtures("toy_is_installed")


def test_work_is_not_done_twice(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path)
    tasks: list[bytes] = []
    nodes.lose = lambda node, data: None
    far(FedSeq(epochs=2), nodes, tmp_path / "run")
    tasks = [data for _, data in nodes.log if unpack(data, Ask)[0].kind == "task"]
    assert len(tasks) == 3
    shelf = next((tmp_path / "client-2-silo" / "runs").iterdir())
    outcome = next(shelf.glob("outcome-*"))
    before = outcome.stat().st_mtime_ns, outcome.read_bytes()
    assert nodes.receive([str(nodes.send(102, tasks[2]))])
    assert (outcome.stat().st_mtime_ns, outcome.read_bytes()) == before


def test_a_value_goes_once_to_the_coordinator_and_once_to_its_user(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path)
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run")
    kinds = [unpack(data, Ask)[0].kind for _, data in nodes.log]
    assert (
        kinds == ["hello"] * 6 + ["task"] * 3 + ["evaluate"] * 3
    )  # once without the terms, and once with them
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "network.jsonl").read_text().splitlines()
    ]
    moved = sum(r["sent"] + r["received"] for r in rows if r["kind"] in ("task", "value"))
    model = result.bytes // 2
    # two hops, relayed: twice in, twice out; the last value is the result; the rest are headers
    assert 5 * model < moved < 5 * model + 6 * 8192


def test_accounts_are_kept_in_the_order_of_tasks(tmp_path: Path) -> None:
    far(FedAvg(rounds=4), nodes_in(tmp_path), tmp_path / "run")
    lines = (tmp_path / "run" / custody.FILE).read_text().splitlines()
    hops = [hop for hop in map(custody.parse, lines) if isinstance(hop, Hop)]
    assert [(hop.step, hop.client) for hop in hops] == [
        (k, name) for k in range(4) for name in NAMES
    ]


def test_patience_that_ends_while_it_is_asked_skips_the_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, public = sealed_in(tmp_path)
    del nodes.files[101]
    asked, ended = iter([False, True]), Patience.ended

    def ends_after_the_first_question(patience: Patience, since: float) -> bool:
        return next(asked, ended(patience, since))

    monkeypatch.setattr(Patience, "ended", ends_after_the_first_question)
    method = FedAvg(rounds=1, epochs=1)
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.3)
    assert {r.source for r in result.ledger if r.missing} == {"client-1"}


def test_the_silo_that_gives_the_result_is_not_skipped(tmp_path: Path) -> None:
    """Only its model is for the server to read; the run continues when it is there."""
    method, gone = FedSeq(epochs=1), {"client-2": {2}}

    def lose(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        return (
            Lost("unsent")
            if ask.kind == "task" and away(gone)(ask.step, NAMES[node - 100])
            else None
        )

    nodes, public = sealed_in(tmp_path)
    nodes.lose = lose
    with pytest.raises(
        UserError, match="client-2 has the last hop, whose model alone the server may read"
    ):
        far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    nodes.lose = lambda node, data: None
    assert_equal(
        far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01), here(method)
    )
