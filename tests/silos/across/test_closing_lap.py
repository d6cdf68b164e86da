"""The closing lap between machines: the same bits, signed, and only where a silo allows it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import Method
from ekiden.methods import Average, FedTasuki
from ekiden.methods.exact.closing import with_lap
from ekiden.silos.coordinator.remote_plan import from_json
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.trust.agreement import parse
from tests.silos.asked import TERMS
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import assert_equal, far, here, plan_of

CHAIN, STAR = with_lap(FedTasuki(epochs=1)), with_lap(Average(epochs=1))


@pytest.mark.parametrize(
    "method",
    [pytest.param(CHAIN, id="chain"), pytest.param(STAR, id="star", marks=pytest.mark.slow)],
)
def test_equal_to_one_process_and_signed(method: Method, tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    folder = tmp_path / "run"
    result = far(method, FakeNodes(files), folder, public)
    assert_equal(result, here(method))
    assert verify(folder, public).wrong == ()
    config = read_config(folder)
    name = method.title()
    plain = name.removesuffix("+lap")
    assert config["recipe"]["method"] == name
    (folder / "config.json").write_text(
        json.dumps(config | {"recipe": config["recipe"] | {"method": plain}})
    )
    said = f"config.json says recipe.method {plain}, what silos signed gives {name}"
    assert verify(folder, public).wrong == (said,)


def test_a_silo_must_allow_it(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, '[limits]\nmethods = ["fedtasuki"]\n')
    with pytest.raises(
        UserError, match=r"client-0 does not allow 'fedtasuki\+lap', only fedtasuki"
    ):
        far(CHAIN, FakeNodes(files), tmp_path / "run", public)
    assert far(FedTasuki(epochs=1), FakeNodes(files), tmp_path / "run2", public).weights is not None


def test_plan_and_terms_survive_their_text() -> None:
    plan = plan_of(CHAIN)
    assert from_json(json.loads(json.dumps(plan.to_json()))) == plan
    terms = replace(TERMS, recipe=replace(TERMS.recipe, method=with_lap(TERMS.recipe.method)))
    assert parse(terms.text()).digest == terms.digest != TERMS.digest == parse(TERMS.text()).digest
    assert parse(terms.text()).recipe == terms.recipe
