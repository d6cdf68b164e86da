"""Simulated time: how long a finished run would have taken on other devices, from what it counted.

A run counts the bytes of each value that moved and the passes of each task. With the speeds of
devices and links, these give the time of every task and transfer, and what waits for what gives the
time of every step. The run itself does not depend on it, so one run can be timed on any devices,
and afterwards.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import exp, inf
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from ekiden.core.base.checks import Checked, CountOrZero, NonNegative, Positive, made, reading
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import read_toml
from ekiden.core.base.settings import derive
from ekiden.core.engine.folder import PassesOf, TaskPasses
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import SERVER

# A backward pass computes two products of matrices for each one of the forward pass
_BACKWARD = 2


@dataclass(frozen=True)
class Devices(Checked):
    """The devices of clients and server. What differs from client to client has a log-normal
    distribution.

    Attributes:
        speed: median of the samples that a client passes forward through the network in a second; a
            backward pass takes two times as long.
        speed_spread: standard deviation of the logarithm of the speed; 0 makes all clients equal.
        upload: median, in bytes a second.
        download: median, in bytes a second.
        link_spread: standard deviation of the logarithm of a client's bandwidth; both directions
            have the same factor.
        latency: seconds that each value needs in addition, whatever its size.
        patience: seconds after which the run goes on without a client that does not answer.
        server_speed: like `speed`, of the server; None is the clients' median.
        server_upload: bytes a second for all clients together; None has no limit.
        server_download: the same in the other direction.
        seed: of the draws. A client of the same name has the same device in every run.
    """

    speed: Positive = 1000.0
    speed_spread: NonNegative = 0.0
    upload: Positive = 12.5e6
    download: Positive = 12.5e6
    link_spread: NonNegative = 0.0
    latency: NonNegative = 0.05
    patience: NonNegative = 60.0
    server_speed: Positive | None = None
    server_upload: Positive | None = None
    server_download: Positive | None = None
    seed: CountOrZero = 0

    def device(self, party: str) -> "Device":
        """Return the device of a client, or of the server."""
        if party == SERVER:
            return Device(
                self.server_speed or self.speed,
                self.server_upload or inf,
                self.server_download or inf,
            )
        link = self._factor(party, "link", self.link_spread)
        return Device(
            self.speed * self._factor(party, "speed", self.speed_spread),
            self.upload * link,
            self.download * link,
        )

    def _factor(self, party: str, what: str, spread: float) -> float:
        if not spread:
            return 1.0
        uniform = (derive(self.seed, "device", party, what) + 0.5) / 2**63
        return exp(spread * NormalDist().inv_cdf(uniform))


class Device(NamedTuple):
    """What a party computes and sends with; see `Devices` for the units."""

    speed: float
    upload: float
    download: float


PRESETS = {
    "equal": Devices(),
    "hospitals": Devices(speed_spread=0.5, link_spread=0.5),
    "phones": Devices(
        speed=50.0,
        speed_spread=1.0,
        upload=0.6e6,
        download=2.5e6,
        link_spread=0.8,
        latency=0.1,
        patience=120.0,
    ),
}
"""Devices by name. Their numbers are assumptions, to compare methods by; they were not measured."""


def devices_of(given: str | os.PathLike[str] | Devices) -> Devices | None:
    """Return the devices that a name of `PRESETS` or a TOML file with the fields of `Devices`
    stands for; None without a name.

    Raises:
        UserError: there is no such name or file, or it has wrong values.
    """
    if not given:
        return None
    if isinstance(given, Devices):
        return given
    if str(given) in PRESETS:
        return PRESETS[str(given)]
    path = Path(given)
    if path.suffix != ".toml":
        raise unknown("name of devices", str(given), (*PRESETS, "FILE.toml"))
    values = read_toml(path, "see docs/time.md")
    with reading(str(path), "another file of devices"):
        return made(Devices, values)


class Timed(NamedTuple):
    """The simulated time of a run.

    Attributes:
        seconds: when each step was done, from the start of the run.
        computing: the share of the clients' time in which they computed; the rest they sent,
            received, and waited. None if no task counted a pass, as tasks of `trees` do: `seconds`
            are then without their computing.
    """

    seconds: tuple[float, ...]
    computing: float | None


def timed(
    devices: Devices,
    clients: Sequence[str],
    steps: int,
    ledger: Iterable[Transfer],
    passes: PassesOf,
) -> Timed:
    """Return the simulated time of a run.

    - A task begins when its client has done its earlier tasks, when the values that it uses have
      arrived, and when the server has what it read in earlier steps.
    - A party sends its values one after the other. A value arrives after the latency and its bytes
      at the slower one of both ends; several values at one receiver share its bandwidth.
    - Nothing else waits: a client that nobody needs does not hold up a step of others.

    Raises:
        UserError: the passes of a step were not kept.
    """
    moved: dict[int, list[Transfer]] = defaultdict(list)
    for row in ledger:
        moved[row.step].append(row)
    clock = _Clock(devices)
    seconds = []
    counted = False
    for step in range(steps):
        if step not in passes:
            raise UserError(
                f"passes.jsonl says nothing of step {step + 1}: run it again to have its simulated "
                "time"
            )
        clock.step(moved[step], passes[step])
        counted = counted or any(task.forward or task.backward for task in passes[step])
        seconds.append(clock.now)
    whole = len(clients) * clock.now
    return Timed(
        tuple(seconds), sum(clock.computed.values()) / whole if whole and counted else None
    )


class _Clock:
    """When each party has done what."""

    def __init__(self, devices: Devices) -> None:
        # when the last of all was done
        self.now = 0.0
        # seconds in which each client computed
        self.computed: dict[str, float] = defaultdict(float)
        self._given = devices
        self._devices: dict[str, Device] = {}
        # when a party has done its tasks
        self._free: dict[str, float] = defaultdict(float)
        # when its upload is free
        self._sent: dict[str, float] = defaultdict(float)
        # when its download is free
        self._received: dict[str, float] = defaultdict(float)
        # when a value was made
        self._ready: dict[tuple[str, str], float] = {}
        # values on the way to a task
        self._coming: dict[tuple[str, str], list[tuple[float, float]]] = {}
        # of this step, those that are left
        self._tasks: dict[str, Iterator[TaskPasses]] = {}
        self._began = 0.0

    def step(self, moved: Sequence[Transfer], passes: Sequence[TaskPasses]) -> None:
        """Do a step."""
        self._began = self._free[SERVER]
        before = self.now
        tasks: dict[str, list[TaskPasses]] = defaultdict(list)
        for one in passes:
            tasks[one.party].append(one)
        at_server = tasks.pop(SERVER, [])
        self._tasks = {client: iter(its) for client, its in tasks.items()}
        for row in moved:
            if row.missing:
                self._free[SERVER] = max(self._free[SERVER], before + self._given.patience)
            else:
                self._send(row)
        for client in tasks:
            self._work(client)
        self._receive(SERVER, "get")
        for one in at_server:
            self._free[SERVER] += self._duration(one)
        self._coming.clear()
        self.now = max(self.now, *self._free.values())

    def _send(self, row: Transfer) -> None:
        source = self._device(row.source)
        target = self._device(row.target)
        if row.source == SERVER:
            self._receive(SERVER, "get")
            made = self._free[SERVER]
        else:
            if (row.source, row.value) not in self._ready and row.value.startswith(f"{row.step}-"):
                self._work(row.source, row.value)
            # from another run, if no task made it
            made = self._ready.get((row.source, row.value), 0.0)
        start = max(made, self._sent[row.source])
        self._sent[row.source] = start + row.bytes / source.upload
        there = start + self._given.latency + row.bytes / min(source.upload, target.download)
        self._coming.setdefault((row.target, row.task), []).append(
            (there, row.bytes / target.download)
        )

    def _work(self, client: str, last: str = "") -> None:
        """Do the client's tasks of this step, up to the one that gives the value `last`, or all
        that are left.
        """
        for task in self._tasks.get(client, ()):
            self._receive(client, task.value.split("-", 2)[2])
            seconds = self._duration(task)
            self._free[client] = max(self._free[client], self._began) + seconds
            self.computed[client] += seconds
            self._ready[client, task.value] = self._free[client]
            if task.value == last:
                break

    def _receive(self, party: str, task: str) -> None:
        """Wait for all values that are on the way to a task."""
        for there, lasting in sorted(self._coming.pop((party, task), ())):
            self._received[party] = max(there, self._received[party] + lasting)
            self._free[party] = max(self._free[party], self._received[party])

    def _duration(self, task: TaskPasses) -> float:
        return (task.forward + _BACKWARD * task.backward) / self._device(task.party).speed

    def _device(self, party: str) -> Device:
        if party not in self._devices:
            self._devices[party] = self._given.device(party)
        return self._devices[party]
