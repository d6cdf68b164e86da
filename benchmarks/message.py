"""A sealed value of more than 2 GB from silo to silo, in one process.

    python -m benchmarks.message         # 2,200 MB
    python -m benchmarks.message 50      # other megabytes

Two silos answer the requests of a coordinator, without Flower between them. One makes a value, the
other checks it. The value is encoded, signed, sealed, kept on the silos' disks, opened, and read.
Coordinator and silos are one process, so its peak is that of all three; the coordinator's copy is
on the disk.
"""

import mmap
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from torch import Tensor

from ekiden import methods
from ekiden.core.engine.client import Client
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Method, State, on_client
from ekiden.core.training.weights import Weights
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.coordinator.verify import verify


class Large(NamedTuple):
    """A value of any size, and the model that the run ends with."""

    values: Tensor
    model: Weights


@dataclass(frozen=True)
class Carry(Method):
    """Hands on a vector of so many whole numbers."""

    numbers: int = 1000

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after the one step."""
        if not s.step:
            first, second, *_ = fed.clients
            yield s.next(model=fed.call(self.read, second, fed.call(self.make, first, s.model)))

    @on_client
    def make(self, client: Client, model: Weights) -> Large:
        """Return 0, 1, 2, ..."""
        return Large(torch.arange(self.numbers, dtype=torch.int32), model)

    @on_client
    def read(self, client: Client, given: Large) -> Weights:
        """Check some of the numbers and the last."""
        step = max(1, self.numbers // 1000)
        assert torch.equal(
            given.values[::step], torch.arange(0, self.numbers, step, dtype=torch.int32)
        )
        assert int(given.values[-1]) == self.numbers - 1
        return given.model

    def steps(self, clients: int) -> int:
        """One."""
        return 1

    def cost(self, clients: int, model: int) -> int:
        """The numbers, and a model."""
        return 4 * self.numbers + model


class Nodes(FakeNodes):
    """Silos whose answers the coordinator has on the disk, as it would from another process."""

    def send(self, node: int, data: bytes) -> str:
        """Answer at once."""
        ticket = str(len(self.log))
        self.log.append((node, b""))
        with tempfile.TemporaryFile() as file:
            file.write(self.silo(node).answer(data))
            file.flush()
            answer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self._answers[ticket] = answer  # type: ignore[assignment]
        return ticket


def main() -> None:
    """Print what a run with such a value took."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 2200
    torch.set_num_threads(1)
    methods.PLACES["Carry"] = f"{__name__}:Carry"
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        files, public = with_keys(place, NAMES[:2], '[limits]\nmethods = ["carry"]\n')
        method: Method = Carry(numbers=megabytes * 250_000)
        plan = RemotePlan(Recipe(method, evaluate_every=0), ",".join(NAMES[:2]))
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        run = session.run(plan, Nodes(files), place / "run", public, lambda line: None, poll=0)
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
        sent = max(row.bytes for row in run.ledger)
        wrong = verify(place / "run", public).wrong
    print(
        f"{sent:,} bytes: {time.process_time() - began:.1f} s of CPU, peak {peak / megabytes:.1f} "
        "times the value"
    )
    print("\n".join(wrong) or "the chain of custody is whole")


if __name__ == "__main__":
    main()
