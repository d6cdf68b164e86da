"""What a run folder says of its run: whether it is finished, how it is divided, sizes and times."""

from pathlib import Path

from ekiden.methods import Local
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import duration, partition, size, summarise


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
    own = {"partition": "auto", "silos": ["a=/x/a.csv", "b=/x/b.csv"]}
    assert partition({"plan": own, "clients": {"client-0": [], "client-1": []}}) == "natural"
