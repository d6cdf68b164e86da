"""The run folder: a run continues, and is measured, only with the data and the network that it
began with; what is damaged is named; and a full disk."""

import contextlib
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekiden
from ekiden import FederatedData, UserError, run
from ekiden.core.base import errors, files
from ekiden.core.data.samples import Clients, Shares
from ekiden.core.engine import wire
from ekiden.core.engine.folder import (
    Marks,
    RunFolder,
    client_digest,
    data_digests,
    read_config,
    read_lines,
)
from ekiden.core.engine.method import State
from ekiden.core.engine.store import FolderJournal
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import Ref
from ekiden.data import Samples, Subset, from_tensors
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Centralized, FedAvg, FedSeq
from tests.core.engine.kept import Counting, go, model, outcome
from tests.core.engine.test_store import names, store

ONE = FedSeq(epochs=1)


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def changed(data: FederatedData, part: str, field: str, client: int = 1) -> FederatedData:
    """The same data except for one number of one client."""
    held: Samples = getattr(data.dataset, "test" if part == "test" else "train")
    values: Tensor = getattr(held, field).clone()
    row = int(getattr(data.clients[client], part).rows[0])
    values[row] = values[row] + 1 if field == "x" else (values[row] + 1) % 3
    other = replace(held, x=values) if field == "x" else replace(held, y=values)
    dataset = (
        replace(data.dataset, test=other) if part == "test" else replace(data.dataset, train=other)
    )

    def of(subset: Subset) -> Subset:
        return replace(subset, samples=other) if subset.samples is held else subset

    clients = (replace(c, train=of(c.train), val=of(c.val), test=of(c.test)) for c in data.clients)
    return FederatedData(dataset, tuple(clients))


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("field", ["x", "y"])
def test_one_number_of_one_client_is_noticed(blobs: FederatedData, part: str, field: str) -> None:
    pairs = zip(blobs.clients, changed(blobs, part, field).clients, strict=True)
    assert [a.name for a, b in pairs if client_digest(a) != client_digest(b)] == ["client-1"]


def test_a_digest_is_of_the_contents_in_their_order(blobs: FederatedData) -> None:
    held, other = blobs.dataset.train, torch.randperm(len(blobs.dataset.train))
    moved = Samples(
        held.x[other], held.y[other]
    )  # elsewhere in memory, the same samples for each client
    place = other.argsort()
    client = blobs.clients[0]
    train, val = (
        replace(part, samples=moved, rows=place[part.rows]) for part in (client.train, client.val)
    )
    assert client_digest(replace(client, train=train, val=val)) == client_digest(client)
    turned = replace(client, train=replace(client.train, rows=client.train.rows.flip(0)))
    assert client_digest(turned) != client_digest(client)


def test_a_rerun_with_other_data_is_refused_and_named(blobs: FederatedData, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(ONE, blobs, tiny(), folder=folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    with pytest.raises(
        UserError, match=r"another run \(the data of client-1 differ\): choose another folder"
    ):
        run(ONE, changed(blobs, "train", "x"), tiny(), folder=folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert run(ONE, blobs, tiny(), folder=folder).metrics == first.metrics


def test_data_that_a_run_has_not_used_may_change_and_used_data_may_not(
    blobs: FederatedData, tmp_path: Path
) -> None:
    read = list[int]()

    def lazy(data: FederatedData) -> FederatedData:
        return replace(
            data,
            clients=Clients(data.sizes, lambda at: read.append(at) or data.clients[at]),  # type: ignore[func-returns-value]
        )

    folder, other = tmp_path / "run", changed(blobs, "train", "x", client=3)
    run(ONE, lazy(blobs), tiny(), folder=folder, stop_after=2, evaluate_every=0)
    assert set(read) == {0, 1}  # the others' data were not read
    assert list(data_digests(folder)) == ["client-0", "client-1"]
    resumed = run(
        ONE, lazy(other), tiny(), folder=folder, evaluate_every=0
    )  # as a run that had these data from the start
    assert resumed.weights is not None
    assert torch.equal(resumed.weights.params, run(ONE, other, tiny()).weights.params)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the data of client-3 differ"):
        run(ONE, lazy(blobs), tiny(), folder=folder, evaluate_every=0)
    with pytest.raises(UserError, match="the data of client-3 differ"):
        ekiden.evaluate(folder, blobs, network=tiny())
    tests = replace(other.dataset.test, y=1 - other.dataset.test.y.clamp(max=1))
    with pytest.raises(UserError, match="the test data differ"):
        run(
            ONE,
            replace(other, dataset=replace(other.dataset, test=tests)),
            tiny(),
            folder=folder,
            evaluate_every=0,
        )


def test_many_clients_are_measured_one_by_one_at_the_end_only() -> None:
    x, y = torch.randn(1002, 2), torch.arange(1002) % 3
    dataset = from_tensors((x, y), (x, y), classes=("a", "b", "c"))
    rows = [np.arange(1002)[i : i + 1] for i in range(1002)]
    data = FederatedData(
        dataset,
        Shares(
            [f"c{i}" for i in range(1002)], dataset, (rows, [r[:0] for r in rows], rows)
        ).clients(),
    )
    first, last = run(FedAvg(rounds=2, epochs=1, participation=0.002), data, "mlp").metrics
    assert "accuracy" in first
    assert "client_mean" not in first
    assert last["client_mean"] == pytest.approx(last["accuracy"])


def test_data_scaled_in_another_way_are_other_data(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    scaled = replace(blobs, dataset=replace(blobs.dataset, mean=(0.5,)))
    with pytest.raises(UserError, match=r"another run \(input differ\)"):
        run(ONE, scaled, tiny(), folder=tmp_path / "run")


class Bent(Tiny):
    """The same layers and values as `Tiny`, with another function of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.features(x)))  # type: ignore[no-any-return]


def test_another_network_is_refused(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    less_dropout = tiny()
    less_dropout.features[3] = nn.Dropout(0.5)
    bent = Bent()
    bent.load_state_dict(tiny().state_dict())
    bent.__class__.__name__ = "Tiny"
    for other in (tiny(1), less_dropout, bent):
        with pytest.raises(
            UserError,
            match=r"\(the initial model differ\): choose another folder, or put back what differs",
        ):
            run(ONE, blobs, other, folder=tmp_path / "run")


def test_digests_that_are_damaged_are_an_error(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"digests": 3}))
    with pytest.raises(UserError, match="wrong digests"):
        read_config(tmp_path / "run")


class Picky(Tiny):
    """Accepts certain values only."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 0).any():
            raise ValueError("no zeros")
        return super().forward(x)


def test_networks_and_scalings_of_every_kind_are_described(
    blobs: FederatedData, tmp_path: Path
) -> None:
    data = replace(blobs, dataset=replace(blobs.dataset, std=tuple(np.ones(1, dtype=np.float32))))
    run(ONE, data, Picky(), folder=tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert config["digests"]["model"]["answers"] == []
    assert config["input"]["std"] == [1.0]


def test_pooled_data_are_those_of_one_client(blobs: FederatedData, tmp_path: Path) -> None:
    run(Centralized(epochs=1), blobs, tiny(), folder=tmp_path / "run")
    assert list(data_digests(tmp_path / "run")) == ["all"]
    with pytest.raises(UserError, match="the data of all differ"):
        run(Centralized(epochs=1), changed(blobs, "train", "x"), tiny(), folder=tmp_path / "run")


CONFIG: dict[str, Any] = {
    "recipe": {
        **dict.fromkeys(("metric", "pretrained"), ""),
        **{
            "method": "fedelmy",
            "model": "mlp",
            "train": "all",
            "hyperparameters": {},
            "training": {},
        },
        **{"seed": 0, "evaluate_every": 1, "evaluate_on": "all"},
    },
    "hardware": {},
    "dataset": "toy",
    "clients": {},
    "model_bytes": 4,
    "selection": "best",
    "steps": 2,
    "network": "mlp",
    "frozen": {},
    "classes": ["a", "b"],
    "input": {"shape": [2], "mean": [0.0], "std": [1.0]},
    "inputs": {"kind": "arrays"},
    "task": {"kind": "classification"},
}


# The run folder.


def folder_with_a_state(path: Path) -> None:
    folder = RunFolder(path, CONFIG)
    assert folder.load(State) is None
    row = Transfer(0, "a", "b", "train", 12)
    folder.transfer(row)
    length = folder.append("metrics.jsonl", {"step": 1, "accuracy": 0.5})
    folder.save(State(1, Ref("a", "k")), Marks(length, folder.length("ledger.jsonl"), 12))
    folder.transfer(Transfer(1, "b", "c", "train", 13))
    folder.append("metrics.jsonl", {"step": 2})
    folder.close()


def reopened(path: Path) -> tuple[State, Marks] | None:
    folder = RunFolder(path, CONFIG)
    try:
        return folder.load(State)
    finally:
        folder.close()


def test_a_state_has_the_same_bytes_in_whatever_order_clients_were_written(tmp_path: Path) -> None:
    """Sets of names have another order in each process."""
    found = []
    for clients in ("ab", "ba"):
        folder = RunFolder(tmp_path / clients, CONFIG)
        folder.save(State(1, Ref("a", "k")), Marks(), dict.fromkeys(clients, "1"))
        folder.close()
        found.append((tmp_path / clients / "state.safetensors").read_bytes())
    assert found[0] == found[1]


def test_a_folder_goes_on_from_its_last_state(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    found = reopened(tmp_path / "run")
    assert found is not None
    state, marks = found
    assert state == State(1, Ref("a", "k"))
    assert marks.bytes == 12
    assert read_lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "accuracy": 0.5}]
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1
    first, second = read_lines(tmp_path / "run" / "attempts.jsonl")
    assert (first["from_step"], first["lost_transfers"]) == (0, [])
    assert second["from_step"] == 1
    assert [row["bytes"] for row in second["lost_transfers"]] == [13]


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_link_in_a_run_folder_changes_no_file_elsewhere(
    name: str, cut: bool, tmp_path: Path
) -> None:
    """A folder that somebody else made; going on cuts and lengthens its growing files."""
    folder_with_a_state(tmp_path / "run")
    file, mine = tmp_path / "run" / name, tmp_path / "mine"
    mine.write_bytes(file.read_bytes() if cut else file.read_bytes().splitlines(keepends=True)[0])
    before = mine.read_bytes()
    file.unlink()
    file.symlink_to(mine)

    def go_on() -> None:
        with contextlib.closing(RunFolder(tmp_path / "run", CONFIG)) as folder:
            folder.load(State)
            folder.append(name, {"step": 2})

    with pytest.raises(UserError, match=f"{name} is a link to another file"):
        go_on()
    assert mine.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["personal", "clients/client-0", "lock", ".state.safetensors.1.tmp"]
)
def test_a_folder_with_a_link_is_not_gone_on_with(name: str, tmp_path: Path) -> None:
    """Models and clients' states are written into folders, which can be links, too."""
    folder_with_a_state(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    link = tmp_path / "run" / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=f"{name} is a link to another file"):
        RunFolder(tmp_path / "run", CONFIG)
    assert not list((tmp_path / "mine").iterdir())


@pytest.mark.skipif(os.name != "posix", reason="other systems have other links")
@pytest.mark.parametrize("name", ["metrics.jsonl", "attempts.jsonl", "lock"])
def test_a_hard_link_in_a_run_folder_changes_no_file_elsewhere(name: str, tmp_path: Path) -> None:
    """An archive can hold one to any file of the user on the same disk."""
    folder_with_a_state(tmp_path / "run")
    file, mine = tmp_path / "run" / name, tmp_path / "mine"
    mine.write_bytes(b"alias ls=ls\n" + file.read_bytes())
    before = mine.read_bytes()
    file.unlink()
    os.link(mine, file)

    def go_on() -> None:
        with contextlib.closing(RunFolder(tmp_path / "run", CONFIG)) as folder:
            folder.load(State)

    with pytest.raises(UserError, match=f"{name} is a link to another file"):
        go_on()
    assert mine.read_bytes() == before


def test_a_run_folder_holds_no_command_of_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower starts a process with the token of the run among its arguments, and runs begin in
    it."""
    monkeypatch.setattr(sys, "argv", ["flwr-serverapp", "--token", "BEARER"])
    folder_with_a_state(tmp_path / "run")
    reopened(tmp_path / "run")
    assert all(
        b"BEARER" not in file.read_bytes()
        for file in (tmp_path / "run").rglob("*")
        if file.is_file()
    )
    monkeypatch.setattr(errors, "typed", ("ekiden", "resume", "run"))
    reopened(tmp_path / "run")
    assert read_lines(tmp_path / "run" / "attempts.jsonl")[-1]["command"] == [
        "ekiden",
        "resume",
        "run",
    ]


def test_what_moved_in_vain_is_noted_before_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies while it resumes a run forgets nothing."""
    folder_with_a_state(tmp_path / "run")

    class Killed(BaseException):
        pass

    def killed(*args: object) -> None:
        raise Killed

    where: list[tuple[object, str]] = [(RunFolder, "append"), (os, "truncate")]
    for thing, name in where:
        with monkeypatch.context() as patch:
            patch.setattr(thing, name, killed)
            with pytest.raises(Killed):
                reopened(tmp_path / "run")
    reopened(tmp_path / "run")
    assert len(read_lines(tmp_path / "run" / "ledger.jsonl")) == 1
    *_, last = read_lines(tmp_path / "run" / "attempts.jsonl")
    assert [row["bytes"] for row in last["lost_transfers"]] == [13]


@pytest.mark.slow
def test_a_folder_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    code = (
        "import sys, json; from pathlib import Path; from ekiden.core.engine.folder import RunFolder\n"
        "held = RunFolder(Path(sys.argv[1]), json.loads(sys.argv[2])); print('held', flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run"), json.dumps(CONFIG)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use by another process: wait for it"):
            RunFolder(tmp_path / "run", CONFIG)
        other.kill()
    assert reopened(tmp_path / "run") is not None  # the lock of a killed process is gone


def test_another_run_is_refused(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    before = {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    with pytest.raises(
        UserError, match=r"holds another run \(extra, seed differ\): choose another folder"
    ):
        RunFolder(
            tmp_path / "run", {**CONFIG, "recipe": {**CONFIG["recipe"], "seed": 1}, "extra": 2}
        )
    assert {p.name: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_a_run_of_another_version_that_differs_names_that_version(tmp_path: Path) -> None:
    """For example, because the method has a new hyperparameter."""
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ekiden": "0.0.1"}))
    with pytest.raises(
        UserError,
        match=r"\(hyperparameters differ\): .*; Ekiden 0\.0\.1 began this run and can continue",
    ):
        RunFolder(
            tmp_path / "run",
            {**CONFIG, "recipe": {**CONFIG["recipe"], "hyperparameters": {"new": 1}}},
        )


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 99}))
    for act in (lambda: RunFolder(tmp_path / "run", CONFIG), lambda: read_config(tmp_path / "run")):
        with pytest.raises(UserError, match="has run-folder format 99, this version reads 2"):
            act()


def test_another_release_with_the_same_format_goes_on(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"ekiden": "0.0.1"}))
    assert reopened(tmp_path / "run") is not None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"format":2}', b"null"]
)
def test_a_damaged_config_is_refused(tmp_path: Path, content: bytes) -> None:
    folder_with_a_state(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged|run-folder format None"):
        read_config(tmp_path / "run")
    with pytest.raises(UserError, match=r"damaged|run-folder format None"):
        RunFolder(tmp_path / "run", CONFIG)


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    (tmp_path / "file").write_bytes(b"text")
    for name in ("photos", "file"):
        with pytest.raises(
            UserError, match=r"is (a file|not empty and not a run folder): choose another folder"
        ):
            RunFolder(tmp_path / name, CONFIG)
    assert names(tmp_path / "photos") == ["cat.jpg"]
    with pytest.raises(UserError, match="is not a run folder"):
        read_config(tmp_path / "photos")
    with pytest.raises(UserError, match=r"cannot write .*: choose another place"):
        RunFolder(tmp_path / "file" / "below", CONFIG)


def test_a_folder_that_died_before_its_config_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in ("lock", "environment.json", ".config.json.7.tmp"):
        (tmp_path / "run" / name).write_bytes(b"{}\n" if name.startswith("env") else b"")
    assert reopened(tmp_path / "run") is None
    assert read_config(tmp_path / "run")["recipe"]["seed"] == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"\x80\x04N.",
        lambda data: wire.encode(model(1)),
        lambda data: wire.encode(State(1)),
    ],
    ids=["a byte short", "half", "empty", "pickle", "a model", "no marks"],
)
def test_a_damaged_state_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / "state.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        UserError,
        match=r"state\.safetensors is damaged (\(changed since|or of another version .* delete .*run to run)",
    ):
        reopened(tmp_path / "run")


@pytest.mark.parametrize("name", ["metrics.jsonl", "ledger.jsonl"])
def test_a_shortened_report_is_named(tmp_path: Path, name: str) -> None:
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / name
    for content in (file.read_bytes()[:10], None):
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name} is shorter than the state says"):
            reopened(tmp_path / "run")


def test_an_unreadable_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step":1}\n{"ste\n{"step":3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2 cannot be read"):
        read_lines(file)
    assert read_lines(tmp_path / "nowhere") == []
    with pytest.raises(
        UserError, match=r"metrics\.jsonl, line 1 cannot be read: .*, start a new run"
    ):
        read_lines(file, "step", "bytes")
    file.write_bytes(b'{"step":1}\n{"ste')  # being written just now
    assert read_lines(file) == [{"step": 1}]


def test_a_ledger_of_another_form_is_named(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    file = tmp_path / "run" / "ledger.jsonl"
    whole = file.read_bytes()
    for line in (b"null\n", b'{"a":1}\n', b"{\n"):
        file.write_bytes(whole + line)  # beyond the state: lost transfers
        with pytest.raises(UserError, match=r"ledger\.jsonl, line \d+ cannot be read"):
            reopened(tmp_path / "run")


def test_a_line_that_was_not_finished_does_not_spoil_the_next(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    with open(tmp_path / "run" / "attempts.jsonl", "ab") as file:
        file.write(b'{"started":"20')
    reopened(tmp_path / "run")
    assert [row["from_step"] for row in read_lines(tmp_path / "run" / "attempts.jsonl")] == [0, 1]


# A full disk.


def test_writing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "file"
    files.write(target, [b"old"])
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, full_disk)
            with pytest.raises(UserError, match=r"disk full while writing .*file: free some space"):
                files.write(target, [b"new"])
        assert target.read_bytes() == b"old"
        assert names(tmp_path) == ["file"]
    assert files.write(target, [b"new", memoryview(b"er")]) == 5
    assert target.read_bytes() == b"newer"
    with pytest.raises(UserError, match=r"cannot write .*: No such file or directory"):
        files.write(tmp_path / "nowhere" / "file", [b""])


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_all_dtypes_of_a_model_file_are_read_by_the_library_and_by_us(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in files.DTYPES}
    files.write(
        tmp_path / "model.safetensors",
        files.with_digest(files.safetensors_chunks(tensors, {"format": "pt"})),
    )
    file = tmp_path / "model.safetensors"
    for loaded in (safetensors.torch.load_file(file), files.read_tensors(file)[0]):
        assert all(
            torch.equal(loaded[k], v) and loaded[k].dtype == v.dtype for k, v in tensors.items()
        )


@pytest.mark.parametrize("room", [0, 3, 9, 14, 20])
def test_a_run_on_a_full_disk_goes_on_when_there_is_room(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    go(Counting(), blobs, tmp_path / "whole")
    monkeypatch.setattr(RunFolder, "due", True)
    calls: list[int] = []
    fsync = os.fsync

    def limited(handle: int) -> None:
        calls.append(handle)
        if len(calls) > room:
            full_disk()
        fsync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", limited)
        with pytest.raises(UserError, match="disk full while writing"):
            go(Counting(), blobs, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))
    for file in (tmp_path / "run").rglob("*.safetensors"):
        files.read_tensors(file)  # raises an error if it is half written
    go(Counting(), blobs, tmp_path / "run")
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_report_that_the_disk_refuses_is_one_clear_error(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", CONFIG)
    folder.load(State)
    folder._files["ledger.jsonl"] = open("/dev/full", "ab")  # noqa: SIM115  (the folder closes it)
    with pytest.raises(UserError, match=r"disk full while writing .*ledger\.jsonl"):
        folder.transfer(Transfer(0, "a", "b", "train", 12))
    folder.close()


def test_files_without_a_digest_count_as_damaged(tmp_path: Path) -> None:
    folder_with_a_state(tmp_path / "run")
    found = reopened(tmp_path / "run")
    assert found is not None
    file = tmp_path / "run" / "state.safetensors"
    assert b"blake2b" in file.read_bytes()
    file.write_bytes(wire.encode(found))
    with pytest.raises(files.Damaged, match="it has no digest"):
        reopened(tmp_path / "run")
    here = store(tmp_path / "client")
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "value-0-0-train.safetensors").write_bytes(wire.encode(model(2)))
    with pytest.raises(files.Damaged, match="it has no digest"):
        here.get("0-0-train")
    safetensors.torch.save_file({"a": torch.ones(2)}, tmp_path / "k.safetensors")
    assert FolderJournal(tmp_path).load("k") is None
    with pytest.raises(files.Damaged, match="it has no digest"):
        files.verified(b"3")


def test_a_run_that_is_named_without_its_folder_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "config.json").touch()
    for name in ("mine", "runs"):
        with pytest.raises(UserError, match=r"did you mean runs.mine\?"):
            read_config(Path(name))
    with pytest.raises(UserError, match="give the path that the run printed"):
        read_config(Path("other"))


def test_a_run_killed_before_its_configuration_keeps_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a config.json has these files, too, and one without can be used again."""
    path, written = tmp_path / "run", files.write

    def killed(file: Path, parts: Any) -> None:
        if file.name == "config.json":
            raise UserError("killed")
        written(file, parts)

    monkeypatch.setattr("ekiden.core.engine.folder.write", killed)
    with pytest.raises(UserError, match="killed"):
        RunFolder(path, CONFIG, needed={"link.json": "{}"})
    assert (path / "link.json").read_text() == "{}"
    monkeypatch.setattr("ekiden.core.engine.folder.write", written)
    RunFolder(path, CONFIG, needed={"link.json": "{}"}).close()
    assert (path / "config.json").exists()
