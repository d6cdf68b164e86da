"""Sweeps from the command line: cells that fail, records that cannot be written."""

import errno
import fcntl
import re
from pathlib import Path

import pytest

from ekiden.core.base.files import disk_error
from ekiden.lab import launch
from ekiden.lab.tables import records
from tests.e2e.sweeps import Call, caller

QUICK = """
seeds = [0]
[settings]
clients = 2
task = "classification"
epochs = 1
[[row]]
label = "none"
method = "fedavg"
data = "no-such-data"
[[row]]
label = "A [/b] x"
method = "fedseq"
[[row]]
label = "B [bold] :smile:"
method = "local"
metric = "global_accuracy"
"""


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Call:
    """The command in this process, its runs too, one after the other; gives exit code and what it
    printed."""
    monkeypatch.chdir(tmp_path)
    execute = launch.execute
    monkeypatch.setattr(
        launch, "execute", lambda jobs, report, *_, **options: execute(jobs, report, 1)
    )

    return caller(monkeypatch, capfd)


def test_failing_cells_and_labels_with_brackets(tmp_path: Path, call: Call) -> None:
    """A run that fails and a metric that does not exist affect only their cells; labels and paths
    are unchanged."""
    Path("table.toml").write_text(QUICK)
    code, out, err = call("sweep", "table.toml", "--out", "runs[/x]")
    assert (code, err) == (
        2,
        "ekiden: 2 of 3 runs failed (listed above): fix the cause and rerun the same command\n",
    )
    assert "sweep folder: runs[/x]" in out
    assert "failed: none--accuracy--seed0: " in out
    assert "B [bold] :smile: / accuracy %, seed 0 does not count: runs[/x]/B-bold-smile" in out
    assert re.search(r"A \[/b\] x .*\d\d\.\d\d", out)
    code, out, _ = call("results", "runs[/x]")
    assert code == 0
    assert (
        "metric 'global_accuracy' was not measured: write one of accuracy, client_mean in the"
        in out
    )
    for command in (("show", "runs[/x]/A-b-x--accuracy--seed0"), ("compare", "runs[/x]")):
        assert call(*command)[0] == 0


def test_two_sweeps_on_one_folder(tmp_path: Path, call: Call) -> None:
    """What another process is doing is left to it and does not count as failed."""
    Path("table.toml").write_text(QUICK)
    call("sweep", "table.toml", "--only", "none/accuracy")
    folder = Path("runs/table/A-b-x--accuracy--seed0")
    folder.mkdir()
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, out, _ = call("sweep", "table.toml", "--only", "A")
    assert (code, f"in progress in another process: {folder.name}" in out) == (0, True)
    assert "failed" not in out
    code, out, _ = call("sweep", "table.toml", "--only", "A")
    assert (code, "another process" in out, "done in" in out) == (0, False, True)


def test_records_that_cannot_be_written(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a sweep runs, they stop no run and lose no reason; before it begins, nothing is
    made."""
    Path("table.toml").write_text(QUICK)
    Path("file").touch()
    code, _, err = call("sweep", "table.toml", "--records", "file/kept.jsonl")
    assert (code, "cannot write file/kept.jsonl" in err) == (2, True)
    assert not Path("runs").exists()

    keep, kept = records.keep, []

    def full(path: Path, content: records.Records) -> None:
        kept.append(len(content.runs))
        if len(kept) > 1:
            raise disk_error(OSError(errno.ENOSPC, ""), path)
        keep(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(records, "keep", full)
        code, out, err = call("sweep", "table.toml", "--records", "kept.jsonl")
    assert (code, "disk full while writing kept.jsonl: free some space, then" in err) == (2, True)
    assert "failed: none--accuracy--seed0: " in out
    assert kept == [0, 0, 1, 2, 2], "after each run, and once more at the end"
    assert call("sweep", "table.toml", "--records", "kept.jsonl")[0] == 2
    assert len(records.read(Path("kept.jsonl")).runs) == 2
