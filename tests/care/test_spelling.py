"""How names that are written in several ways are refused, merged or kept."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ekiden
from ekiden.care import spelling
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.readers.sources import join
from tests.care.rows import N, silos, small_table

Command = Callable[..., tuple[int, str]]


NAMES = {
    "north": {"Yes": 40, "No": 20},
    "south": {"yes": 30, "no ": 50},
    "east": {"maybe": 3, "No": 9},
}


def test_names_that_differ_in_case_or_blanks_are_found_with_their_silos() -> None:
    label = spelling.Names("the label", NAMES)
    assert label.alike() == [["Yes", "yes"], ["no ", "No"]]
    with pytest.raises(
        UserError, match=r"the label has 'Yes' \(north\) and 'yes' \(south\); the label has 'no '"
    ):
        spelling.refuse_spellings([label])
    assert label.instead == {"yes": "Yes", "No": "no "}
    assert spelling.Names("", NAMES, ("No", "yes")).instead == {"Yes": "yes", "no ": "No"}
    assert spelling.Names("", {"north": {"a b": 1, "c": 2}}).instead == {}


@given(
    st.lists(
        st.text(st.sampled_from("aA bB"), min_size=1, max_size=4),
        min_size=1,
        max_size=12,
        unique=True,
    )
)
def test_after_merging_no_two_names_are_alike(names: list[str]) -> None:
    each = {"silo": dict.fromkeys(names, 1)}
    instead = spelling.Names("", each).instead
    left = {instead.get(name, name) for name in names}
    assert len(left) == len({spelling.fold(name) for name in names})
    assert left <= set(names)


def answers(*writing: tuple[str, str], column: str = "died") -> list[Any]:
    made = []
    for k, (yes, no) in enumerate(writing):
        rng = np.random.default_rng(k)
        other = {"died": ["Yes", "No"] * 30} if column != "died" else {}
        made.append(
            {"a": rng.normal(size=60), column: [yes if k % 3 else no for k in range(60)], **other}
        )
    return made


WRITTEN = (("Yes", "No"), ("Yes", "No"), ("yes", "no "))


@pytest.mark.filterwarnings("ignore:silo client-2 shares no category")  # if they are kept
@pytest.mark.parametrize("column", ["died", "smokes"])
def test_spellings_of_silos_stop_are_merged_or_kept(column: str) -> None:
    silos = answers(*WRITTEN, column=column)
    what = "the label 'died'" if column == "died" else "column 'smokes'"
    with pytest.raises(
        UserError, match=rf"{what} has 'Yes' \(client-0, client-1\) and 'yes' \(client-2\)"
    ):
        ekiden.federate(silos, label_column="died")
    for how, names in (("merge", {"Yes", "No"}), ("keep", {"Yes", "No", "yes", "no "})):
        data = ekiden.federate(silos, label_column="died", spelling=how).dataset
        found = data.classes if column == "died" else data.inputs.vocabularies[0]  # type: ignore[attr-defined]
        assert set(found) == names


def test_names_of_silos_are_read_as_often_for_many_as_for_few() -> None:
    class Held(dict[str, int]):
        reads = 0

        def __iter__(self) -> Iterator[str]:
            Held.reads += 1
            return super().__iter__()

    reads = []
    for count in (3, 300):
        Held.reads = 0
        held = {
            s: Held({f"p{sign}{k}": 1 for k in range(count)}) for s, sign in (("a", ""), ("b", "-"))
        }
        assert len(spelling.Names("the subject column", held).told()) == count
        reads.append(Held.reads)
    assert reads[0] == reads[1] > 0


def test_spellings_of_groups_and_of_a_known_model() -> None:
    """In one table, the groups are the silos. To measure a model, names are merged into those that
    it knows."""
    parts = answers(*WRITTEN)
    table = {
        name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in ("a", "died")
    }
    table["ward"] = np.repeat(["n", "s", "e"], 60)
    with pytest.raises(UserError, match=r"'Yes' \(n, s\) and 'yes' \(e\)"):
        ekiden.load(table, label_column="died", group_column="ward")
    whole = ekiden.load(table, label_column="died", group_column="ward", spelling="merge")
    assert whole.classes == ("No", "Yes")
    data = ekiden.split(whole, "natural").dataset
    assert ekiden.load(parts[2], like=data, label_column="died", spelling="merge").classes == (
        "No",
        "Yes",
    )


def test_spellings_stop_on_the_command_line(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "silos").mkdir()
    for name, part in zip("abc", answers(*WRITTEN), strict=True):
        pandas.DataFrame(part).to_csv(tmp_path / "silos" / f"{name}.csv", index=False)
    code, said = command("data", "--silos", "silos", "--label-column", "died")
    assert (code, said.count("\n")) == (2, 1)
    assert "'Yes' (a, b) and 'yes' (c)" in said
    code, said = command(
        "data", "--silos", "silos", "--label-column", "died", "--spelling", "merge"
    )
    assert code == 0, said
    assert "2 classes" in said


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("yes", "no"), ("1", "0")),
        (("Y", "N"), ("true", "false")),
        (("ja", "nein"), ("yes", "no")),
        (("stage-II", "stage-I"), ("stage II", "stage_I")),
        (("yes\u200b", "no"), ("yes", "no")),
        (("yes\u00a0", "no"), ("yes", "no")),
        (("Alzheimer\u2019s", "none"), ("Alzheimer's", "none")),
        (("18\u201330", "31\u201360"), ("18-30", "31-60")),
        (("c01", "c02"), ("c1", "c2")),
    ],
)
@pytest.mark.filterwarnings("ignore:silo client-2 shares no category")  # if they are kept
@pytest.mark.parametrize("column", ["died", "smokes"])
def test_names_that_mean_the_same_stop_are_merged_or_kept(
    one: tuple[str, str], other: tuple[str, str], column: str
) -> None:
    how: dict[str, Any] = {
        "label_column": "died",
        "categorical_columns": "smokes" if column == "smokes" else (),
    }
    silos = answers(one, one, other, column=column)
    with pytest.raises(
        UserError, match=r"differ in case, blanks, signs or leading zeros only, or mean the same"
    ):
        ekiden.federate(silos, **how)
    for spelling_, count in (("merge", 2), ("keep", len({*one, *other}))):
        data = ekiden.federate(silos, spelling=spelling_, **how).dataset
        found = data.classes if column == "died" else data.inputs.vocabularies[0]  # type: ignore[attr-defined]
        assert len(found) == count


def test_truth_values_and_numbers_are_two_spellings_also_in_files(tmp_path: Path) -> None:
    for name, part in (("a", answers(("True", "False"))[0]), ("b", answers(("1", "0"))[0])):
        pandas.DataFrame(part).to_csv(tmp_path / f"{name}.csv", index=False)
    with pytest.raises(UserError, match=r"'(1|true)' \([ab]\) and '(1|true)'"):
        join([f"{tmp_path}/a.csv", f"{tmp_path}/b.csv"], label_column="died")


def test_silos_without_a_class_in_common_stop_unless_they_are_kept_or_named() -> None:
    silos = answers(("dead", "alive"), ("exitus", "home"))
    with pytest.raises(
        UserError,
        match=r"silo client-0 shares no class with others .*'alive', 'dead'.*spelling='keep'",
    ):
        ekiden.federate(silos, label_column="died")
    assert len(ekiden.federate(silos, label_column="died", spelling="keep").dataset.classes) == 4
    names = ("dead", "alive", "exitus", "home")
    assert ekiden.federate(silos, label_column="died", classes=names).dataset.classes == names


@pytest.mark.parametrize("column", ["group", "domain", "subject"])
def test_owners_in_several_spellings_stop_and_are_merged(column: str) -> None:
    table = {
        "a": np.arange(80.0),
        "label": np.arange(80) % 2,
        "who": ["North", "north ", "South", "East"] * 20,
    }
    how: dict[str, Any] = {f"{column}_column": "who"}
    with pytest.raises(UserError, match=rf"the {column} column has 'North' .* and 'north '"):
        ekiden.load(table, **how)
    data = ekiden.load(table, spelling="merge", **how)
    assert len({int(k) for part in (data.train, data.test) for k in getattr(part, column)}) == 3


def test_classes_of_minus_one_and_of_zero_are_refused() -> None:
    rng, labels = np.random.default_rng(0), np.arange(40) % 2
    silos: list[Any] = [{"dose": rng.normal(size=40), "label": y} for y in (labels, 2 * labels - 1)]
    with pytest.raises(UserError, match="classes are -1 to 1 at client-1, but 0 to 1 at client-0"):
        ekiden.federate(silos)
    assert ekiden.federate(silos, spelling="keep").dataset.classes == ("-1", "0", "1")


def numbered(first: int, seed: int = 0, rows: int = 40) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {"dose": draw.normal(size=rows), "label": first + np.arange(rows) % 2}


def test_classes_numbered_from_0_and_from_1_are_refused_with_the_silos(
    tmp_path: Path, command: Command
) -> None:
    silos: list[Any] = [numbered(0, 0), numbered(1, 1), numbered(1, 2)]
    line = "classes are 0 to 1 at north, but 1 to 2 at south, west: write classes alike, or take them as they are by"
    with pytest.raises(UserError, match=line):
        ekiden.federate(silos, names=["north", "south", "west"])
    assert ekiden.federate(silos, spelling="keep").dataset.classes == ("0", "1", "2")
    together = pandas.concat(
        [pandas.DataFrame(s).assign(ward=w) for s, w in zip(silos, ("a", "b", "c"), strict=True)]
    )
    together.to_csv(tmp_path / "t.csv", index=False)
    code, said = command("data", str(tmp_path / "t.csv"), "--group-column", "ward")
    assert code == 2
    assert "classes are 0 to 1 at a, but 1 to 2 at b, c" in said
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    with pytest.warns(
        DataWarning, match="classes are 0 to 1 at client-0, but 1 to 2 at client-1: check"
    ):
        ekiden.federate([(x, np.arange(40) % 2), (x + 1, 1 + np.arange(40) % 2)])


@pytest.mark.parametrize(
    "held",
    [
        [{0, 1}, {0, 1}],
        [{0, 1, 2}, {1, 2}],
        [{0, 1}, {2, 3}],
        [{1, 2}, {1, 2}],
        [{0, 2}, {1, 3}],
        [{0}, {1}],
        [{0, 1}, {1, 2}, {0, 2}],
    ],
)
def test_silos_that_hold_other_classes_are_not_taken_for_another_count(
    held: list[set[int]],
) -> None:
    assert not spelling.numbered_from_two(
        {f"s{k}": map(str, labels) for k, labels in enumerate(held)}
    )


@given(
    st.integers(2, 30),
    st.lists(st.booleans(), min_size=2, max_size=6).filter(lambda s: len(set(s)) == 2),
)
def test_any_number_of_classes_counted_from_0_and_from_1_is_found(
    classes: int, shifted: list[bool]
) -> None:
    held = {f"s{k}": [*map(str, range(one, classes + one))] for k, one in enumerate(shifted)}
    line = spelling.numbered_from_two(held)
    assert all(f"s{k}" in line for k in range(min(len(shifted), 5)))


pytestmark = pytest.mark.usefixtures("no_data")


def test_a_column_with_another_spelling_of_its_name_is_asked_for() -> None:
    with pytest.raises(
        UserError,
        match="rename 'Age' to 'age' if it is that in the same unit, because all silos need",
    ):
        silos({"age": np.arange(N)}, {"Age": np.arange(N)})


@pytest.mark.parametrize("ids", [("001", "1"), ("P-01", "P1")])
def test_subjects_with_leading_zeros_stop_are_merged_or_kept(ids: tuple[str, str]) -> None:
    padded, plain = ids
    people = [[padded, "x7"] * 30, [plain, "x8", "x9"] * 20]
    silos: list[Any] = [small_table(p=own, c=np.arange(60) + k) for k, own in enumerate(people)]
    with pytest.raises(
        UserError, match=f"the subject column has '{padded}' .* and '{plain}' .* the same"
    ):
        ekiden.federate(silos, subject_column="p")

    def people_of(how: Any) -> int:
        data = ekiden.federate(silos, subject_column="p", spelling=how, drop_columns="c").dataset
        return len({*data.train.subject.tolist(), *data.test.subject.tolist()})  # type: ignore[union-attr]

    assert people_of("keep") == 5
    assert people_of("merge") == 4
    silos[0]["p"] = [padded, plain] * 30  # a silo that has both tells them apart
    assert people_of("") == 4
