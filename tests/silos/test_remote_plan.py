"""The plan of a run between machines, as text."""

import json
from dataclasses import replace

import pytest

from ekiden.core.base.errors import UserError
from ekiden.methods import (
    FedSeq,
)
from ekiden.runs.plan import Plan, from_json
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import remote_plan
from tests.silos.sessions import plan_of


def test_a_plan_survives_its_text() -> None:
    plan = plan_of(FedSeq(epochs=7), evaluate_every=2)
    assert remote_plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for bad in ({"method": "fedseq"}, json.loads(json.dumps(plan.to_json())) | {"more": 1}):
        with pytest.raises(UserError, match="use the same Ekiden"):
            remote_plan.from_json(bad)
    with pytest.raises(UserError, match="names 'a' twice"):
        replace(plan, clients="a,b,a")
    with pytest.raises(UserError, match="'' is not the name of a silo"):
        replace(plan, clients="a,,")


def test_settings_of_another_type_in_a_plan_are_one_line() -> None:
    remote = remote_plan.RemotePlan(Recipe(FedSeq()), "a,b").to_json()
    with pytest.raises(UserError, match=r"training.mean .* is of the wrong type"):
        remote_plan.from_json(remote | {"recipe": remote["recipe"] | {"training": {"mean": ["a"]}}})
    local = Plan(Recipe(FedSeq())).to_json()
    with pytest.raises(UserError, match=r"training.mean .* is of the wrong type"):
        from_json(local | {"recipe": local["recipe"] | {"training": {"mean": ["a"]}}})
