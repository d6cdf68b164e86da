"""Sums that a silo tells twice: what their difference shows, and that the silo refuses it."""

import csv
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Subset
from ekiden.core.training.gram import Sums
from ekiden.core.training.private.promise import DP
from ekiden.core.training.private.sums import planned_sums
from ekiden.methods import FedGram
from ekiden.methods.exact.fedgram import Handoff
from ekiden.silos.silo import budget, told
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile, read
from ekiden.silos.silo.told import ToldSums
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.asked import TERMS, terms
from tests.silos.fakes import NAMES, FakeNodes, mine, silo_file, with_keys
from tests.silos.sessions import far

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
Row = tuple[object, ...]
PATIENT = (83.25, "f", "yes")


def patients(count: int = 80) -> list[Row]:
    draw = np.random.default_rng(0)
    return [
        (f"{draw.normal(60, 9):.2f}", "fm"[k % 2], ("yes", "no")[k % 3 == 0]) for k in range(count)
    ]


def silo(
    folder: Path, rows: Sequence[Row], more: str = "", header: str = "age,sex,died"
) -> SiloFile:
    """The file of a silo that trains on all of these rows."""
    (folder / "data").mkdir(exist_ok=True)
    for part, held in (("train", rows), ("test", rows[:20])):
        with open(folder / "data" / f"{part}.csv", "w", newline="") as out:
            csv.writer(out).writerows([header.split(","), *held])
    file = folder / "silo.toml"
    label = (
        f"label_column = {json.dumps(['days', 'event'])}"
        if "days" in header
        else 'label_column = "died"'
    )
    file.write_text(f'name = "a"\n[data]\npath = "data"\nval_fraction = 0.0\n{label}\n{more}')
    return read(file)


def test_the_difference_of_two_sums_is_a_patient_and_is_refused(tmp_path: Path) -> None:
    """Somebody who has the sums before and after a patient came reads her age, sex and outcome."""
    rows = patients()
    before = silo(tmp_path, rows).sums()
    assert silo(tmp_path, rows).sums() == before
    with pytest.raises(UserError, match="told with other rows before: the difference") as refused:
        silo(tmp_path, [*rows, PATIENT]).sums()
    assert "\n" not in str(refused.value)
    (tmp_path / "a-silo" / told.FILE).write_text("")  # what they would have shown
    after = silo(tmp_path, [*rows, PATIENT]).sums()
    age, old = after.moments["age"], before.moments["age"]
    assert age.count * age.mean - old.count * old.mean == pytest.approx(PATIENT[0], abs=1e-9)
    assert after.categories["sex"]["f"] - before.categories["sex"]["f"] == 1
    assert after.classes["yes"] - before.classes["yes"] == 1


def test_whatever_differs_is_refused(tmp_path: Path) -> None:
    """Other units, corrections, fewer rows, other categories, or many other rows."""
    rows = patients(120)
    silo(tmp_path, rows[:80]).sums()
    months = [(f"{12 * float(str(row[0])):.4f}", *row[1:]) for row in rows[:80]]
    changed = [("99.00", *rows[7][1:]) if k == 7 else row for k, row in enumerate(rows[:80])]
    for held in (rows[:79], rows[1:80], months, changed, rows):
        with pytest.raises(UserError, match="told with other rows before"):
            silo(tmp_path, held).sums()


def test_two_grids_of_times_show_single_events_and_the_second_is_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows = [(f"{draw.normal(60, 9):.2f}", int(k * 10 + 5), int(k % 2)) for k in range(80)]
    held = silo(tmp_path, rows, 'task = "survival"', "age,days,event")
    assert held.sums().followed is None
    first = held.sums((200, 420))
    assert held.sums((200, 420)) == first
    with pytest.raises(UserError, match="told with other times before"):
        held.sums((210, 420))


def test_few_values_that_differ_are_not_told(tmp_path: Path) -> None:
    """How many have a rare disease, and the one large value of a column, would follow from mean and
    deviation."""
    rows = [
        (*row[:2], int(k < 2), 900 if k == 5 else 0, *row[2:]) for k, row in enumerate(patients())
    ]
    told = silo(tmp_path, rows, header="age,sex,rare,dose,died").sums().moments
    assert [(told[name].mean, told[name].squares) for name in ("rare", "dose")] == [(0, 0), (0, 0)]
    assert told["rare"].count == 80
    often = [(*row[:2], int(k < 10), *row[3:]) for k, row in enumerate(rows)]
    other = tmp_path / "other"
    other.mkdir()
    assert (
        silo(other, often, header="age,sex,rare,dose,died").sums().moments["rare"].mean == 10 / 80
    )


def test_sums_of_ten_rows_with_different_values_are_told(tmp_path: Path) -> None:
    rows = patients(10)
    told = silo(tmp_path, rows).sums().moments["age"]
    ages = np.array([float(str(row[0])) for row in rows])
    assert told.count == 10
    assert told.mean == pytest.approx(ages.mean())
    assert told.deviation == pytest.approx(ages.std())


def test_a_damaged_file_stops_sums(tmp_path: Path) -> None:
    held = silo(tmp_path, patients())
    held.sums()
    file: Any = tmp_path / "a-silo" / told.FILE
    file.write_text(file.read_text().replace("{", "", 1))
    with pytest.raises(UserError, match=r"told\.jsonl, line 1 is damaged"):
        held.sums()


def test_a_silo_that_lost_what_it_counts_tells_nothing_more(tmp_path: Path) -> None:
    """Or it would tell all once more. An empty file is its owner's word that nobody read it."""
    held = silo(tmp_path, patients())
    held.sums()
    private = replace(TERMS, recipe=replace(TERMS.recipe, dp="epsilon=3,delta=1e-5,clip=1"))
    (tmp_path / "run").mkdir()
    keeper = budget.LedgerKeeper(held, private, tmp_path / "run", "0-0")
    spent = planned_sums(DP(epsilon=3, delta=1e-5), 80, "a")
    keeper.key(0, spent)
    counted: list[tuple[str, Callable[[], object]]] = [
        (told.FILE, held.sums),
        (budget.FILE, lambda: keeper.key(0, spent)),
    ]
    for name, tell in counted:
        file = held.folder / name
        file.unlink()
        with pytest.raises(UserError, match=f"{name} is gone, which counts what was told"):
            tell()
        file.touch()
        tell()


class Grown(FakeNodes):
    """Silos of which one holds only some of its training samples."""

    def __init__(self, files: Sequence[SiloFile], left_out: int) -> None:
        super().__init__(files)
        self.left_out = left_out

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        dataset, client = mine(file.name)
        if file.name == NAMES[1]:
            client = replace(
                client, train=Subset(client.train.samples, client.train.rows[self.left_out :])
            )
        return Silo(file, {"": (dataset, client)})


def gram_of(
    folder: Path, files: Sequence[SiloFile], public: dict[str, str], left_out: int, seed: int = 3
) -> torch.Tensor:
    """The total of a run of FedGram, as the last silo reads it."""
    totals = list[torch.Tensor]()

    def ended(method: FedGram, network: Any, handoff: Handoff, task: Any) -> Any:
        assert isinstance(handoff.sums, Sums)
        totals.append(handoff.sums.matrix())
        return solved(method, network, handoff, task)

    with pytest.MonkeyPatch.context() as patch:
        solved = FedGram.solved
        patch.setattr(FedGram, "solved", ended)
        method = FedGram(dictionary="seed", width=20, min_active=10)
        far(method, Grown(files, left_out), folder, public, seed=seed)
    return totals[0]


def test_the_difference_of_two_runs_is_a_patient_and_is_refused(tmp_path: Path) -> None:
    """The last silo subtracts the totals of two runs between which one sample came to another silo:
    it has rank one."""
    files, public = with_keys(tmp_path, NAMES, '[limits]\nmethods = ["fedgram"]\n', trusting=False)
    before = gram_of(tmp_path / "0", files, public, 1)
    for number, (left_out, seed, what) in enumerate(
        ((0, 3, "rows"), (30, 3, "rows"), (1, 4, "features"))
    ):
        with pytest.raises(UserError, match=f"told with other {what} before") as refused:
            gram_of(tmp_path / f"refused-{number}", files, public, left_out, seed)
        assert "\n" not in str(refused.value)
    assert gram_of(tmp_path / "2", files, public, 1).equal(before)
    (files[1].folder / told.FILE).write_text("")
    after = gram_of(tmp_path / "4", files, public, 0)
    assert torch.linalg.matrix_rank(after - before) == 1


def test_other_features_of_the_same_rows_are_refused(tmp_path: Path) -> None:
    """Equations of many runs show rows that those of one do not. Nothing is noted before a silo
    gives a part."""
    file = silo_file(tmp_path, NAMES[1], "[limits]\nmin_clients = 2\n", trusting=False)
    safe = FedGram(width=20, dictionary="seed", min_active=10)

    def asked(method: FedGram, kind: str = "hello", **more: Any) -> str:
        agreed = replace(terms(method), run=secrets.token_hex(8), **more)
        return unpack(
            Silo(file, {"": mine(NAMES[1])}).answer(pack(Ask(kind, agreed.text()))), Answer
        )[0].error

    assert asked(safe) == asked(replace(safe, width=30)) == ""
    about = {"rows": mine(NAMES[1])[1].train.digest.hex(), "features": "others"}
    told.note(file.folder, ToldSums("training samples of shape (1, 8, 8)", about))
    assert "told with other features before" in asked(safe)
    classes = (*map(str, range(1, 10)), "0")  # another order hides nothing
    assert "client-1 and the run are of different classes" in asked(safe, classes=classes)
    models = replace(file, limits=replace(file.limits, level="models"))
    agreed = replace(terms(safe), run=secrets.token_hex(8))
    hello = Silo(models, {"": mine(NAMES[1])}).answer(pack(Ask("hello", agreed.text())))
    assert unpack(hello, Answer)[0].error == "", "models show samples without that"


def test_two_lists_that_differ_by_one_silo_need_its_agreement(tmp_path: Path) -> None:
    """The difference of the totals would be the part of this silo."""
    kind, agree = "test samples", [False]
    told.note(tmp_path, ToldSums(kind, {"members": "a, b, c"}))
    two = ToldSums(kind, {"members": "a, b"}, lambda: agree[0])
    with pytest.raises(UserError, match="told with other members before"):
        told.note(tmp_path, two)
    agree[0] = True
    told.note(tmp_path, two, write_down=False)
    told.note(tmp_path, two)
    with pytest.raises(UserError, match="told with other members before"):
        told.note(tmp_path, ToldSums(kind, {"members": "a, b, c"}))


def test_a_silo_gives_its_part_to_sums_of_all_silos(tmp_path: Path) -> None:
    """A coordinator asks for the sum of two of three silos, next to that of all."""
    files, public = with_keys(tmp_path, NAMES, '[limits]\nmethods = ["fedgram"]\n', trusting=False)
    nodes, said = FakeNodes(files), list[str]()
    send = nodes.send

    def fewer(node: int, data: bytes) -> Any:
        ask, body = unpack(data, Ask)
        if ask.kind == "task" and len(ask.members) == 3:
            less = pack(replace(ask, members=ask.members[:2]), (bytes(body),))
            said.append(unpack(nodes.silo(100).answer(less), Answer)[0].error)
        return send(node, data)

    nodes.send = fewer  # type: ignore[method-assign]
    far(FedGram(width=20, dictionary="seed", min_active=10), nodes, tmp_path / "run", public)
    assert any("gives its part to sums of all silos of a run, not of" in error for error in said)
