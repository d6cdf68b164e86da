"""Measuring models on the test data: per sample once, then by client, domain and class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, log
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ekiden.data.samples import FederatedData, Subset
from ekiden.engine import wire
from ekiden.engine.method import Method
from ekiden.engine.worker import Worker
from ekiden.training import fit as fitting
from ekiden.training.elastic import adapted
from ekiden.training.network import Network
from ekiden.training.weights import Weights, distance, mean

EvaluateOn = Literal["all", "own"]
"""What personal models are measured on: all test data, or each on its own client's alone."""

_MOST_CLIENTS_LISTED = 100
_FAR = 10  # times the loss of guessing; real runs that forget or overfit stay below 2 at the client served best
_LEAST = 30.0  # above -ln 1e-12 = 27.6, the most that a wrong vote of an ensemble costs


@dataclass(frozen=True)
class Built:
    """Makes a network that the result of a run fits."""

    method: Method
    own: Callable[[], nn.Module]
    clients: int

    def __call__(self) -> nn.Module:
        return self.method.result_network(self.own(), self.clients)


@dataclass(frozen=True)
class Scores:
    """What a model does on every test sample.

    Attributes:
        right: (n,) bool, whether its answer is the label.
        loss: (n,) cross-entropy.
    """

    right: Tensor
    loss: Tensor

    def accuracy(self, rows: Tensor | None = None) -> float:
        """Share of right answers, in all or in some rows; NaN where there are none."""
        right = self.right if rows is None else self.right[rows]
        return float(right.sum()) / len(right) if len(right) else float("nan")

    def mean_loss(self, rows: Tensor | None = None) -> float:
        """Mean cross-entropy, of all or of some rows; NaN where there are none."""
        loss = self.loss if rows is None else self.loss[rows]
        return float(loss.double().mean()) if len(loss) else float("nan")


class TestSet:
    """The union of all clients' test data, and the groups in it."""

    __test__ = False  # no test class of pytest

    def __init__(
        self, worker: Worker, data: FederatedData, clients: int | None = None, evaluate_on: EvaluateOn = "all"
    ) -> None:
        """Evaluate what `worker` trains.

        Args:
            worker: knows the network and how to feed it.
            data: whose test data.
            clients: number of clients that trained, if not those of `data`.
            evaluate_on: what personal models are measured on.
        """
        self._worker = worker
        setup = worker.setup
        self.build = Built(setup.method, setup.build, len(data.clients) if clients is None else clients)
        self.own = setup.build
        self._data = data
        self._evaluate_on = evaluate_on
        self._all = Subset(data.dataset.test, torch.arange(len(data.dataset.test)))

    def scores(self, model: Weights, *, personal: bool = False, rows: Tensor | None = None) -> Scores:
        """One pass of `model` (of the run, or a client's own) over all test samples, or those in `rows`."""
        return Scores(*fitting.evaluate(self._bench(model, personal), self._subset(rows)))

    def features(self, model: Weights, rows: Tensor, *, personal: bool = False) -> Tensor:
        """What enters the head (k, A), for some test samples, on the CPU.

        Raises:
            UserError: the network does not declare its head.
        """
        bench = self._bench(model, personal)
        with torch.no_grad(), bench.autocast():
            parts = [
                bench.network.probe(bench.feed.batch(self._subset(part), slice(None), train=False)[0])[0]
                for part in torch.split(rows, 512)
            ]
        return torch.cat(parts).flatten(1).float().cpu()

    def _bench(self, model: Weights, personal: bool) -> fitting.Bench:
        bench = self._worker.bench("evaluation")
        setup = self._worker.setup
        if setup.method.changes_network and not personal:
            bench.network = Network(adapted(self.build(), model), setup.hardware.device)
        bench.network.load(model)
        return bench

    def _subset(self, rows: Tensor | None) -> Subset:
        return self._all if rows is None else Subset(self._data.dataset.test, rows)

    def __call__(
        self, model: Weights | None, personal: Sequence[Weights], trained: Mapping[str, Weights] | None = None
    ) -> dict[str, Any]:
        """The row of metrics for a global model and for personal ones.

        Args:
            model: the global model, if there is one.
            personal: one model per client, or none.
            trained: what clients trained last in this step, by their names; measured on their own test data.

        Returns:
            accuracy, loss: of the global model on the union. Of personal models, their mean on the union; with
                evaluate_on = "own" every test sample is answered by the model of the client that it belongs to.
            global_accuracy, global_loss: of the global model on the union, where there are personal ones too.
            clients: accuracy on each client's own test data (of its own model, where there are personal ones), for
                up to 100 clients.
            client_mean, client_std, client_worst, client_decile: over the clients that have test data; unweighted.
            diverged: true, where the models are far worse than guessing, see `diverged`; else absent.
            client_mean_trained: the same mean of the models in `trained`, where there are any.
            consensus: mean squared distance of the personal models' parameters from their mean.
        """
        if model is None and not personal:
            return {}
        served: list[tuple[Scores, Tensor | None]]  # how each client's model answers, and on which rows of it
        if personal and self._evaluate_on == "own":
            pairs = zip(personal, self._data.clients, strict=True)
            parts = [self.scores(m, personal=True, rows=c.test.rows) for m, c in pairs]
            each = [Scores(torch.cat([s.right for s in parts]), torch.cat([s.loss for s in parts]))]
            served = [(part, None) for part in parts]
        else:
            assert personal or model is not None
            each = (
                [self.scores(m, personal=True) for m in personal] if model is None or personal else [self.scores(model)]
            )
            rows = [c.test.rows for c in self._data.clients]
            served = list(zip(each if personal else each * len(rows), rows, strict=True))
        own = [scores.accuracy(rows) for scores, rows in served]
        row: dict[str, Any] = {
            "accuracy": sum(s.accuracy() for s in each) / len(each),
            "loss": sum(s.mean_loss() for s in each) / len(each),
        }
        losses = [scores.mean_loss(rows) for scores, rows in served]
        if diverged(losses, len(self._data.dataset.classes), personal=bool(personal)):
            row["diverged"] = True
        if personal and model is not None:
            scores = self.scores(model)
            row["global_accuracy"] = scores.accuracy()
            row["global_loss"] = scores.mean_loss()
        known = torch.tensor([a for a in own if not isnan(a)], dtype=torch.float64)
        if len(known):
            row["client_mean"] = float(known.mean())
            row["client_std"] = float(known.std(correction=0))
            row["client_worst"] = float(known.min())
            row["client_decile"] = float(known.quantile(0.1))
        if after_training := self._own(trained or {}):
            row["client_mean_trained"] = sum(after_training) / len(after_training)
        if personal:
            row["consensus"] = consensus(personal)
        if len(own) <= _MOST_CLIENTS_LISTED:
            row["clients"] = [None if isnan(a) else a for a in own]
        return row

    def _own(self, models: Mapping[str, Weights]) -> list[float]:
        """The accuracy of each of these models on the test data of the client that trained it, if it has any."""
        return [
            self.scores(models[c.name], personal=True, rows=c.test.rows).accuracy()
            for c in self._data.clients
            if c.name in models and len(c.test)
        ]

    def by_client(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """Number of test samples and accuracy of each client."""
        return {c.name: (len(c.test), scores.accuracy(c.test.rows)) for c in self._data.clients}

    def by_class(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """The same of each class."""
        return _grouped(scores, self._data.dataset.test.y, self._data.dataset.classes)

    def by_domain(self, scores: Scores) -> dict[str, tuple[int, float]]:
        """The same of each domain; empty where the data have none."""
        domain = self._data.dataset.test.domain
        return {} if domain is None else _grouped(scores, domain, self._data.dataset.domains)


def diverged(losses: Sequence[float], classes: int, *, personal: bool) -> bool:
    """Return whether training diverged without becoming infinite: the loss is above 30, and 10 times that of guessing.

    A global model that has forgotten most clients is confidently wrong there, with a loss far above that of guessing.
    It is right at the client that it saw last. So the client that it serves best decides. Personal models are measured
    at their own clients, and their mean decides.

    Args:
        losses: mean cross-entropy on each client's own test data; NaN where it has none.
        classes: K; guessing has the loss ln K.
        personal: whether each client has a model of its own.
    """
    known = [loss for loss in losses if not isnan(loss)]
    if not known:
        return False
    return (sum(known) / len(known) if personal else min(known)) > max(_LEAST, _FAR * log(classes))


def divergence(row: Mapping[str, Any], classes: int, lr: float) -> str:
    """Return one line about a last row of metrics whose models diverged; empty of all others."""
    if not row.get("diverged"):
        return ""
    return (
        f"training diverged: the loss is {row['loss']:.3g}, that of guessing {log(classes):.2f} (ln {classes}); "
        f"lower lr (now {lr:g}), or scale the inputs"
    )


def consensus(models: Sequence[Weights]) -> float:
    """How far models are from agreement: (1/N) Σ ‖w_i - w̄‖², over trainable parameters."""
    models = wire.placed(list(models), torch.device("cpu"))  # after a resume, some are there and some on a GPU
    centre = mean(models).params
    return sum(float(distance(m.params, centre)) for m in models) / len(models)


def _grouped(scores: Scores, groups: Tensor, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    rows = {name: (groups == i).nonzero().flatten() for i, name in enumerate(names)}
    return {name: (len(r), scores.accuracy(r)) for name, r in rows.items()}
