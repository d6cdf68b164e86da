"""Seal values: only the intended readers can open them, and a value that was changed or moved does
not open.

Each value is encrypted once under its own key (ChaCha20-Poly1305), in pieces of 1 GiB whose nonces
are their numbers: the key is used for nothing else. Each reader gets a lock: that key and the
value's SHA-256, encrypted for the reader's key of this run by HPKE (RFC 9180). The silo key signs
the silo's key of the run, and every lock that the silo makes. The `Binding` says what a lock is
for. It is part of what is encrypted and of what is signed, so a value of another run, step, sender
or reader is refused like a changed one. Another reader of the same value knows its key, but cannot
replace the value: the lock holds the digest.
"""

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, write_once
from ekiden.core.engine import wire
from ekiden.core.engine.wire import SERVER, Encoded
from ekiden.silos.trust import keys

Sign = Callable[[str, bytes], str]
# bytes that are encrypted at once; the cipher takes less than 2 GiB
_PIECE = 1 << 30
_TAG = 16
_KEY_BYTES = 32
# file in a run's folder at a silo
SECRET = "secret.key"
# kinds of what is signed
KEY = "key"
_SEAL = "seal"


@dataclass(frozen=True)
class Binding:
    """What a lock is for."""

    # id of the run
    run: str
    # digest of its agreement, and so of the method, its hyperparameters and the silos' keys
    terms: str
    # party that sealed the value
    sender: str
    # the value's name there
    key: str
    # party that may read it
    recipient: str
    # step in which it is read
    step: int


@dataclass(frozen=True)
class Reader:
    """A party that may read a value."""

    # a silo, or the server
    name: str
    # step in which it reads the value
    step: int
    # its X25519 public key of this run, in hexadecimal
    key: str
    # signature of `key` by its silo key; empty for the server
    proof: str = ""


@dataclass(frozen=True)
class Lock:
    """What one reader needs to open a value; all bytes in hexadecimal."""

    # party that may read the value
    recipient: str
    # step in which it may
    step: int
    # the recipient's public key for which the lock was made
    key: str
    # the value's key and digest, encrypted
    wrapped: str
    # signature by the sender's silo key; empty for the server
    signature: str


class Sealed(NamedTuple):
    """An encrypted value, and the key that opens it."""

    data: bytes
    key: bytes


@dataclass(frozen=True)
class Party:
    """Seals and opens for one party of a run."""

    # name of the party
    name: str
    # id of the run
    run: str
    # digest of its agreement
    terms: str
    # the party's X25519 key of this run
    private: Any
    # public silo key of every client
    silos: Mapping[str, str]
    # signs with the party's silo key; None for the server, which has none
    sign: Sign | None

    def seal(
        self, value: Encoded, key: str, readers: Sequence[Reader]
    ) -> tuple[bytes, tuple[Lock, ...]]:
        """Seal `value` for `readers`.

        Raises:
            WireError: a reader did not sign its key.
        """
        sealed = encrypt(value.data)
        locks = []
        for reader in readers:
            if reader.name != SERVER and not vouched(reader, self.run, self.silos):
                raise wire.WireError(
                    f"the key for {reader.name[:80]!r} is not signed by {reader.name[:80]!r}: "
                    "refused"
                )
            binding = Binding(self.run, self.terms, self.name, key, reader.name, reader.step)
            locks.append(lock(sealed.key, value.digest, reader.key, binding, self.sign))
        return sealed.data, tuple(locks)

    def open(
        self, data: bytes | memoryview, lock: Lock | None, sender: str, key: str, step: int
    ) -> Encoded:
        """Open what `sender` sealed for this party.

        Raises:
            WireError: it does not open.
        """
        if lock is None:
            raise wire.WireError(f"value {key[:80]!r} of {sender[:80]} is not sealed: refused")
        binding = Binding(self.run, self.terms, sender, key, self.name, step)
        return unlock(
            lock,
            data,
            self.private,
            binding,
            None if sender == SERVER else self.silos.get(sender, ""),
        )


def encrypt(plain: bytes) -> Sealed:
    """Encrypt `plain` under a new key."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    key = ChaCha20Poly1305.generate_key()
    return Sealed(_in_pieces(ChaCha20Poly1305(key).encrypt, plain, _PIECE), key)


def _in_pieces(
    cipher: Callable[[bytes, memoryview, None], bytes], data: bytes | memoryview, length: int
) -> bytes:
    """Encrypt or decrypt pieces of this length. An empty value is one piece, too."""
    starts = range(0, max(1, len(data)), length)
    view = memoryview(data)
    return b"".join(
        cipher(i.to_bytes(12, "little"), view[at : at + length], None)
        for i, at in enumerate(starts)
    )


def lock(key: bytes, digest: str, reader: str, binding: Binding, sign: Sign | None) -> Lock:
    """Make the lock of an encrypted value, with its SHA-256 in hexadecimal, for one reader and
    purpose. WireError if the reader's key is none.
    """
    from cryptography.hazmat.primitives.asymmetric import x25519

    statement = _statement(binding, reader)
    try:
        public = x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(reader))
        wrapped = _hpke().encrypt(key + bytes.fromhex(digest), public, statement)
    except ValueError:
        raise wire.WireError(f"{reader[:80]!r} is not a key for seals: refused") from None
    signature = sign(_SEAL, _signed(statement, wrapped)) if sign else ""
    return Lock(binding.recipient, binding.step, reader, wrapped.hex(), signature)


def unlock(
    lock: Lock, data: bytes | memoryview, private: Any, binding: Binding, sender: str | None
) -> Encoded:
    """Open the value that `lock` is for.

    Args:
        lock: the lock that came with the value.
        data: the encrypted value.
        private: the reader's key.
        binding: what the reader expects the lock to be for.
        sender: public silo key of the party that must have signed the lock; "" if that party is not
            in the run; None if no signature is needed.

    Raises:
        WireError: value or lock were changed, made for something else, or made by somebody else.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    if lock.key != public_of(private):
        raise wire.WireError(
            f"value {binding.key[:80]!r} of {binding.sender[:80]} is sealed for another key than "
            f"{binding.recipient} has in this run: refused"
        )
    try:
        wrapped = bytes.fromhex(lock.wrapped)
        statement = _statement(binding, lock.key)
        if sender is not None and not (
            sender and keys.proves(sender, _SEAL, _signed(statement, wrapped), lock.signature)
        ):
            raise ValueError("not signed by the sender")
        inside = _hpke().decrypt(wrapped, private, statement)
        decrypt = ChaCha20Poly1305(inside[:_KEY_BYTES]).decrypt
        found = Encoded.of(_in_pieces(decrypt, data, _PIECE + _TAG))
        if found.digest != inside[_KEY_BYTES:].hex():
            raise ValueError("another value under the same key")
    # of the cipher, of HPKE or of the hexadecimal: all mean the same
    except Exception:
        raise wire.WireError(
            f"the seal of value {binding.key[:80]!r} from {binding.sender[:80]} to "
            f"{binding.recipient} for step "
            f"{binding.step + 1} is broken: changed, replayed, or made for somebody else: refused"
        ) from None
    return found


def vouched(reader: Reader, run: str, silos: Mapping[str, str]) -> bool:
    """Return whether the silo signed its key of this run."""
    public = silos.get(reader.name, "")
    said = key_text(run, reader.name, reader.key)
    return bool(public) and keys.proves(public, KEY, said, reader.proof)


def key_text(run: str, name: str, key: str) -> bytes:
    """Return what a silo signs about its key of a run."""
    return keys.canonical([run, name, key])


def new_private() -> Any:
    """Make a new X25519 key."""
    from cryptography.hazmat.primitives.asymmetric import x25519

    return x25519.X25519PrivateKey.generate()


def public_of(private: Any) -> str:
    """Return its public key, in hexadecimal."""
    return str(private.public_key().public_bytes_raw().hex())


def kept_secret(folder: Path, purpose: str) -> bytes:
    """Return 32 secret bytes for one purpose, the same at each call for a run with this folder. They
    follow from a file that only its owner can read.
    """
    file = folder / SECRET
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = write_once(file, secrets.token_bytes(_KEY_BYTES))
    except OSError as error:
        raise disk_error(error, file) from error
    if len(kept) != _KEY_BYTES:
        raise UserError(f"{file} is damaged: restore it, or start a new run")
    return hashlib.blake2b(purpose.encode(), key=kept, digest_size=_KEY_BYTES).digest()


def kept_private(folder: Path) -> Any:
    """Return a silo's X25519 key of the run with this folder."""
    from cryptography.hazmat.primitives.asymmetric import x25519

    return x25519.X25519PrivateKey.from_private_bytes(kept_secret(folder, "sealing"))


def _statement(binding: Binding, reader: str) -> bytes:
    return keys.canonical([asdict(binding), reader])


def _signed(statement: bytes, wrapped: bytes) -> bytes:
    """Return what a sender signs of a lock; without the key, it reveals nothing about the value."""
    return keys.canonical([statement.decode(), wrapped.hex()])


def stream(own: Any, other: str, text: bytes) -> Callable[[int], bytes]:
    """Return a function that gives the next bytes of a stream (ChaCha20) that two parties share,
    for one purpose.

    `other` is the other's public key, or WireError; `text` says what the stream is for.
    """
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import x25519
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        secret = own.exchange(x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(other)))
        key = HKDF(hashes.SHA256(), length=32, salt=None, info=text).derive(secret)
    except ValueError:
        raise wire.WireError(f"{other[:80]!r} is not a key for masks: refused") from None
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda length: cipher.update(bytes(length))


def _hpke() -> Any:
    from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

    return Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
