"""Clients' values and private state: what a run keeps of them, stops inside of a task, and bytes
that changed on the disk."""

import json
import os
import random
import re
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.base import files
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.folder import Marks, RunFolder, read_lines
from ekiden.core.engine.method import State
from ekiden.core.engine.setup import read_model
from ekiden.core.engine.store import FolderJournal, Store, read
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedELMY
from tests.core.engine.kept import Counting, flipped, go, model, outcome


def store(folder: Path | None, step: int = 0) -> Store:
    return Store(folder, lambda task: {"train": Weights, "count": int}[task], int, step)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


# One client's store.


def test_values_are_kept_until_they_are_settled(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.put("0-0-train", model(1), 1)
    here.commit(1, {"0-0-train"})
    here.settle({"0-0-train"})
    here.put("1-0-train", model(2), 2)
    here.put("1-1-count", 5, 2)
    here.commit(2, {"1-0-train"})
    assert names(tmp_path) == [
        "private-1.safetensors",
        "private-2.safetensors",
        "value-0-0-train.safetensors",
        "value-1-0-train.safetensors",
    ]
    for step, value in ((1, 1), (2, 2)):  # whichever state was written, what it needs is there
        copy = tmp_path / f"copy-{step}"
        copy.mkdir()
        for file in tmp_path.glob("*.safetensors"):
            (copy / file.name).write_bytes(file.read_bytes())
        after = store(copy, step)
        assert after.private == value
        assert torch.equal(after.get(f"{step - 1}-0-train").params, model(value).params)
    here.settle({"1-0-train"})
    assert [n for n in names(tmp_path) if n.endswith(".safetensors")] == [
        "private-2.safetensors",
        "value-1-0-train.safetensors",
    ]
    with pytest.raises(UserError, match="0-0-train is not in"):
        here.get("0-0-train")


def test_private_state_of_a_step_that_died_is_forgotten(tmp_path: Path) -> None:
    here = store(tmp_path)
    for step in (1, 2):
        here.put(f"{step - 1}-0-count", 0, 10 * step)
        here.commit(step, set())
        if step == 1:
            here.settle(set())
    assert names(tmp_path) == [
        "private-1.safetensors",
        "private-2.safetensors",
    ]  # killed before the state was written
    again = store(tmp_path, 1)
    assert again.private == 10
    assert names(tmp_path) == ["private-1.safetensors"]
    again.put("1-0-count", 0, 21)
    again.commit(2, set())
    again.settle(set())
    assert store(tmp_path, 2).private == 21


def test_private_state_that_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.put("0-0-count", 1, 7)
    here.commit(1, set())
    here.settle(set())
    here.put("1-0-count", 1, here.private)
    here.commit(2, set())
    here.settle(set())
    assert names(tmp_path) == ["private-1.safetensors"]
    assert store(tmp_path, 2).private == 7


def test_a_store_in_memory_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = store(None)
    here.put("0-0-count", 3, 4)
    here.commit(1, {"0-0-count"})
    here.settle({"0-0-count"})
    assert (here.get("0-0-count"), here.private) == (3, 4)
    assert names(tmp_path) == []


def test_private_state_is_in_memory_only_while_it_is_used(tmp_path: Path) -> None:
    here = Store(tmp_path, lambda task: int, Weights, 0)
    state = model(1)
    alive = weakref.ref(state)
    here.put("0-0-count", 1, state)
    here.commit(1, set())
    del state
    assert alive() is not None, "not yet safe"
    here.settle(set())
    assert alive() is None
    assert torch.equal(here.private.params, model(1).params)
    again = weakref.ref(here.private)
    here.put("1-0-count", 1, here.private)
    here.commit(2, set())
    here.settle(set())
    assert again() is None
    assert names(tmp_path) == ["private-1.safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "foreign", "another type"])
def test_a_damaged_value_is_named(tmp_path: Path, damage: str) -> None:
    here = store(tmp_path)
    here.put("0-0-train", model(1), 1)
    here.commit(1, {"0-0-train"})
    for file in tmp_path.iterdir():
        data = file.read_bytes()
        other = wire.encode(model(1) if "private" in file.name else "text")
        file.write_bytes(
            {"truncated": data[:-1], "foreign": b"something else", "another type": other}[damage]
        )
    with pytest.raises(UserError, match=r"private-1\.safetensors.*(payload|is damaged)"):
        _ = store(tmp_path, 1).private
    (tmp_path / "private-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"value-0-0-train\.safetensors.*(payload|is damaged)"):
        store(tmp_path, 1).get("0-0-train")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nowhere: No such file"):
        read(tmp_path / "nowhere", int)


def test_a_journal_gives_back_what_it_got_or_nothing(tmp_path: Path) -> None:
    journal = FolderJournal(tmp_path / "journal")
    assert journal.load("k") is None
    tensors = {"a": torch.arange(3.0), "b": torch.tensor(1)}
    journal.save("k", tensors)
    got = journal.load("k")
    assert got is not None
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert FolderJournal(tmp_path / "journal", lambda: "other arguments").load("k") is None
    file = tmp_path / "journal" / "k.safetensors"
    data = file.read_bytes()
    for length in (0, 7, 8, 40, len(data) - 1):
        file.write_bytes(data[:length])
        assert journal.load("k") is None
    file.write_bytes(b"\x80\x04N.")
    assert journal.load("k") is None


# Runs that stop inside a task.


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the library may catch it."""


def dies_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> list[str]:
    """Make the `call`-th call of a function the last thing that happens; return the calls so
    far."""
    calls: list[str] = []
    original = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) > call:  # also what `finally` still tries: a killed process writes nothing
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, dying)
    return calls


def test_a_run_survives_death_before_each_of_its_writes(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "ekiden.core.training.fit._SHARE_OF_SAVING", 0
    )  # progress is written, however short the epochs
    go(Counting(), blobs, tmp_path / "whole")
    folder, stops = tmp_path / "run", 0
    for _ in range(200):
        with monkeypatch.context() as patch:
            # three files further each time: inside steps, between commit and state, after the state
            dies_at(patch, os, "replace", 3 + stops % 3)
            stops += 1
            try:
                go(Counting(), blobs, folder)
                break
            except Killed:
                assert not list(folder.rglob("private-*-*"))
    assert stops > 8
    assert outcome(folder) == outcome(tmp_path / "whole")
    assert len(read_lines(folder / "attempts.jsonl")) >= stops - 1


def test_what_a_dead_process_did_not_settle_goes_later(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "due", True)
    with monkeypatch.context() as patch:
        dies_at(patch, Store, "settle", 1)  # of the second step, once its state is written
        with pytest.raises(Killed):
            go(Counting(), blobs, tmp_path / "run")
    assert list((tmp_path / "run").rglob("value-0-0-train.safetensors"))
    go(Counting(), blobs, tmp_path / "run", stop_after=1)
    assert [p.name for p in (tmp_path / "run").rglob("value-*")] == ["value-2-0-train.safetensors"]


@pytest.mark.parametrize("cut", [False, True], ids=["kill", "power cut"])
@pytest.mark.parametrize(("steps", "lasts"), [(1, 1), (4, 1), (5, 3), (6, 6)])
def test_a_kill_costs_no_step_and_a_power_cut_those_since_the_disk_was_waited_for(
    blobs: FederatedData,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: int,
    lasts: int,
    cut: bool,
) -> None:
    go(Counting(), blobs, tmp_path / "whole")
    folder, synced, done = tmp_path / "run", dict[int, int](), list[int]()

    def fsync(handle: int) -> None:
        found = os.fstat(handle)
        synced[found.st_ino] = found.st_size

    def due(here: RunFolder) -> bool:
        done.append(1)
        return len(done) in (1, lasts)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        patch.setattr(RunFolder, "due", property(due))
        go(Counting(), blobs, folder, stop_after=steps)
    if cut:  # what was not synced is gone, and the machine starts again
        for file in folder.rglob("*"):
            if file.is_file():
                os.truncate(file, synced.get(file.stat().st_ino, 0))
        monkeypatch.setattr("ekiden.core.engine.folder._boot", lambda: "the next start")
    go(Counting(), blobs, folder)
    assert outcome(folder) == outcome(tmp_path / "whole")
    assert read_lines(folder / "attempts.jsonl")[-1]["from_step"] == (lasts if cut else steps)
    assert not list(folder.glob("latest-*"))


def test_a_run_waits_for_the_disk_once_a_second(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fsync", waits.append)
    monkeypatch.setattr("ekiden.core.engine.folder.time.monotonic", lambda: 5.0)
    go(Counting(rounds=1), blobs, tmp_path / "short")
    few = len(waits)
    go(Counting(rounds=4), blobs, tmp_path / "long")
    assert len(waits) < 2 * few + 5  # not five for each of its further twelve steps
    monkeypatch.setattr("ekiden.core.engine.folder._boot", lambda: "")  # another system
    go(Counting(rounds=4), blobs, tmp_path / "elsewhere")
    assert len(waits) > 2 * few + 5 * 12


@pytest.mark.parametrize("damage", [None, b"", b"no tensors"])
def test_a_hop_that_died_goes_on_from_its_journal(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    method = FedELMY(models=3, epochs=4, warmup=0)
    monkeypatch.setattr(
        "ekiden.core.training.fit._SHARE_OF_SAVING", 0
    )  # these epochs are shorter than a write
    whole: list[tuple[str, int]] = []
    go(
        method,
        blobs,
        tmp_path / "whole",
        watch=lambda client, epoch, epochs: whole.append((client, epoch)),
    )
    assert len(whole) == 4 * 3 * 4

    seen: list[tuple[str, int]] = []

    def stop(client: str, epoch: int, epochs: int) -> None:
        seen.append((client, epoch))
        if len(seen) == 12 + 4 + 2:  # second client, second model, epoch 2 of 4
            raise Killed

    with pytest.raises(Killed):
        go(method, blobs, tmp_path / "run", watch=stop)
    journal = tmp_path / "run" / "clients" / "client-1" / "journal"
    assert len(names(journal)) == 2, "one file a model"
    if damage is not None:
        for file in journal.iterdir():
            file.write_bytes(damage)
    again: list[tuple[str, int]] = []
    go(
        method,
        blobs,
        tmp_path / "run",
        watch=lambda client, epoch, epochs: again.append((client, epoch)),
    )
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
    done = (
        12 if damage is not None else 12 + 4 + 1
    )  # the first model is not trained again, nor the second's first epoch
    assert again == whole[done:]
    assert not journal.exists()


# Bytes that changed on the disk.


def kept(folder: Path, blobs: FederatedData, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run killed in its third hop, so that its folder holds all kinds of files."""
    monkeypatch.setattr("ekiden.core.training.fit._SHARE_OF_SAVING", 0)
    epochs = 0

    def stop(client: str, epoch: int, done: int) -> None:
        nonlocal epochs
        epochs += 1
        if epochs == 12:
            raise Killed

    with pytest.raises(Killed):
        go(Counting(epochs=2), blobs, folder, watch=stop)
    return folder


# A byte of the version of Python that made the folder may be flipped.
@pytest.mark.filterwarnings("ignore:.* before and .* now:ekiden.core.base.errors.DataWarning")
def test_a_flipped_byte_in_any_file_of_a_run_never_gives_another_model(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = go(Counting(epochs=2), blobs, tmp_path / "whole").folder / "model.safetensors"
    folder, draw = kept(tmp_path / "run", blobs, monkeypatch), random.Random(0)
    found = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
    kinds = {
        f.parent.name if f.parent.name == "journal" else re.split(r"[-.]", f.name)[0]: f
        for f in found
    }
    assert kinds.keys() >= {"private", "value", "journal", "state", "config", "metrics", "ledger"}
    ends: list[str] = []
    for file in kinds.values():
        size = (folder / file).stat().st_size
        for at in (size - 3, draw.randrange(size)) if size else ():
            copy = tmp_path / f"{len(ends)}"
            shutil.copytree(folder, copy)
            (copy / file).write_bytes(flipped((copy / file).read_bytes(), at, draw.randrange(8)))
            try:
                go(Counting(epochs=2), blobs, copy)
                assert (copy / "model.safetensors").read_bytes() == whole.read_bytes(), (file, at)
                ends.append("same")
            except UserError as error:
                said = str(error)
                named = file.name in said or f"{copy} holds another run" in said
                ends.append("refused" if named and "\n" not in said else f"{file}, {at}: {said}")
    assert set(ends) == {"same", "refused"}


def test_an_earlier_private_state_is_not_taken_for_a_lost_one(
    blobs: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For example, restored from an older backup."""
    two = FederatedData(blobs.dataset, blobs.clients[:2])
    whole = go(Counting(rounds=3), two, tmp_path / "whole")
    go(Counting(rounds=3), two, tmp_path / "run", stop_after=2)
    (old,) = (tmp_path / "run").rglob("private-1.safetensors")
    backup = old.read_bytes()
    go(Counting(rounds=3), two, tmp_path / "run", stop_after=2)
    assert not old.exists()
    old.write_bytes(backup)
    old.with_name("private-3.safetensors").unlink()
    again = go(Counting(rounds=3), two, tmp_path / "run")
    assert torch.equal(again.weights.params, whole.weights.params)
    assert "private-3.safetensors is gone" in caplog.text


def test_folders_that_do_not_say_which_private_states_there_are_go_on(
    blobs: FederatedData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A transport of your own need not know it."""
    whole = go(Counting(rounds=4), blobs, tmp_path / "whole")
    go(Counting(rounds=4), blobs, tmp_path / "run", stop_after=4)
    state = tmp_path / "run" / "state.safetensors"
    config = files.read_tensors(state)[1]["config"]
    state.write_bytes(
        b"".join(files.with_digest(wire.chunks(read(state, tuple[State, Marks])), config=config))
    )
    assert "written" not in files.read_tensors(state)[1]
    go(Counting(rounds=4), blobs, tmp_path / "run", stop_after=1)
    written = {"client-0": "5", **{f"client-{i}": str(i + 1) for i in (1, 2, 3)}}
    assert json.loads(files.read_tensors(state)[1]["written"]) == written
    again = go(Counting(rounds=4), blobs, tmp_path / "run")
    assert torch.equal(again.weights.params, whole.weights.params)
    assert caplog.text == ""


def test_a_configuration_that_changed_after_the_run_began_is_refused(
    blobs: FederatedData, tmp_path: Path
) -> None:
    go(Counting(), blobs, tmp_path / "run", stop_after=2)
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"recipe": config["recipe"] | {"evaluate_every": 7}}))
    with pytest.raises(UserError, match=r"config\.json was changed after the run began"):
        go(
            Counting(), blobs, tmp_path / "run", evaluate_every=7
        )  # as `ekiden resume` does, which reads it there


def test_a_number_may_be_given_as_another_type_on_the_way_back(
    blobs: FederatedData, tmp_path: Path
) -> None:
    """1 and 1.0 are the same setting."""
    for lr, steps in ((1, 2), (1.0, 1)):
        training, hardware = Training(lr=lr, batch_size=16), Hardware(threads=1)
        run(
            Counting(),
            blobs,
            Tiny,
            training=training,
            hardware=hardware,
            folder=tmp_path / "run",
            stop_after=steps,
        )
    assert len(read_lines(tmp_path / "run" / "metrics.jsonl")) == 3


@given(st.integers(0), st.integers(0, 7))
def test_a_file_with_a_digest_is_told_from_every_other(place: int, bit: int) -> None:
    data = b"".join(files.with_digest(wire.chunks((model(1), "text", 2))))
    assert torch.equal(wire.decode(data, tuple[Weights, str, int])[0].params, model(1).params)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "file"
        file.write_bytes(data)
        assert torch.equal(read(file, tuple[Weights, str, int])[0].params, model(1).params)
        for changed in (
            flipped(data, place % len(data), bit),
            data[: place % len(data)],
            data + b"0",
        ):
            file.write_bytes(changed)
            with pytest.raises(files.Damaged):
                read(file, tuple[Weights, str, int])


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells a peak that was reset"
)
def test_a_large_value_is_in_memory_once_when_it_is_read(tmp_path: Path) -> None:
    """As many bytes as the value has, and what is used are the bytes that were checked."""
    file, size = tmp_path / "value.safetensors", 1 << 25
    files.write(file, files.with_digest(wire.chunks(torch.arange(size // 8))))
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = peak()
    value = read(file, Tensor)
    assert peak() - before < 1.3 * size
    os.truncate(file, 0)  # a mapped value would be gone, and the process with it
    assert torch.equal(value, torch.arange(size // 8))


def peak() -> int:
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


def test_a_result_that_changed_is_refused(blobs: FederatedData, tmp_path: Path) -> None:
    file = go(Counting(), blobs, tmp_path / "run").folder / "model.safetensors"
    layers = Tiny().state_dict()
    assert read_model(tmp_path / "run", file.name, Tiny) is not None
    whole, draw = file.read_bytes(), random.Random(1)
    for at in [len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(20))]:
        file.write_bytes(flipped(whole, at, draw.randrange(8)))
        with pytest.raises(
            UserError, match=r"model\.safetensors (is damaged|holds another network)"
        ):
            read_model(tmp_path / "run", file.name, Tiny)
    safetensors.torch.save_file(layers, file)  # by another tool
    with pytest.raises(UserError, match="it has no digest"):
        read_model(tmp_path / "run", file.name, Tiny)
