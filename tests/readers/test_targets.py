"""Labels that leave open what they are, that do not vary, or that are spelled in two ways; and the
commonest class."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import nn

import ekiden
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.core.tasks import LanguageModelling, MultiLabel, Regression
from ekiden.data import FederatedData, federate, from_tensors, load, split
from ekiden.methods import FedAvg
from ekiden.readers.targets import with_labels_of
from tests.readers.one_column import labelled

DRAW = torch.Generator().manual_seed(0)

pytestmark = pytest.mark.usefixtures("no_data")
ASKS = r"different whole numbers: use task='regression' if .*, or task='classification' if"


@pytest.mark.parametrize(
    "label",
    [
        list(range(60)) * 5,
        [float(k) for k in range(60)] * 5,
        list(range(30)) * 2,
        [str(k) for k in range(60)] * 5,
    ],
)
def test_many_whole_numbers_are_asked_for(label: list[Any]) -> None:
    with pytest.raises(UserError, match=ASKS):
        load(labelled(label))
    assert isinstance(load(labelled(label), task="regression").task, Regression)
    assert len(load(labelled(label), task="classification").classes) == len(set(label))


def test_many_whole_numbers_of_vectors_are_asked_for_and_those_of_images_are_classes() -> None:
    x, y = torch.randn(300, 4), torch.arange(300) % 100
    with pytest.raises(UserError, match=ASKS):
        from_tensors((x, y))
    assert from_tensors((x, y), task="classification").outputs == 100
    assert isinstance(from_tensors((x, y), task="regression").task, Regression)
    assert from_tensors((torch.randn(300, 1, 4, 4), y)).outputs == 100


@pytest.mark.parametrize(
    "label", [[0.0, 1.0] * 30, [0, 1] * 30, ["0", "1"] * 30, [False, True] * 30]
)
def test_two_classes_are_classes_however_stored(label: list[Any]) -> None:
    data = federate([labelled(label), labelled(label).assign(v=range(60))])
    assert data.dataset.task.kind == "classification"
    assert data.dataset.outputs == 2


def test_numbers_with_a_word_are_not_classes() -> None:
    with pytest.raises(
        UserError, match=r"the label 'label' of .* holds numbers, but also text \('n.d.' in row 4 "
    ):
        load(labelled([*(str(k / 4) for k in range(4)), "n.d.", *(str(k / 4) for k in range(40))]))
    assert load(labelled(["1", "2", "unknown"] * 20)).classes == ("1", "2", "unknown")
    with pytest.raises(UserError, match=r"the label 'label' of .* holds dates"):
        load(labelled(["2024-01-05", "2024-01-06"] * 20))
    with pytest.raises(UserError, match=r"the label in row 3 \(.*\) of .* is missing"):
        load(labelled(["1", "2", "1", "NA"] * 20))


def test_a_target_that_marks_missing_values_is_noticed() -> None:
    with pytest.warns(DataWarning, match=r"the label 'label' of the table holds -999 in 3 rows"):
        load(labelled([-999.0, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.25] * 3))


def test_classes_that_differ_in_case_and_blanks_are_refused() -> None:
    first, second = (
        labelled(["Yes", "No", "No"] * 20),
        labelled(["yes", "no ", "No"] * 20).assign(v=range(60)),
    )
    with pytest.raises(
        UserError, match=r"the label 'label' has 'Yes' .* and 'yes' .*; the label 'label' has 'No'"
    ):
        load(pandas.concat([first, second]))
    rows = labelled(["a", "b"] * 30).assign(sex=["f", "F ", "m"] * 20)
    with pytest.raises(UserError, match=r"column 'sex' has 'F ' .* and 'f' "):
        load(rows)


def silos(y: torch.Tensor, **options: Any) -> FederatedData:
    return split(from_tensors((torch.randn(len(y), 4), y), **options), "iid", 2)


def test_names_are_one_name_in_any_form_of_their_characters(tmp_path: Path) -> None:
    composed, apart = "th\u00e9", "the\u0301"  # as Linux and macOS write it in file names
    for silo, name in (("s0", composed), ("s1", apart)):
        for folder in (name, "tea"):
            (tmp_path / silo / folder).mkdir(parents=True)
            for k in range(5):
                pixels = np.random.default_rng([k, len(silo + folder)]).integers(
                    0, 256, (4, 4), dtype=np.uint8
                )
                Image.fromarray(pixels).save(tmp_path / silo / folder / f"{k}.png")
    both = federate([str(tmp_path / "s0"), str(tmp_path / "s1")]).dataset
    assert both.classes == ("tea", composed)
    given = federate(
        [(torch.randn(20, 3), np.array([name, "tea"] * 10)) for name in (composed, apart)]
    )
    assert given.dataset.classes == ("tea", composed)
    named = from_tensors(
        (torch.randn(20, 3), np.array([apart, "tea"] * 10)), classes=("tea", apart)
    )
    assert named.classes == ("tea", composed)


def test_classes_that_are_numbers_are_in_their_order() -> None:
    assert load(labelled([1, -1] * 20)).classes == ("-1", "1")
    assert load(labelled(["10", "-2", "9"] * 20)).classes == ("-2", "9", "10")


def test_categories_that_are_intervals_are_refused() -> None:
    table = labelled(["a", "b"] * 20).assign(age=pandas.cut(np.arange(40), 3))
    with pytest.raises(
        UserError, match=r"^column 'age' of the table holds categories of .*: write them as text"
    ):
        load(table)


def test_a_class_without_training_rows_is_named(tmp_path: Path) -> None:
    labelled(["a", "b"] * 20).to_csv(tmp_path / "t_train.csv", index=False)
    labelled(["a", "c", "d"] * 4).to_csv(tmp_path / "t_test.csv", index=False)
    with pytest.warns(
        DataWarning, match=r"^8 of 12 test rows are of classes without a training row \('c', 'd'\)"
    ):
        load(str(tmp_path / "t_train.csv"))


def test_silos_that_write_classes_in_two_ways_share_none() -> None:
    parts = [labelled([0, 1] * 20), labelled(["ill", "well"] * 20), labelled([0, 1] * 20)]
    line = (
        r"^silo client-1 shares no class with others \(it has 'ill', 'well'; others have '0', '1'\)"
    )
    with pytest.raises(UserError, match=line):
        federate(parts, label_column="label")
    federate([*parts[::2], labelled([1] * 40)], label_column="label")  # nothing to doubt


def test_one_class_everywhere_is_refused() -> None:
    with pytest.raises(
        UserError, match="all training labels are 'cat': classification needs two classes"
    ):
        ekiden.run(
            FedAvg(rounds=1, epochs=1),
            silos(torch.zeros(60).long(), classes=["cat", "dog"]),
            nn.Linear(4, 2),
        )
    with pytest.raises(UserError, match=r"all labels in .* are 'a'"):
        load(labelled(["a"] * 40))


class Ends(nn.Module):
    """Ends in a softmax that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(x).softmax(1)
        return found


def test_a_network_that_ends_in_probabilities_is_refused() -> None:
    classes = silos(torch.arange(60) % 2)
    for network in (nn.Sequential(nn.Linear(4, 2), nn.Softmax(1)), Ends()):
        with pytest.raises(
            UserError, match=r"the model ends in a softmax, .*leave the last layer out"
        ):
            ekiden.run("fedavg", classes, network)
    labels = silos((torch.randn(60, 3) > 0.5).float(), task="multi-label")
    with pytest.raises(UserError, match="the model ends in a sigmoid"):
        ekiden.run("fedavg", labels, nn.Sequential(nn.Linear(4, 3), nn.Sigmoid()))
    ekiden.run(
        FedAvg(rounds=1, epochs=1), classes, nn.Sequential(nn.Linear(4, 2), nn.LogSoftmax(1))
    )


def test_a_network_with_layers_without_a_size_is_refused() -> None:
    data = federate([(torch.randn(20, 3), torch.arange(20) % 2)] * 2)

    def lazy() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2))

    for model in (lazy, lazy()):
        with pytest.raises(
            UserError, match=r"^layer '1' of the model is a LazyLinear without a size"
        ):
            ekiden.run(FedAvg(rounds=1), data, model)


def test_the_commonest_class_stands_next_to_the_accuracy() -> None:
    y = torch.tensor([0, 0, 0, 1] * 30)
    result = ekiden.run(FedAvg(rounds=2, epochs=1), silos(y), nn.Linear(4, 2))
    assert "majority" not in result.metrics[0]
    assert result.majority == result.metrics[-1]["majority"] == 0.75
    assert f"accuracy {result.accuracy:.4f} (always the commonest class: 0.7500)" in repr(result)
    numbers = ekiden.run(FedAvg(rounds=1, epochs=1), silos(torch.randn(60)), nn.Linear(4, 1))
    assert numbers.majority is None
    several = silos((torch.rand(60, 2) > torch.tensor([0.2, 0.7])).float(), task=MultiLabel())
    result = ekiden.run(FedAvg(rounds=1, epochs=1), several, nn.Linear(4, 2))
    held = several.dataset.test.y
    assert result.majority == pytest.approx(float(torch.stack([held[:, 0], 1 - held[:, 1]]).mean()))


@pytest.mark.filterwarnings("ignore:.* the same as the label")
def test_silos_agree_on_one_task_and_one_scale() -> None:
    x = torch.randn(40, 3, generator=DRAW)
    y = 5 + 3 * x[:, 0]
    data = federate([(x[:20], y[:20]), (x[20:], y[20:])], task="regression")
    assert data.dataset.classes == ("target",)
    assert data.dataset.outputs == 1
    assert isinstance(data.dataset.task, Regression)
    assert data.dataset.task.mean == pytest.approx((float(data.dataset.train.y.mean()),))
    with pytest.raises(UserError, match="the labels differ in shape"):
        federate([(x[:20], y[:20]), (x[20:], torch.stack([y, y], 1)[20:])], task="regression")


def test_integers_can_be_meant_as_numbers() -> None:
    data = from_tensors((torch.randn(12, 2, generator=DRAW), torch.arange(12) % 3))
    again = with_labels_of(data, "regression")
    assert again.task.kind == "regression"
    assert torch.equal(again.train.y, data.train.y.float())
    with pytest.raises(
        UserError, match="are of classification, not of segmentation: leave out task"
    ):
        with_labels_of(data, "segmentation")
    with pytest.raises(UserError, match="are names, but regression needs numbers"):
        with_labels_of(
            from_tensors((torch.zeros(4, 2), np.array(["a", "b", "a", "b"]))), "regression"
        )


def test_classes_of_pixels_are_counted_by_their_values(tmp_path: Path) -> None:
    masks = np.zeros((20, 16, 24), dtype=np.int64)
    masks[:, 3:8, 3:8] = 1
    np.savez(tmp_path / "masks.npz", x=np.zeros((20, 3, 16, 24), dtype=np.uint8), y=masks)
    data = load(tmp_path / "masks.npz")
    assert (data.task.kind, data.classes) == ("segmentation", ("0", "1"))


def test_a_language_model_needs_tokens_as_labels() -> None:
    tokens = torch.arange(24).reshape(4, 6) % 7
    assert from_tensors((tokens, tokens)).task == LanguageModelling(vocabulary=7)
    with pytest.raises(UserError, match=r"holds text .*: language-modelling needs numbers"):
        from_tensors((torch.zeros(4, 6), np.array(list("abab"))), task="language-modelling")
    with pytest.raises(UserError, match=r"3 names are given .*, but the labels need 7"):
        from_tensors((tokens, tokens), classes=list("abc"))
    with pytest.raises(UserError, match="complex64"):
        from_tensors((torch.zeros(4, 6, dtype=torch.complex64), tokens))


def test_labels_that_a_trained_model_does_not_know_are_refused(tmp_path: Path) -> None:
    masks = np.arange(20 * 64).reshape(20, 8, 8)
    for k in (2, 3):
        np.savez(tmp_path / f"{k}.npz", x=np.zeros((20, 8, 8), np.uint8), y=masks % k)
    like = load(tmp_path / "2.npz")
    with pytest.raises(UserError, match="has the label 2, but the model knows 2, from 0 on"):
        load(tmp_path / "3.npz", like=like, whole=True)


@pytest.mark.parametrize("task", ["multi-label", "regression"])
@pytest.mark.parametrize("asked", [["a"], ["b", "a"], ["a", "b", "c"]])
def test_columns_of_labels_that_a_trained_model_does_not_know_are_refused(
    task: str, asked: list[str]
) -> None:
    rows = {name: [0, 0, 1, 1] * 10 for name in "abc"}
    rows["b"] = [1, 0, 0, 1] * 10
    data = load({**rows, "v": range(40)}, label_column=["a", "b"], task=task, drop_columns=["c"])
    like = split(data, "iid", clients=2).dataset
    drop = [name for name in "abc" if name not in asked]
    with pytest.raises(UserError, match=r"has the labels .*, but the model knows a, b: give these"):
        load({**rows, "v": range(40)}, like=like, label_column=asked, drop_columns=drop)
    known = load({**rows, "v": range(40)}, like=like, label_column=["a", "b"], drop_columns=["c"])
    assert known.classes == ("a", "b")
