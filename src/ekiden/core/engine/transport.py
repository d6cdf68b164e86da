"""The contract of transports, which bring tasks to clients and values to those who use them.

What several parties add up is taken apart here into whole numbers that masks can hide, and put
together again.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked, Packed, Shared, bits_of, digest, narrowed, wide
from ekiden.core.engine import wire
from ekiden.core.engine.wire import EVERYONE, Ref
from ekiden.core.training.fit import Work
from ekiden.core.training.weights import Weights


class ClientMissing(UserError):
    """A client did not answer in time."""


class Interrupted(UserError):
    """A process in which clients run died. A run in a folder continues from its last state on a new
    transport.
    """


@dataclass(frozen=True)
class Transfer:
    """A row of the ledger: one party used a value of another party."""

    step: int  # the step in which it moved
    source: str  # its owner
    target: str  # who used it
    task: str  # the task that used it ("get" at the server)
    bytes: int  # content on the wire, see `wire.size`
    missing: bool = False  # True if nothing came because `source` did not answer
    value: str = ""  # the name of the value at its owner; empty if the server carried it


@dataclass(frozen=True)
class Request:
    """A task that the server asks for."""

    step: int  # step of the run
    call: int  # number of earlier tasks of this client in this step
    client: str  # who does it
    task: str  # name of the method's function
    args: tuple[Any, ...]  # its arguments after the client; they may be Refs
    among: tuple[str, ...] = ()  # if the task gives a part to a sum: all clients that do

    @property
    def key(self) -> str:
        """The name of its result at the client."""
        return f"{self.step}-{self.call}-{self.task}"


class Transport(ABC):
    """How tasks reach clients and how values travel. Only the run loop uses it; methods never see
    it.

    What a transport promises:

    - It does each task as `Worker.execute` does, with the private state after the client's previous
      task. Tasks of one client are done in the order in which they were submitted.
    - Arguments arrive unchanged, with each Ref replaced by its value. `value` gives what the task
      returned, bit for bit, as often as it is called. All parties can make the value behind
      `INITIAL` themselves.
    - After `commit` and `settle`, a transport that is made with the new state has the values that
      this state names, and the clients' private state of that moment, whatever was done later.
    - Where a client does not answer, the transport raises `ClientMissing`, and the task counts as
      not done. Where what died can be started again, it raises `Interrupted`, and the run does the
      step again on a new transport.

    `ekiden.lab.conformance.check_transport` measures all but the last.
    """

    @abstractmethod
    def submit(self, request: Request) -> None:
        """Start a task. Return without waiting for it if other tasks can be done meanwhile."""

    @abstractmethod
    def value(self, ref: Ref[Any]) -> Any:
        """Wait for the value behind `ref`, and return it.

        Raises:
            ClientMissing: its owner does not answer.
        """

    @abstractmethod
    def commit(self, step: int, live: frozenset[Ref[Any]]) -> Mapping[Ref[Any], Work]:
        """Wait for all tasks; make durable what the state after `step` steps needs: private state
        and values `live`.

        Until `settle` a run may still resume from the state before, so what that state needs is
        kept too.

        Returns:
            The compute of each task since the last commit, by its result.

        Raises:
            ClientMissing: the owner of one of the values does not answer.
        """

    def size(self, ref: Ref[Any]) -> int:
        """Wait for the value behind `ref`, and return its `wire.size`."""
        return wire.size(self.value(ref))

    def drop(self, ref: Ref[Any]) -> None:  # noqa: B027
        """Forget a value that nobody asks for again, if that makes room before the step ends."""

    @property
    def regroups(self) -> bool:
        """Whether parts of a sum at the server open only together, and are asked for again if a
        client is missing.
        """
        return False

    def reachable(self, client: str) -> bool:
        """Wait for a client; return whether it can be asked for a part of a sum, where the
        transport regroups.
        """
        return True

    def written(self) -> Mapping[str, str] | None:
        """Return when each client's private state was last written, as of the last commit, in a
        form of its own.

        It is kept with the run's state, and given to the transport of a run that resumes. So a
        private state that is missing is told from one that was never written. None if this is not
        known.
        """
        return None

    def trained(self) -> Mapping[str, Weights]:
        """Return the model that each client trained last in this step, where the setup says
        `show_trained`.
        """
        return {}

    @property
    def defers(self) -> bool:
        """Whether it is left to `sync` to wait for the disk: all is in files of this machine."""
        return False

    def sync(self) -> None:  # noqa: B027  (a transport that does not defer has nothing to wait for)
        """Wait until what was committed is on the disk."""

    def settle(self) -> None:  # noqa: B027  (a transport that keeps nothing has nothing to delete)
        """Delete what only the state before needed: the new one is written."""

    def close(self) -> None:  # noqa: B027
        """Release processes, connections and files."""


def refs(value: Any) -> Iterable[Ref[Any]]:
    """Return all Refs in `value`, in order."""
    return (leaf for leaf in wire.leaves(value) if isinstance(leaf, Ref))


def resolve(value: Any, fetch: Callable[[Ref[Any]], Any]) -> Any:
    """Return `value` with every Ref replaced by what `fetch` gives for it."""
    if isinstance(value, Ref):
        return fetch(value)
    if not any(True for _ in refs(value)):
        return value
    return wire.rebuilt(value, lambda part: resolve(part, fetch))


def live_refs(state: Any) -> frozenset[Ref[Any]]:
    """Return the values that a run in this state can still ask for, without those that follow from
    the seed.
    """
    return frozenset(ref for ref in refs(state) if ref.owner != EVERYONE)


class Summands(NamedTuple):
    """The whole numbers of a payload."""

    form: str  # JSON tree of the payload, with places in place of the numbers that are added up
    # these numbers as unsigned words, tensor by tensor; single numbers are in the last one
    words: list["np.ndarray[Any, Any]"]
    bits: list[int]  # how many bits of each count
    shared: list[int]  # whole numbers that are not added up

    @property
    def check(self) -> int:
        """The digest of the numbers, except for those that may wrap around."""
        pairs = zip(self.words, self.bits, strict=True)
        return digest([w.view(f"<i{b // 8}") for w, b in pairs if w.itemsize * 8 == b])

    def tensors(self) -> list[Tensor]:
        """Return the numbers as they travel."""
        return [narrowed(w, b) for w, b in zip(self.words, self.bits, strict=True)]


def summands(value: Any) -> Summands:
    """Take a payload apart."""
    taken = _Taken([], [], [], [])
    tree = taken.tree(value)
    if taken.singles:
        taken.tensors.append((torch.tensor(taken.singles, dtype=torch.int64), 64))
    form = json.dumps({"tree": tree, "shapes": taken.shapes}, separators=(",", ":"))
    words = [wide(t.flatten(), b) for t, b in taken.tensors]
    return Summands(form, words, [b for _, b in taken.tensors], taken.shared)


def opened(total: Masked, kind: Any) -> Any:
    """Return the payload of type `kind` that a complete sum hides."""
    words = [wide(t, b) for t, b in zip(total.numbers, total.bits, strict=True)]
    if Summands(total.form, words, total.bits, total.shared).check != total.check:
        raise UserError(
            f"sum {total.sum} does not open: a number in it is too large (leave out silos, or some "
            "samples of the largest), a silo changed it, or the silos were sent different values"
        )
    try:
        form = json.loads(total.form)
        shapes = form["shapes"]
        named = {
            str(i): t.reshape(shape)
            for i, (t, shape) in enumerate(zip(total.numbers, shapes, strict=False))
        }
        singles = total.numbers[-1].tolist() if len(total.numbers) > len(shapes) else []
        tree = _with_numbers(form["tree"], {"number": singles, "shared": total.shared})
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, RecursionError) as error:
        raise wire.WireError(
            f"sum {total.sum} cannot be read ({type(error).__name__}): refused"
        ) from None
    return wire.read_tree(tree, named, kind)


class _Taken(NamedTuple):
    """What `summands` found so far."""

    tensors: list[tuple[Tensor, int]]
    shapes: list[tuple[int, ...]]
    singles: list[int]
    shared: list[int]

    def tree(self, value: Any, packed: int = 0) -> Any:
        """Return the JSON tree of `value`; its numbers go into the lists."""
        if isinstance(value, Tensor):
            if not (bits := packed or bits_of(value)):
                raise UserError(
                    f"a sum of {value.dtype} cannot be masked: add up whole numbers of int32 or "
                    "int64 (FedKrylov: --sums=whole)"
                )
            self.tensors.append((value, bits))
            self.shapes.append(tuple(value.shape))
            return {"tensor": len(self.tensors) - 1}
        if type(value) is int:
            self.singles.append(value)
            return {"number": len(self.singles) - 1}
        if wire.is_record(value):
            return {"record": wire.record_name(type(value)), "fields": self.record(value)}
        if isinstance(value, (list, tuple)):
            return [self.tree(part) for part in value]
        if isinstance(value, Mapping):
            return {"dict": [[key, self.tree(part)] for key, part in value.items()]}
        raise UserError(f"a {type(value).__name__} in a sum cannot be masked: add up whole numbers")

    def record(self, value: Any) -> dict[str, Any]:
        """Return the fields of a record as `tree` gives them."""
        hints = get_type_hints(type(value), include_extras=True)
        found = {}
        for name in wire.field_names(type(value)):  # type: ignore[arg-type]  # mypy issue 11469
            marks = getattr(hints[name], "__metadata__", ())
            part = getattr(value, name)
            packed = next(
                (getattr(value, mark.bits) for mark in marks if isinstance(mark, Packed)), 0
            )
            if Shared in marks:
                self.shared.append(part)
                found[name] = {"shared": len(self.shared) - 1}
            else:
                found[name] = self.tree(part, packed)
        return found


def _with_numbers(node: Any, numbers: Mapping[str, list[int]]) -> Any:
    """Return a tree with numbers in their places."""
    if isinstance(node, dict):
        kind, *more = node or [""]
        if kind in numbers and not more:
            return numbers[kind][node[kind]]
        return {key: _with_numbers(part, numbers) for key, part in node.items()}
    if isinstance(node, list):
        return [_with_numbers(part, numbers) for part in node]
    return node
