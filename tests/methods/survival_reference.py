"""Made-up patients with times and events, and what lifelines says about them.

In an environment with lifelines 0.30.3, which needs pandas 2:
`python tests/methods/survival_reference.py > tests/methods/survival.json`
"""

import json
from typing import Any

import numpy as np

CUT = 90
"""rows of the first silo; the second one has the rest"""


TIMES = (100.0, 200.0, 300.0, 500.0)
SHOWN = slice(3)
"""patients whose survival at these times is predicted"""


def cohort(n: int = 200) -> dict[str, Any]:
    """Patients of two hospitals with different hazards, and with ties among the times."""
    r = np.random.default_rng(7)
    age, bmi = r.normal(60, 12, n).round(1), r.normal(27, 4, n).round(2)
    sex, stage = r.choice(["f", "m"], n), r.choice(["I", "II", "III"], n, p=[0.5, 0.3, 0.2])
    risk = (
        0.03 * (age - 60) + 0.4 * (sex == "m") + 0.9 * (stage == "III") - 0.5 * (np.arange(n) < CUT)
    )
    due, last = r.exponential(400 * np.exp(-risk)), r.uniform(30, 900, n)
    days = (np.ceil(np.minimum(due, last) / 20) * 20).astype(float)
    return {
        "age": age,
        "bmi": bmi,
        "sex": sex,
        "stage": stage,
        "days": days,
        "died": (due <= last).astype(float),
    }


def _reference() -> dict[str, Any]:
    import pandas as pd  # type: ignore[import-untyped,unused-ignore]
    from lifelines import CoxPHFitter, KaplanMeierFitter  # type: ignore[import-not-found,unused-ignore]
    from lifelines.statistics import multivariate_logrank_test  # type: ignore[import-not-found,unused-ignore]
    from lifelines.utils import (  # type: ignore[import-not-found,unused-ignore]
        concordance_index,
        qth_survival_times,
    )

    table = pd.DataFrame(cohort())
    silo = np.arange(len(table)) >= CUT
    x = pd.get_dummies(table[["age", "bmi", "sex", "stage"]], drop_first=True).astype(float)
    fit = CoxPHFitter().fit(
        x.assign(days=table["days"], died=table["died"], silo=silo.astype(int)),
        "days",
        "died",
        strata=["silo"],
        fit_options={"precision": 1e-12},
    )
    risk = x.to_numpy() @ fit.params_.to_numpy()
    parts = {"all": silo >= 0, "a": ~silo, "b": silo}
    curves = {}
    for name, part in parts.items():
        km = KaplanMeierFitter().fit(table["days"][part], table["died"][part])
        curves[name] = {
            "times": km.survival_function_.index.tolist()[1:],
            "survival": km.survival_function_.to_numpy()[1:, 0].tolist(),
            "low": km.confidence_interval_.to_numpy()[1:, 0].tolist(),
            "high": km.confidence_interval_.to_numpy()[1:, 1].tolist(),
            "quartiles": [
                [
                    km.percentile(left),
                    *qth_survival_times(left, km.confidence_interval_).to_numpy()[0].tolist(),
                ]
                for left in (0.75, 0.5, 0.25)
            ],
        }
    patients, times = x.iloc[SHOWN], list(TIMES)
    whole = CoxPHFitter().fit(
        x.assign(days=table["days"], died=table["died"]),
        "days",
        "died",
        fit_options={"precision": 1e-12},
    )
    shares = {"one silo": whole.predict_survival_function(patients, times=times)}
    for k, name in enumerate("ab"):
        shares[name] = fit.predict_survival_function(patients.assign(silo=k), times=times)
    test = multivariate_logrank_test(table["days"], silo, table["died"])
    return {
        "estimate": fit.params_.tolist(),
        "error": fit.standard_errors_.tolist(),
        "p": fit.summary["p"].tolist(),
        "c_index": {
            name: concordance_index(table["days"][part], -risk[part], table["died"][part])
            for name, part in parts.items()
        },
        "survival": {name: found.to_numpy().T.tolist() for name, found in shares.items()},
        "curves": curves,
        "log-rank": [test.test_statistic, test.p_value],
    }


if __name__ == "__main__":
    print(json.dumps(_reference(), indent=1))
