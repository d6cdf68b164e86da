"""Sealed values: only who is meant to read a value can, and whatever was changed or moved elsewhere does not open.

A value is encrypted once under a key of its own (ChaCha20-Poly1305). Each reader gets a lock: that key and the value's
SHA-256, encrypted under a key that X25519 and HKDF make of a key pair of the sender's, fresh for this lock, and of the
reader's key of this run. A silo's key of the run is signed by its silo key, and so is every lock that it makes. What a
lock is for, the `Binding`, is part of all three, so a value of another run, step, sender or reader is refused like one
that was changed. Another reader of the same value knows its key, but cannot put another value in its place: the lock
holds the digest.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ekiden.base.errors import UserError
from ekiden.base.files import write_once
from ekiden.base.refs import SERVER
from ekiden.engine import wire
from ekiden.engine.wire import Encoded
from ekiden.transports.flower import keys

Sign = Callable[[bytes], str]
_MOST = (1 << 31) - 17  # what the cipher takes at once, less its tag
_KEY_BYTES = 32
_ONCE = bytes(12)  # a nonce need not vary where every key is used once


@dataclass(frozen=True)
class Binding:
    """What a lock is for.

    Attributes:
        run: id of the run.
        terms: digest of its agreement, thus of the method, its hyperparameters and the silos' keys.
        sender: who sealed the value.
        key: the value's name there.
        recipient: who may read it.
        step: in which it is read.
    """

    run: str
    terms: str
    sender: str
    key: str
    recipient: str
    step: int

    def text(self) -> bytes:
        """The same bytes for the same binding."""
        return b"ekiden seal\n" + json.dumps(asdict(self), separators=(",", ":"), sort_keys=True).encode()


@dataclass(frozen=True)
class Reader:
    """Who is to read a value.

    Attributes:
        name: a silo, or the server.
        step: in which it will.
        key: its X25519 public key of this run, in hexadecimal.
        proof: signature of that by its silo key; empty of the server.
    """

    name: str
    step: int
    key: str
    proof: str = ""


@dataclass(frozen=True)
class Lock:
    """What one reader needs to open a value; all bytes in hexadecimal.

    Attributes:
        recipient: who may read it.
        step: in which.
        key: the recipient's public key that it was made for.
        ephemeral: the sender's public key of this lock alone.
        wrapped: the value's key and digest, encrypted.
        signature: by the sender's silo key; empty of the server.
    """

    recipient: str
    step: int
    key: str
    ephemeral: str
    wrapped: str
    signature: str


class Sealed(NamedTuple):
    """An encrypted value, and the key that opens it."""

    data: bytes
    key: bytes


class Sealer(Protocol):
    """How one party seals what it sends and opens what it gets."""

    def seal(self, value: Encoded, key: str, readers: Sequence[Reader]) -> tuple[bytes, tuple[Lock, ...]]:
        """`value`, called `key` here, for `readers`."""

    def open(self, data: bytes | memoryview, lock: Lock | None, sender: str, key: str, step: int) -> Encoded:
        """What `sender` sealed under the name `key` for this party in `step`."""


class Plain:
    """Seals nothing: for runs without keys, or where the user said so."""

    def seal(self, value: Encoded, key: str, readers: Sequence[Reader]) -> tuple[bytes, tuple[Lock, ...]]:
        """`value` itself."""
        return value.data, ()

    def open(self, data: bytes | memoryview, lock: Lock | None, sender: str, key: str, step: int) -> Encoded:
        """`data` itself.

        Raises:
            WireError: it is sealed.
        """
        if lock is not None:
            raise wire.WireError(f"value {key[:80]!r} is sealed in a run that seals nothing: refused")
        return Encoded.of(bytes(data))


@dataclass(frozen=True)
class Party:
    """Seals and opens for one party of a run.

    Attributes:
        name: of the party.
        run: id of the run.
        terms: digest of its agreement.
        private: the party's X25519 key of this run.
        silos: public silo key of every client.
        sign: signs with the party's silo key; None: the server, which has none.
    """

    name: str
    run: str
    terms: str
    private: Any
    silos: Mapping[str, str]
    sign: Sign | None

    def seal(self, value: Encoded, key: str, readers: Sequence[Reader]) -> tuple[bytes, tuple[Lock, ...]]:
        """`value` for `readers`.

        Raises:
            WireError: a reader's key is not its own.
        """
        sealed = encrypt(value.data)
        locks = []
        for reader in readers:
            if reader.name != SERVER and not vouched(reader, self.run, self.silos):
                raise wire.WireError(f"the key for {reader.name[:80]!r} is not signed by {reader.name[:80]!r}: refused")
            binding = Binding(self.run, self.terms, self.name, key, reader.name, reader.step)
            locks.append(lock(sealed.key, value.digest, reader.key, binding, self.sign))
        return sealed.data, tuple(locks)

    def open(self, data: bytes | memoryview, lock: Lock | None, sender: str, key: str, step: int) -> Encoded:
        """What `sender` sealed for this party.

        Raises:
            WireError: it does not open.
        """
        if lock is None:
            raise wire.WireError(f"value {key[:80]!r} of {sender[:80]} is not sealed: refused")
        binding = Binding(self.run, self.terms, sender, key, self.name, step)
        return unlock(lock, data, self.private, binding, None if sender == SERVER else self.silos.get(sender, ""))


def encrypt(plain: bytes) -> Sealed:
    """`plain` under a new key.

    Raises:
        UserError: it is longer than the cipher takes.
    """
    if len(plain) > _MOST:
        raise UserError("a value of more than 2 GB cannot be sealed: use a smaller model, or --no-sealed")
    key: bytes = _chacha().generate_key()
    return Sealed(_chacha()(key).encrypt(_ONCE, plain, None), key)


def lock(key: bytes, digest: str, reader: str, binding: Binding, sign: Sign | None) -> Lock:
    """The lock to an encrypted value.

    Args:
        key: that opens the value.
        digest: SHA-256 of the value, in hexadecimal.
        reader: public key of who may read it.
        binding: what it is for.
        sign: signs for the sender.
    """
    ephemeral = new_private()
    statement = _statement(binding, public_of(ephemeral), reader)
    wrapped = _chacha()(_shared(ephemeral, reader, statement)).encrypt(_ONCE, key + bytes.fromhex(digest), statement)
    signature = sign(_signed(statement, wrapped)) if sign else ""
    return Lock(binding.recipient, binding.step, reader, public_of(ephemeral), wrapped.hex(), signature)


def unlock(lock: Lock, data: bytes | memoryview, private: Any, binding: Binding, sender: str | None) -> Encoded:
    """The value that `lock` is for.

    Args:
        lock: that came with it.
        data: the encrypted value.
        private: the reader's key.
        binding: what the reader expects it to be for.
        sender: the public silo key of who must have signed the lock, "" if that is nobody of the run; None: no need to.

    Raises:
        WireError: it was changed, made for something else, or by somebody else.
    """
    if lock.key != public_of(private):
        raise wire.WireError(
            f"value {binding.key[:80]!r} of {binding.sender[:80]} is sealed for another key than {binding.recipient} "
            "has in this run: refused"
        )
    try:
        wrapped, statement = bytes.fromhex(lock.wrapped), _statement(binding, lock.ephemeral, lock.key)
        if sender is not None and not (sender and keys.proves(sender, _signed(statement, wrapped), lock.signature)):
            raise ValueError("not signed by the sender")
        inside = _chacha()(_shared(private, lock.ephemeral, statement)).decrypt(_ONCE, wrapped, statement)
        found = Encoded.of(_chacha()(inside[:_KEY_BYTES]).decrypt(_ONCE, data, None))
        if found.digest != inside[_KEY_BYTES:].hex():
            raise ValueError("another value under the same key")
    except Exception:  # of the cipher, of X25519 or of the hexadecimal: all mean the same
        raise wire.WireError(
            f"the seal of value {binding.key[:80]!r} from {binding.sender[:80]} to {binding.recipient} for step "
            f"{binding.step + 1} is broken: changed, replayed, or made for somebody else: refused"
        ) from None
    return found


def vouched(reader: Reader, run: str, silos: Mapping[str, str]) -> bool:
    """Whether the silo signed its key of this run."""
    public = silos.get(reader.name, "")
    return bool(public) and keys.proves(public, key_text(run, reader.name, reader.key), reader.proof)


def key_text(run: str, name: str, key: str) -> bytes:
    """What a silo signs of its key of a run."""
    return f"ekiden sealing key\n{run}\n{name}\n{key}".encode()


def new_private() -> Any:
    """A new X25519 key."""
    return _x25519().X25519PrivateKey.generate()


def public_of(private: Any) -> str:
    """The public key to it, in hexadecimal."""
    return str(private.public_key().public_bytes_raw().hex())


def kept_private(file: Path) -> Any:
    """The X25519 key in `file`, made at the first call; readable by its owner only, and the same for all processes.

    Raises:
        UserError: the file is damaged.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        kept = write_once(file, new_private().private_bytes_raw())
        return _x25519().X25519PrivateKey.from_private_bytes(kept)
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is damaged ({error}): remove it; values sealed for it are asked for again") from None


def _statement(binding: Binding, ephemeral: str, reader: str) -> bytes:
    return b"\n".join((binding.text(), ephemeral.encode(), reader.encode()))


def _signed(statement: bytes, wrapped: bytes) -> bytes:
    """What a sender signs of a lock: it says nothing of the value to those who have no key."""
    return b"\n".join((statement, wrapped.hex().encode()))


def _shared(own: Any, other: str, statement: bytes) -> bytes:
    """The key that two parties have in common, for one lock."""
    from cryptography.hazmat.primitives import hashes  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    secret = own.exchange(_x25519().X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
    key: bytes = HKDF(hashes.SHA256(), length=32, salt=None, info=statement).derive(secret)
    return key


def _x25519() -> Any:
    """The package comes with the extra `flower`, so it is imported only where it is used."""
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519  # noqa: PLC0415
    except ImportError:
        raise UserError("sealing needs the extra: pip install 'ekiden[flower]'") from None
    return x25519


def _chacha() -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305  # noqa: PLC0415

    return ChaCha20Poly1305
