"""What methods of many rounds share: who takes part, how they train, and how models become one,
also in fixed point.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from ekiden.authoring import (
    INITIAL,
    Client,
    Fed,
    Method,
    Model,
    OwnSamples,
    Ref,
    RunningMean,
    Size,
    State,
    Training,
    Traits,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.base.sums import FRACTION, fixed, real
from ekiden.core.engine.federation import in_order
from ekiden.core.engine.method import Gives, HasModel
from ekiden.core.training.fit import kept
from ekiden.core.training.weights import distance
from ekiden.methods.blocks.combining import Rule, clipped, combine, refuse
from ekiden.methods.blocks.sums import WholeSums

Weighting = Literal["samples", "uniform"]
CLIPPED = "length of clipped steps"
APART = "distance from the result"
CHOSEN = "chosen"
K = TypeVar("K")
T = TypeVar("T")


def last_iterate(method: Method, select: str) -> str:
    """Implement `Method.selection` for methods that train with `local_training`."""
    return "last"


def every_round(method: Any) -> tuple[int, ...]:
    """Implement `Method.fits` for methods whose clients train once in a round."""
    fits: tuple[int, ...] = (method.epochs,) * method.rounds
    return fits


class OrderedMethod(Method):
    """A method that goes from client to client, in an order that the user may name."""

    order: str

    def check(self, clients: Sequence[str]) -> None:
        """Refuse an order that does not name the clients."""
        in_order(self.order, clients)


class ParallelMethod(Method):
    """A method of rounds in which clients train side by side from the server's model."""

    rounds: int
    participation: float
    lr_decay: float
    traits = Traits(skips=True)  # a round has fewer replies
    selection = last_iterate

    def steps(self, clients: int) -> int:
        return self.rounds

    def drawn(self, fed: Fed) -> tuple[str, ...]:
        """Draw the clients of this round."""
        return sample(fed, self.participation)

    def training(self, client: Client, round: int) -> Training:
        """Return a client's settings in a round: the last iterate, at the round's learning rate."""
        return local_training(client, self.lr_decay, round)

    def replies(self, clients: int) -> int:
        """Return T·m, how often clients train in all rounds."""
        return self.rounds * participants(clients, self.participation)


class PersonalMethod(Method):
    """A method of many rounds whose clients each have a model of their own; there is no global
    one.
    """

    rounds: int
    traits = Traits(one_model=False)

    def start(self) -> State:
        """Return the state before the first round: neither a global model nor personal ones."""
        return replace(super().start(), model=None)

    def steps(self, clients: int) -> int:
        return self.rounds


def own_models(fed: Fed, s: State) -> tuple[Model, ...]:
    """Return each client's own model, the initial one before the first round."""
    return s.personal or (INITIAL,) * len(fed.clients)


def training_of(client: Client, lr_decay: float, round: int) -> Training:
    """Return the client's training at the learning rate of the round."""
    return replace(client.training, lr=client.training.lr * lr_decay**round)


class Reply(NamedTuple):
    """What a client sends back."""

    model: Weights  # what it trained
    weight: Annotated[float, OwnSamples]  # its weight in the average, before normalisation
    change: Weights | None = None  # of a vector that server and client keep

    @classmethod
    def of(
        cls, client: Client, model: Weights, weighting: Weighting, change: Weights | None = None
    ) -> Self:
        """Return a reply with the weight n_i, or 1 for all clients."""
        weight = 1.0
        if weighting == "samples":
            weight = float(client.n)
        return cls(model, weight, change)


class EqualReply(NamedTuple):
    """What a client sends back if its model counts as much as any other's."""

    model: Weights
    change: Weights | None = None  # of a vector that server and client keep

    @property
    def weight(self) -> float:
        """Return 1."""
        return 1.0


class Middle(NamedTuple):
    """What the server makes of the replies of a round."""

    model: Weights  # their mean
    clients: float  # how many there are
    vector: Tensor  # a vector that the server keeps, with 1/N of each client's change


def participants(clients: int, participation: float) -> int:
    """Return the clients per round, m = max(⌈cN⌉, 1), tolerant of c's rounding."""
    return max(1, math.ceil(participation * clients - 1e-9))


def sample(fed: Fed, participation: float) -> tuple[str, ...]:
    """Draw the clients of this step."""
    return fed.sample(participants(len(fed.clients), participation))


def at_server(fed: Fed, model: Model | None) -> Weights:
    """Return the model that the server sends; all know the initial one, so it costs nothing."""
    assert model is not None
    value: Weights | HasModel = fed.get(model) if isinstance(model, Ref) else model  # type: ignore[assignment]
    return value if isinstance(value, Weights) else value.model


def local_training(client: Client, lr_decay: float, round: int) -> Training:
    """Return training settings that end with the last iterate, at the learning rate of the
    round.
    """
    return _with_last_iterate(client.training, client.training.lr * lr_decay**round)


# cached, since the clients of a round share it and checking its fields takes as long as a step
@lru_cache(16)
def _with_last_iterate(training: Training, lr: float) -> Training:
    return replace(training, select="last", lr=lr)


def arrived(fed: Fed, asked: Mapping[K, Ref[T]], at_least: int = 1) -> dict[K, T]:
    """Return the values that arrived, by the keys of `asked`.

    Raises:
        ClientMissing: fewer arrived.
    """
    return fed.get(asked, at_least=min(at_least, len(asked)))


def with_sizes(
    fed: Fed, count: Callable[[Client], int], clients: Iterable[str], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the known numbers of samples and those of `clients`; `count` asks clients that are
    new.
    """
    asked = {k: fed.call(count, k) for k in clients if k not in known}
    return {**known, **arrived(fed, asked, at_least=0 if known else 1)}


def mean_size(sizes: Mapping[str, int]) -> float:
    """Return n/N as far as it is known; 0 if no client was asked."""
    return sum(sizes.values()) / max(len(sizes), 1)


def shortened(
    fed: Fed, models: Mapping[str, Weights], start: Weights, longest: float
) -> dict[str, Weights]:
    """Return the clients' models, with steps from `start` limited to `longest` (0: no limit); note
    who was limited.
    """
    if not longest:
        return dict(models)
    short = {k: clipped(m, start, longest) for k, m in models.items()}
    lengths = {k: _apart(m, start) for k, m in models.items() if short[k] is not m}
    fed.note(CLIPPED, lengths)
    return short


def note_apart(fed: Fed, rule: Rule, models: Mapping[str, Weights], result: Weights) -> None:
    """Note how far each client's model is from the result, and whose Krum chose; nothing for the
    mean.
    """
    if rule == "mean":
        return
    fed.note(APART, {k: _apart(m, result) for k, m in models.items()})
    if rule == "krum":
        fed.note(CHOSEN, {k: 1 for k, m in models.items() if m is result})


def _apart(model: Weights, other: Weights) -> float:
    return math.sqrt(float(distance(model.params, other.params)))


def or_zero(kept: Tensor | None, like: Tensor) -> Tensor:
    """Return what was kept; before the first round that is 0."""
    return torch.zeros_like(like) if kept is None else kept


def server_step(model: Weights, target: Weights, lr: float) -> Weights:
    """Return w + η_g (target - w); η_g = 1 gives the target itself. Running statistics are the
    target's.
    """
    return target if lr == 1 else target.with_params(torch.lerp(model.params, target.params, lr))


def momentum_step(
    model: Weights, target: Weights, lr: float, momentum: float, buffer: Tensor | None
) -> tuple[Weights, Tensor | None]:
    """Take one step, v ← β v + (target - w), w ← w + η_g v; without momentum there is no buffer."""
    if not momentum:
        return server_step(model, target, lr), None
    change = target.params - model.params
    buffer = change if buffer is None else momentum * buffer + change
    return target.with_params(model.params + lr * buffer), buffer


@dataclass(frozen=True)
class Proximal:
    """(μ/2)·‖θ - centre‖² + ⟨slope, θ⟩."""

    weight: float  # μ
    centre: Tensor
    slope: Tensor | None = None
    fixed = True

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add the gradient; at the centre exactly 0 and the slope."""
        if self.weight:
            grad.add_(params - self.centre, alpha=self.weight)
        if self.slope is not None:
            grad.add_(self.slope)


@dataclass(frozen=True)
class Corrected:
    """A slope added to the gradient, and the mean over all steps of the gradient without it.

    For plain SGD that mean is (w_start - w_end) / (K·η) - slope; unlike this displacement it needs
    neither a divisor for momentum nor SGD at all, and loses no digits where K·η is small.
    """

    slope: Tensor
    weight_decay: float = 0.0  # part of the gradient, as in the displacement
    clip_norm: float = 0.0  # what it removes from a step is missing there, too
    pull: Proximal | None = None  # counts as part of the gradient
    progress: dict[str, Tensor] = field(default_factory=dict)
    fixed = True

    def __post_init__(self) -> None:
        zeros = torch.zeros_like(self.slope)
        self.progress.update(sum=zeros, steps=zeros.new_zeros(1))

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        """Add the gradient of the pull, take note, add the slope."""
        if self.pull is not None:
            self.pull(params, grad, loss)
        noted = grad
        if self.clip_norm:
            share = kept(grad + self.slope, self.clip_norm)
            # what remains of g, so that noted + slope is the limited gradient s·(g + slope)
            noted = share * grad - (1 - share) * self.slope
        self.progress["sum"].add_(noted).add_(params, alpha=self.weight_decay)
        self.progress["steps"] += 1
        grad.add_(self.slope)

    def mean(self) -> Tensor:
        """The mean gradient over the steps so far."""
        return self.progress["sum"] / float(self.progress["steps"])


def accumulation(steps: int, momentum: float, pull: float = 0.0) -> float:
    """Return a: how far τ steps of SGD with heavy-ball momentum go on a constant gradient, in units
    of η·gradient.

    `pull` is η·μ of a proximal term. τ itself without either.
    """
    velocity = distance = 0.0
    for _ in range(steps):
        # a step of the proximal term goes back by η·μ times the distance
        velocity = momentum * velocity + 1 - pull * distance
        distance += velocity
    return distance


@dataclass(frozen=True, eq=False)
class ModelSums(WholeSums):
    """What clients of a round add up, in fixed point."""

    params: Tensor  # (P,) int64, Σ p_i θ_i
    buffers: Tensor  # (B,) int64, Σ p_i b_i of running statistics b_i
    counters: Tensor  # (C,) int64, sums of counters; whole numbers, not in fixed point
    further: Tensor  # int64, sums of a further vector; empty if there is none
    weight: int  # Σ p_i in units of 2^-28
    clients: int  # number of clients

    def __post_init__(self) -> None:
        """Check what may come from another party."""
        super().__post_init__()
        if any(t.ndim != 1 for t in self.tensors()) or self.clients < 1:
            raise UserError(
                "a sum of models is not as it must be: use the same version of Ekiden everywhere"
            )

    @classmethod
    def of(cls, clients: int, model: Weights, weight: float, further: Tensor | None = None) -> Self:
        """Return one client's part.

        Args:
            clients: how many clients give a part.
            model: θ_i with running statistics.
            weight: p_i.
            further: a further vector, to which no weight applies.
        """
        name = "values of the model, times the client's weight,"
        params = fixed(model.params.double() * weight, clients, name)
        buffers = fixed(model.buffers.double() * weight, clients, name)
        vector = torch.empty(0) if further is None else further
        vector = fixed(vector, clients, "what goes with the model")
        share = int(fixed(torch.tensor(weight, dtype=torch.float64), clients, "weights"))
        return cls(params, buffers, model.counters, vector, share, 1)

    @property
    def total(self) -> float:
        """Σ p_i."""
        return self.weight / 2.0**FRACTION

    def mean(self, like: Weights) -> Weights:
        """Return Σ p_i θ_i / Σ p_i. Counters are the rounded mean, since sums do not show the
        largest.

        Args:
            like: a model of the run, whose shape the sums must have.
        """
        if self.weight <= 0:
            raise UserError("the weights of all clients add up to 0: there is nothing to average")
        params = (self.params.double() / self.weight).float()
        buffers = (self.buffers.double() / self.weight).float()
        found = Weights(params, buffers, self.counters // self.clients)
        if found.shapes != like.shapes:
            raise UserError(
                "a sum of models does not fit the network: use the same network at every client"
            )
        return found

    def vector(self, like: Tensor) -> Tensor:
        """Return the further vector's sum, in float32, which must have the shape of `like`."""
        found = real(self.further).float()
        if found.shape != like.shape:
            raise UserError(
                "a sum of vectors does not fit the network: use the same network at every client"
            )
        return found


def alone(method: Any) -> Gives | None:
    """Say what the task of a `SecureMethod` gives that the server reads of each client."""
    return None if method.secure else "model"


def together(method: Any) -> Gives | None:
    """Say what its task gives of which the server reads the sum."""
    return "sum" if method.secure else None


class SecureMethod(ParallelMethod):
    """A method of rounds whose server can do with sums of what clients send."""

    # whether it gets no more than that: fixed point, so that masks between machines hide all but
    # the sums
    secure: bool
    # whether a run may leave a missing silo out of one sum and not of the next one; the parts of two
    # sums must then differ, as those of silos that train in between do
    regroups: ClassVar[bool] = True

    def middle(self, fed: Fed, chosen: Sequence[str], vector: Tensor, *about: Any) -> Middle:
        """Return the mean of the clients' models; changes are divided by all N clients, so that the
        vector stays the mean of all that clients keep.

        Args:
            fed: the federation.
            chosen: who takes part.
            vector: what the server keeps; its shape if it keeps nothing.
            about: the arguments of `train` and `add`, the model first.
        """
        n = len(fed.clients)
        if self.secure:
            sums: ModelSums = fed.sum(self.add, chosen, *about, len(chosen), at="server")
            if len(sums.further):
                vector = vector + sums.vector(vector) / n
            return Middle(sums.mean(about[0]), float(sums.clients), vector)
        models = RunningMean()
        answered = 0
        for reply in fed.each([fed.call(self.train, k, *about) for k in chosen], at_least=1):
            models.add(reply.model, reply.weight)
            answered += 1
            if reply.change is not None:
                vector = vector + reply.change.params / n
            del reply
        return Middle(models.model, float(answered), vector)

    @abstractmethod
    def train(self, client: Client, *args: Any, **kwargs: Any) -> Any:
        """Train from the global model."""

    @abstractmethod
    def add(self, client: Client, *args: Any, **kwargs: Any) -> Any:
        """Train like `train`, and add the result to the sum."""

    def part(self, clients: int, start: Weights, reply: Any) -> ModelSums:
        """Return what a reply to the model `start` adds to the sums of this number of clients."""
        vector = None
        if reply.change is not None:
            vector = reply.change.params
        return ModelSums.of(clients, reply.model, reply.weight, vector)

    def uploaded(self, model: Size, plain: int, vectors: int = 0, numbers: int = 0) -> int:
        """Return the bytes that a client sends: `plain`, or if secure 8 for each value of a model
        and two numbers, and of so many further vectors of parameters and numbers.
        """
        if not self.secure:
            return plain
        values = model.network.weights()
        rest = len(values.buffers) + len(values.counters)
        return 8 * ((1 + vectors) * len(values.params) + rest + numbers + 2)


class SummingMethod(SecureMethod):
    """A method whose clients train from the model and the number of the round alone."""

    @on_client(gives=together)
    def add(
        self, client: Client, model: Weights, round: int, clients: int, before: ModelSums | None
    ) -> ModelSums:
        """Train like `train`, and add the result to the sum."""
        own = self.part(clients, model, self.train(client, model, round))
        return client.added(before, own, (model, round, clients))


class RobustMethod(ParallelMethod):
    """A method of rounds whose server combines models by a rule, and may limit their steps."""

    weighting: Weighting
    combine: Rule
    faulty: int
    clip_update: float

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a rule that needs more clients per round, or that weights do not go with."""
        m = participants(len(clients), self.participation)
        refuse(self.combine, m, self.faulty, weighted=self.weighting == "samples")

    @abstractmethod
    def train(self, client: Client, model: Weights, round: int) -> Reply:
        """Train from the global model."""

    def averaged(self, fed: Fed, start: Weights, round: int) -> Weights:
        """Return what the clients of a round make of `start`, combined; note who stood out."""
        asked = {k: fed.call(self.train, k, start, round) for k in self.drawn(fed)}
        # A mean needs one reply at a time in memory, other rules all of them.
        if self.combine == "mean" and not self.clip_update:
            middle = RunningMean()
            for reply in fed.each(asked.values(), at_least=1):
                middle.add(reply.model, reply.weight)
                del reply
            return middle.model
        replies = arrived(fed, asked)
        models = shortened(fed, {k: r.model for k, r in replies.items()}, start, self.clip_update)
        weights = [reply.weight for reply in replies.values()]
        result = combine(list(models.values()), weights, self.combine, self.faulty)
        note_apart(fed, self.combine, models, result)
        return result

    def cost(self, clients: int, model: Size) -> int:
        """T·m·(2M + 8): the model down and up, a weight up, for m = ⌈cN⌉ clients a round."""
        return self.replies(clients) * (2 * model + 8)


class AveragingMethod(RobustMethod, SummingMethod):
    """A method of rounds in which the server averages models, or takes their sum alone."""

    def check(self, clients: Sequence[str]) -> None:
        """Refuse a rule that needs more clients per round, or single models if only their sum is
        there.
        """
        super().check(clients)
        for option, needed in (
            (f"--combine {self.combine}", self.combine != "mean"),
            ("--clip-update", self.clip_update > 0),
        ):
            if self.secure and needed:
                raise UserError(
                    f"{option} needs single models, --secure shows the server only their sum: leave "
                    "out one of them"
                )

    def averaged(self, fed: Fed, start: Weights, round: int) -> Weights:
        """Return what the clients of a round make of `start`, combined, or from their sum alone."""
        if not self.secure:
            return super().averaged(fed, start, round)
        chosen = self.drawn(fed)
        return fed.sum(self.add, chosen, start, round, len(chosen), at="server").mean(start)

    def cost(self, clients: int, model: Size) -> int:
        """T·m·(2M + 8): the model down and up, a weight up, for m = ⌈cN⌉ clients a round; 8 bytes a
        value up if secure.
        """
        return self.replies(clients) * (model + self.uploaded(model, model + 8))
