"""A silo does what its file allows, and nothing malformed."""

import contextlib
import os
import random
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.core.base.errors import UserError
from ekiden.core.data.augment import Augment
from ekiden.core.engine import wire
from ekiden.core.engine.wire import Ref
from ekiden.methods import FedSeq, Local
from ekiden.silos.silo.shelf import _DAYS_KEPT, Shelf, drop_old_runs
from ekiden.silos.silo.silo import ADMISSION, Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import no_samples, own_network
from ekiden.silos.trust.parcel import (
    HELLO,
    Answer,
    Ask,
    Hello,
    ParcelPart,
    pack,
    signed_text,
    unpack,
)
from tests.fuzz import examples
from tests.silos.asked import (
    TERMS,
    model,
    nothing_done,
    said,
    said_of_recipe,
    task,
    terms,
    with_recipe,
)
from tests.silos.fakes import silo_file

pytestmark = pytest.mark.usefixtures("any_request")


def test_the_coordinator_feeds_samples_of_its_own_as_silos_do() -> None:
    agreed = replace(TERMS, mean=(0.5,), std=(0.25,), augment=Augment(crop=1, flip=True))
    dataset = no_samples(agreed)
    assert (dataset.mean, dataset.std, dataset.augment) == (
        (0.5,),
        (0.25,),
        Augment(crop=1, flip=True),
    )
    assert len(dataset.train) == len(dataset.test) == 0


@pytest.fixture
def file(tmp_path: Path) -> SiloFile:
    return silo_file(tmp_path, "client-0")


def test_what_an_error_says_of_a_sample_stays_at_the_silo(
    file: SiloFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("cannot convert 'Mary Smith' in scans/mary.png")

    monkeypatch.setattr("ekiden.silos.silo.silo.SiloTasks.do", fail)
    assert said(file, task()) == "it failed with ValueError; its own log says why"
    assert "Mary Smith" in (file.folder / "requests.log").read_text()


def test_no_model_is_taken_where_a_method_says_that_nobody_chooses_it(
    file: SiloFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The level of a silo counts on what the method says."""
    monkeypatch.setattr(FedSeq, "chosen_by", "nobody")
    assert said(file, task()) == ""
    assert "nobody chooses its model, and somebody sent one" in said(file, task(model=model()))


STEPS = {
    "check_terms": ('methods = ["fedavg"]', TERMS, "does not allow 'fedseq'"),
    "check_bound": ("", replace(TERMS, mean=(0.5,)), "has other terms"),
    "check": ("approve = true", TERMS, "nobody at client-0 has approved this plan"),
}
"""for each step of the admission: what the operator writes, the terms of a later request, and what is said"""


def test_each_step_of_the_admission_has_a_case() -> None:
    assert [step.__name__ for step in ADMISSION] == [*STEPS]


@pytest.mark.parametrize("step", STEPS)
def test_each_step_of_the_admission_holds_for_runs_that_have_begun(
    step: str, file: SiloFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, agreed, why = STEPS[step]
    assert said(file, task()) == ""
    later = silo_file(tmp_path, "client-0", f"[limits]\n{limits}\n")
    assert why in said(later, task(agreed))
    others = [one for one in ADMISSION if one.__name__ != step]
    monkeypatch.setattr("ekiden.silos.silo.silo.ADMISSION", tuple(others))
    assert why not in said(later, task(agreed)), "another step says the same"


def test_a_good_request_is_done(file: SiloFile) -> None:
    assert said(file, task()) == ""
    assert said(file, task(model=model())) == ""
    assert not nothing_done(file)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (task(terms(Local())), "does not allow 'local', only fedseq"),
        (
            task(agreement=said_of_recipe(method="nonsense")),
            "cannot be read: 'nonsense' is not a method",
        ),
        (
            task(agreement=said_of_recipe(method="FedSeq")),
            "cannot be read: 'FedSeq' is not a method",
        ),
        (
            task(agreement=said_of_recipe(method="attack.py:Method")),
            "which client-0 does not trust",
        ),
        (task(agreement=said_of_recipe(method=["fedseq"])), "is not a method that silos know"),
        (task(agreement=said_of_recipe(more=1)), "unknown entry 'more'"),
        (task(replace(TERMS, version="0.0.1")), "the run is of Ekiden 0.0.1, this silo has"),
        (
            task(with_recipe(TERMS, model="resnet18")),
            "the model has 4.* bytes, client-0 allows 1000000",
        ),
        (task(with_recipe(TERMS, model="nonsense")), "unknown model 'nonsense'"),
        (task(replace(TERMS, shape=(3, 8, 8))), "client-0 and the run are of different shape"),
        (task(replace(TERMS, classes=("a", "b"))), "client-0 and the run are of different classes"),
        (task(terms(FedSeq(epochs=3))), "more epochs than client-0 allows"),
        (
            task(agreement=said_of_recipe(hyperparameters={"epochs": "1"})),
            "epochs '1' is of the wrong type",
        ),
        (task(agreement=said_of_recipe(hyperparameters={"epochs": 0})), "epochs 0 is out of range"),
        (task(agreement=said_of_recipe(hyperparameters=None)), "hyperparameters must be a table"),
        (
            task(agreement=said_of_recipe(hyperparameters={"__class__": 0})),
            "unknown entry in .hyperparameters. '__class__'",
        ),
        (
            task(agreement=said_of_recipe(training={"lr": 0.1, "more": 1})),
            "unknown entry in .training. 'more'",
        ),
        (
            task(agreement=said_of_recipe(training={"mean": ["a"]})),
            r"mean \['a'\] is of the wrong type",
        ),
        (task(replace(TERMS, run="../../etc")), "terms of the run cannot be read"),
        (task(agreement=said_of_recipe(seed="0")), "seed '0' is of the wrong type"),
        (
            task(agreement=TERMS.text().replace('"crop":0', '"crop":-1')),
            "augment.*crop -1 is out of range|crop -1 is out of range",
        ),
        (task(replace(TERMS, clients=("server", "client-0"))), "no silo can be called 'server'"),
        (task(replace(TERMS, clients=("*", "client-0"))), "is not the name of a silo"),
        (task(replace(TERMS, clients=("client-0", "client-0"))), "the run names 'client-0' twice"),
        (task(task="run"), "clients run only functions marked @on_client"),
        (task(task="__init__"), "clients run only functions marked @on_client"),
        (task(step=-1), "a task needs a step"),
        (task(kind="shell"), "no silo can do 'shell'"),
        (task(agreement="{}"), "terms of the run cannot be read"),
        (task(agreement="[" * 10_000), "terms of the run cannot be read"),
        (task(extra=b"more"), "not as long as it says"),
        (task(length=1 << 40), "not as long as it says"),
        (task(parts=(ParcelPart("client-1", "0-0-train", 1 << 40),)), "not as long as it says"),
        (task(parts=(ParcelPart("client-1", "0-0-train", -1),)), "not as long as it says"),
        (b"", "unreadable message"),
        (b"\xff" * 100, "unreadable message"),
        (task()[:-100], "unreadable|not as long as it says"),
        (task()[:50], "unreadable"),
        (pack(Ask("value", TERMS.text(), key="../../own.py")), "is not here"),
        (pack(Ask("value", TERMS.text(), key="0-0-train")), "is not here"),
        (pack(Ask("evaluate", TERMS.text()), (wire.encode([1.0]),)), "not announced|was announced"),
    ],
    # messages hold new keys each time, and workers have to agree on the names of tests
    ids=lambda one: "" if isinstance(one, bytes) else one,
)
def test_what_a_silo_refuses(tmp_path: Path, data: bytes, reason: str) -> None:
    file = silo_file(
        tmp_path,
        "client-0",
        '[limits]\nmethods = ["fedseq"]\nmodel_bytes = 1_000_000\nepochs = 2\n',
    )
    assert re.search(reason, said(file, data))
    assert nothing_done(file)


def test_a_message_longer_than_64_models_is_refused(tmp_path: Path) -> None:
    file = silo_file(tmp_path, "client-0", "[limits]\nmodel_bytes = 600000\n")
    assert said(file, task()) == ""
    assert "takes 38400000" in said(file, task(extra=b"x" * 39_000_000))


def test_settled_values_are_dropped(file: SiloFile) -> None:
    assert said(file, task()) == ""
    assert said(file, task(step=1, settled=1, keep=("0-0-train",))) == ""
    assert len(list(file.folder.rglob("outcome-*"))) == 2
    assert said(file, task(step=2, settled=2, keep=("1-0-train",))) == ""
    assert sorted(p.name for p in file.folder.rglob("outcome-*")) == [
        "outcome-1-0-train.parcel",
        "outcome-2-0-train.parcel",
    ]
    assert not list(file.folder.rglob("journal/*-fit*")) or all(
        p.name.startswith("2-") for p in file.folder.rglob("journal/*")
    )


def test_a_refused_message_makes_the_silo_forget_nothing(file: SiloFile) -> None:
    """What to forget is in the header, before anything is opened and checked."""
    assert said(file, task()) == ""
    text = TERMS.text()
    forget: dict[str, Any] = {"settled": 9, "absent": ((0, "client-0"),)}
    for data in (
        task(step=9, model="x", **forget),
        task(step=9, extra=b"more", **forget),
        task(step=9, task="run", **forget),
        task(step=8, **forget),
        pack(Ask("evaluate", text, **forget), (b"noise",)),
        pack(Ask("shell", text, **forget)),
    ):
        assert said(file, data)
    assert said(file, pack(Ask("value", text, key="0-0-train", **forget))) == ""
    assert said(file, task(step=1, model=Ref("client-0", "0-0-train"))) == ""


def test_only_in_runs_that_skip_silos_a_step_is_void(file: SiloFile) -> None:
    file = replace(file, limits=replace(file.limits, min_clients=1))
    skips = replace(TERMS, run="fedcba9876543210", skips=True)
    for agreed in (TERMS, skips):
        assert said(file, task(agreed)) == ""
        assert said(file, task(agreed, step=1, absent=((0, "client-0"),))) == ""
        refused = said(file, task(agreed, step=2, model=Ref("client-0", "0-0-train")))
        assert ("is not here" in refused) is agreed.skips


def test_a_run_of_another_commit_is_refused() -> None:
    terms = replace(TERMS, version=f"{TERMS.version[:-16]}{'0' * 16}")
    with pytest.raises(
        UserError, match=r"the run is of Ekiden \S+, this silo has \S+: install the same commit"
    ):
        agreements.parse(terms.text())


@pytest.mark.parametrize("days", [31, 3650])
def test_a_clock_that_jumps_removes_no_run(
    days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    (runs / "run").mkdir(parents=True)
    (runs / "run" / "lock").touch()
    now = time.time()
    for hours in (
        0,
        1,
        24 * days,
        24 * days + 1,
        24 * days + 24,
        0,
        24 * days + 25,
    ):  # there, back, and there again
        monkeypatch.setattr(time, "time", lambda hours=hours: now + hours * 3600)
        drop_old_runs(runs)
        assert (runs / "run").exists()
    (tmp_path / "days.json").write_text("nonsense")
    drop_old_runs(runs)
    assert (runs / "run").exists()


@pytest.mark.parametrize("looked", [False, True])
def test_a_clock_that_was_late_at_the_last_request_removes_no_run(
    looked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a machine without a battery, until it reaches a time server."""
    runs = tmp_path / "runs"
    (runs / "run").mkdir(parents=True)
    lock = runs / "run" / "lock"
    lock.touch()
    now = time.time()

    def look(day: float) -> bool:
        monkeypatch.setattr(time, "time", lambda: day * 86400)
        drop_old_runs(runs)
        return lock.exists()

    first = now / 86400
    for day in range(_DAYS_KEPT * 2):
        os.utime(lock, (now + day * 86400,) * 2)
        assert look(first + day)
    os.utime(lock, (0, 0))
    assert not looked or look(0)
    kept = [look(first + day) for day in range(_DAYS_KEPT * 2, _DAYS_KEPT * 4)]
    assert sum(kept) == _DAYS_KEPT


def test_a_run_that_is_in_use_is_not_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def aged(name: str) -> Path:
        (tmp_path / "runs" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name / "lock").touch()
        os.utime(tmp_path / "runs" / name / "lock", (0, 0))
        return tmp_path / "runs" / name

    old, used, busy = aged("old"), aged("used"), aged("busy")
    start = time.time()
    for day in range(_DAYS_KEPT):  # the silo saw a month pass
        monkeypatch.setattr(time, "time", lambda day=day: start - (_DAYS_KEPT - day) * 86400)
        drop_old_runs(tmp_path / "runs")
    assert old.exists()
    monkeypatch.undo()
    with Shelf(used, None).held():
        pass
    with Shelf(busy, None).held():
        aged("busy")  # it has worked for longer than a month
        drop_old_runs(tmp_path / "runs")
        assert [folder.exists() for folder in (old, used, busy)] == [False, True, True]


@settings(max_examples=examples(60), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(0, 255))
def test_crafted_messages_are_refused(noise: bytes, at: int, byte: int) -> None:
    """Noise, cut tails and flipped bytes in the header: each is refused, or gives a header of valid
    types."""
    good = bytearray(task())
    good[at % len(good)] = byte
    for data in (noise, bytes(good), bytes(good[: at % len(good)]), bytes(good) + noise):
        with contextlib.suppress(wire.WireError):
            ask, _ = unpack(data, Ask)
            assert all(
                type(getattr(ask, f.name)) is type(getattr(Ask(""), f.name)) for f in fields(Ask)
            )
    assert unpack(task(), Ask)[0].task == "train"


def test_hello_is_signed(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = silo_file(tmp_path, "client-0", '[link]\nkey = "own.key"\n')
    public = keys.read_public(keys.generate(tmp_path / "own.key"))
    other = keys.read_public(keys.generate(tmp_path / "other.key"))
    nonce = random.Random(0).randbytes(8).hex()
    _, body = unpack(Silo(file).answer(pack(Ask("hello", nonce=nonce))), Answer)
    hello: Hello = wire.decode(body, Hello)
    assert hello.holds.shape == (1, 8, 8)
    assert keys.proves(public, HELLO, signed_text(nonce, "client-0"), hello.signature)
    assert not keys.proves(other, HELLO, signed_text(nonce, "client-0"), hello.signature)
    assert not keys.proves(public, HELLO, signed_text("other", "client-0"), hello.signature)
    assert not keys.proves(public, HELLO, signed_text(nonce, "client-1"), hello.signature)
    assert not keys.proves(public, HELLO, signed_text(nonce, "client-0"), "zz")
    assert (tmp_path / "own.key").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "name",
    ["hf:/etc/secret", "hf:../secret", "hf:..", "hf:", "hf:/", "hf:.", "timm:resnet18", "hf:a\0b"],
)
def test_a_run_cannot_name_another_folder_of_a_silo(name: str, tmp_path: Path) -> None:
    """Only what is in the folder that the silo names, by the last part of the name."""
    (tmp_path / "secret").mkdir()
    folder = tmp_path / "pretrained"
    (folder / "mine").mkdir(parents=True)
    with pytest.raises(UserError):
        own_network(name, folder)
    assert own_network("hf:/elsewhere/mine", folder) == f"hf:{folder / 'mine'}"
