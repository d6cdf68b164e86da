"""What a hop of 45 MB costs: ours, sealed and signed, against a bare Flower message of the same
bytes there and back.

Both go over the same SuperLink and SuperNodes in one run, taking turns: before each of our tasks
the coordinator sends random bytes to the same silo, which answers with others. A SuperNode looks
for messages every 3 seconds, and at once after an answer; so what comes second would always just
miss it. Pauses before both, spread evenly over 3 seconds and not counted, let both find it at any
moment alike. Run with `python -m benchmarks.hop`, on an idle machine.
"""

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from tests.e2e.silos import NAMES, Federation, running

from ekiden import methods
from ekiden.cli.app import call
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import Method, State, on_client
from ekiden.core.training.weights import Weights
from ekiden.runs.recipe import Recipe
from ekiden.silos import client_app, commands
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.envelope import content, wrap
from ekiden.silos.server_app import GridNodes, say
from ekiden.silos.trust.parcel import Ask, unpack

ROOT = Path(__file__).parents[1]
ROUNDS = 9
SIZE = 44_800_000  # bytes of ResNet-18 on the wire, about
LOOK = 3.0  # seconds between a SuperNode's looks for messages
GOLDEN = 0.6180339887  # multiples of it, without their whole part, spread evenly


@dataclass(frozen=True)
class Relay(Method):
    """Hands a model on, changed a little, without training."""

    rounds: int = ROUNDS

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after each hop."""
        while s.step < self.steps(len(fed.clients)):
            s = s.next(model=fed.call(self.move, fed.clients[s.step % len(fed.clients)], s.model))
            yield s

    @on_client
    def move(self, client: Client, model: Weights) -> Weights:
        """Another model of the same size."""
        return model.with_params(model.params + 1e-3)

    def steps(self, clients: int) -> int:
        """T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: int) -> int:
        """All but the first hop."""
        return (self.steps(clients) - 1) * model


class Turns(GridNodes):
    """Sends a bare message before each task, and takes its time."""

    def __init__(self, grid: Grid, note: Path) -> None:
        super().__init__(grid)
        self._bare = grid
        self._note = note
        self._turn = 0

    def send(self, node: int, data: bytes) -> str | Lost:
        """A bare hop, then ours."""
        if unpack(data, Ask)[0].kind == "task":
            self._turn += 1
            pause = LOOK * (self._turn * GOLDEN % 1)
            time.sleep(pause)
            began = time.perf_counter()
            message = Message(wrap(os.urandom(SIZE)), dst_node_id=node, message_type="query.bare")
            (ticket,) = self._bare.push_messages([message])
            answers: Sequence[Message] = []
            while not answers:
                time.sleep(1.0)
                answers = list(self._bare.pull_messages([ticket]))
            assert len(content(answers[0])) == SIZE
            row = {"seconds": time.perf_counter() - began, "pauses": 2 * pause}
            with self._note.open("a") as file:
                file.write(json.dumps(row) + "\n")
            time.sleep(pause)
        return super().send(node, data)


server = ServerApp()


@server.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Run `Relay` with bare messages between."""
    install()
    config = context.run_config
    plan: RemotePlan[Method] = RemotePlan(
        Recipe(Relay(), model="resnet18", evaluate_every=0), ",".join(NAMES)
    )
    folder = Path(str(config["folder"]))
    session.run(
        plan,
        Turns(grid, folder.with_name("bare.jsonl")),
        folder,
        json.loads(str(config["keys"])),
        say,
    )


def install() -> None:
    """Let all ends know the method."""
    methods.PLACES["Relay"] = f"{Relay.__module__}:Relay"


def answer_bare(message: Message, context: Context) -> Message:
    """As many other bytes."""
    return Message(wrap(os.urandom(len(content(message)))), reply_to=message)


def write_app(app: Path) -> None:
    """The Flower app whose server is `main`."""
    commands.write_app(app)
    file = app / "pyproject.toml"
    text = file.read_text().replace("ekiden.silos.server_app:app", "benchmarks.hop:server")
    file.write_text(text)


def measure(folder: Path) -> None:
    """Start everything, run, and print both costs."""
    os.environ["PYTHONPATH"] = (
        f"{ROOT}{os.pathsep}{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    with running(folder, start_silo) as federation:
        public = commands.read_keys(folder / "keys", NAMES)
        write_app(folder / "app")
        settings = {"folder": str(folder / "run"), "keys": json.dumps(public)}
        link = commands.connect(federation.link, folder / "ca.crt")
        for line in link.lines(link.start(folder / "app", settings)):
            print(line)
    turns = list(read_lines(folder / "bare.jsonl"))[
        1:-1
    ]  # the first finds caches cold, the last measures the model
    steps = list(read_lines(folder / "run" / "times.jsonl"))[1:-1]
    bare = [turn["seconds"] for turn in turns]
    ours = [
        step["seconds"] - turn["seconds"] - turn["pauses"]
        for step, turn in zip(steps, turns, strict=True)
    ]
    rows = [r for r in read_lines(folder / "run" / "network.jsonl") if r["kind"] == "task"][1:-1]
    payload = sum(r["bytes"] for r in read_lines(folder / "run" / "ledger.jsonl")) / (len(bare) + 1)
    moved = mean(r["sent"] + r["received"] for r in rows)
    least = 2 * payload
    print(f"{len(ours)} hops of {payload / 1e6:.2f} MB there and back, means:")
    print(f"  seconds {mean(ours):.2f}, bare {mean(bare):.2f}: {mean(ours) / mean(bare):.3f}")
    print(f"  bytes {moved:.0f}, bare {least:.0f}: {moved / least:.5f}")
    print("  ours", [round(s, 1) for s in ours], "bare", [round(s, 1) for s in bare])


def start_silo(federation: Federation, name: str) -> None:
    """A silo that also answers bare messages."""
    file = federation.folder / f"{name}.toml"
    file.write_text(re.sub(r"(?m)^methods = .*", 'methods = ["relay"]', file.read_text()))
    federation.start(name, [sys.executable, "-m", "benchmarks.hop", "silo", f"{name}.toml"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["silo"]:
        install()
        client_app.app.query("bare")(answer_bare)
        call(["silo", "start", *sys.argv[2:]])
    else:
        with tempfile.TemporaryDirectory(prefix="ekiden-hop-") as scratch:
            measure(Path(scratch))
