"""What all other parties together read of one silo's samples, whatever they choose, at each level.

Every method of the registry is attacked in the same way, with none of them named: the coordinator
draws hyperparameters and a network, and whatever model the silo is given is replaced by one that is
made to tell its samples apart (Liam Fowl et al.: Robbing the Fed. ICLR 2022.
https://arxiv.org/abs/2110.13057): the first layer's units answer to samples above one threshold
each, so neighbouring units differ by few samples. What the silo answers, less what it was given, is
then searched for its samples. Masks hide nothing here: the parties that made all other parts of a
sum subtract them. The silo itself is unmodified, and decides what to refuse."""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Training
from ekiden.core.base.checks import allows
from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.data.samples import Subset
from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL, Method, payload_types, task_names
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.wire import Encoded, Ref
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import federate
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
from ekiden.silos.silo import levels
from ekiden.silos.silo.levels import Level
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, Limits, SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust.agreement import Agreement, no_samples
from ekiden.silos.trust.masking import PartMasks
from ekiden.silos.trust.parcel import Answer, Ask, opened, pack, unpack
from ekiden.silos.trust.sealing import Party, kept_private
from tests.silos.fakes import NAMES, FakeNodes, mine, seal_for, silo_file
from tests.silos.sessions import far

pytestmark = pytest.mark.filterwarnings("ignore")
LIMIT = Limits().min_active
VICTIM = 1  # place of the silo among NAMES
NEAR = 0.01  # a pixel is between 0 and 1
GIVEN = Training(
    optimizer="sgd", lr=0.5, momentum=0, weight_decay=0, batch_size=4096, select="last"
)  # one step with all samples; also if epochs are more
# what a run may ask for here, so that a draw of large numbers is refused and does not take an hour
STEPS = 60
SMALL = f"epochs = 300\nsteps = {STEPS}\ntasks = 200\n"
DATA = ("digits", "numbers", "classes")
LEAST = 2  # attacks of each method that must get so far that the silo gives values


@cache
def rows(data: str) -> FederatedData:
    """Three silos with 60 rows of six numbers from 0 to 1 each, labelled by "numbers" or
    "classes"."""
    draw = torch.Generator().manual_seed(1)
    silos = []
    for _ in range(3):
        x = torch.rand(60, 6, generator=draw)
        y = x.sum(1) + torch.rand(60, generator=draw)
        silos.append((x, y if data == "numbers" else (y > y.median()).long()))
    return federate(silos)


def held(data: str, place: int) -> Held:
    """Return what the silo at this place has of each kind of data."""
    if data == "digits":
        return mine(NAMES[place])
    return rows(data).dataset, rows(data).clients[place]


def numbers(samples: Subset) -> Tensor:
    """(n, d) samples as numbers from 0 to 1."""
    x = samples.x.flatten(1).double()
    return x / 255 if samples.x.dtype == torch.uint8 else x


@dataclass
class Spoils:
    """Counts samples in what the attackers got."""

    train: Tensor  # (n, d)
    test: Tensor
    values: int = 0  # that the silo gave
    refused: str = ""  # why the run stopped
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
        self.sealed: list[bytes] = []
        self.parts: list[Any] = []
        self._made: Weights | None = None
        self._layout: Any = None

    def silo(self, node: int) -> Silo:
        return Silo(self.files[node], {"": held(self.data, node - 100)})

    def send(self, node: int, data: bytes) -> str | Lost:
        if node != 100 + VICTIM:
            return super().send(node, data)
        ask, body = unpack(data, Ask)
        ticket = str(len(self.log))
        self.log.append((node, data))
        given: list[Tensor] = []
        answer = b""
        if ask.kind == "task":
            changed, given = self.changed(self.files[node], ask, body)
            answer = self.answered(node, changed)
        if not answer or unpack(answer, Answer)[0].error:
            answer = self.answered(node, data)
        self.read(ask, answer, given)
        self._answers[ticket] = answer
        return ticket

    def answered(self, node: int, data: bytes) -> bytes:
        """Return the silo's answer, and note what it gives: readers open the seals, and those who
        made all other masks of a sum take the silo's own off."""
        self.sealed, self.parts = list[bytes](), list[Any]()
        seal, added = Party.seal, PartMasks.added

        def sealing(party: Party, value: Encoded, *about: Any) -> Any:
            self.sealed.append(value.data)
            return seal(party, value, *about)

        def masking(masks: PartMasks, before: Any, own: Any, about: Any) -> Any:
            self.parts.append(own)
            return added(masks, before, own, about)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Party, "seal", sealing)
            patch.setattr(PartMasks, "added", masking)
            return self.silo(node).answer(data)

    def changed(self, file: SiloFile, ask: Ask, body: Any) -> tuple[bytes, list[Tensor]]:
        """Return a request with the crafted model in place of all models, and the tensors in it.

        Who sealed what is in the request has it in the clear; here the silo's own key opens it."""
        terms = agreements.parse(ask.agreement)
        self.build(terms)
        key = kept_private(file.folder / "runs" / terms.run)
        own = opened(ask, body, Party(file.name, terms.run, terms.digest, key, terms.silos, None))
        kinds, _ = payload_types(self.method, ask.task)
        expected: Any = tuple[tuple(kinds)] if kinds else tuple  # type: ignore[misc]
        found = wire.decode(own.arguments.data, expected, lambda ref: ref) if kinds else ()
        args = tuple(self.swapped(arg) for arg in found)
        pieces, parts, given = [wire.encode(args)], [], list(tensors(args))
        for part in ask.parts:
            _, kind = payload_types(self.method, part.key.split("-", 2)[-1])
            value = self.swapped(wire.decode(own.values[part.owner, part.key].data, kind))
            given += tensors(value)
            pieces.append(wire.encode(value))
            parts.append(replace(part, length=len(pieces[-1]), lock=None))
        plain = replace(ask, length=len(pieces[0]), parts=tuple(parts), lock=None)
        return seal_for(file, pack(plain, pieces)), given

    def build(self, terms: Agreement) -> None:
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
        if ask.kind not in ("task", "value") or unpack(answer, Answer)[0].error:
            return
        kind = payload_types(self.method, task)[1]
        values = self.parts or [wire.decode(data, kind) for data in self.sealed]
        self.spoils.values += len(values)
        for told in tensors(values):
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
        # what the server computes, and the neighbours of one of three silos
        small = {"iterations": 10, "peers": 1}
        if name in small:
            method = replace(method, **{name: small[name]})
    return method


def drawn(kind: type[Method], seed: int, level: Level) -> Method:
    """Return the method with some hyperparameters that an attacker draws of those that their fields
    allow, and that a silo of this level admits if any are."""
    draw, hints = random.Random(f"{kind.title()} {seed}"), get_type_hints(kind)
    for _ in range(200):
        chosen: dict[str, Any] = {}
        for name in (one.name for one in fields(kind)):
            hint, values = hints[name], tuple[Any, ...]()
            if get_origin(hint) is Literal:
                values = get_args(hint)
            elif hint is bool:
                values = (False, True)
            elif hint is int and not name.endswith(("epochs", "rounds")):
                values = (0, 1, 2, 10, 500)
            elif hint is float:
                values = (0.0, 0.5, 1.0)
            values = tuple(value for value in values if allows(kind, name, value))
            if values and draw.random() < 0.5:
                chosen[name] = draw.choice(values)
        with suppress(UserError):
            method = replace(ones(kind), **chosen)
            if method.steps(len(NAMES)) <= STEPS and levels.allows(
                level, levels.needed(method, LIMIT)
            ):
                return method
    return ones(kind)


def attack(
    method: Method,
    level: str,
    folder: Path,
    model: str = "mlp",
    data: str = "digits",
    more: str = "",
    run: str = "run",
) -> Spoils:
    """Return what is read of one silo's samples in a run of a method."""
    limits = f'[limits]\nlevel = "{level}"\n{SMALL}{more}'
    files = [silo_file(folder, name, limits, trusting=False) for name in NAMES]
    nodes = Together(files, method, data)
    try:
        far(method, nodes, folder / run, model=model, training=GIVEN)
    except (UserError, ClientMissing) as error:  # a crafted model may also make numbers infinite
        if "leave out model" in str(error):
            return attack(method, level, folder, "auto", data, more, run)
        nodes.spoils.refused = str(error)
    return nodes.spoils


def attacks(kind: type[Method], level: Level, folder: Path, more: str = "") -> list[Spoils]:
    """Return what is read of one silo's samples in runs with drawn hyperparameters."""
    found = []
    for seed in range(4):
        method = drawn(kind, seed, level) if seed > 1 else ones(kind)
        for data in DATA:
            where, model = folder / f"{level}-{data}-{seed}", ("mlp", "linear")[seed % 2]
            found.append(attack(method, level, where, model, data, more))
            if "needs level" in found[-1].refused:
                break  # whatever the data are
    return found


def most(found: Sequence[Spoils]) -> tuple[int, int]:
    """Return the most training and test samples that are read in one of some runs."""
    return max(len(one.seen) for one in found), max(len(one.seen_test) for one in found)


def ran(found: Sequence[Spoils]) -> int:
    """Return in how many runs the silo gave values."""
    return sum(one.values > 0 for one in found)


KINDS = [pytest.param(kind, id=kind.title()) for kind in METHODS if not kind.traits.pools_data]


def test_every_task_of_the_library_declares_what_it_gives() -> None:
    """So that a new one is judged, and attacked below."""
    for kind in METHODS:
        tasks = () if kind.traits.pools_data else task_names(kind)
        assert all(getattr(kind, name).__gives__ is not None for name in tasks), kind


@pytest.mark.parametrize("kind", KINDS)
def test_no_sample_is_read_at_the_level_of_sums(kind: type[Method], tmp_path: Path) -> None:
    found = attacks(kind, "sums", tmp_path)
    assert most(found) == (0, 0)
    if levels.needed(drawn(kind, 2, "sums"), LIMIT) == "sums":
        assert ran(found) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_test_sample_is_read_at_the_other_levels(kind: type[Method], tmp_path: Path) -> None:
    """And so many training samples as docs/security.md says."""
    unlimited: list[tuple[Level, str]] = [("models", ""), ("all", ""), ("all", "min_active = 0\n")]
    for number, (level, more) in enumerate(unlimited):
        found = attacks(kind, level, tmp_path / str(number), more)
        seen, seen_test = most(found)
        print(f"{kind.title()} {level} {more.strip()}: {seen} training, ran {ran(found)}")
        assert seen_test == 0
        if levels.allows(level, levels.needed(ones(kind), LIMIT)) and (more or level == "models"):
            assert ran(found) >= LEAST


@pytest.mark.parametrize(
    ("method", "level", "model", "least"),
    [
        (FedAvg(rounds=1, epochs=1), "models", "mlp", 20),
        (FedSeq(epochs=1), "models", "mlp", 20),
        (RegMean(epochs=1), "all", "mlp", 20),
        (FedLPA(epochs=1), "all", "mlp", 20),
        (FedFisher(epochs=1, iterations=10), "all", "mlp", 20),
        (MAEcho(epochs=1), "all", "mlp", 20),
        (FedPFT(mixtures=500, half=False), "all", "linear", 100),
    ],
    ids=lambda value: value.title() if isinstance(value, Method) else str(value),
)
def test_the_harness_reads_samples_where_a_level_allows_it(
    method: Method, level: Literal["models", "all"], model: str, least: int, tmp_path: Path
) -> None:
    """Or it would find none at the level of sums because it is blind."""
    found = attack(method, level, tmp_path / "open", model, more="min_active = 0\n")
    print(f"{method.title()}: {len(found.seen)} of {len(found.train)} training samples")
    assert len(found.seen) >= least
    below = "sums" if level == "models" else "models"
    assert not attack(method, below, tmp_path / "below", model).seen


@pytest.mark.parametrize("mixtures", [1, 10, 500])
def test_mixtures_show_one_sample_in_k_at_most(mixtures: int, tmp_path: Path) -> None:
    """500 mixtures are all samples, with labels, although nobody cheats."""
    method = FedPFT(mixtures=mixtures, half=False, covariance="spherical", head_epochs=1)
    found = attack(method, "all", tmp_path / "run", "linear")
    assert len(found.seen) <= len(found.train) // LIMIT
    assert (found.values > 0) == (mixtures == 1), found.refused
    assert mixtures == 1 or "one for 10 of its own" in found.refused


def test_moments_of_layers_show_one_sample_in_k_at_most(tmp_path: Path) -> None:
    """Also in several rounds: each of them fits, and together they do not."""
    assert not attack(RegMean(epochs=1), "all", tmp_path / "run").values
    few = RegMean(epochs=1, rounds=3, alpha=0)
    told = [attack(replace(few, rounds=n), "all", tmp_path / str(n)) for n in (1, 3)]
    assert not told[0].refused
    assert "one for 10 of its own" in told[1].refused


def test_several_runs_show_one_sample_in_k_at_most_together(tmp_path: Path) -> None:
    """Each of them fits alone."""
    few = RegMean(epochs=1, alpha=0)
    found = [attack(few, "all", tmp_path / "one", run=f"run-{n}") for n in range(3)]
    assert not found[0].refused
    assert "one for 10 of its own" in found[2].refused
    again = attack(few, "all", tmp_path / "one", run="run-0")
    assert not again.refused, "what was told is told again"
