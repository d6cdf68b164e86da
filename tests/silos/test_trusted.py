"""A silo executes a file for others only if its operator trusts just this content; whatever else a
coordinator names, nothing runs."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import ekiden
from ekiden import Hardware, Training
from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.methods import FedAvg, FedSeq, method_named
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import approval, trusted
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.agreement import Agreement
from tests.silos.asked import TERMS
from tests.silos.fakes import NAMES, FakeNodes, silos, with_keys
from tests.silos.sessions import assert_equal, here, plan_of
from tests.silos.test_approval import hello

Command = Callable[..., tuple[int, str]]
CODE = '''
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import ekiden
from ekiden.authoring import Client, Count, Fed, Method, State, Weights, mean, on_client


class FedSeq(Method):
    """It has the title of a method of the library."""


@dataclass(frozen=True)
class HalfSeq(Method):
    """Each client hands on the mean of the model that it received and the one that it trained."""

    epochs: Count = 1

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        while s.step < len(fed.clients):
            s = s.next(model=fed.call(self.train, fed.clients[s.step], s.model))
            yield s

    @on_client(gives="model")
    def train(self, client: Client, model: Weights) -> Weights:
        return mean([model, client.fit(model, epochs=self.epochs)])

    def steps(self, clients: int) -> int:
        return clients

    def cost(self, clients: int, model: int) -> int:
        return (clients - 1) * model


@dataclass(frozen=True)
class Quiet(HalfSeq):
    """It does not say what it gives."""

    @on_client
    def train(self, client: Client, model: Weights) -> Weights:
        return model


@ekiden.train
def sgd(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


@ekiden.train
def tells(model, loader):
    raise ValueError(f"the first label is {next(iter(loader))[1][0]}, patient 4711")


class Net(torch.nn.Sequential):
    def __init__(self, shape, classes):
        inputs = torch.Size(shape).numel()
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(inputs, classes))


def wipe():
    Path(MARKER).touch()
    return Net((1, 8, 8), 10)
'''


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The coordinator's file, which its user named; each silo has a copy of it."""
    text = f"MARKER = {str(tmp_path / 'executed')!r}\n{CODE}"
    for folder in ("coordinator", "silos"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(text)
    outside.trust(f"{tmp_path}/coordinator/mine.py:")
    return tmp_path / "coordinator" / "mine.py"


def federation(folder: Path, more: str = "") -> tuple[list[SiloFile], dict[str, str]]:
    return with_keys(folder / "silos", NAMES, f'[limits]\nmethods = ["fedavg"]\n{more}')


def run(
    files: list[SiloFile], public: dict[str, str], folder: Path, method: Any, **plan: Any
) -> Any:
    plan = {"model": "mlp", **plan}
    return session.run(
        plan_of(method, **plan), FakeNodes(files), folder, public, lambda line: None, poll=0
    )


def attacked(file: SiloFile, code: Path, public: dict[str, str], **names: str) -> str:
    """What a silo says to terms with names of code as an attacker writes them."""
    plan = plan_of(FedAvg(rounds=1), model="mlp", training=Training(loop=f"{code}:sgd"))
    held = ("dataset", "shape", "classes", "mean", "std", "augment", "inputs", "task")
    terms = replace(
        session.planned(plan, "0" * 16, public), **{name: getattr(TERMS, name) for name in held}
    )
    text = terms.text()
    for what, name in names.items():
        before = {"method": "fedavg", "model": "mlp", "loop": outside.by_content(f"{code}:sgd")}
        given = f'"{what}":{json.dumps(before.get(what, ""))}'
        assert given in text
        text = text.replace(given, f'"{what}":{json.dumps(name)}')
    return hello(file, cast(Agreement, _Text(text)))


class _Text:
    """Terms that no honest coordinator would write."""

    def __init__(self, text: str) -> None:
        self._text = text

    def text(self) -> str:
        return self._text


def test_a_method_in_a_file_runs_where_it_is_trusted(
    code: Path, tmp_path: Path, command: Command
) -> None:
    files, public = federation(tmp_path)
    method = method_named(f"{code}:HalfSeq")()
    with pytest.raises(UserError) as no:
        run(files, public, tmp_path / "run", method)
    line = re.search(r"`ekiden (silo trust client-0\.toml mine\.py)`", str(no.value))
    assert line is not None
    assert outside.by_content(f"{code}:HalfSeq") in str(no.value)
    for file in files:
        args = ["silo", "trust", str(file.path), str(tmp_path / "silos" / "mine.py")]
        answer, text = command(*args)
        assert answer == 0, text
    result = run(files, public, tmp_path / "run", method)
    assert_equal(result, here(method, model="mlp"))
    assert verify(tmp_path / "run").wrong == ()
    assert not (tmp_path / "executed").exists()


def trusting(tmp_path: Path, more: str = "") -> tuple[list[SiloFile], dict[str, str]]:
    """Silos whose operators trust their copy of the file."""
    files, public = federation(tmp_path, more)
    for file in files:
        outside.trust(f"{tmp_path}/silos/mine.py:", trusted.register(file))
    return files, public


@pytest.mark.parametrize("method", [FedSeq(epochs=2), FedAvg(rounds=2, epochs=1)])
def test_a_loop_and_a_network_in_a_file_run_where_they_are_trusted(
    method: Any, code: Path, tmp_path: Path
) -> None:
    files, public = trusting(tmp_path)
    files = [replace(f, limits=replace(f.limits, methods=("fedavg", "fedseq"))) for f in files]
    training = Training(batch_size=64, loop=f"{code}:sgd")
    model = f"{code}:Net"
    result = run(files, public, tmp_path / "run", method, model=model, training=training)
    hardware = Hardware(threads=1)
    alone = ekiden.run(method, silos(), model, training=training, hardware=hardware, seed=3)
    assert_equal(result, alone)


def test_the_plan_that_an_operator_reads_names_the_content(code: Path, tmp_path: Path) -> None:
    files, public = trusting(tmp_path, "approve = true\n")
    method = method_named(f"{code}:HalfSeq")()
    with pytest.raises(UserError, match=r"nobody at client-. has approved this plan"):
        run(files, public, tmp_path / "run", method)
    ((plan, terms),) = approval.waiting(files[0])
    told = approval.told(files[0], terms)
    assert told["files of code"] == outside.by_content(f"{code}:HalfSeq")
    assert told["method"].startswith(outside.by_content(f"{code}:HalfSeq"))
    approval.approve(files[0], plan)
    (tmp_path / "silos" / "mine.py").write_text("changed = True\n")
    with pytest.raises(UserError, match="which client-0 does not trust"):
        approval.read_terms(files[0], terms.text())


def test_another_content_under_the_name_of_a_trusted_file_does_not_run(
    code: Path, tmp_path: Path
) -> None:
    """The coordinator changed its file after the operators had read theirs, or lies about it."""
    files, public = trusting(tmp_path)
    known = outside.by_content(f"{code}:HalfSeq").rpartition("@")[2]
    silo = tmp_path / "silos" / "mine.py"
    code.write_text(f"{CODE}\nPath({str(tmp_path / 'executed')!r}).touch()\n")
    other = outside.by_content(f"{code}:HalfSeq")
    code.write_text(f"MARKER = {str(tmp_path / 'executed')!r}\n{CODE}")
    for name in (
        other,
        f"other.py:HalfSeq@{known}",
        f"mine.py:HalfSeq@{'0' * 32}",
        f"{silo}:HalfSeq@{known}",
        f"{silo}:HalfSeq",
        "mine.py:HalfSeq",
        "mine.py:HalfSeq@",
    ):
        said = attacked(files[0], code, public, method=name)
        assert "which client-0 does not trust" in said, name
    assert not (tmp_path / "executed").exists()


def test_a_trusted_file_that_was_replaced_does_not_run(code: Path, tmp_path: Path) -> None:
    """Also if it ran before in the same process, and if it is the coordinator that replaced it."""
    files, public = trusting(tmp_path)
    method = method_named(f"{code}:HalfSeq")()
    run(files, public, tmp_path / "run", method)
    silo = tmp_path / "silos" / "mine.py"
    silo.write_text(f"{silo.read_text()}\nPath(MARKER).touch()\n")
    with pytest.raises(UserError, match=r"does not trust.*`ekiden silo trust client-\d.toml mine"):
        run(files, public, tmp_path / "again", method)
    assert not (tmp_path / "executed").exists()
    code.write_text(silo.read_text())
    outside.trust(f"{code}:")
    method = method_named(f"{code}:HalfSeq")()
    (tmp_path / "executed").unlink()  # by the coordinator, who may
    with pytest.raises(UserError, match="does not trust"):
        run(files, public, tmp_path / "third", method)
    assert not (tmp_path / "executed").exists()


def test_what_the_operator_runs_himself_is_not_what_others_may_run(
    code: Path, tmp_path: Path
) -> None:
    """`ekiden trust` is for the operator's own commands, and for none of a coordinator."""
    files, public = federation(tmp_path)
    outside.trust(f"{tmp_path}/silos/mine.py:")
    said = attacked(files[0], code, public, method=outside.by_content(f"{code}:HalfSeq"))
    assert "which client-0 does not trust" in said


def test_of_a_trusted_file_only_what_is_declared_is_called(code: Path, tmp_path: Path) -> None:
    files, public = trusting(tmp_path)
    here = {name: outside.by_content(f"{code}:{name}") for name in ("wipe", "Net")}
    for changes, why in (
        ({"model": here["wipe"]}, "is not a class that derives from torch.nn.Module"),
        ({"method": here["wipe"]}, "is not a method"),
        ({"loop": here["wipe"]}, "is not a training loop"),
        ({"loop": here["Net"]}, "is not a training loop"),
    ):
        assert why in attacked(files[0], code, public, **changes), changes
    with pytest.raises(UserError, match="does not declare what its tasks tell"):
        run(files, public, tmp_path / "run", method_named(f"{code}:Quiet")())
    assert not (tmp_path / "executed").exists()


def test_a_class_with_the_title_of_a_library_method_has_none_of_its_permissions(
    code: Path, tmp_path: Path
) -> None:
    files, public = federation(tmp_path)
    file = replace(files[0], limits=replace(files[0].limits, methods=("fedseq",)))
    said = attacked(file, code, public, method=outside.by_content(f"{code}:FedSeq"))
    assert "which client-0 does not trust" in said


def test_what_a_loop_says_when_it_fails_stays_at_the_silo(code: Path, tmp_path: Path) -> None:
    files, public = trusting(tmp_path)
    with pytest.raises(UserError, match="fails; its own log says why") as no:
        run(
            files,
            public,
            tmp_path / "run",
            FedAvg(rounds=1),
            training=Training(loop=f"{code}:tells"),
        )
    assert "4711" not in str(no.value)
    assert "4711" in (files[0].folder / "requests.log").read_text()


def test_names_of_code_stand_in_no_other_place_of_the_terms(code: Path, tmp_path: Path) -> None:
    """Who knows where the trusted file lies at a silo could name any function in it as a metric."""
    files, public = trusting(tmp_path)
    own = f"{tmp_path / 'silos' / 'mine.py'}:wipe"
    for name in (own, outside.by_content(f"{code}:wipe")):
        task = json.dumps({"kind": "classification", "metric": name})
        assert "code in a file: refused" in attacked(files[0], code, public, metric=name)
        assert "classification has no metric" in attacked(files[0], code, public, task=task)
