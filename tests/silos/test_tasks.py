"""Tasks at a silo: done once, counted, and made again where they were lost."""

from dataclasses import replace
from pathlib import Path

import pytest

from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL
from ekiden.core.engine.wire import Ref
from ekiden.methods import FedELMY, FedSeq
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.parcel import (
    Ask,
    ParcelPart,
    pack,
)
from tests.silos.asked import (
    TERMS,
    flip,
    killed,
    model,
    said,
    sealed_in,
    shelf_of,
    task,
    terms,
)
from tests.silos.fakes import silo_file
from tests.silos.sessions import assert_equal, far, here

FEDSEQ = FedSeq(epochs=1)

pytestmark = pytest.mark.usefixtures("any_request")


@pytest.fixture
def file(tmp_path: Path) -> SiloFile:
    return silo_file(tmp_path, "client-0")


def test_a_value_that_the_message_lacks(file: SiloFile) -> None:
    assert "lacks the value" in said(file, task(model=Ref("client-1", "0-0-train")))
    assert "is not here" in said(file, task(model=Ref("client-0", "0-0-train")))
    assert "no client task" in said(file, task(model=Ref("client-1", "0-0-run")))


def test_epochs_are_counted_over_a_whole_task(tmp_path: Path) -> None:
    file = silo_file(tmp_path, "client-0", "[limits]\nepochs = 5\n")
    agreed = terms(FedELMY(models=3, epochs=2, warmup=0))
    arguments = wire.encode((INITIAL,))
    ask = Ask("task", agreed.text(), task="extend_pool", length=len(arguments))
    assert "more epochs than client-0 allows" in said(file, pack(ask, (arguments,)))
    agreed = terms(FedELMY(models=2, epochs=2, warmup=0), run="fedcba9876543210")
    assert said(file, pack(replace(ask, agreement=agreed.text()), (arguments,))) == ""


def test_another_request_at_the_same_place_is_done_anew(file: SiloFile) -> None:
    """A step that was interrupted and is repeated differently; what followed it there is
    discarded."""
    assert said(file, task()) == ""
    assert said(file, task(call=1)) == ""
    ask = pack(Ask("value", TERMS.text(), key="0-0-train"))
    first = Silo(file).answer(ask)
    other = model().with_params(model().params * 2)
    assert said(file, task(model=other)) == ""
    assert Silo(file).answer(ask) != first
    assert "is not here" in said(file, pack(Ask("value", TERMS.text(), key="0-1-train")))


def test_the_silo_whose_value_is_bad_is_named(file: SiloFile) -> None:
    """The reader refuses it, but its owner is at fault."""
    nan = model().params.clone()
    nan[7] = float("nan")
    value = wire.encode(model().with_params(nan))
    part = ParcelPart("client-1", "0-0-train", len(value))
    found = said(file, task(model=Ref("client-1", "0-0-train"), extra=value, parts=(part,)))
    assert "value '0-0-train' of client-1: message holds NaN or infinity" in found


def test_a_task_whose_stored_outcome_is_damaged_is_done_again(tmp_path: Path) -> None:
    """It was not committed yet: the coordinator died before it had the answer."""
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 102, done=True):
        far(FEDSEQ, nodes, tmp_path / "run", public)
    (file,) = shelf_of(nodes, 102).glob("outcome-2-0-*")
    flip(file, file.stat().st_size - 1)
    assert_equal(far(FEDSEQ, nodes, tmp_path / "run", public), here(FEDSEQ))
