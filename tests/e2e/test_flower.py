"""A real SuperLink and three SuperNodes on loopback, with TLS and keys: the same bits as in one
process."""

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import ssl
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import Method
from ekiden.methods import SCAFFOLD, DFedAvgM, FedELMY, FedGram, FedSeq, MAEcho
from ekiden.runs.recipe import Recipe
from ekiden.silos import commands
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from tests.e2e.silos import BIN, NAMES, Federation, assert_same_files, expected, running, wait_for
from tests.warm import children

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("flower")) as federation:
        yield federation


Finished = Callable[[str], tuple[Path, str]]
CASES: dict[str, tuple[Method, list[str]]] = {
    "fedelmy": (
        FedELMY(models=2, epochs=2, warmup=2),
        ["--models", "2", "--epochs", "2", "--warmup", "2"],
    ),
    "fedseq": (FedSeq(epochs=3), ["--epochs", "3"]),
}


@pytest.fixture(scope="module")
def finished(federation: Federation) -> Finished:
    """The folder of a finished run and what it said; one run for all tests that ask for it."""

    @cache
    def run(name: str) -> tuple[Path, str]:
        said = federation.run(name, *CASES[name][1])
        folder = federation.folder / "runs" / f"{name}-flower-seed3"
        assert federation.readable(folder / "model.safetensors") == 0, (
            "the SuperLink reads nothing at any time"
        )
        return folder, said

    return run


def test_two_silos_are_equal_to_one_process(tmp_path: Path) -> None:
    """The one fast test with real silos. Each has four processes that import PyTorch or Flower, so
    they are two."""
    with running(tmp_path, Federation.start_warm_silo, NAMES[:2]) as federation:
        said = federation.run("fedseq", *CASES["fedseq"][1])
        folder = federation.folder / "runs" / "fedseq-flower-seed3"
        assert federation.readable(folder / "model.safetensors") == 0, (
            "the SuperLink reads nothing at any time"
        )
        assert_equal_to_one_process(federation, "fedseq", said, tmp_path / "here")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_process(
    federation: Federation, finished: Finished, name: str, tmp_path: Path
) -> None:
    assert_equal_to_one_process(federation, name, finished(name)[1], tmp_path / "here")


def assert_equal_to_one_process(federation: Federation, name: str, said: str, here: Path) -> None:
    there = federation.folder / "runs" / f"{name}-flower-seed3"
    result = expected(
        CASES[name][0], here, [client for client in NAMES if client not in federation.names]
    )
    assert_same_files(there, here, said)
    assert read_lines(there / "metrics.jsonl")[-1]["accuracy"] == result.accuracy
    assert f"{100 * result.accuracy:.2f}" in said
    rows, silos = read_lines(there / "network.jsonl"), len(federation.names)
    tasks = silos + (name == "fedelmy")  # one message a hop, and FedELMY's warm-up
    assert [row["kind"] for row in rows if row["kind"] != "status"] == ["task"] * tasks + [
        "evaluate"
    ] * silos
    said = " ".join(federation.ekiden("verify", str(there), "--keys", "keys").split())
    assert (
        f"verified: {tasks} tasks, each signed by its silo, and the result is what they gave"
        in said
    )
    assert json.loads((there / "config.json").read_text())["on"] == "flower"


@pytest.mark.slow
def test_a_silo_leaves_a_run_of_fedgram_and_joins_it_again(
    federation: Federation, tmp_path: Path
) -> None:
    method = FedGram(width=120, dictionary="seed", min_active=10)  # the defaults between machines
    federation.run("fedgram", "--width", "120", "--out", "leaving")
    run = federation.folder / "leaving" / "fedgram-flower-seed3"
    federation.ekiden("silo", "release", "client-0.toml", str(run / "agreement.json"))
    said = federation.ekiden(
        "forget", str(run), "--client", "client-0", "--release", "client-0-release.txt"
    )
    expected(method, tmp_path / "two", ["client-0"])
    left = run.with_name(f"{run.name}-without-client-0")
    assert_same_files(left, tmp_path / "two", said)
    assert f"{run} still holds client-0: delete it" in " ".join(said.split())
    said = " ".join(federation.ekiden("verify", str(left)).split())
    assert re.search("signed: this run replaces run [0-9a-f]{16} without client-0", said)
    assert "verified: 3 tasks" in said
    federation.ekiden("silo", "release", "client-0.toml", str(left / "agreement.json"))
    said = federation.ekiden(
        "join", str(left), "--client", "client-0", "--release", "client-0-release.txt"
    )
    expected(replace(method, order="client-1,client-2,client-0"), tmp_path / "three")
    again = left.with_name(f"{left.name}-with-client-0")
    assert (again / "model.safetensors").read_bytes() == (
        tmp_path / "three" / "model.safetensors"
    ).read_bytes(), said


def attacked(federation: Federation, folder: Path, app: str, plan: str) -> Any:
    """What an attacker's app writes down; it also brings a ClientApp."""
    folder, found = folder / "app", folder / "found.json"
    commands.write_app(folder)
    file = folder / "pyproject.toml"
    own = file.read_text()
    for part, mine in (("server_app:app", app), ("client_app:app", "stolen")):
        assert f"ekiden.silos.{part}" in own
        own = own.replace(f"ekiden.silos.{part}", f"tests.e2e.attacker:{mine}")
    file.write_text(own)
    link = commands.connect(federation.link, federation.folder / "ca.crt")
    for line in link.lines(link.start(folder, {"plan": plan, "folder": str(found)})):
        print(line)
    return json.loads(found.read_text())


@pytest.mark.slow
def test_another_coordinator_reads_nothing_of_a_finished_run(
    federation: Federation, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody submits an app of his own that asks for the hops of a run under its id and other
    terms.

    It also brings a ClientApp, which would answer in the silos' place if they ran what they are
    sent."""
    monkeypatch.setenv("PYTHONPATH", federation.environment["PYTHONPATH"])  # where the app is
    run, _ = finished("fedseq")
    assert (run / "model.safetensors").exists()
    said = attacked(federation, tmp_path, "app", (run / "agreement.json").read_text())
    assert said["opened"] == []
    assert len(said["said"]) == 9
    assert all("has other terms at client-" in line for line in said["said"])


@pytest.mark.slow
def test_what_terms_say_of_the_network_is_refused_by_real_silos(
    federation: Federation, finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code, files, adapters of any size, other values, labels and samples; then the silos run as
    before."""
    monkeypatch.setenv("PYTHONPATH", federation.environment["PYTHONPATH"])  # where the app is
    terms = agreements.parse((finished("fedseq")[0] / "agreement.json").read_text())
    (federation.folder / "net.safetensors").write_bytes(b"not in the folder that silos name")
    changes: dict[str, tuple[dict[str, Any], str]] = {
        "code": (
            {"model": f"{federation.folder}/own.py:mine"},
            " does not trust: put the same file there",
        ),
        "file": (
            {"pretrained": f"{federation.folder}/net.safetensors", "values": "0" * 32},
            "needs 'net.safetensors'",
        ),
        "adapters": ({"train": "lora:r=4096", "model": "resnet18"}, "client-"),
        "many": ({"train": "lora:r=7"}, "does not describe adapters"),
        "values": ({"train": "head"}, "has other values of mlp"),
        "task": ({"task": '{"kind": "regression", "metric": "/x.py:f"}'}, "has no metric"),
        "inputs": (
            {"inputs": '{"kind": "arrays", "more": 1}'},
            "unknown entry 'more': leave it out",
        ),
        "samples": (
            {"inputs": '{"kind": "tokens", "vocabulary": 1000000000000}'},
            "and the run are of different inputs",
        ),
    }
    own = {field.name for field in fields(Recipe)}
    hostile = {}
    for what, (change, _) in changes.items():
        recipe = replace(
            terms.recipe, **{name: value for name, value in change.items() if name in own}
        )
        rest = {name: value for name, value in change.items() if name not in own}
        hostile[what] = replace(terms, run=secrets.token_hex(8), recipe=recipe, **rest).text()
    hostile["many"] = hostile["many"].replace(
        "lora:r=7", "lora:r=1000000000"
    )  # a recipe refuses it
    before = sorted(federation.folder.glob("client-*-silo/runs/*"))
    found = attacked(federation, tmp_path, "claims", json.dumps(hostile))
    assert len(found) == 3 * len(changes)
    for what, silo, error, told in found:
        assert changes[what][1] in error, (what, silo, error)
        assert not told
    assert sorted(federation.folder.glob("client-*-silo/runs/*")) == before
    said = federation.run("fedseq", "--epochs", "1", "--out", "after")
    assert (federation.folder / "after" / "fedseq-flower-seed3" / "model.safetensors").exists(), (
        said
    )


@pytest.mark.slow
def test_what_a_silo_does_not_allow_is_refused_at_both_ends(federation: Federation) -> None:
    said = federation.run("local", "--epochs", "1")
    first = re.search(
        r"silo (client-.): \1 does not allow 'local', only fedelmy, fedgram, fedseq \(limits", said
    )
    assert first, said
    assert not re.search("Traceback|Exit Code|ERROR|exception", said)
    assert len([line for line in said.splitlines() if "does not allow" in line]) == 1
    assert (
        f"refused: {first[1]} does not allow 'local'"
        in (federation.folder / f"{first[1]}.log").read_text()
    )


def coordinator(federation: Federation, port: int) -> Any:
    """A client of the Control API."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        server_address=f"127.0.0.1:{port}",
        insecure=False,
        root_certificates=(federation.folder / "ca.crt").read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )


def control(federation: Federation, port: int, stranger: bytes) -> dict[str, str]:
    """Return what the SuperLink answers at a port to somebody who has its certificate and asks as a
    coordinator."""
    import httpx
    from flwr.proto import control_pb2 as ask

    client = coordinator(federation, port)
    asked: dict[str, Callable[[], Any]] = {
        "list runs": lambda: client.ListRuns(ask.ListRunsRequest()),
        "list nodes": lambda: client.ListNodes(ask.ListNodesRequest()),
        "register": lambda: client.RegisterNode(ask.RegisterNodeRequest(public_key=stranger)),
        "read logs": lambda: next(client.StreamLogs(ask.StreamLogsRequest(run_id=1))),
        "start": lambda: client.StartRun(ask.StartRunRequest()),
        "stop": lambda: client.StopRun(ask.StopRunRequest(run_id=1)),
    }
    said = {}
    for what, call in asked.items():
        try:
            said[what] = type(call()).__name__
        except httpx.HTTPStatusError as error:
            said[what] = f"{error.response.status_code} {error.response.text}"
    client.close()
    return said


@pytest.mark.slow
def test_silos_reach_nothing_but_what_they_need(federation: Federation, tmp_path: Path) -> None:
    """With the certificate and the silos' port nobody can register keys, or see, start or stop
    runs."""
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_ssh_public_key(keys.generate(tmp_path / "stranger.key").read_bytes())
    stranger = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    refused = control(federation, federation.ports[0], stranger)
    assert set(refused.values()) == {"404 this port is for silos only\n"}, refused
    allowed = control(federation, federation.parts.control_port, stranger)
    answers = [allowed[what] for what in ("list runs", "list nodes", "register")]
    assert answers == ["ListRunsResponse", "ListNodesResponse", "RegisterNodeResponse"], allowed
    assert all("silos only" not in said for said in allowed.values()), allowed
    paths = set(
        json.loads(request(federation, federation.parts.control_port, "/openapi.json", "GET")[1])[
            "paths"
        ]
    )
    assert len(paths) > 60
    odd = {
        "/docs",
        "/openapi.json",
        "/v1/fleet",
        "/v1/fleet/../control/list-runs",
        "//v1/control/list-runs",
    }
    odd |= {
        "/v1/fleet/%2e%2e/control/list-runs",
        "/v1/fleet/..%2fcontrol%2flist-runs",
        "/V1/control/list-runs",
    }
    silo = signature(federation.folder / "client-0.key")
    fleet = {path for path in paths if path.startswith("/v1/fleet/")}
    for path in paths | odd:
        unsigned, as_silo = (
            request(federation, federation.ports[0], path, "POST", h)[0] for h in ({}, silo)
        )
        assert unsigned == (401 if path.startswith("/v1/fleet/") else 404), path
        assert (as_silo in (401, 404)) == (path not in fleet), path


@pytest.mark.slow
def test_a_silo_cannot_speak_for_another_one(federation: Federation) -> None:
    """It is registered and signs with its own key, but names another node, or the key of that
    node."""
    from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, message_pb2
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    client = coordinator(federation, federation.parts.control_port)
    nodes = client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
    client.close()
    own, others = (
        signature(federation.folder / "client-0.key"),
        signature(federation.folder / "client-1.key"),
    )
    key = b64decode(others["flwr-public-key"])
    mine, victim = (
        next(one.node_id for one in nodes if one.public_key == b64decode(proof["flwr-public-key"]))
        for proof in (own, others)
    )

    def asks(node: int) -> dict[str, Any]:
        return {
            "pull-messages": fleet_pb2.PullMessagesRequest(node=Node(node_id=node)),
            "push-messages": fleet_pb2.PushMessagesRequest(node=Node(node_id=node)),
            "push-object": message_pb2.PushObjectRequest(node=Node(node_id=node), run_id=1),
            "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest(
                node=Node(node_id=node), heartbeat_interval=30
            ),
            "deactivate-node": fleet_pb2.DeactivateNodeRequest(node_id=node),
            "activate-node": fleet_pb2.ActivateNodeRequest(public_key=key, heartbeat_interval=30),
        }

    def answer(
        name: str, message: Any, proof: Mapping[str, str], kind: str = PROTOBUF_MEDIA_TYPE
    ) -> int:
        headers = {**proof, "content-type": kind}
        content = message.SerializeToString()
        return request(
            federation, federation.ports[0], f"/v1/fleet/{name}", "POST", headers, content
        )[0]

    for name, message in asks(victim).items():
        assert answer(name, message, own) == 401, name
        assert answer(name, message, own, "application/json") == 415, name
        assert (
            answer(name, message, {**own, "flwr-public-key": others["flwr-public-key"]}) == 401
        ), name
    register = fleet_pb2.RegisterNodeFleetRequest(public_key=b64decode(own["flwr-public-key"]))
    assert answer("register-node", register, own) == 412
    assert answer("send-node-heartbeat", asks(mine)["send-node-heartbeat"], own) == 200, (
        "its own are answered"
    )
    federation.run("fedseq", "--epochs", "1", "--out", "after-impersonation")
    assert list((federation.folder / "after-impersonation").rglob("model.safetensors"))
    if sys.platform == "linux":
        reached = listening(federation)
        assert reached.pop(federation.ports[0]) == {"00000000"}
        assert reached[federation.parts.control_port] == {"0100007F"}
        assert len(reached) >= 1 + len(NAMES), "each silo has a port for itself"
        # no other machine reaches what silos and the coordinator listen to for themselves
        assert {address for found in reached.values() for address in found} == {"0100007F"}


def listening(federation: Federation) -> dict[int, set[str]]:
    """The addresses at which the processes of a federation listen, in hexadecimal, by port."""
    sockets = set()
    for process in federation.processes.values():
        for pid in (process.pid, *children(process.pid)):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(handle))
    found: dict[int, set[str]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines():
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                address, port = fields[1].split(":")
                found.setdefault(int(port, 16), set()).add(address)
    return found


@pytest.mark.slow
def test_a_stranger_without_a_key_stops_nothing(federation: Federation) -> None:
    """Four connections that send 40 MB each cost no memory; a run works afterwards, also when
    SuperExec had ended."""
    link = federation.processes["link"].pid
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.crt"))
    before = memory(link)

    def flood(number: int) -> bytes:
        found = b""
        with (
            socket.create_connection(("127.0.0.1", federation.ports[0]), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
            contextlib.suppress(OSError),
        ):
            head = "POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 300000000\r\n\r\n"
            secure.sendall(head.encode())
            found = secure.recv(100)
            for _ in range(40):
                secure.sendall(bytes(1_000_000))
        return found

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(flood, range(4)))
    assert all(answer.startswith(b"HTTP/1.1 401") for answer in answers), answers
    assert memory(link) < before + 30_000_000
    children = Path(f"/proc/{link}/task/{link}/children").read_text().split()
    (superexec,) = [
        pid for pid in children if b"superexec" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(int(superexec), signal.SIGKILL)
    federation.run("fedseq", "--epochs", "1", "--out", "after")
    assert "starting it again" in (federation.folder / "link.log").read_text()


def memory(process: int) -> int:
    """Resident bytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")
    )


def signature(key: Path) -> dict[str, str]:
    """The headers by which a silo proves to the SuperLink that it has its key."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

    private: Any = load_ssh_private_key(key.read_bytes(), None)
    moment = now().isoformat()
    public, signed = (
        public_key_to_bytes(private.public_key()),
        sign_message(private, moment.encode()),
    )
    proof = {"flwr-public-key": public, "flwr-signature": signed}
    return {name: b64encode(value).decode() for name, value in proof.items()} | {
        "flwr-timestamp": moment
    }


def request(
    federation: Federation,
    port: int,
    path: str,
    verb: str,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """The status and content of an answer of the SuperLink to a plain request."""
    context = ssl.create_default_context(cafile=str(federation.folder / "ca.crt"))
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
    connection.request(verb, path, body, dict(headers or {}))
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", ["Ctrl-C", "stop"])
def test_a_run_that_the_user_ends_ends_at_the_superlink(federation: Federation, end: str) -> None:
    """By Ctrl-C, or by `ekiden stop` with the run's number; `ekiden ps` shows it."""
    certificate = federation.folder / "ca.crt"
    flags = ["--link", federation.link, "--certificate", "ca.crt"]
    command = [str(BIN / "ekiden"), "run", "fedseq", "--on", "flower", *flags, "--keys", "keys"]
    command += ["--clients", ",".join(NAMES), "--epochs", "1000", "--out", "ended"]
    federation.start(end, command)
    log = federation.folder / f"{end}.log"
    wait_for(log, "at the SuperLink", 60)
    number = re.findall(r"run (\d+) at the SuperLink", log.read_text())[-1]
    if end == "Ctrl-C":
        ignored = (
            signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        )  # as in the background of a shell
        federation.processes[end].send_signal(signal.SIGTERM if ignored else signal.SIGINT)
    else:
        federation.ekiden("stop", number, *flags)
    code = federation.processes[end].wait(60)
    federation.processes.pop(end)
    assert code == (130 if end == "Ctrl-C" else 2), log.read_text()
    states = {run.run: run.state for run in commands.connect(federation.link, certificate).runs()}
    assert states[number] == "stopped"
    if end == "stop":
        assert f"run {number} was stopped" in log.read_text()
        assert re.search(rf"{number} .*stopped", federation.ekiden("ps", *flags))
        assert "is already finished" in federation.ekiden("stop", number, *flags)


SHAPES: dict[str, tuple[Method, list[str]]] = {
    "scaffold": (
        SCAFFOLD(rounds=2, epochs=1),
        ["--rounds", "2", "--epochs", "1"],
    ),  # rounds with private state
    "maecho": (
        MAEcho(epochs=1, iterations=5),
        ["--epochs", "1", "--iterations", "5"],
    ),  # one shot, with projectors
    "dfedavgm": (DFedAvgM(rounds=2, epochs=1), ["--rounds", "2", "--epochs", "1"]),  # gossip
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_other_shapes_are_equal_too(federation: Federation, name: str, tmp_path: Path) -> None:
    method, flags = SHAPES[name]
    for client in NAMES:  # read again for every message
        file = federation.folder / f"{client}.toml"
        text = re.sub("methods = .*", f'methods = ["{name}"]', file.read_text())
        every = 'level = "all"\nmin_active = 0'  # MA-Echo's statistics are many for these samples
        file.write_text(text.replace('level = "models"', every))
    here = tmp_path / "here"
    expected(method, here)
    said = federation.run(name, *flags)
    there = federation.folder / "runs" / f"{name}-flower-seed3"
    assert_same_files(there, here, said)
    assert "verified" in federation.ekiden("verify", str(there), "--keys", "keys")
