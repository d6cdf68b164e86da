"""One run here and between silos, and whether both gave the same."""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import Hardware, Training
from ekiden import run as run_here
from ekiden.core.base.checks import allows
from ekiden.core.engine.method import Method
from ekiden.core.training.weights import Weights
from ekiden.methods import (
    GLM,
    METHODS,
    FedKrylov,
)
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from tests.silos.fakes import NAMES, FakeNodes, silo_file, silos, with_keys
from tests.silos.toy import Toy

TRAINING = Training(lr=0.01, batch_size=64)


def plan_of(method: Method, **changes: object) -> RemotePlan[Method]:
    recipe: dict[str, Any] = {"training": TRAINING, "seed": 3, "evaluate_every": 0}
    recipe |= {
        name: changes.pop(name) for name in {f.name for f in fields(Recipe)} & changes.keys()
    }
    changes = {"evaluate_dp": "exact", **changes}  # as on one machine
    return replace(RemotePlan(Recipe(method, **recipe), ",".join(NAMES)), **changes)  # type: ignore[arg-type]


def far(
    method: Method,
    nodes: FakeNodes,
    folder: Path,
    public: Mapping[str, str] | None = None,
    **changes: object,
) -> Result:
    return session.run(
        plan_of(method, **changes),
        nodes,
        folder,
        nodes.public if public is None else public,
        lambda line: None,
        poll=0,
    )


KINDS: list[type[Method]] = [*(m for m in METHODS if not m.traits.pools_data and m is not GLM), Toy]
"""GLM refuses pixels, which follow from each other; see test_tasks_between_machines"""
ALLOWED = f"[limits]\nmethods = {json.dumps([k.title() for k in KINDS])}\n"


def nodes_in(folder: Path, more: str = ALLOWED) -> FakeNodes:
    return FakeNodes([silo_file(folder, name, more) for name in NAMES])


def sealed_in(folder: Path) -> tuple[FakeNodes, dict[str, str]]:
    files, public = with_keys(folder, NAMES, ALLOWED)
    return FakeNodes(files), public


def nobody(step: int, client: str) -> bool:
    return False


def here(method: Method, absent: Callable[[int, str], bool] = nobody, **more: Any) -> Result:
    return run_here(
        method,
        silos(),
        training=TRAINING,
        hardware=Hardware(threads=1),
        seed=3,
        absent=absent,
        **more,
    )


def same(a: Weights | None, b: Weights | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def assert_equal(one: Result, other: Result) -> None:
    assert same(one.weights, other.weights)
    assert all(same(a, b) for a, b in zip(one.personal, other.personal, strict=True))
    assert one.ledger == other.ledger
    last, expected = one.metrics[-1], other.metrics[-1]
    losses = {key for key in expected if key.endswith("loss")} | {
        "majority"
    }  # classes of few samples are left out
    more = losses | {"metrics", "silo_means", "figures", "groups", "confusion", "subgroups"}
    if "clients" not in last:  # a sealed run, whose silos show nothing of their own
        more |= {"clients", "client_mean", "client_std", "client_worst", "client_decile"}
        assert last.get("client_mean") == pytest.approx(expected.get("client_mean"), abs=1e-6)
    assert {k: v for k, v in last.items() if k not in more} == {
        k: v for k, v in expected.items() if k not in more
    }
    # What a silo reports about its loss is coarse, and no sample counts for more than 10 in it.
    assert all(
        0.2 * expected[k] - 0.1 < last[k] < 1.05 * expected[k] + 0.1 for k in losses - {"majority"}
    )
    assert last["majority"] == pytest.approx(expected["majority"], abs=0.1)


def away(steps: dict[str, set[int]]) -> Callable[[int, str], bool]:
    return lambda step, client: step in steps.get(client, ())


def small(kind: type[Method]) -> Method:
    """The method with its counts brought down to 2, and at least 2 rounds if it has rounds."""
    method = kind()
    whole = {
        f.name: getattr(method, f.name)
        for f in fields(method)
        if type(getattr(method, f.name)) is int
    }
    counts = {name: value for name, value in whole.items() if allows(kind, name, 2)}
    few = {
        name: 1 if name == "peers" else 2
        for name, value in counts.items()
        if value > 2 or name == "rounds"
    }
    more = {"sums": "whole"} if kind is FedKrylov else {}  # sealed runs mask their sums
    return replace(method, **few, **more)


class Stop(BaseException):
    """Stands for SIGKILL."""
