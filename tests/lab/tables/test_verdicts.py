"""Our mean against a printed one, and differences of methods seed by seed; the numbers are worked
out by hand, quantiles from a table of Student's t."""

import io
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ekiden.core.tasks import Classification, Regression, recorded
from ekiden.lab.tables import experiment, ledger, sweep
from ekiden.lab.tables.experiment import Experiment, Published
from ekiden.lab.tables.verdicts import CellResult, Comparison, collect, contrasts, difference, ranks
from ekiden.runs.summary import Summary, spread, summarise


def test_a_value_printed_without_spread() -> None:
    """Three runs of ours; theirs are assumed to be three with the same spread."""
    found = Comparison(37.28, 15.57, 3, Published(17.9))
    assert found.difference == pytest.approx(19.38)
    assert found.error == pytest.approx(12.713, abs=5e-4)  # 15.57 √(2/3)
    assert found.t == pytest.approx(1.5244, abs=5e-5)
    assert found.limit == pytest.approx(
        4.3027, abs=5e-5
    )  # 2 degrees of freedom: one spread, of three runs
    assert found.verdict == "consistent"


def test_a_value_printed_with_spread_and_runs() -> None:
    found = Comparison(80.0, 3.0, 9, Published(77.0, 2.0, 4))
    assert found.error == pytest.approx(2**0.5)  # √(9/9 + 4/4)
    assert found.t == pytest.approx(2.1213, abs=5e-5)
    assert found.limit == pytest.approx(
        2.2622, abs=0.02
    )  # 2² / (1/8 + 1/3) = 8.73 degrees of freedom; here that of 9
    assert found.verdict == "consistent"
    assert Comparison(81.0, 3.0, 9, Published(77.0, 2.0, 4)).verdict == "above"
    assert Comparison(73.0, 3.0, 9, Published(77.0, 2.0, 4)).verdict == "below"


def test_verdicts_that_the_spread_of_single_runs_hides() -> None:
    """Both spreads are known: the difference is within 2√2 standard deviations, but not of the
    means."""
    found = Comparison(52.0, 1.0, 5, Published(50.0, 1.0, 5))
    assert found.t == pytest.approx(3.1623, abs=5e-5)
    assert found.limit == pytest.approx(2.3060, abs=5e-5)  # 8 degrees of freedom
    assert found.verdict == "above"
    lone = Comparison(52.5, 1.0, 3, Published(50.0))  # theirs was taken to be exact
    assert lone.t == pytest.approx(3.0619, abs=5e-5)
    assert lone.verdict == "consistent"
    assert Comparison(53.6, 1.0, 3, Published(50.0)).verdict == "above"  # t = 4.41


@pytest.mark.slow
def test_two_equal_means_are_told_apart_in_one_case_of_twenty() -> None:
    """Their spread may be printed or assumed to equal ours: 20,000 papers and reproductions of
    three runs each."""
    draws = np.random.default_rng(0).normal(size=(20_000, 2, 3))
    for printed in (True, False):
        found = [
            Comparison(
                a.mean(),
                a.std(ddof=1),
                3,
                Published(b.mean(), b.std(ddof=1) if printed else None, 3),
            )
            for a, b in draws[: 4_000 if printed else None]
        ]
        wrong = sum(one.verdict != "consistent" for one in found) / len(found)
        assert wrong < 0.055, printed
        assert printed or wrong > 0.045


def test_one_printed_run_leaves_the_degrees_of_freedom_to_ours() -> None:
    found = Comparison(54.0, 1.0, 3, Published(50.0, runs=1))
    assert found.error == pytest.approx((4 / 3) ** 0.5)
    assert found.limit == pytest.approx(4.3027, abs=5e-5)  # 2 degrees of freedom
    assert found.verdict == "consistent"  # t = 3.46


def test_no_spread() -> None:
    one = Comparison(54.0, None, 1, Published(50.0, 1.0))
    assert (one.error, one.t, one.limit) == (None, None, None)
    assert one.verdict == "no spread known: one seed"
    alike = Comparison(50.0, 0.0, 3, Published(50.0))
    assert (alike.t, alike.verdict) == (None, "no spread known: its seeds agree")
    theirs = Comparison(50.5, 0.0, 3, Published(50.0, 1.0))
    assert theirs.limit == pytest.approx(4.3027, abs=5e-5), (
        "only theirs spread: 2 degrees of freedom"
    )
    assert theirs.verdict == "consistent"


TABLE = """
title = "chains"
seeds = [0, 1, 2]
paired = ["FedELMY"]
[settings]
clients = 2
epochs = 1
[[column]]
label = "FedELMY"
method = "fedelmy"
models = 1
[[column]]
label = "FedELMY, two models"
method = "fedelmy"
models = 2
[[column]]
label = "FedSeq"
method = "fedseq"
[[column]]
label = "FedSeq, last"
method = "fedseq"
select = "last"
[[column]]
label = "Centralized"
method = "centralized"
[[row]]
label = "digits"
[[row]]
label = "digits, IID"
partition = "iid"
"""


def parsed(text: str = TABLE) -> Experiment:
    return experiment.parsed(text, "table", "paper", "table.toml")


def results(found: Experiment, values: dict[tuple[str, str], dict[int, float]]) -> list[CellResult]:
    """Runs with these accuracies, in per cent by seed."""
    made = []
    for cell in found.cells:
        seeds = values.get((cell.row, cell.column), {})
        rows = {
            seed: {
                "step": 1,
                "accuracy": a / 100,
                "client_mean": a / 100,
                "client_mean_trained": a / 100,
            }
            for seed, a in seeds.items()
        }
        made.append(
            CellResult(
                cell,
                tuple(
                    Summary(
                        Path(),
                        {"recipe": {"seed": s}, "task": recorded(Classification())},
                        [row],
                        1.0,
                    )
                    for s, row in rows.items()
                ),
            )
        )
    return made


VALUES = {
    ("digits", "FedELMY"): {0: 50.0, 1: 60.0, 2: 70.0},
    ("digits", "FedELMY, two models"): {0: 90.0, 1: 90.0, 2: 90.0},
    ("digits", "FedSeq"): {2: 64.0, 0: 48.0, 1: 56.0},
    ("digits", "FedSeq, last"): {0: 58.0, 1: 59.0},
    ("digits", "Centralized"): {0: 99.0, 1: 99.0, 2: 99.0},
    ("digits, IID", "FedELMY"): {1: 80.0},
    ("digits, IID", "FedSeq"): {1: 80.5, 2: 10.0},
}


def test_numbers_by_hand() -> None:
    found = parsed()
    (contrast,) = contrasts(found, results(found, VALUES))
    assert contrast.others == ("FedELMY, two models", "FedSeq", "FedSeq, last", "Centralized")
    (digits, each, best), (iid, alone, only) = contrast.tasks
    assert (digits, iid) == ("digits", "digits, IID")
    two, seq, last, pooled = each
    assert seq is not None
    assert sorted(seq.points) == pytest.approx([2.0, 4.0, 6.0]), "by seed, not by place"
    assert (seq.mean, seq.error) == pytest.approx((4.0, 2 / 3**0.5))
    assert str(seq) == "+4.00 ± 1.15"
    assert last is not None
    assert last.points == pytest.approx((-8.0, 1.0)), "only seeds that both have"
    assert str(last) == "-3.50 ± 4.50 (2)"
    assert best is last, "not a form of FedELMY, nor what pools the data"
    assert two is not None
    assert pooled is not None
    assert [d if d is None else str(d) for d in alone] == [None, "-0.50 (1)", None, None]
    assert only is alone[1]


def test_behind_names_every_case() -> None:
    found = parsed()
    (contrast,) = contrasts(found, results(found, VALUES))
    assert contrast.behind == (
        "Behind in 3 of 4: digits, FedELMY, two models (-30.00 ± 5.77); digits, FedSeq, last "
        "(-3.50 ± 4.50 (2)); "
        "digits, IID, FedSeq (-0.50 (1))."
    )
    ahead = {("digits", name): VALUES["digits", name] for name in ("FedELMY", "FedSeq")}
    (contrast,) = contrasts(found, results(found, ahead))
    assert contrast.behind == "Behind in 0 of 1."


def test_what_cannot_be_compared() -> None:
    found = parsed()
    elmy, _, seq = results(found, VALUES)[:3]
    apart = CellResult(
        seq.cell,
        tuple(replace(run, config=run.config | {"recipe": {"seed": 7}}) for run in seq.runs[:1]),
    )
    assert difference(elmy, apart, "FedSeq", 3) is None, "no seed in common"
    other = CellResult(replace(seq.cell, metric="client_mean"), seq.runs)
    assert difference(elmy, other, "FedSeq", 3) is None, "each client's own test data"
    plan = seq.cell.plan
    assert plan is not None
    plan = replace(plan, recipe=replace(plan.recipe, evaluate_on="own"))
    apart = CellResult(replace(seq.cell, plan=plan), seq.runs)
    assert difference(elmy, apart, "FedSeq", 3) is None, "accuracy on each client's own test data"
    trained = CellResult(replace(elmy.cell, metric="client_mean_trained"), elmy.runs)
    assert difference(trained, other, "FedSeq", 3) is None, "after training, and after averaging"
    like = CellResult(replace(seq.cell, metric="client_mean_trained"), seq.runs)
    assert ranks(found, (trained, other)) == {}, "nor is one above the other"
    assert sorted(ranks(found, (trained, like)).values()) == [1, 2]
    assert contrasts(found, results(found, {("digits", "FedELMY"): {0: 50.0}})) == (), (
        "nothing to compare with"
    )
    assert contrasts(found, results(found, {("digits", "FedSeq"): {0: 50.0}})) == (), (
        "nothing to compare"
    )
    assert contrasts(replace(found, paired=()), results(found, VALUES)) == ()


def test_methods_in_rows() -> None:
    turned = (
        TABLE.replace("[[row]]", "[[task]]")
        .replace("[[column]]", "[[row]]")
        .replace("[[task]]", "[[column]]")
    )
    found = parsed(turned)
    (contrast,) = contrasts(
        found, results(found, {(m, task): values for (task, m), values in VALUES.items()})
    )
    (straight,) = contrasts(parsed(), results(parsed(), VALUES))
    assert contrast == straight


def test_shown_by_the_ledger_and_in_the_terminal(tmp_path: Path) -> None:
    made = sweep.Sweep(parsed(), tmp_path / "sweep", "table.toml")
    sweep.begin(made, TABLE)
    cells = sweep.select(made.experiment, ["digits/FedELMY", "digits/FedSeq"])
    for run in made.runs(cells)[:4]:
        job = sweep.jobs(made, [run])[0]
        job.plan.run(job.folder, job.plan.federation(), about=job.about)
    page = ledger.page([sweep.opened(made.folder)])
    values = {
        name: summarise(made.folder / f"digits--{name}").last["accuracy"]
        for name in ("FedELMY--seed0", "FedELMY--seed1", "FedSeq--seed0", "FedSeq--seed1")
    }
    apart = [100 * (values[f"FedELMY--seed{s}"] - values[f"FedSeq--seed{s}"]) for s in (0, 1)]
    middle, error = sum(apart) / 2, abs(apart[0] - apart[1]) / 2
    wanted = f"{middle:+.2f} ± {error:.2f} (2)"
    assert "**FedELMY minus the others, paired by seed: points, mean ± standard error**" in page
    assert "|  | FedSeq | best other method |" in page
    assert f"| digits | {wanted} | {wanted}: FedSeq |" in page
    assert f"Behind in {int(middle < 0)} of 1" in page
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(contrasts(made.experiment, collect(made))[0].table)
    assert wanted in console.export_text()


def test_how_far_a_value_is_from_the_printed_one() -> None:
    beside = Comparison(80.0, 3.0, 4, Published(77.0, 1.0)).beside
    assert beside == "published 77.00 ± 1.00; +1.9 standard errors"
    assert Comparison(80.0, None, 1, Published(77.0)).beside == "published 77.00; +3.00 points"


def of_errors(values: dict[str, list[float]]) -> list[CellResult]:
    """Runs on the digits with these root mean squared errors."""
    found = []
    for result in results(parsed(), {("digits", name): {0: 0.0, 1: 0.0} for name in values})[:5]:
        runs = []
        for run, error in zip(result.runs, values.get(result.cell.column, []), strict=True):
            row = {"step": 1, "loss": 1.0, "metric": "rmse", "rmse": error}
            config = run.config | {"task": recorded(Regression())}
            runs.append(replace(run, config=config, metrics=[row]))
        found.append(CellResult(result.cell, tuple(runs)))
    return found


def test_a_larger_error_is_behind() -> None:
    errors = {"FedELMY": [5.0, 6.0], "FedSeq": [3.0, 5.0], "FedSeq, last": [8.0, 8.0]}
    (contrast,) = contrasts(parsed(), of_errors(errors))
    assert contrast.behind == "Behind in 1 of 2: digits, FedSeq (+1.50 ± 0.50 (2))."
    assert contrast.tasks[0].best is not None
    assert contrast.tasks[0].best.other == "FedSeq"


def test_a_run_without_a_finite_value_leaves_the_others_readable() -> None:
    found = of_errors({"FedELMY": [5.0, inf], "FedSeq": [3.0, 5.0]})
    assert (found[0].mean, found[0].std, spread(found[0].values)) == (inf, None, "inf")
    (contrast,) = contrasts(parsed(), found)
    assert contrast.behind == "Behind in 1 of 1: digits, FedSeq (+inf (2))."
    compared = Comparison(inf, None, 2, Published(50.0, 1.0))
    assert compared.verdict == "no spread known: a value is not finite"


def test_the_limit_does_not_depend_on_the_unit() -> None:
    small = Comparison(2.0, 1.0, 3, Published(5.0, 2.0, 3))
    for unit in (1e-150, 1e150):
        found = Comparison(2 * unit, unit, 3, Published(5 * unit, 2 * unit, 3))
        assert found.limit == pytest.approx(small.limit)
