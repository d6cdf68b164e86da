"""Simulated time: every number is worked out by hand, in seconds."""

from dataclasses import dataclass
from itertools import pairwise
from math import exp, inf
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import ekiden
from ekiden import Devices
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import derive
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine.folder import TaskPasses
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import SERVER
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DFedAvgM, FedAvg, FedSeq
from ekiden.runs import summary
from ekiden.runs.clock import PRESETS, Device, devices_of, timed

PLAIN = Devices(speed=10, upload=100, download=50, latency=1, patience=7)


@dataclass(frozen=True)
class Given(Devices):
    """Devices by name; a client that is not named has the median ones."""

    slow: tuple[str, ...] = ()

    def device(self, party: str) -> Device:
        usual = super().device(party)
        return usual._replace(speed=usual.speed / 10) if party in self.slow else usual


def train(client: str, step: int, seconds: int, call: int = 0, task: str = "train") -> TaskPasses:
    """A task that takes so many seconds on `PLAIN`: forward, and backward at twice the price."""
    return TaskPasses(client, f"{step}-{call}-{task}", 4 * seconds, 3 * seconds)


def moved(
    step: int, source: str, target: str, size: int, value: str = "", task: str = "train"
) -> Transfer:
    return Transfer(step, source, target, task, size, value=value)


def test_a_chain_waits_for_each_hop() -> None:
    ledger = [moved(1, "a", "b", 500, "0-0-train"), moved(2, "b", "a", 500, "1-0-train")]
    passes = {0: [train("a", 0, 30)], 1: [train("b", 1, 4)], 2: [train("a", 2, 3)]}
    found = timed(PLAIN, "ab", 3, ledger, passes)
    assert found.seconds == (
        30,
        30 + 1 + 10 + 4,
        45 + 11 + 3,
    )  # 500 bytes at 50 a second, not at 100
    assert found.computing == 37 / (2 * 59)
    assert timed(PLAIN, "ab", 2, ledger, passes).seconds == found.seconds[:2]


def star(step: int, *clients: str) -> list[Transfer]:
    down = [moved(step, SERVER, client, 100) for client in clients] * (step > 0)
    return [
        *down,
        *(moved(step, client, SERVER, 100, f"{step}-0-train", "get") for client in clients),
    ]


def test_a_star_waits_for_the_slowest() -> None:
    clients = ("a", "b", "c")
    passes = {step: [train(client, step, 2) for client in clients] for step in range(2)}
    passes[1] += [TaskPasses(SERVER, "", 50, 0)]
    given = Given(speed=10, upload=100, download=50, latency=1, slow=("b",))
    found = timed(given, clients, 2, [*star(0, *clients), *star(1, *clients)], passes)
    first = 20 + 1 + 1  # b trains ten times as long; upload
    assert found.seconds == (
        first,
        first + (1 + 2) + 20 + 2 + 5,
    )  # download, b, upload, the server's own passes
    quick = timed(given, clients, 2, [*star(0, "a", "c"), *star(1, "a", "c")], passes)
    assert quick.seconds == (
        20,
        40,
    )  # b still computes, and nobody waits for it but the end of the step


def test_a_round_is_over_for_the_server_before_a_client_that_nobody_reads() -> None:
    given = Given(speed=10, upload=100, download=50, latency=1, slow=("b",))
    passes = {0: [train("a", 0, 2), train("b", 0, 2)], 1: [train("a", 1, 2)]}
    assert timed(given, "ab", 2, [*star(0, "a"), *star(1, "a")], passes).seconds == (20, 20)
    passes[1] = [train("a", 1, 20)]
    assert timed(given, "ab", 2, [*star(0, "a"), *star(1, "a")], passes).seconds == (
        20,
        4 + 3 + 20 + 2,
    )


def ring(step: int, *clients: str) -> list[Transfer]:
    return [
        moved(step, before, after, 100, f"{step}-0-train", "mix")
        for before, after in pairwise(clients)
    ]


def test_in_gossip_a_client_waits_for_its_neighbours_only() -> None:
    ledger = [row for step in range(2) for row in ring(step, *"abcd")]

    def passes(slow: str) -> dict[int, list[TaskPasses]]:
        """In each step one client needs 20 s, and the others 2 s."""
        trained = (
            (step, name, 20 if name == slow[step] else 2) for step in range(2) for name in "abcd"
        )
        found: dict[int, list[TaskPasses]] = {0: [], 1: []}
        for step, name, seconds in trained:
            found[step] += [train(name, step, seconds), train(name, step, 0, 1, "mix")]
        return found

    assert timed(PLAIN, "abcd", 2, ledger, passes("--")).seconds == (2 + 3, 5 + 2 + 3)
    # Step 1: a needs nobody, so it sends after 20 + 2, and b mixes at 25. d began at 5 and mixes at
    # 25. c waits for b.
    assert timed(PLAIN, "abcd", 2, ledger, passes("ad")).seconds == (20 + 3, 25 + 3)
    assert timed(PLAIN, "abcd", 2, ledger, passes("aa")).seconds == (20 + 3, 40 + 3)


def test_a_sender_sends_one_after_the_other_and_a_receiver_shares_its_bandwidth() -> None:
    one = {0: [train("a", 0, 1)], 1: [train(name, 1, 1) for name in "bcd"]}
    ledger = [moved(1, "a", name, 200, "0-0-train") for name in "bcd"]
    # The upload is busy for 2 s with each; a receiver has it after 1 + 200 / 50 = 5 s, and trains
    # for 1 s.
    assert timed(PLAIN, "abcd", 2, ledger, one).seconds == (1, 1 + 2 + 2 + 5 + 1)
    limited = Devices(speed=10, upload=100, download=50, latency=1, server_download=40)
    many = {0: [train(name, 0, 1) for name in "abc"]}
    ledger = [moved(0, name, SERVER, 200, "0-0-train", "get") for name in "abc"]
    assert timed(limited, "abc", 1, ledger, many).seconds == (1 + 1 + 5 + 5 + 5,)
    assert timed(PLAIN, "abc", 1, ledger, many).seconds == (1 + 1 + 2,)


def test_a_value_goes_back_and_forth_within_a_step() -> None:
    passes = {0: [train("a", 0, 1), train("a", 0, 2, 1), train("b", 0, 4)]}
    ledger = [moved(0, "a", "b", 50, "0-0-train"), moved(0, "b", "a", 50, "0-0-train")]
    assert timed(PLAIN, "ab", 1, ledger, passes).seconds == (1 + 2 + 4 + 2 + 2,)


def test_who_does_not_answer_costs_the_patience_of_the_others() -> None:
    gone = Transfer(1, "b", SERVER, "get", 0, missing=True, value="1-0-train")
    passes = {0: [train("a", 0, 1)], 1: [], 2: [train("c", 2, 1)]}
    ledger = [gone, moved(2, "a", "c", 50, "0-0-train")]
    assert timed(PLAIN, "abc", 3, ledger, passes).seconds == (1, 1 + 7, 8 + 1)


def test_devices_are_drawn_from_the_stated_distribution() -> None:
    spread = Devices(speed=10, speed_spread=0.5, upload=3, download=5, link_spread=0.2, seed=4)
    names = [f"client-{i}" for i in range(400)]
    one = spread.device(names[7])
    normal = NormalDist().inv_cdf((derive(4, "device", names[7], "speed") + 0.5) / 2**63)
    assert one.speed == 10 * exp(0.5 * normal)
    assert one.download / one.upload == pytest.approx(5 / 3)
    speeds = sorted(spread.device(name).speed for name in names)
    assert speeds[200] == pytest.approx(10, rel=0.1)
    assert speeds[336] / speeds[64] == pytest.approx(
        exp(2 * 0.5), rel=0.2
    )  # one deviation to both sides
    assert spread.device(SERVER) == Device(10, inf, inf)
    assert spread.device(names[7]) == one
    assert Devices(speed=10, speed_spread=0.5, seed=5).device(names[7]).speed != one.speed


def test_devices_come_from_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("speed = 3\nserver_upload = 2.0\n")
    assert devices_of(file) == Devices(speed=3.0, server_upload=2.0)
    assert devices_of("phones") is PRESETS["phones"]
    with pytest.raises(UserError, match="unknown name of devices 'phone': did you mean 'phones'"):
        devices_of("phone")
    for wrong, why in (
        ("speed = 0", "speed 0"),
        ("sped = 1", "did you mean 'speed'"),
        ("speed =", "not valid TOML"),
    ):
        file.write_text(wrong)
        with pytest.raises(UserError, match=why):
            devices_of(file)
    with pytest.raises(UserError, match="cannot read"):
        devices_of(tmp_path / "none.toml")


@pytest.mark.parametrize(
    "method", [FedSeq(epochs=1), FedAvg(rounds=2, epochs=1), DFedAvgM(rounds=2, epochs=1)]
)
def test_a_run_keeps_what_its_time_follows_from(
    method: Method, blobs: FederatedData, tmp_path: Path
) -> None:
    whole, folder = ekiden.run(method, blobs, Tiny, quiet=True), tmp_path / "run"
    clock = whole.simulated("phones")
    ekiden.run(method, blobs, Tiny, folder=folder, stop_after=1, quiet=True)
    with (folder / "passes.jsonl").open("a") as file:
        file.write('{"step":1,"tasks":[["client-0","1-0-train",9,9]]}\n')  # as a kill leaves it
    resumed = ekiden.run(method, blobs, Tiny, folder=folder, quiet=True)
    assert resumed.simulated("phones") == clock == ekiden.open_run(folder).simulated("phones")
    for kind in ("forward", "backward"):
        assert (
            sum(getattr(one, kind) for its in whole.passes.values() for one in its)
            == whole.metrics[-1][kind]
        )
    (row,) = ekiden.compare(folder, devices="phones")
    assert (row["simulated"], row["computing"]) == (clock.seconds[-1], clock.computing)
    record = summary.as_record(summary.summarise(folder), PRESETS["phones"])
    assert record["simulated"]["seconds"] == clock.seconds
    shown = ekiden.show(folder, devices="phones")
    assert all(summary.duration(when) in shown for when in clock.seconds)
    (folder / "passes.jsonl").unlink()
    with pytest.raises(UserError, match=r"passes\.jsonl says nothing of step 1"):
        ekiden.compare(folder, devices="phones")


def test_a_method_that_counts_no_passes_has_an_unknown_share_of_computing(tmp_path: Path) -> None:
    x, y = np.arange(16.0).reshape(8, 2), np.arange(8) % 2
    method = ekiden.Trees(rounds=1, trees=1, depth=1, columns=1.0)
    silos = ekiden.federate({"a": (x, y), "b": (x + 0.5, y)}, test=(x, y), val_fraction=0.0)
    result = ekiden.run(method, silos, folder=tmp_path / "run", quiet=True)
    assert result.simulated().seconds[-1] > 0
    assert result.simulated().computing is None
    (row,) = ekiden.compare(tmp_path / "run", devices="equal")
    assert row["computing"] is None
    assert row["data"] == "own data, 2 clients", "trees have no network"
    assert "without computing" in ekiden.show(tmp_path / "run", devices="equal")
