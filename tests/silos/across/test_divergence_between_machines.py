"""A model that diverged is noticed nevertheless."""

from math import log, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ekiden import Training
from ekiden.clinic.counting import Care, counting_of
from ekiden.clinic.noisy import Exact
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.core.tasks import Classification, Regression, Scores, Task
from ekiden.methods import FedAvg, FedSeq, Local
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.trust import report as measured
from ekiden.silos.trust.parcel import Ask, unpack
from ekiden.silos.trust.report import Reported, SiloReport, row_of, total_of
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import plan_of

TERMS: Any = SimpleNamespace(clients=("a", "b"), classes=(), subgroups=())
GOOD, DIVERGED, NONE = 0.5, 400.0, None


def report(task: Task, outputs: int, losses: list[float | None], mine: int) -> SiloReport:
    """What a silo reports about models with these losses of each of 20 samples; None: it has too
    few samples."""
    counting, y = counting_of(task, outputs, full=False), torch.zeros(20, dtype=torch.int64)
    answers = y if isinstance(task, Classification) else torch.zeros(20, 1)
    scores = [Scores(task, outputs, y, answers, torch.full((20,), loss or 0.0)) for loss in losses]
    care = Care(99 if None in losses else 10)
    counts = torch.stack([counting.count(one, care, y) for one in scores])
    return measured.report(Exact(counting), counts, mine)


def noticed(silos: list[float | None], task: Task = Classification(), outputs: int = 10) -> bool:  # noqa: B008
    parts = [Reported(shown=report(task, outputs, [loss], 0)) for loss in silos]
    total = total_of(dict(zip("ab", parts, strict=False)), 0)
    assert total is not None
    told = Exact(counting_of(task, outputs, full=False))
    row = row_of(total, {}, TERMS, 1, told, last=False)
    return bool(row.get("diverged", False))


def test_what_silos_report_shows_divergence() -> None:
    assert noticed([DIVERGED, DIVERGED])
    assert not noticed([DIVERGED, GOOD])  # it has forgotten the first silo, or never learned it
    assert noticed([DIVERGED, NONE])
    assert not noticed([NONE, NONE])
    assert not noticed([29.0, 29.0])  # overfitted
    assert noticed([nan, nan])  # finite weights whose answers are not
    assert noticed([31.0], Regression(), 1)
    assert not noticed([9.0], Regression(), 1)
    assert not noticed([90.0], outputs=50_000)  # guessing costs 10.8
    assert noticed([110.0], outputs=50_000)


def test_one_personal_model_that_diverged_is_noticed() -> None:
    def row(second: float) -> dict[str, Any]:
        models = [[GOOD, DIVERGED], [DIVERGED, second]]  # each model is bad at the other silo
        parts = [
            report(Classification(), 10, list(losses), i)
            for i, losses in enumerate(zip(*models, strict=True))
        ]
        total = parts[0].plus(parts[1])
        told = Exact(counting_of(Classification(), 10, full=False))
        return row_of(total, {}, TERMS, 0, told, last=False)

    assert "diverged" not in row(GOOD)
    assert row(DIVERGED)["diverged"]


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(FedSeq(epochs=1), id="fedseq"),
        pytest.param(FedAvg(rounds=1, epochs=1), id="fedavg", marks=pytest.mark.slow),
        pytest.param(Local(epochs=1), id="local", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_diverged_says_so(method: Method, tmp_path: Path) -> None:
    """The same line as on one machine, and a row that signatures prove."""
    files, public = with_keys(tmp_path, NAMES)
    said: list[str] = []
    plan = plan_of(method, training=Training(lr=1e6, batch_size=64))
    result = session.run(plan, FakeNodes(files), tmp_path / "run", public, said.append, poll=0)
    assert result.diverged
    assert f"that of guessing {log(10):.2f} (ln 10); lower lr (now 1e+06)" in said[-1]
    assert said[-1].startswith("training diverged: the loss is ")
    assert verify(tmp_path / "run", public).wrong == ()
    good = session.run(
        plan_of(method), FakeNodes(files), tmp_path / "good", public, said.append, poll=0
    )
    assert not good.diverged


def test_a_silo_whose_training_becomes_infinite_is_named(tmp_path: Path) -> None:
    """Nothing of it is handed on: the last good model stays, and the run ends with the silo's name
    and the step."""
    files, public = with_keys(tmp_path, NAMES)
    plan = plan_of(FedSeq(epochs=1), training=Training(lr=1e30, batch_size=64))
    nodes = FakeNodes(files)
    with pytest.raises(
        UserError, match=r"client-0.*NaN or infinite in epoch 1, batch \d+: lower lr"
    ) as caught:
        session.run(plan, nodes, tmp_path / "run", public, lambda line: None, poll=0)
    assert "\n" not in str(caught.value)
    assert {node for node, data in nodes.log if unpack(data, Ask)[0].kind == "task"} == {100}
