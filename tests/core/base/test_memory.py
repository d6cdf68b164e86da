"""What a step may allocate."""

import subprocess
import sys
from pathlib import Path

import pytest

READS = """
import resource, threading, time
from pathlib import Path
from ekiden.readers import frames

for name in "ab":
    Path(name + ".csv").write_text("v,w\\n" + "1,2\\n" * 200_000)

def read(name, wait):
    time.sleep(wait)
    frames.arrow(Path(name + ".csv"), name)

threads = [threading.Thread(target=read, args=(name, 0.01 * k)) for k, name in enumerate("abab")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resource.getrlimit(resource.RLIMIT_DATA) == (resource.RLIM_INFINITY,) * 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_small_tables_fit_in_a_new_process_and_leave_no_limit(tmp_path: Path) -> None:
    """Arrow takes a gigabyte for its first cell; four threads read at once."""
    done = subprocess.run(
        [sys.executable, "-c", READS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"], "")
