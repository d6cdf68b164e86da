"""Hyperparameters that had another name: run folders, experiment files and the command line still understand it."""

from pathlib import Path

import pytest

from ekiden import FederatedData, UserError, run
from ekiden.cli.runs import run_options
from ekiden.engine.folder import read_config
from ekiden.experiments import settings
from ekiden.experiments.plan import Plan, from_json
from ekiden.methods import METHODS, FedAvg, FedPer, method_of
from tests.conftest import Tiny
from tests.methods.test_fedavg import SETTINGS


def test_one_name_for_the_factor_on_the_learning_rate() -> None:
    for kind in METHODS:
        assert not {"decay", "rate_decay"} & set(settings.hyperparameters(kind)), kind.title()
        assert set(kind.renamed.values()) <= set(settings.hyperparameters(kind))
        assert not set(kind.renamed) & set(settings.hyperparameters(kind))


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
