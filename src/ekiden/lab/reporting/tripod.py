"""Which items of TRIPOD+AI a run's folder answers, and where; the others are for the authors.

Gary Collins et al.: TRIPOD+AI statement. BMJ 385, 2024, e078378.
"""

from ekiden.clinic.recalibration import kept_subgroups
from ekiden.runs.summary import Summary

# Number, what it asks in few words, what answers it (nothing if nothing in a run's folder can), and
# the entry of the last row of metrics that it needs. The numbers and what they ask were compared
# with the printed checklist.
_ITEMS = """\
1-4 | title, abstract, background, health inequalities, objectives |  |
5 | source of the data, dates |  |
6a | setting, number of centres | card: samples of each silo |
6b-c | eligibility, treatments |  |
7 | preparation and checks of the data | config.json: reading, input, inputs |
8a, 9b | outcome and predictors | config.json: classes, inputs (names only) |
8b-c, 9a, 9c | assessors, blinding, choice of predictors |  |
10 | why so many participants |  |
11 | missing values | config.json: inputs |
12a | how the data were used | config.json: plan or origin |
12b | how predictors were handled | config.json: inputs |
12c | type of the model, hyperparameters | card: training |
12d | how heterogeneity was quantified | heterogeneity | heterogeneity
12e | measures of performance | figures | figures
12f | recalibration | recalibration.json, if there is one |
12g | how predictions are calculated | card: use |
13 | methods against imbalance of classes | config.json: recipe.training |
14 | methods for fairness |  |
15 | output of the model, thresholds | figures: thresholds | figures
16 | differences of training and evaluation data |  |
17-19 | ethics, funding, protocol, registration, sharing, the public |  |
20a, 20c | flow of participants, comparison with the training data |  |
20b | characteristics of participants | `ekiden data --table-one`, if it was kept |
21 | participants and events | figures: samples, prevalence | figures
22 | the full model | model.safetensors, `ekiden export` |
23a | performance with intervals | figures: intervals | figures
23a | performance of subgroups | subgroups.json | subgroups
23b | heterogeneity of performance | heterogeneity | heterogeneity
24 | results of updating | recalibration.json, if there is one |
25-27 | interpretation, limitations, use |  |
"""


def answered(run: Summary) -> list[tuple[str, str, str]]:
    """Return number, question, and place of the answer of each item; an empty place: not here."""
    there = {name for name, value in run.last.items() if value}
    if kept_subgroups(run.folder):
        there.add("subgroups")
    found = []
    for line in _ITEMS.splitlines():
        number, asks, where, needs = map(str.strip, line.split("|"))
        if needs and needs not in there:
            where = ""
        found.append((number, asks, where))
    return found
