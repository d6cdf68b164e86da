"""What a silo's file refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden.core.base import outside
from ekiden.core.engine import wire
from ekiden.core.engine.wire import Ref
from ekiden.methods import Ensemble, FedSeq
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.silo.tasks import SiloTasks
from ekiden.silos.trust.parcel import (
    Ask,
    pack,
)
from ekiden.silos.trust.sealing import Reader
from tests.silos.asked import TERMS, model, nothing_done, said, said_of_recipe, task, terms
from tests.silos.fakes import member_of, public_key, silo_file

pytestmark = pytest.mark.usefixtures("any_request")


@pytest.fixture
def file(tmp_path: Path) -> SiloFile:
    return silo_file(tmp_path, "client-0")


def test_code_that_reads_the_data_is_no_code_for_others_to_name(
    file: SiloFile, tmp_path: Path
) -> None:
    """It may run here, because silo.toml names it, but not because somebody else does."""
    code = tmp_path / "own.py"
    code.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Method: pass\n")
    outside.allow(f"{code}:Method")
    for name in (f"{code}:Method", "own.py:Method", outside.by_content(f"{code}:Method")):
        for entry in ("method", "metric"):
            assert said(file, task(agreement=said_of_recipe(**{entry: name}))), (entry, name)
    assert not (tmp_path / "ran").exists()
    outside.load(f"{code}:Method")
    assert (tmp_path / "ran").exists(), "the silo itself may run it"


def test_models_that_do_not_fit_are_refused(file: SiloFile) -> None:
    good = model()
    nan, short = good.params.clone(), good.params[:-1]
    nan[7] = float("nan")
    for bad, reason in (
        (good.with_params(nan), "NaN or infinity"),
        (good.with_params(short), "do not fit this network"),
        (good.with_params(torch.cat([good.params, good.params])), "another shape or type"),
        (good.with_params(good.params[None]), "another shape or type"),
        (good.with_params(good.params.double()), "another shape or type"),
        (good.with_params(good.params.half()), "another shape or type"),
        (replace(good, buffers=torch.zeros(3)), "another shape or type"),
        (1.0, "was announced"),
        ([good] * 2, "announced"),
        ("x" * 100, "announced"),
        ({str(i): 0 for i in range(100_000)}, "announced"),
    ):
        assert reason in said(file, task(model=bad))
    assert nothing_done(file)
    body = wire.encode([good.with_params(short)])
    members = tuple(Reader(name, 0, "") for name in TERMS.clients)
    about: dict[str, Any] = {"step": 2, "members": members, "results": 1}
    ask = Ask("evaluate", TERMS.text(), **about)
    assert "another shape" in said(file, pack(ask, (body,)))


def test_a_request_with_long_lists_costs_no_time(
    file: SiloFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each absence, reader and member is looked at, and each reader gets a copy. A run has few of
    them."""
    file = replace(file, limits=replace(file.limits, min_clients=1))
    agreed = terms(FedSeq(epochs=1), clients=("client-0", "client-1"), skips=True)
    assert said(file, task(agreed, absent=((0, "client-1"),))) == ""
    monkeypatch.setattr(
        SiloTasks, "do", lambda *args: pytest.fail("looked at before they were counted")
    )
    reader = Reader("client-1", 1, "00")
    many: dict[str, Any] = {
        "absent": ((1, "client-1"),),
        "readers": (reader,),
        "members": (reader,),
    }
    for what, one in many.items():
        assert "in a run of 2 silos, client-0 takes 9 at most" in said(
            file, task(agreed, **{what: one * 10})
        )


def test_what_the_method_still_needs_is_kept_whatever_the_message_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    file = silo_file(tmp_path, "client-0", "[limits]\nmin_clients = 1\n")
    agreed = terms(FedSeq(epochs=1, rounds=2), clients=("client-0",))
    assert said(file, task(agreed)) == ""
    second = task(agreed, model=Ref("client-0", "0-0-train"), step=1, settled=1)
    assert said(file, second) == ""
    assert said(file, second) == ""
    assert said(file, pack(Ask("value", agreed.text(), key="0-0-train"))) == ""


def test_a_result_is_of_as_many_clients_as_the_terms_say(tmp_path: Path) -> None:
    """An ensemble has a network for each."""
    file = silo_file(tmp_path, "client-0", "[limits]\nmodel_bytes = 600000\nmin_clients = 1\n")
    body = wire.encode([model()])

    def evaluate(named: int) -> str:
        names = tuple(f"client-{i}" for i in range(named))
        for name in names:
            (tmp_path / "peers" / f"{name}.pub").write_text(public_key(name))
        agreed = terms(Ensemble(epochs=1), clients=names, run=f"{named:016x}")
        about: dict[str, Any] = {"results": int(named > 1), "step": 1}
        about["members"] = (member_of(file, agreed.run),) if named == 1 else ()
        ask = Ask("evaluate", agreed.text(), **about)
        return said(file, pack(ask, (body,)))

    assert "a result of 90 clients may be larger than client-0 takes" in evaluate(90)
    assert evaluate(1) == ""
