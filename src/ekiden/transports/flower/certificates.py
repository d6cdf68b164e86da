"""Make a certificate authority for one SuperLink, and that SuperLink's certificate."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.transports.flower.keys import write_secret

_DAYS = 3650


def make(folder: Path, host: str) -> None:
    """Write `ca.crt`, `link.crt` and `link.key` into `folder`.

    The certificate is for `host`, and for loopback, where the coordinator reaches the SuperLink. The authority's own
    key is not kept, so it can never sign anything else.

    Args:
        folder: an existing folder.
        host: name or IP address at which silos reach the SuperLink.
    """
    try:
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
    except ImportError:
        raise UserError("certificates need the extra: pip install 'ekiden[flower]'") from None

    def named(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    def issue(subject: str, key: Any, signer: Any, extensions: Sequence[tuple[Any, bool]]) -> bytes:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("Ekiden federation"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # clocks differ
            .not_valid_after(now + timedelta(days=_DAYS))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        pem: bytes = builder.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        return pem

    authority, server = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    signs = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (x509.KeyUsage(False, False, False, False, False, True, True, False, False), True),
        (x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), False),
    ]
    names = [_name(x509, text) for text in dict.fromkeys((host, "localhost", "127.0.0.1"))]
    serves = [
        (x509.SubjectAlternativeName(names), False),
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), False),
    ]
    secret = server.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    write_secret(folder / "link.key", secret)
    write(folder / "ca.crt", [issue("Ekiden federation", authority, authority, signs)])
    write(folder / "link.crt", [issue("Ekiden SuperLink", server, authority, serves)])


def _name(x509: Any, text: str) -> Any:
    try:
        return x509.IPAddress(ip_address(text))
    except ValueError:
        return x509.DNSName(text)
