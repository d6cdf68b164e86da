"""Regressions: against statsmodels on pooled data, what is refused, and the table that show, card
and JSON have.

`python -m tests.methods.test_glm` prints the numbers of statsmodels (0.15.0) that are kept here.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ekiden import GLM, FederatedData, UserError, federate, run
from ekiden.methods.statistics.newton import Derivatives, derivatives, start
from ekiden.runs.card import card
from ekiden.runs.result import Result

LABELS = {"logistic": "died", "multinomial": "stage", "linear": "days", "poisson": "visits"}
NAMES = ["age", "bmi", "sex = m", "site = b", "site = c", "constant"]
REFERENCE: dict[str, dict[str, list[float]]] = json.loads(
    (Path(__file__).parent / "glm.json").read_text()
)


def cohort(n: int = 200) -> dict[str, Any]:
    """Patients whose outcomes depend on age, weight, sex and site."""
    r = np.random.default_rng(5)
    age, bmi = r.normal(60, 12, n).round(1), r.normal(27, 4, n).round(2)
    sex, site = r.choice(["f", "m"], n), r.choice(["a", "b", "c"], n, p=[0.5, 0.3, 0.2])
    risk = -6 + 0.05 * age + 0.03 * bmi + 0.5 * (sex == "m") + 0.8 * (site == "c")
    died = r.random(n) < 1 / (1 + np.exp(-risk))
    stage = (risk + 2 + r.logistic(size=n) > 0).astype(int) + (risk + 1 + r.logistic(size=n) > 0)
    days = (3 + 0.1 * age - 0.05 * bmi + 1.5 * (sex == "m") + r.normal(0, 2, n)).round(3)
    visits = r.poisson(np.exp(-1 + 0.02 * age + 0.3 * (site == "b")))
    columns = {"age": age, "bmi": bmi, "sex": sex, "site": site, "days": days, "visits": visits}
    return columns | {
        "died": np.where(died, "yes", "no"),
        "stage": np.array(["I", "II", "III"])[stage],
    }


def held(label: str, rows: list[Any], **changed: Any) -> FederatedData:
    """Silos with these rows; all are for training, and for testing too."""
    table = cohort() | changed
    wanted = [
        "age",
        "bmi",
        "sex",
        "site",
        label,
        *(name for name in changed if name not in cohort()),
    ]
    silos: list[Any] = [{name: list(table[name][at]) for name in wanted} for at in rows]
    task = "regression" if label in ("days", "visits") else None
    return federate(silos, tests=silos, val_fraction=0.0, label_column=label, task=task)


def go(
    case: str, rows: list[Any] | None = None, folder: Path | None = None, **changed: Any
) -> Result:
    family = "logistic" if case == "multinomial" else case
    data = held(LABELS[case], rows or [slice(0, 90), slice(90, 200)], **changed)
    return run(GLM(family=family), data, evaluate_every=10**9, folder=folder)  # type: ignore[arg-type]


pytestmark = pytest.mark.filterwarnings(
    "ignore:.* equal a training row", "ignore:.* fewer than", "ignore:.* with one value"
)


@pytest.mark.parametrize("case", LABELS)
def test_it_is_the_regression_of_pooled_data(case: str) -> None:
    found = go(case).coefficients
    assert [one.column for one in found] == NAMES * (len(found) // len(NAMES))
    wanted = REFERENCE[case]
    for k, one in enumerate(found):
        error = wanted["error"][k]
        assert one.error == pytest.approx(error, rel=1e-6)
        assert one.estimate == pytest.approx(wanted["estimate"][k], abs=1e-6 * error)
        assert one.p == pytest.approx(wanted["p"][k], abs=1e-6)


def test_neither_division_nor_order_matters() -> None:
    one, other = go("logistic"), go("logistic", [slice(150, 200), slice(0, 150)])
    for a, b in zip(one.coefficients, other.coefficients, strict=True):
        assert a.estimate == pytest.approx(b.estimate, abs=1e-6 * (a.error or 0))


def test_dependent_columns_are_named() -> None:
    table = cohort()
    with pytest.raises(
        UserError, match=r"columns 'age', 'months' are linearly dependent; leave one of them out"
    ) as refusal:
        go("linear", months=12 * table["age"] + 3)
    assert "\n" not in str(refusal.value)


def test_classes_that_a_column_separates_are_refused_with_its_name() -> None:
    table = cohort()
    with pytest.raises(
        UserError, match=r"separate samples without error: .*'marker'.*; give firth"
    ):
        go("logistic", marker=np.where(table["died"] == "yes", 1.0, 0.0) + 0.1 * table["age"] / 100)


def test_columns_of_gaps_are_named_with_the_columns_that_leave_with_them() -> None:
    """Two values that were measured together are missing together, and all who lack them had one
    outcome."""
    table = cohort()
    lost = (np.arange(200) % 9 == 0) & (table["died"] == "no")
    pressure = {
        "high": np.where(lost, np.nan, 100 + table["age"] % 7),
        "low": np.where(lost, np.nan, 60 + table["bmi"] % 5),
    }
    with pytest.raises(
        UserError,
        match=r"columns 'high missing', 'low missing' are linearly dependent; "
        r".*drop_columns=\['high', 'low'\]",
    ):
        go("logistic", None, None, **pressure)
    with pytest.raises(
        UserError, match=r"without error: 'high missing'; .*\(drop_columns=\['high'\]\)"
    ):
        go("logistic", high=pressure["high"])
    data = held("died", [slice(0, 90), slice(90, 200)], high=pressure["high"])
    found = run(GLM(firth=True, laps=30), data, evaluate_every=10**9).coefficients
    assert all(-9 < (one.estimate or 0) < 9 for one in found if "missing" in one.column)


def test_laps_are_a_limit() -> None:
    """Once the regression has converged, silos hand on zeros and the result stays."""
    rows = [slice(0, 90), slice(90, 200)]
    many, few = (run(GLM(laps=laps), held("died", rows), evaluate_every=10**9) for laps in (30, 9))
    for a, b in zip(many.coefficients, few.coefficients, strict=True):
        assert a.estimate == pytest.approx(b.estimate, abs=1e-9 * (a.error or 0))
    with pytest.raises(UserError, match="has not converged"):
        run(GLM(firth=True, laps=4), held("died", rows))


def test_penalties_that_do_not_go_together_are_refused() -> None:
    for given in ({"family": "linear"}, {"ridge": 1.0}):
        with pytest.raises(UserError, match="is another penalty: leave out firth"):
            GLM(firth=True, **given)


def test_a_constant_column_has_no_estimate() -> None:
    result = go("linear", hospital=np.full(200, 7.0))
    assert [one.column for one in result.coefficients if one.estimate is None] == ["hospital"]


def test_what_a_family_does_not_explain_is_refused() -> None:
    rows = [slice(0, 100), slice(100, 200)]
    for family, label, why in (
        ("logistic", "days", "logistic regression explains classes, the task is regression"),
        ("poisson", "died", "family poisson explains counts"),
    ):
        with pytest.raises(UserError, match=why):
            run(GLM(family=family), held(label, rows))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="negative or a fraction, and counts are not"):
        run(GLM(family="poisson"), held("days", rows, days=cohort()["days"] - 100))
    with pytest.raises(UserError, match="a model of its own"):
        run(GLM(), held("died", rows), "table_mlp")


def test_rates_are_those_of_means() -> None:
    """Counts with means of 0.5 and 1.7: the maximum likelihood in closed form."""
    draw = np.random.default_rng(3)
    of = np.array(["a"] * 120 + ["b"] * 80)
    visits = np.where(of == "a", draw.poisson(0.5, 200), draw.poisson(1.7, 200))
    silos: list[Any] = [
        {"of": list(of[rows]), "visits": list(visits[rows])}
        for rows in (slice(0, None, 2), slice(1, None, 2))
    ]
    data = federate(silos, tests=silos, val_fraction=0.0, label_column="visits", task="regression")
    slope, constant = run(GLM(family="poisson"), data, evaluate_every=10**9).coefficients
    a, b = visits[:120].sum(), visits[120:].sum()
    assert constant.estimate == pytest.approx(np.log(a / 120), abs=1e-7)
    assert constant.error == pytest.approx(a**-0.5, rel=1e-6)
    assert slope.estimate == pytest.approx(np.log(b / 80) - np.log(a / 120), abs=1e-7)
    assert slope.error == pytest.approx((1 / a + 1 / b) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("laps", [14, 15])
def test_firth_converges_for_rare_outcomes_with_an_even_and_an_odd_limit(laps: int) -> None:
    """Four hospitals, gaps, a skewed column; 22 of 1,200 patients died. Silos can lack events."""
    r = np.random.default_rng(2)
    n = 1200
    age, crp = r.normal(65, 12, n).round(), np.exp(r.normal(2, 1.3, n)).round(1)
    sbp, ward = r.normal(130, 20, n).round(), r.choice(["er", "icu", "ward"], n, p=[0.3, 0.1, 0.6])
    eta = -4.6 + 0.04 * (age - 65) + 0.25 * (np.log(crp) - 2) - 0.01 * (sbp - 130)
    died = r.random(n) < 1 / (1 + np.exp(-eta - 0.9 * (ward == "icu")))
    table = {"age": age, "crp": crp, "sbp": np.where(r.random(n) < 0.03, np.nan, sbp)}
    table |= {"ward": ward, "died": np.where(died, "yes", "no")}
    silos: list[Any] = [
        {name: list(column[k : k + 300]) for name, column in table.items()}
        for k in range(0, n, 300)
    ]
    data = federate(silos, tests=silos, val_fraction=0.0, label_column="died")
    found = run(GLM(firth=True, laps=laps), data, evaluate_every=10**9).coefficients
    estimates = {one.column: one.estimate for one in found}
    assert estimates["age"] == pytest.approx(0.0457, abs=5e-4)
    assert estimates["sbp"] == pytest.approx(-0.0207, abs=5e-4)


def test_targets_of_half_a_count_are_refused() -> None:
    rows = [slice(0, 100), slice(100, 200)]
    for odd in (0.5, 1.7, -1.0):
        visits = np.where(np.arange(200) == 7, odd, cohort()["visits"])
        with pytest.raises(UserError, match="negative or a fraction, and counts are not"):
            run(GLM(family="poisson"), held("visits", rows, visits=visits))


def test_sums_that_do_not_fit_are_refused() -> None:
    own = derivatives("linear", torch.ones(4, 2), torch.ones(4, 1), start("linear", 1, 2))
    other = derivatives("linear", torch.ones(4, 3), torch.ones(4, 1), start("linear", 1, 3))
    with pytest.raises(UserError, match="different shape"):
        own.plus(other)
    with pytest.raises(UserError, match="do not fit together"):
        Derivatives(own.gradient, other.hessian, own.squares, own.hazard, 0, 4)
    with pytest.raises(UserError, match="have no room"):
        derivatives("linear", torch.full((4, 2), 1e9), torch.ones(4, 1), start("linear", 1, 2))


def test_chosen_coefficients_read_a_record_from_two_totals() -> None:
    """What the last silo could do where silos trust it: only the record that lies furthest changes
    its side."""
    draw = torch.Generator().manual_seed(3)
    x = torch.cat([torch.randn(300, 3, generator=draw), torch.ones(300, 1)], 1).double()
    y = torch.randint(2, (300,), generator=draw)
    order = x[:, 0].argsort()
    far, next_ = x[order[-1], 0], x[order[-2], 0]
    steep = 80 / (far - next_)

    def gradient(at: torch.Tensor) -> torch.Tensor:
        values = torch.stack([steep, *torch.zeros(2), -steep * at])[None].double()
        here = start("logistic", 2, 4)._replace(values=values)
        found: torch.Tensor = derivatives("logistic", x, y, here).real()[0][0]
        return found

    read = gradient(far + 40 / steep) - gradient((far + next_) / 2)
    assert torch.allclose(read, x[order[-1]], atol=1e-3)


def test_show_json_and_card_have_the_table(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    result = go("linear", folder=tmp_path / "run")
    (_, shown), (_, told), (_, page) = (
        command(*given, str(tmp_path / "run"), *more)
        for given, more in ((["show"], []), (["show"], ["--json"]), (["card"], []))
    )
    assert json.loads(told)["coefficients"] == [one.to_json() for one in result.coefficients]
    for one in result.coefficients:
        assert f"{one.estimate:.4g}" in shown
        assert f"| {one.column} | {one.estimate:.4g} |" in page
    assert not any(
        setting in text
        for setting in ("batch_size", "optimizer", "lr 0.")
        for text in (shown, page)
    )


def _reference() -> None:
    """Print what statsmodels says."""
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    import statsmodels.api as sm  # type: ignore[import-not-found,unused-ignore]

    table = pd.DataFrame(cohort())
    x = sm.add_constant(
        pd.get_dummies(table[["age", "bmi", "sex", "site"]], drop_first=True).astype(float)
    )
    x = x[[*x.columns[1:], "const"]]
    fits = {
        "logistic": sm.Logit((table["died"] == "yes").astype(int), x).fit(disp=0),
        "multinomial": sm.MNLogit(table["stage"].astype("category").cat.codes, x).fit(disp=0),
        "linear": sm.OLS(table["days"], x).fit(),
        "poisson": sm.GLM(table["visits"], x, family=sm.families.Poisson()).fit(tol=1e-12),
    }
    kept = {"estimate": "params", "error": "bse", "p": "pvalues"}
    print(
        json.dumps(
            {
                case: {
                    name: np.asarray(getattr(fit, of)).T.ravel().tolist()
                    for name, of in kept.items()
                }
                for case, fit in fits.items()
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    _reference()


@pytest.mark.parametrize("noise", [1e-7, 1e-3, 1e-2])
def test_standard_errors_of_nearly_no_errors_are_right_or_not_told(noise: float) -> None:
    """With R² above 1 - 1e-8 what is left is the rounding of the sums."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 2))
    y = x @ np.array([2.0, -1.0]) + 3 + noise * draw.normal(size=400)
    silos = [
        (torch.tensor(a).float(), torch.tensor(b))
        for a, b in ((x[:200], y[:200]), (x[200:], y[200:]))
    ]
    fed = federate(silos, task="regression", val_fraction=0)
    found = run(GLM(family="linear"), fed, evaluate_every=10**9, quiet=True).coefficients
    rows = torch.cat([client.train.x for client in fed.clients]).double().numpy()
    target = torch.cat([client.train.y for client in fed.clients]).numpy().ravel()
    design = np.column_stack([rows, np.ones(len(rows))])
    rest = target - design @ np.linalg.lstsq(design, target, rcond=None)[0]
    squares = np.linalg.inv(design.T @ design).diagonal() * (rest @ rest) / (len(rows) - 3)
    for one, error in zip(found, np.sqrt(squares), strict=True):
        assert one.error is None or one.error == pytest.approx(error, rel=0.01)
    assert (found[0].error is None) == (noise < 1e-3)
    assert [one.estimate for one in found] == pytest.approx([2.0, -1.0, 3.0], abs=0.01)


def test_a_fit_without_errors_has_estimates_in_its_card(tmp_path: Path) -> None:
    result = go("linear", folder=tmp_path / "run", days=cohort()["age"] * 2 + 3)
    assert result.coefficients[0].error is None
    assert result.coefficients[0].estimate == pytest.approx(2.0, abs=1e-3)
    assert "| age | 2 | - | - | - |" in card(result)
