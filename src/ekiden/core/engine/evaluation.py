"""Measure models on the test data: one pass over the samples, then metrics by client, domain and
class.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, inf, isclose, isnan, log
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ekiden.core.data.samples import FederatedData, Subset
from ekiden.core.engine import wire
from ekiden.core.engine.drive import Evaluator
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Transport
from ekiden.core.engine.worker import Worker
from ekiden.core.tasks import Metric, MultiLabel, Scores, Task
from ekiden.core.training import fit as fitting
from ekiden.core.training.network import Network, adapted
from ekiden.core.training.weights import Weights, distance, mean

Groups = dict[str, dict[str, dict[str, float]]]
"""Metrics by their names, for each group, for each kind of groups."""
# Test data for personal models: all of it, or only that of the model's own client
EvaluateOn = Literal["all", "own"]

MOST_CLIENTS_LISTED = 100
_MOST_CLIENTS_EACH_TIME = 1000
# times the loss of guessing; runs that forget or overfit stay below 2 at the client with the lowest
# loss
_FAR = 10
# accuracy of always giving the commonest class above which accuracy says little
MISLEADING = 0.8
# above -ln 1e-12 = 27.6, the largest loss of an ensemble's wrong vote
_LEAST = 30.0


@dataclass(frozen=True)
class Built:
    """Makes a network that fits the result of a run."""

    method: Method
    own: Callable[[], nn.Module]
    clients: int

    def __call__(self) -> nn.Module:
        return self.method.result_network(self.own(), self.clients)


class TestSet:
    """The union of all clients' test data, and the groups in it."""

    __test__ = False  # pytest: this is not a test class

    def __init__(
        self,
        worker: Worker,
        data: FederatedData,
        clients: int | None = None,
        evaluate_on: EvaluateOn = "all",
        further: "Further | None" = None,
    ) -> None:
        """Evaluate what `worker` trains.

        Args:
            worker: knows the network and how to feed it.
            data: whose test data.
            clients: number of clients that trained, if not those of `data`.
            evaluate_on: what personal models are measured on.
            further: what else is measured of one model after the last step.
        """
        self._worker = worker
        setup = worker.setup
        self.build = Built(
            setup.method, setup.build, len(data.clients) if clients is None else clients
        )
        self.own = setup.build
        self.data = data
        self._evaluate_on = evaluate_on
        self._further = further
        self._all = Subset(data.dataset.test, torch.arange(len(data.dataset.test)))

    def with_trained(self, transport: Transport) -> Evaluator:
        """Also measure the models that clients trained last, where `transport` has them."""
        return lambda model, personal, *, last: self(
            model, personal, transport.trained(), last=last
        )

    @property
    def task(self) -> Task:
        """What the labels mean."""
        return self.data.dataset.task

    def scores(
        self,
        model: Weights,
        *,
        personal: bool = False,
        rows: Tensor | None = None,
        full: bool | None = None,
    ) -> Scores:
        """Run `model` (the run's or a client's own) over all test samples, or those in `rows`,
        once.

        `full` adds probabilities; see `ekiden.core.training.fit.evaluate`.
        """
        bench = self._worker.bench("evaluation")
        setup = self._worker.setup
        if setup.method.changes_network and not personal:
            bench.network = Network(adapted(self.build(), model), setup.hardware.device)
        bench.network.load(model)
        measured = self._all if rows is None else Subset(self.data.dataset.test, rows)
        return fitting.evaluate(bench, measured, full=full)

    def __call__(
        self,
        model: Weights | None,
        personal: Sequence[Weights],
        trained: Mapping[str, Weights] | None = None,
        *,
        last: bool = False,
    ) -> dict[str, Any]:
        """Return the row of metrics for a global model and for personal ones.

        Args:
            model: the global model, if there is one.
            personal: one model per client, or none.
            trained: what clients trained last in this step, by their names; measured on their own
                test data.
            last: whether the run ends here. Then all metrics of the task are measured; see
                `measures_all`.

        Returns:
            accuracy, loss: of the global model on the union. For personal models, their mean on the
                union; with evaluate_on = "own" every test sample is answered by the model of the
                client that it belongs to. It is absent if the task has no accuracy.
            metric: the name of the headline metric if it is not the accuracy; its value stands
                under that name.
            global_accuracy, global_loss, ...: of the global model on the union, if there are
            personal models too. clients: headline metric on each client's own test data (of its own
            model, where there are personal ones),
                for up to 100 clients.
            client_mean, client_std, client_worst, client_decile: over the clients that have test
                data; unweighted. With a global model and more than 1,000 clients only where the run
                ends, as all that is measured by client.
            diverged: true if the models are far worse than guessing (see `diverged`); otherwise
                absent. Measured by client.
            client_mean_trained: the same mean for the models in `trained`, if there are any.
            consensus: mean squared distance of the personal models' parameters from their mean.
            groups: after the last step, the headline metric by domain and by class, label or
                target; all metrics, also by client, if all are measured.
            metrics, confusion: see `_everything`.
            majority: what always giving the commonest training label scores as accuracy, after the
                last step.
        """
        if model is None and not personal:
            return {}
        all_metrics = last and self.measures_all
        each, served, places = self._answers(model, personal, True if all_metrics else None, last)
        own, losses = self._by_client(served) if served else ([], [])
        row: dict[str, Any] = self._measured(each)
        if diverged(losses, self.task.guess(self.data.dataset.outputs), personal=bool(personal)):
            row["diverged"] = True
        if personal and model is not None:
            row |= {
                f"global_{name}": value
                for name, value in self._measured([self.scores(model)]).items()
            }
            row.pop("global_metric", None)
        row |= spread(
            torch.tensor([a for a in own if not isnan(a)], dtype=torch.float64), self.task.headline
        )
        if after_training := self._own(trained or {}):
            row["client_mean_trained"] = sum(after_training) / len(after_training)
        if personal:
            row["consensus"] = consensus(personal)
        if len(own) <= MOST_CLIENTS_LISTED and served:
            row["clients"] = [None if isnan(a) else a for a in own]
        if not last:
            return row
        groups = self._groups(each, places)
        if all_metrics:
            row |= self._everything(each, served)
            if len(served) <= MOST_CLIENTS_LISTED:
                groups["client"] = {
                    client.name: scores.metrics(rows)
                    for client, (scores, rows) in zip(self.data.clients, served, strict=True)
                }
        else:
            groups = _headline_of(groups, self.task.headline.name)
        if groups := {kind: rows for kind, rows in groups.items() if any(rows.values())}:
            row["groups"] = groups
        if "accuracy" in row:
            row["majority"] = self.majority
        return row

    @cached_property
    def measures_all(self) -> bool:
        """Whether a run ends with all metrics: if they are asked for, or if accuracy alone says
        little because most samples are of one class.
        """
        return self.task.measures_all or self.majority > MISLEADING

    @cached_property
    def majority(self) -> float:
        """Return the accuracy of always giving the commonest training label."""
        dataset = self.data.dataset
        if isinstance(self.task, MultiLabel):
            common = dataset.train.y.mean(0) >= 0.5
            return float(((dataset.test.y >= 0.5) == common).double().mean())
        told, asked = (
            self.task.counts(part.y, dataset.outputs) for part in (dataset.train, dataset.test)
        )
        return float(asked[told.argmax()] / asked.sum())

    def _answers(
        self, model: Weights | None, personal: Sequence[Weights], full: bool | None, last: bool
    ) -> tuple[list[Scores], list[tuple[Scores, Tensor | None]], Tensor]:
        """Return what the models answer, what each client is served of it (at which rows), and the
        test rows.

        With many clients, what each is served is only returned in the `last` step.
        """
        clients = self.data.clients
        if personal and self._evaluate_on == "own":
            pairs = zip(personal, clients, strict=True)
            parts = [self.scores(m, personal=True, rows=c.test.rows, full=full) for m, c in pairs]
            whole = Scores.joined([part for part in parts if len(part)] or parts[:1])
            return (
                [whole],
                [(part, None) for part in parts],
                torch.cat([c.test.rows for c in clients]),
            )
        places = torch.arange(len(self.data.dataset.test))
        if personal:
            each = [self.scores(m, personal=True, full=full) for m in personal]
            return each, [(s, c.test.rows) for s, c in zip(each, clients, strict=True)], places
        assert model is not None
        one = self.scores(model, full=full)
        if len(clients) > _MOST_CLIENTS_EACH_TIME and not last:
            # each client's rows may have to be read from files
            return [one], [], places
        return [one], [(one, c.test.rows) for c in clients], places

    def _by_client(
        self, served: Sequence[tuple[Scores, Tensor | None]]
    ) -> tuple[list[float], list[float]]:
        """Return the headline metric and the mean loss of what each client is served; NaN where it
        has no samples.

        The loss is infinite where answers are not finite.
        """
        (scores, first), *more = served
        same = first is not None and all(one is scores for one, _ in more)
        if same and self.task.kind == "classification" and self.task.headline.name == "accuracy":
            rows = [rows for _, rows in served if rows is not None]
            counts = torch.tensor([len(part) for part in rows])
            owner = torch.arange(len(rows)).repeat_interleave(counts)
            flat = torch.cat(rows)
            sums = (
                torch.bincount(owner, values[flat].double(), minlength=len(rows)).div(counts)
                for values in (scores.right, scores.loss)
            )
            own, loss = (values.tolist() for values in sums)
            return own, [
                inf if isnan(value) and n else value
                for value, n in zip(loss, counts.tolist(), strict=True)
            ]
        return [s.score(rows) for s, rows in served], [_loss(s, rows) for s, rows in served]

    def _measured(self, each: Sequence[Scores]) -> dict[str, Any]:
        """Return mean accuracy (if the task has one), mean loss and mean headline metric of some
        models.
        """
        headline = self.task.headline
        row: dict[str, Any] = {}
        if any(metric.name == "accuracy" for metric in self.task.metrics):
            row["accuracy"] = sum(s.accuracy() for s in each) / len(each)
        row["loss"] = sum(s.mean_loss() for s in each) / len(each)
        if headline.name != "accuracy":
            value = sum(s.score() for s in each) / len(each)
            row |= {"metric": headline.name, headline.name: None if isnan(value) else value}
        return row

    def _everything(
        self, each: Sequence[Scores], served: Sequence[tuple[Scores, Tensor | None]]
    ) -> dict[str, Any]:
        """Return all metrics (for personal models their mean); metrics that are not defined are
        left out.

        Args:
            each: what the models answer.
            served: what each client's model answers, and at which rows of it.

        Returns:
            metrics: each metric on the union.
            confusion: confusion matrix of classes or pixels, for one model of up to 100 classes;
                rows are labels.
            more, of one model: what `further` returns.
        """
        found: dict[str, Any] = {"metrics": _means([s.metrics() for s in each])}
        if len(each) > 1:
            return found
        if len(self.data.dataset.classes) <= MOST_CLIENTS_LISTED and (table := each[0].confusion()):
            found["confusion"] = table
        if self._further:
            found |= self._further(self, each[0], [s.at(rows) for s, rows in served])
        return found

    def _groups(self, each: Sequence[Scores], places: Tensor) -> Groups:
        """Return all metrics by domain and by class, label or target (for personal models their
        mean), for up to 100 of them.

        Args:
            each: what the models answer.
            places: the test row of each sample in `each`.
        """
        dataset = self.data.dataset
        groups: Groups = {}
        domain = dataset.test.domain
        if domain is not None and 1 < len(dataset.domains) <= MOST_CLIENTS_LISTED:
            rows = _rows_of(domain[places], dataset.domains)
            groups["domain"] = {}
            for name, inside in rows.items():
                groups["domain"][name] = _means([s.metrics(inside) for s in each])
        if 1 < len(dataset.classes) <= MOST_CLIENTS_LISTED:
            by_class = zip(*(s.by_class() for s in each), strict=True)
            groups["class"] = {
                str(name): _means(found)
                for name, found in zip(dataset.classes, by_class, strict=False)
            }
        return groups

    def _own(self, models: Mapping[str, Weights]) -> list[float]:
        """Return the headline metric of each model on the test data of the client that trained it,
        if it has any.
        """
        found = []
        for client in self.data.clients:
            if client.name in models and len(client.test):
                model = models[client.name]
                value = self.scores(model, personal=True, rows=client.test.rows).score()
                if not isnan(value):
                    found.append(value)
        return found

    def by_client(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """Return number of test samples and headline metric for each client."""
        return {c.name: (len(c.test), scores.score(c.test.rows)) for c in self.data.clients}

    def by_class(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """Return the same for each class, label or target; empty if the metric has no value for
        each of them.
        """
        dataset = self.data.dataset
        each = self.task.headline.each
        if each is None:
            return {}
        counts = self.task.counts(dataset.test.y, dataset.outputs).tolist()
        pairs = zip(counts, each(scores.counts).tolist(), strict=True)
        return dict(zip(map(str, dataset.classes), pairs, strict=True))

    def by_domain(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """Return the same for each domain; empty if the data have none."""
        dataset = self.data.dataset
        if dataset.test.domain is None:
            return {}
        rows = _rows_of(dataset.test.domain, dataset.domains)
        return {name: (len(inside), scores.score(inside)) for name, inside in rows.items()}


Further = Callable[[TestSet, Scores, Sequence[Scores]], Mapping[str, Any]]
"""What one model answers to all test samples, and the same by client, to further entries of a row
of metrics."""


def of_imbalanced(row: Mapping[str, Any], task: Task, classes: Sequence[Any]) -> str:
    """Return one line about a last row of metrics whose accuracy says little; empty for others."""
    if row.get("majority", 0.0) <= MISLEADING or "metrics" not in row:
        return ""
    found = row["metrics"]
    table = row.get("confusion", ())
    ranks = [m for m in task.metrics if m.name in ("auroc", "average_precision")]
    said = [m.said(found[m.name]) for m in ranks if m.name in found]
    if len(table) == 2 and sum(table[1]):
        said.append(f"sensitivity {100 * table[1][1] / sum(table[1]):.2f} %")
    never = []
    # rows are labels, columns answers
    for name, labels, answers in zip(classes, table, zip(*table, strict=True), strict=False):
        if sum(labels) and not any(answers):
            never.append(repr(str(name)))
    if never:
        said.append(f"never answers {', '.join(never)}")
    return ", ".join(said)


def spread(known: Tensor, metric: Metric) -> dict[str, float]:
    """Return mean, standard deviation, worst and worst decile of a metric over clients, (n,);
    nothing for none.
    """
    if not len(known):
        return {}
    return {
        "client_mean": float(known.mean()),
        "client_std": float(known.std(correction=0)),
        "client_worst": float(known.min() if metric.higher else known.max()),
        "client_decile": float(known.quantile(0.1 if metric.higher else 0.9)),
    }


def _loss(scores: Scores, rows: Tensor | None) -> float:
    """The mean loss; infinite where the answers to samples are not finite; NaN where there are no
    samples.
    """
    loss = scores.mean_loss(rows)
    if isnan(loss) and bool(scores.at(rows).loss.isnan().any()):
        return inf
    return loss


def diverged(losses: Sequence[float], guess: float, *, personal: bool) -> bool:
    """Return whether training diverged with finite values: the loss is above 30, and 10 times that
    of guessing.

    A global model that has forgotten most clients is confidently wrong on their data, with a loss
    far above that of guessing, and right on the data of the client that it saw last. So the client
    with the lowest loss decides. Personal models are measured at their own clients, and their mean
    decides.

    Args:
        losses: mean loss on each client's own test data; NaN where it has none.
        guess: the loss of guessing, ln K with K classes; see `Task.guess`.
        personal: whether each client has a model of its own.
    """
    known = [loss for loss in losses if not isnan(loss)]
    if not known:
        return False
    decides = min(known)
    if personal:
        decides = sum(known) / len(known)
    return decides > max(_LEAST, _FAR * guess)


def divergence(row: Mapping[str, Any], guess: float, lr: float | None) -> str:
    """Return one line about a last row of metrics whose models diverged; empty for every other row.

    Args:
        row: the last row.
        guess: the loss of guessing.
        lr: the step size; None if nothing was trained, and the model follows from sums with noise.
    """
    if not row.get("diverged"):
        return ""
    classes = round(exp(guess))
    why = f" (ln {classes})" if classes and isclose(log(classes), guess) else ""
    far = f"the loss is {row['loss']:.3g}, that of guessing {guess:.2f}{why}"
    if lr is None:
        return f"noise hides the sums: {far}; train on more samples, or give a larger epsilon or a smaller --width"
    return f"training diverged: {far}; lower lr (now {lr:g}), or scale the inputs"


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the rows that have it."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            found.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}


def consensus(models: Sequence[Weights]) -> float:
    """Return how far models are from agreement: (1/N) Σ ‖w_i - w̄‖², over trainable parameters."""
    # after a resume, some are on the CPU and some on a GPU
    models = wire.placed(list(models), torch.device("cpu"))
    centre = mean(models).params
    return sum(float(distance(m.params, centre)) for m in models) / len(models)


def _rows_of(groups: Tensor, names: Sequence[Any]) -> dict[str, Tensor]:
    """Return the samples in each group 0, 1, ..., by its name."""
    return {str(name): (groups == i).nonzero().flatten() for i, name in enumerate(names)}


def _headline_of(groups: Groups, metric: str) -> Groups:
    """Return only this metric of each group that has it."""
    found: Groups = {kind: {} for kind in groups}
    for kind, rows in groups.items():
        for name, row in rows.items():
            if metric in row:
                found[kind][name] = {metric: row[metric]}
    return found
