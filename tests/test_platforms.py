"""What needs Unix is loaded only where it is used; everything else imports and runs without these
Python modules."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKED = ("fcntl", "resource", "pwd", "grp", "termios")
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
from ekiden.cli.app import main
main()
"""


@pytest.mark.slow
def test_a_simulation_with_workers_runs_without_the_modules_of_unix(tmp_path: Path) -> None:
    """Two processes of workers, a run folder and its lock."""
    flags = [
        "--clients",
        "3",
        "--epochs",
        "1",
        "--workers",
        "2",
        "--model",
        "mlp",
        "--threads",
        "1",
        "--out",
        ".",
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", "fedseq", *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("fedseq-digits-seed0")
    assert (folder / "model.safetensors").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
def test_every_module_but_those_of_silos_imports_without_them_and_a_simulation_runs(
    tmp_path: Path,
) -> None:
    program = f"""
import importlib, pkgutil, sys
sys.modules.update(dict.fromkeys({BLOCKED!r}))
import ekiden
for module in pkgutil.walk_packages(ekiden.__path__, "ekiden."):
    if not module.name.endswith("__main__") and ".transports.flower" not in module.name:
        importlib.import_module(module.name)
from ekiden.cli.app import main
sys.argv[1:] = "run fedseq --clients 3 --epochs 1 --model mlp --threads 1 --out .".split()
main()
print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["ok"]), done.stderr
    assert (tmp_path / "fedseq-digits-seed0" / "model.safetensors").exists()
