"""How much may leave a silo: one rule judges each method from what its tasks declare, none from its
name.
"""

from typing import Literal, get_args

from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method, gives_of, task_names

Level = Literal["sums", "models", "all"]
TELLS = {
    "sums": "sums of many samples under masks, at points that nobody chose, and what has noise: no "
    "sample is read",
    "models": "models too, from which a malicious coordinator or silo reads samples, masks or not; "
    "only noise helps",
    "all": "statistics of few samples too, from which whoever gets them reads one sample in k "
    "(limits.min_active), or all of them if k is 0",
}


def needed(method: Method, least: int, *, bounded: bool | None = None) -> Level:
    """Return the level of `silo.toml` that a run of a method needs.

    Args:
        method: with its hyperparameters.
        least: k, the number of samples that a silo wants behind each number (`limits.min_active`).
        bounded: with `--dp`, whether the silo bounds ε over all runs; None without. Noisy sums leave no
            few samples out, so without a bound they tell what sums with k = 0 do.

    Raises:
        UserError: the method declares nothing of what its tasks give.
    """
    given = {gives_of(method, task) for task in task_names(type(method))} - {None}
    if not given:
        raise UserError(
            f"{method.title()} does not declare what its tasks tell about samples "
            "(@on_client(gives=...)), so no silo runs it"
        )
    if bounded:
        return "sums"
    careful = bounded is None and method.chosen_by != "party"
    careful = careful and (method.least is None or method.least >= least)
    if "summary" in given and not careful:
        return "all"
    if "summary" in given or "model" in given or ("sum" in given and not careful):
        return "models"
    return "sums"


def allows(level: Level, wanted: Level) -> bool:
    """Return whether a silo's level admits what needs another one."""
    order = get_args(Level)
    return order.index(wanted) <= order.index(level)
