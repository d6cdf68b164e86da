"""Flower's SuperNode with two changes: it looks for messages each second, and notes whether the SuperLink answers."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.supernode import fleet_http_connection, start_client_internal
from flwr.supernode.cli import flower_supernode
from flwr.supernode.fleet_http_client import FleetHttpClient

from ekiden.core.base.files import write
from ekiden.silos.silo.connection import FILE, Connection

# seconds between two looks for a message; Flower waits 3
_POLL = 1.0


def run(folder: Path) -> None:
    """Run a SuperNode with the flags in `sys.argv`; `folder` is the silo's."""
    noted = Noted(folder)

    class Watched(FleetHttpClient):  # type: ignore[misc]  # Flower is not checked
        """Flower's connection to a SuperLink."""

        def _unary_unary(self, **request: Any) -> Any:
            try:
                answer = super()._unary_unary(**request)
            except httpx.HTTPError as error:
                noted(error)
                raise
            noted()
            return answer

    def sleep(seconds: float) -> None:
        time.sleep(min(seconds, _POLL))

    fleet_http_connection.FleetHttpClient = Watched
    start_client_internal.time = SimpleNamespace(sleep=sleep)
    flower_supernode()


class Noted:
    """Notes answers and failures in a silo's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now = Connection()
        self._written = 0.0

    def __call__(self, error: Exception | None = None) -> None:
        """Note that the SuperLink answered, or that a request failed."""
        now = time.time()
        why = "" if error is None else _words(error)
        changed = why != self._now.why or not self._now.since
        since = now if changed else self._now.since
        self._now = Connection(since, self._now.seen if why else now, why)
        # a file each second would wear out a disk
        if changed or now - self._written > 5:
            self._written = now
            write(self._folder / FILE, [json.dumps(asdict(self._now)).encode()], sync=False)


def _words(error: Exception) -> str:
    """Return what went wrong, and what to do."""
    text = str(error)
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 401:
        return (
            "the SuperLink does not know the silo's key: the coordinator lets it in by `ekiden federation add`, "
            "or by `rotate` if it is a new one; or has revoked it"
        )
    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == 412:
        return (
            "the SuperLink has not noticed yet that the last connection of this silo ended, which takes a "
            "minute; or another machine uses its key"
        )
    if "certificate has expired" in text:
        return (
            "the SuperLink's certificate has expired: the coordinator renews it by `ekiden federation rotate "
            "FOLDER`, and starts the SuperLink again"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            "the SuperLink's certificate is not signed by the authority that this silo knows: ask the coordinator, "
            "then `ekiden silo join silo.toml roster.json --replace ca.crt`"
        )
    if isinstance(error, httpx.RequestError):
        return f"the SuperLink does not answer ({text[:100]}): does it run, and is its port reached from here?"
    return f"the SuperLink refuses a request ({text[:100]})"
