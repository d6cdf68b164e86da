"""A run folder that somebody changed or invented does not pass for what the silos signed."""

import json
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import read_tensors, safetensors_chunks, with_digest, write
from ekiden.core.base.settings import Hardware
from ekiden.core.engine import wire
from ekiden.core.engine.folder import Marks, read_lines
from ekiden.core.engine.method import INITIAL, Method, Model
from ekiden.core.engine.setup import as_module
from ekiden.core.engine.store import read
from ekiden.core.engine.wire import Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.training.weights import Weights
from ekiden.methods import FedAvg, FedSeq, Local
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.verify import Verdict, terms, verify
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import custody, keys, sealing
from ekiden.silos.trust.agreement import no_samples
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from ekiden.silos.trust.report import Reported, SiloReport
from tests.silos.fakes import NAMES, FakeNodes, mine, with_keys
from tests.silos.sessions import assert_equal, far, here

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

LIMITS = '[limits]\nmethods = ["fedseq", "fedavg", "local"]\n'


@dataclass(frozen=True)
class Made:
    """A run: its folder, the silos' public keys, the result."""

    method: Method
    keys_of: Path
    run: Path
    public: dict[str, str]
    model: Weights | None
    said: list[bytes]

    def sign(self, client: str) -> sealing.Sign:
        return partial(keys.sign, self.keys_of / f"{client}.key")

    def setup(self) -> Setup:
        agreed = terms(self.run)
        return agreed.setup(no_samples(agreed), Hardware(threads=1))

    def wrong(self) -> str:
        return "; ".join(verify(self.run, self.public).wrong)

    def forge(self, model: Model | None) -> None:
        """Say that this is the model of the last state."""
        file = self.run / "state.safetensors"
        state, marks = read(file, tuple[type(self.method.start()), Marks])  # type: ignore[misc]
        said = read_tensors(file)[1]
        changed = wire.chunks((replace(state, model=model), marks))
        write(file, with_digest(changed, config=said["config"], written=said["written"]))

    def change_model(self, name: str = "model.safetensors") -> None:
        tensors = safetensors.torch.load_file(self.run / name)
        next(iter(tensors.values())).view(-1)[0] += 1e-3
        write(self.run / name, with_digest(safetensors_chunks(tensors, {"format": "pt"})))

    def copied(self, folder: Path) -> "Made":
        return replace(self, run=Path(shutil.copytree(self.run, folder / "run")))

    def keys(self, folder: Path) -> Path:
        folder.mkdir()
        for name, key in self.public.items():
            (folder / f"{name}.pub").write_text(key)
        return folder


def make(method: Method, folder: Path, away: str = "") -> Made:
    """A run; with `away`, one without this silo."""
    files, public = with_keys(folder, NAMES, LIMITS)
    nodes = FakeNodes(files)

    def lose(node: int, data: bytes) -> Lost | None:
        gone = away and unpack(data, Ask)[0].kind == "task" and node == 100 + NAMES.index(away)
        return Lost("unsent") if gone else None

    nodes.lose = lose
    absent = {"absent": "skip", "patience": 0.01} if away else {}
    weights = far(method, nodes, folder / "run", public, **absent).weights
    return Made(
        method,
        folder,
        folder / "run",
        public,
        weights,
        [*nodes.said, *(data for _, data in nodes.log)],
    )


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(FedSeq(epochs=1), tmp_path_factory.mktemp("relay"))


@pytest.mark.slow
def test_the_state_must_be_the_one_in_which_the_method_ends(relay: Made, tmp_path: Path) -> None:
    """Nobody signs its file; a model instead of a Ref, or another Ref, would let any model pass."""
    assert verify(relay.run, relay.public).result
    others: list[Model | None] = [relay.model, Ref("client-1", "1-0-train"), INITIAL, None]
    for number, model in enumerate(others):
        made = relay.copied(tmp_path / str(number))
        made.forge(model)
        assert "state.safetensors is not the state in which the method ends" in made.wrong()
        made.change_model()
        assert (
            "model.safetensors is not the model that client-2 signed as 2-0-train" in made.wrong()
        )


def test_files_that_are_no_result_are_named(relay: Made, tmp_path: Path) -> None:
    made = relay.copied(tmp_path)
    (made.run / "personal").mkdir()
    shutil.copy(made.run / "model.safetensors", made.run / "personal" / "client-0.safetensors")
    assert made.wrong() == "personal/client-0.safetensors is not a result of fedseq"


def test_personal_models_are_those_that_silos_signed(tmp_path: Path) -> None:
    made = make(Local(epochs=1), tmp_path)
    assert made.wrong() == ""
    made.change_model("personal/client-1.safetensors")
    assert made.wrong().startswith(
        "personal/client-1.safetensors is not the model that client-1 signed"
    )


def test_a_result_of_the_server_is_verified_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(FedAvg(rounds=1, epochs=1), tmp_path)
    verdict = verify(made.run, made.public)
    assert (verdict.wrong, verdict.result) == ((), False)
    assert any("what the server made of the values" in str(line) for line in verdict.unproven)
    call(["verify", str(made.run)])
    assert "each signed by its silo, and the result" not in " ".join(
        capsys.readouterr().out.split()
    )
    made.change_model()
    assert made.wrong() == "model.safetensors is not the model in state.safetensors"


def test_own_keys_do_not_pass_for_those_that_are_given(relay: Made, tmp_path: Path) -> None:
    """A folder forged with the forger's own keys, which says in config.json that no silo took
    part."""
    forged = relay.copied(tmp_path)
    config = json.loads((forged.run / "config.json").read_text())
    (forged.run / "config.json").write_text(json.dumps(config | {"clients": {}}))
    assert "config.json says clients {}, what silos signed gives nothing" in forged.wrong()
    other = replace(relay, public={**relay.public, "client-0": relay.public["client-1"]})
    with pytest.raises(UserError, match=r"is not what the silos signed: .*clients"):
        call(["verify", str(forged.run), "--keys", str(other.keys(tmp_path / "keys"))])
    assert any("another key of client-0" in line for line in verify(forged.run, other.public).wrong)
    assert sum("another key of" in line for line in verify(forged.run, {}).wrong) == 3
    (tmp_path / "keys" / "client-2.pub").unlink()
    with pytest.raises(UserError, match=r"there is no public key .*client-2.pub"):
        call(["verify", str(forged.run), "--keys", str(tmp_path / "keys")])


def test_nobody_is_absent_where_the_terms_skip_nobody(relay: Made, tmp_path: Path) -> None:
    """The last hop cut off: its record gone, an unsigned row that says why, the model of the hop
    before."""
    made = relay.copied(tmp_path)
    rows = read_lines(made.run / "ledger.jsonl")
    cut = rows[-1] | {
        "step": 2,
        "source": "client-2",
        "target": "server",
        "bytes": 0,
        "missing": True,
    }
    (made.run / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, cut]))
    records = (made.run / "custody.jsonl").read_text().splitlines(keepends=True)
    (made.run / "custody.jsonl").write_text("".join(records[:2] + records[3:]))
    made.forge(Ref("client-1", "1-0-train"))
    assert "step 3, client-2, train: nobody signed it" in made.wrong()


def test_who_was_absent_nobody_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(FedSeq(epochs=1), tmp_path, away="client-1")
    verdict = verify(made.run, made.public)
    assert (verdict.wrong, verdict.result) == ((), True)
    call(["verify", str(made.run)])
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "not proven: ledger.jsonl (missing): absent, as the ledger says and nobody signs: client-1 "
        "in step 2" in said
    )
    assert "not proven: network.jsonl, passes.jsonl, times.jsonl" in said
    assert "verified: 2 tasks, each signed by its silo, and the result is what they gave" in said


def test_a_key_of_a_name_that_means_another_party_is_not_registered(
    relay: Made, tmp_path: Path
) -> None:
    (tmp_path / "server.pub").write_text(relay.public["client-0"])
    with pytest.raises(UserError, match="no silo can be called 'server'"):
        call(["federation", "init", str(tmp_path / "fed"), str(tmp_path / "server.pub")])
    assert not (tmp_path / "fed").exists()


# What the folder reports.


def leaves(value: Any, path: Path = Path()) -> Iterator[tuple[Path, Callable[[Any], None], Any]]:
    """Every plain value in `value`: its place, what sets it, and what it is now."""
    parts = enumerate(value) if isinstance(value, list) else value.items()
    for name, part in list(parts):
        inner = path if isinstance(value, list) else path / str(name)
        if isinstance(part, (dict, list)) and part:
            yield from leaves(part, inner)
        else:
            yield inner, partial(value.__setitem__, name), part


def another(value: Any) -> Any:
    """A value of the same type that is not `value`."""
    if value is None:
        return 0.5
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return value + "x" if isinstance(value, str) else {"x": 1}


EACH = ("metrics.jsonl", "ledger.jsonl", "custody.jsonl")


def forgeries(run: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Change one thing after the other in files of a run folder and in its models; yield the file
    and the field."""
    for name in names:
        file = run / name
        if not file.exists():
            continue  # nothing moves in a run where each trains alone
        before = file.read_text()
        rows = [json.loads(line) for line in before.splitlines()]
        last = {json.dumps(sorted(row)): i for i, row in enumerate(rows)}  # of each kind of line
        for i in last.values():
            for place, put, value in leaves(rows[i]):
                put(another(value))
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                yield name, ".".join(place.parts)
                put(value)
            if name != "config.json":
                for label, changed in (
                    ("(a line gone)", []),
                    ("(a line twice)", [rows[i], rows[i]]),
                ):
                    file.write_text(
                        "".join(
                            json.dumps(row) + "\n" for row in [*rows[:i], *changed, *rows[i + 1 :]]
                        )
                    )
                    yield name, label
        if name != "config.json":
            file.write_text("")
            yield name, "(emptied)"
        file.write_text(before)
    for file in (*run.glob("model.safetensors"), *run.glob("personal/client-1.safetensors")):
        held = file.read_bytes()
        tensors = safetensors.torch.load_file(file)
        name = file.relative_to(run).as_posix()
        for tensor in tensors:
            write(
                file, with_digest(safetensors_chunks({**tensors, tensor: tensors[tensor] + 1}, {}))
            )
            yield name, tensor
        write(file, with_digest(safetensors_chunks(tensors, {"format": "else"})))
        yield name, "metadata"
        file.write_bytes(held)


@pytest.mark.parametrize(
    ("method", "names", "each"),
    [
        (FedSeq(epochs=1), ("config.json", *EACH, "network.jsonl"), 16),
        pytest.param(
            FedSeq(epochs=1), ("config.json", *EACH, "network.jsonl"), 1, marks=pytest.mark.slow
        ),
        pytest.param(FedAvg(rounds=2, epochs=1), EACH, 1, marks=pytest.mark.slow),
        pytest.param(Local(epochs=1), EACH, 1, marks=pytest.mark.slow),
    ],
    ids=["relay, one of 16", "relay", "server", "alone"],
)
def test_every_field_of_a_run_folder_is_checked_or_said_to_be_unproven(
    method: Method, names: Sequence[str], each: int, tmp_path: Path
) -> None:
    """There is nothing in between: a change that is not noticed must be in the command's list."""
    made = make(method, tmp_path)
    assert made.wrong() == ""
    tried, passed, unlisted = 0, set(), []
    for file, field in forgeries(made.run, names):
        tried += 1
        if (tried % each and file != "network.jsonl") or (verdict := noticed(made)) is None:
            continue
        passed.add((file, field.split(".")[0]))
        listed = [
            claim
            for claim in verdict.unproven
            if any(fnmatch(file, pattern) for pattern in claim.files)
            and (
                not claim.names
                or any(field == name or field.startswith(f"{name}.") for name in claim.names)
            )
        ]
        if not listed:
            unlisted.append((file, field))
    assert unlisted == []
    # where each trains alone, the coordinator has little
    assert tried > (20 if isinstance(method, Local) else 60)
    allowed = {("config.json", "hardware"), ("config.json", "remote_plan")}
    if method.title() == "fedavg":  # what the server did, and how much of that it reported
        allowed |= {
            ("ledger.jsonl", f) for f in ("step", "source", "target", "task", "missing", "value")
        }
        allowed |= {
            ("metrics.jsonl", "forward"),
            ("metrics.jsonl", "backward"),
            ("custody.jsonl", "(a line gone)"),
        }
    free = {one for one in passed if one[0] != "network.jsonl" and one[1] != "metadata"}
    assert ("network.jsonl" in names) == (("network.jsonl", "sent") in passed)
    assert free <= allowed  # all the rest was noticed


def noticed(made: Made) -> Verdict | None:
    """What `ekiden verify` says about a folder in which nothing is wrong; None if it ends with code
    2."""
    try:
        verdict = verify(made.run, made.public)
    except UserError as error:
        lines = [str(error)]
    else:
        if not verdict.wrong:
            return verdict
        lines = list(verdict.wrong)
    assert all(line and "\n" not in line for line in lines)
    return None


# What silos sign.


def signed(made: Made, row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """An entry with changes, signed by its silo all the same."""
    entry = replace(custody.parse(json.dumps(row)), **changes)
    found: dict[str, Any] = json.loads(custody.signed(entry, made.sign(entry.client)))
    return found


def hop_of(row: dict[str, Any]) -> custody.Hop:
    hop = custody.parse(json.dumps(row))
    assert isinstance(hop, custody.Hop)
    return hop


EMPTY = SiloReport(torch.zeros(1, 1, dtype=torch.int64), {})


def test_what_silos_sign_follows_from_the_method_and_from_each_other(
    relay: Made, tmp_path: Path
) -> None:
    made = relay.copied(tmp_path)
    rows = read_lines(made.run / "custody.jsonl")

    def wrong(number: int, **changes: Any) -> str:
        new = [*rows[:number], signed(relay, rows[number], **changes), *rows[number + 1 :]]
        (made.run / "custody.jsonl").write_text("".join(json.dumps(row) + "\n" for row in new))
        return made.wrong()

    assert wrong(1) == ""
    assert (
        wrong(1, taken=())
        == "step 2, client-1, train: did not take the values that the method says"
    )
    taken = hop_of(rows[1]).taken[0]
    assert "did not take the values" in wrong(
        1, taken=(taken, replace(taken, owner="client-2", key="2-0-train"))
    )
    assert "1-0-train has" not in wrong(1)
    assert "0-0-train has 1 bytes, client-0 signed" in wrong(1, taken=(replace(taken, size=1),))
    train, val, test = hop_of(rows[1]).samples
    for k, others in enumerate(((10**9, val, test), (train, 10**9, test))):
        assert f"config.json says clients.client-1.{k} " in wrong(1, samples=others)
    assert (
        "client-1 had other samples or labels in what client-1 measured after step 3 than in "
        "step 2" in wrong(1, data="0")
    )
    size = hop_of(rows[1]).size
    assert f"ledger.jsonl, line 2, says bytes {size}, what silos signed gives {size + 1}" in wrong(
        1, size=size + 1
    )
    assert "metrics.jsonl, line 2, says forward" in wrong(1, forward=0)
    assert "metrics.jsonl, line 3, says backward" in wrong(1, backward=0)
    told = custody.parse(json.dumps(rows[4]))
    assert isinstance(told, custody.Tally)
    found = wire.decode(custody.bytes_of(told.report), Reported)
    assert found.masked is not None

    def report(**changes: Any) -> dict[str, Any]:
        return {"report": custody.text_of(wire.encode(replace(found, **changes)))}

    numbers = [found.masked.numbers[0] + 1, *found.masked.numbers[1:]]
    assert "does not open" in wrong(4, **report(masked=replace(found.masked, numbers=numbers)))
    assert "give no sum" in wrong(4, **report(masked=None, shown=EMPTY))
    assert "give no sum" in wrong(4, **report(shown=EMPTY))
    assert "line 3: what client-1 signed of its tests cannot be read" in wrong(4, report="!")
    assert "client-1 did not measure the models that client-0 measured" in wrong(4, models=())
    assert "the models in the folder are not those that client-0 measured" in wrong(
        3, models=("0" * 64,)
    )
    assert "client-1 measured models after step 9, 3 are done" in wrong(4, step=9)
    assert "what client-1 measured after step 3: is of another run" in wrong(4, terms="0")
    rows = [*rows[:3], *(signed(relay, row, step=2, models=()) for row in rows[3:])]
    assert "client-0 measured another number of models after step 2 than the run has" in wrong(1)


def test_reports_that_silos_did_not_sign_are_named(relay: Made, tmp_path: Path) -> None:
    """Each of these passed once."""
    made = relay.copied(tmp_path)

    def wrong(name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> str:
        file = made.run / name
        before = file.read_text()
        file.write_text("".join(json.dumps(row) + "\n" for row in change(read_lines(file))))
        said = made.wrong()
        file.write_text(before)
        return said

    def last(**changes: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        return lambda rows: [*rows[:-1], rows[-1] | changes]

    def first(**changes: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
        return lambda rows: [rows[0] | changes, *rows[1:]]

    assert "ledger.jsonl, line 1, says source nothing, what silos signed gives client-0" in wrong(
        "ledger.jsonl", lambda rows: []
    )
    assert "ledger.jsonl, line 2, says bytes 1, what silos signed gives" in wrong(
        "ledger.jsonl", last(bytes=1)
    )
    assert "ledger.jsonl, line 3, says" in wrong("ledger.jsonl", lambda rows: [*rows, rows[0]])
    assert "ledger.jsonl, line 1, says source client-1" in wrong(
        "ledger.jsonl", lambda rows: rows[::-1]
    )
    assert "metrics.jsonl, line 3, says accuracy 1.0, what silos signed gives" in wrong(
        "metrics.jsonl", last(accuracy=1.0)
    )
    assert "metrics.jsonl, line 3, says client_worst" in wrong(
        "metrics.jsonl", last(client_worst=1.0)
    )
    assert "metrics.jsonl, line 1, says bytes 9" in wrong("metrics.jsonl", first(bytes=9))
    assert "metrics.jsonl, line 1, says accuracy 0.5" in wrong("metrics.jsonl", first(accuracy=0.5))
    assert "metrics.jsonl, line 3, says bytes nothing, what silos signed gives" in wrong(
        "metrics.jsonl", lambda rows: rows[:-1]
    )
    assert "config.json says model_bytes 1, " in wrong("config.json", first(model_bytes=1))
    assert "config.json says clients.client-0.0 1, what silos signed gives" in wrong(
        "config.json",
        lambda rows: [rows[0] | {"clients": rows[0]["clients"] | {"client-0": [1, 2, 3]}}],
    )
    tallies = [lambda rows: rows[:3], lambda rows: rows[:4] + rows[5:]]
    assert all(
        "nobody signed what client-1 measured after step 3" in wrong("custody.jsonl", cut)
        for cut in tallies
    )


def test_a_model_of_the_server_is_the_one_that_silos_measured(tmp_path: Path) -> None:
    """State and model forged alike: nobody signed the mean, but those who measured it signed what
    it was."""
    made = make(FedAvg(rounds=1, epochs=1), tmp_path)
    assert made.model is not None
    other = made.model.with_params(made.model.params * 2)
    module = as_module(made.setup().build, other)
    write(
        made.run / "model.safetensors",
        with_digest(safetensors_chunks(dict(module.state_dict()), {})),
    )
    made.forge(other)
    assert (
        "the models in the folder are not those that client-0 measured after step 1" in made.wrong()
    )


def test_changed_labels_between_hops_are_noticed(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES, LIMITS)
    nodes = Changing(files, hide=True)
    far(FedSeq(epochs=1, rounds=2), nodes, tmp_path / "run", public)
    wrong = verify(tmp_path / "run", public).wrong
    assert wrong == tuple(
        f"client-1 had other samples or labels in {where} than in step 2, client-1, train"
        for where in ("step 5, client-1, train", "what client-1 measured after step 6")
    )


def test_a_silo_whose_data_changed_refuses_to_go_on(tmp_path: Path) -> None:
    method, (files, public) = FedSeq(epochs=1, rounds=2), with_keys(tmp_path, NAMES, LIMITS)
    with pytest.raises(UserError) as told:
        far(method, Changing(files), tmp_path / "run", public)
    said = str(told.value)
    assert re.match(
        "silo client-1: client-1 holds other samples or labels than when run [0-9a-f]{16} began ",
        said,
    )
    assert said.endswith("put them back, or start a new run")
    assert "\n" not in said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    assert {row["step"] for row in rows} <= {
        0,
        1,
        2,
        3,
        4,
    }  # client-1 had its second turn in the fifth step
    assert_equal(far(method, FakeNodes(files), tmp_path / "run", public), here(method))


class Changing(FakeNodes):
    """Silos of which client-1 gets other labels after its first task, and may remove what it noted
    of them."""

    def __init__(self, files: Sequence[SiloFile], *, hide: bool = False) -> None:
        super().__init__(files)
        self._hide = hide

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        dataset, client = mine(file.name)
        done = any(n == node and unpack(data, Ask)[0].kind == "task" for n, data in self.log[:-1])
        if node == 101 and done:
            samples = replace(client.train.samples, y=client.train.samples.y.roll(1))
            client = replace(client, train=replace(client.train, samples=samples))
            for noted in file.folder.glob("runs/*/data") if self._hide else ():
                noted.unlink()
        return Silo(file, {"": (dataset, client)})


def test_a_fingerprint_tells_nothing_without_the_salt(relay: Made, tmp_path: Path) -> None:
    _, client = mine("client-0")
    salt = sealing.kept_secret(tmp_path, "fingerprint")
    assert (
        sealing.kept_secret(tmp_path, "fingerprint")
        == salt
        != sealing.kept_secret(tmp_path / "another run", "fingerprint")
    )
    assert (tmp_path / sealing.SECRET).stat().st_mode & 0o777 == 0o600
    said = custody.fingerprint(client, salt)
    assert custody.fingerprint(client, salt) == said != custody.fingerprint(client, bytes(32))
    samples = client.train.samples
    for part in ("train", "val", "test"):
        held = getattr(client, part)
        if len(held):
            fewer = replace(client, **{part: replace(held, rows=held.rows[1:])})
            assert custody.fingerprint(fewer, salt) != said
    brighter = replace(
        client, train=replace(client.train, samples=replace(samples, x=samples.x + 1))
    )
    assert custody.fingerprint(brighter, salt) != said
    # The salt leaves the silo in no message: it is in its run's folder alone.
    (kept,) = relay.run.parent.glob(f"client-0-silo/runs/*/{sealing.SECRET}")
    fingerprint = custody.fingerprint(client, sealing.kept_secret(kept.parent, "fingerprint"))
    assert hop_of(read_lines(relay.run / "custody.jsonl")[0]).data == fingerprint
    assert kept.read_bytes() not in b"".join(relay.said)
    (tmp_path / sealing.SECRET).write_bytes(b"short")
    with pytest.raises(UserError, match=r"secret\.key is damaged"):
        sealing.kept_secret(tmp_path, "fingerprint")


def test_a_silo_must_sign_what_it_answers(tmp_path: Path) -> None:
    """Otherwise the run would report what the folder does not prove."""

    class Lying(FakeNodes):
        def silo(self, node: int) -> Silo:
            return Liar(self.files[node], {"": mine(self.files[node].name)})

    class Liar(Silo):
        def answer(self, data: bytes) -> bytes:
            answer, body = unpack(super().answer(data), Answer)
            kind = unpack(data, Ask)[0].kind
            if kind == "evaluate" == lie:
                found = wire.decode(body, Reported)
                assert found.masked is not None
                return pack(answer, wire.chunks(Reported(replace(found.masked, check=0))))
            if kind != "task" or lie == "evaluate":
                return pack(answer, (body,))
            record = json.loads(answer.record)
            if lie == "entry":
                record = json.loads(b64decode(record["payload"])) | {"size": 1}
            elif lie != "nothing":
                entry = json.loads(b64decode(record["payload"])) | {lie: 1}
                record["payload"] = b64encode(keys.canonical(entry)).decode()
            said = "" if lie == "nothing" else json.dumps(record)
            return pack(replace(answer, record=said), (body,))

    for lie in ("size", "forward", "backward", "step", "entry", "nothing", "evaluate"):
        files, public = with_keys(tmp_path / lie, NAMES, LIMITS)
        with pytest.raises(
            UserError, match=r"silo client-0 gives no account of .* that its key signed: refused"
        ):
            far(FedSeq(epochs=1), Lying(files), tmp_path / lie / "run", public)


def test_records_of_another_version_are_one_line(relay: Made, tmp_path: Path) -> None:
    made = relay.copied(tmp_path)
    rows = read_lines(made.run / "custody.jsonl")
    for row in rows[:3]:
        row["payloadType"] = row["payloadType"].replace(".v5", ".v9")
    (made.run / "custody.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    assert (
        "line 1: an entry of the chain of custody cannot be read (application/vnd.ekiden.hop.v9"
        in made.wrong()
    )
    assert "use the version of Ekiden that wrote it" in made.wrong()
