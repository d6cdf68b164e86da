"""A federation as its operators run it, over real SuperNodes: from the first command to a regression that all silos
signed and others measured, and what goes wrong on the way. Every command is counted, with its processor time, and nothing
but [data] is edited. The acts share one federation and come in this order."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError

import numpy as np
import pandas as pd
import pytest

from ekiden.silos import commands
from ekiden.silos.coordinator import federation
from ekiden.silos.trust import keys
from tests.e2e.silos import BIN, Federation, free_ports, wait_for
from tests.e2e.test_operate import read
from tests.e2e.test_page_commands import end
from tests.silos.test_trusted import CODE

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
SILOS, OTHERS = ("a", "b", "c"), ("v", "w")
ROWS = 300
MOST_OF_COORDINATOR, MOST_OF_SILO = 14, 5
STUDY = "study"  # what is counted against these; faults are counted apart
RUN = ("--on", "flower", "--federation", "fed")
GLM = ("run", "glm", *RUN, "--laps", "5")
SIGNED = "each signed by its silo, and the result is what they gave"


class Typed(NamedTuple):
    """A command that ended."""

    part: str  # of the play
    who: str
    line: str
    cpu: float  # s
    wall: float  # s


class Shell(Federation):
    """Counts the commands of each operator, and how long each took."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.typed: list[Typed] = []
        self.part = STUDY
        self.port, self.control, self.metrics, *pages = free_ports(6)
        self.pages = dict(zip(SILOS, pages, strict=True))

    def type(self, who: str, *words: str, code: int = 0, timeout: float = 500) -> str:
        """Type a command, check how it ends, and return what it said."""
        began = time.monotonic()
        process = subprocess.Popen(
            [str(BIN / "ekiden"), *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        alarm = threading.Timer(timeout, process.kill)
        alarm.start()
        with process.stdout or io.BytesIO() as out:
            said = out.read().decode()
        _, status, used = os.wait4(process.pid, 0)
        alarm.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        self.note(who, words, used.ru_utime + used.ru_stime, time.monotonic() - began)
        assert process.returncode == code, said
        assert "Traceback" not in said
        return " ".join(said.split())

    def serve(self, who: str, name: str, *words: str) -> None:
        """Type a command that goes on."""
        self.note(who, words)
        self.start(name, [str(BIN / "ekiden"), *words])

    def note(self, who: str, words: tuple[str, ...], cpu: float = 0, wall: float = 0) -> None:
        self.typed.append(Typed(self.part, who, " ".join(words), cpu, wall))
        print(f"{cpu:5.1f} CPU s {wall:6.1f} s  {who}: ekiden {' '.join(words)[:90]}", flush=True)

    def start_study_link(self) -> None:
        self.serve(
            *("coordinator", "link", "federation", "start", "fed"),
            *("--metrics-port", str(self.metrics)),
        )
        wait_for(self.folder / "link.log", "silos reach the SuperLink at", 200)

    def start_study_silo(self, name: str) -> None:
        page = ("--metrics-port", str(self.pages[name])) if name in self.pages else ()
        self.serve(name, name, "silo", "start", f"{name}/silo.toml", *page)

    def approve(self, name: str) -> None:
        """Agree to the plan that waits, whose digest the coordinator told."""
        (plan,) = (self.folder / name / f"{name}-silo" / "plans").glob("*.json")
        said = self.type(name, "silo", "approve", f"{name}/silo.toml", plan.stem)
        assert f"approved: one run of {plan.stem}" in said

    def verify(self, run: str) -> None:
        said = self.type("coordinator", "verify", run, "--keys", "fed/keys")
        assert SIGNED in said

    def model(self, run: str) -> bytes:
        return (self.folder / run / "model.safetensors").read_bytes()

    def begin(self, *words: str) -> Path:
        """Type a run that goes on while something happens to it; return what it prints."""
        self.note("coordinator", words)
        self.start("run", [str(BIN / "ekiden"), *words])
        return self.folder / "run.log"

    def ended(self, seconds: float = 400) -> tuple[int, str]:
        """Return how that run ended, and what it said."""
        code = self.processes.pop("run").wait(seconds)
        log = self.folder / "run.log"
        said = " ".join(log.read_text().split())
        log.unlink()
        assert "Traceback" not in said
        return code, said


def patients(file: Path, seed: int) -> None:
    """Rows of a hospital: ages and lactate with gaps, sex with gaps, and who died."""
    draw = np.random.default_rng(seed)
    age, lactate = draw.integers(20, 95, ROWS).astype(float), draw.gamma(2.0, 1.5, ROWS)
    died = draw.random(ROWS) < 1 / (1 + np.exp(4 - 0.03 * age - 0.4 * lactate))
    lactate[draw.random(ROWS) < 0.15] = np.nan
    sex = pd.Series(draw.choice(["f", "m"], ROWS)).where(draw.random(ROWS) > 0.1)
    table = pd.DataFrame({"age": age, "lactate": lactate.round(2), "sex": sex})
    table["died"] = np.where(died, "yes", "no")
    table.to_csv(file, index=False)


def edit_data(folder: Path, line: str) -> None:
    file = folder / "silo.toml"
    file.write_text(file.read_text().replace("\n[link]", f"\n{line}\n[link]", 1))


def until(what: Callable[[], object], seconds: float = 200, pause: float = 0.5) -> None:
    """Wait until a call gives something true."""
    moment = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < moment
        time.sleep(pause)


def health(port: int) -> str:
    """Return what a monitor reads, whether it is good or not."""
    try:
        return read(port, "health")
    except HTTPError as error:
        return error.read().decode()


def session(leader: int) -> dict[int, bytes]:
    """Return the command lines of a session's processes."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == leader:
                found[int(entry.name)] = (entry / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
    return found


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Three silos that made their keys, agreed on a scale, and are connected."""
    shell = Shell(tmp_path_factory.mktemp("operator"))
    folder, link = shell.folder, ("--link", f"localhost:{shell.port}")
    try:
        for k, name in enumerate(SILOS):
            table = ("--data", "rows.csv", "--level", "models")
            shell.type(name, "silo", "init", name, *link, *table)
            patients(folder / name / "rows.csv", k)
            edit_data(folder / name, 'label_column = "died"')
        public = [f"{name}/{name}.key.pub" for name in SILOS]
        ports = ("--port", str(shell.port), "--control-port", str(shell.control))
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
            shutil.copy(folder / "agreed.json", folder / name)
            edit_data(folder / name, 'agreed = "agreed.json"')
        shell.start_study_link()
        for name in SILOS:
            shell.start_study_silo(name)
        until(lambda: 'silos{state="connected"} 3' in read(shell.metrics, "metrics"))
        yield shell
    finally:
        end(shell)


@pytest.fixture
def shell(study: Shell) -> Shell:
    study.part = STUDY
    return study


@pytest.fixture
def counted_apart(shell: Shell, request: pytest.FixtureRequest) -> None:
    """Commands are those of a fault, or of one more run, and not of the study."""
    shell.part = request.node.name


apart = pytest.mark.usefixtures("counted_apart")


def test_a_refused_run_and_a_regression_that_all_silos_approved(shell: Shell) -> None:
    refused = shell.type("coordinator", "run", "regmean", *RUN, "--epochs", "1", code=2)
    assert all(f"silo {name}: " in refused for name in SILOS), refused
    assert "step 1" not in refused
    assert "has approved this plan" in shell.type("coordinator", *GLM, code=2)
    assert "regmean-flower-seed0" in read(shell.metrics, "")
    for name in SILOS:
        assert "glm: " in read(shell.pages[name], "")
        shell.approve(name)
    shell.type("coordinator", *GLM)
    shell.verify("runs/glm-flower-seed0")


def test_silos_of_another_federation_measure_the_model_on_all_their_rows(shell: Shell) -> None:
    port, control = free_ports(2)
    for k, name in enumerate(OTHERS):
        link = ("--link", f"localhost:{port}", "--data", "rows.csv")
        shell.type(name, "silo", "init", name, *link)
        patients(shell.folder / name / "rows.csv", 10 + k)
        shutil.copy(shell.folder / "agreed.json", shell.folder / name)
        lines = ('label_column = "died"', 'agreed = "agreed.json"', 'part = "external"')
        edit_data(shell.folder / name, "\n".join(lines))
    public = [f"{name}/{name}.key.pub" for name in OTHERS]
    ports = ("--port", str(port), "--control-port", str(control))
    shell.type("coordinator", "federation", "init", "others", *public, *ports)
    for name in OTHERS:
        shell.type(name, "silo", "join", f"{name}/silo.toml", "others/roster.json")
    shell.serve("coordinator", "others", "federation", "start", "others")
    wait_for(shell.folder / "others.log", "silos reach the SuperLink at", 200)
    for name in OTHERS:
        shell.start_study_silo(name)
    measure = ("evaluate", "runs/glm-flower-seed0", "--on", "flower", "--federation", "others")
    assert "has approved this plan" in shell.type("coordinator", *measure, code=2)
    for name in OTHERS:
        shell.approve(name)
    said = shell.type("coordinator", *measure)
    assert "mean over 2 silos: " in said
    (rows,) = (shell.folder / "runs/glm-flower-seed0/evaluations").glob("*/metrics.jsonl")
    samples = json.loads(rows.read_text())["figures"]["samples"]
    assert samples == pytest.approx(len(OTHERS) * ROWS, rel=0.1)  # counts carry noise
    for name in ("others", *OTHERS):
        shell.kill(name)


@apart
def test_a_coordinator_is_killed_twice_and_its_certificate_expires(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that leads a run, in its first step; then the machine. The model is the same."""
    for name in SILOS:  # from here on, so that plans are not approved one by one
        file = shell.folder / name / "silo.toml"
        file.write_text(file.read_text().replace("approve = true", "approve = false"))
    run = shell.folder / "again" / "glm-flower-seed0"
    shell.begin(*GLM, "--out", "again")
    until((run / "config.json").exists, pause=0.02)
    for process, line in session(shell.processes["link"].pid).items():
        if b"flwr-serverapp" in line:
            os.kill(process, signal.SIGKILL)
    code, said = shell.ended()
    assert code == 2, said
    assert "the process that led the run is gone" in said
    assert "`ekiden resume again/glm-flower-seed0` goes on" in said
    assert "is gone" in shell.type("coordinator", "show", "again/glm-flower-seed0")
    assert "is gone" in shell.type("coordinator", "log", "again/glm-flower-seed0")

    resume = ("resume", "again/glm-flower-seed0")
    shell.begin(*resume)
    wait_for(shell.folder / "run.log", "step 4 of 15 done")
    shell.kill("link")
    code, said = shell.ended()
    assert code == 2, said
    assert "the SuperLink is gone" in said
    assert "`ekiden resume again/glm-flower-seed0` goes on" in said

    monkeypatch.setattr(keys, "_DAYS", -0.5)
    keys.renew(shell.folder / "fed", "localhost")
    said = shell.type("coordinator", "federation", "start", "fed", code=2)
    assert "certificate has expired: `ekiden federation rotate fed`" in said
    found = federation.read(shell.folder / "fed")
    shell.start("link", commands.superlink_command(found))  # as if it had been running meanwhile
    until(lambda: commands.is_running(found))
    said = shell.type("coordinator", *resume, code=2)
    assert "has expired: `ekiden federation rotate FOLDER` at the coordinator renews it" in said
    assert "certificate has expired" in shell.type("coordinator", "federation", "status", "fed")
    for name in SILOS:
        said = shell.type(name, "silo", "status", f"{name}/silo.toml")
        assert "certificate has expired" in said
    assert "is valid until 2" in shell.type("coordinator", "federation", "rotate", "fed")
    shell.kill("link")
    (shell.folder / "link.log").unlink()
    shell.start_study_link()
    shell.type("coordinator", *resume)
    assert shell.model("again/glm-flower-seed0") == shell.model("runs/glm-flower-seed0")
    shell.verify("again/glm-flower-seed0")


@apart
def test_a_silo_that_is_away_at_the_start_is_skipped(shell: Shell) -> None:
    shell.kill("c")
    for name in SILOS:  # by default a result is of all silos of the roster
        file = shell.folder / name / "silo.toml"
        file.write_text(file.read_text().replace("[limits]\n", "[limits]\nmin_clients = 2\n"))
    flags = ("--epochs", "1", "--order", "reversed", "--absent", "skip", "--patience", "10")
    said = shell.type("coordinator", "run", "fedseq", *RUN, *flags)
    assert "c did not come: going on without (--absent skip)" in said
    shell.start_study_silo("c")
    shell.verify("runs/fedseq-flower-seed0")


@apart
def test_trees_grow_although_a_silo_is_killed(shell: Shell) -> None:
    log = shell.begin("run", "trees", *RUN, "--rounds", "1", "--trees", "2", "--depth", "2")
    wait_for(log, "step 2 of ")
    shell.kill("b")
    shell.start_study_silo("b")
    code, said = shell.ended()
    assert code == 0, said
    shell.verify("runs/trees-flower-seed0")


@apart
def test_a_run_with_noise(shell: Shell) -> None:
    flags = ("--rounds", "1", "--epochs", "1", "--dp", "epsilon=5,delta=0.001")
    shell.type("coordinator", "run", "fedavg", *RUN, *flags)
    said = shell.type("coordinator", "verify", "runs/fedavg-flower-seed0", "--keys", "fed/keys")
    assert "it trained with differential privacy (epsilon=5,delta=0.001,clip=1)" in said
    spent = (shell.folder / "a/a-silo/privacy.jsonl").read_text()
    assert json.loads(spent)["epsilon"] == 5


@apart
def test_a_method_and_a_loop_in_a_file_run_where_all_silos_trust_it(shell: Shell) -> None:
    for place in (".", *SILOS):
        (shell.folder / place / "mine.py").write_text(f"MARKER = 'executed'\n{CODE}")
    own = ("run", "mine.py:HalfSeq", *RUN, "--epochs", "1")
    for name in SILOS[:2]:
        shell.type(name, "silo", "trust", f"{name}/silo.toml", f"{name}/mine.py")
    said = shell.type("coordinator", *own, code=2)
    assert re.search(
        r"silo c: the run executes mine\.py:HalfSeq@[0-9a-f]{32}, which c does not trust: put the same file there, "
        r"read it, then `ekiden silo trust silo\.toml mine\.py` if it may run$",
        said,
    ), said
    shell.type("c", "silo", "trust", "c/silo.toml", "c/mine.py")
    shell.type("coordinator", *own)
    shell.verify("runs/halfseq-flower-seed0")
    loop = ("--loop", "mine.py:sgd", "--epochs", "1", "--out", "loop")
    shell.type("coordinator", "run", "fedseq", *RUN, *loop)
    shell.verify("loop/fedseq-flower-seed0")
    assert not list(shell.folder.rglob("executed"))


def test_a_revoked_silo_is_told_so_and_commands_are_few(shell: Shell) -> None:
    shell.type("coordinator", "federation", "revoke", "fed", "c")
    until(lambda: "does not know the silo's key" in health(shell.pages["c"]))
    by_part = Counter((one.part, one.who) for one in shell.typed)
    print(by_part)
    assert by_part[STUDY, "coordinator"] <= MOST_OF_COORDINATOR
    assert all(by_part[STUDY, name] <= MOST_OF_SILO for name in (*SILOS, *OTHERS))
