"""Each check of models that a silo is asked to measure."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL
from ekiden.core.training.weights import Weights
from ekiden.silos.silo import measuring
from ekiden.silos.silo.measuring import CHECKS, Measurement
from ekiden.silos.trust import custody
from ekiden.silos.trust.parcel import Ask

NONE = torch.empty(0)
MODEL = Weights(torch.ones(2), NONE, NONE.long())
OTHER = Weights(torch.zeros(2), NONE, NONE.long())
DIGEST = custody.digest(wire.chunks(MODEL))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "check_numbers": ({}, {"results": 2}, "1 models to measure in a run of 2 silos"),
    "check_room": ({"most_bytes": 15}, {}, "may be larger than a takes"),
    "check_step": ({}, {"step": 2}, "the plan measures models after step 3"),
    "check_named": ({"measures": "0" * 64}, {}, "only the model that the terms name"),
    "check_result": ({"initial": OTHER}, {}, "silos measure only the result"),
    "check_once": ({"before": b"another"}, {}, "measures no others"),
}
"""what differs in the run and in the request, and what is said"""


def asked(folder: Path, **about: Any) -> Measurement:
    """A request that is in order, except for what differs."""
    terms = SimpleNamespace(
        clients=("a", "b"),
        measures=about.get("measures", ""),
        skips=True,
        method="fedseq",
        measured_steps=(3,),
        ends_with=lambda step: step == 3,
    )
    run: Any = SimpleNamespace(
        terms=terms,
        file=SimpleNamespace(name="a"),
        worker=SimpleNamespace(setup=SimpleNamespace(method=SimpleNamespace(changes_network=True))),
        most_bytes=about.get("most_bytes", 16),
        plan_without=lambda absent: SimpleNamespace(models=[INITIAL]),
        admission=SimpleNamespace(folder=folder),
    )
    ask = Ask("evaluate", step=3, results=1, records=("",))
    return Measurement(run, ask, [MODEL])


def test_each_check_has_a_case() -> None:
    assert [check.__name__ for check in CHECKS] == [*CASES]


@pytest.mark.parametrize("name", CASES)
def test_each_check_refuses_what_no_other_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, ask, why = CASES[name]
    monkeypatch.setattr(measuring, "initial_weights", lambda setup: run.get("initial", MODEL))
    monkeypatch.setattr(measuring, "model_bytes", lambda setup: 8)
    for folder in ("good", "bad"):
        (tmp_path / folder).mkdir()
    for check in CHECKS:
        if "initial" not in run:
            check(asked(tmp_path / "good"))
    bad = asked(tmp_path / "bad", **run)
    bad = replace(bad, ask=replace(bad.ask, **ask))
    if "before" in run:
        (tmp_path / "bad" / "measured-after-3").write_bytes(run["before"])
    for check in CHECKS:
        if check.__name__ == name:
            with pytest.raises(UserError, match=why):
                check(bad)
        else:
            check(bad)
    assert DIGEST in bad.digests
