"""FedTasuki: one-shot sequential learning that distils from the received model, weighted by sample
counts.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt, prod
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    NUMBERS,
    BelowOne,
    Client,
    Count,
    Fed,
    Positive,
    Size,
    State,
    Training,
    Traits,
    UserError,
    Weights,
    on_client,
    require,
)
from ekiden.core.base.settings import seeded
from ekiden.core.engine import wire
from ekiden.core.tasks import Need
from ekiden.core.training.weights import Layer
from ekiden.methods.blocks.distillation import Distillation, Form, Invent, scrambled
from ekiden.methods.blocks.rounds import OrderedMethod

# The part of a model's bytes that its class statistics may take
SHARE = 0.05
# weights of the two ridges, relative to the mean variance: features of one client have no variance
# in many directions, so without them those would count as exactly known
_RIDGE = 0.01
_SHRINK = 0.05
# Most cells along a side of a mean image: on CIFAR-10 32 gained nothing over 8
_GRID = 8


class ClassStatistics(NamedTuple):
    """A Gaussian for each class, all with the covariance D + F Fᵀ."""

    counts: Tensor  # (K,) int64, number of samples
    means: Tensor  # (K, A) of their features; zeros for a class without samples
    diagonal: Tensor  # (A,) D, the part of the variances that F leaves
    factor: Tensor  # (A, r) F, the leading directions within classes

    def moments(self, classes: int, features: int) -> "ClassMoments":
        """Return the statistics as full matrices."""
        shapes = [tuple(part.shape) for part in self]
        shapes[3] = shapes[3][:-1]
        if shapes != [(classes,), (classes, features), (features,), (features,)]:
            raise UserError(
                f"class statistics of shapes {shapes} do not fit this network of {classes} classes "
                f"and {features} features: use the same model at every client"
            )
        factor = self.factor.double()
        return ClassMoments(
            self.counts.double(),
            self.means.double(),
            self.diagonal.double().diag() + factor @ factor.T,
        )


class ClassMoments(NamedTuple):
    """Class statistics for computing, in double precision."""

    counts: Tensor  # (K,)
    means: Tensor  # (K, A)
    covariance: Tensor  # (A, A), the covariance within classes, a mean over all samples

    def moved(self, before: Tensor, after: Tensor) -> "ClassMoments":
        """Return the statistics of moved features, by the linear map that best takes `before` to
        `after` (n, A).

        The map is the identity and a ridge regression of what is left.
        """
        x = before.double()
        y = after.double()
        x = x - (centre := x.mean(0))
        y = y - (target := y.mean(0))
        gram = x.T @ x
        eye = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        ridge = _RIDGE * gram.diagonal().mean() + 1e-9
        # f ↦ target + (f - centre) A with A = I + (XᵀX + λI)⁻¹Xᵀ(Y - X), so that unseen directions
        # stay as they are
        change = eye + torch.linalg.solve(gram + ridge * eye, x.T @ (y - x))
        present = (self.counts > 0)[:, None]
        means = torch.where(present, (self.means - centre) @ change + target, self.means)
        return ClassMoments(self.counts, means, change.T @ self.covariance @ change)

    def without(self, counts: Tensor) -> "ClassMoments":
        """Return the same moments with fewer samples of each class."""
        return self._replace(counts=(self.counts - counts.to(self.counts)).clamp(min=0))

    def merged(self, other: "ClassMoments") -> "ClassMoments":
        """Return the statistics of the samples of both."""
        counts = self.counts + other.counts
        share = (other.counts / counts.clamp(min=1))[:, None]
        apart = other.means - self.means
        # Σ n n'/(n + n')·(m - m')(m - m')ᵀ
        between = (apart * share * self.counts[:, None]).T @ apart
        within = self.counts.sum() * self.covariance + other.counts.sum() * other.covariance
        return ClassMoments(
            counts, self.means + share * apart, (within + between) / counts.sum().clamp(min=1)
        )

    def classifier(self) -> Tensor:
        """Return (K, A + 1) weights and biases of linear discriminant analysis: log n_k N(features;
        m_k, C) + constant.

        A class without samples counts as half of one in the middle of all.
        """
        eye = torch.eye(
            len(self.covariance), dtype=self.covariance.dtype, device=self.covariance.device
        )
        shrunk = self.covariance + (_SHRINK * self.covariance.diagonal().mean() + 1e-9) * eye
        middle = self.counts @ self.means / self.counts.sum()
        means = torch.where((self.counts > 0)[:, None], self.means, middle)
        rows = torch.linalg.solve(shrunk, means.T).T  # (K, A) C⁻¹ m_k
        bias = self.counts.clamp(min=0.5).log() - (rows * means).sum(1) / 2
        return torch.column_stack([rows, bias])

    def compressed(self, rank: int) -> ClassStatistics:
        """Return the statistics as they travel, with `rank` directions."""
        values, vectors = torch.linalg.eigh(self.covariance)
        first = len(values) - rank
        factor = vectors[:, first:] * values[first:].clamp(min=0).sqrt()
        rest = (self.covariance.diagonal() - factor.square().sum(1)).clamp(min=0)
        return ClassStatistics(
            self.counts.long(), self.means.float(), rest.float(), factor.float().contiguous()
        )


def measure(features: Tensor, labels: Tensor, classes: int) -> ClassMoments:
    """Return the class statistics of features (n, A) with these labels (n,)."""
    x = features.double()
    of = F.one_hot(labels, classes).double()
    counts = of.sum(0)
    means = of.T @ x / counts.clamp(min=1)[:, None]
    within = x - means[labels]
    return ClassMoments(counts, means, within.T @ within / len(x))


def rank(classes: int, features: int, model: int, taken: int = 0) -> int:
    """Return r, as many directions as fit into `SHARE` of a model of this many bytes, some of which
    are `taken`.

    The result is negative if not even the means fit.
    """
    room = int(SHARE * model) - taken - size(classes, features, 0)
    return min(room // (4 * features), features)


def size(classes: int, features: int, rank: int) -> int:
    """8K + 4A(K + 1 + r), bytes of class statistics."""
    return 8 * classes + 4 * features * (classes + 1 + rank)


class ClassInputs(NamedTuple):
    """The number of samples of each class, and their mean input."""

    counts: Tensor  # (K,) int64
    # (K, C, h, w) for images, averaged over the cells of a grid; (K, d) for other samples; zeros if
    # none
    means: Tensor

    def merged(self, other: "ClassInputs") -> "ClassInputs":
        """Return the means of the samples of both."""
        if self.means.shape != other.means.shape or self.counts.shape != other.counts.shape:
            raise UserError(
                "the class means are of other classes or inputs: use the same data and model "
                "everywhere"
            )
        return _weighed(self.counts + other.counts, self, other, 1)

    def without(self, other: "ClassInputs") -> "ClassInputs":
        """Return the means of the samples that are not in `other`."""
        return _weighed((self.counts - other.counts).clamp(min=0), self, other, -1)

    def moved(self, own: "ClassInputs", x: Tensor, y: Tensor) -> Tensor:
        """The client's own inputs (b, ...) of classes y (b,), each with the mean of its class
        replaced by one of these.

        Of which class is drawn by the counts.
        """
        drawn = torch.multinomial(self.counts.double(), len(x), replacement=True)
        change = self.means.to(x)[drawn] - own.means.to(x)[y]
        if x.ndim == 4:
            change = F.interpolate(change, size=x.shape[2:], mode="bilinear")
        return x + change


def _weighed(counts: Tensor, a: ClassInputs, b: ClassInputs, sign: int) -> ClassInputs:
    first = a.means.double() * along(a.counts, a.means)
    second = b.means.double() * along(b.counts, b.means)
    means = (first + sign * second) / along(counts.clamp(min=1), a.means)
    return ClassInputs(counts, means.float())


def along(counts: Tensor, means: Tensor) -> Tensor:
    """Return numbers of classes (K,) in a shape that multiplies means (K, ...)."""
    return counts.view(-1, *[1] * (means.ndim - 1))


def measure_means(
    batches: Iterable[tuple[Tensor, Tensor]], classes: int, shape: tuple[int, ...]
) -> ClassInputs:
    """Return class means, on the CPU, of samples in batches of inputs and labels; `shape` is from
    `mean_shape`.
    """
    counts = torch.zeros(classes, dtype=torch.int64)
    sums = torch.zeros(classes, *shape, dtype=torch.float64)
    for x, y in batches:
        if x.ndim == 4:
            x = F.adaptive_avg_pool2d(x, (shape[1], shape[2]))  # noqa: PLW2901
        counts += torch.bincount(y.cpu(), minlength=classes)
        sums.index_add_(0, y.cpu(), x.double().cpu())
    return ClassInputs(counts, (sums / along(counts.clamp(min=1), sums)).float())


def mean_shape(classes: int, shape: tuple[int, ...], model: int, taken: int = 0) -> tuple[int, ...]:
    """Return the shape of a class's mean input, the finest that fits into half of the rest of a
    model's `SHARE`.

    Args:
        classes: K.
        shape: of an input.
        model: its bytes.
        taken: bytes of that share which other statistics need.
    """
    room = (int(SHARE * model - taken) // 2 - 8 * classes) // (4 * classes)
    if len(shape) == 3:
        side = min(isqrt(max(room, 0) // shape[0]), _GRID)
        shape = (shape[0], min(side, shape[1]), min(side, shape[2]))
    if not 0 < prod(shape) <= room:
        raise UserError(
            f"--recall has no room for mean inputs of {classes} classes in half of {SHARE:.0%} of "
            "this model's bytes "
            "(with --statistics half of what these leave): leave it out, or take a larger network"
        )
    return shape


def size_of_means(classes: int, shape: tuple[int, ...]) -> int:
    """8K + 4K·(numbers of a mean), bytes of class means of this shape."""
    return 8 * classes + 4 * classes * prod(shape)


class TeacherHandoff(NamedTuple):
    """What a client hands to the next one."""

    model: Weights  # the model as trained so far
    seen: int  # N, the number of training samples that it was trained on
    # class statistics of these samples' features, if `statistics` is set
    statistics: ClassStatistics | None = None
    inputs: ClassInputs | None = None  # their mean input of each class, if `recall` is set


@dataclass(frozen=True)
class Passed(State):
    """The state with the clients whose samples the model was trained on."""

    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class FedTasuki(OrderedMethod):
    """One-shot sequential learning that distils from the received model, weighted by sample counts.

    This library's own method, 2026; no claim of novelty is made.

    Its parts are known one by one: distilling from the model before (Zhizhong Li, Derek Hoiem:
    Learning without Forgetting. ECCV 2016. https://arxiv.org/abs/1606.09282), leaving out the true
    class (Gihun Lee, Minchan Jeong, Yongjin Shin, Sangmin Bae, Se-Young Yun: Preservation of the
    Global Knowledge by Not-True Distillation in Federated Learning. NeurIPS 2022.
    https://arxiv.org/abs/2106.03097), and averaging the last iterates.

    The loss over all samples so far is N times the mean over those of earlier clients plus n times
    the mean over the client's own. The former are out of reach. Instead the client matches the
    outputs of the received model, which counts N samples: cross-entropy + (N / n)·D. Earlier
    clients' samples differ from the client's own. So a share of each batch can be scrambled and
    only distilled (`widen`): then the two models agree on more than the client's data. With
    `recall` the mean input of each class travels, and a share of each batch is moved to the means
    of classes that earlier clients hold, and only distilled. The client hands on the mean of the
    iterates over the last part of the steps.

    Under label skew the classifier forgets more than the extractor. With `statistics` the mean of
    each class's features and their common covariance also travel (linear discriminant analysis; cf.
    Mi Luo, Fei Chen, Dapeng Hu, Yifan Zhang, Jian Liang, Jiashi Feng: No Fear of Heterogeneity.
    NeurIPS 2021. https://arxiv.org/abs/2106.05001). Each client moves them by the linear map from
    old to new features of its own and scrambled samples. The classifier computed from them is added
    to the last client's.

    Departures from the paper: there is no paper; docs/methods/fedtasuki.md has derivation and
    results. The first client has nothing to distil from and trains plainly. From the second pass on
    the received model has seen all clients, so N is the number of samples of all others: the total
    minus the client's own n.
    """

    epochs: Count = 150
    """E, epochs at each client; with augmented samples, 3 epochs cost as much as 4 plain ones,
    because of the teacher's passes"""
    divergence: Form = "both"
    """D: KL(q || p) between the student's answers p and the teacher's q; or half of it plus half of
    the same without the true class. In tasks other than classification, whatever the form, the
    task's distance between outputs: squared error of numbers, binary divergence of labels,
    divergence of each pixel or token"""
    distill_weighting: Literal["counts", "one", "hop"] = "counts"
    """λ, weight of D: N/n; for comparison 1, or the number of other clients behind the received
    model"""
    widen: BelowOne = 0.0
    """share of each batch that is replaced by rotated, shifted, mirrored and mixed images, which
    are only distilled"""
    recall: BelowOne = 0.0
    """share of each batch that is only distilled, with each input moved from the mean of its class
    to the mean of a class that earlier clients hold; these means travel, at most 2.5 % of M"""
    statistics: bool = False
    """also send class statistics, at most 5 % of M, and add the classifier computed from them to
    the last client's"""
    average_iterates: bool = True
    """hand on the mean of the last iterates (--tail of the steps); otherwise what --select says"""
    temperature: Positive = 1.0
    """τ, softens p and q; D is multiplied by τ²"""
    rounds: Count = 1
    """T, passes over all clients (shots); 1: one-shot"""
    order: str = "given"
    """order of the clients: given, reversed, random (redrawn each round), or names separated by
    commas"""

    traits = Traits(skips=True)  # a hop is left out

    def __post_init__(self) -> None:
        require(self.recall < 1 - self.widen, "recall", self.recall, "with widen below 1")

    def selection(self, select: str) -> str:
        """Return the mean of the last iterates, unless that is switched off."""
        return "tail" if self.average_iterates else select

    @property
    def needs(self) -> frozenset[Need]:
        """Need classes if their statistics or mean inputs travel, and numeric inputs to scramble or
        move.
        """
        if self.statistics or self.recall:
            return CLASSES | NUMBERS
        return NUMBERS if self.widen else frozenset()

    def check_network(self, model: Size) -> None:
        """Refuse a network whose statistics cannot be taken, or would not be a small part of the
        model.
        """
        self.extra(model)

    def run(self, fed: Fed, s: Passed) -> Iterator[State]:
        steps = self.steps(len(fed.clients))
        while s.step < steps:
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            others = tuple(k for k in s.behind if k != client)
            if s.model == INITIAL:
                model = fed.call(self.train, client, s.model)
            else:
                again = client in s.behind
                last = s.step == steps - 1
                model = fed.call(self.distil, client, s.model, len(others), again, last)
            s = s.next(model=model, behind=(*others, client))
            yield s

    @on_client(gives=lambda m: "summary" if m.statistics or m.recall else "model")
    def train(self, client: Client, model: Weights) -> TeacherHandoff:
        """Train on the plain loss, at the first client."""
        model = client.fit(model, epochs=self.epochs, training=self.training(client))
        own = None
        if self.statistics:
            found = measure(*self.features(client, model, views=1), client.classes)
            own = found.compressed(self.rank(client.size))
        return TeacherHandoff(model, client.n, own, self.inputs(client))

    @on_client(gives=lambda m: "summary" if m.statistics or m.recall else "model")
    def distil(
        self, client: Client, received: TeacherHandoff, others: int, again: bool, last: bool
    ) -> TeacherHandoff:
        """Train on own data and distil what `others` clients taught; `again`: this client was among
        them.
        """
        seen = received.seen
        if not again:
            seen += client.n
        match self.distill_weighting:
            case "counts":
                # N/n; on a second visit N leaves out the client's own samples
                factor = (seen - client.n) / client.n
            case "one":
                factor = 1.0
            case "hop":
                factor = float(others)
        invented: list[tuple[float, Invent]] = [(self.widen, lambda x, y: scrambled(x))]
        inputs = received.inputs
        own = self.inputs(client)
        if inputs is not None and own is not None:
            # there `measure_means` puts its result
            inputs = wire.placed(inputs, torch.device("cpu"))
            if again:
                inputs = inputs.without(own)
            if inputs.counts.any():
                invented.append((self.recall, partial(inputs.moved, own)))
            inputs = inputs.merged(own)
        teacher = client.network(received.model)
        model = client.fit(
            received.model,
            epochs=self.epochs,
            objective=Distillation(
                teacher, factor, self.divergence, self.temperature, tuple(invented), client.task
            ),
            training=self.training(client),
        )
        if received.statistics is None:
            return TeacherHandoff(model, seen, None, inputs)
        known = received.statistics.moments(client.classes, client.layout.head.inputs - 1)
        if again:
            known = known.without(client.class_counts())
        before, _ = self.features(client, received.model)
        after, y = self.features(client, model)
        known = known.moved(before, after).merged(measure(after[: len(y)], y, client.classes))
        if last:
            model = model.with_params(added(client.layout.head, model.params, known.classifier()))
        return TeacherHandoff(model, seen, known.compressed(self.rank(client.size)), inputs)

    def inputs(self, client: Client) -> ClassInputs | None:
        """Return the mean of the client's inputs for each class, if these means travel."""
        if not self.recall:
            return None
        return measure_means(client.batches(passes=0), client.classes, self.mean_shape(client.size))

    def features(self, client: Client, model: Weights, views: int = 3) -> tuple[Tensor, Tensor]:
        """Return features (views·n, A) of own samples, first unchanged, then scrambled, and their
        labels (n,).
        """
        parts: list[list[Tensor]] = [[] for _ in range(views)]
        labels = []
        with torch.no_grad(), seeded(client.seed("scrambled")):
            for x, y in client.batches(passes=0):
                for i, part in enumerate(parts):
                    part.append(client.probe(scrambled(x) if i else x, model)[0])
                labels.append(y)
        return torch.cat([f for part in parts for f in part]), torch.cat(labels)

    def extra(self, model: Size) -> int:
        """Return the bytes that travel in addition to a model and its count."""
        extra = self.means(model)
        if self.statistics:
            extra += size(model.layout.classes, model.layout.head.inputs - 1, self.rank(model))
        return extra

    def means(self, model: Size) -> int:
        """Return the bytes of the mean inputs that travel with a model."""
        if not self.recall:
            return 0
        return size_of_means(model.layout.classes, self.mean_shape(model))

    def mean_shape(self, model: Size) -> tuple[int, ...]:
        """Return the shape of a class's mean input; with `statistics`, at least the features' means
        travel, too.
        """
        layout = model.layout
        taken = 0
        if self.statistics:
            taken = size(layout.classes, layout.head.inputs - 1, 0)
        return mean_shape(layout.classes, model.shape, model, taken)

    def rank(self, model: Size) -> int:
        """Return r, the number of directions of the covariance that travel with a model."""
        layout = model.layout
        head = model.layout.head
        if head.kind != "linear" or head.bias is None:
            raise UserError(
                "--statistics needs a network whose classifier is a linear layer with biases: "
                "leave it out"
            )
        found = rank(layout.classes, head.inputs - 1, model, self.means(model))
        if found < 0:
            raise UserError(
                f"--statistics would need more than {SHARE:.0%} of this model's bytes for "
                f"{layout.classes} classes of "
                f"{head.inputs - 1} features: leave it out, or take a network with fewer features"
            )
        return found

    def training(self, client: Client) -> Training:
        """Return training settings: a client's own validation data would choose the epoch that
        forgets most.
        """
        if not self.average_iterates:
            return client.training
        return replace(client.training, select="tail")

    def steps(self, clients: int) -> int:
        """Return T·N hops."""
        return self.rounds * clients

    def cost(self, clients: int, model: Size) -> int:
        """(T·N - 1)·(M + 8 + what else travels): a model and a count.

        With `recall` 8K + 4K·(numbers of a mean input), with `statistics` 8K + 4A(K + 1 + r).

        Less where a client is the last of a pass and the first of the next.
        """
        return (self.rounds * clients - 1) * (model + 8 + self.extra(model))


def added(head: Layer, params: Tensor, rows: Tensor) -> Tensor:
    """Return `params` with `rows` (K, A + 1) added to the classifier, which multiplies both
    probabilities.
    """
    params = params.clone()
    head.put(params, head.matrix(params) + rows.to(params))
    return params
