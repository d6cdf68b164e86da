"""What a run gives away: attacks on its models that guess which samples were trained on, and who
got what.
"""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError, counted, listed
from ekiden.core.data.samples import ClientData, FederatedData, Samples, Subset
from ekiden.core.training.private.promise import condition, spent_epsilon
from ekiden.core.training.weights import Weights
from ekiden.runs.api import How, prepared
from ekiden.runs.recipe import recipe_of
from ekiden.runs.result import Result
from ekiden.runs.summary import size

SERVER = "server"
# samples of each kind
_LEAST = 20
# shadow models
_FEWEST = 4
_CONFIDENCE = 0.95
_SEED = 0
Values = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Attack:
    """How well a loss below a threshold tells training samples from others.

    Thresholds are chosen on one half of the samples, and all but the AUC is measured on the other
    half.
    """

    model: str  # the global model, or the client whose model it is
    members: int  # number of training samples
    others: int  # number of test samples
    auc: float  # probability that a training sample has the lower loss; 0.5 is guessing
    tpr_1: float  # share of training samples found at a false alarm for 1 % of the others
    tpr_01: float | None  # at 0.1 %; None with fewer than 2,000 others
    advantage: (
        float  # share of training samples found minus share of false alarms, at the best threshold
    )
    # a model with a smaller ε (and the δ of the run) would not give away as much, with 95 %
    # confidence; see
    # `epsilon_from`
    epsilon: float


@dataclass(frozen=True)
class Audit:
    """What an audit found."""

    attacks: tuple[Attack, ...]  # on each model of the run
    promised: float | None  # ε of the run; None without --dp
    shown: tuple[str, ...]  # who got what, in words

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def audit(result: Result, data: FederatedData | None = None, shadows: int = 0) -> Audit:
    """Attack the models of a run on one machine with its own training and test samples.

    The attack: Samuel Yeom, Irene Giacomelli, Matt Fredrikson, Somesh Jha: Privacy Risk in Machine
    Learning. CSF 2018. https://arxiv.org/abs/1709.01604. Rates at few false alarms: Nicholas
    Carlini et al.: Membership Inference Attacks From First Principles. IEEE S&P 2022.
    https://arxiv.org/abs/2112.03570. It is a weak attack: that it finds nothing does not prove that
    there is nothing to find. With `shadows`, the global model is also attacked as in that paper
    (LiRA), see `likelihood_ratios`.

    Raises:
        UserError: the data are not here, or too few; or there are fewer shadows.
    """
    if 0 < shadows < _FEWEST:
        raise UserError(
            f"{counted(shadows, 'shadow model')} say too little about single samples: give "
            f"{_FEWEST} or more"
        )
    silos = result.data() if data is None else data
    delta = float(result.config.get("privacy", {}).get("delta", 0.0))
    attacks = []
    if result.weights is not None:
        rows = torch.cat([client.train.rows for client in silos.clients])
        attacks.append(
            _attack(result, silos, "global", result.weights, rows, delta, personal=False)
        )
        if shadows:
            attacks.append(
                attack(
                    f"global (LiRA, {shadows})", *likelihood_ratios(result, silos, shadows), delta
                )
            )
    elif shadows:
        raise UserError(
            "shadow models attack a global model, and the run has none: leave out --shadows"
        )
    for client, weights in zip(silos.clients, result.personal, strict=False):
        attacks.append(
            _attack(result, silos, client.name, weights, client.train.rows, delta, personal=True)
        )
    if not attacks:
        raise UserError("the run has no model yet: let it end")
    promised = result.config.get("privacy", {}).get("epsilon")
    return Audit(tuple(attacks), promised, tuple(shown(result)))


def _attack(
    result: Result,
    silos: FederatedData,
    name: str,
    model: Weights,
    rows: Tensor,
    delta: float,
    *,
    personal: bool,
) -> Attack:
    """Attack one model that was trained on these rows."""
    members = silos.dataset.train.taken(rows)
    nothing = Subset(members, torch.arange(0))
    clients = tuple(replace(client, test=nothing) for client in silos.clients)
    seen = replace(silos, dataset=replace(silos.dataset, test=members), clients=clients)

    def losses(data: FederatedData) -> Values:
        return result.judge(data).scores(model, personal=personal).loss.double().numpy()

    return attack(name, losses(seen), losses(silos), delta)


def likelihood_ratios(result: Result, silos: FederatedData, shadows: int) -> tuple[Values, Values]:
    """Return how much likelier it is that a sample was not in training, as logarithms: training
    samples, then others.

    The attacker of LiRA trains shadow models by the recipe of the run, each on a random half of
    every silo's training and test samples. For each sample it takes log(p/(1 - p)), where p is what
    a model gives to the label, as Gaussian: with one mean where the sample was trained on, another
    where it was not, and two variances that all samples share. Other tasks than classification have
    minus the loss instead. Shadows have seeds, and so noise, of their own.
    """
    recipe = recipe_of(result.config["recipe"])
    dataset = silos.dataset
    everything = _joined(dataset.train, dataset.test)
    before = len(dataset.train)
    pools = list[Tensor]()
    tested = list[ClientData]()
    for client in silos.clients:
        pool = torch.cat([client.train.rows, before + client.test.rows])
        pools.append(pool)
        tested.append(replace(client, test=Subset(everything, pool)))
    mine = torch.cat(pools)
    seen = replace(silos, dataset=replace(dataset, test=everything), clients=tuple(tested))
    network = None if result.config["network"] else result.build

    def scores(of: Result) -> Values:
        assert of.weights is not None, "the method gives a global model"
        loss = of.judge(seen).scores(of.weights).loss.double().clamp(min=1e-12)[mine]
        found = -torch.log(torch.expm1(loss)) if dataset.task.kind == "classification" else -loss
        return found.clamp(-100, 100).numpy()

    inside = []
    answers = []
    for number in range(shadows):
        draw = torch.Generator().manual_seed(number)
        halves = list[Tensor]()
        clients = list[ClientData]()
        for client, pool in zip(silos.clients, pools, strict=True):
            rows = pool[torch.randperm(len(pool), generator=draw)[: max(1, len(pool) // 2)]]
            halves.append(rows)
            val = Subset(everything, client.val.rows)
            clients.append(replace(client, train=Subset(everything, rows), val=val))
        half = replace(silos, dataset=replace(dataset, train=everything), clients=tuple(clients))
        shadow = replace(recipe, seed=recipe.seed + number + 1, evaluate_every=0)
        answers.append(scores(prepared(shadow.located(), half, How(quiet=True), network).end()))
        inside.append(torch.isin(mine, torch.cat(halves)).numpy())
    was = np.stack(inside)
    found = np.stack(answers)
    ratio = np.zeros(len(mine))
    target = scores(result)
    for part, sign in ((was, 1.0), (~was, -1.0)):
        count = part.sum(0)
        usual = float(found[part].mean())
        mean = np.where(count, (found * part).sum(0) / np.maximum(count, 1), usual)
        variance = (
            float(((found - mean)[part] ** 2).sum() / max((count - 1).clip(min=0).sum(), 1)) + 1e-6
        )
        ratio -= sign * ((target - mean) ** 2 / variance + math.log(variance)) / 2
    trained = torch.isin(mine, torch.cat([c.train.rows for c in silos.clients])).numpy()
    return -ratio[trained], -ratio[~trained]


def _joined(first: Samples, second: Samples) -> Samples:
    """Return the samples of both."""

    def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat([a, b])

    joined: dict[str, Any] = {}
    for name in ("x", "y", "domain", "group", "subject", "time"):
        joined[name] = both(getattr(first, name), getattr(second, name))
    return replace(first, **joined)


def attack(name: str, members: Values, others: Values, delta: float = 0.0) -> Attack:
    """Return how well losses tell `members` (n,) from `others` (m,)."""
    if min(len(members), len(others)) < _LEAST:
        raise UserError(
            f"{counted(len(members), 'training sample')} and {len(others)} others are too few to "
            f"attack {name}: "
            f"{_LEAST} of each are needed"
        )
    draw = np.random.default_rng(_SEED)
    chosen_in, judged_in = np.array_split(draw.permutation(members), 2)
    chosen_out, judged_out = np.array_split(draw.permutation(others), 2)

    def found(threshold: float) -> float:
        return float((judged_in <= threshold).mean())

    def at(rate: float) -> float:
        """Return the threshold with this share of false alarms in the half on which it is
        chosen.
        """
        allowed = int(rate * len(chosen_out))
        return float(np.nextafter(np.sort(chosen_out)[allowed], -np.inf))

    grid = np.unique(np.quantile(np.concatenate([chosen_in, chosen_out]), np.linspace(0, 1, 200)))
    hits = np.searchsorted(np.sort(chosen_in), grid, "right")
    alarms = np.searchsorted(np.sort(chosen_out), grid, "right")
    best = grid[int(np.argmax(hits / len(chosen_in) - alarms / len(chosen_out)))]
    bounds = [
        epsilon_from(h, len(chosen_in), a, len(chosen_out), delta)
        for h, a in zip(hits, alarms, strict=True)
    ]
    strongest = grid[int(np.argmax(bounds))]
    counts = int((judged_in <= strongest).sum()), int((judged_out <= strongest).sum())
    return Attack(
        name,
        len(members),
        len(others),
        _auc(members, others),
        found(at(0.01)),
        found(at(0.001)) if len(others) >= 2000 else None,
        found(float(best)) - float((judged_out <= best).mean()),
        epsilon_from(counts[0], len(judged_in), counts[1], len(judged_out), delta),
    )


def epsilon_from(hits: int, members: int, alarms: int, others: int, delta: float = 0.0) -> float:
    """Return the least ε for which rates as good as these are possible, with 95 % confidence for
    independent samples.

    Under (ε, δ) every test finds a share of at most exp(ε) times its false alarms + δ, and the same
    holds for what it does not find (Kairouz, Oh, Viswanath, ICML 2015). Both rates are replaced by
    the pessimistic ends of Clopper and Pearson's intervals. Samples of one training are not quite
    independent, so this is an estimate and no proof.
    """
    # takes a while, and few need it
    from scipy.special import betaincinv

    tail = (1 - _CONFIDENCE) / 2
    rate = float(betaincinv(hits, members - hits + 1, tail)) if hits else 0.0
    alarm = float(betaincinv(alarms + 1, others - alarms, 1 - tail)) if alarms < others else 1.0
    found = 0.0
    for more, less in ((rate, alarm), (1 - alarm, 1 - rate)):
        if more > delta and less > 0:
            found = max(found, math.log((more - delta) / less))
    return found


def _auc(members: Values, others: Values) -> float:
    """Return the probability that a member has the lower loss; ties count half."""
    ordered = np.sort(others)
    above = len(others) - np.searchsorted(ordered, members, "right")
    ties = np.searchsorted(ordered, members, "right") - np.searchsorted(ordered, members, "left")
    return float((above + ties / 2).mean() / len(others))


def shown(result: Result) -> list[str]:
    """Say who got what of single silos in a run, from its ledger."""
    config = result.config
    method = recipe_of(config["recipe"]).method
    got = defaultdict[str, dict[str, list[int]]](dict)
    for row in result.ledger:
        if not row.missing and row.source != SERVER:
            got[row.target].setdefault(row.source, []).append(row.bytes)
    lines = list[str]()
    for reader, given in got.items():
        every = [*chain.from_iterable(given.values())]
        number = counted(len(every), "value")
        lines.append(f"{reader} got {number} ({size(sum(every))}) of {listed(given)}")
    if method.gives_sums:
        lines.append(
            "values are sums over silos. On one machine they are not masked; between machines, only "
            "the total over all silos can be read"
        )
    elif method.fits() is not None:
        lines.append(
            "values are models that one silo trained; a party that gets one can attack it as above"
        )
    else:
        lines.append(f"values are what {method.title()} sends: see the page of the method")
    if dp := config.get("privacy"):
        lines.append(
            f"each silo added noise: epsilon {spent_epsilon(dp['epsilon'])} at delta {dp['delta']:g} for a "
            f"sample{condition(dp)}"
        )
    else:
        lines.append("no noise was added: nothing bounds what better attacks find (--dp adds it)")
    return lines
