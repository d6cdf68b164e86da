"""Each kind of data once through its whole life on a real SuperLink and real SuperNodes, each
command once."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ekiden.core.engine.folder import read_lines
from tests.e2e.silos import BIN, NAMES, Federation, assert_same_files, running, wait_for
from tests.lifecycle import test_lifecycle as life
from tests.lifecycle.kinds import KINDS
from tests.lifecycle.silos import TRAINING, ekiden, silos

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [
    pytest.mark.flower,
    pytest.mark.slow,
    pytest.mark.xdist_group("flower"),
    life.pytestmark,
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("flower")) as federation:
        yield federation


def children(process: int) -> dict[int, bytes]:
    """The processes that a process started, and their command lines."""
    found = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in found}


def kill_coordinator(federation: Federation) -> None:
    """SIGKILL to the ServerApp, which leads the run."""
    for superexec in children(federation.processes["link"].pid):
        for child, command in children(superexec).items():
            if b"serverapp" in command:
                os.kill(child, signal.SIGKILL)
                return
    raise AssertionError("no ServerApp runs")


@pytest.mark.parametrize("name", KINDS)
def test_a_life_over_real_silos(name: str, federation: Federation, tmp_path: Path) -> None:
    """Trained, its coordinator killed, resumed with the bits of silos in one process, verified, and
    used."""
    method, root = KINDS[name].method, federation.folder
    for silo in NAMES:  # kinds share columns, of which there is one version
        told = root / f"{silo}-silo" / "told.jsonl"
        if told.exists():
            told.write_text("")
    place = life.Place(name, tmp_path, silos(KINDS[name], root, partial(reach, federation)))
    place.silos.run(life.FAR[method], tmp_path / "here")

    out = root / name
    command = [
        str(BIN / "ekiden"),
        "run",
        method,
        "--on",
        "flower",
        "--link",
        federation.link,
        "--certificate",
    ]
    command += [
        "ca.crt",
        "--keys",
        "keys",
        "--clients",
        ",".join(NAMES),
        "--model",
        place.kind.network(root),
    ]
    command += [
        "--lr",
        str(TRAINING.lr),
        "--batch-size",
        str(TRAINING.batch_size),
        "--out",
        str(out),
    ]
    federation.start(
        "run",
        [*command, *(["--width", str(life.WIDTH)] if method == "fedgram" else life.FLAGS[method])],
    )
    run = out / f"{method}-flower-seed0"
    wait_for(run / "times.jsonl", '"step":1', 60)
    kill_coordinator(federation)
    code, said = federation.processes.pop("run").wait(120), (root / "run.log").read_text()
    assert code == 2, said
    assert "Traceback" not in said
    assert not (run / "model.safetensors").exists()
    said = federation.ekiden("resume", str(run), timeout=400)
    assert_same_files(run, tmp_path / "here", said)
    began = [row for row in read_lines(run / "attempts.jsonl") if "started" in row]
    assert len(began) == 2
    assert "verified: " in ekiden("verify", run, "--keys", root / "keys")

    place.put(f"{method} far", run)
    life.test_far_it_is_trained_and_verified(place, method)
    life.test_far_the_silos_measured_it(place, method)
    life.test_it_is_shown(place, method, "far")
    life.test_it_is_reported(place, method, "far", tmp_path)
    life.test_it_predicts_as_its_export_does(place, method, "far", "onnx", tmp_path)


def reach(federation: Federation, name: str) -> str:
    """How any silo reaches the SuperLink."""
    return f'address = "{federation.address}"\ncertificate = "ca.crt"\n'
