"""Silos whose files show the same and are stored in different ways."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ekiden import Training
from ekiden.core.base.errors import UserError
from ekiden.data import join
from ekiden.methods import FedAvg
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo.silo_file import SiloFile, read
from tests.readers.pictures import dicom, encoded
from tests.silos.fakes import FakeNodes

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")


def silos(folder: Path, more: str = "") -> list[SiloFile]:
    """A silo of grey images without extension (DICOM), and one of colour photos that are stored
    turned."""
    draw = np.random.default_rng(0)
    for name in ("scans", "photos"):
        for label in ("left", "right"):
            (folder / name / label).mkdir(parents=True, exist_ok=True)
            for k in range(30):
                shown = draw.integers(0, 100, (8, 8), dtype=np.uint8)
                shown[:, slice(4) if label == "left" else slice(4, 8)] += 150
                if name == "scans":
                    dicom(folder / name / label / f"IM{k}", shown, "MONOCHROME2")
                else:
                    colour = Image.fromarray(np.stack([shown, shown, shown // 2], axis=2))
                    (folder / name / label / f"{k}.png").write_bytes(
                        encoded(colour, "PNG", k % 8 + 1)
                    )
        text = f'name = "{name}"\n[data]\npath = "{name}"\n{more}[hardware]\nthreads = 1\n'
        text += '[limits]\nlevel = "models"\nexact_evaluation = true\n'
        (folder / f"{name}.toml").write_text(text)
    return [read(folder / f"{name}.toml") for name in ("scans", "photos")]


@pytest.mark.slow
def test_grey_and_colour_silos_agree_on_their_channels(tmp_path: Path) -> None:
    pytest.importorskip("pydicom")
    training = Training(lr=2e-3, batch_size=8)
    plan: RemotePlan[Any] = RemotePlan(
        Recipe(FedAvg(rounds=3, epochs=3), training=training, evaluate_every=0),
        "scans,photos",
        evaluate_dp="exact",
    )
    nodes = FakeNodes(silos(tmp_path))
    with pytest.raises(
        UserError,
        match=r'different shape: .*colour = "rgb" or "grey", in \[data\] of all silos',
    ):
        session.run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)
    for colour, channels in (("rgb", 3), ("grey", 1)):
        files = silos(tmp_path, f'colour = "{colour}"\n')
        assert files[0].load()[0].shape == (channels, 8, 8)
    nodes = FakeNodes(files)
    result = session.run(plan, nodes, tmp_path / "grey", nodes.public, lambda line: None, poll=0)
    assert result.metrics[-1]["accuracy"] > 0.9
    together = join([str(tmp_path / "scans"), str(tmp_path / "photos")], colour="grey")
    assert together.shape == (1, 8, 8)
