"""Run Flower's SuperLink with two ports: one for silos, and one on loopback for the coordinator.

Flower 1.41 serves everything on one port: the Fleet API, which SuperNodes need; the Control API,
which registers keys, submits runs and shows their logs; and the Runtime API of the submitted apps.
Anyone who reaches one of them reaches all. Here `flower-superlink` itself stays on loopback, and a
second port forwards only requests to the Fleet API.

Flower reads the whole body of a request before it looks at who sent it. The second port looks
first: at the signature in the headers, which needs no body. It also bounds connections, and the
time until their first request.
"""

import asyncio
import importlib
import ipaddress
import json
import sys
import time
from base64 import b64decode
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from fastapi import HTTPException
from flwr.common.constant import (
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import (
    bytes_to_public_key,
    public_key_to_bytes,
    verify_signature,
)
from flwr.superlink.servicer.fleet import fleet_handlers

from ekiden.core.base.files import leave_no_core, write
from ekiden.silos.coordinator.federation import SEEN, Federation, read
from ekiden.silos.ports import App, Receive, Scope, Send, guarded, respond

# prefix of the Fleet API's paths
FLEET = "/v1/fleet/"
# connections at the silos' port, of these from one address, and seconds until a first request
_BOUNDS = (1024, 64, 20.0)
# seconds between looks at SuperExec
_LOOK = 5.0


@dataclass(frozen=True)
class FleetOnly:
    """Forwards requests to the Fleet API to an app, and answers all others with 404, even if the
    app knows them.

    Requests that no registered silo signed are answered with 401, and their bodies are not read.
    """

    app: App
    # says whether a public key is a silo's
    known: Callable[[bytes], bool]
    # is told who signed
    note: Callable[[bytes], None] = lambda key: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if (
            scope["type"] != "http"
        ):  # no web sockets, and no start or end of the app: the other port handles those
            return
        if not str(scope["path"]).startswith(FLEET):
            await respond(send, 404, "this port is for silos only\n")
        elif not await asyncio.to_thread(self._signed, dict(scope["headers"])):
            await respond(send, 401, "no registered silo signed this request\n")
        else:
            await self.app(scope, receive, send)

    def _signed(self, headers: Mapping[bytes, bytes]) -> bool:
        if not signed(headers, self.known):
            return False
        self.note(b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()]))
        return True


def signed(headers: Mapping[bytes, bytes], known: Callable[[bytes], bool]) -> bool:
    """Return whether a registered silo signed the time in these headers, as Flower checks it after
    the body is read.
    """
    try:
        public = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
        signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
        moment = headers[TIMESTAMP_HEADER.encode()]
        age = (now() - datetime.fromisoformat(moment.decode())).total_seconds()
        recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
        return (
            recent
            and known(public)
            and verify_signature(bytes_to_public_key(public), moment, signature)
        )
    except (KeyError, ValueError, TypeError):
        return False


@dataclass(frozen=True)
class KeyFolder:
    """Knows the silos whose public keys are in a folder as NAME.pub, and when each signed a request
    last.

    The folder is looked at for each request, so a key that is taken out is refused at once.
    """

    folder: Path
    seen: dict[str, float] = field(default_factory=dict)
    _read: dict[str, tuple[tuple[int, int], bytes | None]] = field(default_factory=dict)

    def __call__(self, public: bytes) -> bool:
        """Return whether a key is in the folder; only with a signature by it, the request counts as
        the silo's.
        """
        return self._name(public) is not None

    def note(self, public: bytes) -> None:
        """Note that the silo with this key has signed a request."""
        if name := self._name(public):
            self.seen[name] = time.time()

    def _name(self, public: bytes) -> str | None:
        for path in self.folder.glob("*.pub"):
            # it is taken out at this moment
            with suppress(OSError):
                found = path.stat()
                version = (found.st_mtime_ns, found.st_ino)
                if path.stem not in self._read or self._read[path.stem][0] != version:
                    self._read[path.stem] = (version, _pem(path))
                if self._read[path.stem][1] == public:
                    return path.stem
        return None


def _pem(path: Path) -> bytes | None:
    """Return a silo's public key in the form in which SuperNodes send it; None if the file holds no
    key.
    """
    try:
        return bytes(public_key_to_bytes(load_ssh_public_key(path.read_bytes())))
    except (ValueError, UnsupportedAlgorithm):
        return None


def own_replies(push: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler of messages that silos send, for replies of the silo itself to the
    coordinator alone.

    Flower compares the node of a request with its signature, but not the sender of the message in
    it. So a silo could send requests to other silos as if it were the coordinator, and replies in
    their place.
    """

    def pushing(request: Any, state: Any) -> Any:
        for message in request.messages_list:
            about = message.metadata
            parties = (about.src_node_id, about.dst_node_id)
            if (
                parties != (request.node.node_id, SUPERLINK_NODE_ID)
                or not about.reply_to_message_id
            ):
                raise HTTPException(
                    403, "a silo sends nothing but its own replies to the coordinator"
                )
        return push(request=request, state=state)

    return pushing


def serve(federation: Federation) -> None:
    """Run `flower-superlink` on loopback, and its Fleet API at the silos' port, which lets in who
    has a public key in the federation's folder.
    """
    # We import by name: in its package, a function of the same name hides the module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    lifespans: list[Any] = []

    class Watched(superlink.SuperLinkLifespan):  # type: ignore[misc]  # Flower is not checked
        """The SuperLink's state, which also has the process that starts runs."""

        def startup(self) -> None:
            lifespans.append(self)
            super().startup()

    leave_no_core()
    superlink.SuperLinkLifespan = Watched
    fleet_handlers.push_messages = own_replies(fleet_handlers.push_messages)
    keep_private(federation.database)
    outside = "[::]" if ":" in federation.host else "0.0.0.0"
    fleet = f"{outside}:{federation.port}"
    keys = KeyFolder(federation.keys)
    superlink.uvicorn = SimpleNamespace(run=partial(run, fleet, lifespans=lifespans, keys=keys))
    flags = {
        "--host": "127.0.0.1",
        "--port": federation.control_port,
        "--database": federation.database,
        "--ssl-ca-certfile": federation.certificate,
        "--ssl-certfile": federation.folder / "link.crt",
        "--ssl-keyfile": federation.folder / "link.key",
    }
    sys.argv = ["flower-superlink", *map(str, chain.from_iterable(flags.items()))]
    sys.argv += ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
    superlink.flower_superlink()


def keep_private(database: Path) -> None:
    """Let only this user read the SuperLink's messages; SQLite gives its other files the rights of
    this one.
    """
    database.touch(0o600)
    for file in database.parent.glob(f"{database.name}*"):
        file.chmod(0o600)


def run(
    fleet: str,
    app: App,
    host: str,
    keys: KeyFolder,
    lifespans: Sequence[Any] = (),
    **options: Any,
) -> None:
    """Serve `app` at `host`, like `uvicorn.run`, and its Fleet API also at `fleet`; exit if `host`
    is not loopback.
    """
    if not ipaddress.ip_address(host).is_loopback:
        sys.exit(f"ekiden: the Control API stays on loopback: --host 127.0.0.1, not {host}")
    outside, _, port = fleet.rpartition(":")
    others = options | {
        "port": int(port),
        "lifespan": "off",
        "http": guarded(*_BOUNDS),
        "ws": "none",
    }
    gate = FleetOnly(app, keys, keys.note)
    outer = uvicorn.Config(gate, host=outside.strip("[]"), **others)
    with suppress(KeyboardInterrupt):
        asyncio.run(_together(lifespans, keys, uvicorn.Config(app, host=host, **options), outer))


async def _together(lifespans: Sequence[Any], keys: KeyFolder, *configs: uvicorn.Config) -> None:
    """Serve until one of the servers ends, then end the others."""
    servers = [uvicorn.Server(config) for config in configs]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    watches = [
        asyncio.create_task(keep_superexec(lifespans)),
        asyncio.create_task(keep_seen(keys)),
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for watch in watches:
        watch.cancel()
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


async def keep_superexec(lifespans: Sequence[Any], seconds: float = _LOOK) -> None:
    """Start SuperExec again whenever it ends; without it, runs stay pending for ever."""
    while True:
        await asyncio.sleep(seconds)
        for lifespan in lifespans:
            process = lifespan.superexec_process
            if process is not None and (code := process.poll()) is not None:
                print(
                    f"ekiden: flower-superexec ended with code {code}: starting it again",
                    flush=True,
                )
                lifespan._start_superexec_if_needed()


async def keep_seen(keys: KeyFolder, seconds: float = _LOOK) -> None:
    """Write when each silo signed a request last, for `ekiden federation status` and monitors."""
    while True:
        with suppress(OSError):
            write(keys.folder.parent / SEEN, [json.dumps(keys.seen).encode()], sync=False)
        await asyncio.sleep(seconds)


def main() -> None:
    """Serve the federation in the folder that `sys.argv` names."""
    serve(read(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
