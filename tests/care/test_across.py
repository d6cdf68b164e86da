"""What silos report is compared before training: units of columns, spellings of names."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ekiden
from ekiden.care import spelling, units
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.readers.moments import ColumnMoments
from ekiden.readers.sources import join

Command = Callable[..., tuple[int, str]]


def hospitals(silos: int = 3, rows: int = 60) -> list[Any]:
    made = []
    for k in range(silos):
        rng = np.random.default_rng(k)
        made.append(
            {
                "height": rng.normal(170, 10, rows),
                "weight": rng.normal(75, 12, rows),
                "sex": rng.choice(["f", "m"], rows),
                "label": ["p", "q"] * (rows // 2),
            }
        )
    return made


@pytest.mark.parametrize(
    ("silos", "factor", "line"),
    [
        (
            3,
            0.01,
            r"column 'height' of client-1 differs from other silos by a factor of about 100 \(mean "
            r"1.69",
        ),
        (4, 10, r"column 'height' of client-1 differs from other silos by a factor of about 10 \("),
        (3, 1000, "a factor of about 1,000"),
        (
            2,
            0.01,
            r"column 'height' of client-0 and client-1 differs by a factor of about 100 \(means "
            r"1.* and 1.*\)",
        ),
    ],
)
def test_a_silo_in_another_unit_is_named(silos: int, factor: float, line: str) -> None:
    parts = hospitals(silos)
    parts[1]["height"] = parts[1]["height"] * factor
    with pytest.warns(DataWarning, match=line) as seen:
        ekiden.federate(parts)
    assert len(seen) == 1
    assert "weight" not in str(seen[0].message)


def test_fahrenheit_is_many_deviations_away_and_hospitals_that_differ_are_not_named() -> None:
    parts = hospitals()
    for k, part in enumerate(parts):
        part["height"] = part["height"] + 8 * k  # other people, the same unit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.federate(parts)
    for part in parts:
        part["temperature"] = np.random.default_rng(0).normal(37, 0.5, 60)
    parts[2]["temperature"] = parts[2]["temperature"] * 9 / 5 + 32
    with pytest.warns(
        DataWarning, match=r"'temperature' of client-2 differs .* standard deviations"
    ):
        ekiden.federate(parts)


@given(
    st.integers(3, 8),
    st.integers(0, 7),
    st.sampled_from((0.001, 0.01, 0.1, 10, 100, 1000)),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_one_silo_in_another_unit_is_the_only_one_named(
    silos: int, odd: int, factor: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    each = {}
    for k in range(silos):
        values = rng.normal(rng.uniform(40, 60), rng.uniform(8, 12), 100) * (
            factor if k == odd % silos else 1
        )
        each[f"s{k}"] = {"column 'dose'": ColumnMoments.of(values, "dose")}
    with pytest.warns(
        DataWarning, match=f"of s{odd % silos} differs from other silos by a factor of about"
    ) as seen:
        units.compare_units(each)
    assert str(seen[0].message).count("differs") == 1


def test_the_order_of_columns_does_not_matter() -> None:
    parts = hospitals(2)
    other: Any = {name: parts[1][name] for name in ("weight", "label", "sex", "height")}
    one, two = ekiden.federate(parts), ekiden.federate([parts[0], other])
    assert one.dataset.inputs == two.dataset.inputs
    assert one.dataset.train.x.equal(two.dataset.train.x)


def test_a_partition_of_one_table_is_not_a_difference_of_units() -> None:
    table = {name: np.concatenate([part[name] for part in hospitals()]) for name in hospitals()[0]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.split(ekiden.load(table), "dirichlet:0.1", 4)


NAMES = {
    "north": {"Yes": 40, "No": 20},
    "south": {"yes": 30, "no ": 50},
    "east": {"maybe": 3, "No": 9},
}


def test_names_that_differ_in_case_or_blanks_are_found_with_their_silos() -> None:
    assert spelling.spellings(NAMES) == [
        [("Yes", ["north"]), ("yes", ["south"])],
        [("no ", ["south"]), ("No", ["north", "east"])],
    ]
    with pytest.raises(
        UserError, match=r"the label has 'Yes' \(north\) and 'yes' \(south\); the label has 'no '"
    ):
        spelling.refuse_spellings({"the label": NAMES})
    assert spelling.merging(NAMES) == {"yes": "Yes", "No": "no "}
    assert spelling.merging(NAMES, known=("No", "yes")) == {"Yes": "yes", "no ": "No"}
    assert spelling.merging({"north": {"a b": 1, "c": 2}}) == {}


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
    instead = spelling.merging(each)
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
    with pytest.raises(
        UserError, match="classes are -1 and 1 at client-1, but 0 and 1 at client-0"
    ):
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
