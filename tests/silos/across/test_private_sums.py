"""Private sums between silos: attacks on the noise by those who know the seed, and by silos that
work together."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.method import INITIAL
from ekiden.core.engine.worker import SeededNoise
from ekiden.core.training.gram import NoisySums, measure
from ekiden.core.training.private.noise import Draw, Noise
from ekiden.core.training.private.promise import DP
from ekiden.core.training.private.sums import Release, bound, centred_clipped, planned_sums
from ekiden.methods import FedGram
from ekiden.methods.exact.blocks.whole_features import RandomReLU
from ekiden.methods.exact.fedgram import Handoff
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.silo.budget import FILE
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.parcel import Ask, pack, unpack
from tests.silos.across.test_crafted_features import Tampering
from tests.silos.asked import TERMS, said, terms
from tests.silos.fakes import (
    NAMES,
    FakeNodes,
    member_of,
    mine,
    opened_by_server,
    silo_file,
    with_keys,
)
from tests.silos.sessions import far, here

METHOD = FedGram(dictionary="seed", width=20)
PROMISE = "epsilon=2,delta=1e-4,clip=1"


def noise_of(told: NoisySums, exact: Any) -> Tensor:
    """Return (D(D + 1)/2,) what was added to the products, in standard deviations of one silo's
    noise."""
    assert isinstance(told.gram, Tensor)
    noise: Tensor = (told.gram - exact.gram).double() / told.gram_noise
    return noise


def test_two_of_three_silos_that_know_the_seed_do_not_see_behind_the_noise_of_the_third(
    tmp_path: Path,
) -> None:
    files, public = with_keys(tmp_path, NAMES)
    files = [replace(file, limits=replace(file.limits, honest=1)) for file in files]
    given: dict[str, NoisySums] = {}
    truth: dict[str, Any] = {}
    seeds: dict[str, Noise] = {}
    totals: list[NoisySums] = []
    sums, solved, key = Release.sums, FedGram.solved, SeededNoise.key

    def noting(name: str) -> Any:
        def patched(patch: pytest.MonkeyPatch) -> None:
            def noted(
                self: Release, blocks: Any, classes: int, width: int, device: torch.device
            ) -> NoisySums:
                held = list(blocks)
                square = bound(self.dp, width)
                truth[name] = measure(
                    [(centred_clipped(x, square), y) for x, y in held], classes, width
                )
                given[name] = sums(self, held, classes, width, device)
                return given[name]

            def ended(method: FedGram, network: Any, handoff: Handoff, task: Any) -> Any:
                assert isinstance(handoff.sums, NoisySums)
                totals.append(handoff.sums)
                return solved(method, network, handoff, task)

            patch.setattr(Release, "sums", noted)
            patch.setattr(FedGram, "solved", ended)

        return patched

    nodes = Tampering(files, {name: noting(name) for name in NAMES})
    far(METHOD, nodes, tmp_path / "run", public, dp=PROMISE)
    assert totals[0].parts == 3
    victim = totals[0]
    for name in (NAMES[0], NAMES[2]):  # the first and the last take their own parts away
        own = given[name].gram
        assert isinstance(victim.gram, Tensor)
        assert isinstance(own, Tensor)
        victim = replace(victim, gram=victim.gram - own)
    left = noise_of(victim, truth[NAMES[1]])
    assert float(left.std()) == pytest.approx(1, abs=0.25)
    assert torch.equal(
        left, noise_of(given[NAMES[1]], truth[NAMES[1]])
    )  # the masks are gone, the noise is not
    for call in range(3):  # what a simulation would draw from the seed of the run
        seeds[str(call)] = Noise(key(SeededNoise(call), 0, None))  # type: ignore[arg-type]
        guess = (
            Draw(seeds[str(call)]).gaussian(victim.gram_noise, len(left)).double()
            / victim.gram_noise
        )
        assert float((left - guess).std()) > 1.1
    lines = [len((file.folder / FILE).read_text().splitlines()) for file in files]
    assert lines == [2, 1, 1]  # the first also tells a mean


def test_in_a_star_the_mean_and_the_sums_of_the_first_silo_are_charged_together(
    tmp_path: Path,
) -> None:
    files, public = with_keys(tmp_path, NAMES)
    star = replace(METHOD, topology="star")
    assert far(star, FakeNodes(files), tmp_path / "run", public, dp=PROMISE).weights is not None
    lines = [
        [json.loads(line) for line in (file.folder / FILE).read_text().splitlines()]
        for file in files
    ]
    assert list(map(len, lines)) == [2, 1, 1]
    told = math.hypot(*(1 / line["noise"] for line in lines[0]))
    assert told == pytest.approx(1 / planned_sums(DP(2.0, 1e-4), 100, "it").noise)


@pytest.mark.usefixtures("any_request")
def test_a_mean_of_another_shape_is_refused(tmp_path: Path) -> None:
    limits = '[limits]\nmethods = ["fedgram"]\nmin_clients = 1\n'
    file = silo_file(tmp_path, "client-0", limits)
    agreed = terms(METHOD, clients=NAMES[:1])
    agreed = replace(agreed, recipe=replace(agreed.recipe, dp=PROMISE))
    first = handed(silo_file(tmp_path / "other", "client-0", limits), agreed)
    for centre in (torch.zeros(19, dtype=torch.int8), torch.zeros(20)):
        crafted = first._replace(settled=(*first.settled[:-1], centre))
        assert "the mean of features received is not one" in said(file, add(agreed, crafted))
    assert not (file.folder / FILE).read_text()


def add(agreed: Any, before: Handoff | None = None, **more: Any) -> bytes:
    arguments = wire.encode((INITIAL, before))
    ask = Ask("task", agreed.text(), task="add", length=len(arguments), **more)
    return pack(ask, (arguments, b""))


def handed(file: Any, agreed: Agreement) -> Handoff:
    """What the only silo of a run hands to the server."""
    data = add(agreed, members=(member_of(file, agreed.run),))
    found = wire.decode(opened_by_server(file, data), Handoff)
    assert isinstance(found, Handoff)
    return found


@pytest.mark.usefixtures("any_request")
def test_a_silo_gives_noisy_sums_once_and_the_same_again(tmp_path: Path) -> None:
    limits = '[limits]\nmethods = ["fedgram"]\nmin_clients = 1\n'
    file = silo_file(tmp_path, "client-0", limits)
    agreed = terms(METHOD, clients=NAMES[:1])
    agreed = replace(agreed, recipe=replace(agreed.recipe, dp=PROMISE))
    first = handed(file, agreed)
    again = handed(file, agreed)
    assert isinstance(first.sums, NoisySums)
    assert isinstance(again.sums, NoisySums)
    assert isinstance(first.sums.gram, Tensor)
    assert isinstance(again.sums.gram, Tensor)
    assert torch.equal(first.sums.gram, again.sums.gram)
    assert "as often as epsilon 2 allows" in said(
        file, add(agreed, first)
    )  # with other noise, both together
    assert len((file.folder / FILE).read_text().splitlines()) == 2  # a mean and sums, each once


class Fewer(FakeNodes):
    """A coordinator that names two silos as members of the sum of three."""

    def send(self, node: int, data: bytes) -> str | Lost:
        ask, body = unpack(data, Ask)
        if ask.kind == "task" and ask.task == "add":
            data = pack(replace(ask, members=ask.members[:2]), (bytes(body),))
        return super().send(node, data)


def test_nobody_opens_a_sum_with_less_noise_than_was_promised(tmp_path: Path) -> None:
    """Three silos share the noise, so two parts have two thirds of it: no liar gets them, and no
    silo's absence."""
    files, public = with_keys(tmp_path, NAMES)
    trusting = [replace(file, limits=replace(file.limits, honest=3)) for file in files]
    shared = PROMISE + ",honest=3"
    with pytest.raises(UserError, match="a sum of 2 silos, client-0 allows 3 or more"):
        far(METHOD, Fewer(trusting), tmp_path / "lie", public, dp=shared)
    assert not [found for file in trusting for found in file.folder.rglob("outcome-*")]
    assert not [
        file for file in files if (ledger := file.folder / FILE).is_file() and ledger.read_text()
    ]  # nor is anybody's budget used up
    away = FakeNodes(trusting)
    away.lose = lambda node, data: (
        Lost("unsent") if node == 101 and unpack(data, Ask)[0].task == "add" else None
    )
    with pytest.raises(UserError, match="a sum under masks opens only with the parts"):
        far(METHOD, away, tmp_path / "run", public, dp=shared, absent="skip", patience=0.01)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    away.lose = lambda node, data: (
        None
    )  # the silo is back: the noise of the others is the same as before, and counted once
    assert (
        far(METHOD, away, tmp_path / "run", public, dp=shared, absent="skip", patience=0.01).weights
        is not None
    )
    spent = [
        {json.loads(line)["run"] for line in (file.folder / FILE).read_text().splitlines()}
        for file in files
    ]
    assert list(map(len, spent)) == [1, 1, 1]
    with pytest.raises(
        UserError, match="honest=3 needs the noise of all clients: leave out absent"
    ):
        here(METHOD, lambda step, client: client == NAMES[1], dp=DP.parse(shared))


def test_noise_is_shared_only_where_a_silo_allows_it(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    shared = PROMISE + ",honest=2"
    with pytest.raises(UserError, match="shares noise among 2 silos, client-0 allows 1"):
        far(METHOD, FakeNodes(files), tmp_path / "refused", public, dp=shared)
    trusting = [replace(file, limits=replace(file.limits, honest=2)) for file in files]
    assert far(METHOD, FakeNodes(trusting), tmp_path / "run", public, dp=shared).weights is not None


@pytest.mark.usefixtures("any_request")
def test_noise_that_many_runs_average_away_is_refused_without_a_bound(tmp_path: Path) -> None:
    """Noisy sums leave no class of one sample out: a hundred runs, or one with a large ε, show the
    sample."""
    dp, (_, client) = DP(1e6), mine(NAMES[1])
    features = RandomReLU(64, 128, direct=True)
    features.fix()
    x = client.train.x[:1].float() / 255 * 2 - 1
    square = bound(dp, 128)
    exact = centred_clipped(features(x), square)[0]
    sigma = Release(dp, planned_sums(dp, 100, "it"), Noise(bytes(32))).deviations(128)[1]
    drawn = [Draw(Noise(bytes([run]) * 32)).gaussian(sigma, 128) for run in range(100)]
    seen = exact + torch.stack(drawn).double().mean(0)
    assert float(torch.corrcoef(torch.stack([exact[:64], seen[:64]]))[0, 1]) > 0.8
    method = replace(METHOD, min_active=10)
    agreed = replace(terms(method), recipe=replace(TERMS.recipe, method=method, dp="epsilon=1e6"))
    allowing = '[limits]\nmethods = ["fedgram"]\nmin_clients = 2\n'
    unbounded = silo_file(tmp_path, "client-0", allowing, trusting=False)
    assert "let its owner bound the noise by limits.epsilon, or" in said(unbounded, add(agreed))
    bounded = silo_file(tmp_path, "client-0", allowing + "epsilon = 8.0\n", trusting=False)
    assert "allows 8 over all runs, this one wants 1e+06" in said(bounded, add(agreed))
    agreed = replace(agreed, recipe=replace(agreed.recipe, dp="epsilon=8"))
    members = tuple(member_of(silo_file(tmp_path, name), agreed.run) for name in agreed.clients)
    assert said(bounded, add(agreed, members=members)) == ""
