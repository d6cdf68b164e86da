"""Replace `flwr-clientapp` at a silo: run Ekiden's own ClientApp, never code that came with a run.

A SuperNode starts `flwr-clientapp` for each message. It imports PyTorch, which takes seconds, then unpacks and imports
the app that the coordinator sent. `ekiden silo start` puts a command of that name first on the path. That command asks
the process `serve`, which has imported everything and holds the data, to fork. The child answers the message and ends.
"""

import json
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch
from flwr.clientapp import ClientApp
from flwr.supernode.cli import flwr_clientapp
from flwr.supernode.runtime import run_clientapp

from ekiden.base.errors import UserError
from ekiden.transports.flower import client_app
from ekiden.transports.flower.silo import silo_file


def run(arguments: list[str]) -> None:
    """Answer one message with Ekiden's app; ignore the app that came with it."""
    run_clientapp.install_from_fab = lambda *args, **kwargs: None
    run_clientapp.get_load_client_app_fn = lambda *args, **kwargs: _own
    sys.argv = ["flwr-clientapp", *arguments]
    flwr_clientapp()


def serve(address: str, file: Path) -> None:
    """Fork a child for each request until the parent process ends."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(1)  # a pool of threads does not survive a fork; each task sets its own number
    try:
        client_app.hold(silo_file.read(file))
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
                    limit_memory(silo_file.read(file).limits.memory)
                run(json.loads(link.makefile().readline()))
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)


def limit_memory(most: int) -> None:
    """Let this process allocate at most `most` bytes more, on systems that can limit it; further allocations fail."""
    status = Path("/proc/self/status")
    if status.exists():
        import resource  # noqa: PLC0415  (Linux alone has both)

        kib = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmData"))
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = 1024 * kib + most
        resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))


def _end_with(parent: int) -> None:
    """End when the parent ends, however that happens."""
    while os.getppid() == parent:
        threading.Event().wait(1)
    os._exit(0)


def _own(fab_id: str, fab_version: str, fab_hash: str) -> ClientApp:
    return client_app.app


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], Path(sys.argv[3]))
    else:
        run(sys.argv[2:])
