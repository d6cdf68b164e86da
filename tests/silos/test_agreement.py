"""The digest of a run's terms, which silos sign, covers every setting."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from ekiden.core.engine.method import Method
from ekiden.methods import METHODS
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.recipe import Recipe
from tests.silos.asked import TERMS


def varied(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a dataclass in which one field, also of dataclasses within, has another
    value."""
    for field in fields(value):
        own = getattr(value, field.name)
        inner = (
            varied(own)
            if is_dataclass(own) and not isinstance(own, type)
            else [("", other_than(own))]
        )
        for name, other in inner:
            changed = object.__new__(type(value))  # past all checks: it need not be allowed
            vars(changed).update(
                {f.name: getattr(value, f.name) for f in fields(value)} | {field.name: other}
            )
            yield f"{field.name}.{name}", changed


def other_than(value: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, tuple):
        return (*value, "other")
    return value + ("other" if isinstance(value, str) else 1)


def test_every_field_changes_the_digest() -> None:
    found = dict(varied(TERMS))
    assert {
        "recipe.training.lr.",
        "recipe.method.epochs.",
        "recipe.metric.",
        "augment.flip.",
        "run.",
    } <= found.keys()
    digests = {name: terms.digest for name, terms in found.items()}
    assert len({TERMS.digest, *digests.values()}) == 1 + len(digests), digests


@pytest.mark.parametrize("kind", METHODS)
def test_every_hyperparameter_changes_the_digest(kind: type[Method]) -> None:
    recipe = replace(TERMS.recipe, method=kind())
    digests = {}
    for name, method in varied(kind()):
        other = object.__new__(Recipe)  # past all checks, as in `varied`
        vars(other).update(vars(recipe) | {"method": method})
        digests[name] = replace(TERMS, recipe=other).digest
    assert len({replace(TERMS, recipe=recipe).digest, *digests.values()}) == 1 + len(digests), (
        digests
    )


def test_a_closing_lap_changes_the_digest() -> None:
    lapped = replace(TERMS, recipe=replace(TERMS.recipe, method=with_lap(TERMS.recipe.method)))
    assert lapped.digest != TERMS.digest
