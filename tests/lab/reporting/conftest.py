"""Small real runs that all tests of the report look at."""

import shutil
from pathlib import Path

import pytest

from ekiden import Training
from ekiden.core.base.settings import Hardware
from ekiden.core.engine.method import Method
from ekiden.lab.reporting import report
from ekiden.lab.tables import sweep
from ekiden.methods import FedAvg, FedELMY, FedPer, FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

EXPERIMENT = """
title = "Table <b>1</b>"
source = "Nobody & Sons, Table 1"
link = "https://arxiv.org/abs/2404.12130"
seeds = [0, 1]
paired = ["Averaged"]
[settings]
epochs = 1
clients = 3
[[row]]
label = "Sequential <i>"
method = "fedseq"
printed = ["50.0 ± 2.0"]
[[row]]
label = "Averaged"
method = "fedavg"
rounds = 2
[[row]]
label = "Too large"
skip = "no machine for it"
printed = [99.5]
[[column]]
label = "digits"
"""


def plan(method: Method, seed: int = 0) -> Plan[Method]:
    """Digits at three clients."""
    return Plan(
        Recipe(method, seed=seed, training=Training()), clients=3, hardware=Hardware(threads=1)
    )


def make(plan: Plan[Method], folder: Path, **about: object) -> Path:
    plan.run(folder, plan.federation(), about=about)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of four methods, and a sweep."""
    home = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        make(plan(FedELMY(models=3, epochs=2, warmup=2), seed), home / f"fedelmy-{seed}")
    make(plan(FedSeq(epochs=4)), home / "fedseq")
    make(plan(FedAvg(rounds=2, epochs=2)), home / "fedavg")
    make(plan(FedPer(rounds=2, epochs=2)), home / "fedper")
    file = home / "table.toml"
    file.write_text(EXPERIMENT)
    swept = sweep.plan_sweep(file, "paper", home / "sweep")
    sweep.begin(swept, EXPERIMENT)
    for job in sweep.jobs(swept, swept.runs()):
        make(job.plan, job.folder, **job.about)
    return home


@pytest.fixture(scope="session")
def out(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on all of them."""
    folder = tmp_path_factory.mktemp("out") / "report"
    report([runs], folder, details=4)
    return folder


@pytest.fixture
def page(out: Path) -> str:
    return (out / "index.html").read_text()


def copied(runs: Path, home: Path, name: str) -> Path:
    return Path(shutil.copytree(runs / name, home / name))
