"""How a SuperLink is reached: with which certificate, and past which proxy."""

import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ekiden.core.base.errors import UserError
from ekiden.silos.trust import keys

Say = Callable[[str], None]
# days before its end from which a certificate is named
_SOON = 30
# seconds for a certificate
_WAIT = 3.0
_RENEW = "`ekiden federation rotate"
OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_link(address: str, certificate: Path | None, say: Say) -> None:
    """Refuse what is not a SuperLink's address, and one whose certificate is not here or has expired.

    The certificate is the PEM file of the authority that signed the SuperLink's own; None trusts
    the system's authorities.
    """
    check_address(address)
    if certificate is not None and not certificate.is_file():
        raise UserError(
            f"there is no certificate {certificate}: `ekiden silo join silo.toml roster.json` takes "
            "it from the coordinator's roster"
        )
    good, words = certificate_state(certificate_end(address))
    if not good:
        raise UserError(words)
    if _RENEW in words:
        say(words)


def check_address(address: str) -> None:
    """Refuse what is not a SuperLink's address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"{address!r} is not the address of a SuperLink: give HOST:PORT, such as "
            "link.example.org:8000"
        )


def certificate_end(address: str) -> datetime | None:
    """Return when the certificate of a SuperLink ends; None if nobody answers with one."""
    host, _, port = address.rpartition(":")
    try:
        pem = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_WAIT)
    except (OSError, ValueError):
        return None
    return keys.end_of(pem.encode())


def certificate_state(end: datetime | None, folder: str = "FOLDER") -> tuple[bool, str]:
    """Return whether a SuperLink's certificate that ends then is valid, and in words for how long;
    no words if nobody knows the end.
    """
    if end is None:
        return True, ""
    left = (end - datetime.now(UTC)).days
    renew = f"{_RENEW} {folder}` at the coordinator renews it, then start the SuperLink again"
    if left < 0:
        return False, f"the SuperLink's certificate has expired: {renew}"
    words = f"the SuperLink's certificate ends in {left} days"
    if left < _SOON:
        words += f": {renew}"
    return True, words


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to this machine away from a proxy; they name what they
    named before, too.
    """
    found = {}
    for name in ("NO_PROXY", "no_proxy"):
        named = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join([*named, *(host for host in OWN_HOSTS if host not in named)])
    return found
