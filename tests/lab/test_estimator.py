"""`ekiden.FederatedClassifier`: scikit-learn's own checks, and the bits of `ekiden.run`."""

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import ekiden
from ekiden import FederatedClassifier, FedGram, Trees, UserError

# Without a penalty the regression refuses the checks' classes, which columns separate.
METHODS = [FedGram(), ekiden.GLM(ridge=1.0), Trees()]


@parametrize_with_checks([FederatedClassifier()])  # type: ignore[untyped-decorator]
def test_it_keeps_the_contract_of_scikit_learn(
    estimator: FederatedClassifier, check: Callable[[FederatedClassifier], None]
) -> None:
    """All checks apply; that of array libraries is skipped where SCIPY_ARRAY_API is not set."""
    check(estimator)


@pytest.mark.slow
@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [FederatedClassifier(method) for method in METHODS[1:]]
)
def test_it_does_with_other_methods(
    estimator: FederatedClassifier, check: Callable[[FederatedClassifier], None]
) -> None:
    check(estimator)


def scaled() -> tuple[Any, Any]:
    x, y = load_breast_cancer(return_X_y=True)
    return StandardScaler().fit_transform(x).astype("float32"), y


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.title())
def test_it_is_the_run_of_the_same_rows(method: Any) -> None:
    x, y = scaled()
    groups = np.array(["west", "north", "south"])[np.arange(len(y)) % 3]
    fitted = FederatedClassifier(method, seed=3).fit(x[:400], y[:400], groups[:400])
    silos = {
        name: (x[:400][groups[:400] == name], y[:400][groups[:400] == name])
        for name in ("north", "south", "west")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ekiden.DataWarning)
        data = ekiden.federate(silos, test=(x[:400], y[:400]), val_fraction=0.0)
    result = ekiden.run(method, data, seed=3, quiet=True)
    with torch.no_grad():
        outputs = result.model.eval()(torch.from_numpy(x[400:]))
    wanted = data.dataset.task.answers(outputs, full=True).numpy()
    assert np.array_equal(fitted.predict_proba(x[400:]), wanted)
    assert fitted.score(x[400:], y[400:]) > 0.9
    assert fitted.n_features_in_ == 30


def test_any_division_gives_the_same_model_and_labels_are_those_given() -> None:
    x, y = load_iris(return_X_y=True)
    names = np.array(["setosa", "versicolor", "virginica"])[y]
    # each silo has one class only
    split = FederatedClassifier(Trees(trees=5)).fit(x, names, groups=y)
    whole = FederatedClassifier(Trees(trees=5)).fit(x, names)
    assert list(split.classes_) == ["setosa", "versicolor", "virginica"]
    assert np.array_equal(split.predict_proba(x), whole.predict_proba(x))
    assert split.score(x, names) > 0.95


def test_it_works_in_pipelines_cross_validation_and_searches() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    groups = np.arange(len(y)) % 5
    model = make_pipeline(StandardScaler(), FederatedClassifier())
    params = {"federatedclassifier__groups": groups}
    scores = cross_val_score(model, x, y, groups=groups, cv=GroupKFold(3), params=params)
    assert scores.min() > 0.9
    search = GridSearchCV(
        model, {"federatedclassifier__method": [FedGram(), FedGram(head="ncm")]}, cv=2
    )
    search.fit(x, y, federatedclassifier__groups=groups)
    assert search.best_score_ > 0.9
    best = search.best_estimator_
    assert np.array_equal(pickle.loads(pickle.dumps(best)).predict(x), best.predict(x))
    assert clone(model)[-1].method == "fedgram"


def test_a_method_that_trains_does_so_by_its_training() -> None:
    x, y = scaled()
    groups = np.arange(len(y)) % 3
    training = ekiden.Training(max_steps=30)
    fitted = FederatedClassifier("fedseq", "mlp", training).fit(x, y, groups)
    assert fitted.score(x, y) > 0.9


def test_a_mistake_is_one_line() -> None:
    x, y = scaled()
    with pytest.raises(ValueError, match="one class"):
        FederatedClassifier().fit(x, np.zeros(len(y)))
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        FederatedClassifier().fit(x, y, groups=[1, 2])
    with pytest.raises(ValueError, match="NaN"):
        FederatedClassifier().fit(np.where(x > 2, np.nan, x), y)
    with pytest.raises(UserError, match="fedgramm"):
        FederatedClassifier("fedgramm").fit(x, y)
