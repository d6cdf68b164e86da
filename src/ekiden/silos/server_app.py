"""Flower's end at the coordinator: a `ServerApp` that runs a plan over the nodes of a SuperLink."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from ekiden.core.base.checks import made
from ekiden.core.base.errors import UserError
from ekiden.silos import logs
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.remote_plan import Measuring
from ekiden.silos.envelope import content, wrap
from ekiden.silos.trust.parcel import said

app = ServerApp()


@dataclass(frozen=True)
class GridNodes:
    """Nodes of a SuperLink."""

    grid: Grid

    def ids(self) -> Sequence[int]:
        """Return the nodes that are connected now."""
        return list(self.grid.get_node_ids())

    def send(self, node: int, data: bytes) -> str | Lost:
        """Send a message; Flower gives it a random name."""
        message = Message(wrap(data), dst_node_id=node, message_type="query")
        try:
            ticket = next(iter(self.grid.push_messages([message])), "")
        except (httpx.HTTPError, ValueError) as error:
            return Lost(f"{type(error).__name__}")
        return ticket or Lost("the SuperLink does not take messages for it")

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come.

        Each ticket is asked for alone: what an answer itself says about its sender and its ticket,
        nobody has checked.
        """
        found: dict[str, bytes | Lost] = {}
        for ticket in tickets:
            try:
                for message in self.grid.pull_messages([ticket]):
                    found[ticket] = (
                        Lost(said(str(message.error.reason)))
                        if message.has_error()
                        else content(message)
                    )
            except httpx.HTTPError:
                # the SuperLink is away; its messages will be there later
                break
            # a silo can send objects from which Flower makes no message
            except Exception as error:
                found[ticket] = Lost(f"its answer is not a message ({type(error).__name__})")
        return found


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run the plan in the run configuration. If the run fails, end with an error and one line that
    says why.
    """
    config = context.run_config
    plan = remote_plan.from_json(json.loads(str(config["plan"])))
    public_keys = json.loads(str(config["keys"]))
    link = json.dumps({**json.loads(str(config["link"])), "run": str(context.run_id)})
    folder = Path(str(config["folder"]))
    nodes = GridNodes(grid)
    try:
        if config["measures"]:
            asked = made(Measuring, json.loads(str(config["measures"])))
            session.evaluate(plan, asked, nodes, folder, public_keys, say)
            return
        result = session.run(plan, nodes, folder, public_keys, say, link=link)
    except UserError as error:
        print(logs.ENDED + " ".join(str(error).split()), flush=True)
        # Flower would add a traceback and its own exit code, but our line says all.
        logging.getLogger("flwr").addFilter(lambda record: False)
        raise
    say(f"{result.bytes} bytes moved; run folder: {result.folder}")


def say(line: str) -> None:
    """Tell the user, through Flower's log."""
    print(f"ekiden: {line}", flush=True)
