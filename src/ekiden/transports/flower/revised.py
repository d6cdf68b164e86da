"""Repeat a run between machines without one of its silos, or with one more.

The method runs again among the silos that stay. So the silo that leaves need not answer, and it may be the first one.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ekiden.base.errors import UserError, unknown
from ekiden.engine.method import Method
from ekiden.methods import among
from ekiden.transports.flower import agreement as agreements
from ekiden.transports.flower.agreement import AGREEMENT, Revision
from ekiden.transports.flower.remote_plan import RemotePlan, stored


def without(folder: Path, client: str, release: Path | None = None) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos except `client`.

    Args:
        folder: the run folder.
        client: the silo that leaves.
        release: file in which it agrees that sums are formed without it; `ekiden silo release` made it.
    """
    plan = _stored(folder)
    if client not in plan.names:
        raise unknown("silo", client, plan.names)
    if len(plan.names) == 1:
        raise UserError(f"{client} is the only silo of {folder}: delete the folder")
    try:
        signed = release.read_text(encoding="utf-8").strip() if release else ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {release} ({error}): `ekiden silo release` makes it") from None
    return _among(folder, plan, [name for name in plan.names if name != client], client, signed)


def with_one_more(folder: Path, client: str) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos and `client`, which comes last."""
    plan = _stored(folder)
    if client in plan.names:
        raise UserError(f"{client} is in {folder} already: name a silo that is not")
    return _among(folder, plan, [*plan.names, client], client)


def _stored(folder: Path) -> RemotePlan[Method]:
    plan = stored(folder)
    if plan is None:
        raise UserError(f"{folder} is of a run on one machine")
    return plan


def _among(
    folder: Path, plan: RemotePlan[Method], names: Sequence[str], client: str, release: str = ""
) -> RemotePlan[Method]:
    """Return the plan among `names`, which names the run that it replaces."""
    try:
        before = agreements.parse((folder / AGREEMENT).read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{folder} has no {AGREEMENT}: the run did not begin, or the folder is damaged") from None
    revision = Revision(before.run, before.digest, "with" if client in names else "without", client, release)
    return replace(plan, method=among(plan.method, names), clients=",".join(names), revises=revision.text())
