"""The package as a new user gets it: built as a wheel, installed in an empty environment, run."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ekiden import __version__

ROOT = Path(__file__).parents[2]


def done(*command: str | Path, cwd: Path) -> str:
    finished = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=900, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_a_wheel_installs_and_runs_in_a_clean_environment(tmp_path: Path) -> None:
    done(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"ekiden-{__version__}-py3-none-any.whl"
    venv.create(tmp_path / "clean", with_pip=True)
    here = tmp_path / "clean" / "bin"
    done(here / "pip", "install", "--quiet", wheel, cwd=tmp_path)
    assert __version__ in done(here / "ekiden", "--version", cwd=tmp_path)
    run = ("run", "average", "--clients", "2", "--epochs", "1", "--out", tmp_path / "run")
    assert "accuracy" in done(here / "ekiden", *run, cwd=tmp_path)
    assert list(tmp_path.glob("run*/**/model.safetensors"))
