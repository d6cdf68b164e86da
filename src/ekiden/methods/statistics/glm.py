"""Logistic, linear, Poisson and Cox regression with standard errors, equal to those of pooled
data.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Annotated, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    VECTORS,
    Client,
    Fed,
    NonNegative,
    Ref,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.base.checks import Range
from ekiden.core.engine import wire
from ekiden.core.engine.method import Chooser
from ekiden.core.models.tables_and_texts import Linear
from ekiden.core.tasks import Classification, Need, Regression, Survival
from ekiden.core.training.network import Network
from ekiden.methods.blocks.sums import WithoutModel
from ekiden.methods.blocks.tables import TableMethod
from ekiden.methods.statistics.newton import (
    CONSTANT,
    Coefficients,
    Derivatives,
    Family,
    Formula,
    Solution,
    derivatives,
    groups,
    improved,
    solved,
    start,
)

_EXPLAINED: Mapping[Family, tuple[type[Task], str]] = {
    "logistic": (Classification, "classes"),
    "linear": (Regression, "numbers"),
    "poisson": (Regression, "counts"),
    "cox": (Survival, "times and events (--task survival --label-column TIME EVENT)"),
}


@dataclass(frozen=True)
class Fitting(WithoutModel):
    """The state with the coefficients of this lap and the sums so far."""

    coefficients: Ref[Coefficients] | None = None
    sums: Ref[Derivatives] | None = None


class Estimated(Linear):
    """A linear network with the covariances of its coefficients."""

    covariance: Tensor  # (G, S, S), for columns as they enter and targets as they leave the network
    samples: Tensor  # n
    # mean and standard deviation of each target of Poisson regression; the network gives
    # standardised numbers
    rates: Tensor
    # (T,) the cumulative hazard at these times where the network gives 0; 0 if it is not told
    hazard: Tensor

    def __init__(
        self, base: Linear, family: Family, outputs: int, task: Task, times: tuple[float, ...] = ()
    ) -> None:
        super().__init__(base.features, base.names, base.columns, outputs)
        self.family = family  # which regression
        count, each = groups(family, outputs)
        size = each * (len(base.names) + 1)
        self.register_buffer("covariance", torch.zeros(count, size, size))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.times = times  # of the baseline hazard of Cox regression
        if times:
            self.register_buffer("hazard", torch.zeros(len(times)))
        scale: tuple[tuple[float, ...], ...] = ((0.0,), (1.0,))
        if isinstance(task, Regression):
            scale = (task.mean, task.std)
        self.register_buffer("rates", torch.tensor(scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b, K) logits, or standardised numbers."""
        found = super().forward(x)
        if self.family == "poisson":
            found = (found.exp() - self.rates[0]) / self.rates[1]
        return found

    def holding(self, solution: Solution, samples: int) -> Weights:
        """Return the network with these estimates, as weights."""
        rows = solution.values.view(-1, len(self.names) + 1)
        if self.family == "logistic":
            # the first class is the reference: its coefficients are 0
            rows = F.pad(rows, (0, 0, 1, 0))
        head = cast(nn.Linear, self.head).requires_grad_(True)
        with torch.no_grad():
            head.weight.copy_(rows[:, :-1])
            head.bias.copy_(rows[:, -1])
            self.covariance.copy_(solution.covariance)
            self.samples.fill_(samples)
            if self.times:
                self.hazard.copy_(solution.hazard)
        return Network(self, head.weight.device).weights()


@dataclass(frozen=True)
class GLM(TableMethod):
    """Clients add up derivatives of the likelihood, from which the last one makes Newton's steps:
    exact regression.

    John Nelder, Robert Wedderburn: Generalized Linear Models. Journal of the Royal Statistical
    Society A, 1972. https://doi.org/10.2307/2344614. From sums of sites: Yuan Wu et al.: Grid
    Binary LOgistic REgression (GLORE). Journal of the American Medical Informatics Association,
    2012. https://doi.org/10.1136/amiajnl-2012-000862

    The result is that of pooled data, with standard errors: nothing depends on how samples are
    divided, except in Cox regression, which compares samples of the same client only (it is
    stratified by client).

    Departures from the paper: sums are whole numbers in units of 2^-28, handed from client to
    client. The first step starts at the best constants, which follow from the first sums; that of
    Poisson regression as in R's glm. A step that makes the likelihood smaller, or sums too large,
    is halved. Clients that know that the regression has converged compute nothing more: they hand
    on zeros up to the last lap. A regression that has not converged then waits for more laps
    (`ekiden resume RUN --laps`). There are no time-dependent columns, entry times, offsets,
    weights, or robust standard errors.
    """

    family: Family = "logistic"
    """logistic: classes, binary or multinomial; linear: numbers, ordinary least squares, which
    needs one lap; poisson: counts (targets of --task regression), logarithmic link; cox: times and
    events (--task survival), stratified by client, ties as Efron's"""
    laps: Annotated[int, Range(least=4, most=100)] = 15
    """T, passes over all clients, for at most as many of Newton's steps; linear regression makes
    one, and --firth 2T - 1"""
    ridge: NonNegative = 0.0
    """λ: subtract λ/2 of the squared coefficients, of numbers as they are scaled and without
    constants, from the log-likelihood. Then estimates are finite, and columns may follow from each
    other"""
    firth: bool = False
    """Firth's penalty, half the logarithm of the information's determinant, for rare outcomes and
    for classes that columns separate: estimates are finite and less biased"""
    times: str = ""
    """for cox: times such as 90,180,365 at which the model also tells survival, from the baseline
    hazard of all clients together; times after which fewer than 5 events follow are left out"""
    order: str = "given"
    """order of the clients: given, reversed, random, or names separated by commas; the last one
    makes the steps"""

    traits = Traits(averages=False, weighs=False, limit="laps")

    @property
    def chosen_by(self) -> Chooser:
        """Nobody in the only lap of a linear regression, which begins at 0; else the last
        client.
        """
        return "nobody" if self.family == "linear" else "party"

    @property
    def least(self) -> None:
        """The silo looks for rows that its columns show alone."""

    @property
    def needs(self) -> frozenset[Need]:
        """Classes for logistic regression. Numbers are checked in `check_network`."""
        match self.family:
            case "logistic":
                return CLASSES
            case "cox":
                return frozenset()
        return VECTORS

    def __post_init__(self) -> None:
        """Refuse times that are none, and penalties that do not go together."""
        if self._times and self.family != "cox":
            raise UserError(f"times are for cox, not for {self.family}: leave out --times")
        if self.firth and (self.ridge or self.family == "linear"):
            raise UserError(
                "linear regression has no bias, and --ridge is another penalty: leave out --firth"
            )

    def check_network(self, model: Size) -> None:
        """Refuse targets that the family does not explain."""
        kind, explained = _EXPLAINED[self.family]
        if not isinstance(model.task, kind):
            raise UserError(
                f"--family {self.family} explains {explained}, the task is {model.task.kind}: "
                "choose another family"
            )

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: Task
    ) -> nn.Module:
        """Return a linear network with the covariances of its coefficients."""
        base = self.columns_of(network, shape, classes)
        return Estimated(base, self.family, classes, task, self._times)

    def run(self, fed: Fed, s: Fitting) -> Iterator[State]:
        """Yield the state after each hop. A lap ends at the last client, which makes Newton's
        step.
        """
        order = fed.order(self.order)
        while s.step < self.steps(len(order)):
            lap, hop = divmod(s.step, len(order))
            client = order[hop]
            at = s.coefficients
            sums = fed.sum(self.add, [client], INITIAL, at, lap == self._laps - 1, plus=s.sums)
            if hop < len(order) - 1:
                s = s.next(sums=sums)
            elif lap < self._laps - 1:
                better = fed.call(self.improve, client, INITIAL, at, sums)
                s = s.next(coefficients=better, sums=None)
            else:
                model = fed.call(self.solve, client, INITIAL, at, sums)
                s = s.next(model=model, coefficients=None, sums=None)
            yield s

    @on_client(gives="sum")
    def add(
        self,
        client: Client,
        model: Weights,
        at: Coefficients | None,
        last: bool,
        before: Derivatives | None,
    ) -> Derivatives:
        """Add the derivatives of the client's samples to those received; nothing between
        convergence and last lap.
        """
        network = cast(Estimated, client.network(model))
        here = self._at(client, network, at)
        with torch.no_grad():
            # no pass counts: features of a linear network are its inputs
            batches = client.batches(passes=0, shuffle=False)
            none = torch.zeros(0, len(network.names), device=client.unit().device)
            x = torch.cat([none, *(network.features(x) for x, _ in batches)])
        y = client.data.train.y.to(x.device)
        if self.family != "logistic":
            if y.ndim == 1:
                y = y[:, None]
            y = self._targets(client, y)
        if here.final and not last:
            x = x[:0]
            y = y[:0]
        times = []
        if isinstance(client.task, Survival):
            times = [time / client.task.mean[0] for time in self._times]
        own = derivatives(self.family, F.pad(x, (0, 1), value=1.0), y, here, times)
        return client.added(before, own, (at, last))

    @on_client(gives="nothing")
    def improve(
        self, client: Client, model: Weights, at: Coefficients | None, totals: Derivatives
    ) -> Coefficients:
        """Return the coefficients of the next lap."""
        network = cast(Estimated, client.network(model))
        return improved(self._formula(network), self._at(client, network, at), totals)

    @on_client(gives="nothing")
    def solve(
        self, client: Client, model: Weights, at: Coefficients | None, totals: Derivatives
    ) -> Weights:
        """Return the network with the estimates and their covariances."""
        network = cast(Estimated, client.network(model))
        found = solved(self._formula(network), self._at(client, network, at), totals)
        return network.holding(found, totals.samples)

    def _formula(self, network: Estimated) -> Formula:
        names = [*network.names, CONSTANT]
        columns = [*network.columns, CONSTANT]
        return Formula(self.family, names, columns, self.ridge, self.firth)

    def _at(self, client: Client, network: Estimated, at: Coefficients | None) -> Coefficients:
        """Return the coefficients of this lap, 0 in the first one."""
        usual = start(self.family, client.classes, len(network.names) + 1)
        if at is None:
            return usual
        if at.values.shape != usual.values.shape or at.values.dtype != torch.float64:
            raise UserError(
                "the coefficients received are of other columns: use the same data schema "
                "everywhere"
            )
        found: Coefficients = wire.placed(at, torch.device("cpu"))
        return found

    def _targets(self, client: Client, y: Tensor) -> Tensor:
        """Return targets (n, K) float64: standardised, or counts; or times, relative to the mean,
        and events.
        """
        if isinstance(client.task, Survival):
            return y / torch.tensor(
                [client.task.mean[0], 1.0], dtype=torch.float64, device=y.device
            )
        if self.family == "linear":
            task = cast(Regression, client.task)
            scale = torch.tensor([task.mean, task.std], dtype=torch.float64, device=y.device)
            return (y.double() - scale[0]) / scale[1]
        if ((y < 0) | (y != y.round())).any():
            raise UserError(
                f"{client.name} has a target that is negative or a fraction, and counts are not: "
                "correct it, or use --family=linear"
            )
        return y.double()

    @property
    def _times(self) -> tuple[float, ...]:
        try:
            found = tuple(float(part) for part in self.times.split(",")) if self.times else ()
        except ValueError:
            found = (0.0,)
        if not all(a < b < inf for a, b in pairwise((0.0, *found))):
            raise UserError(
                f"times {self.times!r} are not positive numbers in ascending order: write "
                "90,180,365"
            )
        return found

    @property
    def _laps(self) -> int:
        if self.family == "linear":
            return 1
        if self.firth:
            # two laps a step, except for the first, which needs no information
            return 2 * self.laps - 1
        return self.laps

    def steps(self, clients: int) -> int:
        """T laps of N hops."""
        return self._laps * clients

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·(T(4G·S(S + 3) + 8G + 16 + 16H) + (T - 1)(16GS + 8)), and (N - 1)(T - 1)·8GS²
        with Firth's penalty.

        For logistic regression G = 1 and S = (K - 1)(D + 1), otherwise G = K and S = D + 1, where D
        is the number of columns. H is the number of times.
        """
        count, size, _ = cast(Estimated, model.network.module).covariance.shape
        sums = 4 * count * size * (size + 3) + 8 * count + 16 + 16 * len(self._times)
        inverse = 8 * count * size**2 if self.firth else 0
        return (clients - 1) * (
            self._laps * sums + (self._laps - 1) * (16 * count * size + 8 + inverse)
        )
