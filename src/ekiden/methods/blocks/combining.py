"""Combine models that clients trained once: rules of which some stand arbitrary models, and
averages class by class.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    Method,
    OwnSamples,
    State,
    UserError,
    Weights,
    mean,
)
from ekiden.core.training.weights import Layout, distance

Init = Literal["same", "different"]


def first_model(client: Client, common: Weights, init: Init) -> Weights:
    """Return the model that a client's training starts from: the common one, or one of its own."""
    if init == "same":
        return common
    return client.fresh()


class Trained(NamedTuple):
    """What a client sends."""

    model: Weights  # its trained model
    # what the server needs to know: nothing (0,), n_i (1,), n_ic of each class (K,), or whether it
    # has more than one sample of each
    counts: Annotated[Tensor, OwnSamples]


def own_size(client: Client, weighting: Literal["samples", "uniform"]) -> Tensor:
    """Return n_i (1,) if models are weighted by it, else nothing (0,)."""
    sizes = [client.n] if weighting == "samples" else []
    return torch.tensor(sizes, dtype=torch.int64)


class OneShot(Method):
    """A method of one step: train at all clients, then one computation at the server."""

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield one state: train at all clients, and make one model of what they send."""
        if s.step == 0:
            sent = fed.get(fed.call_all(self.train, INITIAL))
            yield s.next(model=self.joined(fed, sent))

    @abstractmethod
    def train(self, client: Client, *args: Any, **kwargs: Any) -> Any:
        """Train at a client from the initial model."""

    @abstractmethod
    def joined(self, fed: Fed, sent: Sequence[Any]) -> Weights:
        """Return the run's model, made at the server of what `train` gave at each client."""

    def steps(self, clients: int) -> int:
        return 1


Rule = Literal["mean", "median", "trimmed-mean", "krum", "geometric-median"]
# steps of Weiszfeld's algorithm at most; each of them is a mean of all models
_STEPS = 100
# below this distance a model counts as the centre itself, whose weight would be infinite
_SMOOTH = 1e-6


def refuse(rule: Rule, models: int, faulty: int, *, weighted: bool) -> None:
    """Refuse what a rule cannot do."""
    if weighted and rule in ("median", "trimmed-mean", "krum"):
        raise UserError(f"--combine {rule} counts every client once: use uniform weights with it")
    least = 1
    if rule == "trimmed-mean":
        least = 2 * faulty + 1
    elif rule == "krum":
        least = 2 * faulty + 3
    if models < least:
        raise UserError(
            f"--combine {rule} with --faulty {faulty} needs {least} models, there are {models}: "
            "lower --faulty, or ask more clients"
        )


def combine(
    models: Sequence[Weights], weights: Sequence[float], rule: Rule = "mean", faulty: int = 0
) -> Weights:
    """Return one model from many; running statistics are combined like parameters.

    Args:
        models: what clients sent.
        weights: the clients' weights, before normalisation.
        rule: mean; median and trimmed-mean of each coordinate, without the `faulty` largest and
            smallest (Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett. ICML 2018.
            https://arxiv.org/abs/1803.01498); krum, the model whose n - f - 2 nearest others are
            nearest (Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer. NeurIPS
            2017. https://arxiv.org/abs/1703.02757); geometric-median, the point with the least
            weighted sum of distances (Krishna Pillutla, Sham Kakade, Zaid Harchaoui: Robust
            Aggregation for Federated Learning. IEEE TSP 2022. https://arxiv.org/abs/1912.13445),
            found by their smoothed Weiszfeld algorithm.
        faulty: f, how many models may be arbitrary; for trimmed-mean and krum.
    """
    if rule == "mean":
        return mean(models, weights)
    refuse(rule, len(models), faulty, weighted=len(set(weights)) > 1)
    match rule:
        case "krum":
            return models[_krum(torch.stack([m.params for m in models]), faulty)]
        case "geometric-median":
            return mean(models, _weiszfeld(models, weights))
        case "median":
            return _by_coordinate(models, (len(models) - 1) // 2)
        case "trimmed-mean":
            return _by_coordinate(models, faulty)


def clipped(model: Weights, start: Weights, most: float) -> Weights:
    """Return `model`, or the point at distance `most` on the way from `start` to it if it is
    further away; 0: no limit.

    Running statistics do not change.
    """
    away = model.params - start.params
    length = float(away.norm())
    if not most or length <= most:
        return model
    return model.with_params(start.params + away * (most / length))


def _by_coordinate(models: Sequence[Weights], cut: int) -> Weights:
    """The mean of each coordinate without the `cut` smallest and largest values."""

    def middle(parts: Sequence[Tensor]) -> Tensor:
        ordered = torch.stack(list(parts)).sort(0).values
        return ordered[cut : len(parts) - cut].mean(0)

    return Weights(
        middle([m.params for m in models]),
        middle([m.buffers for m in models]),
        torch.stack([m.counters for m in models]).amax(0),
    )


def _krum(points: Tensor, faulty: int) -> int:
    """Return the index of the point (n, P) with the least sum of squared distances to its n - f - 2
    nearest others.
    """
    # Squares of differences, not differences of squares: one distant model must not cost the others
    # precision.
    apart = torch.stack([(points - point).square().sum(1) for point in points])
    apart.fill_diagonal_(torch.inf)
    nearest = apart.sort(1).values[:, : len(points) - faulty - 2]
    return int(nearest.sum(1).argmin())


def _weiszfeld(models: Sequence[Weights], weights: Sequence[float]) -> list[float]:
    """Return the weights with which the mean of the models is their geometric median."""
    # not the mean: one distant model can put it where 100 steps do not lead back
    start = _by_coordinate(models, (len(models) - 1) // 2).params
    found = list(weights)
    centre = start
    for _ in range(_STEPS):
        away = [float(distance(m.params, centre)) ** 0.5 for m in models]
        found = [w / max(_SMOOTH, length) for w, length in zip(weights, away, strict=True)]
        moved = mean(models, found).params
        step = float((moved - centre).norm())
        centre = moved
        if step <= _SMOOTH * float(centre.norm()):
            break
    return found


def class_mean(
    models: Sequence[Weights], shares: Tensor, layout: Layout, base: Weights | None = None
) -> Weights:
    """Return the average of models, with each class's row of the classifier (and its bias) averaged
    by its own weights.

    Args:
        models: the models to average.
        shares: (N, K) >= 0, weight of client i in row c: 1 or 0 for owners, or numbers of samples.
            The row of a class that no client has becomes zero.
        layout: layout of the models.
        base: everything except the classifier; by default the uniform mean.
    """
    result = mean(models) if base is None else base
    if shares.shape != (len(models), layout.classes):
        raise UserError(
            f"counts of {shares.shape[1]} classes by {len(shares)} clients do not fit "
            f"{len(models)} models whose last "
            f"layer has {layout.classes} outputs: call the classifier `head`"
        )
    params = result.params.clone()
    total = torch.zeros(layout.classes, dtype=torch.float64)
    head = layout.head
    rows = torch.zeros_like(head.matrix(params))
    # a running mean, so that equal rows stay as they are
    for model, share in zip(models, shares.double(), strict=True):
        total += share
        rows.lerp_(
            head.matrix(model.params),
            (share / total.clamp(min=1e-300)).float()[:, None].to(rows.device),
        )
    head.put(params, rows)
    return result.with_params(params)


def owned(counts: Tensor) -> Tensor:
    """Return (K,) bool: the classes of which a client has more than one sample."""
    return counts > 1
