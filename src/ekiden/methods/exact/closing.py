"""The closing lap: after a method's last step, the classifier is refitted exactly on all clients'
training data.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache, cached_property, reduce
from itertools import chain, islice
from operator import or_
from typing import Any, ClassVar, NamedTuple, cast, get_type_hints

import torch
from torch import Tensor, nn

from ekiden.authoring import (
    VECTORS,
    Client,
    Fed,
    Method,
    Ref,
    Size,
    State,
    Task,
    UserError,
    Weights,
    on_client,
)
from ekiden.core.engine.method import Chooser, HasModel
from ekiden.core.engine.wire import EVERYONE
from ekiden.core.tasks import Need
from ekiden.core.training.gram import WIDE, AnySums
from ekiden.core.training.network import trial
from ekiden.core.training.weights import Layout
from ekiden.methods import LAP
from ekiden.methods.blocks.sums import forms
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.fixed_features import size_of_sums, sums_of

# Samples from which the first client of the lap sets the scales
_SAMPLES = 1024
# Range of the whole numbers, in standard deviations of these samples
_REACH = 32


class Scales(NamedTuple):
    """How features h become whole numbers: (h - centre)·gain, rounded."""

    centre: Tensor  # (D,) float32
    gain: Tensor  # (D,) float32, above 0


class Totals(NamedTuple):
    """What a client hands to the next one."""

    scales: Scales  # of the features, settled by the first client of the lap
    sums: AnySums  # over the training samples of all clients so far


@dataclass(frozen=True)
class Lap(State):
    """The state with the lap; its class also derives from the state of the method, see `_state`."""

    # the method's model, while the lap lasts; `model` is None then
    body: Ref[Weights] | Weights | None = None
    totals: Ref[Totals] | None = None  # what has been added up
    closed: bool = False  # whether the lap is over


class ClosingLap(Method):
    """A method with one more lap, in which clients add up the sums for an exact classifier on its
    final features.

    Closed-form classifiers by sums: Eros Fanì, Raffaello Camoriano, Barbara Caputo, Marco Ciccone:
    Accelerating Heterogeneous Federated Learning with Closed-form Classifiers. ICML 2024.
    https://arxiv.org/abs/2406.01116.

    The final model goes to every client. Its features, as whole numbers of 15 bits and a sign, are
    summed over all training samples (Σ φφᵀ, Σ φyᵀ), from client to client. The totals return to the
    client that held the model, or else to the server. Ridge regression on the totals, with λ by
    generalised cross-validation, replaces the last layer. It is scaled by a temperature so that its
    softmax gives probabilities (for labels, its logits). The rest of the model stays as it is.

    Departures from the paper: the features are those of the model just trained, not of a pretrained
    one; the sums are handed on instead of sent to the server; λ is not chosen on data.
    """

    regroups: ClassVar[bool] = False  # the lap's sums are of all clients
    lapped: ClassVar[type[Method]]
    """class of the method that is run before"""

    def __post_init__(self) -> None:
        """Refuse a method that does not end with one model of the clients' network."""
        super().__post_init__()
        method = self.without_lap
        name = self.lapped.title()
        if method.traits.joins_models:
            raise UserError(
                f"{LAP} needs one model, {name} joins the clients' models: leave it out"
            )
        if not method.one_model:
            raise UserError(f"{LAP} needs a global model, {name} gives personal ones: leave it out")
        own = self.lapped.own_network is Method.own_network
        if method.changes_network or method.traits.extra_outputs or not own:
            raise UserError(
                f"{LAP} needs the clients' own network, {name} makes another: leave it out"
            )

    def __reduce__(self) -> Any:
        """Make the class again where it is needed, as no module has it."""
        return with_lap, (self.without_lap,)

    @classmethod
    def title(cls) -> str:
        """The name on the command line."""
        return cls.lapped.title() + LAP

    @cached_property
    def without_lap(self) -> Method:
        """The method that is run before."""
        return _copied(self, self.lapped)

    @property
    def needs(self) -> frozenset[Need]:
        """Need target vectors for least squares."""
        return self.without_lap.needs | VECTORS

    @property
    def chosen_by(self) -> Chooser:
        """Whoever has the model before the lap."""
        return "party"

    def fits(self) -> None:
        """No guarantee fits: the lap's sums have no noise."""

    def check_network(self, model: Size) -> None:
        """Refuse a network that does not end with a linear layer called `head`."""
        self.without_lap.check_network(model)
        network = model.network
        # declared
        _ = network.head
        head = network.module.get_submodule("head")
        last = network.layout.head
        linear = isinstance(head, nn.Linear) and last.name == "head" and last.bias is not None
        if linear:
            with torch.no_grad():
                x = torch.ones(2, *model.shape, device=network.params.device)
                features, logits = network.probe(trial(network.module, x))
                linear = features.shape[1:] == (last.inputs - 1,) and torch.allclose(
                    head(features), logits, 1e-2, 1e-4
                )
        if not linear:
            raise UserError(
                f"{LAP} needs a network that ends with `head`, one linear layer with biases: leave "
                "it out"
            )

    def start(self) -> State:
        """Return the first state of the method before it."""
        return _with_lap(self.without_lap.start())

    def complete(self, state: State) -> bool:
        """Return whether the lap's classifier is in the model."""
        return isinstance(state, Lap) and state.closed

    def run(self, fed: Fed, s: Any) -> Iterator[State]:
        """Yield the method's states, then one for each hop from where the model is, then the
        solution.
        """
        before = self.without_lap.steps(len(fed.clients))
        n = len(fed.clients)
        if s.step < before:
            for after in self.without_lap.run(fed, s):
                s = _with_lap(after)
                yield s
        while s.step < before + n:
            body = self._body(fed, s)
            client = _order(fed.clients, body)[s.step - before]
            totals = fed.sum(self.lap_add, [client], body, plus=s.totals)
            s = s.next(model=None, body=body, totals=totals)
            yield s
        if s.step == before + n:
            if s.totals is None:
                raise UserError(
                    "no client answered in the closing lap: start the clients, then start the run "
                    "again"
                )
            s = s.next(model=self._closed(fed, s), body=None, totals=None, closed=True)
            yield s

    def _body(self, fed: Fed, s: Any) -> Ref[Weights] | Weights:
        """Return the method's model, or the Ref to it."""
        if s.body is not None:
            return s.body  # type: ignore[no-any-return]
        if s.model is None or s.personal:
            raise UserError(
                f"{self.lapped.title()} has not given one global model: leave out {LAP}"
            )
        if isinstance(s.model, Ref):
            owner = fed.clients[0] if s.model.owner == EVERYONE else s.model.owner
            return fed.call(self.lap_body, owner, s.model)
        return s.model if isinstance(s.model, Weights) else s.model.model

    def _closed(self, fed: Fed, s: Any) -> Ref[Weights] | Weights:
        if isinstance(s.body, Ref):
            return fed.call(self.lap_close, s.body.owner, s.body, s.totals)
        return refitted(s.body, fed.layout, fed.get(s.totals), fed.task)

    @property
    def lap_body(self) -> Any:
        """Return only the model from the result of the method's last task."""

        @on_client(gives="nothing")
        def lap_body(client: Client, handed: Weights | HasModel) -> Weights:
            return handed if isinstance(handed, Weights) else handed.model

        lap_body.__annotations__["handed"] = _handed(self.lapped)
        return lap_body

    @on_client(gives="sum")
    def lap_add(self, client: Client, model: Weights, before: Totals | None) -> Totals:
        """Add the own sums to those received; the first client settles the scales."""
        with torch.no_grad():
            features: Iterator[tuple[Tensor, Tensor]]
            features = ((client.probe(x, model)[0], y) for x, y in client.batches(passes=0))
            if before is None:
                held = list(islice(features, -(-_SAMPLES // client.training.batch_size)))
                scales = settled(torch.cat([h for h, _ in held]))
                features = chain(held, features)
            else:
                scales = before.scales
                refuse_foreign(scales, client.layout)
            blocks = ((whole(h, scales), y) for h, y in features)
            own = sums_of(
                blocks, client.task, client.classes, len(scales.centre), model.params.device, WIDE
            )
        return Totals(scales, client.added(before.sums if before else None, own, (model, scales)))

    @on_client(gives="nothing")
    def lap_close(self, client: Client, model: Weights, totals: Totals) -> Weights:
        """Return the model with the classifier that follows from the totals."""
        return refitted(model, client.layout, totals, client.task)

    def steps(self, clients: int) -> int:
        """Return the method's steps, N hops and the solution."""
        return self.without_lap.steps(clients) + clients + 1

    def cost(self, clients: int, model: Size) -> int:
        """What the method costs and N·(M + S); less M where a client has it.

        S = 4D(D + 1) + 8KD + 8K + 8D; 8D + 8K + 8 more unless labels are classes.
        """
        return self.without_lap.cost(clients, model) + clients * (model + handed_on(model))

    def moved(self, end: Any, clients: int, model: Size) -> int:
        """The method's `moved`, and (N - 1)·M + N·S if a client had its model, or N·(M + S) if the
        server had it.
        """
        before = self.without_lap.moved(end, clients, model)
        sums = handed_on(model)
        if isinstance(end.model, Ref):
            return before + (clients - 1) * model + (clients * sums if clients > 1 else 0)
        return before + clients * (model + sums)


def with_lap(method: Method) -> Method:
    """Return a method with a closing lap: the same hyperparameters, and a name that ends with
    `+lap`.
    """
    return _copied(method, lapped(type(method)))


@cache
def lapped(kind: type[Method]) -> type[Method]:
    """Return the class of the methods of `kind` with a closing lap."""
    if taken := [name for name in _OWN if hasattr(kind, name)]:
        raise UserError(
            f"{kind.title()} already has a closing lap, or something called {taken[0]}: leave out "
            f"{LAP}"
        )
    about = f"{(kind.__doc__ or '').strip()}\n\nA closing lap then refits the classifier exactly."
    # The classifier is solved for.
    traits = replace(kind.traits, weighs=False)
    values = {"__doc__": about, "__module__": kind.__module__, "lapped": kind, "traits": traits}
    return type(f"{kind.__name__}{LAP}", (ClosingLap, kind), values)


def _copied(method: Method, kind: type[Method]) -> Method:
    """Return a method of `kind` with the hyperparameters of another."""
    return kind(**{f.name: getattr(method, f.name) for f in fields(method)})


_OWN = ("lapped", "without_lap", "lap_body", "lap_add", "lap_close")


def handed_on(model: Size) -> int:
    """Return S, the bytes of a hand-off without the model."""
    features = model.layout.head.inputs - 1
    return size_of_sums(model.task, model.layout.classes, features, wide=True) + 8 * features


def settled(features: Tensor) -> Scales:
    """Return scales from some features (n, D) of the first client."""
    if not torch.isfinite(features).all():
        raise UserError(
            "the final model has features that are not finite, so no classifier fits them: lower "
            "--lr"
        )
    rows = features.double()
    spread = rows.std(0, correction=0)
    spread = torch.maximum(spread, spread.mean()).clamp(min=1e-12)
    return Scales(rows.mean(0).float(), (WIDE / _REACH / spread).float())


def refuse_foreign(scales: Scales, layout: Layout) -> None:
    """Refuse scales from another party that do not belong to this network."""
    wanted = [((layout.head.inputs - 1,), torch.float32)] * 2
    if forms(scales) != wanted:
        raise UserError(
            "the scales received are of other features than here: use the same model everywhere"
        )
    if not all(torch.isfinite(t).all() for t in scales) or not (scales.gain > 0).all():
        raise UserError("the scales received are not finite, or not positive: refused")


def whole(features: Tensor, scales: Scales) -> Tensor:
    """Return features (b, D) as whole numbers from -32767 to 32767; larger values are cut off."""
    return ((features - scales.centre) * scales.gain).round().clamp(-WIDE, WIDE)


def refitted(model: Weights, layout: Layout, totals: Totals, task: Task) -> Weights:
    """Return `model` with the totals' classifier, written for features that are not
    standardised.
    """
    refuse_foreign(totals.scales, layout)
    m = heads.moments(totals.sums, task.unit)
    rows = m.rows(heads.outputs(heads.ridge(m), m, task))
    centre, gain = (t.cpu().double() for t in totals.scales)
    weight = rows[:, :-1] * gain
    rows = torch.column_stack([weight, rows[:, -1] - weight @ centre])
    params = model.params.clone()
    layout.head.put(params, rows.to(params))
    return model.with_params(params)


@cache
def _state(kind: type[State]) -> type[State]:
    """Return a class of states: `kind` with the fields of `Lap`."""
    return make_dataclass("Lapped", [], bases=(Lap, kind), frozen=True)


def _with_lap(s: State) -> State:
    """Return a method's state as one with a lap that has not begun."""
    if isinstance(s, Lap):
        return s
    values = {f.name: getattr(s, f.name) for f in fields(s)}
    return _state(cast(Any, type(s)))(**values)


def _order(clients: Sequence[str], body: Ref[Weights] | Weights) -> tuple[str, ...]:
    """Return the clients of the lap, the one that has the model first."""
    first = body.owner if isinstance(body, Ref) else clients[0]
    return (first, *(k for k in clients if k != first))


@cache
def _handed(method: type[Method]) -> Any:
    """Return those return types of its tasks that contain a model."""
    tasks = [
        task
        for name in dir(method)
        if getattr(task := getattr(method, name, None), "__on_client__", False)
    ]
    kinds = dict.fromkeys([Weights, *(get_type_hints(task)["return"] for task in tasks)])
    return reduce(
        or_, (k for k in kinds if k is Weights or "model" in getattr(k, "__annotations__", {}))
    )
