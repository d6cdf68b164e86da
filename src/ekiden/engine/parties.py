"""Who takes part in a run, and with which data."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ekiden.base.errors import UserError
from ekiden.base.refs import EVERYONE, SERVER
from ekiden.data.samples import ClientData, FederatedData, Subset
from ekiden.engine import identity
from ekiden.engine.method import Method


def check_same_data(config: Mapping[str, Any], method: Method, data: FederatedData, folder: Path) -> None:
    """Refuse to measure a run on other data than its own, if its folder has digests of the data."""
    before = {k: v for k, v in config.get("digests", {}).items() if k == "data"}
    if before and (different := identity.unlike(before, {"data": identity.data_digests(holders(method, data))})):
        raise UserError(
            f"{', '.join(different)} differ from what {folder} was made with: put these data back, or name the data to "
            "measure on, `ekiden evaluate RUN --data DATA`"
        )


def holders(method: Method, data: FederatedData) -> tuple[ClientData, ...]:
    """Return the clients that take part: all of them, or the one place that all data are brought to."""
    return _pool(data) if method.traits.pools_data else data.clients


def check_clients(clients: Sequence[ClientData], method: Method) -> None:
    """Refuse a federation in which somebody has nothing to train on, or no validation data that the method needs."""
    if not clients:
        raise UserError("there is no client: give at least one data set")
    names = [c.name for c in clients]
    for client in clients:
        if client.name in ("", ".", "..", SERVER, EVERYONE) or set(client.name) & set("/\\,\0\n"):
            raise UserError(f"a client cannot be called {client.name!r}: give it another name, of letters and digits")
        if names.count(client.name) > 1:
            raise UserError(f"two clients are called {client.name!r}: give each its own name")
        if not len(client.train):
            raise UserError(f"client {client.name} has no training sample: leave it out or use fewer clients")
        if method.traits.needs_validation and not len(client.val):
            raise UserError(
                f"{method.title()} needs validation data at every client, {client.name} has none: raise --val-fraction"
            )


def _pool(data: FederatedData) -> tuple[ClientData, ...]:
    """One client that holds everything."""

    def union(part: Callable[[ClientData], Subset]) -> Subset:
        return Subset(part(data.clients[0]).samples, torch.cat([part(c).rows for c in data.clients]))

    return (ClientData("all", union(lambda c: c.train), union(lambda c: c.val), union(lambda c: c.test)),)
