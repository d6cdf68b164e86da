"""Silos whose labels, pictures or signals are unlike those of the others."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import ekiden
from tests.care.rows import hospital
from tests.readers.told import said

pytestmark = pytest.mark.usefixtures("no_data")


Change = Callable[[Any], Any]


def standard(values: Any) -> Any:
    return (values - values.mean()) / values.std()


def swapped(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"upper": rows["lower"], "lower": rows["upper"]}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda rows: rows, ""),
        (
            lambda rows: rows | {"label": np.where(rows["label"] == "sick", "well", "sick")},
            "what tells 'sick' and 'well' apart elsewhere tells them the other way round at "
            "client-2",
        ),
        (swapped, "column 'upper' of client-2 differs from other silos (mean 79.99"),
        (swapped, "column 'lower' of client-2 differs from other silos (mean 129.9"),
        (
            lambda rows: rows | {"age": -rows["age"]},
            "column 'age' of client-2 differs from other silos (mean -6",
        ),
        (
            lambda rows: rows | {"age": np.log(rows["age"])},
            "'age' of client-2 differs from other silos (mean 4",
        ),
        (
            lambda rows: rows | {"age": standard(rows["age"])},
            "'age' of client-2 differs from other silos (mean 0.04",
        ),
        (
            lambda rows: rows | {"label": np.char.replace(rows["label"], "well", "w")},
            "'w' (at client-2) may be 'well'",
        ),
        (
            lambda rows: rows | {"sex": 1 - rows["sex"]},
            "column 'sex' of client-2 seem as if they are reversed, 0 for 1",
        ),
        (
            lambda rows: rows | {"score": rows["score"] - 1},
            "'score' is 0 to 4 at client-2, but 1 to 5 at client-0, cli",
        ),
    ],
)
def test_a_silo_with_labels_or_columns_swapped_or_shifted_is_named(
    change: Change, line: str
) -> None:
    silos: list[Any] = [hospital(k) for k in range(4)]
    silos[2] = change(silos[2])
    found = said(lambda: ekiden.federate(silos))
    assert line in found if line else not found


def test_a_column_that_names_the_silo_and_events_that_mean_none_are_named() -> None:
    rng = np.random.default_rng(0)
    silos: list[Any] = [hospital(k) | {"site": [f"s{k}"] * 120} for k in range(3)]
    assert (
        "column 'site' of own data is the same as the silo, or a one-to-one function of it, in all"
        in said(lambda: ekiden.federate(silos))
    )
    for k, silo in enumerate(silos):
        del silo["label"], silo["site"]
        silo |= {"p": (rng.random(120) < 0.15) ^ (k == 1), "q": rng.random(120) < 0.4}
    found = said(lambda: ekiden.federate(silos, label_column=["p", "q"]))
    assert "labels 'p' of client-1 seem as if they are reversed, 0 for 1" in found
    for k, silo in enumerate(silos):
        silo |= {"days": rng.exponential(9, 120) + 0.1, "died": (rng.random(120) < 0.15) ^ (k == 1)}
    found = said(lambda: ekiden.federate(silos, task="survival", label_column=["days", "died"]))
    assert "events of client-1 seem as if they are reversed, 0 for 1" in found


def test_embeddings_of_another_model_are_named() -> None:
    rng = np.random.default_rng(0)
    centre = rng.normal(size=(2, 2, 32))
    parts = [
        (centre[k // 2][y] + rng.normal(size=(40, 32)), y)
        for k in range(3)
        for y in [np.arange(40) % 2]
    ]
    silos: list[Any] = [(np.float32(x), y) for x, y in parts]
    assert "the direction of the input of client-2 differs from other silos (" in said(
        lambda: ekiden.federate(silos)
    )


def test_a_test_with_swapped_labels_is_named(tmp_path: Path) -> None:
    frames = [pandas.DataFrame(hospital(k)) for k in range(2)]
    frames[1]["label"] = frames[1]["label"].replace({"sick": "well", "well": "sick"})
    for name, frame in zip(("train", "test"), frames, strict=True):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    assert (
        "apart elsewhere tells them the other way round at the training part or the test"
        in said(lambda: ekiden.load(tmp_path))
    )


def pictures(seed: int, change: Change = lambda x: x) -> Any:
    rng = np.random.default_rng(seed)
    base = (
        np.array([170, 110, 70])[:, None, None]
        + 40.0 * (np.arange(8) < 4)[:, None]
        - 25.0 * (np.arange(8) < 3)
    )
    x = base + rng.normal(0, 20, (60, 1, 1, 1)) + rng.normal(0, 20, (60, 3, 8, 8))
    return np.ascontiguousarray(change(x.clip(0, 255))).astype(np.uint8), rng.integers(0, 2, 60)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda x: x, ""),
        (lambda x: 0.8 * x, ""),
        (lambda x: x[:, ::-1], "have red and blue changed places"),
        (lambda x: 255 - x, "are negatives"),
        (lambda x: x[:, :, ::-1], "are upside down"),
        (lambda x: x[:, :, :, ::-1], "are mirrored"),
        (lambda x: np.rot90(x, 1, (2, 3)), "are turned by"),
    ],
)
def test_a_silo_whose_pictures_are_turned_or_of_other_colours_is_named(
    change: Change, line: str
) -> None:
    found = said(lambda: ekiden.federate([pictures(0), pictures(1), pictures(2, change)]))
    assert f"images of client-2 seem as if they {line}" in found if line else not found
    two = said(lambda: ekiden.federate([pictures(0), pictures(2, change)]))
    assert f"images of client-0 or client-1 seem as if they {line}" in two if line else not two


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda rows: rows, ""),
        (
            lambda rows: rows | {"pain": 6 - rows["pain"]},
            "'pain' of client-2 seem as if they are reversed, 1 for 5",
        ),
        (
            lambda rows: rows | {"label": np.roll(rows["label"], 1)},
            "'sick' and 'well' apart at all other silos tells nothing at client-2: check that "
            "labels are in the rows",
        ),
    ],
)
def test_reversed_scales_and_labels_in_other_rows_are_named(change: Change, line: str) -> None:
    rng = np.random.default_rng(0)
    silos: list[Any] = [hospital(k) for k in range(4)]
    for silo in silos:
        silo["pain"] = 1 + rng.choice(5, 120, p=[0.4, 0.3, 0.15, 0.1, 0.05])
        silo["lab"] = rng.normal(size=120) + 2 * (silo["label"] == "sick")
    silos[2] = change(silos[2])
    found = said(lambda: ekiden.federate(silos))
    assert line in found if line else not found


def pictures_unseen(n: int = 20, height: int = 6, width: int = 6) -> Any:
    return torch.randint(0, 255, (n, 3, height, width), dtype=torch.uint8)


def waves_unseen(seed: int, rate: float = 1.0, sign: int = 1) -> Any:
    """Return signals of a slow and of a fast class, with peaks that point up."""
    rng, y = np.random.default_rng(seed), np.arange(40) % 2
    phase = (np.arange(128) / (16 - 6 * y[:, None]) / rate + rng.random((40, 1))) % 1
    return (
        (np.exp(-40 * (phase - 0.5) ** 2) + rng.normal(0, 0.05, (40, 128)))[:, None] * sign
    ).astype(np.float32), y


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        (
            waves_unseen(2, rate=0.5),
            "the rate of signals of c differs from other silos .*: bring all to one sampling rate",
        ),
        (
            waves_unseen(2, sign=-1),
            "signals of c seem as if they are upside down in channel 0, compared with other silos",
        ),
    ],
)
def test_signals_of_one_silo_at_another_rate_or_upside_down_are_named(odd: Any, line: str) -> None:
    silos = {"a": waves_unseen(0), "b": waves_unseen(1), "c": waves_unseen(2)}
    assert not said(lambda: ekiden.federate(silos))
    assert re.search(line, said(lambda: ekiden.federate(silos | {"c": odd})))


def test_masks_of_one_silo_with_two_classes_changed_places_are_named() -> None:
    silos = {name: (pictures_unseen(40), torch.rand(40, 6, 6).gt(0.9).long()) for name in "abc"}
    assert "reversed" not in said(lambda: ekiden.federate(silos, task="segmentation"))
    silos["b"] = (silos["b"][0], 1 - silos["b"][1])
    line = said(lambda: ekiden.federate(silos, task="segmentation"))
    assert (
        "masks of '0' and '1' of b seem as if they are reversed, 0 for 1, compared with other silos"
        in line
    )
