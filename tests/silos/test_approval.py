"""A run whose plan nobody at a silo approved does not begin there, whatever a coordinator sends."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import date, datetime
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from ekiden.core.base.checks import plain
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Training
from ekiden.core.data.augment import Augment
from ekiden.core.engine.method import Method
from ekiden.methods import FedGram, FedSeq
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo import approval
from ekiden.silos.silo.silo import ADMISSION, Silo
from ekiden.silos.silo.silo_file import Limits, SiloFile, make, read
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import Agreement, parse
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.asked import TERMS, said, task, with_recipe
from tests.silos.fakes import FakeNodes, mine, silo_file, with_keys

Command = Callable[..., tuple[int, str]]
NAMES = ("client-0", "client-1")
SEQUENCE: Recipe[Method] = Recipe(FedSeq(epochs=1), model="mlp", evaluate_every=0)
PLAN = RemotePlan(SEQUENCE, clients=",".join(NAMES), patience=1.0)
OTHER_RUN = "fedcba9876543210"


@pytest.fixture
def asked(tmp_path: Path) -> tuple[SiloFile, Agreement]:
    """A silo that wants plans approved, and the terms of a run that it refused."""
    file = silo_file(
        tmp_path, "client-0", '[limits]\napprove = true\n[link]\naddress = "link:8000"\n'
    )
    assert "nobody at client-0 has approved this plan" in hello(file, TERMS)
    return file, TERMS


def hello(file: SiloFile, terms: Agreement) -> str:
    """Why a silo does not agree to terms; empty if it does."""
    answer, _ = unpack(
        Silo(file, {"": mine(file.name)}).answer(pack(Ask("hello", terms.text(), "0"))), Answer
    )
    return answer.error


def waiting(file: SiloFile) -> list[str]:
    return [plan for plan, _ in approval.waiting(file)]


def test_a_run_begins_when_all_silos_have_approved_its_plan(
    tmp_path: Path, command: Command
) -> None:
    files, public = with_keys(tmp_path, NAMES, "[limits]\napprove = true\n")
    for number, file in enumerate(files):
        with pytest.raises(
            UserError, match=r"nobody at client-. has approved this plan: .* start the run again"
        ) as no:
            session.run(
                PLAN,
                FakeNodes(files),
                tmp_path / f"run{number}",
                public,
                lambda line: None,
                poll=0.01,
            )
        assert "\n" not in str(no.value)
        assert not (tmp_path / f"run{number}").exists()
        (plan,) = waiting(file)
        code, told = command("silo", "approve", str(file.path))
        assert code == 0
        for part in (plan, "method: fedseq", "epochs = 1", 'clients: ["client-0", "client-1"]'):
            assert part in told
        assert keys.fingerprint(public["client-1"]) in told
        assert "coordinator reads: the result only" in told
        assert command("silo", "approve", str(file.path), plan)[0] == 0
        assert waiting(file) == []
    result = session.run(
        PLAN, FakeNodes(files), tmp_path / "run", public, lambda line: None, poll=0.01
    )
    assert result.metrics
    for file in files:
        assert approval.approved(file) == []
    with pytest.raises(UserError, match="nobody at client-0 has approved this plan"):
        session.run(
            PLAN, FakeNodes(files), tmp_path / "again", public, lambda line: None, poll=0.01
        )


def test_an_approval_is_used_by_one_run(asked: tuple[SiloFile, Agreement]) -> None:
    file, terms = asked
    approval.approve(file, approval.digest(file, terms))
    other = replace(terms, run=OTHER_RUN)
    assert hello(file, other) == hello(file, terms) == "", "no run has begun yet"
    assert said(file, task(terms)) == said(file, task(terms)) == hello(file, terms) == ""
    assert "nobody" in hello(file, other)
    assert "nobody" in said(file, task(other))
    rmtree(file.folder / "runs" / terms.run)
    assert "nobody" in said(file, task(terms)), "a run that was removed does not begin again"


def test_two_runs_at_once_do_not_share_an_approval(
    asked: tuple[SiloFile, Agreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, terms = asked
    approval.approve(file, approval.digest(file, terms))
    assert said(file, task(terms)) == ""
    # Both looked before one of them began.
    others = tuple(step for step in ADMISSION if step is not approval.check)
    monkeypatch.setattr("ekiden.silos.silo.silo.ADMISSION", others)
    assert "another run has used the approval" in said(file, task(replace(terms, run=OTHER_RUN)))


CHANGES: dict[str, Any] = {
    "version": "another",
    "recipe": replace(TERMS.recipe, seed=1),
    "dataset": "another",
    "shape": (1, 8, 9),
    "classes": ("a", "b"),
    "mean": (0.5,),
    "std": (0.5,),
    "augment": Augment(flip=True),
    "inputs": "another",
    "clients": ("client-0", "other"),
    "keys": ("one",),
    "skips": True,
    "values": "another",
    "task": '{"kind": "regression"}',
    "schema": "another",
    "revises": "another",
    "measures": "another",
    "data": "another",
    "validation": True,
    "by": ("sex",),
    "evaluate_dp": "exact",
}


@pytest.mark.parametrize("name", [f.name for f in fields(Agreement) if f.name != "run"])
def test_an_approval_covers_nothing_but_the_plan(
    name: str, asked: tuple[SiloFile, Agreement]
) -> None:
    file, terms = asked
    plan = approval.digest(file, terms)
    approval.approve(file, plan)
    changed = replace(terms, **{name: CHANGES[name]})
    with pytest.raises(UserError, match=r"nobody|holds no data set"):
        approval.check(file, changed)
    with pytest.raises(UserError, match=r"another run|holds no data set"):
        approval.take(file, changed)
    assert approval.approved(file) == [plan]


def test_other_settings_of_a_method_are_another_plan(asked: tuple[SiloFile, Agreement]) -> None:
    file, terms = asked
    shown = approval.told(file, terms)
    approval.approve(file, approval.digest(file, terms))
    for name, value in plain(FedSeq(epochs=1)).items():
        other = {str: "uniform", bool: not value, int: 7, float: 0.5, type(None): "x"}.get(
            type(value), 7
        )
        values = json.loads(terms.text())
        values["recipe"]["hyperparameters"][name] = other
        try:
            changed = parse(json.dumps(values))
        except UserError:
            continue
        if changed == terms:
            continue
        assert "nobody" in hello(file, changed)
        assert approval.told(file, changed) != shown


@pytest.mark.parametrize("name", [f.name for f in fields(Recipe) if f.name != "method"])
def test_no_part_of_a_recipe_is_hidden_from_who_reads_the_plan(
    name: str, asked: tuple[SiloFile, Agreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(approval, "_read_by_server", lambda file, terms: "")
    file, terms = asked
    other: dict[str, Any] = {
        "training": Training(lr=0.5),
        "dp": "epsilon=8,delta=1e-5,clip=1",
        "evaluate_on": "own",
    }
    other |= {
        "model": "lenet",
        "pretrained": "x",
        "train": "head",
        "metric": "f1",
        "seed": 7,
        "evaluate_every": 7,
    }
    noisy = replace(terms.recipe, dp="epsilon=1,delta=1e-5,clip=1")
    shown, changed = (
        approval.told(file, replace(terms, recipe=recipe))
        for recipe in (noisy, replace(noisy, **{name: other[name]}))
    )
    assert shown != changed


def test_an_approval_is_for_one_coordinator(asked: tuple[SiloFile, Agreement]) -> None:
    file, terms = asked
    plan = approval.digest(file, terms)
    elsewhere = replace(file, link=replace(file.link, address="elsewhere:8000"))
    assert waiting(elsewhere) == []
    with pytest.raises(UserError, match="came from another SuperLink"):
        approval.approve(elsewhere, plan)
    approval.approve(file, plan)
    assert "nobody" in hello(elsewhere, terms)
    (file.path.parent / "ca.crt").write_text("one")
    known = replace(file, link=replace(file.link, certificate="ca.crt"))
    assert approval.digest(known, terms) != plan
    before = approval.digest(known, terms)
    (file.path.parent / "ca.crt").write_text("another")
    assert approval.digest(known, terms) != before


def test_a_plan_with_the_name_of_another_is_not_approved(asked: tuple[SiloFile, Agreement]) -> None:
    file, terms = asked
    plan = approval.digest(file, terms)
    path = file.folder / "plans" / f"{plan}.json"
    path.write_text(replace(terms, skips=True).text())
    with pytest.raises(UserError, match="is not the plan of that name"):
        approval.approve(file, plan)
    assert waiting(file) == []
    for name in ("../client-0", "", plan[:12], "x" * 64):
        with pytest.raises(UserError, match="no plan"):
            approval.approve(file, name)


@pytest.mark.parametrize(
    "name", [name for name in CHANGES if name not in ("keys", "clients", "revises")]
)
def test_nothing_of_a_plan_is_hidden_from_who_reads_it(
    name: str, asked: tuple[SiloFile, Agreement]
) -> None:
    file, terms = asked
    if name == "data":  # a silo that holds one alone names none
        file = replace(file, named={"one": file.data, "another": file.data})
        terms = replace(terms, data="one")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approval, "_read_by_server", lambda file, terms: "")
        shown = approval.told(file, terms)
        assert approval.told(file, replace(terms, **{name: CHANGES[name]})) != shown
        long = approval.told(file, replace(terms, schema="x" * 900))
        assert long != approval.told(file, replace(terms, schema="x" * 899 + "y"))
        named = approval.told(file, replace(terms, dataset="a\x1b[2Jb"))
        assert all(text.isprintable() for text in named.values())
        assert named != approval.told(file, replace(terms, dataset="a [2Jb"))


def test_a_rule_approves_plans_of_its_method_alone(tmp_path: Path) -> None:
    file = silo_file(
        tmp_path,
        "client-0",
        '[limits]\nlevel = "models"\nmin_clients = 2\napprove = true\n[allow.fedseq]\nepochs = [1]\nuntil = 2999-12-31\n',
        trusting=False,
    )
    assert hello(file, TERMS) == ""
    two = replace(TERMS, run=OTHER_RUN, recipe=replace(TERMS.recipe, method=FedSeq(epochs=2)))
    assert "allows only 1" in hello(file, two)
    assert waiting(file) == []
    measuring = replace(TERMS, run=OTHER_RUN, measures="0" * 64)
    assert "nobody" in hello(file, measuring)
    seeded = FedGram(dictionary="seed", min_active=10)
    assert "nobody" in hello(
        file, replace(TERMS, run=OTHER_RUN, recipe=replace(TERMS.recipe, method=seeded))
    )


def test_plans_that_wait_are_private_and_few(
    asked: tuple[SiloFile, Agreement], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, terms = asked
    folder = file.folder / "plans"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    monkeypatch.setattr(approval, "_MOST", 2)
    assert "nobody" in hello(file, replace(terms, dataset="b"))
    assert "2 plans wait for approval" in hello(file, replace(terms, dataset="c"))
    assert "nobody" in hello(file, terms), "who waits already stays"
    assert len(list(folder.iterdir())) == 2


def test_a_silo_whose_file_does_not_ask_for_approval_keeps_no_plans(tmp_path: Path) -> None:
    file = silo_file(tmp_path, "client-0")
    assert not read(file.path).limits.approve
    assert hello(file, TERMS) == ""
    assert not (file.folder / "plans").exists()


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        ({"methods": ("fedavg",)}, "does not allow 'fedseq'"),
        ({"model_bytes": 1000}, "client-0 allows 1000"),
        ({"epsilon": 1.0}, "trains without noise, client-0 allows epsilon 1"),
    ],
)
def test_limits_hold_for_approved_plans(
    limits: dict[str, Any], refused: str, asked: tuple[SiloFile, Agreement]
) -> None:
    """The operator approved the plan, and then wrote a lower limit into the file."""
    file, terms = asked
    approval.approve(file, approval.digest(file, terms))
    stricter = replace(file, limits=replace(file.limits, **limits))
    assert refused in hello(stricter, terms)
    assert refused in said(stricter, task(terms))
    assert hello(file, terms) == ""


def test_plans_need_an_approval_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert Limits().approve
    make(tmp_path / "a", "a", "link:8000", "digits")
    assert read(tmp_path / "a" / "silo.toml").limits.approve


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("epochs = [1]\n", "nobody at client-0 has approved"),
        ("until = 2020-01-31\n", "nobody at client-0 has approved"),
        ("until = 2999-12-31\n", ""),
    ],
)
def test_a_rule_agrees_to_plans_until_its_last_day(table: str, why: str, tmp_path: Path) -> None:
    more = f'[limits]\nlevel = "models"\nmin_clients = 2\napprove = true\n[allow.fedseq]\n{table}'
    assert why in hello(silo_file(tmp_path, "client-0", more, trusting=False), TERMS)
    assert bool(waiting(silo_file(tmp_path, "client-0", more, trusting=False))) == bool(why)


def test_a_run_ends_with_the_last_day_of_its_approval(
    asked: tuple[SiloFile, Agreement], monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Each request is refused from then on, until somebody approves the plan again."""
    file, terms = asked
    plan = approval.digest(file, terms)
    for until in ("2020-01-31", "soon"):
        code, told = command("silo", "approve", str(file.path), plan, "--until", until)
        assert (code, told.count("\n")) == (2, 1)
    assert command("silo", "approve", str(file.path), plan, "--until", "2998-12-31")[0] == 0
    assert hello(file, terms) == said(file, task(terms)) == ""

    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Later":
            return cls(2999, 1, 1)

    with monkeypatch.context() as patch:
        patch.setattr(approval, "datetime", Later)
        assert "nobody at client-0 has approved this plan now" in said(file, task(terms))
        assert "nobody at client-0 has approved this plan now" in hello(file, terms)
        approval.approve(file, plan, date(2999, 1, 1))
        assert hello(file, terms) == said(file, task(terms)) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"until": "2999-12-31"},
        {"until": "2000-01-01"},
        {"terms": "{}"},
        {"terms": "of another seed"},
        {"more": 1},
    ],
)
def test_an_approval_that_says_something_else_than_its_plan_is_none(
    change: dict[str, object], asked: tuple[SiloFile, Agreement]
) -> None:
    file, terms = asked
    plan = approval.digest(file, terms)
    given = approval.approve(file, plan)
    assert json.loads(given.terms)["recipe"]["method"] == "fedseq"
    path = file.folder / "plans" / f"{plan}.approved"
    if change == {"terms": "of another seed"}:
        change = {"terms": with_recipe(terms, seed=9).text()}
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    held = change == {"until": "2999-12-31"}
    assert ("nobody" in hello(file, terms)) != held, "the day is the operator's"
