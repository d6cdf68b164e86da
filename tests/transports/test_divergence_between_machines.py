"""Silos report a loss of at most 10 per sample: a model that diverged is noticed nevertheless."""

from math import log, nan
from pathlib import Path

import pytest

from ekiden import Training
from ekiden.base.errors import UserError
from ekiden.data.tasks import Classification, LanguageModelling, Regression, Task
from ekiden.engine.method import Method
from ekiden.methods import FedAvg, FedSeq, Local
from ekiden.transports.flower.coordinator import session
from ekiden.transports.flower.coordinator.measuring import row_of
from ekiden.transports.flower.coordinator.verify import verify
from ekiden.transports.flower.trust.parcel import Ask, Count, unpack
from tests.transports.fakes import NAMES, FakeNodes, with_keys
from tests.transports.test_remote import plan_of

TEN = Classification()
DIVERGED, GOOD, UNSURE, NONE = Count(20, 800.0, 100), Count(95, 50.0, 100), Count(20, 400.0, 100), Count(0, 0.0, 0)
GUESSED = Count(10, 230.0, 100)


@pytest.mark.parametrize(
    ("counts", "task", "outputs", "noticed"),
    [
        ([DIVERGED, DIVERGED], TEN, 10, True),
        ([DIVERGED, GOOD], TEN, 10, False),  # it has forgotten the first silo, or never learned it
        ([DIVERGED, NONE], TEN, 10, True),
        ([NONE, NONE], TEN, 10, False),
        ([GOOD, GOOD], TEN, 10, False),  # its wrong answers cost 10, and are few
        ([UNSURE, UNSURE], TEN, 10, False),  # overfitted: wrong answers cost 5
        ([GUESSED, GUESSED], TEN, 10, False),
        ([Count(50, 500.0, 100)], TEN, 2, True),
        ([Count(20, nan, 100)], TEN, 10, True),  # finite weights whose answers are not
        ([Count(0, 1000.0, 100)], Regression((0.0,), (1.0,)), 1, True),
        ([Count(0, 300.0, 100)], Regression((0.0,), (1.0,)), 1, False),
        ([Count(0, 1000.0, 100)], LanguageModelling(vocabulary=2000), 2000, True),
        ([Count(0, 760.0, 100)], LanguageModelling(vocabulary=2000), 2000, False),
        ([Count(0, 1000.0, 100)], LanguageModelling(vocabulary=50_000), 50_000, False),  # guessing costs 10.8
    ],
)
def test_what_silos_tell_shows_divergence(counts: list[Count], task: Task, outputs: int, noticed: bool) -> None:
    assert row_of([[count] for count in counts], 1, task, outputs).get("diverged", False) == noticed


def test_one_personal_model_that_diverged_is_noticed() -> None:
    good, bad = [GOOD, NONE], [GOOD, DIVERGED]
    assert row_of([good, [GOOD, GOOD]], 0, TEN, 10).get("diverged") is None
    assert row_of([good, bad], 0, TEN, 10)["diverged"]


@pytest.mark.parametrize(
    "method", [FedSeq(epochs=1), FedAvg(rounds=1, epochs=1), Local(epochs=1)], ids=lambda m: m.title()
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
    good = session.run(plan_of(method), FakeNodes(files), tmp_path / "good", public, said.append, poll=0)
    assert not good.diverged


def test_a_silo_whose_training_becomes_infinite_is_named(tmp_path: Path) -> None:
    """Nothing of it is handed on: the last good model stays, and the run ends with the silo's name and the step."""
    files, public = with_keys(tmp_path, NAMES)
    plan = plan_of(FedSeq(epochs=1), training=Training(lr=1e30, batch_size=64))
    nodes = FakeNodes(files)
    with pytest.raises(UserError, match=r"client-0.*NaN or infinite in epoch 1, batch \d+: lower --lr") as caught:
        session.run(plan, nodes, tmp_path / "run", public, lambda line: None, poll=0)
    assert "\n" not in str(caught.value)
    assert {node for node, data in nodes.log if unpack(data, Ask)[0].kind == "task"} == {100}
