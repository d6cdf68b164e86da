"""A registered silo that sends what only the coordinator or another silo may send, and bytes
without a message."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from ekiden.silos import commands
from ekiden.silos.trust import keys
from ekiden.silos.trust.parcel import Answer, Ask, pack
from tests.e2e.silos import BIN, NAMES, Federation, running
from tests.e2e.test_flower import coordinator

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("spoofed")) as federation:
        public = keys.generate(federation.folder / "liar.key").rename(
            federation.folder / "keys" / "liar.pub"
        )
        link = commands.connect(federation.link, federation.folder / "ca.crt")
        link.register(keys.read_public(public))
        yield federation


class Liar:
    """The connection of a registered silo that is not in the run."""

    def __init__(self, federation: Federation) -> None:
        from cryptography.hazmat.primitives.serialization import load_ssh_private_key
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        private: Any = load_ssh_private_key((federation.folder / "liar.key").read_bytes(), None)
        public = private.public_key()
        proofs = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(private, public),
        ]
        certificate = (federation.folder / "ca.crt").read_bytes()
        self._client = FleetHttpClient.from_server_address(
            federation.address, False, certificate, interceptors=proofs
        )
        asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=300)
        self.number = self._client.ActivateNode(asked).node_id
        self._node = Node(node_id=self.number)

    def close(self) -> None:
        self._client.close()

    def received(self) -> Any:
        """Wait for a message, and return what is said about it."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest

        end = time.monotonic() + 120
        while time.monotonic() < end:
            for message in self._client.PullMessages(
                PullMessagesRequest(node=self._node)
            ).messages_list:
                return message.metadata
            time.sleep(0.2)
        raise AssertionError("nothing came")

    def push(self, message: Any, instead: Any = None) -> str:
        """Send a message, or what other objects hold; return how the SuperLink answers."""
        import httpx
        from flwr.app.message.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
        )

        objects, about = instead or message, message_to_proto(remove_content_from_message(message))
        about.metadata.message_id = objects.object_id
        asked = PushMessagesRequest(
            node=self._node, messages_list=[about], message_object_trees=[get_object_tree(objects)]
        )
        try:
            said = self._client.PushMessages(asked)
        except httpx.HTTPStatusError as error:
            return str(error.response.text)
        for name, one in get_all_nested_objects(objects).items():
            whose = {
                "node": self._node,
                "run_id": about.metadata.run_id,
                "session_id": said.session_id,
            }
            self._client.PushObject(
                PushObjectRequest(**whose, object_id=name, object_content=one.deflate())
            )
        return "taken"


def told(content: bytes, run: int, source: int, target: int, reply_to: str = "") -> Any:
    """Return a message with this sender and reader."""
    from flwr.app.message.message import make_message
    from flwr.app.metadata import Metadata

    from ekiden.silos.envelope import wrap

    about = Metadata(run, "", source, target, reply_to, "", time.time(), 300, "query")
    return make_message(about, wrap(content))


def test_a_silo_speaks_neither_for_the_coordinator_nor_for_another_silo(
    federation: Federation,
) -> None:
    """It even knows the names of others' messages. The run of the others ends as if it were not
    there."""
    with closing(Liar(federation)) as liar:
        lie(federation, liar)
    log = federation.folder / "run.log"
    assert federation.processes["run"].wait(280) == 0, log.read_text()
    assert "a node that says it is 'client-2' cannot take part: I leave" in log.read_text()
    assert list((federation.folder / "runs").rglob("model.safetensors"))


def waiting_for(federation: Federation, silos: set[int]) -> dict[int, str]:
    """Return the name of the message that waits for the one of these silos that stands still."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        with closing(sqlite3.connect(federation.folder / "link.db")) as database:
            sent = database.execute("select dst_node_id, message_id from message_ins").fetchall()
        named = {node % (1 << 64): name for node, name in sent}
        waiting = {node: name for node, name in named.items() if node in silos}
        if len(waiting) == 1:
            return waiting
        time.sleep(0.5)
    raise AssertionError(f"messages wait for {len(waiting)} silos")


def lie(federation: Federation, liar: Liar) -> None:
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.proto import control_pb2

    os.killpg(federation.processes["client-2"].pid, signal.SIGSTOP)  # so that the coordinator waits
    command = [str(BIN / "ekiden"), "run", "fedseq", "--on", "flower", "--link", federation.link]
    command += [
        "--certificate",
        "ca.crt",
        "--keys",
        "keys",
        "--clients",
        ",".join(NAMES),
        "--epochs",
        "1",
    ]
    federation.start("run", command)
    try:
        greeting = liar.received()
        client = coordinator(federation, federation.parts.control_port)
        others = {
            one.node_id for one in client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
        } - {liar.number}
        client.close()
        waiting = waiting_for(federation, others)
        run, leaves, hello = (
            greeting.run_id,
            pack(Answer("client-2", error="I leave")),
            pack(Ask("hello")),
        )
        forged = [
            told(hello, run, SUPERLINK_NODE_ID, victim) for victim in (*others, SUPERLINK_NODE_ID)
        ]
        forged += [told(hello, run, liar.number, victim) for victim in (*others, SUPERLINK_NODE_ID)]
        forged += [
            told(leaves, run, node, SUPERLINK_NODE_ID, name) for node, name in waiting.items()
        ]
        for message in forged:
            assert "a silo sends nothing but its own replies" in liar.push(message)
        own = told(b"", run, liar.number, SUPERLINK_NODE_ID, greeting.message_id)
        assert liar.push(own, own.content) == "taken"
        again = liar.received().message_id  # what it sent held nothing that Flower reads
        own, stolen = (
            told(leaves, run, liar.number, SUPERLINK_NODE_ID, name) for name in (again, "0" * 64)
        )
        assert liar.push(own, stolen) == "taken"
        time.sleep(3)
    finally:
        os.killpg(federation.processes["client-2"].pid, signal.SIGCONT)
