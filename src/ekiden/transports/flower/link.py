"""Run Flower's SuperLink with two ports: one for silos, and one on loopback for the coordinator.

Flower 1.41 serves everything on one port: the Fleet API, which SuperNodes need; the Control API, which registers keys,
submits runs and shows their logs; and the Runtime API of the submitted apps. Anyone who reaches one of them reaches
all. Here `flower-superlink` itself stays on loopback, and a second port forwards only requests to the Fleet API.
"""

import asyncio
import importlib
import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import uvicorn

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
FLEET = "/v1/fleet/"
"""prefix of the Fleet API's paths"""


class FleetOnly:
    """Forwards requests to the Fleet API to an app, and answers all others with 404, even if the app knows them."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, as ASGI has it."""
        if scope["type"] != "http":  # no web sockets, and no start or end of the app: the other port handles those
            return
        if str(scope["path"]).startswith(FLEET):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"this port is for silos only\n"})


def serve(fleet: str) -> None:
    """Run `flower-superlink` with the flags in `sys.argv`, on loopback, and its Fleet API at `fleet`, HOST:PORT."""
    # We import by name: in its package, a function of the same name hides the module.
    superlink: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    superlink.uvicorn = SimpleNamespace(run=partial(run, fleet))
    sys.argv[0] = "flower-superlink"
    superlink.flower_superlink()


def run(fleet: str, app: App, host: str, **options: Any) -> None:
    """Serve `app` at `host`, like `uvicorn.run`, and its Fleet API also at `fleet`; exit if `host` is not loopback."""
    if not ipaddress.ip_address(host).is_loopback:
        sys.exit(f"ekiden: the Control API stays on loopback: --host 127.0.0.1, not {host}")
    outside, _, port = fleet.rpartition(":")
    others = options | {"port": int(port), "lifespan": "off"}
    outer = uvicorn.Config(FleetOnly(app), host=outside.strip("[]"), **others)
    with suppress(KeyboardInterrupt):
        asyncio.run(_together(uvicorn.Config(app, host=host, **options), outer))


async def _together(*configs: uvicorn.Config) -> None:
    """Serve until one of the servers ends, then end the others."""
    servers = [uvicorn.Server(config) for config in configs]
    tasks = [asyncio.create_task(server.serve()) for server in servers]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    serve(sys.argv.pop(1))
