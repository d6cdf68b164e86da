"""Hyperparameters: one name for what several methods share, with one type of value; and ranges that
are kept."""

import pickle
from collections import defaultdict
from typing import Any, Literal, get_origin, get_type_hints

import pytest

from ekiden import UserError
from ekiden.core.base.checks import Range
from ekiden.core.engine.method import Method
from ekiden.methods import METHODS
from ekiden.runs.plan import settings_of

SYNONYMS = {
    "lr_decay": {"decay", "rate_decay"},
    "weighting": {"weights", "client_weights"},
    "server_optimizer": {"server_opt", "optimizer_at_server"},
    "server_lr": {"global_lr", "step_size", "lr_server"},
    "ridge": {"penalty", "lambda_ridge"},
    "topology": {"shape", "graph"},
    "combine_heads": {"classifier", "head_average"},
    "normalise": {"norm", "normalize"},
    "distill_weight": {"weight", "distillation_weight"},
    "distill_batch_size": {"batch", "distill_batch"},
    "head_batch_size": {"head_batch"},
    "aggregator_batch_size": {"aggregator_batch"},
    "head_weight_decay": {"head_decay"},
    "distill_weight_decay": {"distill_decay"},
    "epochs": {"local_epochs"},
    "participation": {"fraction", "sample_rate"},
}
"""A hyperparameter -> names that it has elsewhere, which no method here uses for it."""


def kind_of(hint: Any) -> str:
    """Return the type of value that a hyperparameter has."""
    return "text" if hint is str or get_origin(hint) is Literal else hint.__name__


def test_one_name_for_one_hyperparameter() -> None:
    used = {name for kind in METHODS for name in settings_of(kind)}
    assert SYNONYMS.keys() <= used
    assert not set().union(*SYNONYMS.values()) & used


def test_a_name_has_one_sort_of_value() -> None:
    sorts = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for kind in METHODS:
        for name, hint in settings_of(kind).items():
            sorts[name][kind_of(hint)].append(kind.title())
    assert {name: dict(found) for name, found in sorts.items() if len(found) > 1} == {}


UNBOUNDED = {("feddisco", "b"), ("pfnm", "bias"), ("fedma", "bias")}
"""Numbers that may have any value."""


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_every_number_has_a_range_and_none_outside_is_accepted(kind: type[Method]) -> None:
    hints = get_type_hints(kind, include_extras=True)
    for name, plain in settings_of(kind).items():
        if plain not in (int, float) or (kind.title(), name) in UNBOUNDED:
            continue
        (allowed,) = (one for one in hints[name].__metadata__ if isinstance(one, Range))
        below = allowed.above if allowed.least is None else allowed.least - 1
        above = allowed.below if allowed.most is None else allowed.most + 1
        assert below is not None, name
        for wrong in (below, above):
            if wrong is not None:
                with pytest.raises(UserError, match=name):
                    kind(**{name: wrong})


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_hyperparameters_are_named(kind: type[Method]) -> None:
    """Five would be epochs of one method and rounds of another."""
    with pytest.raises(UserError, match=rf"{kind.__name__}\(5\) does not say which hyperparameter"):
        kind(5)
    assert pickle.loads(pickle.dumps(kind())) == kind()
