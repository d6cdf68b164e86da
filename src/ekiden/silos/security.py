"""How a SuperLink is reached: with which certificate, and past which proxy."""

import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

from ekiden.core.base.errors import UserError
from ekiden.silos.trust import keys

Say = Callable[[str], None]
# days before its end from which a certificate is named
SOON = 30
# seconds for a certificate
_WAIT = 3.0
_RENEW = "`ekiden federation rotate` at the coordinator renews it"
_OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


def check_link(address: str, certificate: Path | None, say: Say) -> None:
    """Refuse what is not a SuperLink's address, and one whose certificate is not here or has expired.

    The certificate is the PEM file of the authority that signed the SuperLink's own; None trusts
    the system's authorities.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"{address!r} is not the address of a SuperLink: give HOST:PORT, such as "
            "link.example.org:8000"
        )
    if certificate is not None and not certificate.is_file():
        raise UserError(
            f"there is no certificate {certificate}: get the SuperLink's CA certificate first"
        )
    _check_date(address, say)


def certificate_end(address: str) -> datetime | None:
    """Return when the certificate of a SuperLink ends; None if nobody answers with one."""
    host, _, port = address.rpartition(":")
    try:
        pem = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_WAIT)
    except (OSError, ValueError):
        return None
    return keys.end_of(pem.encode())


def days_left(address: str) -> str:
    """Say for how many days a SuperLink's certificate is valid; nothing if that is not known."""
    left = _days(address)
    if left is None:
        return ""
    if left < 0:
        return f"; the SuperLink's certificate has expired: {_RENEW}"
    return f"; the SuperLink's certificate ends in {left} days"


def _days(address: str) -> int | None:
    """Return the whole days until a SuperLink's certificate ends; below 0 if it has ended."""
    end = certificate_end(address)
    return None if end is None else (end - datetime.now(UTC)).days


def _check_date(address: str, say: Say) -> None:
    """Refuse a SuperLink whose certificate has expired, and say if it soon will; nothing if nobody
    answers.
    """
    left = _days(address)
    if left is None:
        return
    if left < 0:
        raise UserError(f"the certificate of {address} has expired: {_RENEW}")
    if left < SOON:
        say(f"WARNING: the certificate of {address} ends in {left} days: {_RENEW}")


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to this machine away from a proxy; they name what they
    named before, too.
    """
    found = {}
    for name in ("NO_PROXY", "no_proxy"):
        named = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join([*named, *(host for host in _OWN_HOSTS if host not in named)])
    return found
