"""The base install does the main job; a command that needs an extra names it, in one line and before any work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = (
    "datasets", "flwr_datasets", "ot", "clarabel", "matplotlib", "jinja2", "flwr", "cryptography", "transformers",
    "peft", "timm", "tokenizers", "pandas", "polars", "pydicom", "nibabel", "onnx", "onnxscript", "onnxruntime",
    "mlflow", "tensorboard", "wandb", "trackio",
)  # fmt: skip
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
from ekiden.cli.app import main
for command in sys.argv[1].split(";"):
    sys.argv[1:] = command.split()
    main()
"""


def ekiden(folder: Path, *commands: str) -> tuple[int, str, str]:
    """Run commands where no package of an extra can be imported, until one fails: exit code, output, errors."""
    environment = {key: value for key, value in os.environ.items() if key != "EKIDEN_DATA"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ";".join(commands)],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_the_base_trains_compares_and_resumes(tmp_path: Path) -> None:
    small = "--data digits --clients 3 --model mlp --threads 1"
    code, out, err = ekiden(
        tmp_path,
        f"run fedelmy {small} --models 1 --epochs 1 --warmup 1 --partition iid",
        f"run fedseq {small} --epochs 1",
        f"run fedtasuki {small} --epochs 1",
        f"run fedgram {small}",
        "compare runs/fedseq-digits-seed0 runs/fedgram-digits-seed0",
        "show runs/fedseq-digits-seed0",
        "data digits --clients 3",
    )
    assert code == 0, err
    assert 'not drawn, which needs matplotlib: pip install "ekiden[report]"' in out
    assert len(list(tmp_path.glob("runs/*/model.safetensors"))) == 4


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("run otfusion --data digits --clients 3 --model mlp", "methods"),
        ("run maecho --weighting qp --data digits --clients 3 --model mlp", "methods"),
        ("run fedseq --data cifar10", "hub"),
        ("report runs", "report"),
        ("data digits --draw picture.png", "report"),
    ],
)
def test_what_lacks_an_extra_names_it(command: str, extra: str, tmp_path: Path) -> None:
    code, _, err = ekiden(tmp_path, command)
    assert code == 2
    assert err.count("\n") == 1
    assert f'pip install "ekiden[{extra}]"' in err
    assert not list(tmp_path.glob("runs/*"))
