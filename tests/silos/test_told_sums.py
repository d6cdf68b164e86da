"""Sums of columns that a silo tells twice: what their difference shows, and that the silo refuses
it."""

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

from ekiden.core import tasks
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Sums, measure
from ekiden.core.data.samples import Subset
from ekiden.core.models import build
from ekiden.core.tasks import Classification
from ekiden.methods import GLM, FedGram
from ekiden.methods.exact.blocks.fixed_features import features_of
from ekiden.methods.exact.fedgram import Handoff
from ekiden.readers import kinds
from ekiden.readers.followed import Followed
from ekiden.silos.silo import differences, policy
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile, read
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import NAMES, FakeNodes, mine, silo_file, with_keys
from tests.silos.test_remote import far
from tests.silos.test_silo import terms

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
    with pytest.raises(
        UserError, match="sums of these rows were reported before, except for 1 value in a column"
    ) as refused:
        silo(tmp_path, [*rows, PATIENT]).sums()
    assert "\n" not in str(refused.value)
    (tmp_path / "a-silo" / differences.FILE).unlink()  # what they would have shown
    after = silo(tmp_path, [*rows, PATIENT]).sums()
    age = (
        after.moments["age"].count * after.moments["age"].mean
        - before.moments["age"].count * before.moments["age"].mean
    )
    assert age == pytest.approx(PATIENT[0], abs=1e-9)
    assert after.categories["sex"]["f"] - before.categories["sex"]["f"] == 1
    assert after.classes["yes"] - before.classes["yes"] == 1


def test_neither_other_options_nor_another_name_hide_a_difference(tmp_path: Path) -> None:
    rows = patients()
    silo(tmp_path, rows).sums()
    changed = [
        (f"{float(str(row[0])) + 3:.2f}", *row[1:]) if k == 7 else row for k, row in enumerate(rows)
    ]
    more = [*rows, PATIENT]
    for held, options in (
        (more, 'drop_columns = ["sex"]'),
        (more, 'categorical_columns = ["sex"]'),
        (rows[:-1], ""),
        (changed, ""),
        ([row for k, row in enumerate(rows) if k not in (1, 5)], ""),
        (more, "missing = ['-9']"),
    ):
        with pytest.raises(UserError, match="the difference would show them"):
            silo(tmp_path, held, options).sums()
    months = [(f"{12 * float(str(row[0])):.4f}", *row[1:]) for row in more]
    with pytest.raises(
        UserError, match="the difference would show them"
    ):  # one column in another unit
        silo(tmp_path, months).sums()


def test_corrections_of_one_column_and_other_units_of_all_hide_no_patient(tmp_path: Path) -> None:
    """Five corrected ages make eleven values that differ with hers; her sex and outcome would
    follow all the same."""
    rows = patients()
    before = silo(tmp_path, rows).sums()
    corrected = [
        (f"{float(str(row[0])) + 3:.2f}", *row[1:]) if k < 5 else row
        for k, row in enumerate([*rows, PATIENT])
    ]
    weeks = [
        (f"{52 * float(str(row[0])):.4f}", {"f": "female", "m": "male"}[str(row[1])], *row[2:])
        for row in corrected
    ]
    for held in (
        corrected,
        weeks,
    ):  # keyed hashes of 16 bits may collide: then it names more values
        with pytest.raises(
            UserError, match=r"except for \d values? in a column: the difference would show"
        ):
            silo(tmp_path, held).sums()
    other = tmp_path / "other"  # what they would have shown
    other.mkdir()
    after = silo(other, corrected).sums()
    assert after.categories["sex"]["f"] - before.categories["sex"]["f"] == 1
    assert after.classes["yes"] - before.classes["yes"] == 1


def test_all_columns_in_another_unit_hide_no_patient(tmp_path: Path) -> None:
    rows = [(row[0], 7.5 * k) for k, row in enumerate(patients())]
    task = 'task = "regression"'
    silo(tmp_path, rows, task, "age,died").sums()
    pounds = [
        (f"{12 * float(str(age)):.4f}", 2.2 * float(cost) + 1)
        for age, cost in [*rows, (PATIENT[0], 4)]
    ]
    with pytest.raises(
        UserError, match="except for 1 value in a column: the difference would show"
    ):
        silo(tmp_path, pounds, task, "age,died").sums()
    assert silo(tmp_path, pounds[:-1], task, "age,died").sums().moments["age"].count == 80


def test_the_same_sums_and_sums_of_many_other_rows_are_told(tmp_path: Path) -> None:
    rows = patients(120)
    first = silo(tmp_path, rows[:80]).sums()
    assert silo(tmp_path, rows[:80]).sums() == first
    assert silo(tmp_path, rows[:80][::-1]).sums().classes == first.classes
    assert silo(tmp_path, rows[:80], 'drop_columns = ["sex"]').sums().categories == {}
    assert silo(tmp_path, rows).sums().moments["age"].count == 120
    assert len((tmp_path / "a-silo" / differences.FILE).read_text().splitlines()) == 3
    with pytest.raises(UserError, match="reported before, except for 9 values"):
        silo(tmp_path, rows[:111]).sums()


def test_three_sums_that_show_a_patient_together_are_refused(tmp_path: Path) -> None:
    """Two parts, and all rows with one patient more: any two differ in many rows."""
    rows = patients()
    parts = [silo(tmp_path, part).sums() for part in (rows[:50], rows[50:])]
    with pytest.raises(
        UserError, match="earlier sums, added and subtracted, leave fewer than 10 values of 'age'"
    ):
        silo(tmp_path, [*rows, PATIENT]).sums()
    silo(tmp_path, rows[:50]).sums()  # those that were told before
    (tmp_path / "a-silo" / differences.FILE).unlink()  # what they would have shown
    both = silo(tmp_path, [*rows, PATIENT]).sums()
    ages = [one.moments["age"].count * one.moments["age"].mean for one in (both, *parts)]
    assert ages[0] - sum(ages[1:]) == pytest.approx(PATIENT[0], abs=1e-9)


def test_two_grids_of_times_show_single_events_and_the_second_is_refused(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    rows = [(f"{draw.normal(60, 9):.2f}", int(k * 10 + 5), int(k % 2)) for k in range(80)]
    y = np.array([row[1:] for row in rows], dtype=float)
    one, two = Followed.of(y, (200, 420), 10), Followed.of(y, (210, 420), 10)
    assert all(
        n == 0 or n >= 10
        for told in (one, two)
        for n in (*told.events, *told.before, *told.at, told.later)
    )
    assert [b - a for a, b in zip(one.events, two.events, strict=True)] == [0, 0]
    assert [b - a for a, b in zip(one.before, two.before, strict=True)] == [
        1,
        -1,
    ]  # one patient, last seen at 205
    header = 'task = "survival"'
    held = silo(tmp_path, rows, header, "age,days,event")
    told = held.sums((200, 420))
    assert told.followed == one
    assert held.sums((200, 420)) == told
    with pytest.raises(
        UserError, match="reported before, at the times 200 420: two grids show single events"
    ):
        held.sums((210, 420))
    assert held.sums().followed is None
    with pytest.raises(UserError, match="except for 1 value"):
        silo(tmp_path, rows[1:], header, "age,days,event").sums((210, 420))


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
    file: Any = tmp_path / "a-silo" / differences.FILE
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text(file.read_text() + "{")
    with pytest.raises(UserError, match=r"told\.jsonl is damaged"):
        held.sums()
    (tmp_path / "a-silo" / "told.salt").unlink()  # a new one would hide that rows are the same
    with pytest.raises(
        UserError, match=r"cannot be read without .*told\.salt: restore that from a backup"
    ):
        held.sums()


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
        return Silo(file, (dataset, client))


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
    with pytest.raises(
        UserError, match="summed over the same training samples except for fewer than 10"
    ) as refused:
        gram_of(tmp_path / "1", files, public, 0)
    assert "\n" not in str(refused.value)
    assert (
        gram_of(tmp_path / "2", files, public, 1, seed=4).shape == before.shape
    )  # the same samples again
    assert gram_of(tmp_path / "3", files, public, 30).shape == before.shape  # many others
    open_files = [replace(file, limits=replace(file.limits, differences=True)) for file in files]
    after = gram_of(tmp_path / "4", open_files, public, 0)
    assert torch.linalg.matrix_rank(after - before) == 1


def test_many_runs_tell_no_more_sums_than_one_may(tmp_path: Path) -> None:
    """Sums of features of other seeds are other equations for the same samples; those of a silo are
    counted."""
    file = silo_file(tmp_path, NAMES[1], '[limits]\nmethods = ["fedgram"]\n', trusting=False)
    dataset, client = mine(NAMES[1])

    def asked(
        width: int, seed: int = 3, file: SiloFile = file, left_out: int = 0, **more: Any
    ) -> str:
        agreed = terms(
            FedGram(dictionary="seed", width=width, min_active=10, **more), keys=(), sealed=False
        )
        agreed = replace(agreed, run=secrets.token_hex(8), recipe=replace(agreed.recipe, seed=seed))
        held = (
            dataset,
            replace(client, train=Subset(client.train.samples, client.train.rows[left_out:])),
        )
        return unpack(Silo(file, held).answer(pack(Ask("hello", agreed.text()))), Answer)[0].error

    assert not asked(50)
    assert not asked(20, seed=4)
    said = asked(50, seed=4)
    assert "earlier runs told 2,185 sums of these samples, this one would tell 1,775 more" in said
    assert "\n" not in said
    assert "earlier runs told 2,185 sums" in asked(
        50, left_out=40
    )  # many new samples are a part of all
    assert not asked(50, ridge=0.1)  # the same sums
    assert not asked(50, seed=4, file=replace(file, limits=replace(file.limits, differences=True)))


def test_sums_count_with_those_of_most_of_the_rows(tmp_path: Path) -> None:
    held = mine(NAMES[1])[1].train

    def tell(rows: torch.Tensor, features: str = "a", numbers: int = 60) -> None:
        differences.note_sums(
            tmp_path, Subset(held.samples, held.rows[rows]), features, numbers, 100, 10
        )

    every = torch.arange(120)
    tell(every[:50], numbers=1000)  # one run is bounded by its features
    tell(every[:50], numbers=1000)
    for rows, features in ((every[:50], "b"), (every[:60], "a"), (every[:20], "a"), (every, "c")):
        with pytest.raises(
            UserError, match="earlier runs told 1,000 sums of these samples, this one would tell 60"
        ):
            tell(rows, features)
    tell(every[50:110])
    tell(every[50:110], "b", 40)
    with pytest.raises(UserError, match="earlier runs told 100 sums"):
        tell(every[50:110], "c", 1)
    for samples in (
        held.samples,
        replace(held.samples, x=held.samples.x + 1),
    ):  # all rows in another scale
        with pytest.raises(UserError, match="earlier runs told 1,000 sums"):
            differences.note_sums(tmp_path, Subset(samples, held.rows[:50]), "c", 1, 100, 10)


def test_sums_of_a_regression_count_too(tmp_path: Path) -> None:
    file = silo_file(tmp_path, NAMES[1], trusting=False)
    client = mine(NAMES[1])[1]
    policy.check_differences(file, terms(GLM(family="linear")), client, 300)
    with pytest.raises(UserError, match="earlier runs told 48,150 sums of these samples"):
        policy.check_differences(
            file, terms(FedGram(dictionary="seed", width=20, min_active=10)), client, 20
        )


def test_another_scale_of_all_rows_hides_no_patient(tmp_path: Path) -> None:
    """A coordinator hands out an agreement whose scales differ in the last bit, so that all rows
    do."""
    held = mine(NAMES[1])[1].train
    x = held.samples.x.float() / 255
    scaled = [replace(held.samples, x=x), replace(held.samples, x=x * (1 + 2**-22) + 1e-7)]
    differences.note_rows(tmp_path, Subset(scaled[0], held.rows[1:]), "training", 10)
    with pytest.raises(
        UserError, match="summed over the same training samples except for fewer than 10"
    ):
        differences.note_rows(tmp_path, Subset(scaled[1], held.rows), "training", 10)
    differences.note_rows(tmp_path, Subset(scaled[1], held.rows[1:]), "training", 10)


def test_another_agreement_hides_no_patient_who_replaces_another(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    """A coordinator hands out scales that differ in the last bit, when one patient has come and one
    has left."""
    rows = [(age, sex, "yes" if k % 3 else "no") for k, (age, sex, _) in enumerate(patients())]
    for name, held in ("a", rows[:-1]), ("b", rows[:50]):
        (tmp_path / name).mkdir()
        silo(tmp_path / name, held, "min_count = 3")
        assert command("silo", "sums", str(tmp_path / name / "silo.toml"))[0] == 0
        (tmp_path / f"{name}.json").write_bytes(
            (tmp_path / name / "a-sums.json").read_bytes().replace(b'"a"', f'"{name}"'.encode())
        )
    scales = tmp_path / "a" / "agreed.json"
    code, said = command(
        "federation",
        "agree",
        str(tmp_path / "a.json"),
        str(tmp_path / "b.json"),
        "--out",
        str(scales),
    )
    assert code == 0, said
    agreed = json.loads(scales.read_text())
    at = 0

    def run(held: Sequence[Row], factor: float = 1.0) -> str:
        nonlocal at
        at += 1
        changed = agreed | {"scale": [one * factor for one in agreed["scale"]]}
        scales.write_text(json.dumps(changed))
        file = silo(tmp_path / "a", held, 'min_count = 3\nagreed = "agreed.json"')
        dataset, client = file.load()
        written = file.as_written(client)
        assert [len(part) for part in (written.train, written.test)] == [
            len(client.train),
            len(client.test),
        ]
        method = FedGram(dictionary="seed", width=3, min_active=10)
        about = replace(terms(method, keys=(), sealed=False), run=f"{at:016x}", schema=file.schema)
        about = replace(about, recipe=replace(about.recipe, model="table_mlp"))
        about = replace(
            about,
            shape=dataset.shape,
            classes=dataset.classes,
            mean=tuple(map(float, dataset.mean)),
            std=tuple(map(float, dataset.std)),
            augment=dataset.augment,
            inputs=kinds.terms(dataset.inputs),
            task=tasks.terms(dataset.task),
        )
        return unpack(
            Silo(file, (dataset, client)).answer(pack(Ask("hello", about.text()))), Answer
        )[0].error

    assert not run(rows[:-1])
    assert not run(rows[:-1], 1 + 1e-9)  # the same patients
    assert "summed over the same training samples except for fewer than 10" in run(
        [*rows[:40], *rows[41:]], 1 + 1e-6
    )


def test_another_order_of_classes_hides_no_patient(tmp_path: Path) -> None:
    """With --spelling the terms order the classes, so all labels change; another patient came for
    one who left."""
    file = silo_file(tmp_path, NAMES[1], '[limits]\nmethods = ["fedgram"]\n', trusting=False)
    dataset, client = mine(NAMES[1])
    agreed = terms(FedGram(width=20, dictionary="seed", min_active=10), keys=(), sealed=False)
    other = replace(
        agreed, run="f" * 16, spelling="keep", classes=(*dataset.classes[1:], dataset.classes[0])
    )
    rows = client.train.rows
    for number, (kept, of) in enumerate(((rows[1:], agreed), (rows[:-1], other))):
        held = dataset, replace(client, train=Subset(client.train.samples, kept))
        said = unpack(Silo(file, held).answer(pack(Ask("hello", of.text()))), Answer)[0].error
        assert ("except for fewer than 10" in said) if number else not said


@pytest.mark.parametrize("kind", ["test", "validation", "run"])
def test_the_difference_of_two_evaluations_of_a_model_is_refused(kind: str, tmp_path: Path) -> None:
    """Nor does a run of sums measure nearly the same test samples: over the same training samples
    it has that model."""
    file = silo_file(tmp_path, NAMES[1], trusting=False)
    client, agreed = mine(NAMES[1])[1], terms(FedGram())
    if kind != "run":
        agreed = replace(agreed, measures="0" * 64, validation=kind == "validation")

    def measured(rows: torch.Tensor) -> None:
        part = Subset(client.test.samples, rows)
        held = replace(client, val=part) if kind == "validation" else replace(client, test=part)
        policy.check_differences(file, agreed, held, 0)

    rows = client.test.rows
    measured(rows)
    word = kind.replace("run", "test")
    with pytest.raises(
        UserError, match=f"summed over the same {word} samples except for fewer than 10"
    ):
        measured(rows[9:])
    measured(rows[10:])
    measured(rows.repeat_interleave(2))
    measured(rows)
    measured(rows[:9])


def test_combinations_of_three_and_four_runs_are_patients_and_are_refused(tmp_path: Path) -> None:
    """Any two of these runs differ in ten samples or more, and the totals of all, added and
    subtracted, are one."""
    held = mine(NAMES[1])[1].train
    method = FedGram(dictionary="seed", width=20)
    features = features_of(
        method.own_network(build("linear", (1, 8, 8), 10), (1, 8, 8), 10, Classification())
    )

    def total(rows: torch.Tensor) -> torch.Tensor:
        part = Subset(held.samples, held.rows[rows])
        return measure([(features(part.x.float() / 255), part.y)], 10, 20).matrix()

    every = torch.arange(100)
    years = [
        every[:40],
        every[40:99],
        every,
    ]  # a silo's samples of two years, and of both with one more
    late = torch.cat([every[:50], every[60:75]])
    cohorts = [
        every[:50],
        late,
        every[:61],
        every[:75],
    ]  # without and with two cohorts, one of which has a sample twice
    for number, (runs, signs) in enumerate(((years, (1, 1, -1)), (cohorts, (1, -1, -1, 1)))):
        left = sum(sign * total(rows) for sign, rows in zip(signs, runs, strict=True))
        assert torch.linalg.matrix_rank(left) == 1
        folder = tmp_path / str(number)
        for rows in (*runs[:-1], runs[0]):
            differences.note_rows(folder, Subset(held.samples, held.rows[rows]), "training", 10)
        with pytest.raises(
            UserError,
            match=f"{len(runs) - 1} earlier runs, added and subtracted, leave fewer than 10",
        ):
            differences.note_rows(folder, Subset(held.samples, held.rows[runs[-1]]), "training", 10)
        differences.note_rows(folder, Subset(held.samples, held.rows[every[5:70]]), "training", 10)
