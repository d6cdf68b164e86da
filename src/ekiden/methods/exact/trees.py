"""Boosted trees and forests, equal to those of pooled data, from histograms that clients add up."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden.authoring import (
    INITIAL,
    VECTORS,
    Client,
    Count,
    CountOrZero,
    Fed,
    Fraction,
    NonNegative,
    Range,
    Ref,
    Size,
    State,
    Task,
    Traits,
    UserError,
    Weights,
    on_client,
    require,
)
from ekiden.core.base.settings import derive
from ekiden.core.base.sums import fixed, real
from ekiden.core.engine import wire
from ekiden.core.models.tables_and_texts import Indicators
from ekiden.core.tasks import Classification, MultiLabel
from ekiden.core.training.network import Network
from ekiden.methods.blocks.sums import WholeSums, WithoutModel
from ekiden.methods.blocks.tables import TableMethod

_CELLS = 1024  # of the grid on which quantiles are found
_SAMPLES = 2**24  # of all clients; sums of fewer have room
# float64 adds up whole numbers below it in any order
_WHOLE = 2.0**53
# Groups of more rows are unions of groups of so many
_BASE = 10
# outputs and targets of regression; differences of them have room in fixed point
_FARTHEST = 2.0**9
_LEAST_GAIN = 1e-6  # as XGBoost has it
# A threshold that no number exceeds: a node that is not split
_FAR = 1e30


@dataclass(frozen=True, eq=False)
class Histogram(WholeSums):
    """Sums over samples."""

    # (D, 1024) int64 samples in each cell of the grid, in the first two laps; then (P, V, m, B, 2C)
    # int64 gradients and
    # second derivatives in units of 2^-28, for each node, each of its columns and each bin
    cells: Tensor
    labels: Tensor  # (C,) or (K,) int64 samples with each label, in these laps; then empty


class Bins(NamedTuple):
    """What follows from the first lap, whose bins are 1,024 cells, and from the second."""

    # (D, B - 1) float32, ascending; bin b has the numbers above edge b - 1 and up to edge b
    edges: Tensor
    base: Tensor  # (C,) float64, the output before the first tree


class Splits(NamedTuple):
    """One more level of the P trees of a round."""

    column: Tensor  # (P, V) int64, which column decides at each node
    # (P, V) int64, the number of the edge up to which samples go left; B - 1: all do, the node is
    # not split
    edge: Tensor
    # (P, 2V, C) float32, outputs of the leaves after the last level; otherwise (P, 0, C)
    leaves: Tensor


@dataclass(frozen=True, eq=False)
class Growing:
    """What a client keeps between laps."""

    told: int  # how many laps it has heard of; see `Trees.run`
    edges: Tensor  # of the bins; see `Bins`
    base: Tensor  # the output before the first tree
    bins: Tensor  # (n, D) uint8, the bin of each number of the training samples
    output: Tensor  # (n, C) float64, the sum of all leaves for each training sample
    node: Tensor  # (n, P) int64, the node of each sample in the trees of this round
    column: Tensor  # (R·P, 2^d - 1) int64, columns of the nodes so far
    edge: Tensor  # (R·P, 2^d - 1) int64, their edges
    leaves: Tensor  # (R·P, 2^d, C) float32
    seed: int  # of the columns that nodes choose among


@dataclass(frozen=True)
class Adding(WithoutModel):
    """The state with the sums so far and the news of the last lap."""

    news: Ref[Bins] | Ref[Splits] | None = None
    sums: Ref[Histogram] | None = None


class Forest(nn.Module):
    """Complete binary trees whose leaves are added up.

    Attributes:
        codes: how many of the last columns are codes of categories.
        column: (T, 2^d - 1) int64, which column decides at each node; the two nodes below node v
            are 2v + 1 and 2v + 2.
        threshold: (T, 2^d - 1) float32; up to it samples go left.
        leaves: (T, 2^d, C) float32, a parameter.
        base: (C,) float32.
        seed: () int64, drawn by the run's seed, of the columns that nodes choose among.
    """

    column: Tensor
    threshold: Tensor
    base: Tensor
    seed: Tensor

    def __init__(
        self, width: int, codes: int, trees: int, depth: int, classes: int, each: int
    ) -> None:
        super().__init__()
        self.width = width
        self.codes = codes
        self.depth = depth
        self.classes = classes
        inner = 2**depth - 1
        self.register_buffer("column", torch.zeros(trees, inner, dtype=torch.int64))
        self.register_buffer("threshold", torch.full((trees, inner), _FAR))
        self.register_buffer("base", torch.zeros(each))
        self.register_buffer("seed", torch.randint(2**62, ()))
        self.leaves = nn.Parameter(torch.zeros(trees, 2**depth, each))

    def forward(self, x: Tensor) -> Tensor:
        """(b, ...) to (b, K) logits, or standardised numbers."""
        x = x.flatten(1).float()
        tree = torch.arange(len(self.column), device=x.device)
        node = torch.zeros(x.shape[0], len(tree), dtype=torch.int64, device=x.device)
        for _ in range(self.depth):
            right = x.gather(1, self.column[tree, node]) > self.threshold[tree, node]
            node = 2 * node + 1 + right.long()
        found = self.leaves[tree, node - (2**self.depth - 1)].sum(1) + self.base
        return F.pad(found, (1, 0)) if found.shape[1] < self.classes else found


@dataclass(frozen=True)
class Trees(TableMethod):
    """Clients add up histograms of gradients, from which the last one grows boosted trees or a
    forest, level by level.

    Tianqi Chen, Carlos Guestrin: XGBoost: A Scalable Tree Boosting System. KDD 2016.
    https://arxiv.org/abs/1603.02754 (equations 6 and 7; histograms as in section 3.3). Splits of
    random forests from sums of clients: Rémi Khellaf et al.: Principled Federated Random Forests
    for Heterogeneous Data (FedForest). 2026. https://arxiv.org/abs/2602.03258.

    A round grows P trees at the same time, each on columns of its own. With P = 1 that is boosting;
    with one round it is a random forest of the second-order objective. A tree of depth d takes d
    laps, however many grow together. Histograms are whole numbers, so that the trees are those of
    pooled data, bit for bit.

    Departures from the paper: bins are quantiles of all samples, of a grid that is refined once,
    and the same in all nodes. A tree has one leaf value for each class, and splits for all of them.
    All nodes of a level are split that gain by it. Samples are not drawn; trees of a round differ
    by their columns. Columns with gaps say so in another column. Rows are grouped by the ranks of
    their numbers. There is no early stopping or pruning. FedForest also splits on which client a
    row comes from; we read only its abstract.
    """

    rounds: Count = 10
    """R, how many times trees are grown on what the trees before left to explain"""
    trees: Count = 10
    """P, trees that grow at the same time in each round; each counts one P-th"""
    depth: Annotated[int, Range(least=1, most=12)] = 4
    """d, levels of a tree, which has 2^d leaves at most"""
    bins: Annotated[int, Range(least=2, most=256)] = 16
    """B, bins of each column"""
    columns: Fraction = 0.5
    """m/D, share of the columns among which a node chooses; they are drawn for each node"""
    shrinkage: Fraction = 0.5
    """η, the share of each round's step that is taken"""
    ridge: NonNegative = 1.0
    """λ, added to the second derivatives of a leaf"""
    min_hessian: NonNegative = 1.0
    """least sum of second derivatives in a leaf: samples in regression, p(1 - p) of them in
    classification"""
    min_active: CountOrZero = 0
    """k; a client replaces its samples by the means of groups of k or more similar ones, and knows
    labels only by group. With 0 it does not, and the trees are those of pooled data"""
    order: str = "given"
    """order of the clients: given, reversed, random, or names separated by commas; the last one
    grows the trees"""

    traits = Traits(private=Growing, averages=False, needs=VECTORS)

    @property
    def least(self) -> int:
        """K."""
        return self.min_active

    def __post_init__(self) -> None:
        """Refuse trees that would all be the same."""
        require(
            self.trees == 1 or self.columns < 1,
            "columns",
            self.columns,
            "below 1, unless --trees=1",
        )

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: Task
    ) -> nn.Module:
        """Return trees that are not split yet."""
        features = self.columns_of(network, shape, classes).features
        codes = len(features.levels) if isinstance(features, Indicators) else 0
        each = 1 if classes == 2 and isinstance(task, Classification) else classes
        return Forest(
            torch.Size(shape).numel(), codes, self.rounds * self.trees, self.depth, classes, each
        )

    def run(self, fed: Fed, s: Adding) -> Iterator[State]:
        """Yield the state after each hop. A lap ends at the last client, which chooses bins, splits
        and leaves.

        The first two laps count samples in cells of a grid; each other one adds up the histograms
        of one level.
        """
        order = fed.order(self.order)
        laps = 2 + self.rounds * self.depth
        first = (self.count, self.count, self.begin)
        while s.step < self.steps(len(order)):
            lap, hop = divmod(s.step, len(order))
            client = order[hop]
            news = s.news
            sums: Ref[Histogram]
            if lap < len(first):
                sums = fed.sum(first[lap], [client], INITIAL, news, plus=s.sums)
            else:
                sums = fed.sum(self.grow, [client], news, plus=s.sums)
            if hop < len(order) - 1:
                s = s.next(sums=sums)
            elif lap < 2:
                s = s.next(news=fed.call(self.bin, client, INITIAL, news, sums), sums=None)
            elif lap < laps - 1:
                s = s.next(news=fed.call(self.split, client, sums), sums=None)
            else:
                s = s.next(model=fed.call(self.finish, client, INITIAL, sums), news=None, sums=None)
            yield s

    @on_client(gives="sum")
    def count(
        self, client: Client, model: Weights, grid: Bins | None, before: Histogram | None
    ) -> Histogram:
        """Add the client's samples in each cell of the grid, at first of one that suits any
        numbers, and with each label, to those received.
        """
        forest = cast(Forest, client.network(model))
        x, y = self._samples(client, forest)
        if grid is None:
            edges = _ends()[1:-1].repeat(forest.width, 1)
            grid = Bins(edges.to(x.device), forest.base.double())
        cell = _binned(forest, grid, _CELLS, x)
        cell = cell + _CELLS * torch.arange(forest.width, device=x.device)[:, None]
        counts = torch.bincount(cell.flatten(), minlength=_CELLS * forest.width).view(-1, _CELLS)
        own = Histogram(counts, client.task.counts(y, client.classes).to(x.device))
        return client.added(before, own, grid)

    @on_client(gives="nothing")
    def bin(self, client: Client, model: Weights, grid: Bins | None, totals: Histogram) -> Bins:
        """Return a finer grid, or bins of about as many samples each, and the outputs that fit best
        without trees.
        """
        forest = cast(Forest, client.network(model))
        below = totals.cells.cpu().cumsum(1)
        if grid is None:
            edges = _refined(below.double())
        else:
            ranks = below[:, -1:] * torch.arange(1, self.bins) / self.bins
            place = torch.searchsorted(below.double(), ranks.double()).clamp(max=_CELLS - 2)
            edges = grid.edges.cpu().gather(1, place)
        labels = totals.labels.cpu().double() + 0.5
        base = torch.zeros(forest.base.numel(), dtype=torch.float64)
        if isinstance(client.task, Classification):
            found = (labels * torch.tensor(client.task.weights or 1.0, dtype=torch.float64)).log()
            # of two classes the trees tell one logit, else one of each class
            first = found.mean()
            if len(base) < len(found):
                first, found = found[0], found[1:]
            base = found - first
        elif isinstance(client.task, MultiLabel):
            base = (labels / (below[0, -1] + 1 - labels)).log()
        return Bins(edges, base.float().double())

    @on_client(gives="sum")
    def begin(
        self, client: Client, model: Weights, bins: Bins, before: Histogram | None
    ) -> Histogram:
        """Set the bins, and add the histograms of the first level."""
        forest = cast(Forest, client.network(model))
        x, y = self._samples(client, forest)
        found = _binned(forest, bins, self.bins, x).T.to(torch.uint8)
        output = bins.base.repeat(len(x), 1)
        node = torch.zeros(len(x), self.trees, dtype=torch.int64, device=x.device)
        column = torch.zeros_like(forest.column)
        edge = torch.full_like(forest.column, self.bins - 1)
        leaves = forest.leaves.detach().clone()
        seed = int(forest.seed)
        client.state = Growing(1, *bins, found, output, node, column, edge, leaves, seed)
        return client.added(before, self._histogram(client, client.state, y), bins)

    @on_client(gives="sum")
    def grow(self, client: Client, news: Splits, before: Histogram | None) -> Histogram:
        """Split as was chosen, and add the histograms of the next level."""
        client.state = self._told(client.state, news)
        s: Growing = client.state
        own = self._histogram(client, s, self._labels(client))
        heard = (s.edges, s.base, s.column, s.edge, s.leaves)
        return client.added(before, own, heard)

    @on_client(gives="nothing")
    def split(self, client: Client, totals: Histogram) -> Splits:
        """Return the best splits that follow from the totals; after the last level of a round also
        the leaves.
        """
        return self._best(client.state, totals)

    @on_client(gives="nothing")
    def finish(self, client: Client, model: Weights, totals: Histogram) -> Weights:
        """Return the trees, with the last level that follows from the totals."""
        news = wire.placed(self._best(client.state, totals), totals.cells.device)
        grown = self._told(client.state, news)
        forest = cast(Forest, client.network(model))
        edges = F.pad(grown.edges, (0, 1), value=_FAR)
        with torch.no_grad():
            forest.column.copy_(grown.column)
            forest.threshold.copy_(edges[grown.column, grown.edge])
            forest.base.copy_(grown.base)
            forest.leaves.requires_grad_(True).copy_(grown.leaves)
        return Network(forest, forest.leaves.device).weights()

    def _samples(self, client: Client, forest: Forest) -> tuple[Tensor, Tensor]:
        """Return the numbers (n, D) float32 of the samples or of their groups, and labels; no pass
        is made.
        """
        y = self._labels(client)
        x = client.unit().flatten(1)[:0].float()
        if len(y):
            batches = client.batches(passes=0, shuffle=False)
            x = torch.cat([x.flatten(1).float() for x, _ in batches])
        if self.min_active and len(x):
            x = grouped(x.cpu().double(), self.min_active, forest.codes).to(x)
        return x, y

    def _labels(self, client: Client) -> Tensor:
        """Return the labels of the client's samples; of fewer than k none."""
        y = client.data.train.y.to(client.unit().device)
        return y if len(y) >= self.min_active else y[:0]

    def _histogram(self, client: Client, s: Growing, y: Tensor) -> Histogram:
        """Return the sums of a client in each node, over the columns drawn for it and their
        bins.
        """
        drawn = self._drawn(s).to(y.device)
        stats = _derivatives(client.task, s.output, y)
        _, nodes, among = drawn.shape
        shape = (*drawn.shape, self.bins, stats.shape[1])
        cells = torch.zeros(shape, dtype=torch.int64, device=y.device)
        count = nodes * among * self.bins
        starts = torch.arange(0, count, self.bins, device=y.device).view(nodes, among)
        for tree, columns in enumerate(drawn):
            node = s.node[:, tree]
            # n·m
            at = (starts[node] + s.bins.gather(1, columns[node])).flatten()
            for k, part in enumerate(stats.T):
                sums = torch.bincount(at, part.repeat_interleave(among), count)
                cells[tree, ..., k] = sums.view(nodes, among, self.bins)
        return Histogram(cells, s.node.new_zeros(0))

    def _drawn(self, s: Growing) -> Tensor:
        """Return the columns (P, V, m) among which each node of this lap chooses, ascending."""
        width = len(s.edges)
        draw = torch.Generator().manual_seed(derive(s.seed, s.told))
        nodes = 2 ** ((s.told - 1) % self.depth)
        noise = torch.rand(self.trees, nodes, width, generator=draw)
        shuffled = noise.argsort(dim=2, stable=True)
        first: Tensor = shuffled[:, :, : self._among(width)].sort(2).values
        return first

    def _among(self, width: int) -> int:
        """Return m, for so many columns."""
        return max(1, round(self.columns * width))

    def _best(self, s: Growing, totals: Histogram) -> Splits:
        """Return the splits with the largest gains (equation 7); the first of equal ones."""
        cells = real(totals.cells.cpu())
        cells = cells.view(*cells.shape[:4], 2, -1)  # (P, V, m, B, 2, C)
        left = cells.cumsum(3)[:, :, :, :-1]
        # The same for all columns.
        whole = cells[:, :, :1].sum(3, keepdim=True)
        right = whole - left
        gain = self._score(left) + self._score(right) - self._score(whole)  # (P, V, m, B - 1)
        # the mean second derivative of the outputs, on the side that has less of it
        lighter = torch.minimum(left[..., 1, :].mean(-1), right[..., 1, :].mean(-1))
        room = lighter >= max(self.min_hessian, 1e-12)
        gain = torch.where(room, gain, -1.0).flatten(2)
        best = gain.argmax(2)
        splits = gain.amax(2) > _LEAST_GAIN
        edges = self.bins - 1
        place = (best // edges)[:, :, None]
        column = self._drawn(s).gather(2, place)[:, :, 0] * splits
        edge = torch.where(splits, best % edges, edges)
        if cells.shape[1] < 2 ** (self.depth - 1):
            return Splits(column, edge, torch.zeros(self.trees, 0, cells.shape[5]))
        whole = whole[:, :, 0, 0]
        place = best[:, :, None, None, None]
        left = left.flatten(2, 3).take_along_dim(place, 2)[:, :, 0]
        left = torch.where(splits[:, :, None, None], left, whole)
        both = torch.stack([left, whole - left], 2).flatten(1, 2)
        below = self._step(both)  # (P, 2V, C)
        leaves = -self.shrinkage / self.trees * below
        return Splits(column, edge, leaves.float())

    def _score(self, sums: Tensor) -> Tensor:
        """Return Σ G²/(H + λ) over the outputs, of sums (..., 2, C)."""
        return (sums[..., 0, :] * self._step(sums)).sum(-1)

    def _step(self, sums: Tensor) -> Tensor:
        """Return G/(H + λ); 0 where there is nothing."""
        curved = sums[..., 1, :] + self.ridge
        return torch.where(curved > 0, sums[..., 0, :] / curved.clamp(min=1e-12), 0.0)

    def _told(self, s: Growing, news: Splits) -> Growing:
        """Return what a client knows with one more level."""
        turn, level = divmod(s.told - 1, self.depth)
        last = level == self.depth - 1
        nodes = 2**level
        trees = slice(turn * self.trees, (turn + 1) * self.trees)
        shape = (self.trees, nodes)
        leaves = (self.trees, 2 * nodes * last, s.leaves.shape[2])
        told = (news.column.shape, news.edge.shape, tuple(news.leaves.shape))
        if told != (shape, shape, leaves):
            raise UserError(
                "the splits received are of other trees: use the same version of Ekiden everywhere"
            )
        here = slice(nodes - 1, 2 * nodes - 1)
        grown = replace(s, told=s.told + 1, column=s.column.clone(), edge=s.edge.clone())
        grown.column[trees, here] = news.column
        grown.edge[trees, here] = news.edge
        if last:
            grown = replace(grown, leaves=s.leaves.clone())
            grown.leaves[trees] = news.leaves
        tree = torch.arange(self.trees, device=s.node.device)
        found = s.bins.gather(1, news.column[tree, s.node])  # (n, P)
        node = 2 * s.node + (found > news.edge[tree, s.node]).long()
        if not last:
            return replace(grown, node=node)
        output = s.output
        # One after the other, in the same order everywhere.
        for each in range(self.trees):
            output = output + news.leaves[each, node[:, each]].double()
        return replace(grown, node=torch.zeros_like(node), output=output)

    def steps(self, clients: int) -> int:
        """(2 + R·d) laps of N hops."""
        return (2 + self.rounds * self.depth) * clients

    def cost(self, clients: int, model: Size) -> int:
        """(N - 1)·(16(1024·D + K + C) + 4D(B + 1022)
        + R·(16P(2^d - 1)(m·B·C + 1) + 4P·2^d·C) - last).

        D columns, of which a node sees m, C outputs of the trees (1 for two classes, otherwise K),
        and `last`, the splits of the last level, which need not travel: 8P·2^d + 4P·2^d·C.
        """
        forest = cast(Forest, model.network.module)
        width = forest.width
        each = forest.base.numel()
        top = 1 << self.depth
        grid = 16 * (_CELLS * width + forest.classes + each) + 4 * width * (self.bins + _CELLS - 2)
        levels = 16 * self.trees * (top - 1) * (self._among(width) * self.bins * each + 1)
        leaves = 4 * self.trees * top * each
        last = 8 * self.trees * top + leaves
        return (clients - 1) * (grid + self.rounds * (levels + leaves) - last)


def _ends() -> Tensor:
    """Return the ends (1025,) float32 of the first cells: 8 of equal width from each power of 2 to
    the next.
    """
    # The numbers from 2^-32 to 2^32 of which all bits after the first three of the fraction are 0
    ends = (torch.arange(760, 1272, dtype=torch.int32) << 20).view(torch.float32)
    return torch.cat([-ends.flip(0), torch.zeros(1), ends])


def _refined(below: Tensor) -> Tensor:
    """Return the edges (D, 1023) of as many cells, into which the first ones are divided in
    proportion to their samples.

    Whatever the scale, and wherever a value far from all others has moved the mean, cells are where
    samples are.

    Args:
        below: (D, 1024) float64, samples up to the end of each cell.
    """
    ends = _ends().double()
    ranks = below[:, -1:] * torch.arange(1, _CELLS) / _CELLS
    cell = torch.searchsorted(below, ranks)
    start = F.pad(below, (1, 0)).gather(1, cell)
    share = (ranks - start) / (below.gather(1, cell) - start).clamp(min=1)
    return (ends[cell] + share * (ends[cell + 1] - ends[cell])).float()


def _binned(forest: Forest, bins: Bins, count: int, x: Tensor) -> Tensor:
    """Return the bin (D, n) of each number; there are so many bins of each column."""
    fits = (forest.width, count - 1), forest.base.shape
    if (tuple(bins.edges.shape), bins.base.shape) != fits or bins.base.dtype != torch.float64:
        raise UserError(
            "the bins received are of other columns: use the same data schema everywhere"
        )
    return torch.searchsorted(bins.edges, x.T.contiguous())


def grouped(x: Tensor, least: int, codes: int) -> Tensor:
    """Return for each sample the means of its group of similar ones; of codes, the most frequent.

    A group is divided at the median of the column that varies most in it, of those of which both
    parts have 10 samples, as long as both parts have `least`: Kristen LeFevre, David DeWitt, Raghu
    Ramakrishnan: Mondrian Multidimensional K-Anonymity. ICDE 2006.
    https://doi.org/10.1109/ICDE.2006.101.

    Args:
        x: (n, D) float64, at least `least` samples.
        least: k.
        codes: how many of the last columns are codes.
    """
    # Numbers are sorted before they are added up, so that nothing depends on the order of the
    # samples, and on which
    # sample of a group has which number.
    columns = x.T.contiguous()
    # Ranks, because one number far from all others would leave its column without any weight
    scaled = torch.searchsorted(columns.sort().values, columns).T.double()
    scaled /= scaled.sort(0).values.std(0, correction=0).clamp(min=1e-12)
    found = x.clone()
    open_ = [torch.arange(len(x))]
    while open_:
        rows = open_.pop()
        halves = _halves(scaled[rows], least) if len(rows) >= 2 * least else None
        if halves is None:
            here = x[rows].sort(0).values
            middle = here.mean(0)
            if codes:
                middle[-codes:] = here[:, -codes:].mode(0).values
            found[rows] = middle
        else:
            open_ += [rows[halves], rows[~halves]]
    return found


def _halves(x: Tensor, least: int) -> Tensor | None:
    """Return which samples go to the first half; None if they stay together.

    The column does not depend on `least` from `_BASE` on. Otherwise a run with another k would have
    groups that differ in single samples from those before.
    """
    middle = x.median(0).values
    variance = x.sort(0).values.var(0, correction=0)
    for column in variance.argsort(descending=True, stable=True).tolist():
        for first in (x[:, column] <= middle[column], x[:, column] < middle[column]):
            smaller = min(int(first.sum()), int((~first).sum()))
            if smaller >= min(least, _BASE):
                return first if smaller >= least else None
    return None


def _derivatives(task: Task, output: Tensor, y: Tensor) -> Tensor:
    """Return first and second derivatives (n, 2C) of the loss by the trees' outputs (n, C), in
    units of 2^-28, float64.

    Rows are computed apart from each other, so that their bits do not depend on how samples are
    divided.
    """
    if isinstance(task, Classification):
        two = output.shape[1] == 1
        scores = output
        if two:
            scores = F.pad(output, (1, 0))
        p = scores.softmax(1)
        first = p - F.one_hot(y, p.shape[1])
        second = p * (1 - p)
        if task.weights:
            weights = torch.tensor(task.weights, dtype=torch.float64, device=y.device)
            first = first * weights[y][:, None]
            second = second * weights[y][:, None]
        if two:
            first = first[:, 1:]
            second = second[:, 1:]
        else:
            second = 2 * second
    elif isinstance(task, MultiLabel):
        p = torch.stack([torch.zeros_like(output), output], 2).softmax(2)[:, :, 1]
        first = p - y
        second = p * (1 - p)
    else:
        targets = task.targets(y, output.shape[1])
        # Each by itself: whether their difference has room would tell others, who choose outputs, a
        # record's target.
        for what, numbers in (("an output of the trees received", output), ("a target", targets)):
            if not (numbers.abs() < _FARTHEST).all():
                raise UserError(
                    f"{what} is {_FARTHEST:g} or more standard deviations from the mean: correct "
                    "the data"
                )
        first = output - targets
        second = torch.ones_like(first)
    found = fixed(torch.cat([first, second], 1), _SAMPLES, "gradients").double()
    if not (found.abs().sum(0) < _WHOLE).all():
        raise UserError(
            "the sums of gradients have no room: a target is too far from the others, or rows are "
            "too many"
        )
    return found
