"""Names of hyperparameters: one for what several methods share, with one type of value."""

from collections import defaultdict
from typing import Any, Literal, get_origin

from ekiden.methods import METHODS
from ekiden.runs.plan import hyperparameters

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
    used = {name for kind in METHODS for name in hyperparameters(kind)}
    assert SYNONYMS.keys() <= used
    assert not set().union(*SYNONYMS.values()) & used


def test_a_name_has_one_sort_of_value() -> None:
    sorts = defaultdict[str, dict[str, list[str]]](lambda: defaultdict(list))
    for kind in METHODS:
        for name, hint in hyperparameters(kind).items():
            sorts[name][kind_of(hint)].append(kind.title())
    assert {name: dict(found) for name, found in sorts.items() if len(found) > 1} == {}
