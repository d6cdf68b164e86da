"""The base install does the main job; a command that needs an extra names it, in one line and
before any work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXTRAS = (
    "datasets", "flwr_datasets", "ot", "clarabel", "matplotlib", "jinja2", "flwr", "cryptography", "transformers",
    "peft", "timm", "tokenizers", "pandas", "polars", "pydicom", "nibabel", "onnx", "onnxscript", "onnxruntime",
    "mlflow", "tensorboard", "wandb", "trackio", "submitit",
)  # fmt: skip
PROGRAM = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
import contextlib, io, json
from ekiden.cli.app import main
said = []
for command in sys.argv[1:]:
    sys.argv[1:] = command.split()
    code, out, error = 0, io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main()
        except SystemExit as stop:
            code = stop.code
    said.append((code, out.getvalue(), error.getvalue()))
print(json.dumps(said))
"""
ROOT = Path(__file__).parent.parent
SMALL = "--data digits --clients 3 --model mlp --threads 1"
LACKING = {
    f"run otfusion {SMALL} --out no": "methods",
    f"run maecho --weighting qp {SMALL} --out no": "methods",
    "run fedseq --data cifar10 --out no": "hub",
    "report runs --out no": "report",
    "data digits --draw no.png": "report",
    f"sweep {ROOT}/experiments/digits-oneshot.toml --out no --on slurm": "submitit",
}


def ekiden(folder: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Run commands where no package of an extra can be imported: exit code, output, errors of
    each."""
    environment = {key: value for key, value in os.environ.items() if key != "EKIDEN_DATA"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *commands],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: list[tuple[int, str, str]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_the_base_trains_and_compares_and_what_lacks_an_extra_names_it(tmp_path: Path) -> None:
    runs = (
        f"run fedelmy {SMALL} --models 1 --epochs 1 --warmup 1 --partition iid",
        f"run fedseq {SMALL} --epochs 1",
        f"run fedtasuki {SMALL} --epochs 20",
        f"run fedgram {SMALL}",
        "compare runs/fedseq-digits-seed0 runs/fedgram-digits-seed0",
        "show runs/fedseq-digits-seed0",
        "data digits --clients 3",
    )
    said = ekiden(tmp_path, *runs, *LACKING)
    for command, (code, _, error) in zip(runs, said, strict=False):
        assert (code, error) == (0, ""), command
    assert (
        'not drawn, which needs matplotlib: pip install "ekiden[report]"' in said[len(runs) - 1][1]
    )
    assert len(list(tmp_path.glob("runs/*/model.safetensors"))) == 4
    for (command, extra), (code, _, error) in zip(LACKING.items(), said[len(runs) :], strict=True):
        assert code == 2, command
        assert error.count("\n") == 1, command
        assert f'pip install "ekiden[{extra}]"' in error, command
    assert not list(tmp_path.glob("no*"))
