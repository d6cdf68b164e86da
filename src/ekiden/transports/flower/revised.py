"""Repeat a run of FedGram between machines without one of its silos, or with one more.

No sums are subtracted: the chain runs again among the silos that stay, and each of them measures its sums again. So
the silo that leaves need not answer, and it may be the first one. Only the second silo of the chain sees sums of a
single silo.
"""

from dataclasses import replace
from pathlib import Path
from typing import cast

from ekiden.base.errors import UserError, unknown
from ekiden.base.seeds import derive
from ekiden.engine.federation import in_order
from ekiden.engine.method import Method
from ekiden.methods import FedGram
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower.agreement import AGREEMENT, Revision
from ekiden.transports.flower.remote_plan import RemotePlan, stored


def without(folder: Path, client: str) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos except `client`.

    Raises:
        UserError: it is not a run of FedGram between machines, or it has no such silo, or no other one.
    """
    plan, order = _of_fedgram(folder)
    if client not in plan.names:
        raise unknown("silo", client, plan.names)
    if len(plan.names) == 1:
        raise UserError(f"{client} is the only silo of {folder}: delete the folder")
    names, left = ([n for n in named if n != client] for named in (plan.names, order))
    return _among(folder, plan, names, left, client)


def with_one_more(folder: Path, client: str) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos and `client`, which comes last.

    Raises:
        UserError: it is not a run of FedGram between machines, or it has this silo already.
    """
    plan, order = _of_fedgram(folder)
    if client in plan.names:
        raise UserError(f"{client} is in {folder} already: name a silo that is not")
    return _among(folder, plan, [*plan.names, client], [*order, client], client)


def _of_fedgram(folder: Path) -> tuple[RemotePlan[Method], tuple[str, ...]]:
    """Return the plan of a run, and its silos in order."""
    plan = stored(folder)
    if plan is None:
        raise UserError(f"{folder} is of a run on one machine")
    if not isinstance(plan.method, FedGram):
        raise UserError(
            f"{folder} is a run of {plan.method.title()}: only runs of fedgram can change their silos, because they "
            "take one pass; run again"
        )
    return plan, in_order(plan.method.order, plan.names, _drawn(plan))


def _drawn(plan: RemotePlan[Method]) -> int:
    """Return the seed of a random order."""
    return derive(plan.seed, "order", 0)


def _among(
    folder: Path, plan: RemotePlan[Method], names: list[str], order: list[str], client: str
) -> RemotePlan[Method]:
    """Return the plan among `names` in this order, with the run's own spelling if it means the same."""
    try:
        before = agreements.parse((folder / AGREEMENT).read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{folder} has no {AGREEMENT}: the run did not begin, or the folder is damaged") from None
    method = cast(FedGram, plan.method)
    words = method.order in ("given", "reversed", "random")
    if not words or in_order(method.order, names, _drawn(plan)) != tuple(order):
        method = replace(method, order=",".join(order))
    revision = Revision(before.run, before.digest, "with" if client in names else "without", client)
    return replace(plan, method=method, clients=",".join(names), revises=revision.text())
