"""Programs that a fork of this process does: their arguments, output, signals, and ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ekiden.silos import forks
from tests.warm import WarmProcess

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Flower runs on POSIX")


def greet() -> None:
    print("hello", *sys.argv[1:])
    sys.exit(3)


def serve() -> None:
    def end(*_: object) -> None:
        # not print, which refuses while the line before is still being written
        os.write(1, b"graceful\n")
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    print("pid", os.getpid())
    time.sleep(100)


def fail() -> None:
    raise LookupError("no such thing")


def use(out: Path) -> None:
    """What the test below asserts, in a process that has no threads."""
    with forks.programs({"greet": greet, "serve": serve, "fail": fail}) as (folder, lines):
        codes = [subprocess.run(["greet", "a", "b c"], check=False).returncode]
        said = [lines.readline()]
        codes.append(subprocess.run(["fail"], check=False).returncode)
        while not said[-1].startswith("LookupError"):
            said.append(lines.readline())
        for number in (signal.SIGTERM, signal.SIGKILL):
            with subprocess.Popen([folder / "serve"]) as process:
                child = int(lines.readline().split()[1])
                process.send_signal(number)
                codes.append(process.wait())
            if number == signal.SIGTERM:
                said.append(lines.readline())
            end = time.monotonic() + 20
            while Path(f"/proc/{child}").exists() and time.monotonic() < end:
                time.sleep(0.1)
            codes.append(int(Path(f"/proc/{child}").exists()))
        process = subprocess.Popen([folder / "serve"])
        child = int(lines.readline().split()[1])
    end = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.1)
    codes += [int(Path(f"/proc/{child}").exists()), process.wait()]
    out.write_text(f"{codes}\n{said[0]}{said[-1]}")


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_fork_does_what_a_program_would(tmp_path: Path) -> None:
    """It gets SIGTERM, and is killed if the program is, or when the block ends."""
    process = WarmProcess(target=use, args=(tmp_path / "out",))
    process.start()
    process.join(100)
    assert process.exitcode == 0, "None: it still runs"
    codes, hello, graceful = (tmp_path / "out").read_text().splitlines()
    assert codes == "[3, 1, 0, 0, -9, 0, 0, 1]"
    assert hello == "hello a b c"
    assert graceful == "graceful"
