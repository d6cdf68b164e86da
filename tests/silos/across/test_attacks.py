"""What somebody tries who has the SuperLink's port and the terms of a run, as each of its silos
does.

Each test is written as the attacker would write it, against the silo's own `answer`.
"""

import contextlib
import json
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ekiden.cli.app import call
from ekiden.clinic.counting import counting_of, real
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import verified
from ekiden.core.base.settings import Hardware
from ekiden.core.engine import wire
from ekiden.core.engine.drive import Outline, outline
from ekiden.core.engine.folder import read_lines
from ekiden.core.engine.method import INITIAL, Method, payload_types
from ekiden.core.engine.wire import SERVER, Encoded, Ref
from ekiden.core.models.catalogue import build
from ekiden.core.training.gram import size
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.methods import METHODS, DFedAvgM, FedAvg, FedGram, FedKrylov, FedSeq, Local
from ekiden.methods.exact.closing import with_lap
from ekiden.methods.exact.fedgram import Summing
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.shelf import Shelf
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, sealing
from ekiden.silos.trust.agreement import AGREEMENT, Agreement, no_samples
from ekiden.silos.trust.parcel import Answer, Ask, Hello, ParcelPart, arguments_key, pack, unpack
from ekiden.silos.trust.report import Reported, SiloReport, total_of
from ekiden.silos.trust.sealing import Party, Reader
from tests.silos.asked import TERMS
from tests.silos.fakes import NAMES, FakeNodes, mine, silo_file, with_keys
from tests.silos.sessions import assert_equal, far, here

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")
from ekiden.silos.trust import keys

LIMITS = '[limits]\nlevel = "models"\nmethods = ["fedseq", "fedavg", "dfedavgm", "local"]\n'
TRAIN = {"fedseq": (INITIAL,), "fedavg": (INITIAL, 0)}


def federation(folder: Path, more: str = "") -> tuple[FakeNodes, dict[str, str]]:
    files, public = with_keys(folder, NAMES, LIMITS + more)
    return FakeNodes(files), public


_FINISHED: dict[str, tuple[Path, FakeNodes, dict[str, str]]] = {}


def finished(
    folder: Path,
    method: Method = FedSeq(epochs=1),  # noqa: B008  (frozen)
    **plan: Any,
) -> tuple[FakeNodes, dict[str, str]]:
    """Silos after a run, which is made once: what all parties have on their disks, and the
    messages."""
    name = f"{method} {plan}"
    if name not in _FINISHED:
        first = folder.parent / f"finished-{len(_FINISHED)}"
        nodes, public = federation(first)
        far(method, nodes, first / "run", public, **plan)
        _FINISHED[name] = first, nodes, public
    first, made, public = _FINISHED[name]
    shutil.copytree(first, folder, dirs_exist_ok=True)
    files = [read(folder / file.path.name) for file in made.files.values()]
    nodes = FakeNodes([replace(f, limits=replace(f.limits, min_clients=2)) for f in files])
    nodes.log, nodes.said = list(made.log), list(made.said)
    return nodes, public


def known(**given: Any) -> dict[str, Any]:
    """The fields of a request in this version."""
    return {name: value for name, value in given.items() if name in {f.name for f in fields(Ask)}}


def terms_in(nodes: FakeNodes) -> Agreement:
    return agreements.parse(next(a for _, d in nodes.log if (a := unpack(d, Ask)[0].agreement)))


class Attacker:
    """Speaks to silos as a coordinator does, with a key of its own."""

    def __init__(self, nodes: FakeNodes, terms: Agreement) -> None:
        self.nodes, self.terms = nodes, terms
        self.key = sealing.new_private()
        self._readers: dict[int, Reader] = {}

    @property
    def party(self) -> Party:
        return Party(SERVER, self.terms.run, self.terms.digest, self.key, self.terms.silos, None)

    def reader(self, step: int = 0) -> Reader:
        return Reader(SERVER, step, sealing.public_of(self.key))

    def under(self, **changes: Any) -> "Attacker":
        recipe = copy(self.terms.recipe)  # changed as no party may change its own: unchecked
        for name in {f.name for f in fields(recipe)} & changes.keys():
            object.__setattr__(recipe, name, changes.pop(name))
        other = Attacker(self.nodes, replace(self.terms, recipe=recipe, **changes))
        other.key = self.key
        return other

    def ask(self, node: int, kind: str, body: bytes = b"", **given: Any) -> tuple[Answer, bytes]:
        ask = Ask(kind, self.terms.text(), **known(**given))
        answer, rest = unpack(self.nodes.silo(node).answer(pack(ask, (body,))), Answer)
        assert "\n" not in answer.error
        return answer, bytes(rest)

    def as_reader(self, node: int, step: int) -> Reader:
        """A silo as the reader of what is sent to it."""
        if node not in self._readers:
            answer, body = self.ask(node, "hello", nonce="", run=self.terms.run)
            hello: Hello = wire.decode(body, Hello)
            self._readers[node] = Reader(answer.silo, step, hello.sealing, hello.proof)
        return replace(self._readers[node], step=step)

    def task(self, node: int, step: int, args: Any, **given: Any) -> tuple[Answer, bytes]:
        """Ask for training from `args`, sealed as a coordinator's are."""
        ask = Ask("task", self.terms.text(), **known(step=step, task="train", **given))
        given_to = (self.as_reader(node, step),)
        data, (lock,) = self.party.seal(Encoded.of(wire.encode(args)), arguments_key(ask), given_to)
        full = replace(ask, length=len(data), lock=lock)
        answer, rest = unpack(self.nodes.silo(node).answer(pack(full, (data,))), Answer)
        return answer, bytes(rest)

    def opened(self, node: int, answer: Answer, body: bytes, key: str) -> list[bytes]:
        """Return the part of an answer that the attacker can read."""
        found = []
        for lock in answer.locks:
            with contextlib.suppress(wire.WireError):
                found.append(self.party.open(body, lock, NAMES[node - 100], key, lock.step).data)
        return found

    def value(self, node: int, key: str, **given: Any) -> list[bytes]:
        """Return what the attacker can read of a value that it asks for by itself."""
        answer, body = self.ask(node, "value", key=key, readers=(self.reader(),), **given)
        return self.opened(node, answer, body, key)

    def measure(self, node: int, models: list[Weights], step: int = 0, **given: Any) -> Reported:
        """What a silo reports about models."""
        data, (lock,) = self.party.seal(
            Encoded.of(wire.encode(models)), "models", (self.as_reader(node, step),)
        )
        about = {"results": 1, "step": step}
        members = tuple(self.as_reader(other, 0) for other in self.nodes.files)
        answer, body = self.ask(
            node, "evaluate", data, lock=lock, **{"members": members, **about, **given}
        )
        if answer.error:
            raise UserError(answer.error)
        found: Reported = wire.decode(body, Reported)
        return found

    def numbers(self, node: int, models: list[Weights], **given: Any) -> dict[str, torch.Tensor]:
        """The same of a silo that shows its own counts, by name."""
        shown = self.measure(node, models, **given).shown
        assert shown is not None
        return counting_of(self.terms.labels, self.terms.outputs, full=True).split(shown.counts[0])


def given_in(nodes: FakeNodes, node: int, key: str) -> bytes:
    """What lies on a silo's disk."""
    (folder,) = (nodes.files[node].folder / "runs").iterdir()
    return Shelf(folder, None).value(key)[1].data


OTHERS: dict[str, dict[str, Any]] = {
    "skips": {"skips": True},
    "fedavg": {"method": FedAvg(rounds=9, epochs=1)},
    "seed": {"seed": 4},
    "fewer": {"clients": NAMES[:2]},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_finished_run_stays_closed_under_other_terms(other: str, tmp_path: Path) -> None:
    """An attacker who knows the terms asks for hand-offs under the same run id and other terms,
    with its own key."""
    nodes, public = finished(tmp_path)
    attacker = Attacker(nodes, terms_in(nodes))
    changes = dict(OTHERS[other])
    if "clients" in changes:
        changes["keys"] = tuple(public[name] for name in changes["clients"])
    thief = attacker.under(**changes)
    assert [thief.value(100 + i, f"{i}-0-train") for i in range(2)] == [[], []]
    for kind in ("value", "task", "evaluate", "status", "hello"):
        assert "has other terms at client-0" in thief.ask(100, kind, key="0-0-train")[0].error
    assert attacker.value(102, "2-0-train") == [
        given_in(nodes, 102, "2-0-train")
    ]  # the result, which was shown before


def test_terms_are_bound_before_anything_is_answered(tmp_path: Path) -> None:
    """The first contact counts, also if it is only a greeting, and for every process."""
    nodes, _ = finished(tmp_path)
    run = secrets.token_hex(8)
    attacker = Attacker(nodes, replace(terms_in(nodes), run=run))
    assert attacker.ask(100, "hello")[0].error == ""
    assert "has other terms" in attacker.under(skips=True).ask(100, "hello")[0].error
    assert (
        json.loads((tmp_path / "client-0-silo" / "runs" / run / "terms.json").read_text())["skips"]
        is False
    )


def test_what_was_asked_includes_the_terms(tmp_path: Path) -> None:
    from ekiden.silos.trust.parcel import Contents

    contents = Contents(Encoded.of(b"arguments"), {})
    assert contents.digest("one", Ask("task"), None) != contents.digest("other", Ask("task"), None)


MISSING: list[tuple[tuple[int, str], ...]] = [
    (),
    ((1, "client-1"), (2, "client-2")),
    ((2, "client-2"),),
]


@pytest.mark.parametrize("absent", MISSING)
def test_the_server_reads_no_hand_off_where_silos_may_be_skipped(
    absent: Any, tmp_path: Path
) -> None:
    """It says that all later silos are missing, so that each hop looks like the result."""
    nodes, _ = finished(tmp_path, absent="skip")
    attacker = Attacker(nodes, terms_in(nodes))
    assert [attacker.value(100 + i, f"{i}-0-train", absent=absent) for i in range(2)] == [[], []]


def test_a_silo_trains_no_model_of_the_servers_where_silos_may_be_skipped(tmp_path: Path) -> None:
    """The server reads the last silo's model; trained from the server's model, it would show that
    silo's data."""
    nodes, _ = finished(tmp_path, absent="skip")
    attacker = Attacker(nodes, replace(terms_in(nodes), run=secrets.token_hex(8)))
    crafted = wire.decode(given_in(nodes, 102, "2-0-train"), Weights)
    answer, body = attacker.task(102, 2, (crafted,), readers=(attacker.reader(),))
    assert attacker.opened(102, answer, body, "2-0-train") == []
    assert "fedseq does not ask this of client-2 in step 3" in answer.error


def test_the_result_is_never_the_work_of_one_silo(tmp_path: Path) -> None:
    """All others are reported missing, so the last silo starts from the initial model."""
    nodes, _ = finished(tmp_path, absent="skip")
    attacker = Attacker(nodes, replace(terms_in(nodes), run=secrets.token_hex(8)))
    absent = ((0, "client-0"), (1, "client-1"))
    answer, body = attacker.task(102, 2, (INITIAL,), readers=(attacker.reader(),), absent=absent)
    assert attacker.opened(102, answer, body, "2-0-train") == []
    assert "the result would be the work of client-2 alone" in answer.error


def test_two_silos_told_of_other_absences_do_not_work_together(tmp_path: Path) -> None:
    """Or the result could be the work of fewer silos than the last one believes."""
    nodes, _ = finished(tmp_path, absent="skip")
    attacker = Attacker(nodes, replace(terms_in(nodes), run=secrets.token_hex(8)))
    third = attacker.as_reader(102, 2)
    answer, sealed = attacker.task(101, 1, (INITIAL,), readers=(third,), absent=((0, "client-0"),))
    assert answer.error == ""
    for absent, said in (((), "is broken"), (((0, "client-0"),), "")):
        part = ParcelPart("client-1", "1-0-train", len(sealed), answer.locks[0])
        ask = Ask(
            "task",
            attacker.terms.text(),
            **known(step=2, task="train", parts=(part,), absent=absent),
        )
        args = wire.encode((Ref("client-1", "1-0-train"),))
        data, (lock,) = attacker.party.seal(Encoded.of(args), arguments_key(ask), (third,))
        full = pack(replace(ask, length=len(data), lock=lock), (data, sealed))
        assert said in unpack(nodes.silo(102).answer(full), Answer)[0].error


def test_the_server_reads_one_result_of_a_run(tmp_path: Path) -> None:
    """Having read it, it has the last hop done again without the silo before: the difference would
    be that silo's."""
    nodes, _ = finished(tmp_path, absent="skip")
    attacker = Attacker(nodes, terms_in(nodes))
    third, absent = attacker.as_reader(102, 2), ((1, "client-1"),)
    answer, sealed = attacker.ask(100, "value", key="0-0-train", readers=(third,), absent=absent)
    part = ParcelPart("client-0", "0-0-train", len(sealed), answer.locks[0])
    given: dict[str, Any] = {"parts": (part,), "absent": absent, "readers": (attacker.reader(),)}
    ask = Ask("task", attacker.terms.text(), **known(step=2, task="train", **given))
    args = Encoded.of(wire.encode((Ref("client-0", "0-0-train"),)))
    data, (lock,) = attacker.party.seal(args, arguments_key(ask), (third,))
    full = pack(replace(ask, length=len(data), lock=lock), (data, sealed))
    answer, body = unpack(nodes.silo(102).answer(full), Answer)
    assert attacker.opened(102, answer, bytes(body), "2-0-train") == []
    assert "client-2 has shown the server another result of run" in answer.error


def test_a_silo_that_wants_all_silos_refuses_a_run_that_skips_before_it_trains(
    tmp_path: Path,
) -> None:
    """It trained, and refused its result at the end."""
    files, public = with_keys(tmp_path, NAMES, LIMITS, trusting=False)
    nodes = FakeNodes(files)
    with pytest.raises(UserError, match=r"wants all 3: .* write min_clients = 2 under \[limits\]"):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", public, absent="skip")
    assert not list(tmp_path.glob("client-*-silo/runs/*"))
    assert_equal(far(FedSeq(epochs=1), nodes, tmp_path / "run2", public), here(FedSeq(epochs=1)))


def stopped_before_the_last(folder: Path, **plan: Any) -> tuple[FakeNodes, dict[str, str]]:
    nodes, public = federation(folder)

    def stop(node: int, data: bytes) -> None:
        ask = unpack(data, Ask)[0]
        if ask.kind == "task" and ask.step == 2:
            raise KeyboardInterrupt

    nodes.lose = stop
    with pytest.raises(KeyboardInterrupt):
        far(FedSeq(epochs=1), nodes, folder / "run", public, **plan)
    nodes.lose = lambda node, data: None
    return nodes, public


@pytest.mark.parametrize("other", ["same", "skips", "fedavg"])
def test_nobody_makes_a_silo_forget_a_sealed_run(other: str, tmp_path: Path) -> None:
    """A task says that a million steps are over and that everything before may be deleted; then the
    run continues."""
    nodes, public = stopped_before_the_last(tmp_path)
    thief = Attacker(nodes, terms_in(nodes)).under(**OTHERS.get(other, {}))
    for node in nodes.files:
        with contextlib.suppress(wire.WireError):  # no key where the terms are refused
            thief.task(node, 10**6, TRAIN.get(thief.terms.recipe.name), settled=10**6)
    assert_equal(far(FedSeq(epochs=1), nodes, tmp_path / "run", public), here(FedSeq(epochs=1)))


def test_a_new_coordinator_with_the_same_terms_goes_on(tmp_path: Path) -> None:
    nodes, public = stopped_before_the_last(tmp_path)
    assert_equal(far(FedSeq(epochs=1), nodes, tmp_path / "run", public), here(FedSeq(epochs=1)))


def test_messages_for_a_run_that_was_removed_show_nothing(tmp_path: Path) -> None:
    """A recorded run is played again to silos that have removed their folders."""
    nodes, _ = finished(tmp_path)
    log, attacker = list(nodes.log), Attacker(nodes, terms_in(nodes))
    for name in NAMES:
        shutil.rmtree(tmp_path / f"{name}-silo" / "runs")
    for node, data in log:
        answer, body = unpack(nodes.silo(node).answer(data), Answer)
        if unpack(data, Ask)[0].kind != "hello":
            assert "is sealed for another key" in answer.error
            assert not body
    assert attacker.value(100, "0-0-train") == []


# Measuring.


def layers(weights: dict[str, torch.Tensor]) -> Weights:
    """The network of the runs here, 64-400-200-100-10, all zero except for what is given."""
    module = build("mlp", (1, 8, 8), 10)
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            tensor.zero_()
            if name in weights:
                part = weights[name]
                tensor[tuple(slice(n) for n in part.shape)] = part
    return Network(module).weights()


def through(first: torch.Tensor, bias: torch.Tensor, last: float) -> Weights:
    """A model whose first logit is `last` times the difference of two units, and whose others are
    zero."""
    one = torch.ones(1, 1)
    module = [name for name, _ in build("mlp", (1, 8, 8), 10).named_parameters()]
    w1, b1, w2, _, w3, _, w4, _ = module
    return layers({w1: first, b1: bias, w2: torch.tensor([[1.0, -1.0]]), w3: one, w4: one * last})


PIXELS = [8 * row + column for row in range(2, 6) for column in range(2, 6)]
"""those in the middle of an image, which are stolen; the others are black in most images"""


def stolen(
    measure: Callable[[list[Weights]], dict[str, torch.Tensor]], loud: float = 1.0
) -> torch.Tensor:
    """The middle of one test image, pixel by pixel, from a silo's reports about crafted models.

    Bisection finds a threshold that one sample alone exceeds in some direction. Units that only it
    switches on then carry one of its pixels each to the loss, `loud` times."""
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))

    def above(threshold: float) -> int:
        rows = torch.stack([direction, direction]) * 1e4
        count = measure(
            [
                through(
                    rows,
                    torch.tensor([-threshold, -threshold]) * 1e4 - torch.tensor([0.0, 1.0]),
                    1e3,
                )
            ]
        )
        return round(float(real(count["loss"].numpy())) / 1e3)  # a thousand for each sample above

    def edge(number: int) -> float:
        low, high = -50.0, 50.0
        for _ in range(18):
            middle = (low + high) / 2
            low, high = (middle, high) if above(middle) >= number else (low, middle)
        return (low + high) / 2

    first, second = edge(1), edge(2)
    threshold = (first + second) / 2
    scale = 10 / max(first - threshold, 1e-6)
    gate = direction * scale
    bias = torch.tensor([-threshold, -threshold]) * scale
    image = torch.zeros(64)
    for pixel in PIXELS:
        carrying = gate.clone()
        carrying[pixel] += 1
        count = measure([through(torch.stack([carrying, gate]), bias, loud)])
        own = float(real(count["loss"].numpy())) - (int(count["samples"]) - 1) * math.log(10)
        image[pixel] = (own if own > 50 else math.log(max(math.exp(own) - 9, 1e-9))) / loud
    return image


def test_a_silo_shows_nothing_of_its_own_unless_its_file_says_so(tmp_path: Path) -> None:
    """Under masks the counts of one silo are noise; the sum of all opens."""
    nodes, _ = finished(tmp_path, FedAvg(rounds=1, epochs=1))
    attacker, model = Attacker(nodes, terms_in(nodes)).under(run="a" * 16), layers({})
    found = {name: attacker.measure(100 + i, [model], step=1) for i, name in enumerate(NAMES)}
    assert all(one.shown is None for one in found.values())
    part = found["client-0"].masked
    assert part is not None
    noise = torch.cat([t.flatten() for t in part.numbers])
    assert len(set(noise.tolist())) == len(noise)  # nearly all counts are 0
    assert 0.45 < float((noise > 0).double().mean()) < 0.55
    total = total_of(found, 3)
    assert total is not None
    assert int(total.own["reports"]) == 3


def error(image: torch.Tensor) -> float:
    """How far its middle is from that of the nearest test image of client-0, at the pixel that
    differs most."""
    test = mine("client-0")[1].test
    images = test.samples.x[test.rows].reshape(len(test), -1) / 255
    return float((images - image)[:, PIXELS].abs().amax(1).min())


def test_no_test_image_comes_out_of_a_run_whose_server_reads_nothing(tmp_path: Path) -> None:
    nodes, _ = finished(tmp_path)
    attacker = Attacker(nodes, terms_in(nodes))
    with pytest.raises(UserError, match="silos measure only the result"):
        assert error(stolen(lambda models: attacker.numbers(100, models, step=3))) > 0.05


def test_models_of_a_step_are_measured_once(tmp_path: Path) -> None:
    """Where the server reads models, it makes them; a silo measures those of a step alone, and a change
    of one weight by 1e-7 makes others."""
    nodes, _ = finished(tmp_path, FedAvg(rounds=1, epochs=1))
    attacker, model = Attacker(nodes, terms_in(nodes)).under(run="a" * 16), layers({})
    attacker.measure(100, [model], step=1)
    attacker.measure(100, [model], step=1)
    params = model.params.clone()
    params[0] += 1e-7
    with pytest.raises(UserError, match="has measured the models after step 1 of this run"):
        attacker.measure(100, [model.with_params(params)], step=1)


def test_a_plan_names_the_steps_after_which_models_are_measured(tmp_path: Path) -> None:
    """evaluate_every = 0: none of 25 made-up models before training, and none during it."""
    nodes, _ = finished(tmp_path, FedAvg(rounds=3, epochs=1))
    attacker = Attacker(nodes, replace(terms_in(nodes), run=secrets.token_hex(8)))
    for number in range(25):
        model = layers({})
        model = model.with_params(model.params + number)
        with pytest.raises(UserError, match=r"measures models after step 3, not after step [012]"):
            attacker.measure(100, [model], step=number % 3)
    two = tuple(attacker.as_reader(node, 0) for node in (100, 101))
    with pytest.raises(UserError, match="gives its part to sums of all silos"):
        attacker.measure(100, [layers({})], step=3, members=two)
    recipe = replace(attacker.terms.recipe, evaluate_every=2)
    seldom = Attacker(nodes, replace(attacker.terms, recipe=recipe, run="a" * 16))
    assert seldom.terms.measured_steps == (2, 3)
    assert seldom.measure(100, [layers({})], step=2).masked is not None


def signed_hop(hop: custody.Entry, key: Path, **changes: Any) -> str:
    return custody.signed(replace(hop, **changes), partial(keys.sign, key))


def test_the_result_is_measured_once_with_the_same_answer(tmp_path: Path) -> None:
    nodes, public = finished(tmp_path)
    (data,) = (d for node, d in nodes.log if node == 100 and unpack(d, Ask)[0].kind == "evaluate")
    ask, _ = unpack(data, Ask)
    attacker = Attacker(nodes, terms_in(nodes))
    result = wire.decode(given_in(nodes, 102, "2-0-train"), Weights)
    before = nodes.said[[d for _, d in nodes.log].index(data)]
    again = wire.encode(attacker.measure(100, [result], step=3, records=ask.records))
    assert again == bytes(unpack(before, Answer)[1])
    assert len(list((tmp_path / "client-0-silo").rglob("measured-*.parcel"))) == 1
    # Another model with the result's record; a hop of the same run; the same hop of another run;
    # nobody's word.
    other = result.with_params(result.params * 2)
    hop = wire.decode(given_in(nodes, 100, "0-0-train"), Weights)
    (hops,) = tmp_path.glob("run/custody.jsonl")
    first = hops.read_text().splitlines()[0]
    far(FedSeq(epochs=1), nodes, tmp_path / "again", public)
    foreign = (tmp_path / "again" / "custody.jsonl").read_text().splitlines()[2]
    hop_of_result = custody.parse(ask.records[0])
    digest = custody.digest(wire.chunks(other))
    forged = signed_hop(hop_of_result, tmp_path / "client-0.key", model=digest, given=digest)
    for model, record in (
        (other, ask.records[0]),
        (hop, first),
        (result, foreign),
        (other, forged),
    ):
        with pytest.raises(
            UserError, match=r"measure only the result|gives no account of 2-0-train"
        ):
            attacker.measure(100, [model], step=3, records=(record,))
    for records in ((), (ask.records[0],) * 2):
        with pytest.raises(UserError, match="silos measure only the result"):
            attacker.measure(100, [result], step=3, records=records)


def test_a_last_silo_that_signs_two_results_gets_one_measured(tmp_path: Path) -> None:
    """It works together with the coordinator: each other silo still reports on one model."""
    nodes, _ = finished(tmp_path)
    record = custody.parse((tmp_path / "run" / "custody.jsonl").read_text().splitlines()[2])
    model = wire.decode(given_in(nodes, 102, "2-0-train"), Weights)
    other = model.with_params(model.params * 2)
    digest = custody.digest(wire.chunks(other))
    forged = signed_hop(record, tmp_path / "client-2.key", model=digest)
    with pytest.raises(
        UserError, match="has measured the models after step 3 of this run, and measures no others"
    ):
        Attacker(nodes, terms_in(nodes)).measure(100, [other], step=3, records=(forged,))


def test_nothing_is_measured_where_the_plan_says_so(tmp_path: Path) -> None:
    """Not the result either, whoever asks."""
    nodes, public = federation(tmp_path)
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", public, evaluate_dp="none")
    assert not {"accuracy", "loss"} & result.metrics[-1].keys()
    assert {unpack(data, Ask)[0].kind for _, data in nodes.log} == {"hello", "task"}
    assert verify(tmp_path / "run", public).wrong == ()
    attacker = Attacker(nodes, terms_in(nodes))
    assert attacker.terms.measured_steps == ()
    with pytest.raises(UserError, match="client-0 refuses"):
        attacker.measure(100, [wire.decode(given_in(nodes, 102, "2-0-train"), Weights)], step=3)
    with pytest.raises(UserError, match="is for runs that train: give epsilon"):
        agreements.parse(replace(attacker.terms, measures="0" * 64).text())


def test_a_report_with_noise_is_no_larger_than_a_model(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    noise = "epsilon=2,delta=1e-5"
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", public, evaluate_dp=noise)
    rows = read_lines(tmp_path / "run" / "network.jsonl", "kind", "received")
    assert result.weights is not None
    model = wire.size(result.weights)
    assert all(row["received"] < model for row in rows if row["kind"] == "evaluate")


def test_of_few_samples_nothing_is_said(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path, "min_samples = 1000\n")
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    assert "accuracy" not in result.metrics[-1]
    for file in tmp_path.rglob("measured-*.parcel"):
        assert not unpack(verified(file.read_bytes()), SiloReport)[0].counts.any()


def test_whoever_runs_a_silo_sees_what_was_asked(tmp_path: Path) -> None:
    nodes, _ = finished(tmp_path)
    attacker = Attacker(nodes, terms_in(nodes))
    attacker.ask(100, "value\nforged", key="x")
    with contextlib.suppress(UserError):
        attacker.measure(100, [wire.decode(given_in(nodes, 102, "2-0-train"), Weights)], step=3)
    text = (tmp_path / "client-0-silo" / "requests.log").read_text()
    run = attacker.terms.run
    for line in (
        f"run {run} begins: fedseq among client-0, client-1, client-2",
        f"run {run}, step 1: train done",
        f"run {run}: value 0-0-train sealed for client-1",
        f"run {run}, after step 3: models measured: 1",
        f"refused evaluate of run {run}: in fedseq silos measure only the result",
    ):
        assert line in text
    assert all(line[:2] == "20" and line[19] == "Z" for line in text.splitlines())


# Trust.


def files_of(folder: Path) -> list[str]:
    """What a silo stored, its own records of who asked, and when, apart."""
    found, own = (
        folder.rglob("*") if folder.exists() else iter(()),
        {"requests.log", "requests.json"},
    )
    own |= {".requests.log.lock", "days.json", ".days.json.lock"}
    return sorted(str(p.relative_to(folder)) for p in found if p.is_file() and p.name not in own)


def invented(folder: Path, nodes: FakeNodes, public: dict[str, str]) -> Iterator[Agreement]:
    """Runs of client-0 with silos that do not exist, and with itself alone."""
    terms = replace(terms_in(nodes), run=secrets.token_hex(8))
    ghost = keys.read_public(keys.generate(folder / "ghost.key"))
    yield replace(terms, clients=("client-0", "ghost"), keys=(public["client-0"], ghost))
    yield replace(terms, clients=("client-0", "client-1"), keys=(public["client-0"], ghost))
    yield replace(terms, clients=("client-0",), keys=(public["client-0"],))


@pytest.mark.parametrize("peers", [True, False])
def test_invented_silos_get_nothing_and_leave_nothing(peers: bool, tmp_path: Path) -> None:
    nodes, public = finished(tmp_path)
    file = tmp_path / "client-0.toml"
    if not peers:
        file.write_text(file.read_text().replace('peers = "peers"', 'peers = "none"'))
    shutil.rmtree(tmp_path / "client-0-silo")
    nodes.files[100] = read(file)
    for agreed in invented(tmp_path, nodes, public):
        attacker = Attacker(nodes, agreed)
        answer, _ = attacker.ask(100, "hello", run=agreed.run)
        if not answer.error:
            ghost = sealing.new_private()
            readers: tuple[Reader, ...] = (attacker.reader(),)
            if len(agreed.clients) == 2:
                key = sealing.public_of(ghost)
                text = sealing.key_text(agreed.run, agreed.clients[1], key)
                proof = keys.sign(tmp_path / "ghost.key", sealing.KEY, text)
                readers = (Reader(agreed.clients[1], 1, key, proof),)
            answer, body = attacker.task(100, 0, (INITIAL,), readers=readers)
            assert not body
        assert answer.error
        assert files_of(tmp_path / "client-0-silo") == []


def test_a_silo_that_knows_nobody_takes_part_alone_only_if_its_file_says_so(tmp_path: Path) -> None:
    """A coordinator could give a roster without the others: the sum of one silo is its own."""
    terms = replace(TERMS, clients=NAMES[:1], keys=TERMS.keys[:1])
    limits = '[limits]\napprove = false\nlevel = "models"\n'
    file = silo_file(tmp_path, NAMES[0], limits, trusting=False)
    file = replace(file, link=replace(file.link, peers="none"))
    for fewest, why in ((0, "the run has 1 silos, client-0 allows 2 to 100"), (1, "")):
        own = replace(file, limits=replace(file.limits, min_clients=fewest))
        hello = Silo(own, {"": mine(NAMES[0])}).answer(pack(Ask("hello", terms.text(), "0")))
        error = unpack(hello, Answer)[0].error
        assert error.startswith(why)
        assert bool(error) == bool(why)


def test_a_sealed_run_needs_the_keys_of_the_others(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    for name in NAMES:
        file = tmp_path / f"{name}.toml"
        file.write_text(file.read_text().replace('peers = "peers"', 'peers = "none"'))
    nodes = FakeNodes([read(tmp_path / f"{name}.toml") for name in NAMES])
    with pytest.raises(
        UserError, match=r"there is no public key .*client-1\.pub: `ekiden silo join"
    ):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    assert files_of(tmp_path / "client-0-silo") == []


# Exhaustion.


def test_greetings_with_invented_runs_store_nothing(tmp_path: Path) -> None:
    nodes, _ = finished(tmp_path)
    before = files_of(tmp_path / "client-0-silo")
    for _ in range(5):
        ask = Ask("hello", nonce="x", **known(run=secrets.token_hex(8)))
        assert unpack(nodes.silo(100).answer(pack(ask)), Answer)[0].error == ""
    assert files_of(tmp_path / "client-0-silo") == before


LARGE: list[tuple[Any, dict[str, Any], str]] = [
    (
        FedSeq(epochs=1, rounds=20_000),
        {},
        r"the run has 60000 steps, client-0 allows 2000 \(limits.steps",
    ),
    (FedSeq(epochs=1, rounds=10**30), {}, r"steps, client-0 allows 2000 \(limits.steps"),
    (FedAvg(epochs=1, rounds=10**9), {}, r"the run has 1000000000 steps, client-0 allows 2000"),
    (
        DFedAvgM(epochs=1, rounds=2000),
        {"crowd": 12},
        r"asks for more than 20000 tasks, .* \(limits.tasks",
    ),
    (
        FedSeq(epochs=1),
        {"crowd": 1000},
        r"the run has 1000 silos, client-0 allows 2 to 100 \(limits.min_clients and",
    ),
    (
        FedSeq(epochs=1),
        {"dataset": "x" * 10**6},
        "the terms of the run cannot be read: they have 100",
    ),
]


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        pytest.param(*case, marks=[] if number in (0, 4, 5) else pytest.mark.slow, id=case[2][:40])
        for number, case in enumerate(LARGE)
    ],
)
def test_large_runs_are_refused_before_they_are_built(
    method: Any, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    import re

    nodes, public = federation(tmp_path, "")
    far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
    terms = replace(terms_in(nodes), run=secrets.token_hex(8))
    if crowd := more.get("crowd", 0):
        names = ("client-0", *(f"x{i}" for i in range(1, crowd)))
        more = {"clients": names, "keys": (terms.keys[0],) * crowd}
        # the silo knows them all
        for name in names[1:]:
            (tmp_path / "peers" / f"{name}.pub").write_text(terms.keys[0])
    terms = replace(terms, recipe=replace(terms.recipe, method=method), **more)
    before, began = files_of(tmp_path / "client-0-silo"), time.process_time()
    answer, _ = Attacker(nodes, terms).ask(100, "value", key="0-0-train")
    assert re.search(said, answer.error)
    assert time.process_time() - began < 10
    assert files_of(tmp_path / "client-0-silo") == before


def test_an_outline_ends_at_the_limit() -> None:
    terms = Agreement("0" * 16, "", Recipe(FedSeq(epochs=1, rounds=10**6), model="mlp"), shape=(1, 8, 8),
                      classes=tuple("0123456789"), mean=(0.0,), std=(1.0,))  # fmt: skip
    setup = terms.setup(no_samples(terms), Hardware(threads=1))
    began = time.process_time()
    with pytest.raises(UserError, match="asks for more than 50 tasks"):
        outline(setup, NAMES, most=50)
    assert time.process_time() - began < 1
    assert len(outline(replace(setup, method=FedSeq(epochs=1)), NAMES, most=3).requests) == 3  # type: ignore[union-attr]


def test_values_that_move_are_limited_like_tasks() -> None:
    """In a complete graph each task takes a value of every silo: a greeting kept a silo busy for a
    quarter minute."""
    terms = Agreement("0" * 16, "", Recipe(DFedAvgM(epochs=1, rounds=2000), model="mlp"), shape=(1, 8, 8),
                      classes=tuple("0123456789"), mean=(0.0,), std=(1.0,))  # fmt: skip
    setup, looked = terms.setup(no_samples(terms), Hardware(threads=1)), list[Any]()

    def size(ref: Ref[Any]) -> int:
        looked.append(ref)
        return 0

    with pytest.raises(UserError, match="moves more than 500 values"):
        outline(setup, [f"client-{i}" for i in range(20)], most=100, size=size)
    assert len(looked) == 500


def test_sums_that_the_last_state_names_are_no_result() -> None:
    """Silos open the result to the coordinator: models, whatever else a method leaves in its last
    state."""
    model, own = Ref[Weights]("client-0", "3-0-solve"), Ref[Weights]("client-1", "4-0-personalise")
    totals, settled = Ref[Any]("client-2", "2-0-add"), Ref[Any]("client-0", "0-0-settle")
    end = Summing(step=5, model=model, personal=(own,), totals=totals, settled=settled)
    assert Outline((), end).result == {model, own}


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("requests = 3", r"has sent 3 requests, client-0 answers 3 of a run \(limits.requests"),
        ("disk_bytes = 1000", r"stores \d+ bytes of all runs, 1000 at most \(limits.disk_bytes"),
        ("clients = 2", r"the run has 3 silos, client-0 allows 2 to 2 \("),
        ("min_clients = 4", r"the run has 3 silos, client-0 allows 4 to 100 \("),
        ("steps = 1", r"the run has 3 steps, client-0 allows 1 \(limits.steps"),
        ("tasks = 2", r"more than 2 tasks, which is all that client-0 allows, .* \(limits.tasks"),
    ],
)
def test_limits(limit: str, said: str, tmp_path: Path) -> None:
    """Each is one line that names itself; two runs in which each silo is asked four times."""
    nodes, public = federation(tmp_path, limit + "\n")

    def runs() -> None:
        for name in ("run", "other"):
            far(FedSeq(epochs=1), nodes, tmp_path / name, public)
            far(Local(epochs=1), nodes, tmp_path / f"{name}-local", public)
            attacker = Attacker(nodes, terms_in(nodes))
            for error in [attacker.ask(100, "value", key="0-0-train")[0].error for _ in range(4)]:
                if error:
                    raise UserError(f"silo client-0: {error}")

    with pytest.raises(UserError, match=f"silo client-0: .*{said}") as refused:
        runs()
    assert "\n" not in str(refused.value)


def test_every_method_runs_within_the_default_limits() -> None:
    """With its own defaults, over ten silos, measured at the end."""
    from ekiden.silos.silo.silo_file import Limits

    limits = Limits()
    for kind in METHODS:
        if not kind.traits.pools_data:
            assert kind().steps(10) <= limits.steps, kind.title()


@pytest.mark.parametrize(
    "method",
    [
        FedGram(width=120),
        pytest.param(FedKrylov(width=120, laps=2, sums="whole"), marks=pytest.mark.slow),
        pytest.param(with_lap(FedSeq(epochs=1)), marks=pytest.mark.slow),
    ],
)
def test_the_coordinator_of_a_chain_gets_no_sums(method: Method, tmp_path: Path) -> None:
    """It asks for every value of a finished run; only the model is sealed for it, also while the
    run goes on."""
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)
    far(method, nodes, tmp_path / "run", public)
    terms = terms_in(nodes)
    plan = outline(terms.setup(no_samples(terms), Hardware(threads=1)), NAMES)
    assert plan is not None
    (model,) = plan.result
    assert payload_types(method, model.key.split("-", 2)[2])[1] is Weights
    for (node, data), said in zip(nodes.log, nodes.said, strict=True):
        ask, answer = unpack(data, Ask)[0], unpack(said, Answer)[0]
        if ask.kind == "task" and any(lock.recipient == SERVER for lock in answer.locks):
            assert (NAMES[node - 100], f"{ask.step}-{ask.call}-{ask.task}") == (
                model.owner,
                model.key,
            )
    attacker = Attacker(nodes, terms)
    for request in plan.requests:
        if Ref(request.client, request.key) != model:
            key = request.key
            answer, _ = attacker.ask(
                100 + NAMES.index(request.client),
                "value",
                key=key,
                readers=(attacker.reader(),),
            )
            assert re.search("the server reads only the result|is not here|is gone", answer.error)


def test_two_runs_do_not_show_the_sums_of_who_left(tmp_path: Path) -> None:
    """What the coordinator stores of a run and of the run without a silo are models; no sums can be
    subtracted."""
    files, public = with_keys(tmp_path, NAMES)
    method = FedGram(width=120)
    far(method, FakeNodes(files), tmp_path / "run", public)
    nodes, left = (
        FakeNodes([files[0], files[2]]),
        {name: public[name] for name in ("client-0", "client-2")},
    )
    release = tmp_path / "release.txt"
    terms = str(tmp_path / "run" / AGREEMENT)
    call(["silo", "release", str(tmp_path / "client-1.toml"), terms, "--out", str(release)])
    without = remote_plan.without(tmp_path / "run", "client-1", release)
    session.run(without, nodes, tmp_path / "less", left, lambda line: None, poll=0)
    for folder in (tmp_path / "run", tmp_path / "less"):
        stored = {
            file.name: file.stat().st_size
            for file in folder.rglob("*")
            if file.suffix == ".safetensors"
        }
        assert stored.keys() == {"model.safetensors", "state.safetensors"}
        assert stored["state.safetensors"] < size(10, 120) / 4
    models = [load_file(tmp_path / name / "model.safetensors") for name in ("run", "less")]
    differ = [name for name, value in models[0].items() if not value.equal(models[1][name])]
    assert sum(models[0][name].numel() for name in differ) < 120 * 121 / 8
