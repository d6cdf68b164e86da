"""Silo keys: elliptic-curve key pairs with which Flower's SuperNodes identify themselves, and proofs of names."""

import base64
import hashlib
import os
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError


def generate(private: Path) -> Path:
    """Make a key pair (P-384); the private key is readable by its owner only.

    Returns:
        The public key's file, next to the private one.
    """
    ec, serialization, _, _ = _cryptography()
    public = private.with_name(private.name + ".pub")
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    try:
        private.parent.mkdir(parents=True, exist_ok=True)
        write_secret(private, secret)
        public.write_bytes(
            key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH) + b"\n"
        )
    except FileExistsError:
        raise UserError(f"{private} exists: a silo keeps its key; remove the file to make another") from None
    except OSError as error:
        raise UserError(f"cannot write {private}: {error.strerror}") from None
    return public


def write_secret(path: Path, secret: bytes) -> None:
    """Write a new file that only its owner can read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)


def sign(private: Path, text: bytes) -> str:
    """Return the signature of `text` in hexadecimal."""
    ec, _, hashes, _ = _cryptography()
    return str(_load_private(private).sign(text, ec.ECDSA(hashes.SHA256())).hex())


def _load_private(private: Path) -> Any:
    ec, serialization, _, _ = _cryptography()
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), None)
    except OSError as error:
        raise UserError(f"cannot read the silo's key {private}: {error.strerror}") from None
    except Exception:
        raise UserError(f"{private} is not a private key: make one with `ekiden silo keys`") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{private} is not an elliptic-curve key: make one with `ekiden silo keys`")
    return key


def public_of(private: Path) -> str:
    """Return the public key of a private key, as one line of text."""
    _, serialization, _, _ = _cryptography()
    public = _load_private(private).public_key()
    text: bytes = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return text.decode()


def same(one: str, other: str) -> bool:
    """Return whether two lines hold the same public key; the rest of a line is a comment."""
    return one.split()[:2] == other.split()[:2]


def fingerprint(public: str) -> str:
    """Return a short name of a public key, as `ssh-keygen -l` shows it."""
    data = base64.b64decode(public.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def read_public(path: Path) -> str:
    """Return a public key from a file, as one line of text."""
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise UserError(f"there is no public key {path}: get it from the silo, `ekiden silo keys` made it") from None
    check(text)
    return text


def proves(public: str, text: bytes, signature: str) -> bool:
    """Return whether the holder of the key to `public` signed `text`."""
    ec, _, hashes, invalid = _cryptography()
    try:
        _load(public).verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA256()))
    except (invalid, ValueError):
        return False
    return True


def check(public: str) -> None:
    """Refuse text that is not a public key."""
    _load(public)


def _load(public: str) -> Any:
    ec, serialization, _, _ = _cryptography()
    try:
        key = serialization.load_ssh_public_key(public.encode())
    except Exception:
        raise UserError(f"{public[:40]!r} is not a public key: `ekiden silo keys` makes them") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError("a silo's key must be an elliptic-curve key: `ekiden silo keys` makes them")
    return key


def _cryptography() -> tuple[Any, Any, Any, Any]:
    """Import cryptography only when it is needed: it comes with the extra `flower`."""
    try:
        from cryptography.exceptions import InvalidSignature  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError:
        raise UserError("silo keys need the extra: pip install 'ekiden[flower]'") from None
    return ec, serialization, hashes, InvalidSignature
