"""What holds for every method of the library, measured without knowing any of them."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ekiden import FederatedData, Training, run
from ekiden.core.base.errors import UserError
from ekiden.core.engine.drive import outline
from ekiden.core.engine.method import INITIAL, Method
from ekiden.core.engine.transport import live_refs
from ekiden.core.engine.wire import SERVER, Ref
from ekiden.core.engine.worker import Setup
from ekiden.lab.conformance import TEXT, rules
from ekiden.lab.conformance.small_runs import Tiny, files, same, watched
from ekiden.lab.conformance.small_runs import settings as small_settings
from ekiden.methods import (
    GLM,
    METHODS,
    PFNM,
    SCAFFOLD,
    SPFL,
    UAPDFL,
    Average,
    DFedAvgM,
    DisPFL,
    FedAvg,
    FedELMY,
    FedFisher,
    FedGram,
    FedKrylov,
    FedLPA,
    FedOV,
    FedPer,
    FedPFT,
    FedSeq,
    FedTasuki,
    FuseFL,
    MAEcho,
    MetaFed,
    OTFusion,
    RegMean,
)
from ekiden.methods.rounds.spfl import HOSTS
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from tests.lab.conformance.ridge import Ridge
from tests.lab.conformance.watching import Watched, watched_fits

ROOT = Path(__file__).parents[3]
KINDS: list[Any] = [
    pytest.param(kind, marks=pytest.mark.xdist_group(kind.title()), id=kind.title())
    for kind in METHODS
]
"""All methods; the tests of one run in one process, which makes its small runs once."""
every_method = pytest.mark.parametrize("kind", KINDS)

SHAPES: set[type[Method]] = {FedSeq, FedAvg, SCAFFOLD, DFedAvgM, FedGram, FedPer, MetaFed, Average}
"""One method of each shape of a run: what is kept between tasks, by whom, and who computes."""


ELSEWHERE: set[type[Method]] = {
    *(
        FedELMY,
        FedTasuki,
        FedGram,
        FedKrylov,
        MetaFed,
        Average,
        OTFusion,
        PFNM,
        MAEcho,
        RegMean,
        FedLPA,
        FedFisher,
    ),
    *(FedOV, FedPFT, FedAvg, SCAFFOLD, DFedAvgM, DisPFL),
}
"""Methods that are tried on another device each time, where they resume too; others share their
code."""

SKIP: set[type[Method]] = {kind for kind in METHODS if kind.traits.skips}
"""Methods that `test_goes_on_without_an_absent_client` stops after steps 1 and 3, and continues,
each time."""
FAST: set[type[Method]] = {*SHAPES, GLM, SPFL}
"""Methods that learn (next to their exact numbers in `tests/methods`) and run in other processes,
each time."""


def mostly(fast: Collection[type[Method]]) -> pytest.MarkDecorator:
    """All methods, of which these are fast."""
    marks = {
        k: [pytest.mark.xdist_group(k.title()), *([] if k in fast else [pytest.mark.slow])]
        for k in METHODS
    }
    kinds = [pytest.param(k, marks=marks[k], id=k.title()) for k in METHODS]
    return pytest.mark.parametrize("kind", kinds)


@cache
def subject(kind: type[Method]) -> Watched:
    """A method and its small runs, for all tests."""
    return Watched(kind)


def small(kind: type[Method]) -> Method:
    """See `Subject.small`."""
    return subject(kind).small


def settings(kind: type[Method]) -> dict[str, Any]:
    return small_settings()


def plain(kind: type[Method]) -> Result:
    """The small run in memory, for all tests that compare with it."""
    return subject(kind).plain


@every_method
def test_describes_itself(kind: type[Method]) -> None:
    for check in TEXT:
        check(subject(kind))
    rules.refuses_wrong_values(subject(kind))
    rules.tasks_are_annotated(subject(kind))


@every_method
def test_has_one_page_and_one_test_file(kind: type[Method]) -> None:
    module = kind.__module__.rsplit(".", 1)[1]
    assert (ROOT / "docs" / "methods" / f"{module}.md").exists()
    assert (ROOT / "tests" / "methods" / f"test_{module}.py").exists()


@mostly(FAST | {FedELMY, FedTasuki})
def test_learns(kind: type[Method]) -> None:
    rules.learns(subject(kind))


@every_method
def test_ends_and_reports(kind: type[Method]) -> None:
    rules.ends_after_its_steps(subject(kind))
    assert {"bytes", "forward", "backward"} <= plain(kind).metrics[-1].keys()


class Plain(nn.Module):
    """A network without BatchNorm, which some methods treat differently, and with several
    layers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


@every_method
def test_every_pass_at_a_client_is_counted(kind: type[Method]) -> None:
    rules.counts_every_pass(subject(kind))
    assert subject(kind).seen.passes


@pytest.mark.parametrize(
    ("kind", "changes", "build", "training"),
    [
        (FedTasuki, {"rounds": 2, "statistics": True, "recall": 0.3, "widen": 0.2}, Plain, {}),
        (FedTasuki, {}, Tiny, {"optimizer": "sam"}),
        (MAEcho, {"projector": "closed"}, Plain, {}),
        (MAEcho, {"form": "paper", "step": 1.0, "decentralised": True, "align": True}, Plain, {}),
        (FedFisher, {"curvature": "diagonal", "fisher": "sampled"}, Plain, {}),
        (FedFisher, {"fisher": "given"}, Tiny, {}),
        (FedLPA, {"fisher": "expected"}, Plain, {}),
        (DisPFL, {"regrow": "gradient"}, Tiny, {}),
        (FedOV, {}, Plain, {}),
        (FedOV, {}, Plain, {"optimizer": "sam"}),
        (MetaFed, {"distill_above": 0.0}, Tiny, {}),
        (MetaFed, {"distill_above": 1.0}, Tiny, {}),
        (FedELMY, {"form": "released"}, Tiny, {}),
        (UAPDFL, {"threshold": 0.0}, Tiny, {"select": "last"}),
        *(
            pytest.param(
                SPFL,
                {"host": host.title()},
                Tiny,
                {},
                marks=[] if host.title() == "feddc" else pytest.mark.slow,
            )
            for host in HOSTS
        ),
    ],
)
def test_every_pass_is_counted_with_other_settings_too(
    kind: type[Method],
    changes: dict[str, Any],
    build: type[nn.Module],
    training: dict[str, Any],
    blobs: FederatedData,
) -> None:
    method, chosen = replace(small(kind), **changes), settings(kind)
    chosen["training"] = replace(chosen["training"], **training)
    with watched() as seen:
        run(method, blobs, build, evaluate_every=10**9, **chosen)
    assert seen.passes
    for passes in seen.passes:
        assert passes.reported == passes.measured, passes.task


@every_method
def test_ledger_equals_the_declared_cost(kind: type[Method]) -> None:
    rules.ledger_equals_the_cost(subject(kind))


@every_method
def test_it_says_whether_it_ends_with_one_model(kind: type[Method]) -> None:
    method, result = subject(kind).small, subject(kind).plain
    assert method.one_model == (result.weights is not None and not result.personal)
    assert method.complete(result.state)


@every_method
def test_keeps_what_it_declares_and_repeats(kind: type[Method]) -> None:
    rules.keeps_what_it_declares(subject(kind))
    rules.repeats(subject(kind))


@pytest.mark.slow
@every_method
def test_weights_of_classes_count_or_are_refused(kind: type[Method]) -> None:
    rules.weighs_classes(subject(kind))
    if not kind.traits.weighs:
        with pytest.raises(
            UserError, match="does not train on a loss in which classes have weights"
        ):
            Recipe(small(kind), training=Training(class_weights="balanced"))


@mostly({*METHODS} - ((ELSEWHERE | SKIP) - SHAPES) - {SPFL, FuseFL})
def test_resumes_after_every_step_bit_for_bit(kind: type[Method]) -> None:
    """`ELSEWHERE` and `SKIP` say which tests resume the other methods."""
    rules.resumes(subject(kind))


@mostly(FAST)
def test_same_bits_on_every_transport(kind: type[Method]) -> None:
    rules.same_on_processes(subject(kind))


@mostly({*SHAPES, GLM})
def test_another_seed_gives_another_model(kind: type[Method], blobs: FederatedData) -> None:
    other = run(small(kind), blobs, Tiny, evaluate_every=10**9, **(settings(kind) | {"seed": 4}))
    a, b = (result.weights or result.personal[0] for result in (plain(kind), other))
    assert torch.equal(a.params, b.params) == (
        kind is GLM
    )  # the exact solution does not depend on the seed


@every_method
def test_nothing_is_returned_unused(kind: type[Method]) -> None:
    one = subject(kind)
    _ = one.watched
    asked: set[Ref[Any]] = {Ref(request.client, request.key) for request in one.requests}
    assert asked
    assert asked <= one.read - {INITIAL}


@every_method
def test_its_outline_is_what_happens(kind: type[Method], blobs: FederatedData) -> None:
    result, _ = subject(kind).watched
    asked = subject(kind).requests
    setup = Setup(small(kind), Tiny, blobs.dataset, seed=3)
    names = [c.name for c in blobs.clients]
    found = outline(setup, names)
    values = [row for row in result.ledger if row.task == "get"]
    assert (found is None) == bool(values) or kind.traits.pools_data
    if found is not None and not kind.traits.pools_data:
        assert list(found.requests) == asked
        assert found.result == live_refs(result.state)
        given: list[Ref[Any]] = [Ref(request.client, request.key) for request in asked]
        moved = [(user, step, ref.owner) for ref in given for user, step in found.users(ref)]
        assert sorted(moved) == sorted((row.target, row.step, row.source) for row in result.ledger)


@pytest.mark.parametrize("kind", [param for param in KINDS if param.values[0].traits.skips])
def test_goes_on_without_an_absent_client(
    kind: type[Method], blobs: FederatedData, tmp_path: Path
) -> None:
    present = plain(kind)
    lost = next(row.target for row in present.ledger if row.step == 1 and row.target != SERVER)

    def away(step: int, client: str) -> bool:
        return step == 1 and client == lost

    folder, whole = tmp_path / "stopped", tmp_path / "whole"
    result = run(small(kind), blobs, Tiny, folder=whole, absent=away, **settings(kind))
    assert [(row.step, row.source) for row in result.ledger if row.missing] == [(1, lost)]
    assert result.weights is not None
    assert result.weights.is_finite()
    for stop in (1, 2, None):
        run(small(kind), blobs, Tiny, folder=folder, absent=away, stop_after=stop, **settings(kind))
    assert files(folder) == files(whole)
    assert not same(result.weights, present.weights)


@mostly(SHAPES | {kind for kind in METHODS if kind.selection is not Method.selection})
def test_it_declares_what_local_training_returns(kind: type[Method], blobs: FederatedData) -> None:
    result, config = subject(kind).watched
    training = Training(lr=0.01, batch_size=16, select="last")
    with watched_fits() as last:
        run(
            small(kind),
            blobs,
            Tiny,
            evaluate_every=10**9,
            **(settings(kind) | {"training": training}),
        )
    method, trains = small(kind), bool(result.metrics[-1]["backward"])
    assert config["selection"] == method.selection("best")
    assert subject(kind).selected == ({method.selection("best")} if trains else set()), (
        "what does not train selects nothing"
    )
    assert last == ({method.selection("last")} if trains else set())


@pytest.mark.parametrize(
    "holds",
    [
        test_learns,
        test_ends_and_reports,
        test_resumes_after_every_step_bit_for_bit,
        test_same_bits_on_every_transport,
        test_its_outline_is_what_happens,
        test_nothing_is_returned_unused,
        test_keeps_what_it_declares_and_repeats,
    ],
)
def test_a_method_that_does_not_train_holds_too(
    holds: Callable[..., None], blobs: FederatedData, tmp_path: Path
) -> None:
    given = {"kind": Ridge, "blobs": blobs, "tmp_path": tmp_path}
    holds(**{name: given[name] for name in inspect.signature(holds).parameters})


def test_passes_that_a_task_does_by_itself_are_in_the_metrics(blobs: FederatedData) -> None:
    test_describes_itself(Ridge)
    test_ledger_equals_the_declared_cost(Ridge)
    test_every_pass_at_a_client_is_counted(Ridge)
    row = plain(Ridge).metrics[-1]
    assert (row["forward"], row["backward"]) == (
        sum(len(client.train) for client in blobs.clients),
        0,
    )
