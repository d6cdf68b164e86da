"""Runs between machines without one of their silos, or with one more: the same bits as in one
process, and signed."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from ekiden import Hardware
from ekiden import run as run_here
from ekiden.cli.app import main
from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import read_config, read_ledger
from ekiden.core.engine.method import Method
from ekiden.methods import FedGram, FedSeq
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.silos import commands
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import participation
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust.agreement import AGREEMENT, Revision
from tests.silos.asked import TERMS
from tests.silos.fakes import NAMES, FakeNodes, public_key, silos, with_keys
from tests.silos.sessions import TRAINING, assert_equal, far

METHOD = FedGram(width=120)


def alone(method: FedGram, left_out: Sequence[str] = ()) -> Result:
    """A run in one process without some clients."""
    data = silos().without(*left_out) if left_out else silos()
    return run_here(method, data, training=TRAINING, hardware=Hardware(threads=1), seed=3)


def again(
    plan: remote_plan.RemotePlan[Method], nodes: FakeNodes, folder: Path, public: dict[str, str]
) -> Result:
    keys = {name: public[name] for name in plan.names}
    return session.run(plan, nodes, folder, keys, lambda line: None, poll=0)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["chain", "star"])
def test_forgetting_gives_the_bits_of_a_run_without(topology: Any, tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, "[limits]\nmin_clients = 1\n")
    method = replace(METHOD, topology=topology)
    far(method, FakeNodes(files), tmp_path / "run", public)
    for client in (
        NAMES[:2] if topology == "chain" else NAMES[:1]
    ):  # also the first, whose scales all features had
        there = FakeNodes(
            [file for file in files if file.name != client]
        )  # who leaves does not answer
        folder = tmp_path / f"without-{client}"
        plan = remote_plan.without(tmp_path / "run", client)
        result = again(plan, there, folder, public)
        assert_equal(result, alone(method, [client]))
        assert verify(folder, {name: public[name] for name in plan.names}).wrong == ()
        assert client not in {
            row[end] for row in read_ledger(folder) for end in ("source", "target")
        }
        assert client not in read_config(folder)["clients"]


@pytest.mark.slow
def test_the_terms_name_the_run_before_and_every_silo_signs_them(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, "[limits]\nmin_clients = 1\n")
    far(METHOD, FakeNodes(files), tmp_path / "run", public)
    before = agreements.parse((tmp_path / "run" / AGREEMENT).read_text())
    folder = tmp_path / "new"
    again(
        remote_plan.without(tmp_path / "run", "client-1"),
        FakeNodes([files[0], files[2]]),
        folder,
        public,
    )
    terms = agreements.parse((folder / AGREEMENT).read_text())
    assert terms.revision == Revision(before.run, before.digest, "without", "client-1")
    signed = {(hop.client, hop.terms) for hop in verify(folder).hops}
    assert signed == {("client-0", terms.digest), ("client-2", terms.digest)}
    for file in (files[0], files[2]):
        (line,) = [ln for ln in _log(file.folder) if "replaces" in ln]
        old = file.folder / "runs" / before.run
        assert (
            f"replaces run {before.run} without client-1; {old} still holds what client-1 gave: "
            "remove it" in line
        )
        assert old.exists()
    config = read_config(folder)
    plan = config["remote_plan"]
    for changed in ("", plan["revises"].replace("client-1", "client-9")):
        (folder / "config.json").write_text(
            json.dumps(config | {"remote_plan": plan | {"revises": changed}})
        )
        assert any("remote_plan.revises" in line for line in verify(folder).wrong)


def _log(folder: Path) -> list[str]:
    return [
        line
        for file in folder.glob(f"{participation.FILE}*")
        for line in file.read_text().splitlines()
    ]


@pytest.mark.slow
def test_joining_gives_the_bits_of_a_run_in_which_it_is_last(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, "[limits]\nmin_clients = 1\n")
    two = {name: public[name] for name in NAMES[1:]}
    plan: remote_plan.RemotePlan[Method] = remote_plan.RemotePlan(
        Recipe(METHOD, training=TRAINING, seed=3, evaluate_every=0), ",".join(NAMES[1:])
    )
    session.run(plan, FakeNodes(files[1:]), tmp_path / "run", two, lambda line: None, poll=0)
    wanted = remote_plan.with_one_more(tmp_path / "run", "client-0")
    result = again(wanted, FakeNodes(files), tmp_path / "new", public)
    assert wanted.names == (*NAMES[1:], "client-0")
    same = alone(replace(METHOD, order="client-1,client-2,client-0"))
    assert result.weights is not None
    assert same.weights is not None
    assert result.weights.params.equal(same.weights.params)
    assert [t.bytes for t in result.ledger] == [t.bytes for t in same.ledger]
    assert verify(tmp_path / "new", public).wrong == ()


@pytest.mark.slow
def test_the_order_stays_that_of_the_run(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, "[limits]\nmin_clients = 1\n")
    for order, words in (
        ("reversed", "reversed"),
        ("client-1,client-0,client-2", "client-1,client-0"),
    ):
        far(replace(METHOD, order=order), FakeNodes(files), tmp_path / words, public)
        assert (
            asdict(remote_plan.without(tmp_path / words, "client-2").recipe.method)["order"]
            == words
        )
    for folder, order in (
        ("reversed", "reversed"),
        ("client-1,client-0", "client-1,client-0,client-2,new"),
    ):
        assert (
            asdict(remote_plan.with_one_more(tmp_path / folder, "new").recipe.method)["order"]
            == order
        )


def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files, public = with_keys(tmp_path, NAMES)
    run = tmp_path / "run"
    far(METHOD, FakeNodes(files), run, public)
    (run / "link.json").write_text('{"link": "127.0.0.1:1", "certificate": "", "keys": ""}')
    far(FedSeq(epochs=1), FakeNodes(files), tmp_path / "fedseq", public)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for words, message in (
        (f"forget {run} --client client-7", "unknown silo 'client-7'"),
        (f"join {run} --client client-1", "client-1 is in"),
        (f"join {run} --client new --data digits", "have their own data: leave out --data"),
        (f"forget {run} --client client-1 --out {tmp_path / 'fedseq'}", "exists already"),
    ):
        monkeypatch.setattr("sys.argv", ["ekiden", *words.split()])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        said = capsys.readouterr().err
        (line,) = [line for line in said.splitlines() if line.startswith("ekiden: ")]
        assert message in line
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    # Two silos are fewer than the three that a silo of this federation wants.
    strict, keys = with_keys(tmp_path / "strict", NAMES, "[limits]\nmin_clients = 3\n")
    far(METHOD, FakeNodes(strict), tmp_path / "three", keys)
    with pytest.raises(UserError, match="the run has 2 silos, client-0 allows 3 to"):
        again(
            remote_plan.without(tmp_path / "three", "client-1"),
            FakeNodes(strict),
            tmp_path / "two",
            keys,
        )


def test_a_folder_of_others_leads_to_no_superlink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither with a certificate nor with keys that somebody else has put next to it."""
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    files, public = with_keys(tmp_path, NAMES)
    run = tmp_path / "run"
    far(FedSeq(epochs=1), FakeNodes(files), run, public)
    submitted: list[str] = []

    def submit(plan: Any, link: Any, *about: Any, **more: Any) -> str:
        submitted.append(link["link"])
        return "ended"

    monkeypatch.setattr(commands, "run", submit)

    class Link:
        def __init__(self, link: str, certificate: Any) -> None:
            self.link = link

        def stop(self, number: str) -> None:
            submitted.append(self.link)

    monkeypatch.setattr(commands, "connect", Link)

    def refused(words: str) -> str:
        monkeypatch.setattr("sys.argv", ["ekiden", *words.split()])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        return capsys.readouterr().err

    peers = str(tmp_path / "peers")
    there = {"link": "127.0.0.1:9", "certificate": "", "keys": peers, "run": "7"}
    hostile: tuple[dict[str, Any], ...] = (
        {},
        {"link": "link.example.org:8000"},
        {"certificate": str(tmp_path / "ca.crt")},
        {"keys": str(tmp_path / "others")},
    )
    assert "ended" in refused(
        f"run fedseq --on flower --link 127.0.0.1:10 --keys {tmp_path / 'peers'} --clients "
        f"{','.join(NAMES)} --out mine"
    )
    assert submitted == ["127.0.0.1:10"]
    for other in hostile:
        (run / "link.json").write_text(json.dumps(there | other))
        for words in (
            "resume",
            "forget --client client-1",
            "join --client new",
            "evaluate --on flower",
            "stop",
        ):
            name, *more = words.split()
            (line,) = refused(f"{name} {run} {' '.join(more)}").splitlines()
            assert "nobody has run anything from here like this" in line
    assert submitted == ["127.0.0.1:10"]
    (run / "link.json").write_text(json.dumps(there | {"link": "127.0.0.1:10"}))
    assert "ended" in refused(f"resume {run}")
    (run / "link.json").write_text(json.dumps(there))
    for words in (f"trust {run / 'link.json'}", f"stop {run}"):
        monkeypatch.setattr("sys.argv", ["ekiden", *words.split()])
        main()
    assert submitted == ["127.0.0.1:10", "127.0.0.1:10", "127.0.0.1:9"]
    assert "does not say how a SuperLink is reached" in refused(f"trust {run / 'config.json'}")
    assert "neither a Python file nor" in refused(f"trust {run / 'ledger.jsonl'}")


@pytest.mark.parametrize(
    "revises",
    [
        "x",
        f"{'0' * 16} {'0' * 64} without client-0",  # who is in the run did not leave
        f"{'0' * 16} {'0' * 64} with client-9",
        f"../../../../etc {'0' * 64} without client-9",
        f"{'0' * 16} {'0' * 64} without a\nb",
    ],
)
def test_terms_that_cannot_be_so_are_refused(revises: str) -> None:
    terms = replace(TERMS, clients=NAMES, keys=tuple(map(public_key, NAMES)))
    good = f"{'0' * 16} {'0' * 64} without client-9"
    assert agreements.parse(replace(terms, revises=good).text()).revises == good
    with pytest.raises(UserError, match="the terms of the run cannot be read"):
        agreements.parse(json.dumps(json.loads(terms.text()) | {"revises": revises}))
