"""What all other parties together read of one silo's samples, whatever they choose, at each level.

Every method of the registry is attacked in the same way, with none of them named: the coordinator
draws hyperparameters and a network, and whatever model the silo is given is replaced by one that is
made to tell its samples apart (Liam Fowl et al.: Robbing the Fed. ICLR 2022.
https://arxiv.org/abs/2110.13057): the first layer's units answer to samples above one threshold
each, so neighbouring units differ by few samples. What the silo answers, less what it was given, is
then searched for its samples. Masks hide nothing here: the parties that made all other parts of a
sum subtract them. The silo itself is unmodified, and decides what to refuse."""

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Training
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.data.samples import Subset
from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL, Method, payload_types, task_names
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.wire import Ref
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.methods import (
    METHODS,
    FedAvg,
    FedFisher,
    FedLPA,
    FedPFT,
    FedSeq,
    MAEcho,
    RegMean,
    between_machines,
)
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust.agreement import no_samples
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import NAMES, FakeNodes, mine, silo_file
from tests.silos.test_remote import far

pytestmark = pytest.mark.filterwarnings("ignore")
VICTIM = 1  # place of the silo among NAMES
NEAR = 0.01  # a pixel is between 0 and 1
GIVEN = Training(
    optimizer="sgd", lr=0.5, momentum=0, weight_decay=0, batch_size=4096, select="last"
)  # one step with all samples; also if epochs are more
# what a run may ask for here, so that a draw of large numbers is refused and does not take an hour
SMALL = "epochs = 20\nsteps = 8\ntasks = 40\n"


ROWS = """
import torch

from ekiden.data import federate

def mine():
    draw = torch.Generator().manual_seed(1)
    x = [torch.rand(60, 6, generator=draw) for _ in range(3)]
    return federate([(part, part.sum(1) + torch.rand(60, generator=draw)) for part in x])
"""


@cache
def rows() -> FederatedData:
    """Three silos with 60 rows of numbers from 0 to 1 each."""
    scope: dict[str, Any] = {}
    exec(ROWS, scope)
    found = scope["mine"]()
    assert isinstance(found, FederatedData)
    return found


def held(data: str, place: int) -> Held:
    """Return what the silo at this place has of "digits" or "rows"."""
    return mine(NAMES[place]) if data == "digits" else (rows().dataset, rows().clients[place])


def numbers(samples: Subset) -> Tensor:
    """(n, d) samples as numbers from 0 to 1."""
    x = samples.x.flatten(1).double()
    return x / 255 if samples.x.dtype == torch.uint8 else x


@dataclass
class Spoils:
    """Counts samples in what the attackers got."""

    train: Tensor  # (n, d)
    test: Tensor
    seen: set[int] = field(default_factory=set)
    seen_test: set[int] = field(default_factory=set)

    def search(self, told: Tensor) -> None:
        """Look for samples in the rows of a matrix, in differences of neighbouring rows, and in
        those of these."""
        if not told.numel() or told.shape[-1] < self.train.shape[1]:
            return
        rows = told.reshape(-1, told.shape[-1]).double()[:, : self.train.shape[1]]
        for found in (rows, rows.diff(dim=0), rows.diff(n=2, dim=0)):
            self.seen |= matches(found, self.train)
            self.seen_test |= matches(found, self.test)


def matches(rows: Tensor, samples: Tensor) -> set[int]:
    """Return which samples are among the rows, up to a factor, which an attacker finds from the
    range of pixels."""
    rows = rows[(rows.norm(dim=1) > 1e-9) & rows.isfinite().all(1)]
    found: set[int] = set()
    for block in torch.split(rows, 4096) if len(rows) else ():
        alike = (
            torch.nn.functional.normalize(samples, dim=1)
            @ torch.nn.functional.normalize(block, dim=1).T
        )
        best = alike.abs().max(1).indices
        near = block[best]
        scaled = near * ((near * samples).sum(1) / near.square().sum(1))[:, None]
        found |= set(((scaled - samples).abs().amax(1) < NEAR).nonzero().flatten().tolist())
    return found


def crafted(module: nn.Module, own: Tensor) -> Weights:
    """Return values of a network whose first linear layer tells samples apart by their brightness.

    `own` (n, d) are samples of the attackers, who so know what others look like.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for place, layer in enumerate(layers):
            if not layer.weight.requires_grad or layer.bias is None:
                continue
            if place == 0 and layer.in_features == own.shape[1] and len(layers) > 1:
                taste = torch.rand(own.shape[1], generator=torch.Generator().manual_seed(0))
                spread = (own @ taste).sort().values
                thresholds = torch.linspace(float(spread[0]), float(spread[-1]), layer.out_features)
                layer.weight.copy_(taste.expand_as(layer.weight))
                layer.bias.copy_(-thresholds)
            elif place < len(layers) - 1:
                layer.weight.fill_(1 / layer.in_features)
                layer.bias.zero_()
            else:
                layer.weight.copy_(
                    torch.linspace(-1, 1, layer.out_features)[:, None].expand_as(layer.weight)
                )
                layer.bias.zero_()
    return Network(module).weights()


class Together(FakeNodes):
    """The coordinator and all silos but one, who share what they know."""

    def __init__(self, files: list[SiloFile], method: Method, data: str) -> None:
        super().__init__(files)
        client = held(data, VICTIM)[1]
        self.method, self.data = method, data
        self.spoils = Spoils(numbers(client.train), numbers(client.test))
        self._made: Weights | None = None
        self._layout: Any = None

    def silo(self, node: int) -> Silo:
        return Silo(self.files[node], held(self.data, node - 100))

    def send(self, node: int, data: bytes) -> str | Lost:
        if node != 100 + VICTIM:
            return super().send(node, data)
        ask, body = unpack(data, Ask)
        ticket = str(len(self.log))
        self.log.append((node, data))
        given: list[Tensor] = []
        answer = b""
        if ask.kind == "task":
            changed, given = self.changed(ask, bytes(body))
            answer = self.silo(node).answer(changed)
        if not answer or unpack(answer, Answer)[0].error:
            answer = self.silo(node).answer(data)
        self.read(ask, answer, given)
        self._answers[ticket] = answer
        return ticket

    def changed(self, ask: Ask, body: bytes) -> tuple[bytes, list[Tensor]]:
        """Return a request with the crafted model in place of all models, and the tensors in it."""
        self.build(ask)
        kinds, _ = payload_types(self.method, ask.task)
        expected: Any = tuple[tuple(kinds)] if kinds else tuple  # type: ignore[misc]
        found = wire.decode(body[: ask.length], expected, lambda ref: ref) if kinds else ()
        args = tuple(self.swapped(arg) for arg in found)
        pieces, parts, offset, given = [wire.encode(args)], [], ask.length, list(tensors(args))
        for part in ask.parts:
            _, kind = payload_types(self.method, part.key.split("-", 2)[-1])
            value = self.swapped(wire.decode(body[offset : offset + part.length], kind))
            offset += part.length
            given += tensors(value)
            pieces.append(wire.encode(value))
            parts.append(replace(part, length=len(pieces[-1])))
        return pack(replace(ask, length=len(pieces[0]), parts=tuple(parts)), pieces), given

    def build(self, ask: Ask) -> None:
        terms = agreements.parse(ask.agreement)
        if self._layout is None:
            module = terms.setup(no_samples(terms), Hardware(threads=1)).build()
            self._layout = Network(module).layout
            with suppress(UserError):
                self._made = crafted(module, numbers(held(self.data, 0)[1].train).float())

    def swapped(self, value: Any) -> Any:
        """Return a value with the crafted model in place of each model."""
        if self._made is None:
            return value
        if value == INITIAL or (isinstance(value, Weights) and value.shapes == self._made.shapes):
            return self._made
        if isinstance(value, (Ref, Tensor)):
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self.swapped(part) for part in value))
        if isinstance(value, (list, tuple)):
            return type(value)(self.swapped(part) for part in value)
        if isinstance(value, Mapping):
            return {key: self.swapped(part) for key, part in value.items()}
        return value

    def read(self, ask: Ask, answer: bytes, given: list[Tensor]) -> None:
        """Search what the silo gave."""
        task = ask.task if ask.kind == "task" else ask.key.split("-", 2)[-1]
        head, body = unpack(answer, Answer)
        if ask.kind not in ("task", "value") or head.error or not len(body):
            return
        value = wire.decode(body, payload_types(self.method, task)[1])
        for told in tensors(value):
            known = [t for t in given if t.shape == told.shape]
            if self._made is not None:
                known += [t for t in tensors(self._made) if t.shape == told.shape]
            for one in (told.double(), *(told.double() - t.double() for t in known)):
                for part in self.matrices(one):
                    self.spoils.search(part)

    def matrices(self, told: Tensor) -> Iterator[Tensor]:
        """Yield a tensor as matrices: as it is, by layers, and as a triangle of a symmetric
        matrix."""
        if told.ndim > 1:
            yield told
            return
        offset = 0
        for part in self._layout.params if self._layout else ():
            size = 1
            for side in part.shape:
                size *= side
            if offset + size <= len(told) and len(part.shape) > 1:
                yield told[offset : offset + size].view(part.shape[0], -1)
            offset += size
        side = int((2 * len(told)) ** 0.5)
        if side * (side + 1) // 2 == len(told):
            for rows, columns in (torch.tril_indices(side, side), torch.triu_indices(side, side)):
                full = told.new_zeros(side, side)
                full[rows, columns] = full[columns, rows] = told
                yield full


def tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in wire.leaves(value) if isinstance(leaf, Tensor))


def ones(kind: type[Method]) -> Method:
    """Return the method with its defaults between machines, and one epoch and one round."""
    method = between_machines(kind)
    for name in (one.name for one in fields(kind)):
        if name.endswith(("epochs", "rounds")):
            with suppress(UserError):
                method = replace(method, **{name: 1})
    return method


def drawn(kind: type[Method], seed: int) -> Method:
    """Return the method with some hyperparameters that an attacker draws."""
    draw, hints = random.Random(f"{kind.title()} {seed}"), get_type_hints(kind)
    for _ in range(20):
        chosen: dict[str, Any] = {}
        for name in (one.name for one in fields(kind)):
            hint = hints[name]
            if draw.random() < 0.5:
                continue
            if get_origin(hint) is Literal:
                chosen[name] = draw.choice(get_args(hint))
            elif hint is bool:
                chosen[name] = draw.random() < 0.5
            elif hint is int and not name.endswith(("epochs", "rounds")):
                chosen[name] = draw.choice((0, 1, 2, 500))
            elif hint is float:
                chosen[name] = draw.choice((0.0, 0.5, 1.0))
        with suppress(UserError):
            return replace(ones(kind), **chosen)
    return ones(kind)


def attack(
    method: Method, level: str, folder: Path, model: str = "mlp", data: str = "digits"
) -> Spoils:
    """Return what is read of one silo's samples in a run of a method."""
    files = [
        silo_file(folder, name, f'[limits]\nlevel = "{level}"\n{SMALL}', trusting=False)
        for name in NAMES
    ]
    nodes = Together(files, method, data)
    with suppress(
        UserError, ClientMissing
    ):  # a refusal, or numbers that the crafted model makes infinite
        far(method, nodes, folder / "run", model=model, training=GIVEN)
    return nodes.spoils


def attacks(kind: type[Method], level: str, folder: Path, draws: int) -> tuple[int, int]:
    """Return the most training and test samples of a silo that are read in one of some runs."""
    most = (0, 0)
    for seed in range(draws):
        method = drawn(kind, seed) if seed > 1 else ones(kind)
        for data in ("digits", "rows"):
            where = folder / f"{level}-{data}-{seed}"
            found = attack(method, level, where, ("mlp", "linear")[seed % 2], data)
            most = max(most[0], len(found.seen)), max(most[1], len(found.seen_test))
    return most


KINDS = [pytest.param(kind, id=kind.title()) for kind in METHODS if not kind.traits.pools_data]


def test_every_task_of_the_library_declares_what_it_gives() -> None:
    """So that a new one is judged, and attacked below."""
    for kind in METHODS:
        tasks = () if kind.traits.pools_data else task_names(kind)
        assert all(getattr(kind, name).__gives__ is not None for name in tasks), kind


@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_is_read_at_the_level_of_sums(kind: type[Method], tmp_path: Path) -> None:
    assert attacks(kind, "sums", tmp_path, 4) == (0, 0)


@pytest.mark.parametrize(
    ("method", "level", "model", "least"),
    [
        (FedAvg(rounds=1, epochs=1), "models", "mlp", 20),
        (FedSeq(epochs=1), "models", "mlp", 20),
        (RegMean(epochs=1), "all", "mlp", 20),
        (FedLPA(epochs=1), "all", "mlp", 20),
        (FedFisher(epochs=1), "all", "mlp", 20),
        (MAEcho(epochs=1), "all", "mlp", 20),
        (FedPFT(mixtures=500, half=False), "all", "linear", 100),
    ],
    ids=lambda value: value.title() if isinstance(value, Method) else str(value),
)
def test_the_harness_reads_samples_where_a_level_allows_it(
    method: Method, level: Literal["models", "all"], model: str, least: int, tmp_path: Path
) -> None:
    """Or it would find none at the level of sums because it is blind."""
    found = attack(method, level, tmp_path / "open", model)
    print(f"{method.title()}: {len(found.seen)} of {len(found.train)} training samples")
    assert len(found.seen) >= least
    below = "sums" if level == "models" else "models"
    assert not attack(method, below, tmp_path / "below", model).seen
