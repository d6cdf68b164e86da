"""A ServerApp of an attacker who has the SuperLink's port and a run's terms, and wants its
hand-offs."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from ekiden.core.engine import wire
from ekiden.core.engine.wire import SERVER, WireError
from ekiden.silos.server_app import GridNodes
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import sealing
from ekiden.silos.trust.parcel import Answer, Ask, Hello, pack, unpack
from ekiden.silos.trust.sealing import Party, Reader

app = ServerApp()
claims = ServerApp()
stolen = ClientApp()


@stolen.query()  # type: ignore[untyped-decorator]
def take(message: Message, context: Context) -> Message:
    """Answer instead of a silo."""
    raise RuntimeError("code that came with a run was executed at a silo")


@app.main()  # type: ignore[untyped-decorator]
def steal(grid: Grid, context: Context) -> None:
    """Ask each node for each hop under other terms, and write down what could be opened and the
    answers."""
    nodes, config = GridNodes(grid), context.run_config
    terms = replace(agreements.parse(str(config["plan"])), skips=True)
    private = sealing.new_private()
    party = Party(SERVER, terms.run, terms.digest, private, terms.silos, None)
    reader = Reader(SERVER, 0, sealing.public_of(private))
    waiting: dict[str, str] = {}
    for node in nodes.ids():
        for key in (f"{i}-0-train" for i in range(len(terms.clients))):
            ask = Ask("value", terms.text(), key=key, readers=(reader,))
            waiting[str(nodes.send(node, pack(ask)))] = key
    said: list[str] = []
    opened: list[str] = []
    for key, answer, body in _answers(nodes, waiting):
        said.append(answer.error)
        for lock in answer.locks:
            try:
                party.open(body, lock, answer.silo, key, 0)
            except WireError:
                continue
            opened.append(f"{key} of {answer.silo}")
    Path(str(config["folder"])).write_text(
        json.dumps({"said": said, "opened": opened}), encoding="utf-8"
    )


@claims.main()  # type: ignore[untyped-decorator]
def ask_all(grid: Grid, context: Context) -> None:
    """Greet each node under each of some terms, and write down the answers."""
    nodes, config = GridNodes(grid), context.run_config
    terms: dict[str, str] = json.loads(str(config["plan"]))
    waiting = {
        str(nodes.send(node, pack(Ask("hello", text, nonce="x")))): what
        for what, text in terms.items()
        for node in nodes.ids()
    }
    said = [
        (what, answer.silo, answer.error, tells(wire.decode(body, Hello)))
        for what, answer, body in _answers(nodes, waiting)
    ]
    Path(str(config["folder"])).write_text(json.dumps(said), encoding="utf-8")


def tells(hello: Hello) -> bool:
    """Return whether a greeting tells more than who gives it."""
    return hello != Hello(hello.version, signature=hello.signature)


def _answers(nodes: GridNodes, waiting: dict[str, str]) -> Iterator[tuple[str, Answer, memoryview]]:
    """Return the answer to each ticket, with what the ticket was for."""
    while waiting:
        time.sleep(1)
        for ticket, data in nodes.receive(list(waiting)).items():
            assert isinstance(data, bytes)
            yield waiting.pop(ticket), *unpack(data, Answer)
