"""Flower's end at a silo: a `ClientApp` that hands byte strings to `Silo`."""

from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ekiden.errors import UserError
from ekiden.transports.flower.envelope import content, wrap
from ekiden.transports.flower.silo import Silo
from ekiden.transports.flower.silo_file import read

NODE_CONFIG = "silo"
"""Key of the node's configuration that names its silo.toml."""

app = ClientApp()


@app.query()  # type: ignore[untyped-decorator]
def answer(message: Message, context: Context) -> Message:
    """Answer one request."""
    path = context.node_config.get(NODE_CONFIG)
    if not path:
        raise UserError(f"this node has no silo.toml: start it with --node-config '{NODE_CONFIG}=\"/path/silo.toml\"'")
    silo = Silo(read(Path(str(path))))
    records: RecordDict = wrap(silo.answer(content(message)))
    return Message(records, reply_to=message)
