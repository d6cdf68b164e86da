"""What each column means, by its name and by the user's choice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.data import load, split
from tests.readers.own_data import Rows, bad, csv, parquet, patients
from tests.readers.told import N, cells, rows, said

P = {k: v for k, v in patients().items() if k in ("age", "sex", "dose", "died")}
DIED = {"label_column": "died"}

pytestmark = pytest.mark.usefixtures("no_data")


def test_one_column_has_one_meaning() -> None:
    with pytest.raises(UserError, match="'p' cannot be two things"):
        ekiden.load({"p": ["a"], "label": ["b"]}, subject_column="p", group_column="p")


@pytest.mark.parametrize("how", [{"drop_columns": "patients"}, {"missing": "patients=-1"}])
def test_columns_that_are_not_there_are_said_if_another_is_nearly_called_so(how: Any) -> None:
    line = "has no column 'patients', which is named to leave it out or its marks: did you mean 'patient'?"
    assert line in said(lambda: load(rows(N, patient=np.arange(N)), **how))
    assert line not in said(lambda: load(rows(N, age=np.arange(N)), **how))


@pytest.mark.parametrize(
    ("name", "hint"), [("agee", "did you mean 'age'?"), ("weight", "it has age, y")]
)
def test_a_column_to_leave_out_that_is_not_there(name: str, hint: str, tmp_path: Path) -> None:
    """Another silo may have it, so nothing is refused."""
    text = "age,y\n" + "".join(f"{k / 7:.4f},{k % 2}\n" for k in range(N))
    assert f"has no column {name!r}, which is named to leave it out or its marks: {hint}" in cells(
        tmp_path, text, label_column="y", drop_columns=name
    )


def test_images_named_by_a_table(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows: Rows = {"file": [], "kind": [], "scanner": []}
    for k in range(20):
        Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / f"{k}.png")
        rows["file"].append(f"{k}.png")
        rows["kind"].append("ab"[k % 2])
        rows["scanner"].append(f"s{k % 4 // 2}")
    path = csv(tmp_path / "list.csv", rows)
    data = load(path, image_column="file", label_column="kind", group_column="scanner")
    assert data.shape == (1, 6, 6)
    assert data.groups == ("s0", "s1")
    Image.fromarray(rng.integers(0, 256, (6, 6), dtype=np.uint8)).save(tmp_path / "0.png")
    changed = load(path, image_column="file", label_column="kind", group_column="scanner")
    assert not torch.equal(
        data.train.x.sum() + data.test.x.sum(), changed.train.x.sum() + changed.test.x.sum()
    )


MISTAKES: list[tuple[str, Any, dict[str, Any], str]] = [
    ("a label column that is not there", P, {"label_column": "dead"}, "unknown column of .* 'dead': did you mean 'died'"),
    ("no label column", P, {}, r"has no column 'label': say which one holds the labels .* it has: age, sex, dose, died"),
    ("a group column that is not there", P, DIED | {"group_column": "ward"}, "unknown column of .* 'ward'"),
    ("a missing label", bad(P, died=[None, *P["died"][1:]]), DIED, r"the label in row 0 .* of .* is missing \(column 'died'\)"),  # noqa: E501
    ("one class", bad(P, died=["yes"] * 60), DIED, "all labels in .* are 'yes': classification needs two"),
    ("an infinite number", bad(P, age=[float("inf")] * 60), DIED, "column 'age' of .* is infinite in row 0"),
    ("a column without values", bad(P, age=[None] * 60), DIED, "column 'age' of .* has no value at all: .*drop_columns"),
    ("a label among the features", P, DIED | {"feature_columns": ["age", "died"]}, "'died' cannot be a feature and have another meaning"),  # noqa: E501
    ("no feature left", P, DIED | {"drop_columns": ["age", "sex", "dose"]}, "has no column left to learn from"),
    ("names as categories", bad(P, sex=[f"person {k // 5}" for k in range(60)]), DIED, "'sex' has no text that enough rows"),
    ("lists as a feature", bad(P, age=[[1, 2]] * 60) | {"b": [[1.0]] * 60}, DIED, "'age' .* holds list.*neither numbers nor"),  # noqa: E501
    ("many whole numbers as labels", bad(P, died=list(range(60))), DIED, "60 different whole numbers: use task"),
    ("text for a regression", P, DIED | {"task": "regression"}, "'died' .* holds text .*regression needs numbers"),
    ("fractions for classes", bad(P, died=[0.5] * 60), DIED | {"task": "classification"}, "is 0.5, not a class"),
    ("2 in a multi-label", bad(P, cough=[2] * 60, fever=[0] * 60), {"label_column": ("cough", "fever"),
     "drop_columns": "died", "task": "multi-label"}, "multi-label needs a row of 0 and 1"),
    ("text among several labels", P, {"label_column": ("sex", "age")}, "'sex' .* holds names: with several"),
    ("an unknown task", P, DIED | {"task": "regression2"}, "unknown task 'regression2': did you mean 'regression'"),
    ("an option that is not there", P, {"labels": "died"}, "unknown option 'labels'"),
    ("numbers as texts", P, DIED | {"text_column": "age"}, "'age' of .* holds double, not texts"),
    ("a tokenizer that is not there", P, DIED | {"text_column": "sex", "tokenizer": "bert"}, "there is no tokenizer 'bert'"),
    ("text and images", P, DIED | {"text_column": "sex", "image_column": "age"}, "give one of image_column"),
    ("an image column of numbers", P, DIED | {"image_column": "age"}, "'age' of .* holds double: images must be"),
    ("images that are not there", P, DIED | {"image_column": "sex"}, "row 0 .* of .* names the image .*which is not a file"),
    ("arrays of unlike length", bad(P, age=[[1.0] * (1 + k % 2) for k in range(60)]), DIED, "has 2 values, row 0 has 1 in row 1"),  # noqa: E501
    ("no lists in the array column", P, DIED | {"array_column": "age"}, "'age' of .* holds double, not lists of numbers"),
    ("too few rows", {k: v[:1] for k, v in P.items()}, DIED | {"task": "classification"}, "all labels|too few"),
    ("--size for a table", P, DIED | {"size": 32}, "size is the side of images, but the data are a table"),
    ("a window of one value", P, DIED | {"pixel_window": (1.0,)}, "pixel_window needs two values, low and high"),
    ("min-count 0", P, DIED | {"min_count": 0}, "min_count 0 is out of range"),
    ("a group without a value", bad(P, ward=[None, *["a"] * 59]), DIED | {"group_column": "ward"}, "'ward' .* has no value in row 0"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "options", "line"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_mistakes_in_a_table(
    rows: Rows, options: dict[str, Any], line: str, tmp_path: Path, command: Callable[..., tuple[int, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same line from Python and on the command line; nothing is written."""
    monkeypatch.chdir(tmp_path)
    path = parquet(tmp_path / "a.parquet", rows)
    with pytest.raises(UserError, match=line):
        split(load(path, **options), "iid", 2)
    if "labels" in options:
        return
    flags: list[str] = []
    for name, value in options.items():
        values = value if isinstance(value, tuple | list) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    code, said = command(
        "run",
        "fedavg",
        "--rounds",
        "1",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--data",
        path,
        *flags,
    )
    assert code == 2
    assert said.startswith("ekiden: ")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
