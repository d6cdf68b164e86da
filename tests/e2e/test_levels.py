"""One run at each level of silos, over a real SuperLink and SuperNodes."""

from functools import partial
from pathlib import Path

import pytest

from tests.e2e.silos import NAMES, Federation, running

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
RUNS = {
    "sums": ("fedgram", "--width", "40"),
    "models": ("fedseq", "--epochs", "1"),
    "all": ("regmean", "--epochs", "1"),
}
ABOVE = {"sums": "models", "models": "all", "all": ""}


def start(federation: Federation, name: str, level: str) -> None:
    file = federation.folder / f"{name}.toml"
    lines = f'level = "{level}"'
    if level == "all":  # statistics of layers are more numbers than one for ten of these samples
        lines += "\nmin_active = 0"
    text = file.read_text().replace('level = "models"', lines)
    file.write_text(text.replace('"fedseq"]', '"fedseq", "regmean"]'))
    federation.start_silo(name)


@pytest.mark.parametrize("level", RUNS)
def test_a_silo_runs_what_its_level_allows(level: str, tmp_path: Path) -> None:
    with running(tmp_path, partial(start, level=level)) as federation:
        method, *flags = RUNS[level]
        said = federation.run(method, *flags, "--out", "runs", timeout=570)
        folder = tmp_path / "runs" / f"{method}-flower-seed3"
        assert (folder / "model.safetensors").exists(), said
        if above := ABOVE[level]:
            method, *flags = RUNS[above]
            said = federation.run(method, *flags, "--out", "runs", timeout=570)
            said = " ".join(said.split())
            assert f'{method} needs level = "{above}", {NAMES[0]} has "{level}"' in said
            assert f'write level = "{above}" under [limits] in its silo.toml' in said
            assert not (tmp_path / f"runs/{method}-flower-seed3/model.safetensors").exists()
            assert len(list(tmp_path.glob("*-silo/runs/*"))) == len(NAMES)
