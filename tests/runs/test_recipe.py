"""Recipes: what does not go together is refused; what is stored is read back."""

import json
from pathlib import Path

import pytest

from ekiden import Training, UserError
from ekiden.core.base import outside
from ekiden.methods import FedGram, FedSeq, method_named
from ekiden.runs.recipe import Recipe, recipe_of

METHOD = """
from dataclasses import dataclass

from ekiden import FedSeq


@dataclass(frozen=True)
class Mine(FedSeq):
    pass
"""


def test_with_noise_training_returns_the_last_epoch() -> None:
    """Which epoch is the best on validation data would tell about these."""
    assert Recipe(FedSeq(), training=Training(select="best")).training.select == "best"
    noisy = Recipe(FedSeq(), training=Training(select="best"), dp="epsilon=8,delta=1e-5")
    assert noisy.training.select == "last"


def test_weights_of_classes_are_for_methods_that_train_on_a_loss() -> None:
    weighed = Training(class_weights="balanced")
    assert Recipe(FedSeq(), training=weighed).training == weighed
    with pytest.raises(UserError, match="does not train on a loss in which classes have weights"):
        Recipe(FedGram(), training=weighed)


def test_what_is_stored_is_read_back() -> None:
    for recipe in (
        Recipe(FedSeq(epochs=3), "mlp", seed=2, training=Training(lr=0.1)),
        Recipe(FedSeq(), dp="epsilon=8,delta=1e-5", train="last:1"),
    ):
        assert recipe_of(json.loads(json.dumps(recipe.to_json()))) == recipe
    broken: list[object] = [[], {}, {"method": 3}]
    for values in broken:
        with pytest.raises(UserError, match="they name no method"):
            recipe_of(values)


def test_code_in_files_is_shared_by_its_content(tmp_path: Path) -> None:
    """The folder of a file says nothing to others."""
    names = set()
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(METHOD)
        name = f"{file}:Mine"
        outside.trust(name)
        names.add(json.dumps(Recipe(method_named(name)()).shared()["method"]))
    assert len(names) == 1
    assert str(tmp_path) not in names.pop()
