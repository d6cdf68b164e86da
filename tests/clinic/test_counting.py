"""What silos count of a model's answers: sums over silos, and what is left out."""

from math import isnan

import pytest
import torch
from sklearn import metrics as sk

from ekiden import UserError
from ekiden.clinic.counting import (
    Care,
    counting_of,
    real,
)
from ekiden.core.tasks import (
    Classification,
    LanguageModelling,
    MultiLabel,
    Regression,
    Scores,
    Segmentation,
)
from ekiden.core.tasks.base import Task
from tests.clinic.counted import counted, of, skewed, two_classes
from tests.core.tasks.scored import told


def test_counts_of_silos_add_up_to_those_of_all() -> None:
    p, y = skewed(600, 7)
    s = two_classes(p, y)
    counting, total = counted(s, train=s.y)
    parts = [
        counting.count(s.at(rows), train=s.y[rows]) for rows in torch.split(torch.arange(600), 170)
    ]
    together = counting.split(sum(parts, torch.zeros_like(total)))
    whole = counting.split(total)
    assert int(together.pop("reports")) == 4
    assert int(whole.pop("reports")) == 1
    for name, numbers in whole.items():
        if name in ("loss", "brier", "confidence"):  # each silo rounds its sum
            assert real(together[name].numpy()) == pytest.approx(real(numbers.numpy()), abs=4e-6)
        else:
            assert torch.equal(together[name], numbers), name


def test_many_classes_have_no_scores() -> None:
    y = torch.arange(200) % 150
    answers = torch.eye(150)[(y + (torch.arange(200) < 20)) % 150]
    found = told(Scores(Classification(), 150, y, answers, torch.zeros(200)))
    assert found.values["accuracy"] == 0.9
    assert found.values["macro_f1"] == pytest.approx(
        sk.f1_score(y, answers.argmax(1), average="macro")
    )
    assert not {"auroc", "brier"} & found.values.keys()
    assert found.confusion == ()


def test_many_classes_of_which_all_are_too_small_to_be_told() -> None:
    s = Scores(Classification(), 150, torch.arange(150), torch.eye(150), torch.zeros(150))
    found = told(s, Care(positives=2))
    assert (found.samples, found.values["accuracy"]) == (150, 1.0)
    assert not any(found.each)


def test_too_few_samples_and_too_few_of_a_class_are_left_out() -> None:
    p, y = skewed(40, 2, 0.0)  # three of the second class
    s = two_classes(p, y)
    counting, numbers = counted(s, Care(samples=41))
    assert not numbers.any()
    few = of(counting, counting.count(s, Care(positives=4)))
    assert few.samples == 40
    assert few.values["accuracy"] == pytest.approx(37 / 40)  # the right answers of all are told
    assert few.confusion == ((37, 0), (0, 0))
    assert "auroc" not in few.values
    labels = MultiLabel()
    both = torch.stack([s.y.float(), (torch.arange(40) < 20).float()], 1)
    t = Scores(labels, 2, both, torch.rand(40, 2), torch.zeros(40))
    tables = counting_of(labels, 2, full=True).count(t, Care(positives=4))
    split = counting_of(labels, 2, full=True).split(tables)
    assert not split["tables"][0].any()
    assert int(split["tables"][1].sum()) == 40
    assert not split["scores"][0].any()


def test_losses_that_are_not_numbers_are_told() -> None:
    s = two_classes(*skewed(30, 1))
    s.loss[3] = float("nan")
    found = told(s)
    assert "loss" not in found.values
    assert isnan(float("nan"))
    counting, numbers = counted(s)
    assert int(counting.split(numbers)["far"]) == 1
    s.answers[3] = float("nan")
    assert "auroc" in told(s).values


def test_numbers_of_another_length_are_refused() -> None:
    counting = counting_of(Classification(), 3, full=False)
    for bad in (torch.zeros(counting.size + 1, dtype=torch.int64), torch.zeros(counting.size)):
        with pytest.raises(UserError, match="do not fit classification"):
            counting.split(bad)


TASKS: list[Task] = [
    Classification(),
    MultiLabel(),
    Regression(),
    Segmentation(),
    LanguageModelling(vocabulary=7),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.kind)
def test_fixed_point_and_whole_numbers_only(task: Task) -> None:
    counting = counting_of(task, 4, full=True)
    assert sum(part.size for part in counting.layout) == counting.size
    assert of(counting, torch.zeros(counting.size, dtype=torch.int64)).values == {}
