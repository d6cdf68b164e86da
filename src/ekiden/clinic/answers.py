"""Figures and subgroups of a model's answers to test samples, as between machines."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ekiden.clinic import subgroups
from ekiden.clinic.counting import counting_of
from ekiden.clinic.figures import CountedAnswers, Figures, figures
from ekiden.clinic.heterogeneity import heterogeneity
from ekiden.clinic.ranked import Wanted
from ekiden.core.base.errors import UserError
from ekiden.core.engine.evaluation import MOST_CLIENTS_LISTED, TestSet
from ekiden.core.tasks import Scores
from ekiden.core.tasks.counts import Counts, PlaceCounts


def further(test: TestSet, scores: Scores, parts: Sequence[Scores]) -> dict[str, Any]:
    """Return `figures` of one model, with intervals, for a row of metrics; see `Figures`. Of four
    silos and more also their `heterogeneity`; see `Between`.
    """
    found: dict[str, Any] = {"figures": figures_of(test, scores).to_json()}
    if told := between_silos(test, parts):
        found["heterogeneity"] = told
    return found


def between_silos(test: TestSet, parts: Sequence[Scores]) -> dict[str, Any]:
    """Return how figures differ between the silos that have parts of the test samples."""
    each = []
    if len(parts) <= MOST_CLIENTS_LISTED:
        for part in filter(len, parts):
            each.append(figures(test.task, CountedAnswers(_counts(part)), Wanted()))
    return heterogeneity(each, test.task)


def _counts(scores: Scores) -> Counts:
    """Return what is counted of answers, with what intervals need."""
    if isinstance(scores.counts, PlaceCounts):
        return PlaceCounts.of(scores, spread=True)
    found: Counts = scores.counts
    return found


def figures_of(
    test: TestSet,
    scores: Scores,
    wanted: Wanted = Wanted(),  # noqa: B008  (frozen)
) -> Figures:
    """Return what follows from the counts of some answers, with probabilities, as between
    machines.

    Args:
        test: the samples.
        scores: the answers.
        wanted: which thresholds are shown.
    """
    dataset = test.data.dataset
    train = test.task.counts(dataset.train.y, dataset.outputs).double().numpy()
    told = CountedAnswers(_counts(scores), train=train, trained=len(dataset.train))
    return figures(test.task, told, wanted)


def subgroups_of(
    test: TestSet,
    scores: Scores,
    by: Sequence[subgroups.Division],
    wanted: Wanted = Wanted(),  # noqa: B008  (frozen)
) -> dict[str, Any]:
    """Return what divides the test samples, as entries of a row of metrics.

    Args:
        test: the samples.
        scores: the answers of one model to all test samples, with probabilities.
        by: the columns.
        wanted: the threshold at which sensitivities are taken; by default Youden's.

    Returns:
        subgroups: the table that silos' counts would give, with a column "client"; see
            `table`.
        groups: the exact metrics of each subgroup.

    Raises:
        UserError: the samples have no such column, or the task has no subgroups.
    """
    dataset = test.data.dataset
    clients = test.data.clients
    subgroups.check_task(test.task)
    counting = counting_of(test.task, dataset.outputs, full=True)
    own = {client.name: client.test.rows for client in clients}
    exact: dict[str, dict[str, dict[str, float]]] = {}
    counts: dict[str, dict[str, Tensor]] = {}
    for one in by:
        if one.silos:
            # every table has silos, see below
            if len(own) > MOST_CLIENTS_LISTED:
                raise UserError(
                    f"subgroups by silo are for {MOST_CLIENTS_LISTED} silos at most: choose "
                    "another column"
                )
            continue
        names = one.names(dataset.inputs, dataset.domains)
        places = one.places(dataset.test.x, dataset.inputs, dataset.test.domain)
        sums = {}
        metrics = {}
        for group, name in enumerate(names):
            if len(rows := (places == group).nonzero().flatten()):
                metrics[name] = scores.metrics(rows)
            # pairs of survival are inside clients
            sums[name] = torch.zeros(counting.size).long()
            for rows in own.values():
                sums[name] += counting.count(scores.at(rows[places[rows] == group]))
        counts[one.column] = sums
        exact[one.column] = metrics
    if 1 < len(own) <= MOST_CLIENTS_LISTED:
        counts["client"] = {name: counting.count(scores.at(rows)) for name, rows in own.items()}
    whole = figures_of(test, scores, wanted)
    found = subgroups.table(counting, counts, whole, wanted.threshold)
    return {"subgroups": found, "groups": exact}
