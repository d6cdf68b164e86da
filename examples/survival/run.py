"""Times and events of patients in three hospitals; a Cox regression: `python run.py`."""

import numpy as np
import pandas

import ekiden

draw = np.random.default_rng(0)
age, treated = draw.normal(60, 10, 600), draw.integers(0, 2, 600)
hazard = 0.002 * np.exp(0.05 * (age - 60) - 0.7 * treated)
event, end = draw.exponential(1 / hazard), draw.uniform(200, 1500, 600)
patients = pandas.DataFrame(
    {
        "age": age.round(1),
        "treated": treated,
        "days": np.minimum(event, end).round(1) + 0.1,
        "died": (event <= end).astype(int),
        "hospital": np.array(["north", "south", "west"])[np.arange(600) % 3],
    }
)

data = ekiden.load(
    patients, label_column=["days", "died"], group_column="hospital", task="survival"
)
method = ekiden.GLM(family="cox")
result = ekiden.run(method, ekiden.split(data, "natural"), folder="runs/survival")
print(result)
print(result.coefficients)  # logarithms of hazard ratios, with intervals
