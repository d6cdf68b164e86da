"""What follows from a run folder: whether it is finished, how it is divided, sizes and times."""

import json
from dataclasses import asdict
from pathlib import Path

from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.wire import SERVER
from ekiden.methods import Local
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import Summary, duration, network, partition, size, summarise


def test_units_are_rounded_before_they_are_chosen() -> None:
    assert [duration(s) for s in (0.04, 59.94, 59.96, 119.7, 3599.4, 3599.9, 7384.0)] == [
        *("0.0 s", "59.9 s", "1 min 00 s", "2 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 03 min")
    ]
    assert [size(b) for b in (999, 999.6, 999_994, 999_999, 999_999_000, 2e12)] == [
        *("999 B", "1.00 kB", "999.99 kB", "1.00 MB", "1.00 GB", "2.00 TB")
    ]


def test_a_run_killed_while_it_wrote_its_result_is_not_finished(tmp_path: Path) -> None:
    plan = Plan(Recipe(Local(epochs=1)), clients=2)
    plan.run(tmp_path / "run", plan.federation())
    assert summarise(tmp_path / "run").finished
    (tmp_path / "run" / "personal" / "client-1.safetensors").unlink()
    assert not summarise(tmp_path / "run").finished
    plan.run(tmp_path / "run", plan.federation())
    assert summarise(tmp_path / "run").finished


def test_silos_of_a_column_are_the_same_setting_from_python_and_the_command_line() -> None:
    column = {"group_column": "ward"}
    asked, split_up = ({"plan": {"partition": p, "reading": column}} for p in ("auto", "natural"))
    assert partition(asked) == partition(split_up) == "natural"


def test_silos_with_names_of_their_own_are_natural() -> None:
    plan = {"partition": "auto", "data": "digits"}
    assert partition({"plan": plan, "clients": {"client-0": [], "client-1": []}}) == "dirichlet:0.5"
    assert partition({"plan": plan, "clients": {"north": [], "south": []}}) == "natural"
    left = {"plan": plan, "clients": {"client-0": [], "client-2": []}}
    assert partition(left) == "dirichlet:0.5", "who leaves changes nothing for the others"
    own = {"partition": "auto", "silos": ["a=/x/a.csv", "b=/x/b.csv"]}
    assert partition({"plan": own, "clients": {"client-0": [], "client-1": []}}) == "natural"


def test_what_crossed_the_network_is_told_by_who_could_read_it(tmp_path: Path) -> None:
    each = [("a", "train", 1000, 500, 0.0), ("b", "evaluate", 200, 100, 70.0)]
    rows = [
        dict(zip(("client", "kind", "sent", "received", "waited"), one, strict=True))
        for one in each
    ]
    moved = [
        Transfer(0, "a", "b", "train", 900),
        Transfer(0, "b", SERVER, "get", 40),
        Transfer(1, "b", "a", "train", 0, missing=True),
    ]
    (tmp_path / "network.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ledger = "".join(json.dumps(asdict(row)) + "\n" for row in moved)
    (tmp_path / "ledger.jsonl").write_text(ledger)
    assert network(Summary(tmp_path, {}, [], 0.0)) == ""
    assert network(Summary(tmp_path, {"on": "flower"}, [], 0.0)).splitlines() == [
        "crossed the network: 1.80 kB in 2 messages and answers, 300 B of it to measure models; "
        "Flower's own bytes are not counted",
        "sealed from silo to silo: 900 B; read by the server: 40 B and the result",
        "step 2: b was absent",
        "b was away for 1 min 10 s",
    ]
