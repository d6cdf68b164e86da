"""Faults of data that users of other libraries reported: each is read right, refused in a line, or
named in one."""

from collections.abc import Callable
from datetime import datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.data import from_tensors, load
from tests.readers.told import drawn as rows
from tests.readers.told import said

pytestmark = pytest.mark.usefixtures("no_data")
N = 60
Y = torch.arange(N) % 2
Read = Callable[[], Any]


def frame(**columns: Any) -> pandas.DataFrame:
    return pandas.DataFrame(rows(N, **columns))


def texts(of: Callable[[int], str], label: Callable[[int], Any] = lambda k: "yn"[k % 2]) -> Read:
    held = pandas.DataFrame(
        {"text": [of(k) for k in range(N)], "label": [label(k) for k in range(N)]}
    )
    return lambda: load(held, text_column="text")


def about(*values: Any, **how: Any) -> Read:
    """Read a table in which these values take turns in a column that `how` gives a meaning."""
    named: Any = {name: ("c",) if name.endswith("s") else "c" for name in how}
    return lambda: load(frame(c=[values[k % len(values)] for k in range(N)]), **named)


def labelled(*values: Any) -> Read:
    return lambda: load(frame(label=[values[k % len(values)] for k in range(N)]))


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            about("1.2E+15", "1.3E+15", subject_column=1),
            "a number of which a spreadsheet kept a few digits ('1.2E+15'",
        ),
        (
            about("1.2E+15", "1.3E+15", group_column=1),
            "a number of which a spreadsheet kept a few digits",
        ),
        (
            about("1.2E+15", "1.3E+15", categorical_columns=1),
            "a number of which a spreadsheet kept a few digits",
        ),
        (
            lambda: load(frame(c=[f"{k};2;3" for k in range(N)])),
            "text that begins as numbers do ('0;2;3'",
        ),
        (
            lambda: load(frame(c=[f"{k} 2 3.5 7" for k in range(N)])),
            "text that begins as numbers do",
        ),
        (
            lambda: load(frame(t=[f"{1 + k % 28:02}/01/{24 - k % 2}" for k in range(N)])),
            "dates in another form",
        ),
        (lambda: load(frame(t=[timedelta(k) for k in range(N)])), "holds duration"),
        (lambda: load(frame(t=[time(k % 24) for k in range(N)])), "holds time64"),
        (lambda: load(pa.table({**rows(N), "label": [b"cat", b"dog"] * 30})), "holds binary"),
        (lambda: load(pa.table({**rows(N), "label": [["a", "b"], ["a"]] * 30})), "holds list<"),
        (
            lambda: load(pa.table({"x": [[1.0, None, 3.0]] * N, "label": Y.tolist()})),
            "has NaN or infinity in row 0",
        ),
        (lambda: from_tensors((np.ones((N, 2), object), Y)), "holds values that are not numbers"),
        (lambda: from_tensors((np.ma.masked_less(np.ones((N, 2)), 2), Y)), "holds masked values"),
        (lambda: from_tensors((np.ones((N, 2)) * 1j, Y)), "holds complex128 as inputs"),
        (lambda: from_tensors((np.ones((N, 1, 4, 4), np.int8), Y)), "has int8 x"),
        (lambda: from_tensors((torch.randn(N, 2), Y * 2 - 1)), "label -1 in row 0"),
        (lambda: from_tensors((torch.randn(N, 2), Y + 1)), "no sample has label 0"),
        (lambda: from_tensors((torch.randn(N, 2), Y[:, None])), "give y[:, 0]"),
        (
            lambda: from_tensors((torch.randn(N, 2), torch.eye(2)[Y])),
            "of one-hot rows, y.argmax(1)",
        ),
    ],
)
def test_what_bug_reports_tell_is_refused(read: Read, line: str) -> None:
    with pytest.raises(UserError) as error:
        read()
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("read", "line"),
    [
        (
            about("1.2E+15", "1.3E+15"),
            "column 'c' of the table holds only whole numbers with an exponent ('1.2E+15'",
        ),
        (
            labelled("1.2E+15", "1.3E+15"),
            "a number of which a spreadsheet kept a few digits ('1.2E+15' in row 0",
        ),
        (texts(lambda _: "no findings"), "60 of 60 samples of the table are the same"),
        (
            texts(lambda k: "no findings" if k % 6 else f"a{k}"),
            "50 of 60 samples of the table are the same",
        ),
    ],
)
def test_what_bug_reports_tell_is_named(read: Read, line: str) -> None:
    assert line in said(read)


@pytest.mark.parametrize(
    "read",
    [
        about("1.2E+05", "3.4E+06", "7.1E+03"),
        lambda: load(frame(t=1.7e9 + np.arange(N) * 86_400), time_column="t"),
        lambda: load(frame(t=1990 + np.arange(N) % 30), time_column="t"),
    ],
)
def test_what_only_looks_like_them_is_not(read: Read) -> None:
    assert not said(read)


@pytest.mark.parametrize(
    ("values", "wanted"), [([Decimal("1.50"), None], {1.5}), ([2**53 - 1, 7], {2**53 - 1.0, 7.0})]
)
def test_numbers_of_other_types_keep_their_values(values: list[Any], wanted: set[float]) -> None:
    x = load(pa.table({**rows(N), "c": values * 30})).train.x[:, 2]
    assert {*x[~x.isnan()].tolist()} == wanted


def test_categories_of_silos_are_matched_by_name_not_by_code() -> None:
    silos: list[Any] = [
        pa.table({**rows(N), "c": pa.DictionaryArray.from_arrays(pa.array([0, 0, 1] * 20), names)})
        for names in (["lo", "hi"], ["hi", "lo"])
    ]
    share = [
        float((client.train.x[:, 2] == 1).double().mean())
        for client in ekiden.federate(silos).clients
    ]
    assert share[0] < 0.5 < share[1]


def test_big_endian_files_are_read_as_arrays_in_python_are(tmp_path: Path) -> None:
    x = np.arange(N * 3).reshape(N, 3)
    np.save(tmp_path / "x.npy", x.astype(">f4"))
    np.save(tmp_path / "y.npy", Y.numpy().astype(">i8"))
    assert load(tmp_path).train.x.sum() == from_tensors((x.astype(">f4"), Y)).train.x.sum()


@pytest.mark.parametrize(("mode", "shown"), [("CMYK", 0), ("LA", 255), ("1", 255)])
def test_other_colours_are_what_a_viewer_shows(tmp_path: Path, mode: str, shown: int) -> None:
    colour: Any = {"CMYK": (0, 0, 0, 255), "LA": (7, 0), "1": 1}[mode]
    for k in range(10):
        (tmp_path / "ab"[k % 2]).mkdir(exist_ok=True)
        Image.new(mode, (4, 4), colour).save(
            tmp_path / "ab"[k % 2] / f"{k}.{'tif' if mode == 'CMYK' else 'png'}"
        )
    assert {*load(tmp_path).train.x.flatten().tolist()} == {shown}


def test_one_instant_in_two_zones_is_one_number() -> None:
    when = [datetime(2024, 3, 31, k % 24, 30) for k in range(N)]
    both = [
        pa.table({**rows(N), "t": pa.array(when, pa.timestamp("us", tz=zone))})
        for zone in ("UTC", "Europe/Berlin")
    ]
    ours, theirs = (load(one).train.x[:, 2] for one in both)
    assert torch.equal(ours, theirs)


def silos(of: Callable[[int], pandas.DataFrame], **how: Any) -> str:
    return said(lambda: ekiden.federate({f"s{k}": of(k) for k in range(3)}, **how))


@pytest.mark.parametrize("other", [np.log, lambda age: (age - 60) / 10])
def test_a_column_that_one_silo_has_transformed_is_named(other: Any) -> None:
    def held(k: int) -> pandas.DataFrame:
        age = np.random.default_rng(9 + k).normal(60, 10, N)
        return pandas.DataFrame(rows(N, k, age=other(age) if k == 2 else age))

    line = silos(held)
    assert "column 'age' of s2 differs from other silos (" in line
    assert line.count("differs") == 1


@pytest.mark.parametrize(
    ("last", "line"),
    [
        (lambda _: "not available", "60 of 60 samples of s2 are the same"),
    ],
)
def test_texts_of_one_silo_that_hold_their_label_or_are_the_same_are_named(
    last: Any, line: str
) -> None:
    def held(k: int) -> pandas.DataFrame:
        text = [
            last(row) if k == 2 else f"word{row % 9} more{(row + k) % 7} w{k}-{row}"
            for row in range(N)
        ]
        return pandas.DataFrame({"text": text, "label": ["yn"[row % 2] for row in range(N)]})

    assert line in silos(held, text_column="text")
