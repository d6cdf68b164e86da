"""Runs of a sweep as jobs of a real Slurm of one node, which the test starts and ends.

    apt install slurmctld slurmd slurm-client munge    # Debian; as root, without cgroups and accounting

Without these programs the test is skipped. It needs no service that runs already.
"""

import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from ekiden.cli.app import call
from ekiden.core.engine.folder import read_lines
from tests.lab.across.test_queue import LONG, same_bits

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
CONFIG = """ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={place}/munge.socket
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE
"""


def until(true: Callable[[], bool], seconds: float, what: str) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, what
        time.sleep(0.1)


def told(*words: str) -> str:
    return subprocess.run(words, check=False, capture_output=True, text=True).stdout


def queued(what: str = "%i") -> list[str]:
    return told("squeue", "-h", "-r", "-o", what).split()


@pytest.fixture
def slurm(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A controller and a node of Slurm."""
    pytest.importorskip("submitit")
    if missing := [name for name in NEEDED if shutil.which(name) is None]:
        pytest.skip(f"no {', '.join(missing)}")
    place = tmp_path_factory.mktemp("slurm")
    for folder in ("state", "spool"):
        (place / folder).mkdir()
    key = place / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    ports = []
    with ExitStack() as open_ports:
        for _ in range(2):
            free = open_ports.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    config = CONFIG.format(
        host=socket.gethostname().split(".")[0], user=getpass.getuser(), place=place, ports=ports
    )
    (place / "slurm.conf").write_text(config)
    monkeypatch.setenv("SLURM_CONF", str(place / "slurm.conf"))
    kept = {
        "socket": "munge.socket",
        "key-file": "munge.key",
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
    }
    munge = [
        "munged",
        "--foreground",
        "--force",
        *(f"--{name}={place / file}" for name, file in kept.items()),
    ]
    with ExitStack() as running:
        for words in (munge, ["slurmctld", "-D"], ["slurmd", "-D"]):
            log = running.enter_context((place / f"{words[0]}.log").open("w"))
            daemon = running.enter_context(subprocess.Popen(words, stdout=log, stderr=log))
            running.callback(daemon.terminate)
            if words is munge:
                until((place / "munge.socket").exists, 20, "munged does not start")
        until(
            lambda: told("sinfo", "-h", "-t", "idle", "-o", "%D") == "1\n",
            60,
            f"no node: see {place}",
        )
        yield
        subprocess.run(["scancel", "--me"], check=False)
        until(lambda: not queued(), 60, "jobs of the test go on")


@pytest.mark.slow
def test_a_job_that_slurm_requeues_goes_on(
    slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text(LONG)
    call(["sweep", "table.toml", "--out", "here"])
    words = [
        sys.executable,
        "-m",
        "ekiden",
        "sweep",
        "table.toml",
        "--out",
        "there",
        "--on",
        "slurm",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as swept:
        file = "there/*--seed0/metrics.jsonl"
        until(
            lambda: any(len(read_lines(f)) >= 3 for f in tmp_path.glob(file)),
            240,
            "the run does not begin",
        )
        (job,) = queued()
        subprocess.run(["scontrol", "requeue", job], check=True)  # Slurm ends the run at once
        until(lambda: queued("%T") == ["PENDING"], 90, "the job is not requeued")
        subprocess.run(
            ["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True
        )  # not in two minutes
        said, _ = swept.communicate(timeout=400)
    assert swept.returncode == 0, said
    (run,) = tmp_path.glob("there/*--seed0")
    same_bits(run, tmp_path)
