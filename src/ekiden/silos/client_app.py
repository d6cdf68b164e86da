"""Flower's end at a silo: a `ClientApp` that hands byte strings to `Silo`, and the process that
runs it.

A SuperNode starts `flwr-clientapp` for each message. It imports PyTorch, which takes seconds, then
unpacks and imports the app that the coordinator sent. `ekiden silo start` puts a command of that
name first on the path. That command asks the process `serve`, which has imported everything and
holds the data, to fork. The child answers the message with this app, never with code that came with
a run, and ends.
"""

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from ekiden.core.base.errors import UserError, warnings_as_lines
from ekiden.silos.envelope import content, wrap
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, SiloFile, read

NODE_CONFIG = "silo"  # Key in the node's configuration that names its silo.toml

app = ClientApp()
_held: tuple[SiloFile, Mapping[str, Held]] | None = (
    None  # the data sets by their names; "" is the only one
)


def hold(file: SiloFile) -> None:
    """Load a silo's data once for all messages that this process or its children answer."""
    global _held  # noqa: PLW0603
    _report()
    _held = (file, {name: file.holding(name).load() for name in file.named or ("",)})
    for dataset, client in _held[1].values():  # what all requests need
        for part in (client.train, client.val, client.test):
            _ = part.digest
        if dataset.train.x.ndim == 2:
            _ = client.train.variety


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
        file, named=_held[1] if _held is not None and _data_of(_held[0]) == _data_of(file) else None
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
        handler.setFormatter(logging.Formatter("ekiden: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False


def run(arguments: list[str]) -> None:
    """Answer one message with Ekiden's app; ignore the app that came with it."""
    run_clientapp.install_from_fab = lambda *args, **kwargs: None
    run_clientapp.get_load_client_app_fn = lambda *args, **kwargs: lambda *fab: app
    sys.argv = ["flwr-clientapp", *arguments]
    flwr_clientapp()


def serve(address: str, file: Path) -> None:
    """Fork a child for each request until the parent process ends."""
    parent = os.getppid()

    def end_with_parent() -> None:  # however that ends
        while os.getppid() == parent:
            threading.Event().wait(1)
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(
        1
    )  # a pool of threads does not survive a fork; each task sets its own number
    torch.cat(
        [torch.empty(1, device="meta")]
    )  # imports PyTorch's compiler (2 s), as networks without values do
    try:
        hold(read(file))
    except UserError as error:
        print(f"ekiden: {error}", file=sys.stderr, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        while True:
            link, _ = listener.accept()
            if os.fork():
                link.close()
                continue
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                with suppress(UserError):  # the child that answers reports it
                    limit_memory(read(file).limits.memory)
                run(json.loads(link.makefile().readline()))
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


def limit_memory(most: int) -> None:
    """Let this process allocate at most `most` bytes more, on systems that can limit it; further
    allocations fail.
    """
    status = Path("/proc/self/status")
    if status.exists():
        import resource  # Linux alone has both

        kib = next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith("VmData")
        )
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = 1024 * kib + most
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        run(sys.argv[2:])
