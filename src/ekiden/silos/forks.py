"""Processes that share memory: one has loaded everything, and forks a child for each program that Flower starts.

Flower starts a Python program for each message and each run, and others that stay. Each would load PyTorch or Flower
once more, which takes seconds and 70 to 250 MB. Here small programs of the same names, first on the path, ask for a
fork.
"""

import gc
import json
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn, TextIO

Jobs = Mapping[str, Callable[[], None]]
"""what each program does; its arguments are in `sys.argv`"""
_SHIM = """import json, signal, socket, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
link = socket.socket(socket.AF_UNIX)
link.connect({address!r})
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, lambda *_: link.send(b"t"))
link.sendall(json.dumps([{name!r}, *sys.argv[1:]]).encode() + b"\\n")
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
code = link.recv(1)
sys.exit(code[0] if code else 1)
"""
"""A program that starts at once and lets a fork do its work. If it is killed, so is the fork. A
SIGTERM that comes before the request was sent waits until then."""


@contextmanager
def programs(jobs: Jobs) -> Iterator[tuple[Path, TextIO]]:
    """Give a folder, first on the path, with a program for each job, and what these print, until the block ends.

    This process forks here, so it must not have started a thread before.
    """
    with TemporaryDirectory(prefix="ekiden-") as scratch, socket.socket(socket.AF_UNIX) as listener:
        folder = Path(scratch)
        address = str(folder / "socket")
        for name in jobs:
            _write_program(folder / name, _SHIM.format(address=address, name=name))
        os.environ["PATH"] = (
            f"{folder}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        )
        listener.bind(address)
        listener.listen()
        printed, out = os.pipe()
        gc.collect()
        # a collection would write to, and so copy, memory that all share
        gc.freeze()
        parent = os.getpid()
        keeper = os.fork()
        if not keeper:
            os.close(printed)
            _serve(listener, jobs, parent, out)
        os.close(out)
        try:
            with open(printed, encoding="utf-8", errors="replace") as lines:
                yield folder, lines
        finally:
            # its children end with it
            os.kill(keeper, signal.SIGKILL)
            os.waitpid(keeper, 0)


def _write_program(program: Path, text: str) -> None:
    script = program.with_suffix(".py")
    script.write_text(text, encoding="utf-8")
    command = shlex.join([sys.executable, "-IS", str(script)])
    program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    program.chmod(0o755)


def _serve(listener: socket.socket, jobs: Jobs, parent: int, out: int) -> NoReturn:
    """Fork a child for each request until the parent process ends."""
    os.dup2(out, 1)
    os.dup2(out, 2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # Ctrl-C reaches all; the parent decides what ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    keeper = os.getpid()
    while os.getppid() == parent:
        if not select.select([listener], [], [], 1.0)[0]:
            continue
        link, _ = listener.accept()
        if not os.fork():
            listener.close()
            _do(link, jobs, keeper)
        link.close()
    os._exit(0)


def _do(link: socket.socket, jobs: Jobs, keeper: int) -> NoReturn:
    """Do a job, tell its exit code, and end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        sys.argv = json.loads(link.makefile("rb", buffering=0).readline())
        threading.Thread(target=_end_with, args=(link, keeper), daemon=True).start()
        jobs[sys.argv[0]]()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with suppress(OSError):
            link.send(bytes([code % 256]))
        # with the main thread: others of Flower would go on for ever
        os._exit(code)


def _end_with(link: socket.socket, keeper: int) -> None:
    """Pass on SIGTERM; kill this process as soon as the program that asked for it, or the keeper, is gone."""
    while os.getppid() == keeper:
        if not select.select([link], [], [], 1.0)[0]:
            continue
        if not link.recv(1):
            break
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGKILL)
