"""What a federated method is: hyperparameters, an outer loop, and typed tasks that clients do."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, get_type_hints, overload

from torch import nn

from ekiden.core import tasks
from ekiden.core.base.checks import Checked
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Dataset
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.wire import EVERYONE, Ref
from ekiden.core.tasks import Need
from ekiden.core.training.network import Network
from ekiden.core.training.private.promise import DP
from ekiden.core.training.weights import Layout, Weights

T_co = TypeVar("T_co", covariant=True)
Task = TypeVar("Task", bound=Callable[..., Any])
INITIAL: Ref[Weights] = Ref(EVERYONE, "initial")
"""The initial model: everyone builds it from the seed, so it never travels."""


class OwnSamples:
    """Mark, with `Annotated`, the field of a payload that holds its sender's number of training
    samples.

    The field is a number, or a tensor of counts that add up to it; a float may also be 1, if all
    clients have the same weight. Between machines the server compares it with the number that the
    silo gave when the run began.
    """


class HasModel(Protocol):
    """A payload in which a model travels with something else, for example a count."""

    @property
    def model(self) -> Weights:
        """Return the model in it."""


CLASSES: frozenset[Need] = frozenset({"classes"})  # In `Traits.needs`: one class for each sample
# In `Traits.needs`: one vector of outputs for each sample
VECTORS: frozenset[Need] = frozenset({"vectors"})
NUMBERS: frozenset[Need] = frozenset({"numbers"})
"""In `Traits.needs`: inputs that are numbers, because the method makes or mixes inputs"""
CONTINUOUS: frozenset[Need] = frozenset({"numbers", "continuous"})
"""In `Traits.needs`: numbers without codes of categories, because the method makes them change
places"""

Model = Ref[Weights] | Ref[HasModel] | Weights

_CLASSES = tasks.Classification()


@dataclass(frozen=True)
class State:
    """All that a run knows between two steps. A method that needs more adds fields in a subclass.

    Attributes:
        step: number of steps done.
        model: the global model, or the payload that it travels in; at the end, the result. None if
            a method has none.
        personal: one model per client, in the order of `fed.clients`, if the method personalises.
    """

    step: int = 0
    model: Model | None = INITIAL
    personal: tuple[Model, ...] = ()

    def next(self, **changes: Any) -> Self:
        """Return the state after one more step, with these fields replaced."""
        return replace(self, step=self.step + 1, **changes)


class Size(int):
    """M, the bytes of a model on the wire. It knows the network, for methods that send parts of it.

    Attributes:
        network: the network.
        shape: of one sample.
        task: what the labels mean.
    """

    network: Network
    shape: tuple[int, ...]
    task: tasks.Task

    @classmethod
    def of(cls, network: Network, shape: tuple[int, ...] = (), task: tasks.Task = _CLASSES) -> Self:
        """The size of `network`, which takes samples of `shape`."""
        size = cls(wire.size(network.weights()))
        size.network = network
        size.shape = shape
        size.task = task
        return size

    @property
    def layout(self) -> Layout:
        """Its layers."""
        return self.network.layout

    @property
    def head(self) -> int:
        """The bytes of the classifier alone."""
        return wire.size(self.network.head.of(self.network.weights()))


Gives = Literal["nothing", "sum", "summary", "model"]
"""What the value of a task tells about its client's samples:

- `nothing`: it follows from the seed and from values that were given to the client.
- `sum`: a part that only the total of all clients shows (`Client.added`).
- `summary`: statistics of this client's samples alone: means, moments, mixtures, second
  derivatives.
- `model`: a model that was trained on them, and what goes with one: norms, numbers of samples,
  class counts.
"""
Chooser = Literal["nobody", "all", "party"]


@overload
def on_client(task: Task) -> Task: ...
@overload
def on_client(*, gives: Gives | Callable[[Any], Gives | None]) -> Callable[[Task], Task]: ...
def on_client(task: Any = None, *, gives: Any = None) -> Any:
    """Mark a method's function as a task that clients do. They run nothing else.

    Args:
        task: the function.
        gives: what its value tells about the client's samples, or a function that says so of a
            method; None with hyperparameters with which the method does not use the task. Between
            machines a silo does no task that does not declare it.
    """

    def marked(task: Any) -> Any:
        task.__on_client__ = True
        task.__gives__ = gives
        return task

    if task is None:
        return marked
    return marked(task)


@dataclass(frozen=True)
class Traits:
    """What a method declares about itself, in `Method.traits`.

    Attributes:
        private: type of `client.state`, for methods whose clients keep something between steps.
        skips: whether a run can continue without a missing client: with fewer replies in a round,
            or with a hop left out.
        pools_data: whether all data are brought to one place first: a yardstick for simulation, not
            a federated method.
        needs_validation: whether every client must have validation data.
        splits_model: whether extractor and classifier are treated differently, so that the network
            must declare its head.
        joins_models: whether the result is not one model but the clients' N models, which answer
            together.
        averages: whether it may combine several models value by value. False if one model is handed
            on, or clients train apart.
        extra_outputs: outputs of the clients' network beyond one for each class, for example one
            for "unknown". M includes them.
        needs: what the data must have in addition to a loss: `CLASSES`, `VECTORS`, `NUMBERS`,
            `CONTINUOUS`, a union, or nothing. A run with other data is refused before anything is
            written.
        one_model: whether a run ends with a global model and without personal ones.
        weighs: whether clients train on the task's loss, in which classes can have weights
            (`--class-weights`). False if they solve for the model or have a loss of their own.
        releases: whether each client can give noisy sums over its samples once in a run, and
            nothing else about them (`Client.release`), so that `--dp` holds.
        limit: the hyperparameter that only limits the number of steps, so that a run can resume
            with a larger one.
    """

    private: Any = None
    skips: bool = False
    pools_data: bool = False
    needs_validation: bool = False
    splits_model: bool = False
    joins_models: bool = False
    averages: bool = True
    extra_outputs: int = 0
    needs: frozenset[Need] = frozenset()
    one_model: bool = True
    weighs: bool = True
    releases: bool = False
    limit: str = ""


@dataclass(frozen=True)
class Method(Checked, ABC):
    """A federated method: a frozen dataclass of the paper's hyperparameters.

    `run` is the paper's outer loop; functions marked `@on_client` are what clients do. A method
    holds no other state than the `State` that it yields: only what is in that state survives a
    crash. Its fields are checked by their annotations when it is made; see `ekiden.core.base.checks`.
    """

    traits: ClassVar[Traits] = Traits()
    """What the method declares about itself."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse tasks and hyperparameters whose names mean something else in a method.

        Raises:
            UserError: names the class and the task or field.
        """
        super().__init_subclass__(**kwargs)
        own = set[str]()
        for name, kind in inspect.get_annotations(cls).items():
            if "ClassVar" not in str(kind):
                own.add(name)
        tasks = {
            name for name, value in vars(cls).items() if getattr(value, "__on_client__", False)
        }
        inherited = set[str]()
        for base in cls.__mro__[1:]:
            inherited.update(getattr(base, "__dataclass_fields__", ()))
        for name in sorted(own | tasks):
            what = "task" if name in tasks else "field"
            if hasattr(Method, name):
                raise UserError(
                    f"{cls.__name__} has a {what} called {name}, which has a meaning in Method: "
                    "rename it"
                )
            if name in tasks and name in own | inherited:
                raise UserError(
                    f"{cls.__name__} has a task and a field that are both called {name}: rename one"
                )

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse hyperparameters without a name: FedAvg(5) would be five rounds, FedSeq(5) epochs.

        Raises:
            UserError: names the first of them.
        """
        if args:
            first = next((f.name for f in fields(cls) if f.init), "name")
            raise UserError(
                f"{cls.__name__}({args[0]!r}) does not say which hyperparameter it means: write "
                f"{cls.__name__}({first}={args[0]!r})"
            )
        return super().__new__(cls, **kwargs)

    def own_network(
        self, network: nn.Module, shape: tuple[int, ...], classes: int, task: tasks.Task
    ) -> nn.Module:
        """Return the network of all parties, made from the one that the user chose; by default the
        same network.

        Every party calls this, with torch's random state set by the run's seed.

        Args:
            network: what the user chose, for samples of `shape` and this number of `classes`; it
                may be changed.
            shape: of one sample.
            classes: K, the outputs that the network made must have.
            task: what the labels mean.
        """
        return network

    @abstractmethod
    def run(self, fed: Fed, s: Any) -> Iterator[State]:
        """Run the outer loop from state `s` on, and yield the state after each step."""

    @abstractmethod
    def steps(self, clients: int) -> int:
        """Return the number of steps of a run over this number of clients."""

    @abstractmethod
    def cost(self, clients: int, model: Size) -> int:
        """Return the bytes that a run over this number of clients moves, for a model of `model`
        bytes on the wire.
        """

    def moved(self, end: Any, clients: int, model: Size) -> int:
        """Return the bytes that a run with last state `end` moved: `cost`, unless they depend on
        what happened.
        """
        return self.cost(clients, model)

    def result_network(self, network: nn.Module, clients: int) -> nn.Module:
        """Return the network that the run's model fits, made from the clients' own; by default the
        same network.
        """
        return network

    def complete(self, state: Any) -> bool:
        """Return whether a run may end with this state: it holds a model."""
        return state.model is not None or bool(state.personal)

    @property
    def needs(self) -> frozenset[Need]:
        """`Traits.needs`, unless it depends on the hyperparameters."""
        return self.traits.needs

    @property
    def one_model(self) -> bool:
        """`Traits.one_model`, unless it depends on the hyperparameters."""
        return self.traits.one_model

    @property
    def chosen_by(self) -> Chooser:
        """Who chose the point at which a client's sums and summaries are computed: features,
        coefficients, a model.

        `nobody` if it follows from the seed or from what the client has itself; `all` if it follows
        from values of all clients that each of them checked; else one `party`, which could have
        made it to show single samples. Of a method that says `nobody` silos take no model but the
        initial one.
        """
        return "party"

    @property
    def least(self) -> int | None:
        """k, the smallest number of samples behind each number of a sum or summary; None: the silo
        counts them.
        """
        return 0

    @property
    def gives_sums(self) -> bool:
        """Whether clients give parts to sums, which transports can mask."""
        return any(gives_of(self, task) == "sum" for task in task_names(type(self)))

    @property
    def changes_network(self) -> bool:
        """Whether the result needs another network than the clients' own."""
        return type(self).result_network is not Method.result_network

    def with_source(self, model: str, pretrained: str) -> tuple[Self, str, str]:
        """The method, its network and the file of its values, where a hyperparameter names a
        finished run.

        Args:
            model: name of the network that the user chose, or auto.
            pretrained: file with its values; empty: none.

        Raises:
            UserError: there is no such run, or it cannot be used.
        """
        return self, model, pretrained

    def check_source(self, pretrained: str, dataset: Dataset) -> None:
        """Refuse values that `with_source` found, and that are for other data than these.

        Raises:
            UserError: says what differs.
        """

    def check(self, clients: Sequence[str]) -> None:
        """Refuse clients that the hyperparameters do not fit, before anything is written.

        Raises:
            UserError: says what to change.
        """

    def check_network(self, model: Size) -> None:
        """Refuse a network that the method cannot treat, before anything is written. The network is
        not changed.

        Raises:
            UserError: says what to change.
        """

    def selection(self, select: str) -> str:
        """Return what local training returns. It is `select`, from `--select`, unless the method
        itself decides it.
        """
        return select

    def fits(self) -> tuple[int, ...] | None:
        """Return the epochs of each `Client.fit` of a client in a run, if tasks report nothing else
        about samples.

        A method that returns them can run with differential privacy: its tasks tell nothing else
        that depends on samples, except how many there are. None, the default: no guarantee fits the
        method.
        """
        return None

    def with_noise(self, dp: DP | None) -> Self:
        """Return the method as it runs with differential privacy, or without.

        Raises:
            UserError: no guarantee fits the method with these hyperparameters.
        """
        if dp is None:
            return self
        if self.fits() is None:
            raise UserError(
                f"{self.title()} is not supported with --dp: it sends more than noisy gradients "
                "protect. Choose another method (docs/privacy.md lists them)"
            )
        if dp.honest > 1:
            raise UserError(
                f"--dp honest={dp.honest} shares the noise of sums, {self.title()} has none: leave "
                "it out"
            )
        return self

    def start(self) -> State:
        """Return the state before the first step: what `run` takes, by the annotation of its `s`.

        It has no model if the result needs another network than the clients' own.
        """
        kind = get_type_hints(type(self).run).get("s")
        if not (isinstance(kind, type) and issubclass(kind, State)):
            kind = State
        if self.changes_network:
            return kind(model=None)
        return kind()

    @classmethod
    def title(cls) -> str:
        """The name on the command line."""
        return cls.__name__.lower()


def task_names(kind: type[Method]) -> list[str]:
    """Return the names of a method's tasks."""
    return [
        name
        for name, function in inspect.getmembers(kind)
        if getattr(function, "__on_client__", False)
    ]


def gives_of(method: Method, name: str) -> Gives | None:
    """Return what a task gives; None if nobody declared it, or if it has no use with these
    hyperparameters.
    """
    said: Any = task_of(method, name).__gives__  # type: ignore[attr-defined]
    found: Gives | None = said(method) if callable(said) else said
    return found


def payload_types(method: Method, name: str) -> tuple[list[Any], Any]:
    """Return the annotated types of a task's arguments (after the client) and of its value.

    Raises:
        UserError: an annotation is missing, or uses a name that its file does not know.
    """
    task = task_of(method, name)
    where = f"{name} of {type(method).__name__}"
    try:
        hints = get_type_hints(task)
    except NameError as error:
        raise UserError(
            f"the annotations of {where} cannot be read ({error}): import what they name"
        ) from None
    arguments = list(inspect.signature(task).parameters)[1:]
    if missing := [p for p in (*arguments, "return") if p not in hints]:
        what = ", ".join("what it returns" if p == "return" else repr(p) for p in missing)
        raise UserError(
            f"{where} does not say the type of {what}: annotate it, as values are checked when "
            "they arrive"
        )
    return [hints[p] for p in arguments], hints["return"]


def task_of(method: Method, name: str) -> Callable[..., Any]:
    """Return the function `name` of `method`, if it is a task."""
    task: Callable[..., Any] | None = getattr(method, name, None)
    if task is None or not getattr(task, "__on_client__", False):
        raise UserError(
            f"{method.title()} has no client task {name!r}: clients run only functions marked "
            "@on_client"
        )
    return task
