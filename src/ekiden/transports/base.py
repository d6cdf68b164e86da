"""What a run's transport is made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ekiden.data.samples import ClientData
from ekiden.engine.method import State, payload_types
from ekiden.engine.networks import initial_weights
from ekiden.engine.store import Store
from ekiden.engine.transport import Transport
from ekiden.engine.worker import Setup, Worker
from ekiden.training.weights import Weights


@dataclass(frozen=True)
class Start:
    """What a transport is made from when a run begins or resumes.

    Attributes:
        setup: what all parties agree on.
        clients: the data of each client, by its name.
        state: the state to go on from.
        folder: of the run's clients, a folder each, for what must survive; None for a run in memory.
        written: what `Transport.written` said when `state` was written; {} for a run that begins, None if not known.
    """

    setup: Setup
    clients: Mapping[str, ClientData]
    state: State
    folder: Path | None = None
    written: Mapping[str, str] | None = field(default_factory=dict)

    def initial(self) -> Weights:
        """Make the value behind `INITIAL`: the model that all parties build from the seed."""
        return initial_weights(self.setup)

    def worker(self, client: str) -> Worker:
        """Make the worker that executes tasks of one client and has only that client's data."""
        return Worker(self.setup, {client: self.clients[client]})

    def store(self, client: str) -> Store:
        """Open the store of one client, with its values and private state, from `state` on.

        Where `written` does not say when its private state was written, the newest that is there counts. Otherwise it
        is the number of steps that were done then.
        """
        method = self.setup.method
        written = None if self.written is None else int(self.written.get(client, 0))
        return Store(self.place(client), self._kind, method.traits.private, self.state.step, written)

    def place(self, client: str) -> Path | None:
        """Return the folder of a client; None in memory."""
        return self.folder / client if self.folder is not None else None

    def _kind(self, task: str) -> Any:
        return payload_types(self.setup.method, task)[1]


MakesTransport = Callable[[Start], Transport]
"""Makes the transport of a run; `ekiden.run(..., transport=...)` takes one, such as the class of a transport."""
