"""Attacks by whoever settles the features: sums of features made for it are single images.

Each attack runs against the silos' own `answer`. A silo that attacks runs other code than it says;
the others do not know. At `level = "all"` the attack works; at the default level the
run is refused."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, federate, run
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.core.base.settings import Hardware
from ekiden.core.data.samples import Subset
from ekiden.core.engine import wire
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import INITIAL, Method, on_client
from ekiden.core.engine.wire import Encoded
from ekiden.core.models.catalogue import build
from ekiden.core.tasks import Classification
from ekiden.core.training.gram import Sums
from ekiden.core.training.weights import Weights
from ekiden.methods import (
    GLM,
    DeepAFL,
    FedAvg,
    FedCOF,
    FedFisher,
    FedGram,
    FedKrylov,
    FedLPA,
    FedPFT,
    FedRAN,
    FedSeq,
    FedTasuki,
    MAEcho,
    RegMean,
    Trees,
    between_machines,
)
from ekiden.methods.exact import closing, fedkrylov
from ekiden.methods.exact.blocks.fixed_features import FixedFeatures, features_of
from ekiden.methods.exact.blocks.krylov import OpeningSums
from ekiden.methods.exact.blocks.whole_features import PatchFeatures, RandomReLU
from ekiden.methods.exact.closing import ClosingLap, with_lap
from ekiden.methods.exact.fedgram import Handoff
from ekiden.methods.exact.fedran import Scatter
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import policy
from ekiden.silos.silo.levels import Level, allows, needed
from ekiden.silos.silo.policy import check_terms
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.parcel import Answer, Ask, arguments_key, pack, unpack
from tests.silos.across.test_attacks import Attacker, layers
from tests.silos.asked import TERMS
from tests.silos.fakes import NAMES, FakeNodes, mine, public_key, silo_file, with_keys
from tests.silos.sessions import assert_equal, far, here

Patch = Callable[[pytest.MonkeyPatch], None]


class Tampered(Silo):
    """A silo whose operator changed the code."""

    def __init__(self, silo: Silo, patch: Patch) -> None:
        self._silo, self._patch = silo, patch

    def answer(self, data: bytes) -> bytes:
        with pytest.MonkeyPatch.context() as patch:
            self._patch(patch)
            return self._silo.answer(data)


class Tampering(FakeNodes):
    """Silos of which some run other code."""

    def __init__(self, files: Sequence[Any], patches: dict[str, Patch]) -> None:
        super().__init__(files)
        self.patches = patches

    def silo(self, node: int) -> Silo:
        silo, name = super().silo(node), NAMES[node - 100]
        return Tampered(silo, self.patches[name]) if name in self.patches else silo


def images(name: str) -> Tensor:
    """(n, 64) a silo's training images as the network takes them."""
    dataset, client = mine(name)
    return ((client.train.x.float() / 255 - dataset.mean[0]) / dataset.std[0]).flatten(1)


def found_in(rows: Tensor, silos: Sequence[str], tolerance: float) -> int:
    """Return how many different images of these silos are among `rows` (m, 64), pixel by pixel."""
    held = torch.cat([images(name) for name in silos]).double()
    near = (
        torch.cdist(held, rows.double(), p=float("inf")).amin(1)
        if len(rows)
        else torch.full((1,), 9.0)
    )
    found = int((near < tolerance).sum())
    print(f"{found} of {len(held)} images are read, the nearest to within {float(near.min()):.4f}")
    return found


def rare(self: RandomReLU, x: Tensor, scaling: Any, draw: torch.Generator) -> None:
    """Gains with which a unit answers only to samples above all of the attacker's own."""
    self.standardise(x)
    linear = self.linear
    assert linear is not None
    top = linear(self.whole(x)).amax(0).clamp(min=1)
    self.get_buffer("gain").copy_(0.5 / top)


class Totals:
    """What attackers note."""

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.own: dict[str, Any] = {}
        self.settled: tuple[Tensor, ...] = ()

    def notes_own(self, patch: pytest.MonkeyPatch, name: str) -> None:
        own = FedGram._own_sums

        def noted(*args: Any, **more: Any) -> Any:
            self.own[name] = own(*args, **more)
            return self.own[name]

        patch.setattr(FedGram, "_own_sums", noted)

    def first(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(RandomReLU, "settle", rare)
        self.notes_own(patch, NAMES[0])

    def last(self, patch: pytest.MonkeyPatch) -> None:
        solve = FedGram.solved

        def noted(method: FedGram, network: Any, totals: Handoff, task: Any) -> Weights:
            assert isinstance(totals.sums, Sums)
            self.sums, self.settled = totals.sums, totals.settled
            return solve(method, network, totals, task)

        patch.setattr(FedGram, "solved", noted)
        self.notes_own(patch, NAMES[2])

    def victims_classes(self) -> tuple[Tensor, Tensor]:
        """(K, 64) sums of the pixels of each class of the victim, and the numbers of its
        samples."""
        assert self.sums is not None
        own = list(self.own.values())
        counts = self.sums.counts - sum(part.counts for part in own)
        return (self.sums.classes - sum(part.classes for part in own))[:, :64], counts

    def rows(self) -> Tensor:
        """(m, 64) the images of single samples in the victim's part of the totals."""
        assert self.sums is not None
        gram = self.sums.matrix() - sum(own.matrix() for own in self.own.values())
        return single(gram, self.settled)


def single(gram: Tensor, settled: tuple[Tensor, ...]) -> Tensor:
    """(m, 64) images in rows of the Gram matrix that belong to units to which one sample answers,
    by 1."""
    alone = (gram.diagonal()[64:] == 1).nonzero().flatten() + 64
    if len(settled) < 2:
        settled = (torch.zeros(64), torch.full((64,), 127 / 4))
    return gram[alone, :64] / settled[1].double() + settled[0].double()


def test_the_first_silo_and_the_last_read_images_of_the_one_between_in_fedgram(
    tmp_path: Path,
) -> None:
    files, public = with_keys(tmp_path, NAMES)
    noted = Totals()
    nodes = Tampering(files, {NAMES[0]: noted.first, NAMES[2]: noted.last})
    far(FedGram(width=400), nodes, tmp_path / "run", public)
    assert found_in(noted.rows(), NAMES[1:2], 0.05) >= 3


def krylov(noted: dict[str, Tensor]) -> Patch:
    """The first silo: rare units, and directions that are single units to which one sample
    answers."""

    def directions(step: Tensor, span: Any, scale: Tensor, count: int) -> Tensor:
        u = torch.zeros(len(step), count, dtype=torch.int8)
        u[noted["units"][:count], torch.arange(min(count, len(noted["units"])))] = 1
        return u

    begin = FedKrylov.begin

    @wraps(begin)
    def begun(method: FedKrylov, client: Any, model: Any, chosen: Any, totals: OpeningSums) -> Any:
        total = totals.sums.matrix()[64:, -2]
        noted["units"] = ((total > 0.8) & (total < 1.2)).nonzero().flatten() + 64
        noted["centre"], noted["settled"] = chosen.centre, chosen.settled
        return begin(method, client, model, chosen, totals)

    @wraps(FedKrylov.solve)
    def solved(method: FedKrylov, client: Any, model: Any, totals: Any) -> Any:
        noted["columns"] = totals.sums.matrix()
        raise UserError("seen")

    def patched(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(RandomReLU, "settle", rare)
        patch.setattr(FedKrylov, "begin", begun)
        patch.setattr(FedKrylov, "solve", solved)
        patch.setattr(fedkrylov, "next_directions", directions)

    return patched


def krylov_rows(noted: dict[str, Any]) -> Tensor:
    """(m, 64) images behind the columns that came back."""
    count = min(noted["columns"].shape[1], len(noted["units"]))
    u = noted["columns"][:64, :count].T + noted["centre"][:64].double()
    settled = noted["settled"] or (torch.zeros(64), torch.full((64,), 127 / 4))
    rows: Tensor = u / settled[1].double() + settled[0].double()
    return rows


def test_the_first_silo_reads_images_of_the_others_in_fedkrylov(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    noted: dict[str, Any] = {}
    with pytest.raises(UserError):  # it does not go on to solve
        far(
            FedKrylov(width=800, laps=2, sums="whole"),
            Tampering(files, {NAMES[0]: krylov(noted)}),
            tmp_path / "run",
            public,
        )
    assert found_in(krylov_rows(noted), NAMES[1:], 0.05) >= 3


def crafted(own: Tensor, seed: int) -> Weights:
    """A body of 64-400-200-100 whose features are the pixels of samples above all `own` in one
    direction, else 0."""
    direction = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    edge, reach, most, pixels = float((own @ direction).max()), 1e-3, 100.0, torch.eye(64)
    first = torch.cat([pixels, direction.repeat(2, 1) / reach])
    bias = torch.cat([torch.full((64,), 10.0), -edge / reach - torch.tensor([0.0, 1.0])])
    second = torch.cat([pixels, torch.tensor([most, -most]).repeat(64, 1)], 1)
    names = [
        "features.1.weight",
        "features.1.bias",
        "features.3.weight",
        "features.3.bias",
        "features.5.weight",
    ]
    return layers(
        dict(zip(names, (first, bias, second, torch.full((64,), -most), pixels), strict=True))
    )


def lap(noted: dict[str, Any], body: Weights) -> Patch:
    """The last silo: hands out `body` as the run's model, with scales of its own."""

    def lap_body(client: Any, handed: Any) -> Weights:
        return body

    def settled(features: Tensor) -> closing.Scales:
        return closing.Scales(
            torch.zeros(features.shape[1]), torch.full((features.shape[1],), 1000.0)
        )

    def refitted(model: Weights, layout: Any, totals: closing.Totals, task: Any) -> Weights:
        noted["classes"] = totals.sums.classes if isinstance(totals.sums, Sums) else None
        return model

    def patched(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(
            ClosingLap, "lap_body", property(lambda lap: on_client(gives="nothing")(lap_body))
        )
        patch.setattr(closing, "settled", settled)
        patch.setattr(closing, "refitted", refitted)

    return patched


def test_the_last_silo_reads_an_image_with_its_label_in_a_closing_lap(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    noted: dict[str, Any] = {}
    body = crafted(images(NAMES[2]), seed=5)
    nodes = Tampering(files, {NAMES[2]: lap(noted, body)})
    far(with_lap(FedSeq(epochs=1)), nodes, tmp_path / "run", public, model="mlp")
    rows = noted["classes"][:, :64].double() / 1000 - 10
    assert found_in(rows, NAMES[:2], 0.001) == 1


class Coordinator(Attacker):
    """Asks for the sums of features that it made."""

    def sums(self, node: int, call: int, settled: tuple[Tensor, ...]) -> Sums:
        ask = Ask("task", self.terms.text(), step=0, call=call, task="measure")
        ask = replace(ask, readers=(self.reader(),))
        data, (lock,) = self.party.seal(
            Encoded.of(wire.encode((INITIAL, settled, None))),
            arguments_key(ask),
            (self.as_reader(node, 0),),
        )
        full = replace(ask, length=len(data), lock=lock)
        answer, rest = unpack(self.nodes.silo(node).answer(pack(full, (data,))), Answer)
        if answer.error:
            raise UserError(answer.error)
        sums: Sums = wire.decode(bytes(rest), Sums)
        return sums


def stars(nodes: FakeNodes, terms: Agreement) -> Tensor:
    """(m, 64) images that the coordinator reads from one silo in eight tasks."""
    coordinator, found = Coordinator(nodes, terms), []
    units = terms.setup(mine(NAMES[1])[0], Hardware(threads=1)).build().features
    assert isinstance(units, RandomReLU)
    units.standardise(images(NAMES[0]))  # its own guess
    linear, (centre, scale, _) = units.linear, units.tell()
    assert linear is not None
    typical = linear(units.whole(images(NAMES[0]))).amax(0).clamp(min=1)
    for call in range(8):
        settled = (centre, scale, 0.5 / (typical * (0.8 + 0.05 * call)))
        found.append(single(coordinator.sums(101, call, settled).matrix(), settled))
    return torch.cat(found)


def test_the_coordinator_gets_no_part_of_a_sealed_star(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    with pytest.raises(UserError, match="gives its part to a sum only under masks"):
        stars(FakeNodes(files), star(public))


def star(public: dict[str, str]) -> Agreement:
    """The terms of a run whose coordinator adds up."""
    method = FedGram(width=400, topology="star")
    keys = tuple(public.values())
    return replace(TERMS, recipe=replace(TERMS.recipe, method=method), clients=NAMES, keys=keys)


# The same with the defaults.

MODELS = '[limits]\nlevel = "models"\n'
SAFE: dict[str, Any] = {"dictionary": "seed", "min_active": 10}


LEVELS: list[tuple[Method, str]] = [
    (FedGram(width=60, **SAFE), "sums"),
    (FedGram(width=60, topology="star", **SAFE), "sums"),
    (GLM(family="linear"), "sums"),
    (FedGram(width=60), "models"),
    (FedGram(width=60, min_active=10), "models"),
    (FedGram(width=60, dictionary="seed"), "models"),
    (FedGram(width=60, personal=True, **SAFE), "models"),
    (FedKrylov(width=60, **SAFE), "models"),
    (FedRAN(width=60, **SAFE), "models"),
    (FedCOF(width=60, **SAFE), "models"),
    (FedCOF(width=60), "all"),
    (Trees(), "models"),
    (with_lap(FedSeq(epochs=1)), "models"),
    (GLM(), "models"),
    (GLM(family="cox"), "models"),
    (DeepAFL(layers=1), "models"),
    (FedSeq(epochs=1), "models"),
    (FedAvg(), "models"),
    (FedTasuki(statistics=True), "all"),
    (FedPFT(), "all"),
    (RegMean(), "all"),
    (FedLPA(), "all"),
    (FedFisher(), "all"),
    (MAEcho(), "all"),
]


@pytest.mark.parametrize(("method", "level"), LEVELS, ids=lambda one: str(one)[:60])
def test_a_run_above_the_level_of_a_silo_is_refused_with_the_line_to_write(
    method: Method, level: Level, tmp_path: Path
) -> None:
    """Nothing is stored: the terms alone decide."""
    file = silo_file(tmp_path, NAMES[0], trusting=False)
    recipe = replace(TERMS.recipe, method=method)
    agreed = replace(TERMS, recipe=recipe, clients=NAMES, keys=tuple(map(public_key, NAMES)))
    for own in ("sums", "models", "all"):
        limits = replace(file.limits, level=own)
        silo = Silo(replace(file, limits=limits), {"": mine(NAMES[0])})
        told = unpack(silo.answer(pack(Ask("hello", agreed.text()))), Answer)[0].error
        wanted = f'needs level = "{level}", client-0 has "{own}": '
        assert (wanted in told) == (not allows(own, level))
        assert (f'write level = "{level}" under [limits]' in told) == (not allows(own, level))
        assert not (told and (file.folder / "runs").exists())


class Undeclared(FedSeq):
    """A stranger's method: its task is another one than the declared one of its parent."""

    @on_client
    def train(self, client: Any, model: Weights) -> Weights:
        return model


def test_what_a_method_does_not_declare_no_silo_does(tmp_path: Path) -> None:
    assert needed(FedAvg(secure=True), 10) == "models", "one party chose where the sum is taken"
    with pytest.raises(UserError, match="undeclared does not declare what its tasks tell"):
        needed(Undeclared(), 10)
    secure, open_ = FedAvg(secure=True), FedAvg()
    policy.check_task(open_, "train")
    for method, task in ((secure, "train"), (open_, "add"), (FedGram(), "personalise")):
        with pytest.raises(UserError, match=f"declares nothing that '{task}' gives: refused"):
            policy.check_task(method, task)


def test_the_second_silo_of_fedran_finds_the_training_samples_of_the_first(tmp_path: Path) -> None:
    """Nothing is masked, so a chain needs a line in the silos' files: samples lie in the span of
    the directions."""
    files, public = with_keys(
        tmp_path,
        NAMES,
        '[limits]\nlevel = "all"\nmin_active = 0\n',
        trusting=False,
    )
    noted: list[tuple[FedRAN, Any, Tensor]] = []
    joined = FedRAN.joined

    def notes(patch: pytest.MonkeyPatch) -> None:
        def noting(self: FedRAN, client: Any, model: Weights, received: Any) -> Any:
            features = self.adopted(client, model, received.settled)
            with torch.no_grad():
                phi = features(torch.cat([images(NAMES[0]), images(NAMES[2])]).to(client.unit()))
            noted.append((self, received.summary, phi.double()))
            return joined(self, client, model, received)

        patch.setattr(FedRAN, "joined", noting)

    nodes = Tampering(files, {NAMES[1]: notes})
    far(FedRAN(width=400, rank=0.5, **SAFE), nodes, tmp_path / "run", public)
    ((_, summary, phi),) = noted
    own = len(images(NAMES[0]))
    found = Scatter.read(summary.checked(400, 10, 200))
    usual = [k for k in range(10) if found.counts[k]]
    basis, _ = torch.linalg.qr(found.rows)
    phi[:, found.squares == 0] = 0  # features that vary in few samples are left out
    apart = torch.stack([phi - found.means[:, k] for k in usual])
    outside = ((apart - apart @ basis @ basis.T).norm(dim=2) / apart.norm(dim=2)).amin(0)
    members, others = outside[:own], outside[own:]
    assert (
        int((members < others.min()).sum()) == int(found.counts.sum()) > 100
    )  # all but those of rare classes


@pytest.mark.parametrize("kind", [FedGram, pytest.param(FedKrylov, marks=pytest.mark.slow)])
def test_the_defaults_between_machines_run_with_the_default_file(
    kind: type[Method], tmp_path: Path
) -> None:
    more = "" if kind is FedGram else MODELS
    files, public = with_keys(tmp_path, NAMES, more, trusting=False)
    method = replace(between_machines(kind), width=60)  # type: ignore[call-arg]
    assert_equal(far(method, FakeNodes(files), tmp_path / "run", public), here(method))


def other_features(patch: pytest.MonkeyPatch) -> None:
    """The first silo tells features of its own in a run whose features follow from the seed."""
    patch.setattr(policy, "_check_method", lambda file, method: None)
    patch.setattr(FixedFeatures, "seeded", False)
    fix = RandomReLU.fix
    patch.setattr(RandomReLU, "fix", lambda self: None if self.inputs else fix(self))


@pytest.mark.parametrize("kind", [FedGram, FedKrylov])
def test_features_that_do_not_follow_from_the_seed_are_refused(
    kind: type[Method], tmp_path: Path
) -> None:
    files, public = with_keys(tmp_path, NAMES, MODELS, trusting=False)
    nodes = Tampering(files, {NAMES[0]: other_features})
    with pytest.raises(
        UserError, match=r"client-1: the features received are (of another kind|not those)"
    ):
        far(replace(between_machines(kind), width=60), nodes, tmp_path / "run", public)  # type: ignore[call-arg]


def test_scales_of_patches_are_those_of_the_silos_own_images() -> None:
    """With features from the seed nothing of patches travels but how images were normalised, and
    that is compared."""
    method = FedGram(width=32, features="patches", **SAFE)
    network = method.own_network(build("lenet", (1, 28, 28), 10), (1, 28, 28), 10, Classification())
    features = features_of(network)
    assert isinstance(features, PatchFeatures)
    assert [t.numel() for t in features.tell()] == [1, 1]
    client = SimpleNamespace(
        network=lambda model: network,
        scaling=((0.1,), (0.3,)),
        unit=lambda: torch.ones(1, 1, 28, 28),
    )
    own = method.settled_by(client, None).tell()  # type: ignore[arg-type]
    assert method.adopted(client, None, own) is features  # type: ignore[arg-type]
    for changed in ((own[0] + 1, own[1]), (own[0], own[1] * 1e-6)):
        with pytest.raises(UserError, match="not those that follow from the seed"):
            method.adopted(client, None, changed)  # type: ignore[arg-type]


def test_colluding_silos_read_no_image_from_sums_of_seeded_features(tmp_path: Path) -> None:
    """The first and the last silo still get the sums of the one between, but no row, column or
    class of one sample."""
    for least in (0, 10):
        files, public = with_keys(tmp_path / str(least), NAMES)
        noted, method = Totals(), FedGram(width=400, dictionary="seed", min_active=least)
        nodes = Tampering(files, {NAMES[0]: noted.first, NAMES[2]: noted.last})
        far(method, nodes, tmp_path / f"run-{least}", public)
        classes, counts = noted.victims_classes()
        rows = torch.cat([noted.rows(), classes[counts == 1] / (127 / 4)])
        found = found_in(rows, NAMES[1:2], 0.05)
        assert found == 0 if least else found > 0
        assert not least or int(counts[counts > 0].min()) >= least


@pytest.mark.parametrize(
    ("mean", "std"), [(0.5, 1e-30), (1e-3, 1.0), (0.0, 1.0 + 1e-6), (1e30, 1.0)]
)
def test_a_coordinator_that_scales_images_otherwise_gets_no_sums(
    mean: float, std: float, tmp_path: Path
) -> None:
    """It moves thresholds, at which images become features, past single samples: sums before and
    after show these."""
    limits = '[limits]\nmethods = ["fedgram"]\nmin_clients = 2\n'
    file = silo_file(tmp_path, NAMES[1], limits, trusting=False)
    method = FedGram(width=130, dictionary="seed", min_active=10)
    agreed = replace(TERMS, recipe=replace(TERMS.recipe, method=method), mean=(mean,), std=(std,))
    arguments = wire.encode((INITIAL, None))
    asked = pack(Ask("task", agreed.text(), task="add", length=len(arguments)), (arguments, b""))
    assert (
        "client-1 and the run are of different "
        in unpack(Silo(file).answer(asked), Answer)[0].error
    )
    assert not list(file.folder.glob("runs/*")) + list(file.folder.glob("summed/*"))


def span_of(noted: Totals) -> Tensor:
    """(D, r) directions in which the features of the victim's samples lie."""
    assert noted.sums is not None
    gram: Tensor = noted.sums.matrix() - sum(own.matrix() for own in noted.own.values())
    values, vectors = torch.linalg.eigh(gram)
    found: Tensor = vectors[:, values > 1e-9 * values.max()].float()
    return found


def test_sums_of_too_many_features_are_refused(tmp_path: Path) -> None:
    """Samples of rare classes are in no sums, so they do not count. The smallest silo is named
    beforehand."""
    files, public = with_keys(tmp_path, NAMES, MODELS, trusting=False)
    counts = [mine(name)[1].train.class_counts(10) for name in NAMES]
    few = min(int(each[each >= 10].sum()) // 10 * 10 // 2 for each in counts)
    wide = [FedKrylov(width=400, sums="whole", **SAFE), FedCOF(width=few + 1, **SAFE)]
    for method in (FedGram(width=few + 1, **SAFE), *wide):
        said = f"sums of {method.width} features show which samples client-. has: give width {few} or less"
        with pytest.raises(UserError, match=said):
            far(method, FakeNodes(files), tmp_path / method.title(), public)
        recipe, held = replace(TERMS.recipe, method=method), tuple(public.values())
        agreed = replace(TERMS, recipe=recipe, clients=NAMES, keys=held)
        asked = pack(Ask("hello", agreed.text()))
        smallest = Silo(files[2], {"": mine(NAMES[2])})
        assert re.search(said, unpack(smallest.answer(asked), Answer)[0].error)
        assert not list(tmp_path.glob("*-silo/summed/*")), "nothing was computed"
    far(FedGram(width=few, **SAFE), FakeNodes(files), tmp_path / "run", public)
    given = FedGram(features="network", **SAFE)  # how many features it has, nobody chooses
    with pytest.raises(
        UserError, match=r"which samples client-. has: .*leave client-. out, or run fedgram with dp"
    ):
        far(given, FakeNodes(files), tmp_path / "network", public)


def test_no_message_lets_a_run_pass_the_checks_of_its_first_one(tmp_path: Path) -> None:
    """A coordinator asks what a silo does for a run, which made its folder; a run is bound once it
    was checked."""
    limits = '[limits]\nmethods = ["fedgram"]\nmin_clients = 2\n'
    file = silo_file(tmp_path, NAMES[1], limits, trusting=False)
    agreed = replace(TERMS, recipe=replace(TERMS.recipe, method=FedGram(width=400, **SAFE)))
    folder = file.folder / "runs" / agreed.run
    for kind in ("status", "hello", "task", "hello"):
        said = unpack(
            Silo(file, {"": mine(NAMES[1])}).answer(pack(Ask(kind, agreed.text()))), Answer
        )[0].error
        assert ("sums of 400 features show" in said) == (kind != "status")
        assert not folder.exists()
    folder.mkdir(parents=True)  # however it came there
    assert (
        "sums of 400"
        in unpack(
            Silo(file, {"": mine(NAMES[1])}).answer(pack(Ask("hello", agreed.text()))), Answer
        )[0].error
    )


@pytest.mark.parametrize("method", [FedGram(**SAFE), FedKrylov(laps=2, sums="whole", **SAFE)])
def test_without_a_width_there_are_as_many_features_as_the_smallest_silo_allows(
    method: Any, tmp_path: Path
) -> None:
    """The number is in the signed terms, so a run on one machine with it gives the same bits."""
    files, public = with_keys(tmp_path, NAMES, MODELS, trusting=False)
    result, few = far(method, FakeNodes(files), tmp_path / "run", public), 60
    assert read_config(tmp_path / "run")["recipe"]["hyperparameters"]["width"] == few
    assert_equal(result, here(replace(method, width=few)))
    assert verify(tmp_path / "run", public).wrong == ()


def test_a_silo_without_samples_in_the_sums_takes_part(tmp_path: Path) -> None:
    """All of its classes are rare, so nothing of it is shown."""
    file, (dataset, client) = silo_file(tmp_path, NAMES[0], trusting=False), mine(NAMES[0])
    rare = replace(client, train=Subset(client.train.samples, client.train.rows[:9]))
    method = FedGram(width=120, **SAFE)
    agreed = replace(TERMS, recipe=replace(TERMS.recipe, method=method))
    network = agreed.setup(dataset, file.hardware).build()
    policy.check_span(file, agreed, rare, network)
    some = replace(client, train=Subset(client.train.samples, client.train.rows[:100]))
    with pytest.raises(UserError, match="sums of 120 features show which samples"):
        policy.check_span(file, agreed, some, network)


def smoothed(units: Any) -> Callable[[Tensor], Tensor]:
    """Return the features as a function with gradients."""
    assert isinstance(units, RandomReLU)
    linear, gain = units.linear, units.get_buffer("gain")
    assert linear is not None

    def smooth(x: Tensor) -> Tensor:
        u = (x * 127 / 4).clamp(-127, 127)
        phi = (linear(u).relu() * gain).clamp(max=127)
        return torch.cat([u, phi], 1) if units.width > len(gain) else phi

    return smooth


@pytest.mark.slow
@pytest.mark.parametrize("width", [1600, 60])
def test_all_other_silos_read_images_from_sums_of_more_features_than_samples(
    width: int, tmp_path: Path
) -> None:
    """Where a file allows it. From noise they search images with features in the span; with few
    features all are."""
    allowing = "[limits]\nmin_active = 0\n"
    files, public = with_keys(tmp_path, NAMES, allowing, trusting=False)
    noted, networks, solved = Totals(), list[Any](), FedGram.solved

    def last(patch: pytest.MonkeyPatch) -> None:
        def ended(method: FedGram, network: Any, *args: Any) -> Weights:
            networks.append(network)
            return solved(method, network, *args)

        patch.setattr(FedGram, "solved", ended)
        noted.last(patch)

    first: Patch = lambda patch: noted.notes_own(patch, NAMES[0])  # noqa: E731
    method = FedGram(width=width, dictionary="seed", min_active=10)
    far(method, Tampering(files, {NAMES[0]: first, NAMES[2]: last}), tmp_path / "run", public)
    span, units = span_of(noted), features_of(networks[0])
    smooth = smoothed(units)

    def outside(phi: Tensor) -> Tensor:
        phi = phi * (span.abs().amax(1) > 1e-6)  # without what the silo left out
        part: Tensor = (phi - phi @ span @ span.T).norm(dim=1) / phi.norm(dim=1)
        return part

    guess = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    descent = torch.optim.Adam([guess], lr=0.05)
    for _ in range(300):
        descent.zero_grad()
        torch.autograd.backward(outside(smooth(guess)).sum())
        descent.step()
    held = torch.nn.functional.normalize(images(NAMES[1]), dim=1)
    alike = torch.nn.functional.normalize(guess.detach(), dim=1) @ held.T
    found = len({int(k) for k in alike.argmax(1)[alike.amax(1) > 0.98]})
    print(f"{width} features: a search ends at {found} of {len(held)} images")
    members, others = (outside(units(images(name))).sort().values for name in (NAMES[1], NAMES[0]))
    if width > len(held):
        assert found >= 3
        assert (
            float(members[:130].max()) < 1e-4 < 0.01 < float(others.min())
        )  # who has an image knows if it is there
    else:
        assert found == 0
        assert float(others.max()) < 1e-4


def test_what_few_samples_show_is_left_out() -> None:
    """A feature is left out if fewer than k samples have another value than most; so are classes of
    fewer than k."""
    phi = torch.zeros(30, 4, dtype=torch.int8)
    phi[:9, 0], phi[:10, 1], phi[:, 2] = 5, -5, 127
    phi[:9, 2], phi[:, 3] = 126, torch.arange(30)
    assert FedGram(min_active=10).active(phi).tolist() == [False, True, False, True]
    assert FedGram().active(phi).all()


def test_a_silo_allows_values_of_hyperparameters(tmp_path: Path) -> None:
    """A table [allow.METHOD] is checked when the file is read."""

    def read_with(more: str) -> SiloFile:
        return silo_file(tmp_path, "client-0", more, trusting=False)

    assert read_with("").allow == {}
    more = '[limits]\nlevel = "models"\nmin_clients = 2\n[allow.fedgram]\nhead = ["ridge"]\n[allow.fedseq]\n'
    file = read_with(f"{more}epochs = [1, 5]\n")
    assert file.allow == {"fedgram": {"head": ("ridge",)}, "fedseq": {"epochs": (1, 5)}}
    check_terms(file, TERMS)
    with pytest.raises(
        UserError, match=r"fedseq has epochs = 2, client-0 allows only 1, 5 \(allow.fedseq in its"
    ):
        check_terms(file, replace(TERMS, recipe=replace(TERMS.recipe, method=FedSeq(epochs=2))))
    for more, message in (
        ("[allow.fedsex]\nepochs = [1]\n", "unknown method in allow 'fedsex'"),
        ("[allow.fedseq]\nepoch = [1]\n", "unknown hyperparameter in allow.fedseq 'epoch'"),
        ("[allow.fedseq]\nepochs = 1\n", "allow.fedseq.epochs must be a list of allowed values"),
        ("[allow.fedseq]\nepochs = []\n", "allow.fedseq.epochs must be a list of allowed values"),
        ("[allow]\nfedseq = 1\n", "allow.fedseq must be a table"),
        ("[allow.fedseq]\nepochs = [true]\n", "allow.fedseq.epochs True is of the wrong type"),
        ('[allow.fedseq]\nepochs = ["3"]\n', "allow.fedseq.epochs '3' is of the wrong type"),
        ("[allow.fedavg]\nsecure = [1]\n", "allow.fedavg.secure 1 is of the wrong type"),
        ('[allow.fedgram]\ntopology = ["Chain"]\n', "allow.fedgram.topology 'Chain' is unknown"),
    ):
        with pytest.raises(UserError, match=message):
            read_with(more)


@pytest.mark.parametrize(
    "method", [FedGram(width=32), FedKrylov(width=64, laps=2, sums="whole"), FedRAN(width=32)]
)
def test_a_class_that_is_too_rare_at_each_silo_ends_no_run_in_silence(method: Any) -> None:
    """Of two classes no model is left; of three the model does not know one, which is said."""
    safe = replace(method, dictionary="seed", min_active=10)

    def silos(*counts: int) -> FederatedData:
        y = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        x = torch.randn(len(y), 6, generator=torch.Generator().manual_seed(1)) + y[:, None]
        return federate([(x, y), (x + 0.1, y)])

    with pytest.raises(
        UserError,
        match="of 1 of 2 classes, so no model tells classes apart: give a smaller min_active",
    ):
        run(safe, silos(60, 8), "mlp")
    with pytest.warns(DataWarning, match="of 1 of 3 classes: the model does not know them"):
        run(safe, silos(60, 60, 8), "mlp")
