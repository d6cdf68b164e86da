"""What a silo keeps of a run, and what happens when one of its files is lost or damaged."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import GenericAlias
from typing import Any

import pytest

from ekiden.core.base import files
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import verified
from ekiden.core.engine import wire
from ekiden.core.engine.folder import Marks
from ekiden.core.engine.method import Method
from ekiden.methods import SCAFFOLD, DisPFL, FedSeq
from ekiden.silos.silo.shelf import Done
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust import custody
from ekiden.silos.trust.parcel import unpack
from tests.silos.asked import flip, killed, sealed_in, shelf_of
from tests.silos.fakes import FakeNodes
from tests.silos.sessions import assert_equal, far, here, same, small

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")
FEDSEQ = FedSeq(epochs=1)


def harm(file: Path, how: str) -> None:
    if how == "gone":
        file.unlink()
    else:
        flip(file, file.stat().st_size - 1 if how == "flipped" else 12)


def notes(nodes: FakeNodes, node: int) -> str:
    return (nodes.files[node].folder / "requests.log").read_text()


@pytest.mark.parametrize(
    "how", ["gone", "flipped", pytest.param("flipped in front", marks=pytest.mark.slow)]
)
def test_a_hand_off_that_a_silo_lost_is_made_again(how: str, tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 102):
        far(FEDSEQ, nodes, tmp_path / "run", public)
    (file,) = shelf_of(nodes, 101).glob("outcome-1-0-*")
    before = file.read_bytes()
    harm(file, how)
    assert_equal(far(FEDSEQ, nodes, tmp_path / "run", public), here(FEDSEQ))
    assert "step 2: train done again" in notes(nodes, 101)
    one, two = (
        custody.parse(unpack(verified(data), Done)[0].record)
        for data in (before, file.read_bytes())
    )
    assert one == two
    lines = (tmp_path / "run" / "custody.jsonl").read_text().splitlines()
    hops = [hop for hop in map(custody.parse, lines) if isinstance(hop, custody.Hop)]
    assert isinstance(one, custody.Hop)
    assert hops[2].taken[0].digest == one.given == hops[1].given


def test_a_result_that_a_silo_lost_is_made_again(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    far(FEDSEQ, nodes, tmp_path / "run", public)
    (file,) = shelf_of(nodes, 102).glob("outcome-2-0-*")
    for lost in (file, tmp_path / "run" / "model.safetensors"):
        lost.unlink()
    again = far(FEDSEQ, nodes, tmp_path / "run", public)
    assert same(again.weights, here(FEDSEQ).weights)
    assert "step 3: train done again" in notes(nodes, 102)


@pytest.mark.slow
def test_what_is_made_again_starts_from_the_private_state_before(tmp_path: Path) -> None:
    """The earlier state is kept for this: in DisPFL the task that gives a model changes the silo's
    masks."""
    method = small(DisPFL)
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 1, 102, done=True):
        far(method, nodes, tmp_path / "run", public)
    for node in nodes.files:
        names = {file.name for file in shelf_of(nodes, node).iterdir()}
        assert names >= {"private-0-0.parcel", "private-0-1.parcel", "outcome-0-1-learn.parcel"}
        (shelf_of(nodes, node) / "outcome-0-1-learn.parcel").unlink()
    assert_equal(far(method, nodes, tmp_path / "run", public), here(method))
    assert all("step 1: learn done again" in notes(nodes, node) for node in nodes.files)


SCAFFOLD_3 = SCAFFOLD(rounds=3, epochs=1)


@pytest.mark.parametrize("how", ["flipped", pytest.param("gone", marks=pytest.mark.slow)])
def test_a_private_state_that_a_silo_lost_is_made_again(how: str, tmp_path: Path) -> None:
    """The coordinator knows which there must be."""
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 100):
        far(SCAFFOLD_3, nodes, tmp_path / "run", public)
    shelf = shelf_of(nodes, 101)
    assert {file.name for file in shelf.glob("private-*")} == {
        "private-0-0.parcel",
        "private-1-0.parcel",
    }
    before = (shelf / "private-1-0.parcel").read_bytes()
    harm(shelf / "private-1-0.parcel", how)
    result = far(SCAFFOLD_3, nodes, tmp_path / "run", public)
    assert_equal(result, here(SCAFFOLD_3))
    assert "step 2: train done again" in notes(nodes, 101)
    with killed(nodes, 2, 100):
        far(SCAFFOLD_3, nodes, tmp_path / "again", public)
    (folder,) = [f for f in (nodes.files[101].folder / "runs").iterdir() if f != shelf]
    assert (
        folder / "private-1-0.parcel"
    ).read_bytes() == before  # what was made again was the same


@pytest.mark.parametrize(
    "how", ["gone", pytest.param("flipped", marks=pytest.mark.slow), "gone with the folder"]
)
def test_a_silo_that_lost_its_private_state_for_good_is_named_with_the_file(
    how: str, tmp_path: Path
) -> None:
    """It silently gave another model."""
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 101):
        far(SCAFFOLD_3, nodes, tmp_path / "run", public)
    shelf = shelf_of(nodes, 101)
    (shelf / "request-1-0-train.parcel").unlink()
    harm(shelf / "private-1-0.parcel", how.split(maxsplit=1)[0])
    if how == "gone with the folder":
        shutil.rmtree(shelf)
    with pytest.raises(UserError) as told:
        far(SCAFFOLD_3, nodes, tmp_path / "run", public)
    said = str(told.value)
    assert "\n" not in said
    assert "client-1" in said
    if how == "gone with the folder":  # and with the key that it opened the run's messages by
        return
    assert said.startswith(
        "silo client-1: client-1 does not have its private state after step 2 of run "
    )
    what = "is damaged" if how == "flipped" else "is gone"
    assert f"{shelf}/private-1-0.parcel {what}" in said
    assert "restore the file from a backup, or start a new run" in said


def test_a_coordinator_cannot_make_a_silo_start_from_an_earlier_private_state(
    tmp_path: Path,
) -> None:
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 101):
        far(SCAFFOLD_3, nodes, tmp_path / "run", public)
    file = tmp_path / "run" / "state.safetensors"
    for written in ({}, {"client-1": "0-0"}, {"client-1": "2-0"}):
        data = file.read_bytes()
        said = files.read_tensors(file)[1]
        state = wire.decode(data, GenericAlias(tuple, (type(SCAFFOLD_3.start()), Marks)))
        more = {
            "config": said["config"],
            "written": json.dumps(json.loads(said["written"]) | written),
        }
        more["written"] = more["written"] if written else "{}"
        file.write_bytes(b"".join(files.with_digest(wire.chunks(state), **more)))
        with pytest.raises(
            UserError,
            match=r"client-\d: the coordinator names another private state \((none|0-0|2-0)\) than",
        ):
            far(SCAFFOLD_3, nodes, tmp_path / "run", public)
        file.write_bytes(data)
    assert_equal(far(SCAFFOLD_3, nodes, tmp_path / "run", public), here(SCAFFOLD_3))


def test_a_silo_that_cannot_make_its_value_again_is_named_with_the_file(
    tmp_path: Path,
) -> None:
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 102):
        far(FEDSEQ, nodes, tmp_path / "run", public)
    folder = shelf_of(nodes, 101)
    for file in folder.glob("*-1-0-*"):
        flip(file, file.stat().st_size - 1)
    with pytest.raises(UserError) as told:
        far(FEDSEQ, nodes, tmp_path / "run", public)
    said = str(told.value)
    assert said.startswith("silo client-1: client-1 does not have value 1-0-train of run ")
    assert f"{folder}/outcome-1-0-train.parcel is damaged" in said
    assert "restore the file from a backup, or start a new run" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        pytest.param(
            FEDSEQ,
            {"outcome", "request", "requests", "secret", "settled", "terms"},
            marks=pytest.mark.slow,
        ),
        pytest.param(SCAFFOLD(rounds=2, epochs=1), {"private"}, marks=pytest.mark.slow),
    ],
    ids=["fedseq", "scaffold"],
)
def test_a_flipped_byte_in_any_file_of_a_shelf_never_gives_another_model(
    method: Method, kinds: set[str], tmp_path: Path
) -> None:
    step = method.steps(3) - 1
    expected, draw = here(method), random.Random(0)
    (tmp_path / "first").mkdir()
    first, public = sealed_in(tmp_path / "first")
    with killed(first, step, 102):
        far(method, first, tmp_path / "first" / "run", public)
    node = 101
    found = {
        re.split("[-.]", file.name)[0]: file for file in sorted(shelf_of(first, node).iterdir())
    }
    assert found.keys() >= kinds
    ends: list[Any] = []
    for file in (found[kind] for kind in sorted(kinds)):
        size = file.stat().st_size
        for at in (size - 1, 11) if file.name.startswith("outcome") else (draw.randrange(size),):
            copy = tmp_path / str(len(ends))
            shutil.copytree(tmp_path / "first", copy)
            file_in_copy = copy / file.relative_to(tmp_path / "first")
            own = [
                replace(read(copy / file.path.name), limits=file.limits)
                for file in first.files.values()
            ]
            nodes = FakeNodes(own)
            flip(file_in_copy, at, draw.randrange(8))
            try:
                result = far(method, nodes, copy / "run", public)
            except UserError as error:
                ends.append(
                    "refused"
                    if "\n" not in str(error) and "client-1" in str(error)
                    else (file, at, error)
                )
                continue
            assert_equal(result, expected)
            ends.append("same")
    assert set(ends) <= {"same", "refused"}
    assert "same" in ends


def test_what_a_value_is_made_from_may_be_damaged_too(tmp_path: Path) -> None:
    nodes, public = sealed_in(tmp_path)
    with killed(nodes, 2, 102):
        far(FEDSEQ, nodes, tmp_path / "run", public)
    folder, draw = shelf_of(nodes, 101), random.Random(2)
    (folder / "outcome-1-0-train.parcel").unlink()
    request = folder / "request-1-0-train.parcel"
    whole = request.read_bytes()
    for at in (len(whole) - 1, 20, draw.randrange(len(whole))):
        request.write_bytes(whole)
        flip(request, at)
        with pytest.raises(
            UserError,
            match=r"client-1 .*outcome-1-0-train\.parcel is gone, and what it was made from",
        ):
            far(FEDSEQ, nodes, tmp_path / "run", public)
    request.write_bytes(whole)
    assert_equal(far(FEDSEQ, nodes, tmp_path / "run", public), here(FEDSEQ))
