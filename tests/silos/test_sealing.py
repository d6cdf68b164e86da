"""Nobody between two silos can read a model, or change, replay or reorder it unnoticed."""

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.wire import SERVER, Encoded, WireError
from ekiden.core.engine.worker import Outcome, Worker
from ekiden.core.training.weights import Weights
from ekiden.methods import DFedAvgM, FedAvg, FedSeq, FedTasuki, MAEcho
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, sealing
from ekiden.silos.trust.parcel import Answer, Ask, ParcelPart, arguments_key, opened, pack, unpack
from ekiden.silos.trust.sealing import Binding, Party, Reader
from tests.fuzz import examples
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import far, here, same

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ekiden.silos.trust import keys
from tests.silos.signed import federation


@pytest.fixture
def parties(tmp_path: Path) -> dict[str, Party]:
    """Three silos and the server, in one run."""
    private = {name: tmp_path / f"{name}.key" for name in "abc"}
    silos = {name: keys.read_public(keys.generate(file)) for name, file in private.items()}

    def signer(name: str) -> sealing.Sign:
        return partial(keys.sign, private[name])

    found = {n: Party(n, "run", "terms", sealing.new_private(), silos, signer(n)) for n in "abc"}
    return found | {SERVER: Party(SERVER, "run", "terms", sealing.new_private(), silos, None)}


def reader(party: Party, step: int) -> Reader:
    key = sealing.public_of(party.private)
    return Reader(
        party.name,
        step,
        key,
        party.sign(sealing.KEY, sealing.key_text(party.run, party.name, key)) if party.sign else "",
    )


def test_each_reader_opens_what_is_for_it(parties: dict[str, Party]) -> None:
    a, b, c, server = (parties[n] for n in ("a", "b", "c", SERVER))
    data, locks = a.seal(
        Encoded.of(b"weights"), "0-0-train", (reader(b, 1), reader(c, 2), reader(server, 3))
    )
    assert b"weights" not in data
    for lock, party, step in zip(locks, (b, c, server), (1, 2, 3), strict=True):
        assert party.open(data, lock, "a", "0-0-train", step).data == b"weights"
    assert len({lock.wrapped[:64] for lock in locks}) == 3  # the sender's keys, one for each lock
    again, (other,) = a.seal(Encoded.of(b"weights"), "0-0-train", (reader(b, 1),))
    assert again != data
    assert other.wrapped[:64] not in {lock.wrapped[:64] for lock in locks}
    data, (lock,) = server.seal(Encoded.of(b""), "arguments", (reader(b, 1),))
    assert b.open(data, lock, SERVER, "arguments", 1).data == b""


def test_whatever_is_changed_or_moved_does_not_open(parties: dict[str, Party]) -> None:
    a, b, c, server = (parties[n] for n in ("a", "b", "c", SERVER))
    data, (lock, to_c) = a.seal(
        Encoded.of(b"new weights"), "3-0-train", (reader(b, 4), reader(c, 4))
    )
    older, (older_lock,) = a.seal(Encoded.of(b"old weights"), "0-0-train", (reader(b, 1),))
    forged, (forged_lock,) = c.seal(Encoded.of(b"c's weights"), "3-0-train", (reader(b, 4),))
    from_server, (server_lock,) = server.seal(
        Encoded.of(b"bad weights"), "3-0-train", (reader(b, 4),)
    )
    flipped = bytes([data[0] ^ 1]) + data[1:]
    broken, other = (
        "seal of value '3-0-train' from a to b for step 5 is broken",
        "sealed for another key than b has",
    )
    cases: list[tuple[bytes, sealing.Lock | None, str]] = [
        (flipped, lock, broken),
        (data[:-1], lock, broken),
        (data + b"x", lock, broken),
        (b"", lock, broken),
        (older, older_lock, broken),
        (older, lock, broken),
        (data, older_lock, broken),
        (forged, forged_lock, broken),
        (from_server, server_lock, broken),
        (data, to_c, other),
        (data, replace(to_c, key=lock.key), broken),
        (data, replace(lock, wrapped=to_c.wrapped[:64] + lock.wrapped[64:]), broken),
        (data, replace(lock, wrapped=lock.wrapped[:-2] + "00"), broken),
        (data, replace(lock, signature=to_c.signature), broken),
        (data, replace(lock, signature=""), broken),
        (data, replace(lock, wrapped="00" * 32 + lock.wrapped[64:]), broken),
        (data, replace(lock, wrapped="zz" + lock.wrapped[2:]), broken),
        (data, None, "is not sealed"),
    ]
    for changed, with_lock, reason in cases:
        with pytest.raises(WireError, match=reason) as refused:
            b.open(changed, with_lock, "a", "3-0-train", 4)
        assert "\n" not in str(refused.value)
    for party in (replace(b, run="another run"), replace(b, terms="other terms")):
        with pytest.raises(WireError, match="is broken"):
            party.open(data, lock, "a", "3-0-train", 4)
    for sender, key, step in (
        ("c", "3-0-train", 4),
        ("d", "3-0-train", 4),
        ("a", "2-0-train", 4),
        ("a", "3-0-train", 5),
    ):
        with pytest.raises(WireError, match="is broken"):
            b.open(data, lock, sender, key, step)
    assert b.open(data, lock, "a", "3-0-train", 4).data == b"new weights"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 23])
def test_pieces_of_a_value_open_only_all_and_in_their_order(
    length: int, parties: dict[str, Party], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_PIECE", 8)
    a, b = parties["a"], parties["b"]
    value = Encoded.of(b"x" * length)  # pieces are equal, so that a nonce used twice shows
    data, (lock,) = a.seal(value, "3-0-train", (reader(b, 4),))
    pieces = [data[at : at + 24] for at in range(0, len(data), 24)]
    assert len(data) == length + 16 * max(1, -(-length // 8)) == sum(map(len, pieces))
    assert len({piece[:8] for piece in pieces}) == len(pieces)
    assert b.open(data, lock, "a", "3-0-train", 4) == value
    orders = {
        b"".join(pieces[i] for i in order)
        for n in range(len(pieces) + 2)
        for order in orders_of(pieces, n)
    }
    for changed in (orders | {data[:-1], data + data}) - {data}:
        with pytest.raises(WireError, match="is broken"):
            b.open(changed, lock, "a", "3-0-train", 4)


def orders_of(pieces: list[bytes], n: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(range(len(pieces)), repeat=n)


@pytest.mark.parametrize("sender", ["a", SERVER])
def test_a_reader_cannot_put_another_value_in_the_place_of_one_that_another_reader_shall_get(
    sender: str, parties: dict[str, Party]
) -> None:
    """Readers share the value's key, so c can encrypt what it likes under it; the lock of b holds a
    digest."""
    b, c = parties["b"], parties["c"]
    true, (to_b, to_c) = parties[sender].seal(
        Encoded.of(b"weights"), "3-0-train", (reader(b, 4), reader(c, 4))
    )
    binding = Binding("run", "terms", sender, "3-0-train", "c", 4)
    statement = sealing._statement(binding, to_c.key)
    key = sealing._hpke().decrypt(bytes.fromhex(to_c.wrapped), c.private, statement)[:32]
    assert ChaCha20Poly1305(key).decrypt(bytes(12), true, None) == b"weights"
    forged = ChaCha20Poly1305(key).encrypt(bytes(12), b"poison!", None)
    with pytest.raises(WireError, match="is broken"):
        b.open(forged, to_b, sender, "3-0-train", 4)
    assert b.open(true, to_b, sender, "3-0-train", 4).data == b"weights"


def test_a_lock_does_not_tell_which_value_it_is_for(parties: dict[str, Party]) -> None:
    """Without a key nobody finds the value's digest in the lock, or can test a guess with the
    signature."""
    a, b = parties["a"], parties["b"]
    value = Encoded.of(b"weights")
    _, (lock,) = a.seal(value, "3-0-train", (reader(b, 4),))
    assert value.digest not in repr(lock)
    statement = sealing._statement(Binding("run", "terms", "a", "3-0-train", "b", 4), lock.key)
    for guess in (b"", value.data, bytes.fromhex(value.digest), value.digest.encode()):
        said = sealing._signed(statement, guess)
        assert not keys.proves(a.silos["a"], sealing._SEAL, said, lock.signature)
    said = sealing._signed(statement, bytes.fromhex(lock.wrapped))
    assert keys.proves(a.silos["a"], sealing._SEAL, said, lock.signature)


def test_readers_without_a_key_of_their_own_are_refused(parties: dict[str, Party]) -> None:
    a, b, c = (parties[n] for n in "abc")
    good = reader(b, 1)
    stranger = sealing.public_of(sealing.new_private())
    for bad in (
        replace(good, key=stranger),
        replace(good, name="c"),
        replace(good, proof=""),
        replace(good, proof=reader(c, 1).proof),
        replace(good, name="nobody"),
        reader(replace(b, run="another run"), 1),
    ):
        with pytest.raises(WireError, match="is not signed by"):
            a.seal(Encoded.of(b"weights"), "0-0-train", (bad,))


@pytest.mark.parametrize("key", ["", "zz", "00", "0" * 64, "00" * 33])
def test_what_is_no_key_is_refused_in_one_line(key: str, parties: dict[str, Party]) -> None:
    """Whoever signs it himself, as a silo can; with zeros all parties would share one secret."""
    proof = parties["b"].sign(sealing.KEY, sealing.key_text("run", "b", key))  # type: ignore[misc]
    for name, signed in (("b", proof), (SERVER, "")):
        with pytest.raises(WireError, match="is not a key for seals: refused"):
            parties["a"].seal(Encoded.of(b"model"), "0-0-train", [Reader(name, 0, key, signed)])


def test_a_binding_and_a_sealing_key_are_what_they_were(tmp_path: Path) -> None:
    texts = [
        Binding("r", "t", "a", "k", "b", 1),
        Binding("r", "t", "a", "k", "b", 2),
        Binding("r", "t", "b", "k", "a", 1),
    ]
    assert len({sealing._statement(b, "reader") for b in texts}) == 3
    first = sealing.kept_private(tmp_path / "run")
    assert sealing.public_of(sealing.kept_private(tmp_path / "run")) == sealing.public_of(first)
    assert (tmp_path / "run" / sealing.SECRET).stat().st_mode & 0o077 == 0
    (tmp_path / "run" / sealing.SECRET).write_bytes(b"short")
    with pytest.raises(UserError, match="is damaged"):
        sealing.kept_private(tmp_path / "run")


@pytest.fixture(scope="module")
def letter(tmp_path_factory: pytest.TempPathFactory) -> tuple[Party, bytes]:
    """A message with a sealed value, and who can open it."""
    key = tmp_path_factory.mktemp("letter") / "a.key"
    silos = {"a": keys.read_public(keys.generate(key))}
    a = Party("a", "run", "terms", sealing.new_private(), silos, partial(keys.sign, key))
    b = Party("b", "run", "terms", sealing.new_private(), silos, None)
    server = Party(SERVER, "run", "terms", sealing.new_private(), silos, None)
    to_b = Reader(SERVER, 1, sealing.public_of(b.private))  # nobody vouches for a server's key
    b = replace(b, name=SERVER)
    data, (lock,) = a.seal(Encoded.of(b"weights"), "0-0-train", (to_b,))
    ask = Ask("task", step=1, task="train", parts=(ParcelPart("a", "0-0-train", len(data), lock),))
    arguments, (own,) = server.seal(Encoded.of(b"arguments"), arguments_key(ask), (to_b,))
    return b, pack(replace(ask, length=len(arguments), lock=own), (arguments, data))


@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_changed_message_gives_the_same_values_or_a_wire_error(
    letter: tuple[Party, bytes], data: st.DataObject
) -> None:
    party, message = letter
    changed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(WireError):
        ask, body = unpack(bytes(changed), Ask)
        found = opened(ask, body, party)
        assert found.arguments.data == b"arguments"
        assert {value.data for value in found.values.values()} <= {b"weights"}


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
anything = st.recursive(plain, lambda part: st.lists(part) | st.dictionaries(st.text(), part))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
    )
)
def test_other_terms_and_records_are_user_errors(value: Any) -> None:
    said = [
        {name: part, "signature": "0"}
        for name in ("hop", "tally")
        for part in (value, {"format": 2, "x": value})
    ]
    for text in (json.dumps(value), *map(json.dumps, said), str(value)):
        for reader_of in (custody.parse, agreements.parse):
            with pytest.raises(UserError):
                reader_of(text)


# Whole runs.


@contextlib.contextmanager
def all_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Weights]]:
    """Every model that a silo makes in the meantime."""
    models: list[Weights] = []
    execute = Worker.execute

    def spy(self: Worker, *job: Any) -> Outcome:
        outcome = execute(self, *job)
        models.append(outcome.value if isinstance(outcome.value, Weights) else outcome.value.model)
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute", spy)
        yield models


def patterns(model: Weights) -> list[bytes]:
    """32 bytes from each 3000 values of a model."""
    pieces: tuple[Tensor, ...] = torch.split(model.params, 3000)
    found = [piece[len(piece) // 2 :][:8].numpy().tobytes() for piece in pieces]
    return [p for p in found if len(p) == 32 and p != bytes(32)]


@pytest.mark.parametrize(
    "method",
    [
        FedSeq(epochs=1),
        *(
            pytest.param(method, marks=pytest.mark.slow)
            for method in (
                FedAvg(rounds=1, epochs=1),
                DFedAvgM(rounds=1, epochs=1),
                FedTasuki(epochs=1),
            )
        ),
    ],
)
def test_no_weight_is_on_the_wire(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealing, "_PIECE", 5000)  # as values of more than 1 GiB are
    nodes, public = federation(tmp_path)
    with all_models(monkeypatch) as models:
        result = far(method, nodes, tmp_path / "run", public)
    assert same(result.weights, here(method).weights)
    wires = b"".join([data for _, data in nodes.log] + nodes.said)
    in_the_clear = b"".join(map(wire.encode, models))
    assert len(models) >= 3
    assert sum(p in in_the_clear for model in models for p in patterns(model)) > 20
    assert not any(p in wires for model in models for p in patterns(model))
    assert b'"dtype":"F32"' not in wires


Asked = tuple[int, Ask, bytes]


def asked_until_the_last(folder: Path) -> tuple[FakeNodes, dict[str, str], list[Asked]]:
    """A relay that broke off before its last hop, and the tasks that silos were asked for."""
    nodes, public = federation(folder)
    nodes.lose = lambda node, data: (
        stop() if node == 102 and unpack(data, Ask)[0].kind == "task" else None
    )
    with pytest.raises(KeyboardInterrupt):
        far(FedSeq(epochs=1), nodes, folder / "run", public)
    asks = [(node, *unpack(data, Ask)) for node, data in nodes.log]
    return (
        nodes,
        public,
        [(node, ask, bytes(body)) for node, ask, body in asks if ask.kind == "task"],
    )


def said_by(nodes: FakeNodes, node: int, ask: Ask, body: bytes = b"") -> str:
    answer, rest = unpack(nodes.silo(node).answer(pack(ask, (body,))), Answer)
    assert not (answer.error and rest)
    return answer.error


def test_a_silo_shows_another_one_only_what_the_method_gives_it(tmp_path: Path) -> None:
    """Otherwise a coordinator and one silo together could get any value of another silo."""
    nodes, _, ((first, one, _), (_, two, _), _) = asked_until_the_last(tmp_path)
    (second,), (third,) = one.readers, two.readers
    assert (second.name, second.step, third.name, third.step) == ("client-1", 1, "client-2", 2)
    value = Ask("value", one.agreement, key="0-0-train")
    assert said_by(nodes, first, replace(value, readers=(second,))) == ""
    for reader, step in ((third, 3), (replace(second, step=2), 3), (replace(third, step=1), 2)):
        refused = f"in fedseq {reader.name} does not use '0-0-train' in step {step}: client-0 does not show it"
        assert refused in said_by(nodes, first, replace(value, readers=(second, reader)))


def test_what_a_silo_is_to_forget_is_sealed_with_its_task(tmp_path: Path) -> None:
    nodes, _, (_, (second, two, body), _) = asked_until_the_last(tmp_path)
    assert two.settled == 1
    for changed in (replace(two, settled=0), replace(two, keep=("0-0-train",))):
        assert "is broken" in said_by(nodes, second, changed, body)
    absent = replace(two, absent=((0, "client-0"),))
    assert "said to be missing in a run that waits for all" in said_by(nodes, second, absent, body)
    assert said_by(nodes, second, two, body) == ""


def test_silos_that_seal_refuse_what_the_method_does_not_ask_for(tmp_path: Path) -> None:
    nodes, public, tasks = asked_until_the_last(tmp_path)
    (first, one, _), (second, two, body), (_, three, _) = tasks
    said = partial(said_by, nodes)
    (server,) = three.readers
    assert server.name == SERVER
    value = Ask("value", one.agreement, key="0-0-train")
    assert "the server reads only the result, not '0-0-train'" in said(
        first, replace(value, readers=(server,))
    )
    stranger = replace(server, name="client-9")
    assert "takes no part in the run" in said(first, replace(value, readers=(stranger,)))
    swapped = replace(one.readers[0], key=server.key)
    assert "is not signed by 'client-1'" in said(first, replace(value, readers=(swapped,)))
    assert said(second, two, body) == ""
    # The lock of step 2 for step 3, another task, another sender, a bit of the body, no lock.
    part = two.parts[0]
    assert part.lock is not None
    for bad in (
        replace(two, step=2),
        replace(two, call=1),
        replace(two, parts=(replace(part, owner="client-2"),)),
        replace(two, parts=(replace(part, key="1-0-train"),)),
        replace(two, parts=(replace(part, lock=replace(part.lock, signature="00")),)),
    ):
        assert "is broken" in said(second, bad, body)
    assert "is broken" in said(second, two, body[:-1] + bytes([body[-1] ^ 1]))
    assert "is not sealed" in said(second, replace(two, parts=(replace(part, lock=None),)), body)
    assert "is not sealed" in said(second, replace(two, lock=None), body)
    assert "sealed for another key" in said(first, two, body)
    terms = json.loads(one.agreement)
    assert "keys or the run's id are not as they must be" in said(
        first, replace(one, agreement=dump(terms, keys=[]))
    )
    other_key = [public["client-0"], public["client-2"], public["client-1"]]
    assert "client-0 knows another" in said(
        first, replace(one, agreement=dump(terms, keys=other_key))
    )
    other_key = [public["client-1"], *list(public.values())[1:]]
    assert "knows another key of client-0" in said(
        first, replace(one, agreement=dump(terms, keys=other_key))
    )
    assert "not client-0" in said(
        first, replace(one, agreement=dump(terms, clients=["x", "client-1", "client-2"]))
    )


def stop() -> None:
    raise KeyboardInterrupt


def dump(terms: dict[str, Any], **changes: Any) -> str:
    return json.dumps(terms | changes)


def test_measuring_on_the_way_would_show_models(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    with pytest.raises(
        UserError,
        match="evaluate_every shows the coordinator models that only silos read in fedseq",
    ):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", public, evaluate_every=1)
    assert far(
        FedAvg(rounds=2, epochs=1), nodes, tmp_path / "other", public, evaluate_every=1
    ).metrics[0]["accuracy"]


def test_a_network_that_the_method_cannot_treat_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    files, public = with_keys(tmp_path, NAMES, '[limits]\nmethods = ["maecho"]\n')
    nodes = FakeNodes(files)
    with pytest.raises(UserError, match="as many"):
        far(MAEcho(epochs=1, ranks="3,2,2,2,2,2"), nodes, tmp_path / "run", public)
    assert not (tmp_path / "run").exists()


# The chain of custody.


@pytest.mark.slow
def test_a_run_is_verified(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    for method, hops in (
        (FedSeq(epochs=1, rounds=2), 6),
        (FedTasuki(epochs=1), 3),
        (DFedAvgM(rounds=2, epochs=1), 12),
        (FedAvg(rounds=2, epochs=1), 6),
    ):
        run = tmp_path / method.title()
        far(method, nodes, run, public)
        verdict = verify(run, public)
        assert (len(verdict.hops), verdict.wrong, verdict.result) == (
            hops,
            (),
            method.title() != "fedavg",
        )
    hop = verify(tmp_path / "fedseq").hops[4]
    assert (hop.step, hop.client, hop.task, hop.samples[0]) == (
        4,
        "client-1",
        "train",
        len_train("client-1"),
    )
    other = public | {"client-1": public["client-0"]}
    assert "the run knew another key of client-1" in verify(tmp_path / "fedseq", other).wrong[0]


def len_train(name: str) -> int:
    from tests.silos.fakes import mine

    return len(mine(name)[1].train)


def test_a_folder_without_a_run_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        verify(tmp_path)
