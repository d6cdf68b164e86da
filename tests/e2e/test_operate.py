"""What operators do, over real SuperNodes: approve a plan, read metrics, revoke a silo, and let it
in again."""

import json
import shutil
import time
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.silos import BIN, Federation, free_ports, wait_for
from tests.e2e.test_page_commands import end

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
RUN = ("run", "fedseq", "--on", "flower", "--federation", "fed", "--epochs", "1", "--model", "mlp")


def read(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=20) as answer:
        return str(answer.read().decode())


def number(port: int, name: str) -> float:
    return next(
        float(line.rsplit(" ", 1)[1])
        for line in read(port, "metrics").splitlines()
        if line.startswith(name)
    )


def states(shell: Federation) -> dict[str, str]:
    text = shell.ekiden("federation", "status", "fed", "--json")
    return {
        silo["name"]: silo["state"]
        for silo in json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["silos"]
    }


def until(shell: Federation, **wanted: str) -> None:
    end = time.monotonic() + 180
    while states(shell) != wanted:
        assert time.monotonic() < end, (states(shell), (shell.folder / "link.log").read_text())
        time.sleep(2)


def test_a_revoked_silo_is_cut_off(tmp_path: Path) -> None:
    """Also approval and metrics: a federation of two silos that made their keys, from the first
    command on."""
    shell = Federation(tmp_path)
    port, control, of_link, of_a = free_ports(4)
    try:
        for name in ("a", "b"):
            shell.ekiden(
                *("silo", "init", name, "--link", f"localhost:{port}"),
                *("--data", "digits", "--level", "models"),
            )
            file = tmp_path / name / "silo.toml"
            metrics = f"\n[metrics]\nport = {of_a}\n" if name == "a" else ""
            file.write_text(f"{file.read_text()}{metrics}")
        made = shell.ekiden(
            *("federation", "init", "fed", "a/a.key.pub", "b/b.key.pub"),
            *("--port", str(port), "--control-port", str(control)),
        )
        assert made.count("SHA256:") == 2
        for name in ("a", "b"):
            shell.ekiden("silo", "join", f"{name}/silo.toml", "fed/roster.json")
        link = ["federation", "start", "fed", "--metrics-port", str(of_link)]
        shell.start("link", [str(BIN / "ekiden"), *link])
        wait_for(tmp_path / "link.log", "silos reach the SuperLink at", 120)
        for name in ("a", "b"):
            shell.start(name, [str(BIN / "ekiden"), "silo", "start", f"{name}/silo.toml"])
        until(shell, a="connected", b="connected")
        assert number(of_link, 'ekiden_link_silos{state="connected"}') == 2.0

        refused = " ".join(shell.ekiden(*RUN).split())
        assert (
            "has approved this plan: who runs it reads the plan by `ekiden silo approve silo.toml`"
            in refused
        )
        assert number(of_a, "ekiden_silo_plans_waiting") == 1.0
        for name in ("a", "b"):
            plan = shell.ekiden("silo", "approve", f"{name}/silo.toml").split("plan ")[1].split()[0]
            assert "approved: one run of" in shell.ekiden(
                "silo", "approve", f"{name}/silo.toml", plan
            )
        said = shell.ekiden(*RUN)
        (folder,) = (tmp_path / "runs").glob("*/model.safetensors")
        assert "each signed by its silo" in " ".join(
            shell.ekiden("verify", str(folder.parent)).split()
        ), said
        assert read(of_a, "health").startswith("connected since 2")
        assert read(of_link, "health").startswith("the SuperLink's certificate ends in 36")
        assert number(of_a, "ekiden_silo_runs") == 1.0
        assert "approved this plan" in " ".join(shell.ekiden(*RUN).split()), (
            "the approvals are used"
        )

        shell.ekiden("federation", "revoke", "fed", "b")
        assert states(shell) == {"a": "connected"}
        end_of_wait = time.monotonic() + 120
        while "does not know the silo's key" not in (
            said := " ".join(shell.ekiden("silo", "status", "b/silo.toml").split())
        ):
            assert time.monotonic() < end_of_wait, said
            time.sleep(1)
        gone = shell.ekiden(*RUN, "--clients", "a,b")
        assert "there is no public key" in " ".join(gone.split())

        shutil.copy(tmp_path / "b" / "b.key.pub", tmp_path / "b.key.pub")
        shell.ekiden("federation", "add", "fed", "b.key.pub")
        until(shell, a="connected", b="connected")
    finally:
        end(shell)
