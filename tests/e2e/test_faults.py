"""Faults between machines, on a real SuperLink and real silos: every run ends bit-equal to the
undisturbed one."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ekiden.core.engine.folder import read_lines
from ekiden.methods import FedSeq
from tests.e2e.silos import (
    BIN,
    NAMES,
    Cable,
    Federation,
    assert_same_files,
    expected,
    running,
    wait_for,
)

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
AWAY = float(os.environ.get("EKIDEN_TEST_AWAY", "75"))  # seconds; 600 for the full ten minutes


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    with running(tmp_path_factory.mktemp("flower")) as federation:
        yield federation


def start_run(federation: Federation, out: str, *flags: str) -> Path:
    """Start FedSeq in the background and return its run folder."""
    command = [
        str(BIN / "ekiden"),
        "run",
        "fedseq",
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
        "--lr",
        "0.01",
        "--batch-size",
        "64",
    ]
    federation.start("run", [*command, "--seed", "3", "--order", "reversed", "--out", out, *flags])
    return federation.folder / out / "fedseq-flower-seed3"


def log(federation: Federation, name: str) -> Path:
    """Empty the log of a silo and return it."""
    path = federation.folder / f"{name}.log"
    path.write_bytes(b"")
    return path


def test_killed_silo_coordinator_and_link(federation: Federation, tmp_path: Path) -> None:
    """SIGKILL of a silo during training, then of the SuperLink with the coordinator."""
    expected(FedSeq(epochs=400, order="reversed"), tmp_path / "here")
    second, third = log(federation, "client-1"), log(federation, "client-2")
    out = start_run(federation, "killed", "--epochs", "400")
    wait_for(third, "epoch 20/400")
    federation.kill("client-2")
    federation.start_silo("client-2")
    wait_for(out / "times.jsonl", '"step":1')
    wait_for(second, "epoch 20/400")
    federation.kill("link")
    federation.kill("run")
    federation.start_link()
    time.sleep(60)  # until the silos are connected again
    said = federation.ekiden("resume", str(out), timeout=500)
    assert_same_files(out, tmp_path / "here", said)
    assert "verified: 3 tasks" in federation.ekiden("verify", str(out))


def test_a_silo_that_is_away_is_waited_for(federation: Federation, tmp_path: Path) -> None:
    expected(FedSeq(epochs=200, order="reversed"), tmp_path / "here")
    third = log(federation, "client-2")
    out = start_run(federation, "away", "--epochs", "200", "--absent", "wait", "--patience", "5")
    wait_for(third, "epoch 20/200")
    federation.kill("client-1")
    time.sleep(AWAY)
    assert not (out / "model.safetensors").exists()
    federation.start_silo("client-1")
    federation.processes.pop("run").wait(400)
    assert_same_files(out, tmp_path / "here", (federation.folder / "run.log").read_text())
    assert [row["client"] for row in read_lines(out / "network.jsonl") if row["waited"] > 10] == [
        "client-1"
    ]


def test_a_silo_that_stays_away_is_skipped(federation: Federation, tmp_path: Path) -> None:
    expected(
        FedSeq(epochs=200, order="reversed"),
        tmp_path / "here",
        absent=lambda step, client: client == "client-1",
    )
    third = log(federation, "client-2")
    out = start_run(
        federation, "skipped", "--epochs", "200", "--absent", "skip", "--patience", "15"
    )
    wait_for(third, "epoch 20/200")
    federation.kill("client-1")
    federation.processes.pop("run").wait(400)
    federation.start_silo("client-1")
    assert_same_files(out, tmp_path / "here", (federation.folder / "run.log").read_text())
    said = federation.ekiden("verify", str(out)) + federation.ekiden("show", str(out))
    assert "verified: 2 tasks" in said
    assert "step 2: client-1 was absent" in said


@pytest.mark.filterwarnings(
    "ignore:training diverged"
)  # a large network after one epoch: what counts is the bits
def test_a_network_that_is_cut_in_mid_message(federation: Federation, tmp_path: Path) -> None:
    """45 MB to a silo and from it; the cable breaks in the middle of each transfer for some
    seconds."""
    here = tmp_path / "here"
    expected(FedSeq(epochs=1, order="reversed"), here, model="resnet18")
    federation.kill("client-1")
    with Cable(federation.ports[0]) as cable:
        file = federation.folder / "client-1.toml"
        straight = file.read_text()
        file.write_text(straight.replace(federation.address, f"127.0.0.1:{cable.port}"))
        federation.start_silo("client-1")
        cable.cut_after(down=20_000_000, up=20_000_000)
        flags = ("--epochs", "1", "--order", "reversed", "--model", "resnet18", "--out", "cut")
        said = federation.run("fedseq", *flags, timeout=900)
        federation.kill("client-1")
        file.write_text(straight)
        federation.start_silo("client-1")
        assert cable.cuts == ["down", "up"]
    assert_same_files(federation.folder / "cut" / "fedseq-flower-seed3", here, said)
