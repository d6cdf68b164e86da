"""Hyperparameters that had another name: run folders, experiment files and the command line still understand it."""

from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_origin

import pytest

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.cli.runs import run_options
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.experiments import settings
from ekiden.experiments.budget import budgets
from ekiden.experiments.plan import Plan, from_json
from ekiden.experiments.summary import label
from ekiden.methods import DENSE, METHODS, FedAvg, FedPer, FedTasuki, MAEcho, hyperparameters, method_of
from ekiden.methods.spfl.host import host_named
from tests.conftest import Tiny
from tests.methods.test_fedavg import SETTINGS
from tests.transports.test_silo import TERMS

SYNONYMS = {
    "lr_decay": {"decay", "rate_decay"},
    "weighting": {"weights", "client_weights"},
    "server_optimizer": {"server_opt", "optimizer_at_server"},
    "server_lr": {"global_lr", "step_size", "lr_server"},
    "ridge": {"penalty", "lambda_ridge"},
    "topology": {"shape", "graph"},
    "combine_heads": {"classifier", "head_average"},
    "normalise": {"norm", "normalize"},
    "distill_weight": {"weight", "distillation_weight"},
    "distill_batch_size": {"batch", "distill_batch"},
    "head_batch_size": {"head_batch"},
    "aggregator_batch_size": {"aggregator_batch"},
    "head_weight_decay": {"head_decay"},
    "distill_weight_decay": {"distill_decay"},
    "epochs": {"local_epochs"},
    "participation": {"fraction", "sample_rate"},
}
"""A hyperparameter -> names that it has elsewhere, or had here."""


def kind_of(hint: Any) -> str:
    """Return the type of value that a hyperparameter has."""
    return "text" if hint is str or get_origin(hint) is Literal else hint.__name__


def test_one_name_for_one_hyperparameter() -> None:
    used = {name for kind in METHODS for name in settings.hyperparameters(kind)}
    assert SYNONYMS.keys() <= used
    assert not set().union(*SYNONYMS.values()) & used


def test_a_name_has_one_sort_of_value() -> None:
    sorts = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for kind in METHODS:
        for name, hint in settings.hyperparameters(kind).items():
            sorts[name][kind_of(hint)].append(kind.title())
    assert {name: dict(found) for name, found in sorts.items() if len(found) > 1} == {}


def test_former_names_stand_for_fields_that_are_there() -> None:
    for kind in METHODS:
        fields = set(settings.hyperparameters(kind))
        assert set(kind.renamed.values()) <= fields, kind.title()
        assert not (set(kind.renamed) | set(kind.removed)) & fields, kind.title()
        assert len(set(kind.renamed.values())) == len(kind.renamed), kind.title()


@pytest.mark.parametrize("kind", [k for k in METHODS if k.renamed or k.removed], ids=lambda k: k.title())
def test_what_a_folder_of_before_holds_is_understood(kind: type[Method]) -> None:
    method = kind()
    said = {"method": kind.title(), "hyperparameters": method.settings()}
    assert set(kind.renamed) | set(kind.removed) <= set(method.settings())
    assert method_of(said) == method
    assert asdict(method) | hyperparameters(said) == asdict(method)
    assert "(" not in label(said | {"training": asdict(Training()), "hardware": asdict(Hardware())}).partition(",")[0]


@pytest.mark.parametrize("kind", [k for k in METHODS if k.removed], ids=lambda k: k.title())
def test_a_removed_setting_is_refused_unless_it_is_what_the_method_does(kind: type[Method]) -> None:
    for name, value in kind.removed.items():
        other = "another" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1
        given = kind().settings() | {name: other}
        with pytest.raises(UserError, match=f"no longer has {name} = ") as caught:
            method_of({"method": kind.title(), "hyperparameters": given})
        assert "use the version of Ekiden that ran it" in str(caught.value)
        assert "\n" not in str(caught.value)
        terms = replace(TERMS, method=kind.title(), hyperparameters=given)
        with pytest.raises(UserError, match=f"no longer has {name} = "):
            terms.build_method()
        with pytest.raises(UserError, match=f"--{name.replace('_', '-')}"):
            run_options(Plan(kind()), [f"--{name.replace('_', '-')}", str(other)])


def test_a_switch_and_a_host_s_setting_under_their_former_names() -> None:
    assert run_options(Plan(FedTasuki()), ["--no-average"]).plan.method == FedTasuki(average_iterates=False)
    assert run_options(Plan(MAEcho()), ["--norm"]).plan.method == MAEcho(normalise=True)
    assert host_named("feddisco:measure=l2") == host_named("feddisco:discrepancy=l2")


def test_a_budget_under_a_former_name() -> None:
    (budget,) = [b for b in budgets({"small": {"batch": 0.25}}, [DENSE]).values() if b.name == "small"]
    plan, scaled = budget.scale(Plan(DENSE(distill_batch_size=64)))
    assert plan.method == DENSE(distill_batch_size=16)
    assert [s.name for s in scaled] == ["distill_batch_size"]


def test_a_plan_of_before_is_read_and_written_as_it_was() -> None:
    method = FedPer(lr_decay=0.5)
    assert method.settings()["decay"] == 0.5
    assert "lr_decay" not in method.settings()
    said = {"method": "fedper", "hyperparameters": method.settings()}
    assert method_of(said) == method
    assert method_of(said | {"hyperparameters": {"lr_decay": 0.5}}) == method
    plan = Plan(method)
    assert from_json(plan.to_json()) == plan
    assert FedAvg(lr_decay=0.5).settings()["lr_decay"] == 0.5, "it had no other name"


def test_the_old_flag_and_setting() -> None:
    for flags in (["--decay", "0.5"], ["--decay=0.5"], ["--lr-decay", "0.5"]):
        assert run_options(Plan(FedPer()), flags).plan.method == FedPer(lr_decay=0.5)
    with pytest.raises(UserError, match="--decay"):
        run_options(Plan(FedAvg()), ["--decay", "0.5"])


def test_a_run_keeps_the_name_in_its_folder_and_goes_on(blobs: FederatedData, tmp_path: Path) -> None:
    method = FedPer(rounds=2, epochs=1, lr_decay=0.5)
    run(method, blobs, Tiny, folder=tmp_path, stop_after=1, **SETTINGS)
    assert read_config(tmp_path)["hyperparameters"]["decay"] == 0.5
    resumed = run(method, blobs, Tiny, folder=tmp_path, **SETTINGS)
    assert resumed.metrics == run(method, blobs, Tiny, **SETTINGS).metrics
