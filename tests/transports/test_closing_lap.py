"""The closing lap between machines: the same bits, signed, and only where a silo allows it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.base.errors import UserError
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.methods import Average, ClosingLap, FedTasuki
from ekiden.transports.flower.agreement import parse
from ekiden.transports.flower.remote_plan import from_json
from ekiden.transports.flower.verify import verify
from tests.transports.fakes import NAMES, FakeNodes, with_keys
from tests.transports.test_remote import assert_equal, far, here, plan_of
from tests.transports.test_silo import TERMS

CHAIN, STAR = FedTasuki(epochs=1), Average(epochs=1)


@pytest.mark.parametrize("method", [CHAIN, STAR], ids=["chain", "star"])
def test_equal_to_one_process_and_signed(method: Method, tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    folder = tmp_path / "run"
    result = far(method, FakeNodes(files), folder, public, closing_lap=True)
    assert_equal(result, here(ClosingLap(method)))
    assert verify(folder, public).wrong == ()
    config = read_config(folder)
    assert config["closing_lap"] is True
    for changed in ({"closing_lap": False}, {"remote_plan": config["remote_plan"] | {"closing_lap": False}}):
        (folder / "config.json").write_text(json.dumps(config | changed))
        assert any("closing_lap false, the terms" in line for line in verify(folder, public).wrong)


def test_a_silo_must_allow_it(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, '[limits]\nmethods = ["fedtasuki"]\n')
    with pytest.raises(UserError, match="has a closing lap, client-0 does not allow that"):
        far(CHAIN, FakeNodes(files), tmp_path / "run", public, closing_lap=True)
    assert far(CHAIN, FakeNodes(files), tmp_path / "run2", public).weights is not None


def test_plan_and_terms_survive_their_text() -> None:
    plan = plan_of(ClosingLap(CHAIN))
    assert (plan.method, plan.closing_lap) == (CHAIN, True)
    assert from_json(json.loads(json.dumps(plan.to_json()))) == plan
    terms = replace(TERMS, closing_lap=True)
    assert (parse(terms.text()).closing_lap, parse(TERMS.text()).closing_lap) == (True, False)
    assert parse(terms.text()).digest == terms.digest != TERMS.digest == parse(TERMS.text()).digest
    assert isinstance(terms.build_method(), ClosingLap)
    with pytest.raises(UserError, match="closing_lap 1 is of the wrong type"):
        parse(json.dumps(json.loads(TERMS.text()) | {"closing_lap": 1}))
