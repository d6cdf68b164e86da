"""FedKrylov: ridge regression on many fixed features in a few laps, without their Gram matrix."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Annotated, Literal, cast

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    NonNegative,
    Range,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.data.samples import Subset
from ekiden.core.tasks import Classification
from ekiden.methods.blocks.sums import forms
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import (
    FixedFeatures,
    Settled,
    ShortColumns,
    features_of,
    labels_as_targets,
    with_rows,
)
from ekiden.methods.exact.blocks.krylov import (
    Chosen,
    Columns,
    HeldAnswers,
    Kept,
    Labels,
    Lapping,
    Multiplied,
    OpeningSums,
    Preconditioner,
    Problem,
    Span,
    WholeColumns,
    answer_step,
    next_directions,
)

_ROWS = 1024  # samples that are multiplied together
# Most samples of the last client in the preconditioner
_OWN = 8192


@dataclass(frozen=True)
class FedKrylov(FixedFeatures):
    """Clients multiply directions by the Gram matrix of fixed features, and the first one solves in
    their span.

    Distributed conjugate gradients with one machine's second moments as preconditioner: Yuchen
    Zhang, Lin Xiao: DiSCO: Distributed Optimization for Self-Concordant Empirical Loss. ICML 2015.
    https://arxiv.org/abs/1501.00263 (Algorithm 2, for a quadratic loss). A direction for each
    class: Dianne O'Leary: The block conjugate gradient algorithm and related methods. Linear
    Algebra and its Applications 29, 1980. https://doi.org/10.1016/0024-3795(80)90247-5.

    The regression is that of FedGram (see there for the features and their sources). FedGram hands
    on the Gram matrix of D features, D²/2 numbers, once. Here the first lap adds up Σ φyᵀ and the
    variances, KD numbers. In each further lap the first client sends out directions, KD numbers,
    and the clients add up the Gram matrix times these, KD numbers. So for the same bytes there are
    many more features, and more laps are closer to the exact solution.

    Departures from the paper: the sums go from client to client instead of to a server, in 16 bits
    a number, and directions in 8. The solution is the best one in the span of all directions, not
    the recursion of conjugate gradients, so that rounded directions do no harm. The preconditioner
    is corrected by what the sums of the first lap tell about all clients. λ is chosen by squared
    errors on all clients' validation samples, which travel as sums.
    """

    laps: Annotated[int, Range(least=2, most=100)] = 3
    """T, passes over all clients; the first adds up products with labels"""
    ridge: NonNegative = 0.0
    """λ/n; 0: by the validation samples of all clients, or 0.03 if these are fewer than 50"""
    damping: Annotated[float, Range(least=1e-3)] = 0.1
    """δ = μ/n, the multiple of the identity in the preconditioner"""
    sums: Literal["short", "whole"] = "short"
    """how sums travel: in 16 bits a number, rounded at each hop; or as whole numbers of 64 bits,
    exact, which silos can mask"""

    traits = Traits(private=Kept, weighs=False)

    def run(self, fed: Fed, s: Lapping) -> Iterator[State]:
        """Yield the state after each hop. A lap ends at the first client, which turns totals into
        directions.
        """
        first, *others = fed.order(self.order)
        while s.step < self.laps * len(fed.clients):
            lap, hop = divmod(s.step, len(fed.clients))
            if s.step == 0:
                s = replace(s, chosen=fed.call(self.choose, first, INITIAL))
            if hop < len(others):
                yield (s := self._added(fed, s, others[hop]).next())
                continue
            s = self._added(fed, s, first)
            if lap == 0:
                direction = fed.call(self.begin, first, INITIAL, s.chosen, s.opening)
                s = s.next(direction=direction, opening=None, chosen=None)
            elif lap < self.laps - 1:
                direction = fed.call(self.proceed, first, INITIAL, s.multiplied)
                s = s.next(direction=direction, multiplied=None)
            else:
                s = s.next(
                    model=fed.call(self.solve, first, INITIAL, s.multiplied),
                    direction=None,
                    multiplied=None,
                )
            yield s

    def _added(self, fed: Fed, s: Lapping, client: str) -> Lapping:
        """Return the state with the client's part in the sums of the lap."""
        if s.direction is None:
            return replace(
                s, opening=fed.sum(self.open, [client], INITIAL, s.chosen, plus=s.opening)
            )
        return replace(
            s, multiplied=fed.sum(self.multiply, [client], INITIAL, s.direction, plus=s.multiplied)
        )

    @on_client(gives="summary")
    def choose(self, client: Client, model: Weights) -> Chosen:
        """Settle the features from some of the client's samples."""
        settled = self.settled_by(client, model).tell()
        phi = self._whole(client, model, settled)
        client.work.forward += len(phi)
        chosen = Chosen(settled, phi.double().mean(0).round().to(torch.int8))
        client.state = Kept(chosen)
        return chosen

    @on_client(gives="sum")
    def open(
        self, client: Client, model: Weights, chosen: Chosen, before: OpeningSums | None
    ) -> OpeningSums:
        """Add products with labels and moments to those received."""
        # Otherwise its features were computed and counted when it chose them.
        if client.state is None:
            client.work.forward += client.n
        client.state = Kept(chosen)
        phi = self._whole(client, model, chosen.settled)
        y = self._counted(client, self.summed(client))
        centre = chosen.centre
        if forms([centre]) != [(phi.shape[1:], torch.int8)]:
            raise UserError(
                "the features received are of another kind than here: use the same method and data "
                "kind"
            )
        width = phi.shape[1]
        sums = torch.zeros(width, y.shape[1] + 2, dtype=torch.float64, device=phi.device)
        for block, of in zip(torch.split(phi, _ROWS), torch.split(y, _ROWS), strict=True):
            x = block.double() - centre
            products = x.T @ of.double()
            sums += torch.column_stack([products, x.sum(0), x.square().sum(0)])
        held = self._labels(self._counted(client, self.summed(client, held_out=True)))
        own = OpeningSums(self._columns(sums), self._labels(y), held)
        kind = (width, y.shape[1], isinstance(client.task, Classification))
        return client.added(before, own, chosen, lambda sums: sums.checked(*kind))

    @on_client(gives="summary")
    def begin(self, client: Client, model: Weights, chosen: Chosen, totals: OpeningSums) -> Tensor:
        """Return the first directions, from the totals of the first lap."""
        problem = self._problem(totals, client)
        self.check_classes(problem.labels.targets, client.task)
        step = self._preconditioner(client, model, chosen, problem)(problem.products)
        client.state = Kept(chosen, opening=totals)
        return next_directions(
            step, None, problem.scale, _rank(client.task, client.classes, len(chosen.centre))
        )

    @on_client(gives="sum")
    def multiply(
        self, client: Client, model: Weights, direction: Tensor, before: Multiplied | None
    ) -> Multiplied:
        """Add the client's part of the Gram matrix times the directions to that received."""
        kept = _kept(client)
        width = len(kept.chosen.centre)
        count = _rank(client.task, client.classes, len(kept.chosen.centre))
        if forms([direction]) != [((width, count), torch.int8)]:
            raise UserError(
                "the directions received are of other features: use the same method and data kind"
            )
        kept = kept._replace(directions=(*kept.directions, direction))
        client.state = kept
        phi = self._whole(client, model, kept.chosen.settled)
        u = direction.to(self._precision)
        centre = kept.chosen.centre.to(self._precision)
        sums = self._sent(torch.zeros(width, count, dtype=torch.float64, device=phi.device))
        for block in torch.split(phi, _ROWS):
            x = block.to(u) - centre
            sums += self._sent(x.T @ (x @ u))
        own = Multiplied(self._columns(sums), self._held(client, model, kept))
        return client.added(
            before, own, (kept.chosen, kept.directions), lambda sums: sums.checked(own)
        )

    @on_client(gives="summary")
    def proceed(self, client: Client, model: Weights, totals: Multiplied) -> Tensor:
        """Return further directions, from the totals of one more lap."""
        span, chosen = self._span(client, totals)
        step = self._preconditioner(client, model, chosen, span.problem)(
            span.residual(span.solve(self.ridge))
        )
        return next_directions(
            step, span.stretched, span.problem.scale, totals.sums.matrix().shape[1]
        )

    @on_client(gives="nothing")
    def solve(self, client: Client, model: Weights, totals: Multiplied) -> Weights:
        """Return the network with the best classifier in the span of all directions."""
        span, chosen = self._span(client, totals)
        head = heads.outputs(span.solve(self.ridge), span.validation, client.task)
        network = client.network(model)
        features_of(network).adopt(chosen.settled)
        weight = head.weight @ span.directions.T
        bias = head.bias - weight @ (span.problem.mean + chosen.centre.cpu().double())
        return with_rows(network, torch.column_stack([weight, bias]))

    @property
    def exact(self) -> bool:
        """Whether sums travel as whole numbers."""
        return self.sums == "whole"

    @property
    def _precision(self) -> torch.dtype:
        """In which products of features and directions are computed: exact if they are to be
        whole.
        """
        if self.exact:
            return torch.float64
        return torch.float32

    def _unit(self, client: Client) -> int:
        """In what part of 1 targets are counted."""
        if self.exact:
            return client.task.unit
        return 1

    def _sent(self, sums: Tensor) -> Tensor:
        """Return sums in the type in which they travel."""
        if self.exact:
            return sums.long()
        return sums

    def _columns(self, sums: Tensor) -> Columns:
        if self.exact:
            return WholeColumns(sums.long())
        return ShortColumns.of(sums)

    def _labels(self, y: Tensor) -> Labels:
        """Return the sums over targets (n, K)."""
        found = Labels.of(y)
        return Labels(found.samples, self._sent(found.targets), self._sent(found.powers))

    def _counted(self, client: Client, subset: Subset) -> Tensor:
        """(n, K) float32, the targets; counted in steps if sums are whole."""
        y = self._targets(client, subset)
        if self.exact:
            y = (y * client.task.unit).round()
        return y

    def _targets(self, client: Client, subset: Subset) -> Tensor:
        y = subset.y.to(client.unit().device)
        return labels_as_targets(client.task, y, client.classes).float()

    def _held(self, client: Client, model: Weights, kept: Kept) -> HeldAnswers:
        """Return the sums over the client's validation samples."""
        phi = self._whole(client, model, kept.chosen.settled, held_out=True)
        y = self._counted(client, self.summed(client, held_out=True))
        if len(kept.directions) == 1:
            client.work.forward += len(phi)
        u = torch.cat(kept.directions, 1).to(self._precision)
        centre = kept.chosen.centre.to(self._precision)
        blocks = [(x.to(u) - centre) @ u for x in torch.split(phi, _ROWS)]
        answers = torch.cat(blocks).double()
        if self.exact:
            answers = (answers / answer_step(len(centre))).round()
        last = answers[:, -kept.directions[-1].shape[1] :]
        y = y.double()
        if not self.exact:
            return HeldAnswers(last.T @ answers, last.T @ y, last.sum(0))
        sums = []
        for f, g, of in zip(*(torch.split(t, _ROWS) for t in (last, answers, y)), strict=True):
            inner = (f.T @ g).long()
            products = (f.T @ of).long()
            sums.append(HeldAnswers(inner, products, f.sum(0).long()))
        return reduce(HeldAnswers.plus, sums)

    def _span(self, client: Client, totals: Multiplied) -> tuple[Span, Chosen]:
        """Return what the first client knows after one more lap."""
        kept = _kept(client)
        if kept.opening is None:
            raise UserError(
                f"{client.name} does not have the totals of the first lap: start the run again"
            )
        laps = (*kept.laps, totals.bounded(kept.opening))
        client.state = kept._replace(laps=laps)
        u = torch.cat(kept.directions, 1).cpu().double()
        images = torch.cat([lap.sums.matrix().cpu() for lap in laps], 1)
        unit = self._unit(client)
        held = [lap.answers(unit) for lap in laps]
        return Span(
            self._problem(kept.opening, client), u, images, held, kept.opening.held.real(unit)
        ), kept.chosen

    def _problem(self, opening: OpeningSums, client: Client) -> Problem:
        """Return the regression that the totals of the first lap describe."""
        if not opening.labels.samples:
            raise UserError("no client has training samples: no classifier can be made")
        unit = self._unit(client)
        sums = opening.sums.matrix().cpu()
        sums = torch.cat([sums[:, :-2] / unit, sums[:, -2:]], 1)
        return Problem.of(sums, opening.labels.real(unit))

    def _preconditioner(
        self, client: Client, model: Weights, chosen: Chosen, problem: Problem
    ) -> Preconditioner:
        """Return the preconditioner from this client's samples, at most 8192 of them."""
        phi = self._whole(client, model, chosen.settled)
        y = self._targets(client, self.summed(client))
        if not len(phi):
            raise UserError(
                f"{client.name} goes first, and has no class of {self.min_active} samples: let "
                "another client begin (--order)"
            )
        some = torch.randperm(len(phi), generator=torch.Generator().manual_seed(0))[:_OWN]
        own = phi[some].cpu().float() - chosen.centre.cpu().float()
        of = y[some].cpu()
        name = f"factor {_digest((*chosen.settled, problem.products, problem.scale))}"
        return Preconditioner(
            own, of, problem, self.damping, lambda make: client.remember(name, make)
        )

    def _whole(
        self, client: Client, model: Weights, settled: Settled, *, held_out: bool = False
    ) -> Tensor:
        """Return features (n, D) int8 of the client's training or validation samples; callers count
        the passes.
        """
        subset = self.summed(client, held_out=held_out)

        def make() -> Tensor:
            features = self.adopted(client, model, settled)
            with torch.no_grad():
                rows = [
                    features(x).to(torch.int8)
                    for x, _ in client.batches(subset, passes=0, shuffle=False)
                ]
            phi = torch.cat(rows) if rows else torch.zeros(0, features.width, dtype=torch.int8)
            if not self.min_active:
                return phi
            if held_out:
                return phi * (self._whole(client, model, settled) != 0).any(0)
            return phi * self.active(phi)

        part = "validation" if held_out else "training"
        return client.remember(f"{part} {_digest(settled)}", make)

    def steps(self, clients: int) -> int:
        """T laps of N hops."""
        return self.laps * clients

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·(S + D + (K + 2)(2D + 4) + 32K + 16 + Σ_t R(3D + 4 + 8(tR + K + 1))), with t from
        1 to T - 1.

        With whole numbers, 8D instead of 2D + 4, and 9D instead of 3D + 4.

        S is what is settled about the features, see FedGram. R is K - 1 for classes, else K, and at
        most D.
        """
        return (clients - 1) * self.handed_on(model)

    def told(self, width: int, classes: int, task: Task) -> int:
        """Return the bytes of all that a client hands on, without what is settled about the
        features.
        """
        r = _rank(task, classes, width)
        column = 2 * width + 4
        if self.exact:
            column = 8 * width
        first = width + (classes + 2) * column + 32 * classes + 16
        return first + sum(
            r * (width + column + 8 * (t * r + classes + 1)) for t in range(1, self.laps)
        )


def _rank(task: Task, outputs: int, width: int) -> int:
    """R, the directions of a lap: one for each output; one-hot targets sum to 1, so one class
    follows from others.
    """
    return max(1, min(width, outputs - isinstance(task, Classification)))


def _kept(client: Client) -> Kept:
    kept = cast(Kept | None, client.state)
    if kept is None:
        raise UserError(
            f"{client.name} does not have what it kept in the first lap: start the run again"
        )
    return kept


def _digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
