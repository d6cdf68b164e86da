"""`ekiden check` and `ekiden new`: what holds passes, and each broken method is caught with the
right line."""

import re
from pathlib import Path
from typing import Any

import pytest

from ekiden import FederatedData, UserError, run
from ekiden.core.base import outside
from ekiden.lab import conformance
from ekiden.lab.conformance import CHECKS, Check, Finding, check, line, rules
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, method_named
from tests.lab.conformance.ridge import Ridge
from tests.lab.conformance.written import GOOD, written

ROOT = Path(__file__).parents[3]
CALL = "s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))\n"
FIT = "return client.fit(model, epochs=self.epochs)\n"
PROCESSES = rules.same_on_processes
BROKEN: dict[str, tuple[dict[str, str], Check, str]] = {
    "state kept in self": (
        {
            CALL: CALL
            + '            object.__setattr__(self, "done", getattr(self, "done", 0) + 1)\n'
            "            assert self.done == s.step\n"
        },
        rules.resumes,
        "after step 1 cannot go on: is all that it knows in State and client.state? (FILE, line "
        "22, fails: Assert",
    ),
    "state of a task kept in self": (
        {
            FIT: 'object.__setattr__(self, "n", getattr(self, "n", 0) + 1)\n'
            "        return model.with_params(client.fit(model, epochs=self.epochs).params * (1 + "
            "self.n / 100))\n"
        },
        rules.resumes,
        "a run that was stopped gives another metrics.jsonl, model.safetensors: is all that it "
        "knows in State",
    ),
    "cost wrong": (
        {"(clients - 1) * model": "clients * model"},
        rules.ledger_equals_the_cost,
        "1212 bytes moved between 4 clients, `cost` says 1616 (M is 404)",
    ),
    "an argument not annotated": (
        {"model: Weights)": "model)"},
        rules.tasks_are_annotated,
        "train of Mine does not say the type of 'model': annotate it",
    ),
    "a result not annotated": (
        {" -> Weights": ""},
        rules.tasks_are_annotated,
        "train of Mine does not say the type of what it returns: annotate it",
    ),
    "not a dataclass": (
        {"@dataclass(frozen=True)\n": ""},
        rules.is_a_frozen_dataclass,
        "the class is not a dataclass: write @dataclass(frozen=True) above it",
    ),
    "cost missing": (
        {GOOD[GOOD.index("    def cost") :]: ""},
        rules.is_a_frozen_dataclass,
        "the class does not define cost",
    ),
    "steps wrong": (
        {"return clients\n": "return clients + 1\n"},
        rules.ends_after_its_steps,
        "a run over 4 clients has 4 steps, `steps` says 5",
    ),
    "too many steps": (
        {"return clients\n": "return clients - 1\n"},
        rules.ends_after_its_steps,
        "a run over 4 clients has more than 3 steps, `steps` says 3",
    ),
    "torch's own random numbers": (
        {
            FIT: "noise = torch.randn(len(model.params))\n"
            + 8 * " "
            + "return client.fit(model.with_params(model.params + 0.1 * noise), epochs=self.epochs)\n"
        },
        rules.repeats,
        "a second run with the same seed gives another model: does it draw from torch's own random "
        "numbers?",
    ),
    "a task not marked": (
        {
            "    @on_client\n": "",
            "    def steps": "    @on_client\n    def other(self, client: Client) -> int:\n"
            "        return 1\n\n    def steps",
        },
        rules.tasks_are_annotated,
        "train is called at clients, but is not marked @on_client",
    ),
    "no default": (
        {"Count = 20": "Count"},
        rules.every_field_has_default_and_help,
        "epochs has no default",
    ),
    "no help": (
        {'    """E, epochs at each client"""\n': ""},
        rules.every_field_has_default_and_help,
        "epochs has no text below it",
    ),
    "private state without private": (
        {FIT: "client.state = model\n        " + FIT},
        rules.keeps_what_it_declares,
        "train: it keeps a Weights there, but the class has no `traits = Traits(private=TYPE)`",
    ),
    "private state of another type": (
        {
            FIT: "client.state = model\n        " + FIT,
            "    epochs: Count": "    traits = Traits(private=torch.Tensor)\n    epochs: Count",
        },
        rules.keeps_what_it_declares,
        "train: it keeps a Weights there, but the class says Tensor",
    ),
    "a pass not counted": (
        {
            FIT: "for x, _ in client.batches(passes=0):\n            client.network(model)(x)\n        "
            + FIT
        },
        rules.counts_every_pass,
        "forward, ",
    ),
    "a flag that is taken": (
        {"epochs": "seed"},
        rules.flags_do_not_collide,
        "--seed is a flag of `ekiden run` already",
    ),
    "any value accepted": (
        {"epochs: Count": "epochs: object"},
        rules.refuses_wrong_values,
        "epochs='3' is accepted",
    ),
    "an error of its own": (
        {FIT: "return client.fitt(model)\n"},
        rules.ends_after_its_steps,
        "FILE, line 25, fails: AttributeError: 'Client' object has no attribute 'fitt'",
    ),
    "learns nothing": (
        {FIT: "return model\n"},
        rules.learns,
        "at best on three classes, at least 0.45 is needed",
    ),
    "a result of another type": (
        {FIT: "client.fit(model, epochs=self.epochs)\n        return model.params\n"},
        rules.ends_after_its_steps,
        "fails: ",
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_method_is_caught_with_the_right_line(fault: str, folder: Path) -> None:
    changes, breaks, found = BROKEN[fault]
    kind = method_named(written(folder, changes))
    *before, last = check(kind, checks=CHECKS[: CHECKS.index(breaks) + 1])
    assert [finding for finding in before if not finding.holds] == []
    assert last.line == line(breaks)
    assert found in last.broken.replace(str(folder / "mine.py"), "FILE")
    assert "\n" not in last.broken


def test_what_only_another_process_shows(folder: Path) -> None:
    """A task that reads what the server's process knows."""
    changes = {
        CALL: 'memory["factor"] = 1.01\n            ' + CALL,
        FIT: "trained = client.fit(model, epochs=self.epochs)\n        "
        'return trained.with_params(trained.params * memory.get("factor", 1.0))\n',
    }
    findings = check(
        method_named(written(folder, changes)), checks=[rules.repeats, rules.resumes, PROCESSES]
    )
    assert [finding.holds for finding in findings] == [True, True, False]
    assert "a run with worker processes gives another model" in findings[2].broken


def test_a_method_that_does_not_train_keeps_the_contract() -> None:
    assert [finding for finding in check(Ridge) if not finding.holds] == []


def test_whole_numbers_that_may_not_be_2_stay_as_they_are(folder: Path) -> None:
    changes = {
        "from dataclasses import "
        "dataclass\n": "from dataclasses import dataclass\nfrom typing import Annotated\n",
        "import Client, Count, ": "import Client, Count, Range, ",
        "    epochs: "
        "Count": '    width: Annotated[int, Range(least=16)] = 64\n    """w"""\n    epochs: Count',
    }
    assert [
        finding for finding in check(method_named(written(folder, changes))) if not finding.holds
    ] == []


def test_what_follows_from_a_failure_is_not_told_again(folder: Path) -> None:
    findings = check(method_named(written(folder, BROKEN["an error of its own"][0])))
    assert [finding.name for finding in findings if finding.broken] == ["ends_after_its_steps"]
    assert not any(finding.tried for finding in findings[-3:])


def test_the_guide_s_method_runs_and_keeps_the_contract(folder: Path) -> None:
    text = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
    (block,) = [
        found
        for found in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
        if "class HalfSeq(" in found
    ]
    (folder / "mine.py").write_text(block)
    outside.trust("mine.py:HalfSeq")
    findings = check(
        method_named("mine.py:HalfSeq"), checks=[one for one in CHECKS if one is not PROCESSES]
    )
    assert [finding for finding in findings if not finding.holds] == []


def test_a_missing_annotation_is_refused_by_a_run_at_once(
    folder: Path, blobs: FederatedData
) -> None:
    method = written(folder, {"model: Weights)": "model)"})
    with pytest.raises(
        UserError,
        match=r"train of Mine does not say the type of 'model': annotate it, as values are",
    ):
        run(method, blobs, Tiny, folder=folder / "run")
    assert not (folder / "run").exists()


def test_a_finding_that_was_not_tried_does_not_hold() -> None:
    assert not Finding("", "", tried=False).holds
    assert not Finding("", "", broken="x").holds
    assert Finding("", "").holds


@pytest.mark.parametrize(
    ("given", "line"),
    [("fedsq", "unknown method 'fedsq': did you mean 'fedseq'"), (3, "int is not")],
)
def test_what_is_no_method_is_refused_in_one_line(given: Any, line: str) -> None:
    with pytest.raises(UserError, match=line):
        conformance.check(given)


def test_a_name_an_instance_and_a_class_are_the_same_method() -> None:
    one = (rules.is_a_frozen_dataclass,)
    assert conformance.check("fedseq", checks=one) == conformance.check(
        FedSeq(epochs=3), checks=one
    )
    assert conformance.check(FedSeq, checks=one)[0].holds
