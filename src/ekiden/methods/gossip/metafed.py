"""MetaFed: knowledge handed round a ring, then distilled into a personal model at each client."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Count,
    CountOrZero,
    Fed,
    Forward,
    Method,
    NonNegative,
    Objective,
    State,
    Task,
    Traits,
    Weights,
    on_client,
)
from ekiden.core.models.split import Split, as_split


@dataclass(frozen=True)
class MetaFed(Method):
    """Cyclic knowledge distillation without a server: common knowledge around a ring, then
    personalisation.

    Yiqiang Chen, Wang Lu, Xin Qin, Jindong Wang, Xing Xie: MetaFed: Federated Learning Among
    Federations With Cyclic Knowledge Distillation for Personalized Healthcare. FL-IJCAI 2022; IEEE
    TNNLS 2023. https://arxiv.org/abs/2206.08516 (equations as in the authors' code, algorithm
    "metafed" of PersonalizedFL).

    Departures from the paper: a client that is not yet good copies its teacher once per visit. The
    code does so once per epoch, which would lose all epochs but the last. Logits and features come
    from one pass. Normalisation layers are copied with the rest. The optimiser restarts at each
    visit. The global model is that of the last client visited in the ring. Local training ends with
    the epoch that --select names, by default the best on validation data.
    """

    rounds: Count = 1
    """R, rounds around the ring, in which common knowledge accumulates"""
    epochs: Count = 200
    """E, epochs of each visit and of the personalisation phase"""
    warmup: CountOrZero = 30
    """epochs that every client trains alone before the first round"""
    distill_weight: NonNegative = 1.0
    """λ_0, largest weight of the distillation"""
    distill_above: NonNegative = 0.6
    """validation accuracy (R² in regression) above which a client keeps its own weights and
    distils, from then on; until then, it copies the teacher"""
    trust: NonNegative = 0.5
    """threshold_2, accuracy from which on a teacher that is no better than the client still teaches
    (0.4 for VLCS and PACS)"""

    # flag_i, whether the client distils
    traits = Traits(private=bool, needs_validation=True, one_model=False)

    def run(self, fed: Fed, s: State) -> Iterator[State]:
        """Yield the state after training alone, after each hop, and after personalisation. Models
        leave as teachers.
        """
        n = len(fed.clients)
        if s.step == 0:
            s = s.next(personal=fed.call_all(self.warm_up, INITIAL))
            yield s
        while s.step <= self.rounds * n:
            i = (s.step - 1) % n
            # the predecessor; that of the first client is the last one, by index -1
            teacher = None if s.step == 1 else s.personal[i - 1]
            model = fed.call(self.accumulate, fed.clients[i], s.personal[i], teacher)
            personal = (*s.personal[:i], model, *s.personal[i + 1 :])
            s = s.next(model=model, personal=personal)
            yield s
        if s.step == self.rounds * n + 1:
            s = s.next(personal=fed.call_each(self.personalise, s.personal, s.model))
            yield s

    @on_client(gives="model")
    def warm_up(self, client: Client, model: Weights) -> Weights:
        """Train alone, from the common initial model."""
        model = client.fit(model, epochs=self.warmup)
        client.state = client.accuracy(model) > self.distill_above
        return model

    @on_client(gives="model")
    def accumulate(self, client: Client, own: Weights, teacher: Weights | None) -> Weights:
        """Train at one visit in the ring."""
        if teacher is None:
            model = client.fit(own, epochs=self.epochs)
        else:
            model = self.learn(client, own, teacher, self.distill_weight)
        client.state = client.state or client.accuracy(model) > self.distill_above
        return model

    @on_client(gives="model")
    def personalise(self, client: Client, own: Weights, teacher: Weights) -> Weights:
        """Train in the last stage, with a weight that depends on how much better the teacher is."""
        mine = client.accuracy(own)
        theirs = client.accuracy(teacher)
        return self.learn(
            client, own, teacher, distillation_weight(self.distill_weight, mine, theirs, self.trust)
        )

    def learn(self, client: Client, own: Weights, teacher: Weights, weight: float) -> Weights:
        """Train from the teacher's weights, or train the client's own model towards the teacher's
        features.
        """
        if not client.state:
            return client.fit(teacher, epochs=self.epochs)
        if not weight:
            return client.fit(own, epochs=self.epochs)
        objective = FeatureDistillation(as_split(client.network(teacher)), weight, client.task)
        return client.fit(own, epochs=self.epochs, objective=objective)

    def steps(self, clients: int) -> int:
        """Return R·N hops, one step before and one after."""
        return self.rounds * clients + 2

    def cost(self, clients: int, model: int) -> int:
        """(R·N - 1 + N - 1)·M: hops of the ring, then the last client's model to all others; 0 for
        a single client.
        """
        if clients == 1:
            return 0
        return (self.rounds * clients + clients - 2) * model


@dataclass(frozen=True)
class FeatureDistillation(Objective):
    """ℓ + λ·mean squared difference of the features, which come from the same pass as the
    answer.
    """

    teacher: Split
    weight: float
    task: Task
    fixed = True

    @property
    def teachers(self) -> tuple[Forward]:
        """The teacher's features."""
        return (self.teacher.features,)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        """Return the loss of a batch, given the teacher's features."""
        (wanted,) = answers
        network = as_split(forward)
        features = network.features(x)
        loss = self.task.mean_loss(network.head(features).float(), y)
        return loss + self.weight * F.mse_loss(features.float(), wanted)


def distillation_weight(largest: float, own: float, teacher: float, trust: float) -> float:
    """Return λ = λ_0 · 10^min(1, 5(a2 - a1)) / 10 for accuracies a1 of the client's own model and
    a2 of the teacher.

    λ is 0 if the teacher is not better and its accuracy is below `trust`.
    """
    # a teacher that is no better still teaches something else, if it is good
    if teacher <= own and teacher < trust:
        return 0.0
    return largest * 10 ** min(1.0, 5 * (teacher - own)) / 10
