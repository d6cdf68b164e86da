"""Every method on every task: it learns, or it is refused in one line before anything is
written."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from ekiden import Hardware, Training, UserError, run
from ekiden.core.engine.method import Method
from ekiden.core.tasks import KINDS
from ekiden.methods import GLM, METHODS
from tests.methods.problems import Problem, problems

FAST = {"fedseq", "fedavg"}
MORE = {"metafed", "fedelmyparallel", "fedtasuki", "ensemble", "scaffold", "moon", "local"}
"""what is tried each time: on all tasks; and on language modelling, whose network is the
smallest"""
MOST = {"rounds": 3, "epochs": 6, "warmup": 6, "peers": 2, "distill_batch_size": 64}
LEARNS = {"training": Training(lr=0.02, batch_size=8), "hardware": Hardware(threads=1), "seed": 3}


def short(kind: type[Method]) -> Method:
    """The method with few rounds, epochs, steps and peers; other numbers stay."""
    method, fewer = kind(), {}
    for field in fields(method):
        value, name = getattr(method, field.name), field.name
        most = MOST.get(name, 6 if "steps" in name else 40 if name.endswith("epochs") else None)
        if type(value) is int and most:
            fewer[name] = min(value, most)
    return replace(method, **fewer)


def start(problem: Problem) -> float:
    """The loss of the initial model on the test data."""
    task, test = problem.data.dataset.task, problem.data.dataset.test
    torch.manual_seed(0)
    with torch.no_grad():
        return float(task.mean_loss(problem.build().eval()(test.x), test.y))


def works(kind: type[Method], name: str) -> bool:
    return kind().needs <= problems()[name].data.dataset.offers


@pytest.mark.parametrize("name", KINDS)
def test_methods_that_cannot_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    problem = problems()[name]
    able = [kind.title() for kind in METHODS if works(kind, name)]
    assert {"fedelmy", "fedseq", "fedavg", "fedtasuki", "metafed", "local", "centralized"} <= set(
        able
    )
    for kind in METHODS:
        if works(kind, name):
            continue
        with pytest.raises(UserError) as refusal:
            run(kind(), problem.data, problem.build, folder=tmp_path / "run", **LEARNS)  # type: ignore[arg-type]
        line = str(refusal.value)
        assert "\n" not in line
        if kind is GLM and name in FAMILIES:
            assert line.endswith(f"add family={FAMILIES[name]!r}")
        else:
            assert line.startswith(f"{kind.title()} ")
            assert line.endswith(f"use one of {', '.join(able)}")
        assert not (tmp_path / "run").exists()


def fast(kind: type[Method], name: str) -> bool:
    more = {"survival": {"fedavg"}, "language-modelling": FAST | MORE}
    return kind.title() in more.get(name, FAST)


FAMILIES = {"survival": "cox", "regression": "linear"}
NETWORKS = {("otfusion", "language-modelling"): "is of a kind whose units cannot be aligned"}
"""what is refused for the network and not for the task, and why"""
PAIRS = [
    pytest.param(
        kind, name, marks=() if fast(kind, name) else pytest.mark.slow, id=f"{kind.title()}-{name}"
    )
    for name in KINDS
    for kind in METHODS
    if works(kind, name)
    and (kind.title(), name) not in NETWORKS
    and kind is not GLM  # it refuses dependent pixels
]


@pytest.mark.parametrize(("title", "name"), NETWORKS)
def test_a_network_that_does_not_fit_is_refused_too(title: str, name: str, tmp_path: Path) -> None:
    problem = problems()[name]
    with pytest.raises(UserError, match=NETWORKS[title, name]):
        run(title, problem.data, problem.build, folder=tmp_path / "run", **LEARNS)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_method_that_trains_beats_its_own_start(kind: type[Method], name: str) -> None:
    """With one of two learning rates: some methods take SGD's steps, whatever the training says."""
    problem = problems()[name]
    before, task = start(problem), problem.data.dataset.task
    for lr in (0.02, 0.3):
        torch.manual_seed(0)
        chosen = LEARNS | {"training": Training(lr=lr, batch_size=8)}
        result = run(short(kind), problem.data, problem.build, evaluate_every=10**9, **chosen)  # type: ignore[arg-type]
        last = result.metrics[-1]
        assert task.headline.name in last
        if task.kind != "classification":
            assert set(last["metrics"]) == {metric.name for metric in task.metrics}
            clients = {client.name for client in problem.data.clients}
            assert set(last["groups"]["client"]) == clients or kind.traits.pools_data
        if last["loss"] < 0.995 * before:
            return
    raise AssertionError(f"loss {last['loss']:.3f} where it began with {before:.3f}")
