"""Flower's end at a silo: a `ClientApp` that hands byte strings to `Silo`."""

import logging
import os
import sys
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from ekiden.base.errors import UserError, warnings_as_lines
from ekiden.transports.flower.envelope import content, wrap
from ekiden.transports.flower.silo.silo import Silo
from ekiden.transports.flower.silo.silo_file import Held, SiloFile, read

NODE_CONFIG = "silo"
"""Key in the node's configuration that names its silo.toml."""

app = ClientApp()
_held: tuple[SiloFile, Held] | None = None


def hold(file: SiloFile) -> None:
    """Load a silo's data once for all messages that this process or its children answer."""
    global _held  # noqa: PLW0603
    _report()
    _held = (file, file.load())


@app.query()  # type: ignore[untyped-decorator]
def answer(message: Message, context: Context) -> Message:
    """Answer one request."""
    path = context.node_config.get(NODE_CONFIG)
    if not path:
        raise UserError(f"this node has no silo.toml: start it with --node-config '{NODE_CONFIG}=\"/path/silo.toml\"'")
    _report()
    os.umask(0o077)
    file = read(Path(str(path)))
    same = _held is not None and (_held[0].path, _held[0].name, _held[0].data) == (file.path, file.name, file.data)
    silo = Silo(file, _held[1] if _held is not None and same else None)
    records: RecordDict = wrap(silo.answer(content(message)))
    return Message(records, reply_to=message)


def _report() -> None:
    """Show the person who runs the silo what it does, and what is odd about the data."""
    warnings_as_lines()
    log = logging.getLogger("ekiden")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("ekiden: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
