"""FedTasuki: one-shot sequential learning that distils from the received model, weighted by sample counts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ekiden.authoring import (
    CLASSES,
    INITIAL,
    NUMBERS,
    BelowOne,
    Client,
    Count,
    Fed,
    Method,
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
from ekiden.base.seeds import seeded
from ekiden.data.tasks import Need
from ekiden.engine.federation import in_order
from ekiden.methods.chain.blocks.distillation import Distillation, Form, Invent, scrambled
from ekiden.methods.chain.fedtasuki.statistics import (
    SHARE,
    ClassInputs,
    ClassMoments,
    ClassStatistics,
    mean_shape,
    measure,
    measure_means,
    rank,
    size,
    size_of_means,
)
from ekiden.training.weights import Layer


class TeacherHandoff(NamedTuple):
    """What a client hands to the next one."""

    model: Weights  # the model as trained so far
    seen: int  # N, the number of training samples that it was trained on
    statistics: ClassStatistics | None = None  # class statistics of these samples' features, if `statistics` is set
    inputs: ClassInputs | None = None  # their mean input of each class, if `recall` is set


@dataclass(frozen=True)
class Passed(State):
    """The state with the clients whose samples the model was trained on."""

    behind: tuple[str, ...] = ()


@dataclass(frozen=True)
class FedTasuki(Method):
    """One-shot sequential learning that distils from the received model, weighted by sample counts.

    This library's own method, 2026; no claim of novelty is made. Its parts are known one by one: distilling from the
    model before (Zhizhong Li, Derek Hoiem: Learning without Forgetting. ECCV 2016. https://arxiv.org/abs/1606.09282),
    leaving out the true class (Gihun Lee, Minchan Jeong, Yongjin Shin, Sangmin Bae, Se-Young Yun: Preservation of the
    Global Knowledge by Not-True Distillation in Federated Learning. NeurIPS 2022. https://arxiv.org/abs/2106.03097),
    and averaging the last iterates.

    The loss over all samples so far is N times the mean over those of earlier clients plus n times the mean over the
    client's own. The former are out of reach. Instead the client matches the outputs of the received model, which
    counts N samples: cross-entropy + (N / n)·D. Earlier clients' samples differ from the client's own. So a share of
    each batch can be scrambled and only distilled (`widen`): then the two models agree on more than the client's data.
    With `recall` the mean input of each class travels, and a share of each batch is moved to the means of classes that
    earlier clients hold, and only distilled. The client hands on the mean of the iterates over the last part of the
    steps.

    Under label skew the classifier forgets more than the extractor. With `statistics` the mean of each class's features
    and their common covariance also travel (linear discriminant analysis; cf. Mi Luo, Fei Chen, Dapeng Hu, Yifan Zhang,
    Jian Liang, Jiashi Feng: No Fear of Heterogeneity. NeurIPS 2021. https://arxiv.org/abs/2106.05001). Each client
    moves them by the linear map from old to new features of its own and scrambled samples. The classifier computed from
    them is added to the last client's.

    Departures from the paper: there is no paper; docs/methods/fedtasuki.md has derivation and results. The first client
    has nothing to distil from and trains plainly. From the second pass on the received model has seen all clients, so N
    is the number of samples of all others: the total minus the client's own n.
    """

    epochs: Count = 150
    """E, epochs at each client; with augmented samples, 3 epochs cost as much as 4 plain ones, because of the teacher's
    passes"""
    divergence: Form = "both"
    """D: KL(q || p) between the student's answers p and the teacher's q; or half of it plus half of the same without
    the true class. In tasks other than classification, whatever the form, the task's distance between outputs: squared
    error of numbers, binary divergence of labels, divergence of each pixel or token"""
    distill_weighting: Literal["counts", "one", "hop"] = "counts"
    """λ, weight of D: N/n; for comparison 1, or the number of other clients behind the received model"""
    widen: BelowOne = 0.0
    """share of each batch that is replaced by rotated, shifted, mirrored and mixed images, which are only distilled"""
    recall: BelowOne = 0.0
    """share of each batch that is only distilled, with each input moved from the mean of its class to the mean of a
    class that earlier clients hold; these means travel, at most 2.5 % of M"""
    statistics: bool = False
    """also send class statistics, at most 5 % of M, and add the classifier computed from them to the last client's"""
    average_iterates: bool = True
    """hand on the mean of the last iterates (--tail of the steps); otherwise what --select says"""
    temperature: Positive = 1.0
    """τ, softens p and q; D is multiplied by τ²"""
    rounds: Count = 1
    """T, passes over all clients (shots); 1: one-shot"""
    order: str = "given"
    """order of the clients: given, reversed, random (redrawn each round), or names separated by commas"""

    traits = Traits(skips=True)  # a hop is left out

    def __post_init__(self) -> None:
        require(self.recall < 1 - self.widen, "recall", self.recall, "with widen below 1")

    def selection(self, select: str) -> str:
        """Return the mean of the last iterates, unless that is switched off."""
        return "tail" if self.average_iterates else select

    @property
    def needs(self) -> frozenset[Need]:
        """Need classes if their statistics or mean inputs travel, and numeric inputs to scramble or move."""
        found: frozenset[Need] = CLASSES if self.statistics or self.recall else frozenset()
        return found | NUMBERS if self.statistics or self.recall or self.widen else found

    def check(self, clients: Sequence[str]) -> None:
        """Refuse an order that does not name the clients."""
        in_order(self.order, clients)

    def check_network(self, model: Size) -> None:
        """Refuse a network whose statistics cannot be taken, or would not be a small part of the model."""
        self.extra(model)

    def start(self) -> Passed:
        """Start with a model that has seen no samples."""
        return Passed()

    def run(self, fed: Fed, s: Passed) -> Iterator[State]:
        """Yield the state after each hop."""
        steps = self.steps(len(fed.clients))
        while s.step < steps:
            round, hop = divmod(s.step, len(fed.clients))
            client = fed.order(self.order, round)[hop]
            others = tuple(k for k in s.behind if k != client)
            if s.model == INITIAL:
                model = fed.call(self.train, client, s.model)
            else:
                again, last = client in s.behind, s.step == steps - 1
                model = fed.call(self.distil, client, s.model, len(others), again, last)
            s = s.next(model=model, behind=(*others, client))
            yield s

    @on_client
    def train(self, client: Client, model: Weights) -> TeacherHandoff:
        """Train on the plain loss, at the first client."""
        model = client.fit(model, epochs=self.epochs, training=self.training(client))
        own = measure(*self.features(client, model, views=1), client.classes) if self.statistics else None
        return TeacherHandoff(model, client.n, self.compressed(client, own), self.inputs(client))

    @on_client
    def distil(self, client: Client, received: TeacherHandoff, others: int, again: bool, last: bool) -> TeacherHandoff:
        """Train on own data and distil what `others` clients taught; `again`: this client was among them."""
        seen = received.seen if again else received.seen + client.n
        match self.distill_weighting:
            case "counts":
                factor = (seen - client.n) / client.n  # N/n, N without the client's own samples
            case "one":
                factor = 1.0
            case "hop":
                factor = float(others)
        invented: list[tuple[float, Invent]] = [(self.widen, lambda x, y: scrambled(x))]
        inputs, own = received.inputs, self.inputs(client)
        if inputs is not None and own is not None:
            inputs = inputs.on_cpu().without(own) if again else inputs.on_cpu()
            if inputs.counts.any():
                invented.append((self.recall, partial(inputs.moved, own)))
            inputs = inputs.merged(own)
        teacher = client.network(received.model)
        model = client.fit(
            received.model,
            epochs=self.epochs,
            objective=Distillation(teacher, factor, self.divergence, self.temperature, tuple(invented), client.task),
            training=self.training(client),
        )
        if received.statistics is None:
            return TeacherHandoff(model, seen, None, inputs)
        known = received.statistics.moments(client.classes, client.layout.head.inputs - 1)
        known = known.without(client.class_counts()) if again else known
        before, _ = self.features(client, received.model)
        after, y = self.features(client, model)
        known = known.moved(before, after).merged(measure(after[: len(y)], y, client.classes))
        if last:
            model = model.with_params(added(client.layout.head, model.params, known.classifier()))
        return TeacherHandoff(model, seen, self.compressed(client, known), inputs)

    def inputs(self, client: Client) -> ClassInputs | None:
        """Return the mean of the client's inputs for each class, if these means travel."""
        if not self.recall:
            return None
        return measure_means(client.batches(passes=0), client.classes, self.mean_shape(client.size))

    def features(self, client: Client, model: Weights, views: int = 3) -> tuple[Tensor, Tensor]:
        """Return features (views·n, A) of own samples, first unchanged, then scrambled, and their labels (n,)."""
        parts: list[list[Tensor]] = [[] for _ in range(views)]
        labels = []
        with torch.no_grad(), seeded(client.seed("scrambled")):
            for x, y in client.batches(passes=0):
                for i, part in enumerate(parts):
                    part.append(client.probe(scrambled(x) if i else x, model)[0])
                labels.append(y)
        return torch.cat([f for part in parts for f in part]), torch.cat(labels)

    def compressed(self, client: Client, known: ClassMoments | None) -> ClassStatistics | None:
        """Return as much of the class statistics as may travel."""
        return None if known is None else known.compressed(self.rank(client.size))

    def extra(self, model: Size) -> int:
        """Return the bytes that travel in addition to a model and its count."""
        extra = self.means(model)
        if self.statistics:
            extra += size(model.layout.classes, model.layout.head.inputs - 1, self.rank(model))
        return extra

    def means(self, model: Size) -> int:
        """Return the bytes of the mean inputs that travel with a model."""
        return size_of_means(model.layout.classes, self.mean_shape(model)) if self.recall else 0

    def mean_shape(self, model: Size) -> tuple[int, ...]:
        """Return the shape of a class's mean input; with `statistics`, at least the features' means travel, too."""
        layout = model.layout
        taken = size(layout.classes, layout.head.inputs - 1, 0) if self.statistics else 0
        return mean_shape(layout.classes, model.shape, model, taken)

    def rank(self, model: Size) -> int:
        """Return r, the number of directions of the covariance that travel with a model."""
        layout, head = model.layout, model.layout.head
        if head.kind != "linear" or head.bias is None:
            raise UserError("--statistics needs a network whose classifier is a linear layer with biases: leave it out")
        found = rank(layout.classes, head.inputs - 1, model, self.means(model))
        if found < 0:
            raise UserError(
                f"--statistics would need more than {SHARE:.0%} of this model's bytes for {layout.classes} classes of "
                f"{head.inputs - 1} features: leave it out, or take a network with fewer features"
            )
        return found

    def training(self, client: Client) -> Training:
        """Return training settings: a client's own validation data would choose the epoch that forgets most."""
        return replace(client.training, select="tail") if self.average_iterates else client.training

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
    """Return `params` with `rows` (K, A + 1) added to the classifier, which multiplies both probabilities."""
    params = params.clone()
    head.put(params, head.matrix(params) + rows.to(params))
    return params
