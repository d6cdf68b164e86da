"""Silos make their keys themselves, a coordinator changes none unnoticed, and a revoked key is
refused at once."""

import json
import os
import resource
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import write
from ekiden.silos import commands
from ekiden.silos.coordinator import federation as federations
from ekiden.silos.coordinator.federation import Federation
from ekiden.silos.silo import silo_file
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import ROSTER, read_roster

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
Command = Callable[..., tuple[int, str]]
SILOS = ("a", "b", "c")


def own_key(folder: Path, name: str) -> Path:
    """What a silo gives to its coordinator."""
    call(["silo", "init", str(folder / name), "--link", "link.example.org:8000"])
    return folder / name / f"{name}.key.pub"


@pytest.fixture
def fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Federation:
    monkeypatch.setattr(commands, "is_running", lambda federation: False)
    call(
        [
            "federation",
            "init",
            str(tmp_path / "fed"),
            *(str(own_key(tmp_path, name)) for name in SILOS),
        ]
    )
    return federations.read(tmp_path / "fed")


def joined(fed: Federation, name: str, *more: str) -> dict[str, str]:
    """The keys that a silo knows after it took the roster."""
    folder = fed.folder.parent / name
    call(["silo", "join", str(folder / "silo.toml"), str(fed.folder / ROSTER), *more])
    return {path.stem: path.read_text().strip() for path in (folder / "peers").iterdir()}


def test_no_private_key_leaves_a_silo(fed: Federation, tmp_path: Path) -> None:
    assert {path.name for path in fed.folder.rglob("*.key")} == {"ca.key", "link.key"}
    assert not (fed.folder / "silos").exists()
    for name in SILOS:
        peers = joined(fed, name)
        assert peers == {
            other: read_roster(fed.folder / ROSTER).key_of[other] for other in set(SILOS) - {name}
        }
        file = silo_file.read(tmp_path / name / "silo.toml")
        assert file.beside(file.link.certificate).read_bytes() == fed.certificate.read_bytes()
        assert keys.same(keys.public_of(file.key), (fed.keys / f"{name}.pub").read_text())
        assert stat.S_IMODE(file.key.stat().st_mode) == 0o600
    assert stat.S_IMODE((fed.folder / "ca.key").stat().st_mode) == 0o600


def test_a_coordinator_does_not_replace_a_key_that_a_silo_knows(
    fed: Federation, tmp_path: Path, command: Command
) -> None:
    """A key of the coordinator's own for b would let it read what a seals for b."""
    before = joined(fed, "a")
    true = (fed.folder / ROSTER).read_text()
    forged = json.loads(true)
    forged["keys"][1] = keys.read_public(keys.generate(tmp_path / "forged"))
    file, given = tmp_path / "a" / "silo.toml", tmp_path / "given.json"
    for change, why in (
        (forged, "another key than the roster: ask its owner, by another way than the coordinator"),
        ({**json.loads(true), "certificate": "other"}, "give --replace ca.crt"),
        (
            {**json.loads(true), "keys": [*forged["keys"][1:2], *json.loads(true)["keys"][1:]]},
            "has another key of a",
        ),
        ({**json.loads(true), "silos": ["x", "b", "c"]}, "the roster has no a"),
        ({**json.loads(true), "silos": ["a", "b", "../c"]}, "is not the name of a silo"),
        ({**json.loads(true), "silos": ["a", "b", "server"]}, "server"),
        ({**json.loads(true), "silos": ["a", "b", "b"]}, "names 'b' twice"),
        ({**json.loads(true), "keys": ["", *json.loads(true)["keys"][1:]]}, "is not a public key"),
    ):
        given.write_text(json.dumps(change))
        code, said = command("silo", "join", str(file), str(given))
        assert (code, why in " ".join(said.split())) == (2, True), said
        assert {
            path.stem: path.read_text().strip() for path in (tmp_path / "a" / "peers").iterdir()
        } == before
    given.write_text(json.dumps(forged))
    code, said = command("silo", "join", str(file), str(given), "--replace", "b")
    assert code == 0
    assert f"b has the key {keys.fingerprint(forged['keys'][1])}" in said
    assert "compare each fingerprint with its owner" in said


@pytest.mark.parametrize("text", ["", "[]", "{", '{"silos": []}', "null", "\x00", "[" * 100_000])
def test_a_damaged_roster_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "roster.json").write_text(text)
    with pytest.raises(UserError, match="roster"):
        read_roster(tmp_path / "roster.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is not a file"):
        read_roster(tmp_path / "pipe")


def test_silos_come_change_their_keys_and_go(
    fed: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joined(fed, "a")
    call(["federation", "add", str(fed.folder), str(own_key(tmp_path, "d"))])
    assert federations.read(fed.folder).silos == (*SILOS, "d")
    assert set(joined(fed, "a")) == {"b", "c", "d"}
    old = (fed.keys / "b.pub").read_text()
    new, make = tmp_path / "b" / "b.key.pub", ["silo", "keys", str(tmp_path / "b" / "silo.toml")]
    with pytest.raises(UserError, match="keeps it; remove the file to make another"):
        call(make)
    new.with_suffix("").unlink()
    call(make)
    assert "ekiden federation add FOLDER b.pub" in capsys.readouterr().out
    call(["federation", "rotate", str(fed.folder), str(new)])
    assert keys.same((fed.keys / "b.pub").read_text(), new.read_text())
    assert federations.read(fed.folder).silos == (*SILOS, "d")
    with pytest.raises(UserError, match=r"give (--)?replace b"):
        joined(fed, "a")
    assert keys.same(joined(fed, "a", "--replace", "b")["b"], new.read_text())
    call(["federation", "revoke", str(fed.folder), "b"])
    assert federations.read(fed.folder).silos == ("a", "c", "d")
    assert not (fed.keys / "b.pub").exists()
    assert set(joined(fed, "a")) == {"c", "d"}
    assert old not in (fed.folder / ROSTER).read_text()


def test_mistakes_with_keys_change_nothing(fed: Federation, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in fed.folder.rglob("*") if path.is_file()}
    a, stranger = tmp_path / "a" / "a.key.pub", own_key(tmp_path, "stranger")
    twin = tmp_path / "twin.pub"
    twin.write_text(a.read_text())
    for words, why in (
        (("add", a), "a is in the federation"),
        (("add", twin), "a has the key that is given for twin"),
        (("add", stranger, stranger), "two keys are of 'stranger'"),
        (("add",), "PUBLIC_KEYS is missing"),
        (("add", tmp_path / "a" / "a.key"), "is not a public key"),
        (("add", tmp_path / "none.pub"), "there is no public key"),
        (("rotate", stranger), "stranger is not in the federation"),
        (("rotate", a), "a has the key that is given for a"),
        (("revoke", "x"), "unknown silo 'x'"),
        (("revoke",), "NAMES is missing"),
        (("revoke", *SILOS), "give the public keys"),
    ):
        with pytest.raises(UserError, match=why):
            call(["federation", words[0], str(fed.folder), *map(str, words[1:])])
        assert {
            path: path.read_bytes() for path in fed.folder.rglob("*") if path.is_file()
        } == before
    with pytest.raises(UserError, match="not both"):
        call(["federation", "init", str(tmp_path / "other"), str(a), "--silos", "x"])
    with pytest.raises(UserError, match="give the public keys of the silos"):
        call(["federation", "init", str(tmp_path / "other")])


@contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file can have more bytes than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_leaves_all_as_it_was(fed: Federation, tmp_path: Path) -> None:
    """A key that is half written, or a certificate without its key, would be found later."""
    stranger = own_key(tmp_path, "stranger")
    (tmp_path / "a" / "a.key").rename(tmp_path / "a.key")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    silo = tmp_path / "a" / "silo.toml"
    for most in (0, 100):
        for words in (
            ("federation", "init", tmp_path / "other", "--silos", "x,y"),
            ("federation", "rotate", fed.folder),
            ("federation", "add", fed.folder, stranger),
            ("silo", "init", tmp_path / "z", "--link", "localhost:8000"),
            ("silo", "keys", silo),
            ("silo", "join", tmp_path / "b" / "silo.toml", fed.folder / ROSTER),
        ):
            with full_disk(most), pytest.raises(UserError, match="cannot write"):
                call([*map(str, words)])
            now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
            assert now == before, words


def test_a_silo_whose_first_joining_broke_off_knows_all_of_the_roster(
    fed: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise those whose keys came later would not count, and sums of two silos would do."""

    def one_file(path: Path, chunks: Iterable[bytes]) -> None:
        write(path, chunks)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(silo_file, "write", one_file)
        with pytest.raises(KeyboardInterrupt):
            joined(fed, "a")
    joined(fed, "a")
    assert silo_file.read(tmp_path / "a" / "silo.toml").least_clients() == len(SILOS)


def test_a_key_that_the_federation_lost_is_in_its_roster(fed: Federation) -> None:
    lost = fed.keys / "a.pub"
    text = lost.read_text()
    lost.unlink()
    call(["federation", "revoke", str(fed.folder), "b"])
    assert lost.read_text() == text


def test_the_certificate_lasts_a_year_and_is_renewed_under_the_same_authority(
    fed: Federation,
) -> None:
    year = datetime.now(UTC) + timedelta(days=365)
    authority, key = fed.certificate.read_bytes(), (fed.folder / "link.key").read_bytes()
    assert shakes_hands(fed.folder, "localhost") == []
    call(["federation", "rotate", str(fed.folder)])
    assert abs(keys.valid_until(fed.folder / "link.crt") - year) < timedelta(hours=1)
    assert (fed.folder / "link.key").read_bytes() != key
    assert stat.S_IMODE((fed.folder / "link.key").stat().st_mode) == 0o600
    assert fed.certificate.read_bytes() == authority
    assert shakes_hands(fed.folder, "localhost") == []
    assert "Hostname mismatch" in shakes_hands(fed.folder, "other.example.org")[0]
    (fed.folder / "ca.key").unlink()
    with pytest.raises(UserError, match=r"there is no .*ca\.key: who signed"):
        call(["federation", "rotate", str(fed.folder)])


def shakes_hands(folder: Path, host: str) -> list[str]:
    """Why a silo that knows `ca.crt` does not believe the SuperLink; empty if it does."""
    here, there = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    here.load_verify_locations(folder / "ca.crt")
    there.load_cert_chain(folder / "link.crt", folder / "link.key")
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        here.wrap_bio(down, up, server_hostname=host),
        there.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLCertVerificationError as error:
                return [error.verify_message]
    return []


def test_who_is_connected_is_listed(fed: Federation, command: Command) -> None:
    now = datetime.now(UTC).timestamp()
    for text in ("", "[]", '{"a": []}', '{"a": "x"}'):
        (fed.folder / federations.SEEN).write_text(text)
        assert {silo.state for silo in federations.status(fed)} == {"never"}
    (fed.folder / federations.SEEN).write_text(
        json.dumps({"a": now - 5, "b": now - 500, "stranger": now})
    )
    code, said = command("federation", "status", str(fed.folder), "--json")
    found = json.loads(said)
    assert code == 0
    assert [(silo["name"], silo["state"]) for silo in found["silos"]] == [
        ("a", "connected"),
        ("b", "away"),
        ("c", "never"),
    ]
    assert found["silos"][0]["fingerprint"] == keys.fingerprint((fed.keys / "a.pub").read_text())
    assert (found["good"], found["running"]) == (False, False)
    said = command("federation", "status", str(fed.folder))[1]
    assert f"the SuperLink does not run: `ekiden federation start {fed.folder}`" in said


def test_a_silo_that_is_added_is_in_runs_when_one_with_it_has_ended_well(
    fed: Federation, tmp_path: Path
) -> None:
    assert federations.members(fed) == fed.silos, "those of the beginning are waited for"
    call(["federation", "add", str(fed.folder), str(own_key(tmp_path, "d"))])
    added = federations.read(fed.folder)
    assert (added.silos, federations.members(added)) == ((*fed.silos, "d"), fed.silos)
    federations.met(fed.folder, fed.silos)
    assert federations.members(federations.read(fed.folder)) == fed.silos
    federations.met(fed.folder, added.silos)
    assert federations.members(federations.read(fed.folder)) == added.silos


def test_silos_that_joined_by_a_new_roster_go_on_with_the_others_until_all_have(
    fed: Federation, tmp_path: Path
) -> None:
    for name in SILOS:
        joined(fed, name)
    call(["federation", "add", str(fed.folder), str(own_key(tmp_path, "d"))])
    for name in ("a", "d"):
        joined(fed, name)

    def least(name: str) -> int:
        return silo_file.read(tmp_path / name / "silo.toml").least_clients()

    # a knows d, and goes on with b and c, which do not; d begins with all of its roster
    assert [least(name) for name in "abcd"] == [3, 3, 3, 4]
    file = silo_file.read(tmp_path / "a" / "silo.toml")
    file.meet(SILOS)
    joined(fed, "a")
    assert least("a") == 3
    file.meet([*SILOS, "d"])
    assert least("a") == 4


def _pem(public: Sequence[str]) -> list[bytes]:
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return [public_key_to_bytes(load_ssh_public_key(text.encode())) for text in public]


def test_a_revoked_key_is_refused_at_once(fed: Federation, tmp_path: Path) -> None:
    """Also one that Flower's database still knows; a file without a key lets nobody in."""
    from ekiden.silos.superlink import KeyFolder

    known = KeyFolder(fed.keys)
    a, b = _pem([(fed.keys / f"{name}.pub").read_text() for name in ("a", "b")])
    assert known(a)
    assert known(b)
    call(["federation", "revoke", str(fed.folder), "b"])
    assert known(a)
    assert not known(b)
    call(["federation", "rotate", str(fed.folder), str(keys.generate(tmp_path / "a.key"))])
    assert not known(a)
    (after,) = _pem([(fed.keys / "a.pub").read_text()])
    assert known(after)
    known.note(after)
    known.note(b)
    assert set(known.seen) == {"a"}
    (fed.keys / "a.pub").write_text("no key")
    for key in (after, a, b, b""):
        assert not known(key)
