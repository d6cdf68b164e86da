"""Silos answer messages as clients in one process do: the same bits, however often a message is
lost."""

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import load_model
from ekiden._version import __version__
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.folder import code_version, read_config, read_lines, source_digest
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.wire import Encoded
from ekiden.methods import (
    MOON,
    SCAFFOLD,
    SPFL,
    FedAvg,
    FedDC,
    FedDyn,
    FedELMY,
    FedGram,
    FedSeq,
    FedTasuki,
    MetaFed,
)
from ekiden.methods.blocks.rounds import Reply
from ekiden.methods.exact.blocks import components
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.courier import Absent, Lost, Patience
from ekiden.silos.coordinator.session import Roll
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import silo_file as silo_toml
from ekiden.silos.silo.participation import sign
from ekiden.silos.silo.shelf import Shelf
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.parcel import Answer, Ask, Hello, pack, unpack
from ekiden.silos.trust.report import Reported, SiloReport
from ekiden.silos.trust.sealing import Party
from tests.silos import fakes
from tests.silos.fakes import NAMES, SILENT, FakeNodes, silo_file, silos, with_keys
from tests.silos.sessions import (
    KINDS,
    Stop,
    assert_equal,
    away,
    far,
    here,
    nodes_in,
    plan_of,
    same,
    sealed_in,
    small,
)

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:each pixel is a column of the trees:ekiden.core.base.errors.DataWarning"
    ),
    pytest.mark.usefixtures("toy_is_installed"),
]
# One of each shape; `test_same_bits_on_every_transport` has all methods, in processes of one
# machine.
SHAPES = ("fedseq", "metafed", "fedavg", "scaffold", "dfedavgm", "average")
FEW = ("toy",)


def mostly(fast: tuple[str, ...]) -> pytest.MarkDecorator:
    """All methods, of which these are fast."""
    kinds = [
        pytest.param(k, marks=[] if k.title() in fast else pytest.mark.slow, id=k.title())
        for k in KINDS
    ]
    return pytest.mark.parametrize("kind", kinds)


@mostly(SHAPES)
def test_equal_to_one_process(kind: type[Method], tmp_path: Path) -> None:
    assert_equal(far(small(kind), nodes_in(tmp_path), tmp_path / "run"), here(small(kind)))


def test_a_silo_whose_model_stands_out_is_named_at_the_coordinator(tmp_path: Path) -> None:
    method = FedAvg(rounds=2, epochs=1, weighting="uniform", combine="median", clip_update=1.5)
    nodes, public = sealed_in(tmp_path)
    said: list[str] = []
    session.run(plan_of(method), nodes, tmp_path / "run", public, said.append, poll=0)
    rows, expected = read_lines(tmp_path / "run" / "metrics.jsonl"), here(method).metrics
    assert [row["notes"] for row in rows] == [row["notes"] for row in expected]
    assert rows[0]["notes"].keys() == {"length of clipped steps", "distance from the result"}
    for step in (1, 2):
        assert any(
            line.startswith(f"step {step}: length of clipped steps") and "(client-" in line
            for line in said
        )
    verdict = verify(tmp_path / "run", public)
    assert verdict.wrong == ()
    assert any(
        claim.files == ("metrics.jsonl",) and claim.names == ("notes",)
        for claim in verdict.unproven
    )


def test_notes_that_somebody_made_up_are_not_proven(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    file = tmp_path / "run" / "metrics.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps(json.loads(first) | {"notes": {"a": 1.0}}), *rest, ""]))
    verdict = verify(tmp_path / "run", public)
    assert verdict.wrong == ()
    assert [claim.files for claim in verdict.unproven if claim.names == ("notes",)] == [
        ("metrics.jsonl",)
    ]


def test_the_folder_says_what_the_model_takes_and_nothing_of_the_data(tmp_path: Path) -> None:
    result = far(FedSeq(epochs=1), nodes_in(tmp_path), tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert config["digests"].keys() == {"model"}
    assert config["network"] == "mlp"
    assert config["input"] == {"shape": [1, 8, 8], "mean": [0.0], "std": [1.0]}
    x = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "run")(x), result.model(x))


@pytest.mark.parametrize("topology", ["chain", pytest.param("star", marks=pytest.mark.slow)])
def test_rounded_sums_travel_between_silos(topology: Any, tmp_path: Path) -> None:
    method = FedGram(width=40, bits=16, samples=2000, topology=topology)
    nodes, public = sealed_in(tmp_path)
    assert_equal(far(method, nodes, tmp_path / "run", public), here(method))
    assert verify(tmp_path / "run", public).wrong == ()


def test_components_of_the_seed_travel_as_masked_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are for images of 16 pixels; few of the seed's are enough here."""
    monkeypatch.setattr(fakes, "SPLIT", fakes.SPLIT.replace('"digits"', '"digits", size=16'))
    monkeypatch.setattr(components, "IMAGES", 200)
    monkeypatch.setattr(components, "FILTERS", 6)
    method = FedGram(features="components", width=24, samples=480)
    silos.cache_clear()
    try:
        nodes, public = sealed_in(tmp_path)
        assert_equal(far(method, nodes, tmp_path / "run", public), here(method))
        assert verify(tmp_path / "run", public).wrong == ()
    finally:
        silos.cache_clear()


def test_class_statistics_travel_between_silos(tmp_path: Path) -> None:
    method, (nodes, public) = FedTasuki(epochs=2, statistics=True, recall=0.25), sealed_in(tmp_path)
    assert_equal(far(method, nodes, tmp_path / "run", public), here(method))


@mostly(FEW)
def test_lost_messages_and_lost_answers_change_nothing(kind: type[Method], tmp_path: Path) -> None:
    (nodes, public), counter = sealed_in(tmp_path), itertools.count()
    nodes.lose = lambda node, data: [None, Lost("unsent"), Lost("unanswered")][next(counter) % 3]
    assert_equal(far(small(kind), nodes, tmp_path / "run", public), here(small(kind)))
    assert verify(tmp_path / "run", public).wrong == ()


@mostly(FEW)
def test_a_killed_coordinator_goes_on(kind: type[Method], tmp_path: Path) -> None:
    """Killed at each of its messages in turn, the silo having done the work or not."""
    method, (nodes, public) = small(kind), sealed_in(tmp_path)
    expected = here(method)
    for kill in range(0, 60, 7):
        left = [None] * kill

        def lose(node: int, data: bytes, left: list[None] = left, kill: int = kill) -> Lost | None:
            if left:
                left.pop()
                return None
            if kill % 2:
                nodes.silo(node).answer(data)
            raise Stop

        nodes.lose = lose
        try:
            result = far(method, nodes, tmp_path / "run", public)
            break
        except Stop:
            continue
    assert_equal(result, expected)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["feddc", "moon", "fednova"])
def test_spfl_over_a_host_that_keeps_something(host: str, tmp_path: Path) -> None:
    method = SPFL(host=host, rounds=2, epochs=1, length=2)
    assert_equal(far(method, nodes_in(tmp_path), tmp_path / "run"), here(method))


class Crooked(Silo):
    """A silo that reports something else than it should, and seals and signs that."""

    def __init__(
        self, silo: Silo, kind: str, change: Callable[[Any, Any], tuple[Any, Any]]
    ) -> None:
        super().__init__(silo._file, silo._loaded)
        self._kind, self._change = kind, change

    def answer(self, data: bytes) -> bytes:
        if unpack(data, Ask)[0].kind != self._kind:
            return super().answer(data)
        held: list[Any] = []
        seal = Party.seal

        def sealed(party: Party, value: Encoded, *about: Any) -> Any:
            held.append(wire.decode(value.data, Reply))
            _, changed = self._change(None, held[0])
            return seal(party, Encoded.of(wire.encode(changed)), *about)

        with pytest.MonkeyPatch.context() as patch:
            if self._kind == "value":
                patch.setattr(Party, "seal", sealed)
            said, body = unpack(super().answer(data), Answer)
        if self._kind in ("hello", "evaluate"):
            kind: type[Any] = Hello if self._kind == "hello" else Reported
            said, value = self._change(said, wire.decode(body, kind))
            return pack(said, wire.chunks(value))
        entry, _ = self._change(custody.parse(said.record), *held or [None])
        return pack(replace(said, record=custody.signed(entry, partial(sign, self._file))), (body,))


def with_params(reply: Reply, params: torch.Tensor) -> Reply:
    return reply._replace(model=reply.model.with_params(params))


CROOKED: list[tuple[str, Any, str]] = [
    (
        "value",
        lambda a, r: (a, with_params(r, r.model.params * float("nan"))),
        "holds NaN or infinity",
    ),
    (
        "value",
        lambda a, r: (a, with_params(r, r.model.params.double())),
        "model of another shape or type",
    ),
    ("value", lambda a, r: (a, r._replace(weight=float("inf"))), "holds NaN or infinity"),
    ("value", lambda a, r: (a, r._replace(weight=1e12)), "training samples, its sender has"),
    ("value", lambda a, r: (a, r._replace(weight=-r.weight)), "training samples, its sender has"),
    ("value", lambda a, r: (a, list(r)), "payload does not hold the Reply"),
    ("value", lambda h, r: (h and replace(h, size=h.size + 1), r), "another size than announced"),
    ("task", lambda h, r: (replace(h, size=-1), r), "gives no account"),
    ("task", lambda h, r: (replace(h, forward=-1), r), "gives no account"),
    ("evaluate", lambda a, c: (a, Reported()), "it is empty"),
    (
        "evaluate",
        lambda a, c: (a, replace(c, shown=SiloReport(torch.zeros(1, 1, dtype=torch.int64), {}))),
        "it does not fit",
    ),
]


@pytest.mark.parametrize(
    ("kind", "change", "why"), CROOKED, ids=[f"{kind}: {why}" for kind, _, why in CROOKED]
)
def test_what_silos_send_is_checked_before_it_is_used(
    kind: str, change: Any, why: str, tmp_path: Path
) -> None:
    """The run ends with the silo's name, and nothing of it is in the state."""
    nodes, honest = nodes_in(tmp_path), FakeNodes.silo
    nodes.silo = lambda node: (  # type: ignore[method-assign]
        Crooked(honest(nodes, node), kind, change) if node == 101 else honest(nodes, node)
    )
    with pytest.raises(UserError, match=f"silo client-1 .*{why}"):
        far(FedAvg(rounds=1, epochs=1), nodes, tmp_path / "run")
    assert not (tmp_path / "run" / "state.safetensors").exists()


def test_the_server_computes_on_as_many_threads_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_before(*args: object, **more: object) -> None:
        assert threads == [1] * 4  # the silos here do the same
        raise Stop

    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("ekiden.core.engine.run.drive", set_before)
    with pytest.raises(Stop):
        far(FedAvg(rounds=1, epochs=1), nodes_in(tmp_path), tmp_path / "run")


@pytest.mark.parametrize(
    "method", [FedSeq(epochs=2), FedAvg(rounds=2, epochs=1)], ids=lambda m: m.title()
)
def test_a_silo_that_stays_away_stops_the_run_and_resume_goes_on(
    method: Method, tmp_path: Path
) -> None:
    nodes = nodes_in(tmp_path)
    nodes.lose = lambda node, data: (
        Lost("node unavailable") if node == 102 and len(nodes.log) > 8 else None
    )
    with pytest.raises(ClientMissing, match="client-2 did not answer"):
        far(method, nodes, tmp_path / "run", patience=0.01)
    nodes.lose = lambda node, data: None
    assert_equal(far(method, nodes, tmp_path / "run", patience=0.01), here(method))
    lost = [row["lost_transfers"] for row in read_lines(tmp_path / "run" / "attempts.jsonl")]
    assert any(row["missing"] and row["source"] == "client-2" for row in lost[-1])


@pytest.mark.parametrize(
    ("method", "gone"),
    [
        (FedSeq(epochs=1, rounds=2), {"client-1": {1}}),
        pytest.param(FedSeq(epochs=1), {"client-0": {0}}, marks=pytest.mark.slow),
        pytest.param(
            FedELMY(models=1, epochs=1, warmup=1), {"client-0": {0}}, marks=pytest.mark.slow
        ),
        (FedTasuki(epochs=1, rounds=2), {"client-0": {0}, "client-2": {2}}),
        pytest.param(FedAvg(rounds=3, epochs=1), {"client-1": {0, 1}}, marks=pytest.mark.slow),
        pytest.param(
            FedDyn(rounds=3, epochs=1), {"client-1": {1}, "client-2": {2}}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda value: value.title() if isinstance(value, Method) else "",
)
@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_absent_silos_are_skipped_as_in_one_process(
    method: Method, gone: dict[str, set[int]], late: bool, tmp_path: Path
) -> None:
    """Also if the silo does the task, but too late: neither the task nor the state that it leaves
    counts."""
    nodes, public = sealed_in(tmp_path)

    def lose(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        missing = ask.kind == "task" and away(gone)(ask.step, NAMES[node - 100])
        return Lost("unanswered" if late else "unsent") if missing else None

    nodes.lose = lose
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    assert_equal(result, here(method, away(gone)))
    assert {(r.source, r.step) for r in result.ledger if r.missing} == {
        (c, s) for c in gone for s in gone[c]
    }
    verdict = verify(tmp_path / "run", public)
    assert verdict.wrong == ()
    assert not {(h.client, h.step) for h in verdict.hops} & {(c, s) for c in gone for s in gone[c]}


@pytest.mark.parametrize("comes", [False, True])
def test_a_run_begins_without_a_silo_that_is_away(comes: bool, tmp_path: Path) -> None:
    """It counts as missing in each step until it comes; the bits are those of one process."""
    nodes, public = sealed_in(tmp_path)
    away_node, gone = nodes.files.pop(101), {"client-1": {0, 1} if comes else {0, 1, 2}}
    tasks: list[int] = []

    def look(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        if ask.kind == "task" and ask.step == 1 and comes:
            nodes.files[101] = away_node
        tasks.append(ask.step)
        return None

    nodes.lose = look
    method = FedAvg(rounds=3, epochs=1)
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.3)
    missing = {(r.source, r.step) for r in result.ledger if r.missing}
    assert missing == {(c, s) for c in gone for s in gone[c]}
    expected = here(method, away(gone))  # which measures its test samples, too
    assert same(result.weights, expected.weights)
    assert result.ledger == expected.ledger
    assert verify(tmp_path / "run", public).wrong == ()
    assert bool(read_config(tmp_path / "run")["clients"]["client-1"]) is False


def test_all_silos_refuse_a_plan_in_one_line_before_anything_else(tmp_path: Path) -> None:
    """Without their data, and also if one of them does not answer."""
    files, public = with_keys(tmp_path, NAMES)
    files = [replace(f, limits=replace(f.limits, methods=("fedseq",))) for f in files[:2]] + files[
        2:
    ]
    nodes = FakeNodes(files)
    with pytest.raises(UserError, match=r"silo client-0: .*'fedavg'.*; silo client-1: .*'fedavg'"):
        far(FedAvg(rounds=1, epochs=1), nodes, tmp_path / "run", public)
    asks = [unpack(data, Ask)[0] for _, data in nodes.log]
    assert {ask.kind for ask in asks} == {"hello"}
    assert all(ask.plan and not ask.agreement for ask in asks)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(kind(rounds=4, epochs=1), marks=marks, id=kind.title())
        for kind, marks in (
            (SCAFFOLD, ()),
            (FedDyn, pytest.mark.slow),
            (FedDC, pytest.mark.slow),
            (MOON, pytest.mark.slow),
        )
    ],
)
@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_task_whose_value_did_not_come_does_not_count(
    method: Method, lost: int, tmp_path: Path
) -> None:
    """The silo ends its task in a step and dies before it gives the value; the run is resumed
    before and after that.

    Values are asked for by themselves in the first step, and in the first one after a resume.
    """
    nodes, public = sealed_in(tmp_path)
    stops = {lost, lost + 1}

    def lose(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        if ask.kind == "task" and ask.step in stops:
            stops.remove(ask.step)
            raise Stop
        return (
            Lost("unsent")
            if node == 101 and ask.kind == "value" and ask.key.startswith(f"{lost}-")
            else None
        )

    nodes.lose = lose
    for _ in range(2):
        with pytest.raises(Stop):
            far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    assert_equal(result, here(method, away({"client-1": {lost}})))
    verdict = verify(tmp_path / "run", public)
    assert verdict.wrong == ()
    assert ("client-1", lost) not in {(h.client, h.step) for h in verdict.hops}


def test_a_run_that_skips_resumes_without_the_silo(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    method = FedSeq(epochs=1, rounds=2)
    gone = {"client-1": {1, 4}}

    def lose(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        if node == 102 and ask.step == 2 and ask.kind == "task" and 101 in nodes.files:
            absent.append(nodes.files.pop(101))
            raise Stop
        return Lost("unsent") if node == 101 and ask.kind == "task" else None

    absent: list[SiloFile] = []
    nodes.lose = lose
    with pytest.raises(Stop):
        far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    expected = here(method, away(gone))
    assert same(result.weights, expected.weights)
    assert result.ledger == expected.ledger
    assert verify(tmp_path / "run", public).wrong == ()


def test_who_cannot_be_skipped_or_waited_for(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    with pytest.raises(
        UserError, match="metafed needs every silo in every step: choose absent wait or stop"
    ):
        far(MetaFed(), nodes, tmp_path / "run", public, absent="skip")
    with pytest.raises(
        UserError, match="absent 'leave' is unknown: it must be one of wait, skip, stop"
    ):
        plan_of(FedSeq(), absent="leave")
    files = dict(nodes.files)

    def all_gone(node: int, data: bytes) -> Lost | None:
        if unpack(data, Ask)[0].kind == "task":
            nodes.files.clear()
            return Lost("unanswered")
        return None

    nodes.lose = all_gone
    nodes.silo = lambda node: Silo(files[node])  # type: ignore[method-assign]
    with pytest.raises(UserError, match="no silo was connected for 0 s: check the SuperLink"):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", public, absent="skip", patience=0.01)


def test_a_silo_is_waited_for_without_end(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    losses = itertools.count()
    nodes.lose = lambda node, data: (
        Lost("node unavailable")
        if node == 101 and len(nodes.log) > 5 and next(losses) < 20
        else None
    )
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", public, absent="wait", patience=0.001)
    assert_equal(result, here(FedSeq(epochs=1)))
    assert next(losses) > 20
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "network.jsonl").read_text().splitlines()
    ]
    assert [row["client"] for row in rows if row["waited"] > 0] == ["client-1"]


@pytest.mark.parametrize("why", SILENT)
def test_a_message_that_breaks_off_unnoticed_is_sent_again(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine does not report it; a silo that is working is left alone."""
    monkeypatch.setattr("ekiden.silos.coordinator.courier._PROBE", 0.01)
    monkeypatch.setattr("ekiden.silos.coordinator.session._GREET_AGAIN", 0.01)
    nodes, public = sealed_in(tmp_path)
    broken: list[int] = []

    def lose(node: int, data: bytes) -> Lost | None:
        ask, _ = unpack(data, Ask)
        place = ask.step if ask.kind == "task" else -node
        if ask.kind in ("hello", "task") and place not in broken:
            broken.append(place)
            return Lost(why)
        return None

    nodes.lose = lose
    assert_equal(far(FedSeq(epochs=1), nodes, tmp_path / "run", public), here(FedSeq(epochs=1)))
    kinds = [unpack(data, Ask)[0].kind for _, data in nodes.log]
    assert kinds.count("hello") == 9
    assert kinds.count("task") == 6
    assert kinds.count("status") >= 3


def test_a_silo_says_whether_it_works(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    terms = next(
        unpack(data, Ask)[0].agreement for _, data in nodes.log if unpack(data, Ask)[0].agreement
    )
    status = pack(Ask("status", terms))
    shelf = Shelf(next(p for p in (tmp_path / "client-0-silo" / "runs").iterdir()), None)
    assert not unpack(nodes.silo(100).answer(status), Answer)[0].busy
    with shelf.held():
        assert unpack(nodes.silo(100).answer(status), Answer)[0].busy
    assert not unpack(nodes.silo(100).answer(status), Answer)[0].busy


def test_roll_call(tmp_path: Path) -> None:
    files = [silo_file(tmp_path / str(i), name) for i, name in enumerate([*NAMES, "client-1"])]
    with pytest.raises(UserError, match="two silos are called 'client-1'"):
        far(FedSeq(epochs=1), FakeNodes(files), tmp_path / "run")
    said: list[str] = []
    stranger = tmp_path / "stranger.toml"
    stranger.write_text('name = "stranger"\n[data]\npath = "digits"\n')
    nodes = FakeNodes([*files[:3], silo_toml.read(stranger)])
    session.run(
        plan_of(FedSeq(epochs=1)), nodes, tmp_path / "run", nodes.public, said.append, poll=0
    )
    assert any("'stranger' is connected, but not among --clients" in line for line in said)
    assert [node for node, _ in nodes.log].count(103) == 1
    with pytest.raises(ClientMissing, match="client-2 did not come"):
        far(
            FedSeq(epochs=1),
            FakeNodes(files[:2]),
            tmp_path / "other",
            nodes.public,
            patience=0.01,
        )


def test_a_silo_that_comes_back_under_another_number(tmp_path: Path) -> None:
    nodes = nodes_in(tmp_path)

    def lose(node: int, data: bytes) -> Lost | None:
        if node == 101 and unpack(data, Ask)[0].kind == "task":
            nodes.files[201] = nodes.files.pop(101)
            return Lost("unsent")
        return None

    nodes.lose = lose
    assert_equal(far(FedSeq(epochs=2), nodes, tmp_path / "run"), here(FedSeq(epochs=2)))


def test_a_name_is_bound_to_its_key(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    files, public = with_keys(tmp_path, NAMES)
    plan = plan_of(FedSeq(epochs=1), patience=0.01)
    assert_equal(
        session.run(plan, FakeNodes(files), tmp_path / "run", public, lambda line: None, poll=0),
        here(FedSeq(epochs=1)),
    )
    said: list[str] = []
    swapped = public | {"client-0": public["client-1"]}
    with pytest.raises(UserError, match=r"silo client-1: the run says that client-0 has the key"):
        session.run(plan, FakeNodes(files), tmp_path / "other", swapped, said.append, poll=0)
    assert any("does not hold the key of 'client-0'" in line for line in said)
    # An impostor next to the real silo gets nothing, and the run goes on.
    impostor = silo_file(tmp_path / "impostor", "client-0", '[link]\nkey = "own.key"\n')
    keys.generate(tmp_path / "impostor" / "own.key")
    nodes = FakeNodes([impostor, *files])
    session.run(plan, nodes, tmp_path / "third", public, said.append, poll=0)
    assert [unpack(data, Ask)[0].kind for node, data in nodes.log if node == 100] == ["hello"]


def test_a_method_that_needs_validation_data(tmp_path: Path) -> None:
    files = [silo_file(tmp_path, name) for name in NAMES]
    other = tmp_path / "client-1.toml"
    other.write_text(
        'name = "client-1"\n[data]\npath = "digits"\nval_fraction = 0\n[limits]\nlevel = "models"\n'
    )
    files[1] = silo_toml.read(other)
    with pytest.raises(
        UserError, match="metafed needs validation data at every silo, client-1 has none"
    ):
        far(MetaFed(), FakeNodes(files), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("absent", ["wait", "stop"])
@pytest.mark.parametrize(
    "data", ['path = "nowhere/x.parquet"', 'path = "digits"\nagreed = "no.json"']
)
def test_a_silo_that_cannot_prepare_ends_the_run_at_once(
    tmp_path: Path, absent: Absent, data: str
) -> None:
    """Nobody waits an hour, or for ever, for a file that is not there."""
    files, public = with_keys(tmp_path, NAMES)
    broken = tmp_path / "client-1.toml"
    broken.write_text(
        f'name = "client-1"\n[data]\n{data}\n[link]\nkey = "client-1.key"\npeers = "peers"\n'
        '[limits]\nlevel = "models"\n'
    )
    plan = plan_of(FedSeq(epochs=1), absent=absent)
    nodes = FakeNodes([files[0], silo_toml.read(broken), files[2]])
    with pytest.raises(UserError, match=r"^silo client-1: it cannot read its data; its own log"):
        session.run(plan, nodes, tmp_path / "run", public, print, poll=0)
    assert not (tmp_path / "run").exists()


def test_who_is_waited_for_is_named_with_what_it_said(tmp_path: Path) -> None:
    """A node that does not prove its name ends nothing."""
    files, public = with_keys(tmp_path, NAMES[:2])
    nodes = FakeNodes(files)
    nodes.corrupt = {101: pack(Answer("client-1", error="I cannot"))}
    roll = Roll(nodes, NAMES, public, Patience(0.01, 0), lambda line: None)
    with pytest.raises(
        ClientMissing, match=r"client-1 \(it said: I cannot\), client-2 did not come"
    ):
        roll.gather()


@pytest.mark.parametrize(
    "noise", [b"", b"\xff" * 50, pack(Answer("client-0"), (b"noise",))], ids=["", "ff", "hello"]
)
def test_a_node_that_talks_nonsense_ends_nothing(tmp_path: Path, noise: bytes) -> None:
    files = [silo_file(tmp_path, name) for name in ("client-3", *NAMES)]
    nodes, said = FakeNodes(files), list[str]()
    nodes.corrupt = {100: noise}
    session.run(
        plan_of(FedSeq(epochs=1)), nodes, tmp_path / "run", nodes.public, said.append, poll=0
    )
    assert any("a node sent an unreadable answer" in line for line in said)


class OfOtherCode(FakeNodes):
    """Silos of another commit, whose version is the same."""

    def silo(self, node: int) -> Silo:
        silo = super().silo(node)
        answer = silo.answer

        def other(data: bytes) -> bytes:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(
                    "ekiden.silos.silo.silo.code_version",
                    lambda: f"{__version__}+{'0' * 16}",
                )
                return answer(data)

        silo.answer = other  # type: ignore[method-assign]
        return silo


def test_a_silo_of_another_commit_is_named_before_training(tmp_path: Path) -> None:
    nodes = OfOtherCode([silo_file(tmp_path, name) for name in NAMES])
    with pytest.raises(
        UserError,
        match=rf"silo 'client-0' has Ekiden {__version__}\+0{{16}}, here is .*\+[0-9a-f]{{16}}",
    ):
        far(FedSeq(epochs=1), nodes, tmp_path / "run")


def test_the_version_names_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(rf"{re.escape(__version__)}\+[0-9a-f]{{16}}", code_version())
    (tmp_path / "a.py").write_text("x = 1\n")
    found = {source_digest(tmp_path)}
    (tmp_path / "a.py").write_text("x = 2\n")
    found.add(source_digest(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    found.add(source_digest(tmp_path))
    (tmp_path / "notes.txt").write_text("not code")
    assert len(found) == len({*found, source_digest(tmp_path)}) == 3
