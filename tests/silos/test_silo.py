"""A silo does what its file allows, and nothing malformed."""

import contextlib
import json
import os
import random
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.core.data.augment import Augment
from ekiden.core.engine import wire
from ekiden.core.engine.folder import code_version
from ekiden.core.engine.method import INITIAL, Method
from ekiden.core.engine.setup import initial_weights
from ekiden.core.engine.wire import Ref
from ekiden.core.training.weights import Weights
from ekiden.methods import Ensemble, FedELMY, FedSeq, Local
from ekiden.readers.kinds import of_tensor
from ekiden.runs.recipe import Recipe
from ekiden.silos.silo.shelf import _DAYS_KEPT, Shelf, drop_old_runs
from ekiden.silos.silo.silo import ADMISSION, Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.silo.tasks import SiloTasks
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import Agreement, no_samples, own_network
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
from ekiden.silos.trust.sealing import Reader
from tests.fuzz import examples
from tests.silos.fakes import NAMES, member_of, public_key, seal_for, silo_file

pytestmark = pytest.mark.usefixtures("any_request")
TERMS = Agreement(
    "0123456789abcdef",
    code_version(),
    Recipe(FedSeq(epochs=1), model="mlp"),
    dataset="digits",
    shape=(1, 8, 8),
    classes=tuple(map(str, range(10))),
    mean=(0.0,),
    std=(1.0,),
    clients=NAMES[:2],
    keys=tuple(public_key(name) for name in NAMES[:2]),
)


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


def terms(method: Method, **changes: Any) -> Agreement:
    if "clients" in changes:
        changes["keys"] = tuple(public_key(name) for name in changes["clients"])
    return replace(with_recipe(TERMS, method=method), **changes)


def with_recipe(agreed: Agreement, **changes: Any) -> Agreement:
    """The terms with another recipe."""
    return replace(agreed, recipe=replace(agreed.recipe, **changes))


def said_of_recipe(**entries: Any) -> str:
    """The text of terms whose recipe has entries that no recipe can have."""
    values = json.loads(TERMS.text())
    return json.dumps(values | {"recipe": values["recipe"] | entries})


def said(file: SiloFile, data: bytes) -> str:
    """The silo's reason for refusing; on one line."""
    answer, body = unpack(Silo(file).answer(seal_for(file, data)), Answer)
    assert "\n" not in answer.error
    assert not (answer.error and body)
    return answer.error


def task(
    agreed: Agreement = TERMS, model: Any = INITIAL, extra: bytes = b"", **changes: Any
) -> bytes:
    arguments = wire.encode((model,))
    ask = Ask("task", agreed.text(), task="train", length=len(arguments))
    return pack(replace(ask, **changes), (arguments, extra))


def nothing_done(file: SiloFile) -> bool:
    return not list(file.folder.rglob("outcome-*"))


def model(agreed: Agreement = TERMS) -> Weights:
    from ekiden.core.base.settings import Hardware
    from ekiden.data import Dataset, Samples

    none = Samples(torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64))
    return initial_weights(
        agreed.setup(
            Dataset("none", none, none, agreed.classes, inputs=of_tensor(none.x)),
            Hardware(threads=1),
        )
    )


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


def test_a_message_longer_than_64_models_is_refused(tmp_path: Path) -> None:
    file = silo_file(tmp_path, "client-0", "[limits]\nmodel_bytes = 600000\n")
    assert said(file, task()) == ""
    assert "takes 38400000" in said(file, task(extra=b"x" * 39_000_000))


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


def test_only_in_runs_that_skip_silos_a_step_is_void(file: SiloFile) -> None:
    file = replace(file, limits=replace(file.limits, min_clients=1))
    skips = replace(TERMS, run="fedcba9876543210", skips=True)
    for agreed in (TERMS, skips):
        assert said(file, task(agreed)) == ""
        assert said(file, task(agreed, step=1, absent=((0, "client-0"),))) == ""
        refused = said(file, task(agreed, step=2, model=Ref("client-0", "0-0-train")))
        assert ("is not here" in refused) is agreed.skips


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


def test_the_silo_whose_value_is_bad_is_named(file: SiloFile) -> None:
    """The reader refuses it, but its owner is at fault."""
    nan = model().params.clone()
    nan[7] = float("nan")
    value = wire.encode(model().with_params(nan))
    part = ParcelPart("client-1", "0-0-train", len(value))
    found = said(file, task(model=Ref("client-1", "0-0-train"), extra=value, parts=(part,)))
    assert "value '0-0-train' of client-1: message holds NaN or infinity" in found


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
