"""Silo keys and certificates.

Silo keys are elliptic-curve key pairs with which Flower's SuperNodes identify themselves; they
prove silos' names. A certificate authority is made for one SuperLink, with that SuperLink's
certificate.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from shutil import rmtree
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, read_text, write
from ekiden.core.base.outside import require_extra

_AUTHORITY_DAYS = 3650
_DAYS = 365
_JOIN = "`ekiden silo join silo.toml roster.json` takes it from the coordinator's roster"
# bytes of a public key
_LONGEST = 1 << 14


def generate(private: Path) -> Path:
    """Make a key pair (P-384), the private key readable by its owner only; return the file of the
    public one.
    """
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    public = private.with_name(private.name + ".pub")
    key = ec.generate_private_key(ec.SECP384R1())
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    private.parent.mkdir(parents=True, exist_ok=True)
    write_secret(private, secret)
    write(public, [f"{public_of(private)}\n".encode()])
    return public


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder with keys in the block: complete, or not at all."""
    if folder.exists():
        raise UserError(f"{folder} exists: choose another folder; who has a key keeps it")
    try:
        yield
    except BaseException as error:
        rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(error, folder) from None
        raise


def write_secret(path: Path, secret: bytes) -> None:
    """Write a new file that only its owner can read."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secret)
    except FileExistsError:
        raise UserError(
            f"{path} exists: who has a key keeps it; remove the file to make another"
        ) from None
    except OSError as error:
        path.unlink(missing_ok=True)
        raise disk_error(error, path) from None


def sign(private: Path, kind: str, payload: bytes) -> str:
    """Return the signature, in hexadecimal, of what a party says; see `proves`."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    signed = _load_private(private).sign(_encoded(kind, payload), ec.ECDSA(hashes.SHA256()))
    return str(signed.hex())


def type_of(kind: str) -> str:
    """Return the media type of what is signed."""
    return f"application/vnd.ekiden.{kind}+json"


def canonical(values: Any) -> bytes:
    """Return plain values as JSON, the same bytes for the same values."""
    return json.dumps(values, separators=(",", ":"), sort_keys=True).encode()


def _encoded(kind: str, payload: bytes) -> bytes:
    """Return what is signed: DSSE's encoding of type and payload, so that a signature of one kind
    is none of another.

    https://github.com/secure-systems-lab/dsse/blob/v1.0.2/protocol.md
    """
    media = type_of(kind).encode()
    return b"DSSEv1 %d %b %d %b" % (len(media), media, len(payload), payload)


def _load_private(private: Path) -> Any:
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        secret = private.read_bytes()
        mode = private.stat().st_mode
    except OSError as error:
        raise UserError(f"cannot read the silo's key {private}: {error.strerror}") from None
    if os.name == "posix" and mode & 0o077:
        raise UserError(
            f"other users of this machine can read the silo's key: chmod 600 {private}, or make a "
            "new one"
        )
    try:
        key = serialization.load_ssh_private_key(secret, None)
    except Exception:
        raise UserError(
            f"{private} is not a private key: make one with `ekiden silo keys`"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{private} is not an elliptic-curve key: make one with `ekiden silo keys`")
    return key


def public_of(private: Path) -> str:
    """Return the public key of a private key, as one line of text."""
    from cryptography.hazmat.primitives import serialization

    public = _load_private(private).public_key()
    text: bytes = public.public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return text.decode()


def same(one: str, other: str) -> bool:
    """Return whether two lines hold the same public key; the rest of a line is a comment."""
    return one.split()[:2] == other.split()[:2]


def fingerprint(public: str) -> str:
    """Return a short name of a public key, as `ssh-keygen -l` shows it."""
    data = base64.b64decode(public.split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def read_public(path: Path, do: str = _JOIN) -> str:
    """Return a public key from a file, as one line of text; `do` gets the file if there is none."""
    try:
        text = read_text(path, _LONGEST).strip()
    except OSError:
        raise UserError(f"there is no public key {path}: {do}") from None
    check(text)
    return text


def proves(public: str, kind: str, payload: bytes, signature: str) -> bool:
    """Return whether the holder of the key to `public` signed a payload of this kind.

    All that silos sign is signed and checked in this way: greetings, keys of a run, seals,
    releases, and the entries of the chain of custody.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    signed = _encoded(kind, payload)
    how = ec.ECDSA(hashes.SHA256())
    try:
        check(public).verify(bytes.fromhex(signature), signed, how)
    except (InvalidSignature, ValueError):
        return False
    return True


def check(public: str) -> Any:
    """Return the key in a text that holds a public one; refuse any other text."""
    _require()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key = serialization.load_ssh_public_key(public.encode())
    except Exception:
        raise UserError(
            f"{public[:40]!r} is not a public key: `ekiden silo keys` makes them"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError("a silo's key must be an elliptic-curve key: `ekiden silo keys` makes them")
    return key


def _require() -> None:
    require_extra("flower", "silo keys", "cryptography")


def make_certificates(folder: Path, host: str) -> None:
    """Write an authority's `ca.key` and `ca.crt`, and the certificate of `renew`, into `folder`."""
    _require()
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(False, False, False, False, False, True, True, False, False), True),
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
    ]
    write_secret(folder / "ca.key", _pem(key))
    certificate = _issued("Ekiden federation", key, key, extensions, _AUTHORITY_DAYS)
    write(folder / "ca.crt", [certificate])
    renew(folder, host)


def renew(folder: Path, host: str) -> None:
    """Write a new `link.key` and `link.crt`, signed by the authority in `folder`, valid for a year.

    The certificate is for `host`, and for loopback, where the coordinator reaches the SuperLink.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        authority = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except OSError:
        raise UserError(
            f"there is no {folder / 'ca.key'}: who signed {folder / 'link.crt'} must sign a new one"
        ) from None
    except ValueError:
        raise UserError(f"{folder / 'ca.key'} is not a private key: restore it") from None
    server = ec.generate_private_key(ec.SECP384R1())
    extensions = [
        (
            x509.SubjectAlternativeName(
                [_x509_name(text) for text in dict.fromkeys((host, "localhost", "127.0.0.1"))]
            ),
            False,
        ),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    certificate = _issued("Ekiden SuperLink", server, authority, extensions, _DAYS)
    (folder / "link.key.new").unlink(missing_ok=True)
    write_secret(folder / "link.key.new", _pem(server))
    write(folder / "link.crt", [certificate])
    os.replace(folder / "link.key.new", folder / "link.key")


def valid_until(certificate: Path) -> datetime:
    """Return when the certificate in a file expires."""
    try:
        return end_of(certificate.read_bytes())
    except (OSError, ValueError):
        raise UserError(
            f"{certificate} is not a certificate: `ekiden federation rotate` makes a new one"
        ) from None


def end_of(pem: bytes) -> datetime:
    """Return when a certificate expires."""
    from cryptography import x509

    end: datetime = x509.load_pem_x509_certificate(pem).not_valid_after_utc
    return end


def _issued(
    subject: str, key: Any, signer: Any, extensions: Sequence[tuple[Any, bool]], days: int
) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(named(subject))
        .issuer_name(named("Ekiden federation"))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # clocks differ
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=days))
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    pem: bytes = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    return pem


def _pem(key: Any) -> bytes:
    from cryptography.hazmat.primitives import serialization

    secret: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret


def _x509_name(text: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
