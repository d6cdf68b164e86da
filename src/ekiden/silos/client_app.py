"""Flower's end at a silo: a `ClientApp` that hands byte strings to `Silo`, and what runs it.

A SuperNode starts `flwr-clientapp` for each message, which unpacks and imports the app that the coordinator sent.
`ekiden silo start` puts a program of that name first on the path; see `forks`. It answers the message with this app,
never with code that came with a run.
"""

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.cli import flower_superexec
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from ekiden.core.base.errors import UserError, warnings_as_lines
from ekiden.core.base.memory import limited
from ekiden.silos.envelope import content, wrap
from ekiden.silos.forks import Jobs
from ekiden.silos.logs import OURS
from ekiden.silos.silo import node
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, SiloFile, read

# Key in the node's configuration that names its silo.toml
NODE_CONFIG = "silo"

app = ClientApp()
# the data sets by their names; "" is the only one
_held: tuple[SiloFile, Mapping[str, Held]] | None = None


def hold(file: SiloFile) -> Mapping[str, Held]:
    """Load a silo's data once for all messages that this process or its children answer, and return them by name."""
    global _held  # noqa: PLW0603
    torch.set_num_threads(
        1
    )  # a pool of threads does not survive a fork; each task sets its own number
    _report()
    _held = (file, {name: file.holding(name).load() for name in file.named or ("",)})
    # what all requests need
    for dataset, client in _held[1].values():
        for part in (client.train, client.val, client.test):
            _ = part.digest
        if dataset.train.x.ndim == 2:
            _ = client.train.variety
    torch.cat(
        [torch.empty(1, device="meta")]
    )  # imports PyTorch's compiler (2 s), as networks without values do
    return _held[1]


@app.query()  # type: ignore[untyped-decorator]
def answer(message: Message, context: Context) -> Message:
    """Answer one request."""
    path = context.node_config.get(NODE_CONFIG)
    if not path:
        raise UserError(
            "this node has no silo.toml: start it with --node-config "
            f"'{NODE_CONFIG}=\"/path/silo.toml\"'"
        )
    _report()
    os.umask(0o077)
    file = read(Path(str(path)))
    silo = Silo(
        file, _held[1] if _held is not None and _data_of(_held[0]) == _data_of(file) else None
    )
    records: RecordDict = wrap(silo.answer(content(message)))
    return Message(records, reply_to=message)


def _data_of(file: SiloFile) -> tuple[object, ...]:
    return file.path, file.name, file.data, file.named


def _report() -> None:
    """Show the person who runs the silo what it does, and what is odd about the data."""
    warnings_as_lines()
    log = logging.getLogger("ekiden")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"%(levelname)s {OURS}%(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def run() -> None:
    """Answer one message with Ekiden's app; ignore the app that came with it."""
    run_clientapp.install_from_fab = lambda *args, **kwargs: None
    run_clientapp.get_load_client_app_fn = lambda *args, **kwargs: lambda *fab: app
    flwr_clientapp()


def jobs(file: SiloFile) -> Jobs:
    """Return what a silo does in place of programs that Flower starts."""

    def answer_one() -> None:
        most = file.limits.memory
        # the answer reports it
        with suppress(UserError):
            most = read(file.path).limits.memory
        with limited(most):
            run()

    return {
        "flower-supernode": partial(node.run, file.folder),
        "flower-superexec": flower_superexec,
        "flwr-clientapp": answer_one,
    }
