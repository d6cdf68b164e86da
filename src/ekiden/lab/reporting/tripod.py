"""Which items of TRIPOD+AI a run's folder answers, and where; the others are for the authors.

Gary Collins et al.: TRIPOD+AI statement. BMJ 385, 2024, e078378.
"""

from typing import NamedTuple

from ekiden.clinic.recalibration import kept_subgroups
from ekiden.runs.summary import Summary


class Item(NamedTuple):
    """An item of the statement."""

    number: str
    asks: str  # in few words
    where: str  # what answers it; empty: nothing in a run's folder can
    needs: str = ""  # the entry of the last row of metrics that answers it


# The numbers and what they ask were compared with the printed checklist.
ITEMS = (
    Item("1-4", "title, abstract, background, health inequalities, objectives", ""),
    Item("5", "source of the data, dates", ""),
    Item("6a", "setting, number of centres", "card: samples of each silo"),
    Item("6b-c", "eligibility, treatments", ""),
    Item("7", "preparation and checks of the data", "config.json: reading, input, inputs"),
    Item("8a, 9b", "outcome and predictors", "config.json: classes, inputs (names only)"),
    Item("8b-c, 9a, 9c", "assessors, blinding, choice of predictors", ""),
    Item("10", "why so many participants", ""),
    Item("11", "missing values", "config.json: inputs"),
    Item("12a", "how the data were used", "config.json: plan or origin"),
    Item("12b", "how predictors were handled", "config.json: inputs"),
    Item("12c", "type of the model, hyperparameters", "card: training"),
    Item("12d", "how heterogeneity was quantified", "heterogeneity", "heterogeneity"),
    Item("12e", "measures of performance", "figures", "figures"),
    Item("12f", "recalibration", "recalibration.json, if there is one"),
    Item("12g", "how predictions are calculated", "card: use"),
    Item("13", "methods against imbalance of classes", "config.json: recipe.training"),
    Item("14", "methods for fairness", ""),
    Item("15", "output of the model, thresholds", "figures: thresholds", "figures"),
    Item("16", "differences of training and evaluation data", ""),
    Item("17-19", "ethics, funding, protocol, registration, sharing, the public", ""),
    Item("20a, 20c", "flow of participants, comparison with the training data", ""),
    Item("20b", "characteristics of participants", "`ekiden data --table-one`, if it was kept"),
    Item("21", "participants and events", "figures: samples, prevalence", "figures"),
    Item("22", "the full model", "model.safetensors, `ekiden export`"),
    Item("23a", "performance with intervals", "figures: intervals", "figures"),
    Item("23a", "performance of subgroups", "subgroups.json", "subgroups"),
    Item("23b", "heterogeneity of performance", "heterogeneity", "heterogeneity"),
    Item("24", "results of updating", "recalibration.json, if there is one"),
    Item("25-27", "interpretation, limitations, use", ""),
)


def answered(run: Summary) -> list[tuple[str, str, str]]:
    """Return number, question, and place of the answer of each item; an empty place: not here."""
    there = {name for name, value in run.last.items() if value}
    if kept_subgroups(run.folder):
        there.add("subgroups")
    return [
        (item.number, item.asks, item.where if not item.needs or item.needs in there else "")
        for item in ITEMS
    ]
