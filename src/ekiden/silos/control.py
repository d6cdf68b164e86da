"""Ask a SuperLink, over its Control API: let silos in; start, list, follow and stop runs."""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto import control_pb2 as messages
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from ekiden.core.base.errors import UserError
from ekiden.silos.security import without_proxy

# what the SuperLink answers about a key that it knows
_IN_USE = "already in use"


@dataclass(frozen=True)
class RunAtLink:
    """A run as the SuperLink knows it."""

    # its number
    run: str
    name: str
    # pending, starting, running, completed, failed or stopped
    state: str
    # when it got into that state, in ISO 8601
    since: str
    # why it ended early
    reason: str

    @property
    def row(self) -> tuple[str, ...]:
        """Return what tables of runs show of it, below `commands.RUN_COLUMNS`."""
        return self.run, self.name, self.state, self.since[:19].replace("T", " "), self.reason


class Refused(UserError):
    """The SuperLink did not do what it was asked, or cannot be reached."""


class SuperLink:
    """A connection to the Control API of a SuperLink."""

    def __init__(self, address: str, certificate: Path | None) -> None:
        self.address = address
        # the HTTP client reads it
        os.environ.update(without_proxy(os.environ))
        authority = certificate.read_bytes() if certificate else None
        self._client: Any = ControlHttpClient.from_server_address(address, False, authority, ())
        weakref.finalize(
            self, self._client.close
        )  # or its sockets stay open until they are noticed

    def register(self, public_key: str) -> None:
        """Let the holder of a key (OpenSSH text) connect."""
        key = public_key_to_bytes(load_ssh_public_key(public_key.encode()))
        try:
            with self._asking("take the key"):
                self._client.RegisterNode(messages.RegisterNodeRequest(public_key=key))
        except Refused as refused:
            if _IN_USE not in str(refused):
                raise

    def runs(self) -> list[RunAtLink]:
        """Return the runs that the SuperLink knows; the newest first."""
        with self._asking("list its runs"):
            known = self._client.ListRuns(messages.ListRunsRequest()).run_dict.values()
        return [_run(one) for one in sorted(known, key=lambda one: one.pending_at, reverse=True)]

    def start(self, app: Path, settings: Mapping[str, str]) -> str:
        """Start a run of the app in a folder, and return the run's number."""
        content = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = messages.StartRunRequest(
            fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(settings))
        )
        with self._asking("start the run"):
            return str(self._client.StartRun(request).run_id)

    def lines(self, run: str) -> Iterator[str]:
        """Yield what a run's ServerApp prints, line by line, until the run ends."""
        rest = ""
        with self._asking("show the log of the run"):
            request = messages.StreamLogsRequest(run_id=int(run), after_timestamp=0.0)
            for part in self._client.StreamLogs(request):
                *lines, rest = f"{rest}{part.log_output}".split("\n")
                yield from lines
        yield rest

    def stop(self, run: str) -> None:
        """End a run."""
        with self._asking("stop the run"):
            self._client.StopRun(messages.StopRunRequest(run_id=int(run)))

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn what HTTP raises into one line."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            why = _reason(error.response)
            raise Refused(f"the SuperLink at {self.address} does not {what}: {why}") from None
        except (httpx.HTTPError, ValueError) as error:
            raise Refused(
                f"no SuperLink at {self.address} answers ({error}): is `ekiden federation start` "
                "running, and is this its certificate?"
            ) from None


def _reason(response: httpx.Response) -> str:
    try:
        return str(json.loads(response.text)["detail"])
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code}"


def _run(one: Any) -> RunAtLink:
    """Return a run in our own words."""
    moments = (one.finished_at, one.running_at, one.starting_at, one.pending_at)
    return RunAtLink(
        str(one.run_id),
        one.fab_id.rpartition("/")[2],
        one.status.sub_status or one.status.status,
        next(filter(None, moments), ""),
        one.status.details,
    )
