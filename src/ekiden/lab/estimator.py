"""A scikit-learn classifier whose `fit` is a federated run."""

import warnings
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from ekiden.core.base.errors import DataWarning
from ekiden.core.base.settings import Training
from ekiden.core.engine.method import Method
from ekiden.readers.sources import federate
from ekiden.runs.api import run
from ekiden.runs.loaded_model import ModelSource, wrapped


class FederatedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Fit a method of Ekiden to an array, as scikit-learn fits its classifiers.

    It works in pipelines, cross-validation and searches. All rows train, and nothing warns of
    doubtful data: look at them once by `ekiden.federate`.

    Args:
        method: what to run, as in `ekiden.run`; it must end with one model.
        model: the network, as in `ekiden.run`.
        training: how clients train, if the method trains.
        seed: the seed of all random numbers.

    Attributes:
        classes_: (K,) the labels, sorted.
        n_features_in_: d, the number of columns.
        model_: the trained `ekiden.LoadedModel`.
    """

    def __init__(
        self,
        method: Method | type[Method] | str = "fedgram",
        model: str | ModelSource = "auto",
        training: Training | None = None,
        seed: int = 0,
    ) -> None:
        self.method = method
        self.model = model
        self.training = training
        self.seed = seed

    def fit(self, X: Any, y: Any, groups: Any = None) -> Self:
        """Run the method.

        Args:
            X: (n, d) features; those of networks and FedGram should be scaled.
            y: (n,) labels.
            groups: (n,) whose row each is: each value is a silo. None is one silo with all rows.

        Raises:
            ValueError: values are missing, or there are fewer than two classes.
            UserError: as in `ekiden.run`.
        """
        X, y = validate_data(self, X, y, dtype=np.float32)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError("y has one class: give rows of two classes or more")
        owners = np.zeros(len(y))
        if groups is not None:
            owners = np.asarray(groups)
        check_consistent_length(X, owners)
        names, owner = np.unique(owners, return_inverse=True)
        silos = {str(name): (X[owner == k], labels[owner == k]) for k, name in enumerate(names)}
        with warnings.catch_warnings():
            # the test rows are those that train, and each fold would warn again
            warnings.simplefilter("ignore", DataWarning)
            data = federate(
                silos, test=(X, labels), val_fraction=0.0, classes=list(map(str, self.classes_))
            )
        result = run(
            self.method,
            data,
            self.model,
            training=self.training,
            seed=self.seed,
            evaluate_every=0,
            quiet=True,
        )
        self.model_ = wrapped(result.model, result.config)
        return self

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Return the probabilities (n, K) of the classes."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float32, reset=False)
        return self.model_.task.answers(self.model_(X), full=True).numpy()

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the most probable label (n,) of each row."""
        best = self.predict_proba(X).argmax(1)
        labels: NDArray[Any] = self.classes_[best]
        return labels
