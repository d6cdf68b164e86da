"""A federation as its operators run it: from the first command to a regression that all silos signed, with what goes
wrong on the way. Every command is counted, and nothing but [data] is edited."""

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tests.e2e.silos import BIN, Federation, free_ports, wait_for
from tests.e2e.test_operate import read
from tests.e2e.test_page_commands import end

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
SILOS = ("a", "b", "c")
MOST_OF_COORDINATOR, MOST_OF_SILO = 14, 5


class Shell(Federation):
    """Counts the commands of each operator, and how long each took."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.typed: dict[str, list[str]] = {name: [] for name in ("coordinator", *SILOS)}

    def type(self, who: str, *words: str, timeout: float = 400) -> str:
        self.typed[who].append(" ".join(words))
        began = time.monotonic()
        said = " ".join(self.ekiden(*words, timeout=timeout).split())
        print(f"{time.monotonic() - began:6.1f} s  {who}: ekiden {' '.join(words[:3])}")
        return said

    def serve(self, who: str, name: str, *words: str) -> None:
        self.typed[who].append(" ".join(words))
        self.start(name, [str(BIN / "ekiden"), *words])


def patients(file: Path, seed: int) -> None:
    """Rows of a hospital: ages and lactate with gaps, sex with gaps, and who died."""
    draw = np.random.default_rng(seed)
    age, lactate = draw.integers(20, 95, 300).astype(float), draw.gamma(2.0, 1.5, 300)
    died = draw.random(300) < 1 / (1 + np.exp(4 - 0.03 * age - 0.4 * lactate))
    lactate[draw.random(300) < 0.15] = np.nan
    sex = pd.Series(draw.choice(["f", "m"], 300)).where(draw.random(300) > 0.1)
    table = pd.DataFrame({"age": age, "lactate": lactate.round(2), "sex": sex})
    table["died"] = np.where(died, "yes", "no")
    table.to_csv(file, index=False)


def edit_data(folder: Path, line: str) -> None:
    file = folder / "silo.toml"
    file.write_text(file.read_text().replace("\n[link]", f"\n{line}\n[link]", 1))


def until(what: object, seconds: float = 150) -> None:
    """Wait until a call gives something true."""
    moment = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < moment
        time.sleep(1)


def test_operators_are_told_what_is_wrong_and_what_to_do(
    tmp_path: Path,
) -> None:
    shell = Shell(tmp_path)
    port, control, of_link = free_ports(3)
    try:
        for k, name in enumerate(SILOS):
            shell.type(
                name,
                "silo",
                "init",
                name,
                "--link",
                f"localhost:{port}",
                "--data",
                "rows.csv",
                "--level",
                "models",
            )
            patients(tmp_path / name / "rows.csv", k)
            edit_data(tmp_path / name, 'label_column = "died"')
        public = [f"{name}/{name}.key.pub" for name in SILOS]
        ports = ("--port", str(port), "--control-port", str(control))
        shell.type("coordinator", "federation", "init", "fed", *public, *ports)
        for name in SILOS:
            shell.type(name, "silo", "join", f"{name}/silo.toml", "fed/roster.json")
            shell.type(name, "silo", "sums", f"{name}/silo.toml")
        draft = ("data", "a/rows.csv", "--label-column", "died", "--draft-schema", "study.toml")
        shell.type("coordinator", *draft)
        sums = [f"{name}/{name}-sums.json" for name in SILOS]
        agree = ("federation", "agree", *sums, "--federation", "fed", "--schema", "study.toml")
        assert "wrote agreed.json" in shell.type("coordinator", *agree)
        for name in SILOS:
            shutil.copy(tmp_path / "agreed.json", tmp_path / name)
            edit_data(tmp_path / name, 'agreed = "agreed.json"')

        started = ("federation", "start", "fed", "--metrics-port", str(of_link))
        shell.serve("coordinator", "link", *started)
        wait_for(tmp_path / "link.log", "silos reach the SuperLink at", 200)
        for name in SILOS:
            shell.serve(name, name, "silo", "start", f"{name}/silo.toml")
        for name in SILOS:
            wait_for(tmp_path / f"{name}.log", "SuperNode ID", 200)
        until(lambda: 'silos{state="connected"} 3' in read(of_link, "metrics"))

        run = ("run", "--on", "flower", "--federation", "fed")
        refused = shell.type("coordinator", run[0], "regmean", *run[1:], "--epochs", "1")
        assert all(f"silo {name}: " in refused for name in SILOS), refused
        assert "step 1" not in refused
        glm = ("glm", *run[1:], "--laps", "5")
        waits = shell.type("coordinator", run[0], *glm)
        assert "has approved this plan" in waits, waits
        page = read(of_link, "")
        assert "regmean-flower-seed0" in page
        for name in SILOS:
            plans = shell.ekiden("silo", "approve", f"{name}/silo.toml")
            digest = re.findall(r"plan ([0-9a-f]{64})", plans)[0]
            assert "approved" in shell.type(name, "silo", "approve", f"{name}/silo.toml", digest)
        said = shell.type("coordinator", run[0], *glm, timeout=600)
        (model,) = (tmp_path / "runs").glob("glm*/model.safetensors")
        verdict = shell.type("coordinator", "verify", str(model.parent), "--keys", "fed/keys")
        assert "each signed by its silo, and the result is what they gave" in verdict, said

        shell.type("coordinator", "federation", "revoke", "fed", "c")
        until(
            lambda: "does not know the silo's key" in shell.ekiden("silo", "status", "c/silo.toml")
        )
        print({who: len(lines) for who, lines in shell.typed.items()})
        assert len(shell.typed["coordinator"]) <= MOST_OF_COORDINATOR
        assert all(len(shell.typed[name]) <= MOST_OF_SILO for name in SILOS)
    finally:
        end(shell)
